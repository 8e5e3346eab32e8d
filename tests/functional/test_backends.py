"""The two backends against the oracle: forward, the writers, what profiling gives, and what is refused instead of ignored."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rocm_attn_rule import expected_of_rocm_attn

import purepage as pp
from purepage.testing import assert_close, random_batch, reference_attention, reference_encoder_attention

ROCM, UNIFIED = pp.rocm_attn, pp.rocm_aiter_unified_attn
BACKENDS = pytest.mark.parametrize("backend", [ROCM, UNIFIED], ids=lambda b: b.CAPABILITIES.name)
ENCODER_TYPES = pytest.mark.parametrize("attn_type", [pp.AttentionType.ENCODER, pp.AttentionType.ENCODER_ONLY], ids=lambda t: t.name)
F32, F16, BF16 = np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
E4M3, E4M3Z, E5M2 = (np.dtype(getattr(ml_dtypes, f"float8_{kind}")) for kind in ("e4m3fn", "e4m3fnuz", "e5m2"))
SINKS = np.linspace(-1.5, 1.5, 4).astype(np.float32)
SLOPES = np.array([0.5, 0.25, 0.125, -0.1], np.float32)
XPACKED = {"content": "xpacked", "order": "LHBNC"}


def config(**changes):
    return pp.AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 32, **changes})


def own_layout(backend):
    return {"content": backend.CAPABILITIES.contents[0], "order": backend.CAPABILITIES.layouts[0]}


def forward(backend, batch, made, *, key=True, layout=None, jit=False, **options):
    dense = (jnp.asarray(batch.key), jnp.asarray(batch.value)) if key else (None, None)
    cache = batch.cache(**(layout or own_layout(backend)))

    def call(query, key, value, cache, metadata):
        return backend.forward(query, key, value, cache, metadata, made, implementation="xla", **options)

    return (jax.jit(call) if jit else call)(jnp.asarray(batch.query), *dense, cache, batch.metadata)


FORWARDS = {
    # backend, batch, layout, options of the layer
    "rocm-f32-all": (
        ROCM,
        {"sliding_window": 9},
        XPACKED,
        {"sliding_window": 9, "logits_soft_cap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS, "scale": 0.3},
    ),
    "rocm-bf16-interleaved": (ROCM, {"dtype": BF16}, {"content": "xpacked_interleaved_v", "order": "LBHNC"}, {"logits_soft_cap": 3.0}),
    "rocm-not-causal": (ROCM, {"causal": False}, XPACKED, {"sliding_window": 4, "sinks": SINKS}),
    "unified-f16-all": (
        UNIFIED,
        {"dtype": F16, "sliding_window": 9},
        {"order": "LHBNC"},
        {"sliding_window": 9, "logits_soft_cap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS},
    ),
    "unified-shuffled-decode": (UNIFIED, {"dtype": BF16, "kind": "decode"}, {"content": "shuffled", "order": "LHBNC"}, {}),
    "unified-cross": (UNIFIED, {"kind": "cross"}, {"content": "flash"}, {"attn_type": pp.AttentionType.ENCODER_DECODER, "sinks": SINKS}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", FORWARDS)
def test_forward_equals_the_oracle(case):
    backend, made, layout, options = FORWARDS[case]
    batch = random_batch(1, **made)
    given = {name: value for name, value in options.items() if name != "attn_type"}
    out = forward(backend, batch, config(**options), layout=layout, key=made.get("kind") != "cross", jit=True)
    assert_close(out, batch.reference(**given)[0], dtype=batch.query.dtype)
    assert not np.any(np.asarray(out[batch.num_tokens :], np.float32))


def test_both_backends_agree_over_an_unquantized_cache():
    batch = random_batch(2, sliding_window=7)
    made = config(sliding_window=7, sinks=SINKS)
    rocm, unified = (np.asarray(forward(backend, batch, made)) for backend in (ROCM, UNIFIED))
    np.testing.assert_allclose(rocm, unified, rtol=0, atol=3e-6)
    assert_close(rocm, batch.reference(sliding_window=7, sinks=SINKS)[0], dtype=F32)


FP8 = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 5}, {"sliding_window": 5}),
    "alibi-sinks-cap": ({}, {"alibi_slopes": SLOPES, "sinks": SINKS, "logits_soft_cap": 3.0}),
    "not-causal": ({"causal": False}, {"sinks": SINKS}),
    "decode-window": ({"kind": "decode"}, {"sliding_window": 3, "alibi_slopes": SLOPES}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", FP8)
def test_rocm_attn_attends_new_tokens_at_full_precision_beside_an_fp8_cache(case):
    made, options = FP8[case]
    batch = random_batch(3, cache_dtype=E4M3, scales="head", **made)
    out = forward(ROCM, batch, config(**options, kv_cache_dtype="fp8"))
    assert_close(out, expected_of_rocm_attn(batch, **options), dtype=F32)
    if made.get("kind") != "decode":  # the rounded copies in the cache are far beyond the tolerance
        with pytest.raises(AssertionError):
            assert_close(out, batch.reference(**options)[0], dtype=F32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("cache_dtype", [F32, E4M3], ids=str)
@pytest.mark.parametrize("kind", ["chunked", "decode", "mixed"])
def test_the_number_of_query_tokens_decides_where_rocm_attn_reads_new_tokens(kind, cache_dtype, implementation):
    """Keys and values that differ from the cache's, quantized or not: vLLM's prefix prefill reads the arguments, its decode the cache."""
    batch = random_batch(18, kind=kind, cache_dtype=cache_dtype)
    cache = batch.cache(**XPACKED)
    other = replace(batch, new_keys=batch.new_keys[:, ::-1].copy(), new_values=batch.new_values * 5 + 1)
    other.new_keys[:, batch.num_tokens :] = np.nan
    other.new_keys[:, : batch.num_tokens] = batch.new_keys[:, : batch.num_tokens][:, ::-1]
    arrays = [jnp.asarray(side) for side in (other.query, other.key, other.value)]
    out = jax.jit(lambda *a: ROCM.forward(*a, config(), implementation=implementation))(*arrays, cache, batch.metadata)
    assert_close(out, expected_of_rocm_attn(other), dtype=F32)
    read = jax.jit(lambda *a: UNIFIED.forward(*a, config(), implementation=implementation))
    assert_close(read(*arrays, batch.cache(), batch.metadata), batch.reference()[0], dtype=F32)


def test_a_derivative_through_new_tokens_is_refused():
    batch = random_batch(22)
    query, key, value = (jnp.asarray(side) for side in (batch.query, batch.key, batch.value))
    for place, given in enumerate((query, key, value)):

        def total(array, place=place):
            sides = [query, key, value]
            sides[place] = array
            return ROCM.forward(*sides, batch.cache(**XPACKED), batch.metadata, config(), implementation="xla").sum()

        with pytest.raises(pp.UnsupportedError, match="derivatives"):
            jax.grad(total)(given)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_three_new_tokens_are_the_arguments_and_one_is_the_caches(cache_dtype):
    spec = ROCM.cache_spec(num_blocks=4, num_kv_heads=2, head_size=32, dtype=jnp.float32, kv_cache_dtype=cache_dtype)
    ones = jnp.ones((1, 4, 16, 2, 32), spec.dtype)
    cache = pp.cache_from_logical(spec, ones, ones)
    for tokens, expected in ((3, 7), (1, 1)):
        metadata = pp.make_metadata([tokens], [tokens], [[0]], block_size=16)
        key = jnp.full((tokens, 2, 32), 7.0)
        out = ROCM.forward(jnp.ones((tokens, 4, 32)), key, key, cache, metadata, config(), implementation="xla")
        np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("backend", [ROCM, UNIFIED], ids=["ROCM_ATTN-key-None", "ROCM_AITER_UNIFIED_ATTN-key-given"])
def test_everything_else_reads_the_fp8_cache(backend):
    batch = random_batch(3, cache_dtype=E5M2, scales="layer")
    out = forward(backend, batch, config(kv_cache_dtype="fp8_e5m2", sinks=SINKS), key=backend is UNIFIED)
    assert_close(out, batch.reference(sinks=SINKS)[0], dtype=F32)


def test_new_tokens_never_pass_through_a_narrower_unquantized_cache():
    batch = random_batch(4, cache_dtype=BF16)
    assert_close(forward(ROCM, batch, config()), expected_of_rocm_attn(batch), dtype=F32)


def test_nan_of_one_sequence_stays_in_it_beside_an_fp8_cache():
    batch = random_batch(6, cache_dtype=E4M3, kind="chunked")
    key = batch.new_keys.copy()
    starts = np.asarray(batch.metadata.query_start_loc)
    key[0, starts[1] + 1] = np.nan
    out = np.asarray(forward(ROCM, replace(batch, new_keys=key), config()))
    expected = batch.reference(step_key=batch.key, step_value=batch.value)[0]
    expected[starts[1] + 1 : starts[2]] = np.nan  # the token itself and its successors; those before it do not see it
    assert_close(out, expected, dtype=F32, equal_nan=True)


def test_unified_takes_fp8_queries_and_gives_fp8_outputs():
    batch = random_batch(7, dtype=BF16, query_dtype=E4M3, cache_dtype=E4M3)
    out = forward(UNIFIED, batch, config(), q_scale=batch.q_scale)
    assert_close(out, batch.reference()[0], dtype=BF16)
    quantized = forward(UNIFIED, batch, config(), q_scale=batch.q_scale, output_scale=0.02)
    assert_close(quantized, batch.reference(output_scale=0.02)[0], dtype=E4M3)


def test_a_layer_that_shares_a_cache_reads_its_owners_layer():
    batch = random_batch(8, num_layers=3, kind="decode")
    out = forward(UNIFIED, batch, config(), layer=2)
    assert_close(out, batch.reference(2)[0], dtype=F32)


def test_built_metadata_serves_like_plain_metadata():
    batch = random_batch(9)
    for prefix in (0, 16):  # vLLM 0.33 ignores the prefix
        built = replace(batch, metadata=UNIFIED.build(prefix, batch.metadata))
        assert_close(forward(UNIFIED, built, config()), batch.reference()[0], dtype=F32)
    captured = forward(ROCM, replace(batch, metadata=ROCM.build_for_cudagraph_capture(batch.metadata)), config())
    assert not np.any(np.asarray(captured))  # no queries: every token is padding


@pytest.mark.parametrize("attn_type", list(pp.AttentionType))
@BACKENDS
def test_a_profiling_run_comes_before_every_check_of_layer_and_cache(backend, attn_type):
    """As in the classes: zeros before any cache exists, whatever the layer; only the refusal of a block scale comes earlier."""
    batch = random_batch(0, dtype=BF16)
    query, key, value = (jnp.asarray(side) for side in (batch.query, batch.key, batch.value))
    made = config(attn_type=attn_type, alibi_slopes=SLOPES, kv_cache_dtype="fp8")
    for given in ((None, None), (key, value)):
        out = backend.forward(query, *given, None, None, made, q_scale=0.5)
        assert out.shape == query.shape and out.dtype == BF16 and not np.any(np.asarray(out, np.float32))
    assert backend.forward(query, None, None, None, None, made, output_scale=0.5).dtype == E4M3
    with pytest.raises(pp.UnsupportedError, match="output_block_scale"):
        backend.forward(query, key, value, None, None, made, output_block_scale=1.0)


@BACKENDS
def test_writers_without_slots_write_nothing(backend):
    batch = random_batch(0, dtype=BF16)
    key, value, made = jnp.asarray(batch.key), jnp.asarray(batch.value), config()
    for cache in (None, batch.cache(**own_layout(backend))):
        assert backend.kv_cache_update(key, value, cache, None, made) is cache
        q, k, same = backend.rope_and_kv_cache_update(key, key, value, None, None, cache, None, made)
        assert q is key and k is key and same is cache
        qkv, ones = jnp.ones((6, 8 * 32)), jnp.ones(32)
        q, k, v, same = backend.qk_norm_rope_and_kv_cache_update(qkv, ones, ones, jnp.arange(6), jnp.ones((8, 32)), cache, None, made)
        assert (q.shape, k.shape, v.shape) == ((6, 4, 32), (6, 2, 32), (6, 2, 32))
        assert not np.any(np.asarray(q)) and not np.any(np.asarray(k)) and np.all(np.asarray(v) == 1) and same is cache
    with pytest.raises(ValueError, match="qkv"):
        backend.qk_norm_rope_and_kv_cache_update(jnp.ones((6, 100)), None, None, None, None, None, None, made)


def test_the_scale_of_a_query_that_is_not_fp8_is_ignored():
    batch = random_batch(19, dtype=BF16)
    for backend in (ROCM, UNIFIED):
        plain = forward(backend, batch, config())
        np.testing.assert_array_equal(plain, forward(backend, batch, config(), q_scale=0.5))
        arrays = [jnp.asarray(side) for side in (batch.query, batch.key, batch.value)]
        traced = jax.jit(
            lambda scale, b=backend, a=arrays: b.forward(*a, batch.cache(**own_layout(b)), batch.metadata, config(), q_scale=scale)
        )
        np.testing.assert_array_equal(plain, traced(jnp.float32(0.25)))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_rocm_attn_takes_an_fp8_query_of_scale_one(implementation):
    batch = random_batch(20, dtype=BF16, query_dtype=E4M3, cache_dtype=E4M3)
    arrays = [jnp.asarray(side) for side in (batch.query, batch.key, batch.value)]
    for q_scale in (None, 1.0):
        out = ROCM.forward(*arrays, batch.cache(**XPACKED), batch.metadata, config(), q_scale=q_scale, implementation=implementation)
        assert out.dtype == BF16
        assert_close(out, expected_of_rocm_attn(batch, q_scale=1.0), dtype=BF16)
    with pytest.raises(pp.UnsupportedError, match="q_scale"):
        jax.jit(lambda s: ROCM.forward(*arrays, batch.cache(**XPACKED), batch.metadata, config(), q_scale=s))(1.0)


# --- encoders


ENCODERS = {
    "window-1": {"sliding_window": 1},
    "window-cap-sinks": {"sliding_window": 3, "logits_soft_cap": 2.0, "sinks": SINKS, "scale": 0.5},
}


@pytest.mark.parametrize("case", ENCODERS)
@BACKENDS
def test_encoders_attend_their_own_tokens_both_ways(backend, case):
    batch = random_batch(10, kind="prefill")
    options = ENCODERS[case]
    made = config(attn_type=pp.AttentionType.ENCODER_ONLY, **options)
    query, key, value = (jnp.asarray(a) for a in (batch.query, batch.key, batch.value))
    out = backend.forward(query, key, value, None, batch.metadata, made, implementation="xla")
    expected, _ = reference_encoder_attention(batch.query, batch.key, batch.value, batch.metadata.query_start_loc, **options)
    assert_close(out, expected, dtype=F32)


@ENCODER_TYPES
@BACKENDS
def test_writers_do_nothing_for_encoders(backend, attn_type):
    batch = random_batch(11)
    made, cache = config(attn_type=attn_type), batch.cache(**own_layout(backend))
    key, value, slots = jnp.asarray(batch.key), jnp.asarray(batch.value), batch.metadata.slot_mapping
    assert backend.kv_cache_update(key, value, cache, slots, made) is cache
    q, k, same = backend.rope_and_kv_cache_update(key, key, value, jnp.zeros(len(key), jnp.int32), jnp.ones((4, 32)), cache, slots, made)
    assert q is key and k is key and same is cache


@ENCODER_TYPES
@BACKENDS
def test_qk_norm_writers_normalise_and_rotate_encoders_and_write_nothing(backend, attn_type):
    """The classes' early return of encoders stands in the plain and the rope writer alone."""
    x = writer_inputs(21)
    spec = pp.CacheSpec(num_blocks=3, block_size=16, num_kv_heads=2, head_size=32, dtype=jnp.float32)
    made, common = config(attn_type=attn_type), {"is_neox": False, "eps": 1e-3, "implementation": "xla"}
    normed = (x["qkv"], x["q_weight"], x["k_weight"])
    for cache, slots in (
        (None, None),
        (None, x["slots"]),
        (backend.init_cache(backend.cache_spec(num_blocks=2, num_kv_heads=2, head_size=32)), x["slots"]),
    ):
        *parts, same = backend.qk_norm_rope_and_kv_cache_update(*normed, x["positions"][0], x["cos_sin"], cache, slots, made, **common)
        assert same is cache
        wanted = pp.qk_norm_rope_and_update_cache(
            *normed, x["positions"][0], x["cos_sin"], pp.init_cache(spec), x["slots"], num_heads=4, **common
        )
        for mine, other in zip(parts, wanted[:3], strict=True):
            np.testing.assert_array_equal(mine, other)
    if backend is UNIFIED:
        sections = {"mrope_section": (3, 3, 2)}
        arguments = (*normed, x["positions"], x["cos_sin"])
        *parts, same = backend.qk_norm_mrope_and_kv_cache_update(*arguments, None, None, made, **sections, **common)
        wanted = pp.qk_norm_mrope_and_update_cache(*arguments, pp.init_cache(spec), x["slots"], num_heads=4, **sections, **common)
        assert same is None
        for mine, other in zip(parts, wanted[:3], strict=True):
            np.testing.assert_array_equal(mine, other)


# --- the writers write what the public functions write


def writer_inputs(seed):
    rng = np.random.default_rng(seed)
    tokens, heads, kv_heads, size = 6, 4, 2, 32
    return {
        "qkv": jnp.asarray(rng.standard_normal((tokens, (heads + 2 * kv_heads) * size)), jnp.float32),
        "q_weight": jnp.asarray(rng.uniform(0.5, 1.5, size), jnp.float32),
        "k_weight": jnp.asarray(rng.uniform(0.5, 1.5, size), jnp.float32),
        "cos_sin": jnp.asarray(rng.uniform(-1, 1, (20, 16)), jnp.float32),
        "positions": jnp.asarray(rng.integers(0, 20, (3, tokens)), jnp.int32),
        "slots": jnp.array([3, -1, 17, 40, 16, 10_000], jnp.int32),
    }


@BACKENDS
def test_writers_equal_the_functions_that_they_name(backend):
    spec = backend.cache_spec(num_blocks=3, num_kv_heads=2, head_size=32, block_size=16, num_layers=2, kv_cache_dtype="fp8")
    cache = backend.init_cache(spec, k_scale=[0.5, 0.25], v_scale=2.0)
    made, x = config(kv_cache_dtype="fp8"), writer_inputs(12)
    heads = x["qkv"].reshape(6, -1, 32)
    query, key, value = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    common = {"layer": 1, "implementation": "xla"}
    rope = {"is_neox": False, **common}
    pairs = [
        (
            backend.kv_cache_update(key, value, cache, x["slots"], made, **common),
            pp.update_cache(cache, key, value, x["slots"], **common),
        ),
        (
            backend.rope_and_kv_cache_update(query, key, value, x["positions"][0], x["cos_sin"], cache, x["slots"], made, **rope),
            pp.rope_and_update_cache(query, key, value, x["positions"][0], x["cos_sin"], cache, x["slots"], **rope),
        ),
    ]
    normed = (x["qkv"], x["q_weight"], x["k_weight"])
    rest = (x["cos_sin"], cache, x["slots"])
    pairs.append(
        (
            backend.qk_norm_rope_and_kv_cache_update(*normed, x["positions"][0], *rest, made, eps=1e-3, **rope),
            pp.qk_norm_rope_and_update_cache(*normed, x["positions"][0], *rest, num_heads=4, eps=1e-3, **rope),
        )
    )
    if backend is UNIFIED:
        sections = {"mrope_section": (3, 3, 2), "is_interleaved": True}
        pairs.append(
            (
                backend.qk_norm_mrope_and_kv_cache_update(*normed, x["positions"], *rest, made, **sections, **rope),
                pp.qk_norm_mrope_and_update_cache(*normed, x["positions"], *rest, num_heads=4, **sections, **rope),
            )
        )
    for mine, public in pairs:
        assert jax.tree.structure(mine) == jax.tree.structure(public)
        for left, right in zip(jax.tree.leaves(mine), jax.tree.leaves(public), strict=True):
            np.testing.assert_array_equal(left, right)
        written = np.asarray((mine if isinstance(mine, pp.KVCache) else mine[-1]).data)
        assert np.any(written != np.asarray(cache.data))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
@BACKENDS
def test_fp8_keys_and_values_are_stored_as_bits(backend, name):
    """All 256 codes, under scales that a model-dtype value would be divided by; a value of a model dtype is quantized beside them."""
    dtype = jnp.dtype(name)
    spec = backend.cache_spec(num_blocks=2, num_kv_heads=2, head_size=32, block_size=16, kv_cache_dtype=name)
    cache = backend.init_cache(spec, k_scale=[[0.5, 3.0]], v_scale=0.25)
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype).reshape(4, 2, 32)
    slots = jnp.array([17, -1, 3, 31], jnp.int32)
    written = backend.kv_cache_update(codes, codes, cache, slots, config(), implementation="xla")
    assert written.spec == spec and np.array_equal(written.k_scale, cache.k_scale) and np.array_equal(written.v_scale, cache.v_scale)
    rows = np.array([0, 2, 3])
    for stored in pp.cache_to_logical(written):
        kept = np.asarray(stored).reshape(32, 2, 32)[np.asarray(slots)[rows]]
        given = np.asarray(codes)[rows]
        nan = np.isnan(given.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(kept.astype(np.float32)), nan)
        np.testing.assert_array_equal(kept.view(np.uint8)[~nan], given.view(np.uint8)[~nan])
    value = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 32)), jnp.bfloat16)
    mixed = backend.kv_cache_update(codes, value, cache, slots, config(), implementation="xla")
    plain = backend.kv_cache_update(value, value, cache, slots, config(), implementation="xla")
    np.testing.assert_array_equal(*(np.asarray(pp.cache_to_logical(c)[1]).view(np.uint8) for c in (mixed, plain)))
    np.testing.assert_array_equal(*(np.asarray(pp.cache_to_logical(c)[0]).view(np.uint8) for c in (mixed, written)))


@BACKENDS
def test_fp8_keys_of_another_kind_than_the_caches_are_refused(backend):
    rows, slots = jnp.ones((1, 2, 32), jnp.float8_e5m2), jnp.zeros(1, jnp.int32)
    for name in ("auto", "fp8"):
        cache = backend.init_cache(backend.cache_spec(num_blocks=2, num_kv_heads=2, head_size=32, kv_cache_dtype=name))
        with pytest.raises(TypeError, match="key"):
            backend.kv_cache_update(rows, rows, cache, slots, config())


def test_the_fused_mrope_writer_is_the_unified_backends_alone():
    assert UNIFIED.CAPABILITIES.fused_qk_norm_mrope_kvcache and not hasattr(ROCM, "qk_norm_mrope_and_kv_cache_update")


def test_cross_attention_writes_the_encoders_tokens_once_and_attends_them_all():
    rng, made = np.random.default_rng(23), config(attn_type="encoder_decoder")
    spec = UNIFIED.cache_spec(num_blocks=5, num_kv_heads=2, head_size=32, block_size=16, dtype=jnp.float32)
    lens, table = np.array([20, 5]), np.array([[3, 1], [4, -1]])
    keys, values = rng.standard_normal((2, 25, 2, 32)).astype(np.float32)
    stored = np.zeros((2, 5, 16, 2, 32), np.float32)
    row = 0
    for sequence, length in enumerate(lens):
        for place in range(length):
            stored[:, table[sequence, place // 16], place % 16] = keys[row], values[row]
            row += 1
    first = pp.cross_metadata([3, 1], lens, table, block_size=16, write=True)
    cache = UNIFIED.kv_cache_update(keys, values, UNIFIED.init_cache(spec), first.slot_mapping, made, implementation="xla")
    np.testing.assert_array_equal(np.stack(pp.cache_to_logical(cache)), stored)
    later = pp.cross_metadata([1, 2], lens, table, block_size=16, write=False)
    assert UNIFIED.kv_cache_update(keys[:0], values[:0], cache, later.slot_mapping, made, implementation="xla").spec == spec
    for metadata, given in ((first, (keys, values)), (later, (None, None))):
        starts = np.asarray(metadata.query_start_loc)
        query = rng.standard_normal((starts[-1], 4, 32)).astype(np.float32)
        out = UNIFIED.forward(jnp.asarray(query), *given, cache, metadata, made, implementation="xla")
        assert_close(out, reference_attention(query, *stored, starts, lens, table, causal=False)[0], dtype=F32)


def test_a_step_is_write_then_attend_in_one_jit():
    """The cache as a writer finds it, NaN where this step's tokens go, written and read back under donation."""
    batch = random_batch(13, cache_dtype=E4M3)

    @jax.jit
    def step(cache, query, key, value, metadata):
        cache = ROCM.kv_cache_update(key, value, cache, metadata.slot_mapping, config(), implementation="xla")
        return ROCM.forward(query, None, None, cache, metadata, config(), implementation="xla"), cache

    out, cache = step(batch.cache_before(**XPACKED), *(jnp.asarray(a) for a in (batch.query, batch.key, batch.value)), batch.metadata)
    assert_close(out, batch.reference()[0], dtype=F32)
    np.testing.assert_array_equal(np.asarray(cache.data), np.asarray(batch.cache(**XPACKED).data))


def test_under_shard_map_each_device_serves_its_own_heads(run_with_devices):
    """The layer's config is the whole layer's; neither forward nor cascade attention reads another shard."""
    run_with_devices(
        2,
        """
        import ml_dtypes
        from jax.sharding import Mesh, PartitionSpec as P

        batch = random_batch(17, kind="chunked", cache_dtype=ml_dtypes.float8_e4m3fn, scales="head", common_prefix_blocks=1)
        config = pp.AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32)
        cache = batch.cache(content="xpacked", order="LHBNC")
        heads, scale = P(None, "heads"), P(None, "heads")
        shards = pp.KVCache(P(*("heads" if axis == "H" else None for axis in cache.spec.axes)), scale, scale, cache.spec)
        mesh = Mesh(np.array(jax.devices()), ("heads",))

        def step(query, key, value, cache, metadata):
            out = pp.rocm_attn.forward(query, key, value, cache, metadata, config, implementation="xla")
            return out, pp.cascade_attention(query, cache, metadata, common_prefix_len=16, implementation="xla")

        mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(heads, heads, heads, shards, P()), out_specs=heads))
        out, cascaded = mapped(*(jnp.asarray(a) for a in (batch.query, batch.key, batch.value)), cache, batch.metadata)
        assert_close(out, batch.reference(step_key=batch.key, step_value=batch.value)[0], dtype=np.float32)
        assert_close(cascaded, batch.reference()[0], dtype=np.float32)
        """,
    )


# --- nothing is ignored


REFUSALS = [
    # backend, batch, layer, layout, options of forward, the argument that the message names
    ("output_block_scale", ROCM, {}, {}, {}, {"output_block_scale": np.ones((1, 1))}, pp.UnsupportedError),
    ("output_block_scale", UNIFIED, {}, {}, {}, {"output_block_scale": np.ones((1, 1))}, pp.UnsupportedError),
    ("q_scale", ROCM, {"query_dtype": E4M3, "dtype": BF16, "cache_dtype": E4M3}, {}, {}, {"q_scale": 0.5}, pp.UnsupportedError),
    ("q_scale", ROCM, {"query_dtype": E4M3, "dtype": BF16}, {}, {}, {"q_scale": 0.5}, pp.UnsupportedError),
    ("attn_type", ROCM, {"kind": "cross"}, {"attn_type": pp.AttentionType.ENCODER_DECODER}, {}, {}, pp.UnsupportedError),
    ("content", ROCM, {}, {}, {"content": "packed"}, {}, pp.UnsupportedError),
    ("content", UNIFIED, {}, {}, {"content": "xpacked", "order": "LHBNC"}, {}, pp.UnsupportedError),
    ("block_size", UNIFIED, {"block_size": 8}, {}, {}, {}, pp.UnsupportedError),
    ("head_size", ROCM, {"head_size": 48}, {"head_size": 48}, {}, {}, pp.UnsupportedError),
    ("kv_cache_dtype", UNIFIED, {}, {"kv_cache_dtype": "fp8"}, {}, {}, pp.UnsupportedError),
    ("num_kv_heads", UNIFIED, {}, {"num_kv_heads": 4}, {}, {}, ValueError),
    ("query", UNIFIED, {}, {"num_heads": 2}, {}, {}, ValueError),
    ("output_dtype", UNIFIED, {}, {}, {}, {"output_dtype": E4M3}, ValueError),
    ("layer", UNIFIED, {}, {}, {}, {"layer": 1}, ValueError),
]


@pytest.mark.parametrize(
    ("argument", "backend", "made", "layer", "layout", "options", "error"),
    REFUSALS,
    ids=[f"{row[1].CAPABILITIES.name}-{row[0]}-{i}" for i, row in enumerate(REFUSALS)],
)
def test_what_is_not_served_raises_and_names_the_argument(argument, backend, made, layer, layout, options, error):
    batch = random_batch(14, **made)
    with pytest.raises(error, match=argument):
        forward(backend, batch, config(**layer), layout=layout or None, **options)


ENCODER_REFUSALS = [
    # the argument, the layer, what is asked
    ("output_scale", {}, {"output_scale": 0.5}),
    ("output_dtype", {}, {"output_dtype": BF16}),
    ("alibi_slopes", {"alibi_slopes": SLOPES}, {}),
    ("kv_cache_dtype", {"kv_cache_dtype": "fp8"}, {}),
    ("output_block_scale", {}, {"output_block_scale": np.ones(1)}),
]


@pytest.mark.parametrize(("argument", "layer", "options"), ENCODER_REFUSALS, ids=[row[0] for row in ENCODER_REFUSALS])
@BACKENDS
def test_encoders_refuse_what_they_do_not_apply(backend, argument, layer, options):
    batch = random_batch(15, kind="prefill")
    made = config(attn_type=pp.AttentionType.ENCODER, **layer)
    with pytest.raises(pp.UnsupportedError, match=argument):
        backend.forward(jnp.asarray(batch.query), jnp.asarray(batch.key), jnp.asarray(batch.value), None, batch.metadata, made, **options)


@BACKENDS
def test_encoders_ignore_the_query_scale(backend):
    batch = random_batch(15, kind="prefill")
    arrays = [jnp.asarray(side) for side in (batch.query, batch.key, batch.value)]
    made = config(attn_type="encoder")
    outs = [backend.forward(*arrays, None, batch.metadata, made, q_scale=scale) for scale in (None, 0.5)]
    np.testing.assert_array_equal(*outs)


@BACKENDS
def test_encoders_need_keys_and_values(backend):
    batch = random_batch(15, kind="prefill")
    made = config(attn_type=pp.AttentionType.ENCODER)
    with pytest.raises(ValueError, match="key"):
        backend.forward(jnp.asarray(batch.query), None, None, None, batch.metadata, made)
    with pytest.raises(pp.UnsupportedError, match="query"):
        fp8 = jnp.ones((4, 4, 32), jnp.float8_e4m3fn)
        UNIFIED.forward(fp8, jnp.ones((4, 2, 32)), jnp.ones((4, 2, 32)), None, batch.metadata, made)


@BACKENDS
def test_half_a_pair_and_missing_arguments_are_refused(backend):
    batch = random_batch(16)
    query, key, cache = jnp.asarray(batch.query), jnp.asarray(batch.key), batch.cache(**own_layout(backend))
    with pytest.raises(ValueError, match="value"):
        backend.forward(query, key, None, cache, batch.metadata, config())
    with pytest.raises(ValueError, match="key"):
        backend.forward(query, key[:-1], key[:-1], cache, batch.metadata, config())
    with pytest.raises(TypeError, match="cache"):
        backend.forward(query, None, None, None, batch.metadata, config())
    with pytest.raises(TypeError, match="config"):
        backend.forward(query, None, None, cache, batch.metadata, None)
    with pytest.raises(TypeError, match="cache"):
        backend.kv_cache_update(key, key, None, batch.metadata.slot_mapping, config())


@BACKENDS
def test_writers_refuse_what_forward_refuses(backend):
    cache = pp.init_cache(pp.CacheSpec(num_blocks=2, block_size=8, num_kv_heads=2, head_size=32))
    rows, slots = jnp.zeros((1, 2, 32)), jnp.zeros(1, jnp.int32)
    with pytest.raises(pp.UnsupportedError, match="block_size"):
        backend.kv_cache_update(rows, rows, cache, slots, config())
