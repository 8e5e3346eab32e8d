"""The kernels on a real GPU, through each bridge, inside `jax.jit`: `PUREPAGE_TEST_GPU=1 pytest -m gpu`.

Every unused slot is NaN, the oracle is float64 NumPy, and what a program writes is compared over the whole pool.
"""

import importlib
import os
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from pairwise import case_id, pairwise

import purepage as pp
from purepage.bridges.execute import using_bridge
from purepage.functional.attention import paged_attention_call
from purepage.functional.target import current_target, using_settings
from purepage.kernels.pallas import hopper_reasons
from purepage.testing import assert_close, random_batch, reference_encoder_attention

ON_GPU = bool(os.environ.get("PUREPAGE_TEST_GPU")) and jax.default_backend() == "gpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU and PUREPAGE_TEST_GPU=1")]

BF16, F16, F32, E4M3, E5M2 = (
    np.dtype(d) for d in (ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
)
BRIDGES = ("callback", "jax_triton", "native", None)


def unavailable(bridge):
    return None if bridge in ("callback", None) else importlib.import_module(f"purepage.bridges.{bridge}").unavailable()


@pytest.fixture(params=BRIDGES, ids=lambda bridge: bridge or "automatic")
def bridge(request):
    if reason := unavailable(request.param):
        pytest.skip(reason)
    with using_bridge(request.param):
        yield request.param


GRID = pairwise(
    {
        "kind": ("mixed", "decode", "prefill", "cross"),
        "layout": (
            ("packed", "LBHNC"),
            ("packed", "LHBNC"),
            ("xpacked", "LHBNC"),
            ("xpacked_interleaved_v", "LBHNC"),
            ("shuffled", "LHBNC"),
            ("flash", "LBHNC"),
        ),
        "dtypes": ((BF16, BF16), (F16, F16), (BF16, E4M3), (F16, E5M2), (F32, F32)),
        "heads": ((16, 4), (8, 8), (10, 2), (40, 1)),
        "head_size": (128, 64, 80, 256),
        "block_size": (16, 64, 48, 544),
        "feature": ("plain", "window", "softcap", "alibi", "sinks", "qq_bias", "everything"),
        "output": ("model", "fp8"),
    }
)


def options_of(feature, heads, output):
    rng = np.random.default_rng(heads)
    each = {
        "window": {"sliding_window": 100},
        "softcap": {"logits_soft_cap": 5.0},
        "alibi": {"alibi_slopes": rng.uniform(0.01, 0.3, heads).astype(np.float32)},
        "sinks": {"sinks": rng.standard_normal(heads).astype(np.float32)},
        "qq_bias": {"qq_bias": rng.standard_normal((48, 40)).astype(np.float32)},
    }
    picked = {} if feature == "plain" else each.get(feature) or {k: v for options in each.values() for k, v in options.items()}
    return picked | ({"output_scale": 0.02, "output_dtype": E4M3} if output == "fp8" else {})


@pytest.mark.parametrize("case", GRID, ids=case_id)
def test_attention_is_the_oracles(case, bridge):
    heads, kv_heads = case["heads"]
    dtype, cache_dtype = case["dtypes"]
    batch = random_batch(
        1,
        kind=case["kind"],
        num_seqs=6,
        max_query_len=90,
        max_seq_len=700,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=case["head_size"],
        block_size=case["block_size"],
        dtype=dtype,
        cache_dtype=cache_dtype,
        scales="head",
        sliding_window=100 if case["feature"] in ("window", "everything") else None,
    )
    options = options_of(case["feature"], heads, case["output"])
    content, order = case["layout"]
    call = jax.jit(lambda q, c, m: pp.paged_attention(q, c, m, return_lse=True, implementation="triton", **options))
    out, lse = call(jnp.asarray(batch.query), batch.cache(content=content, order=order), batch.metadata)
    expected, expected_lse = batch.reference(**options)
    assert_close(out, expected, dtype=out.dtype, compute_dtype=dtype, what="out")
    assert_close(lse, expected_lse, dtype="lse", compute_dtype=dtype, what="lse")


def test_fp8_queries(bridge):
    batch = random_batch(2, num_seqs=6, max_query_len=40, max_seq_len=300, head_size=128, dtype=BF16, query_dtype=E4M3, cache_dtype=E4M3)
    call = jax.jit(lambda q, c, m: pp.paged_attention(q, c, m, q_scale=batch.q_scale, implementation="triton"))
    out = call(jnp.asarray(batch.query), batch.cache(), batch.metadata)
    assert_close(out, batch.reference()[0], dtype=BF16, compute_dtype=E4M3)


LAYOUTS = [
    ("packed", "LBHNC"),
    ("packed", "LHBNC"),
    ("xpacked", "LHBNC"),
    ("xpacked_interleaved_v", "LBHNC"),
    ("shuffled", "LBHNC"),
    ("flash", "LHBNC"),
]


@pytest.mark.parametrize("cache_dtype", [BF16, F16, F32, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_writes_are_in_place_and_bit_equal_to_plain_jax(layout, cache_dtype, bridge):
    """The donated buffer keeps its address, every other byte of the pool its value; without donation the old cache survives."""
    dtype = BF16 if cache_dtype.itemsize == 1 else cache_dtype
    batch = random_batch(
        3, num_seqs=8, max_query_len=64, max_seq_len=200, num_layers=2, head_size=128, dtype=dtype, cache_dtype=cache_dtype
    )
    cache = batch.cache_before(content=layout[0], order=layout[1])
    arguments = (jnp.asarray(batch.new_keys[1]), jnp.asarray(batch.new_values[1]), batch.metadata.slot_mapping)
    before = np.asarray(cache.data).copy()
    write = lambda c, k, v, s, implementation: pp.update_cache(c, k, v, s, layer=jnp.int32(1), implementation=implementation)  # noqa: E731
    expected = np.asarray(jax.jit(write, static_argnames="implementation")(cache, *arguments, implementation="xla").data)
    kept = jax.jit(write, static_argnames="implementation")(cache, *arguments, implementation="triton")
    np.testing.assert_array_equal(np.asarray(kept.data), expected)
    np.testing.assert_array_equal(np.asarray(cache.data), before)
    assert not np.array_equal(before, expected)
    address = cache.data.unsafe_buffer_pointer()
    donated = jax.jit(write, static_argnames="implementation", donate_argnums=0)(cache, *arguments, implementation="triton")
    np.testing.assert_array_equal(np.asarray(donated.data), expected)
    assert donated.data.unsafe_buffer_pointer() == address and cache.data.is_deleted()


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2], ids=str)
def test_every_bfloat16_value_under_many_scales_gets_the_code_of_an_exact_division(cache_dtype, bridge):
    """Infinities, NaN of both signs and both zeros among them; scales past the range of the short division, and negative ones.

    Which code a NaN has is each compiler's choice.
    """
    every = jnp.arange(1 << 16, dtype=jnp.uint16).view(jnp.bfloat16).reshape(64, 8, 128)
    spec = pp.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=8, head_size=128, dtype=cache_dtype)
    slots = jnp.asarray(np.random.default_rng(0).permutation(64), jnp.int32)
    write = jax.jit(
        lambda scale, implementation: (
            pp.update_cache(pp.init_cache(spec, k_scale=scale, v_scale=scale), every, every, slots, implementation=implementation).data
        ),
        static_argnums=1,
    )
    scales = [1.0, 0.5, 448.0, 1e-31, 1e34, -0.7, *10.0 ** np.random.default_rng(1).uniform(-6, 6, 60)]
    for scale in scales:
        ours, plain = (np.asarray(write(jnp.float32(scale), name)) for name in ("triton", "xla"))
        is_nan, plain_is_nan = (np.isnan(codes.view(cache_dtype).astype(np.float32)) for codes in (ours, plain))
        assert is_nan.any()
        np.testing.assert_array_equal(is_nan, plain_is_nan, err_msg=f"scale {scale}")
        np.testing.assert_array_equal(ours[~is_nan], plain[~is_nan], err_msg=f"scale {scale}")


@pytest.mark.parametrize("name", ["rope", "qk_norm", "mrope"])
@pytest.mark.parametrize("cache_dtype", [BF16, E4M3], ids=str)
def test_fused_writers_are_plain_jax_bit_for_bit(name, cache_dtype, bridge):
    rng = np.random.default_rng(5)
    batch = random_batch(
        5, num_seqs=8, max_query_len=64, max_seq_len=200, num_heads=8, num_kv_heads=2, head_size=128, dtype=BF16, cache_dtype=cache_dtype
    )
    tokens = batch.query.shape[0]
    table = jnp.asarray(rng.uniform(-1, 1, (256, 128)), BF16)
    positions = jnp.asarray(rng.integers(0, 256, (3, tokens)), jnp.int32)
    qkv = jnp.asarray(rng.standard_normal((tokens, 12 * 128)), BF16)
    query, key, value = (qkv[:, a * 128 : b * 128].reshape(tokens, -1, 128) for a, b in ((0, 8), (8, 10), (10, 12)))
    weights = [jnp.asarray(rng.uniform(0.5, 1.5, 128), BF16) for _ in range(2)]
    cache, slots = batch.cache_before(), batch.metadata.slot_mapping

    def call(implementation):
        if name == "rope":
            return pp.rope_and_update_cache(query, key, value, positions[0], table, cache, slots, implementation=implementation)
        if name == "qk_norm":
            return pp.qk_norm_rope_and_update_cache(
                qkv, *weights, positions[0], table, cache, slots, num_heads=8, implementation=implementation
            )
        return pp.qk_norm_mrope_and_update_cache(
            qkv, *weights, positions, table, cache, slots, num_heads=8, mrope_section=(24, 20, 20), implementation=implementation
        )

    for ours, plain in zip(
        jax.tree.leaves(jax.jit(lambda: call("triton"))()), jax.tree.leaves(jax.jit(lambda: call("xla"))()), strict=True
    ):
        ours, plain = np.asarray(ours), np.asarray(plain)
        if name == "rope" or ours.dtype.kind == "u":
            np.testing.assert_array_equal(ours, plain)
        else:  # the order of the sum in the norm may differ by a rounding
            assert_close(ours, np.asarray(plain, np.float64), dtype=ours.dtype)


def test_a_step_over_layers_is_in_place_and_right(bridge):
    """Write and attend in a scan over layers, in one donated program, as a decode step does; then in a while loop."""
    batch = random_batch(
        6, kind="decode", num_seqs=16, max_seq_len=500, num_layers=4, num_heads=16, num_kv_heads=4, head_size=128, dtype=BF16
    )
    cache, query = batch.cache_before(), jnp.asarray(batch.query)
    keys, values = jnp.asarray(batch.new_keys), jnp.asarray(batch.new_values)

    def layer(cache, index):
        cache = pp.update_cache(cache, keys[index], values[index], batch.metadata.slot_mapping, layer=index, implementation="triton")
        return cache, pp.paged_attention(query, cache, batch.metadata, layer=index, implementation="triton")

    step = jax.jit(lambda cache: jax.lax.scan(layer, cache, jnp.arange(4)), donate_argnums=0)
    address = cache.data.unsafe_buffer_pointer()
    assert step.lower(cache).compile().memory_analysis().temp_size_in_bytes < cache.nbytes // 8
    after, outs = step(cache)
    assert after.data.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.asarray(after.data), np.asarray(batch.cache().data))
    for index in range(4):
        assert_close(outs[index], batch.reference(index)[0], dtype=BF16, what=f"layer {index}")

    def body(state):
        index, cache, total = state
        cache, out = layer(cache, index)
        return index + 1, cache, total + out.astype(jnp.float32)

    start = (jnp.int32(0), batch.cache_before(), jnp.zeros(query.shape, jnp.float32))
    looped = jax.jit(lambda s: jax.lax.while_loop(lambda s: s[0] < 4, body, s), donate_argnums=0)(start)
    np.testing.assert_array_equal(np.asarray(looped[1].data), np.asarray(after.data))
    total = sum(np.asarray(out, np.float32) for out in outs)
    np.testing.assert_allclose(np.asarray(looped[2])[: batch.num_tokens], total[: batch.num_tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", BRIDGES[1:], ids=lambda bridge: bridge or "automatic")
def test_bridges_give_the_same_bits(other):
    if reason := unavailable(other):
        pytest.skip(reason)
    batch = random_batch(
        7, num_seqs=8, max_query_len=64, max_seq_len=600, num_heads=16, num_kv_heads=4, head_size=128, dtype=BF16, cache_dtype=E4M3
    )
    outs = []
    for name in ("callback", other):
        with using_bridge(name):
            call = jax.jit(lambda q, c, m: pp.paged_attention(q, c, m, implementation="triton"))
            outs.append(np.asarray(call(jnp.asarray(batch.query), batch.cache(), batch.metadata)))
    np.testing.assert_array_equal(*outs)


def test_captured_programs_see_new_inputs(bridge):
    """A command buffer that replays a stale launch (SageAttention#371, vllm#13922) gives the first call's answer."""
    batches = [
        random_batch(seed, num_seqs=6, max_query_len=32, max_seq_len=300, head_size=128, num_layers=8, dtype=BF16) for seed in range(3)
    ]

    @jax.jit
    def layers(query, cache, metadata):
        return [pp.paged_attention(query, cache, metadata, layer=i, implementation="triton") for i in range(8)]

    for _ in range(3):
        for batch in batches:
            outs = layers(jnp.asarray(batch.query), batch.cache(), batch.metadata)
            assert_close(outs[5], batch.reference(5)[0], dtype=BF16)


def test_encoder_attention_and_merging(bridge):
    rng = np.random.default_rng(8)
    lengths = [130, 1, 77, 300]
    query, key, value = (rng.standard_normal((sum(lengths), h, 128)).astype(BF16) for h in (8, 2, 2))
    metadata = pp.make_metadata(lengths, lengths, np.zeros((4, 0), np.int64), block_size=16, causal=False)
    call = jax.jit(partial(pp.encoder_attention, implementation="triton"), static_argnames=("sliding_window", "causal", "logits_soft_cap"))
    for options in ({}, {"sliding_window": 50}, {"causal": True, "logits_soft_cap": 4.0}):
        out = call(*map(jnp.asarray, (query, key, value)), metadata, **options)
        assert_close(out, reference_encoder_attention(query, key, value, metadata.query_start_loc, **options)[0], dtype=BF16)


def test_a_pool_past_int32_elements():
    """int32 block strides: a block that starts past 2**31 elements is written and read where it lies."""
    spec = pp.CacheSpec(num_blocks=(1 << 31) // (16 * 8 * 256) + 64, block_size=16, num_kv_heads=8, head_size=128, dtype=jnp.bfloat16)
    assert spec.size > 2**31
    last = spec.num_blocks - 1
    metadata = pp.make_metadata([16], [16], np.array([[last]]), block_size=16)
    key, value = (jax.random.normal(jax.random.key(i), (16, 8, 128), jnp.bfloat16) for i in range(2))
    cache = jax.jit(lambda c, k, v: pp.update_cache(c, k, v, metadata.slot_mapping, implementation="triton"), donate_argnums=0)(
        pp.init_cache(spec), key, value
    )
    assert not np.any(np.asarray(cache.data[0, :8]))
    out = pp.paged_attention(key, cache, metadata, implementation="triton")
    plain = pp.paged_attention(key, cache, metadata, implementation="xla")
    assert_close(out, np.asarray(plain, np.float64), dtype=BF16)
    small = replace(spec, num_blocks=1)
    again = pp.update_cache(pp.init_cache(small), key, value, jnp.arange(16), implementation="xla")
    np.testing.assert_array_equal(np.asarray(cache.data[0, last]), np.asarray(again.data[0, 0]))


HOPPER = {
    "prompts": {"query_lens": [200, 70, 1, 3, 129, 0, 65], "seq_lens": [500, 70, 300, 3, 129, 0, 700]},
    "window": {"options": {"sliding_window": 100}},
    "cap and sinks": {"options": {"logits_soft_cap": 5.0, "sinks": np.array([0.5, -1, 2, 20], np.float32)}},
    "head size 64": {"head_size": 64},
    "head size 256": {"head_size": 256},
    "blocks of 128": {"block_size": 128},
    "flash, blocks of 256": {"block_size": 256, "content": "flash"},
    "float16": {"dtype": F16},
    "key ranges": {"key_range": True},
    "NaN in the newest key": {"poison_newest": True},
    "one KV head": {"num_heads": 10, "num_kv_heads": 1, "options": {"scale": 0.3}},
}


@pytest.mark.parametrize("name", HOPPER)
def test_the_hopper_kernel_is_the_oracles(name):
    made: dict[str, Any] = {
        "query_lens": [200, 300],
        "seq_lens": [700, 300],
        "head_size": 128,
        "block_size": 64,
        "dtype": BF16,
        **HOPPER[name],
    }
    options, content = dict(made.pop("options", {})), made.pop("content", "packed")
    batch = random_batch(3, kind="prefill", num_layers=2, sliding_window=options.get("sliding_window"), **made)
    options |= batch.masks
    with using_settings(pallas_hopper=True):
        call = paged_attention_call(jnp.asarray(batch.query), batch.cache(content=content), batch.metadata, layer=1, **options)
        if reasons := hopper_reasons(call, current_target()):
            pytest.skip("; ".join(reasons))
        attend = jax.jit(lambda *arrays: pp.paged_attention(*arrays, layer=1, return_lse=True, implementation="pallas", **options))
        out, lse = attend(batch.query, batch.cache(content=content), batch.metadata)
    expected, expected_lse = batch.reference(layer=1, **options)
    poisoned = {"equal_nan": made.get("poison_newest", False)}
    assert_close(lse, expected_lse, dtype="lse", compute_dtype=out.dtype, **poisoned)
    assert_close(out, np.asarray(expected, np.float64), dtype=out.dtype, lse=expected_lse, **poisoned)
