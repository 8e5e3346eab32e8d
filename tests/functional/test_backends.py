"""The two backends against the oracle: forward, the writers, what profiling gives, and what is refused instead of ignored."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.testing import assert_close, random_batch, reference_encoder_attention

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


@pytest.mark.parametrize("case", FP8)
def test_rocm_attn_attends_new_tokens_at_full_precision_beside_an_fp8_cache(case):
    made, options = FP8[case]
    batch = random_batch(3, cache_dtype=E4M3, scales="head", **made)
    out = forward(ROCM, batch, config(**options, kv_cache_dtype="fp8"))
    full = batch.reference(step_key=batch.key, step_value=batch.value, **options)[0]
    assert_close(out, full, dtype=F32)
    with pytest.raises(AssertionError):  # and not the rounded copies in the cache, which are far beyond the tolerance
        assert_close(out, batch.reference(**options)[0], dtype=F32)


@pytest.mark.parametrize("backend", [ROCM, UNIFIED], ids=["ROCM_ATTN-key-None", "ROCM_AITER_UNIFIED_ATTN-key-given"])
def test_everything_else_reads_the_fp8_cache(backend):
    batch = random_batch(3, cache_dtype=E5M2, scales="layer")
    out = forward(backend, batch, config(kv_cache_dtype="fp8_e5m2", sinks=SINKS), key=backend is UNIFIED)
    assert_close(out, batch.reference(sinks=SINKS)[0], dtype=F32)


def test_new_tokens_never_pass_through_a_narrower_unquantized_cache():
    batch = random_batch(4, cache_dtype=BF16)
    assert_close(forward(ROCM, batch, config()), batch.reference(step_key=batch.key, step_value=batch.value)[0], dtype=F32)


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
    built = replace(batch, metadata=UNIFIED.build(0, batch.metadata))
    assert_close(forward(UNIFIED, built, config()), batch.reference()[0], dtype=F32)
    captured = forward(ROCM, replace(batch, metadata=ROCM.build_for_cudagraph_capture(batch.metadata)), config())
    assert not np.any(np.asarray(captured))  # no queries: every token is padding


@BACKENDS
def test_profiling_gives_zeros(backend):
    batch = random_batch(0, dtype=BF16)
    made, cache, query = config(), batch.cache(**own_layout(backend)), jnp.asarray(batch.query)
    out = backend.forward(query, None, None, cache, None, made)
    assert out.shape == query.shape and out.dtype == BF16 and not np.any(np.asarray(out, np.float32))
    assert backend.forward(query, None, None, cache, None, made, output_scale=0.5).dtype == E4M3
    assert backend.kv_cache_update(jnp.asarray(batch.key), jnp.asarray(batch.value), cache, None, made) is cache
    qkv, ones = jnp.ones((6, 8 * 32)), jnp.ones(32)
    q, k, v, same = backend.qk_norm_rope_and_kv_cache_update(qkv, ones, ones, jnp.arange(6), jnp.ones((8, 32)), cache, None, made)
    assert not np.any(np.asarray(q)) and not np.any(np.asarray(k)) and np.all(np.asarray(v) == 1) and same is cache


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
    qkv = jnp.arange(2 * 8 * 32, dtype=jnp.float32).reshape(2, -1)
    *parts, same = backend.qk_norm_rope_and_kv_cache_update(qkv, None, None, None, None, None, slots, made)
    assert same is None
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=1).reshape(2, -1), qkv)


# --- the writers write what the doors write


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
    for mine, doors in pairs:
        assert jax.tree.structure(mine) == jax.tree.structure(doors)
        for left, right in zip(jax.tree.leaves(mine), jax.tree.leaves(doors), strict=True):
            np.testing.assert_array_equal(left, right)
        written = np.asarray((mine if isinstance(mine, pp.KVCache) else mine[-1]).data)
        assert np.any(written != np.asarray(cache.data))


def test_the_fused_mrope_writer_is_the_unified_backends_alone():
    assert UNIFIED.CAPABILITIES.fused_qk_norm_mrope_kvcache and not hasattr(ROCM, "qk_norm_mrope_and_kv_cache_update")


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

        batch = random_batch(17, cache_dtype=ml_dtypes.float8_e4m3fn, scales="head", common_prefix_blocks=1)
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
    ("query", ROCM, {"query_dtype": E4M3, "dtype": BF16}, {}, {}, {}, pp.UnsupportedError),
    ("q_scale", ROCM, {}, {}, {}, {"q_scale": 0.5}, pp.UnsupportedError),
    ("q_scale", UNIFIED, {}, {}, {}, {"q_scale": 0.5}, pp.UnsupportedError),
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
    ("q_scale", {}, {"q_scale": 0.5}),
    ("output_block_scale", {}, {"output_block_scale": np.ones(1)}),
]


@pytest.mark.parametrize(("argument", "layer", "options"), ENCODER_REFUSALS, ids=[row[0] for row in ENCODER_REFUSALS])
@BACKENDS
def test_encoders_ignore_nothing(backend, argument, layer, options):
    batch = random_batch(15, kind="prefill")
    made = config(attn_type=pp.AttentionType.ENCODER, **layer)
    with pytest.raises(pp.UnsupportedError, match=argument):
        backend.forward(jnp.asarray(batch.query), jnp.asarray(batch.key), jnp.asarray(batch.value), None, batch.metadata, made, **options)


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
def test_a_cascade_and_half_a_pair_are_refused(backend):
    batch = random_batch(16, common_prefix_blocks=1)
    query, key, cache = jnp.asarray(batch.query), jnp.asarray(batch.key), batch.cache(**own_layout(backend))
    with pytest.raises(pp.UnsupportedError, match="common_prefix_len"):
        backend.forward(query, None, None, cache, backend.build(16, batch.metadata), config())
    with pytest.raises(ValueError, match="value"):
        backend.forward(query, key, None, cache, batch.metadata, config())
    with pytest.raises(ValueError, match="key"):
        backend.forward(query, key[:-1], key[:-1], cache, batch.metadata, config())
    with pytest.raises(TypeError, match="cache"):
        backend.forward(query, None, None, None, batch.metadata, config())
    with pytest.raises(TypeError, match="config"):
        backend.forward(query, None, None, cache, batch.metadata, None)


@BACKENDS
def test_writers_refuse_what_forward_refuses(backend):
    cache = pp.init_cache(pp.CacheSpec(num_blocks=2, block_size=8, num_kv_heads=2, head_size=32))
    rows, slots = jnp.zeros((1, 2, 32)), jnp.zeros(1, jnp.int32)
    with pytest.raises(pp.UnsupportedError, match="block_size"):
        backend.kv_cache_update(rows, rows, cache, slots, config())
