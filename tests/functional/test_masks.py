"""Masks as data: traced windows, key ranges and biases of each sequence, through every implementation, against the float64 oracle."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.testing import assert_close, random_batch, reference_encoder_attention

F32, BF16, E4M3 = np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def arguments(batch, **layout):
    return jnp.asarray(batch.query), batch.cache(**layout), batch.metadata


def check(batch, implementation, *, content="packed", given=None, **options):
    """`given` are options in the form that attention gets, where that is another one than the oracle's."""
    expected, expected_lse = batch.reference(**options)
    both = {**options, **(given or {}), "return_lse": True, "implementation": implementation}
    out, lse = pp.paged_attention(*arguments(batch, content=content), **both)
    assert_close(out, expected, dtype=out.dtype, what="out")
    assert_close(lse, expected_lse, dtype="lse", compute_dtype=out.dtype, what="lse")


KINDS = ["mixed", "decode", "prefill", "cross"]
IMPLEMENTATIONS = ["xla", "triton"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 5, 40, 0, -1, 2**31 - 1])
def test_a_traced_window_is_the_static_one(window, kind, implementation):
    batch = random_batch(1, kind=kind, dtype=F32, sliding_window=window if window > 0 else None)
    check(batch, implementation, sliding_window=window, given={"sliding_window": jnp.int32(window)})


LONG = {"mixed": {"max_query_len": 40, "max_seq_len": 700}, "prefill": {"max_query_len": 300, "max_seq_len": 300}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("mask", [{"sliding_window": 100}, {"key_range": True}, {"sliding_window": 300, "key_range": True}])
def test_masks_span_many_chunks(mask, kind):
    batch = random_batch(5, kind=kind, dtype=F32, head_size=8, **LONG[kind], **mask)
    given = {"sliding_window": jnp.int32(mask["sliding_window"])} if "sliding_window" in mask else {}
    check(batch, "xla", given=given, **batch.masks)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_jitted_step_scans_over_layers_whose_windows_differ(implementation):
    windows = [3, 0, 20, -1, 1, 9] if implementation == "xla" else [3, 0, 20]
    sizes = {} if implementation == "xla" else {"kind": "decode", "num_seqs": 2, "max_seq_len": 40}
    batch = random_batch(2, dtype=F32, num_layers=len(windows), head_size=16, **sizes)
    traces = []

    @jax.jit
    def step(query, cache, metadata, windows):
        traces.append(None)

        def one(carry, layer_and_window):
            layer, window = layer_and_window
            out = pp.paged_attention(query, cache, metadata, layer=layer, sliding_window=window, implementation=implementation)
            return carry, out

        return jax.lax.scan(one, 0, (jnp.arange(len(windows), dtype=jnp.int32), windows))[1]

    for order in (windows, windows[::-1]):
        outs = step(*arguments(batch), jnp.array(order, jnp.int32))
        for layer, window in enumerate(order):
            assert_close(outs[layer], batch.reference(layer, sliding_window=window)[0], dtype=F32)
    assert len(traces) == 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype, cache_dtype, content", [(F32, F32, "packed"), (BF16, E4M3, "xpacked")], ids=["float32", "fp8"])
def test_a_key_range_is_one_of_the_masks(dtype, cache_dtype, content, window, causal, kind, implementation):
    batch = random_batch(3, kind=kind, dtype=dtype, cache_dtype=cache_dtype, causal=causal, key_range=True, sliding_window=window)
    check(batch, implementation, content=content, **batch.masks)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["mixed", "decode"])
@pytest.mark.parametrize(
    "options", [{"alibi_slopes": [0.5, 0.25, -0.1, 1.0]}, {"sinks": [0.3, -1.0, 5.0, -np.inf]}, {"logits_soft_cap": 2.0}], ids="-".join
)
def test_key_ranges_meet_every_other_option(options, kind, implementation):
    batch = random_batch(4, kind=kind, dtype=F32, key_range=True, qq_bias="each")
    check(batch, implementation, **batch.masks, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["mixed", "decode", "chunked", "cross"])
@pytest.mark.parametrize("window", [None, 8])
def test_each_sequence_may_have_a_bias_of_its_own(window, kind, implementation):
    batch = random_batch(6, kind=kind, dtype=F32, qq_bias="each", sliding_window=window)
    check(batch, implementation, **batch.masks)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_blocks_outside_every_range_are_free_and_one_between_them_is_not(implementation):
    """A table entry that no row needs may be -1, as the freed blocks of chunked attention are; one that a row needs makes NaN."""
    cache, metadata = _three_sequences()
    start, stop = (jnp.array(x, jnp.int32) for x in ([32, 32, 32, 40, 0, 5], [48, 40, 64, 64, 16, 16]))
    query = jnp.ones((6, 2, 16))
    out = pp.paged_attention(query, cache, metadata, key_range=(start, stop), implementation=implementation)
    assert np.isfinite(np.asarray(out[:4])).all() and np.isnan(np.asarray(out[4:])).all()
    with pp.debug_checks(), pytest.raises(ValueError, match=r"block_table\[2, 0\]"):
        pp.paged_attention(query, cache, metadata, key_range=(start, stop), implementation=implementation)


def _three_sequences():
    spec = pp.CacheSpec(num_blocks=6, block_size=16, num_kv_heads=1, head_size=16, dtype=jnp.float32)
    table = [[-1, -1, 0, 1], [-1, -1, 2, 3], [-1, 4, -1, -1]]
    metadata = pp.AttentionMetadata(
        *(jnp.array(x, jnp.int32) for x in ([0, 2, 4, 6], [64, 64, 32], table, [-1] * 6)), max_query_len=2, causal=False
    )
    return pp.init_cache(spec), metadata


@pytest.mark.sampled(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 6])
def test_an_encoder_takes_ranges_and_traced_windows(window, causal, implementation):
    batch = random_batch(7, kind="prefill", dtype=F32, num_seqs=3, max_query_len=40, key_range=True)
    start, stop = batch.key_range
    key, value = (np.nan_to_num(side) for side in (batch.key, batch.value))
    expected, _ = reference_encoder_attention(
        batch.query, key, value, batch.metadata.query_start_loc, causal=causal, sliding_window=window, key_range=(start, stop)
    )
    traced = None if window is None else jnp.int32(window)
    for ranges, wanted in (((start, stop), expected), (None, None)):
        if wanted is None:
            wanted, _ = reference_encoder_attention(
                batch.query, key, value, batch.metadata.query_start_loc, causal=causal, sliding_window=window
            )
        out = pp.encoder_attention(
            jnp.asarray(batch.query),
            key,
            value,
            batch.metadata,
            causal=causal,
            sliding_window=traced,
            key_range=ranges,
            implementation=implementation,
        )
        assert_close(out, wanted, dtype=F32)


def test_a_cascade_takes_key_ranges():
    batch = random_batch(8, kind="chunked", dtype=F32, common_prefix_blocks=2, key_range=True)
    start, stop = (np.array(bound) for bound in batch.key_range)
    start[::3] = 3  # into the prefix
    clean = {"key_cache": np.nan_to_num(batch.key_cache), "value_cache": np.nan_to_num(batch.value_cache)}
    for name, array in clean.items():
        object.__setattr__(batch, name, array)
    expected, _ = batch.reference(key_range=(start, stop))
    out = pp.cascade_attention(*arguments(batch), common_prefix_len=32, key_range=(start, stop), implementation="xla")
    assert_close(out, expected, dtype=F32)


@pytest.mark.parametrize("key_range", [3, [1, 2, 3], (np.zeros(3, int), np.zeros(2, int)), (np.zeros(8), np.zeros(8)), (None, None)])
def test_a_key_range_is_two_integer_vectors_of_the_tokens(key_range):
    batch = random_batch(9, dtype=F32, num_seqs=1, padding_tokens=1, padding_seqs=0, max_query_len=5)
    with pytest.raises((ValueError, TypeError), match="key_range"):
        pp.paged_attention(*arguments(batch), key_range=key_range)


def test_bounds_wider_than_int32_keep_their_meaning():
    batch = random_batch(9, dtype=F32)
    tokens = len(batch.query)
    wide = np.full(tokens, -(2**40)), np.full(tokens, 2**40)
    check(batch, "xla", key_range=wide)


def test_an_implementation_that_knows_no_range_refuses_it():
    batch = random_batch(9, dtype=BF16)
    tokens = len(batch.query)
    for option in ({"key_range": (np.zeros(tokens, int), np.zeros(tokens, int))}, {"sliding_window": jnp.int32(3)}):
        with pytest.raises(pp.UnsupportedError, match=r"key_range|sliding_window as an array"):
            pp.paged_attention(*arguments(batch), implementation="aiter", **option)


@pytest.mark.parametrize("window", [jnp.float32(3), jnp.array([3, 4]), jnp.int32(-2)], ids=str)
def test_a_traced_window_is_an_integer_scalar(window):
    batch = random_batch(9, dtype=F32)
    with pytest.raises((ValueError, TypeError), match="sliding_window"):
        pp.paged_attention(*arguments(batch), sliding_window=window)


def test_both_backends_take_a_traced_window():
    for backend in (pp.rocm_attn, pp.rocm_aiter_unified_attn):
        content = backend.CAPABILITIES.contents[0]
        batch = random_batch(10, dtype=F32, head_size=64, sliding_window=7)

        @jax.jit
        def step(query, cache, metadata, window, backend=backend):
            config = pp.AttentionConfig(num_heads=4, num_kv_heads=2, head_size=64, sliding_window=window)
            return backend.forward(query, None, None, cache, metadata, config, implementation="xla")

        query, cache, metadata = arguments(batch, content=content, order=backend.CAPABILITIES.layouts[0])
        assert_close(step(query, cache, metadata, jnp.int32(7)), batch.reference(sliding_window=7)[0], dtype=F32)


def test_masks_as_data_are_mapped_and_exported_under_strict_promotion():
    windows = (5, 20, 0)

    @jax.jit
    def attend(query, cache, metadata, windows, key_range):
        def of(window):
            return pp.paged_attention(query, cache, metadata, sliding_window=window, key_range=key_range, implementation="xla")

        return jax.vmap(of)(windows)

    batch = random_batch(11, dtype=F32, key_range=True)
    arrays = (*arguments(batch), jnp.array(windows, jnp.int32), tuple(jnp.asarray(bound, jnp.int32) for bound in batch.key_range))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        exported = jax.export.export(attend)(*arrays)
    for outs in (attend(*arrays), jax.export.deserialize(exported.serialize()).call(*arrays)):
        for out, window in zip(outs, windows, strict=True):
            assert_close(out, batch.reference(sliding_window=window, key_range=batch.key_range)[0], dtype=F32)
