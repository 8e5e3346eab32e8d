"""`paged_attention` in plain JAX against the float64 oracle: every feature with every layout, and the batches that break kernels."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.testing import assert_close, random_batch, reference_attention

F32, BF16, F16 = np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype("float16")
E4M3, E4M3Z, E5M2, E5M2Z = (np.dtype(getattr(ml_dtypes, f"float8_{kind}")) for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))


def attend(batch, *, content="packed", order="LBHNC", layer=0, **options):
    if batch.q_scale is not None:
        options.setdefault("q_scale", batch.q_scale)
    return pp.paged_attention(
        jnp.asarray(batch.query), batch.cache(content=content, order=order), batch.metadata, layer=layer, implementation="xla", **options
    )


def check(batch, *, content="packed", order="LBHNC", layer=0, **options):
    out, lse = attend(batch, content=content, order=order, layer=layer, return_lse=True, **options)
    expected, expected_lse = batch.reference(layer, **options)
    dtype = out.dtype
    assert_close(out, expected, dtype=dtype, what="out")
    assert_close(lse, expected_lse, dtype="lse", what="lse")
    padding = slice(batch.num_tokens, None)
    assert np.all(np.asarray(out[padding], np.float32) == 0) and np.all(np.isneginf(np.asarray(lse[padding])))


ROWS = [
    # content, order, kind, dtype, cache dtype, heads, kv heads, head size, block size, features
    ("packed", "LBHNC", "mixed", F32, F32, 4, 2, 64, 16, {}),
    ("packed", "LHBNC", "mixed", BF16, BF16, 10, 2, 80, 48, {"sliding_window": 5}),
    ("xpacked", "LHBNC", "mixed", F32, F32, 7, 1, 96, 16, {"logits_soft_cap": 3.0}),
    ("xpacked", "LBHNC", "decode", F16, F16, 8, 2, 32, 32, {"sliding_window": 1}),
    ("xpacked_interleaved_v", "LHBNC", "mixed", BF16, E4M3, 4, 4, 64, 16, {"logits_soft_cap": 2.0, "sliding_window": 9}),
    ("xpacked_interleaved_v", "LBHNC", "prefill", F32, E5M2, 6, 2, 32, 16, {}),
    ("shuffled", "LBHNC", "mixed", F32, F32, 12, 2, 128, 16, {"sinks": True}),
    ("shuffled", "LHBNC", "mixed", F32, E4M3Z, 4, 2, 160, 32, {"alibi": True}),
    ("flash", "LBHNC", "mixed", F32, F32, 3, 3, 192, 16, {"alibi": True, "sinks": True, "sliding_window": 7}),
    ("flash", "LHBNC", "mixed", F32, E5M2Z, 14, 2, 72, 64, {"qq_bias": True}),
    ("packed", "LBHNC", "mixed", E4M3, E4M3, 8, 2, 64, 16, {"sinks": True}),
    ("packed", "LBHNC", "cross", F32, F32, 4, 2, 64, 16, {}),
    ("packed", "LBHNC", "cross", F32, F32, 4, 2, 64, 16, {"sliding_window": 4}),
    ("packed", "LBHNC", "mixed", F32, F32, 71, 1, 32, 16, {"qq_bias": True, "logits_soft_cap": 5.0}),
    ("packed", "LBHNC", "mixed", F32, F32, 2, 1, 256, 544, {"sliding_window": 20}),
    ("flash", "LBHNC", "decode", BF16, E4M3, 2, 1, 512, 784, {}),
    ("xpacked", "LHBNC", "decode", F32, F32, 2, 2, 112, 1056, {"sinks": True}),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("row", ROWS, ids=["-".join(map(str, (*r[:9], *r[9]))).replace(" ", "") for r in ROWS])
def test_every_feature_meets_every_layout(row):
    content, order, kind, dtype, cache_dtype, heads, kv_heads, head_size, block_size, features = row
    rng = np.random.default_rng(len(content) + heads + block_size)
    batch = random_batch(
        heads * block_size,
        kind=kind,
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
    )
    options = dict(features)
    if options.pop("sinks", False):
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if options.pop("alibi", False):
        options["alibi_slopes"] = rng.uniform(0.05, 0.5, heads).astype(np.float32)
    if options.pop("qq_bias", False):
        options["qq_bias"] = rng.standard_normal((6, 5)).astype(np.float32)
    check(batch, content=content, order=order, **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("window", [1, 3, 17, 40])
@pytest.mark.parametrize("layout", [("packed", "LBHNC"), ("xpacked", "LHBNC")], ids="-".join)
def test_keys_before_every_window_may_be_nan(window, layout):
    """vllm#4405, #30887, tpu-inference#1185: whole blocks before the window are freed, and the window's edge lies inside a tile."""
    batch = random_batch(window, num_heads=4, num_kv_heads=2, sliding_window=window)
    check(batch, content=layout[0], order=layout[1], sliding_window=window)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scales", ["one", "layer", "head"])
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2Z], ids=str)
def test_fp8_scales_of_layer_and_head_apply_to_their_own_side(cache_dtype, scales):
    batch = random_batch(3, cache_dtype=cache_dtype, scales=scales, num_layers=3)
    for layer in range(3):
        check(batch, layer=layer)


def test_fp8_output_is_divided_clamped_and_rounded_to_even():
    """vllm#36297: value 100 at scale .25 is code 384 (400 ties to even), 1000 saturates at 448."""
    batch = random_batch(5, padding_tokens=0)
    for output_dtype in (E4M3, E4M3Z):
        out = attend(batch, output_scale=0.02, output_dtype=output_dtype)
        codes, _ = batch.reference(output_scale=0.02, output_dtype=output_dtype)
        assert out.dtype == output_dtype
        assert_close(out, codes, dtype=output_dtype, compute_dtype=F32)
    assert attend(batch, output_scale=0.02).dtype == jnp.float8_e4m3fn


def one_sequence(
    length, query_len, *, block_size=16, heads=1, kv_heads=1, head_size=32, values=None, keys=None, dtype=np.float32, content="packed"
):
    """A cache with one sequence in shuffled blocks, NaN elsewhere; value j of position j unless given."""
    num_blocks = -(-length // block_size) + 3
    table = np.random.default_rng(length).permutation(num_blocks)[None, : -(-length // block_size)]
    key = np.full((1, num_blocks, block_size, kv_heads, head_size), np.nan, np.float32)
    value = key.copy()
    position = np.arange(length)
    place = (0, table[0, position // block_size], position % block_size)
    key[place] = 0.0 if keys is None else keys
    value[place] = np.broadcast_to(position[:, None, None], (length, kv_heads, head_size)) if values is None else values
    spec = pp.CacheSpec(
        num_blocks=num_blocks, block_size=block_size, num_kv_heads=kv_heads, head_size=head_size, dtype=dtype, content=content
    )
    cache = pp.cache_from_logical(spec, jnp.asarray(key, dtype), jnp.asarray(value, dtype))
    return cache, pp.make_metadata([query_len], [length], table, block_size=block_size)


def means(length, query_len, **options):
    """With a zero query the output is the mean of the attended positions."""
    cache, metadata = one_sequence(length, query_len, block_size=options.pop("block_size", 16))
    query = jnp.zeros((query_len, 1, 32))
    return np.asarray(pp.paged_attention(query, cache, metadata, implementation="xla", **options))[:, 0, 0]


def test_window_is_inclusive_of_the_query_itself():
    """One-off windows (mistral-inference#60 and others): the same answer in one go, in chunks and in decode."""
    assert means(10, 10, sliding_window=4)[-1] == pytest.approx(7.5)
    assert means(10, 5, sliding_window=4)[-1] == pytest.approx(7.5)
    assert means(10, 1, sliding_window=4)[-1] == pytest.approx(7.5)
    assert means(10, 1, sliding_window=1)[-1] == pytest.approx(9.0)
    assert means(10, 1, sliding_window=10)[-1] == means(10, 1)[-1] == pytest.approx(4.5)
    np.testing.assert_allclose(means(67, 3, sliding_window=2), [63.5, 64.5, 65.5])
    assert means(40, 1, sliding_window=20)[-1] == pytest.approx(29.5)
    np.testing.assert_allclose(means(6, 2), [2.0, 2.5])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("length", [15, 16, 17, 18, 31, 32, 33, 34])
def test_block_edges_are_exact(length, block_size):
    assert means(length, 1, block_size=block_size)[0] == pytest.approx((length - 1) / 2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("window", [0, -1, 2**30, 2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all keys"])
def test_a_window_wider_than_the_sequence_is_no_window(window, causal):
    batch = random_batch(2)
    batch = replace(batch, metadata=replace(batch.metadata, causal=causal))
    plain, windowed = attend(batch), attend(batch, sliding_window=window)
    np.testing.assert_allclose(windowed, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [1, 3, 5])
def test_a_window_of_cross_attention_is_symmetric(window):
    """Keys of length 4, queries at positions 2 and 3, and two queries more than there are keys."""
    for queries in (2, 6):
        cache, metadata = one_sequence(4, 1)
        metadata = replace(metadata, query_start_loc=jnp.array([0, queries]), causal=False, max_query_len=queries)
        out = pp.paged_attention(jnp.zeros((queries, 1, 32)), cache, metadata, sliding_window=window, implementation="xla")[:, 0, 0]
        for row, found in enumerate(np.asarray(out)):
            seen = [k for k in range(4) if abs(k - (4 - queries + row)) < window]
            assert found == pytest.approx(np.mean(seen) if seen else 0.0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("poison", ["key", "value"])
@pytest.mark.parametrize(("queries", "context"), [(4, 0), (1, 0), (1, 3), (5, 20), (33, 3), (300, 5)])
def test_a_bias_of_minus_infinity_masks_like_causality(queries, context, poison):
    """The masked keys of this step, every third, hold NaN on one side. All values are 1, so every row that sees a key is 1."""
    length = context + queries
    keys, values = np.zeros((length, 1, 32), np.float32), np.ones((length, 1, 32), np.float32)
    masked = np.arange(queries) % 3 == 2
    (keys if poison == "key" else values)[context:][masked] = np.nan
    cache, metadata = one_sequence(length, queries, keys=keys, values=values)
    bias = np.zeros((queries, queries), np.float32)
    bias[:, masked] = -np.inf
    out, lse = pp.paged_attention(jnp.ones((queries, 1, 32)), cache, metadata, qq_bias=bias, return_lse=True, implementation="xla")
    np.testing.assert_allclose(out, 1.0, rtol=1e-5)
    counts = [context + np.sum(~masked[: row + 1]) for row in range(queries)]
    np.testing.assert_allclose(np.asarray(lse)[:, 0], np.log(counts), rtol=1e-5, atol=1e-6)


def test_a_row_whose_bias_masks_every_key_is_empty():
    cache, metadata = one_sequence(3, 3, values=np.full((3, 1, 32), np.nan))
    bias = np.full((3, 3), -np.inf, np.float32)
    out, lse = pp.paged_attention(jnp.ones((3, 1, 32)), cache, metadata, qq_bias=bias, return_lse=True, implementation="xla")
    assert np.all(np.asarray(out) == 0) and np.all(np.isneginf(np.asarray(lse)))


def blocks_of_their_number(num_blocks=3, content="packed"):
    """Block b holds the value b + 1."""
    spec = pp.CacheSpec(num_blocks=num_blocks, block_size=16, num_kv_heads=1, head_size=32, dtype=jnp.float32, content=content)
    values = np.broadcast_to(np.arange(1.0, num_blocks + 1)[None, :, None, None, None], (1, num_blocks, 16, 1, 32))
    return pp.cache_from_logical(spec, jnp.zeros(values.shape, jnp.float32), jnp.asarray(values, jnp.float32))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("content", ["packed", "xpacked", "flash"])
@pytest.mark.parametrize("outside", [-1, 3, 7, -(2**31), 2**31 - 1])
def test_a_needed_block_outside_the_pool_makes_its_sequence_nan_and_no_other(outside, content):
    cache = blocks_of_their_number(content=content)
    for queries in (1, 2, 40):
        metadata = pp.make_metadata([queries] * 3, [48] * 3, [[1, 0, 2], [1, 0, 2], [2, 2, 2]], block_size=16)
        table = jnp.array([[1, outside, 2], [1, 0, 2], [2, 2, 2]], jnp.int32)
        query = jnp.zeros((3 * queries, 1, 32))
        out, lse = pp.paged_attention(query, cache, replace(metadata, block_table=table), return_lse=True, implementation="xla")
        clean, clean_lse = pp.paged_attention(query, cache, metadata, return_lse=True, implementation="xla")
        assert np.all(np.isnan(out[:queries])) and np.all(np.isnan(lse[:queries]))
        np.testing.assert_array_equal(out[queries:], clean[queries:])
        np.testing.assert_array_equal(lse[queries:], clean_lse[queries:])


WINDOWED = [(16, 1, (2,)), (17, 1, (1, 2)), (16, 2, (1, 2)), (33, 1, (0, 1, 2)), (1, 17, (1, 2))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("window", "queries", "needed"), WINDOWED)
def test_a_block_outside_every_window_may_be_anything(window, queries, needed):
    cache = blocks_of_their_number()
    metadata = pp.make_metadata([queries], [48], [[0, 1, 2]], block_size=16)
    for column in range(3):
        table = metadata.block_table.at[0, column].set(-1)
        out = pp.paged_attention(
            jnp.zeros((queries, 1, 32)), cache, replace(metadata, block_table=table), sliding_window=window, implementation="xla"
        )
        assert np.all(np.isnan(out)) == (column in needed) == np.any(np.isnan(out))


def test_entries_past_the_sequence_may_be_anything():
    cache = blocks_of_their_number()
    metadata = pp.make_metadata([1, 0], [16, 0], [[2, 0], [0, 0]], block_size=16)
    table = jnp.array([[2, 99], [-7, 99]], jnp.int32)
    metadata = replace(metadata, block_table=table)
    out, lse = pp.paged_attention(jnp.zeros((1, 1, 32)), cache, metadata, return_lse=True, implementation="xla")
    np.testing.assert_allclose(out, 3.0)
    np.testing.assert_allclose(lse, np.log(16), rtol=1e-6)


def test_a_nan_value_reaches_only_the_queries_that_see_its_key():
    values = np.ones((40, 1, 32), np.float32)
    values[35] = np.nan
    cache, metadata = one_sequence(40, 20, values=values)
    query = jax.random.normal(jax.random.key(0), (20, 1, 32))
    out = np.asarray(pp.paged_attention(query, cache, metadata, implementation="xla"))
    assert np.all(np.isfinite(out[:15])) and np.all(np.isnan(out[15:]))
    np.testing.assert_allclose(out[:15], 1.0, rtol=1e-6)


def test_prefill_equals_chunked_prefill_equals_decode():
    length, rng = 37, np.random.default_rng(0)
    keys, values = rng.standard_normal((2, length, 2, 32)).astype(np.float32)
    cache, _ = one_sequence(length, 1, kv_heads=2, keys=keys, values=values)
    table = np.random.default_rng(length).permutation(6)[None, :3]
    query = jnp.asarray(rng.standard_normal((length, 4, 32)), jnp.float32)
    whole = pp.paged_attention(query, cache, pp.make_metadata([length], [length], table, block_size=16), implementation="xla")
    for chunk in (16, 5, 1):
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            metadata = pp.make_metadata([stop - start], [stop], table, block_size=16)
            part = pp.paged_attention(query[start:stop], cache, metadata, implementation="xla")
            assert_close(part, np.asarray(whole[start:stop], np.float64), dtype=np.float32, what=f"chunk {start}:{stop}")


def test_sinks_and_alibi_agree_on_where_the_query_is():
    """vllm#945: L=4, slope .5, q=0, V=1, sink 0 is 0.687260 relative to the query; and the same for every row of a prefill."""
    cache, metadata = one_sequence(4, 4, values=1.0)
    out = pp.paged_attention(
        jnp.zeros((4, 1, 32)), cache, metadata, alibi_slopes=jnp.array([0.5]), sinks=jnp.array([0.0]), implementation="xla"
    )
    row_sum = [sum(np.exp(-0.5 * d) for d in range(i + 1)) for i in range(4)]
    np.testing.assert_allclose(np.asarray(out)[:, 0, 0], [s / (s + 1) for s in row_sum], rtol=1e-6)
    assert float(out[3, 0, 0]) == pytest.approx(0.687260, abs=1e-6)


def test_extreme_sinks_are_finite():
    cache, metadata = one_sequence(4, 1, values=1.0)
    for sink, expected in ((100.0, 4 * np.exp(-100.0)), (-np.inf, 1.0), (1e4, 0.0), (np.log(2.0), 4 / 6)):
        out = pp.paged_attention(jnp.zeros((1, 1, 32)), cache, metadata, sinks=jnp.array([sink]), implementation="xla")
        np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=1e-30)


def test_soft_cap_is_a_real_tanh_after_the_scale():
    keys = np.zeros((2, 1, 32), np.float32)
    keys[1, 0, 0] = 800.0
    cache, metadata = one_sequence(2, 1, keys=keys, values=np.array([0.0, 1.0]).reshape(2, 1, 1))
    query = jnp.zeros((1, 1, 32)).at[0, 0, 0].set(1.0)
    out = pp.paged_attention(query, cache, metadata, scale=1 / 8, logits_soft_cap=2.0, implementation="xla")
    np.testing.assert_allclose(np.asarray(out), 0.880797, rtol=1e-6)
    huge = pp.paged_attention(1e30 * query, cache, metadata, scale=1.0, logits_soft_cap=2.0, implementation="xla")
    np.testing.assert_allclose(np.asarray(huge), 0.880797, rtol=1e-6)
    for off in (None, 0, 0.0):
        np.testing.assert_allclose(pp.paged_attention(query, cache, metadata, logits_soft_cap=off, implementation="xla"), 1.0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cap", [1.2e-38, 1e-30, 1e-12, 1e-3, 1.0, 30.0, 1e3, 1e5, 1e9, 1e12, 1e18, 1e20, 1e30, 1e36, 3.4e38])
def test_the_soft_cap_keeps_float32s_relative_error_over_every_decade(cap):
    """A lone key's lse is its score: cap * tanh(score / cap), over 14 decades of score, against float64."""
    scores = np.concatenate([[0.0], np.logspace(-9, 5, 29)])
    scores = np.concatenate([-scores, scores]).astype(np.float32)
    cache, metadata = one_sequence(1, 1, keys=np.eye(32, dtype=np.float32)[:1, None])
    query = jnp.zeros((len(scores), 1, 32)).at[:, 0, 0].set(scores)
    rows = len(scores)
    metadata = replace(
        metadata,
        query_start_loc=jnp.arange(rows + 1),
        seq_lens=jnp.ones(rows, jnp.int32),
        block_table=jnp.broadcast_to(metadata.block_table, (rows, 1)),
    )
    _, lse = pp.paged_attention(query, cache, metadata, scale=1.0, logits_soft_cap=cap, return_lse=True, implementation="xla")
    exact = cap * np.tanh(scores.astype(np.float64) / cap)
    np.testing.assert_allclose(np.asarray(lse)[:, 0], exact, rtol=1e-6, atol=1.2e-38)


@pytest.mark.parametrize("number", [1e39, -1e39, 1e-40, np.inf, np.nan, 10**400], ids=str)
@pytest.mark.parametrize("name", ["scale", "logits_soft_cap", "q_scale", "output_scale"])
def test_a_static_float_that_float32_does_not_hold_is_refused(name, number):
    batch = random_batch(1)
    with pytest.raises(ValueError, match=name):
        attend(batch, **{name: number})


def test_half_precision_inputs_do_not_overflow_their_scores():
    """TRT#18044: fp16, D=128, q=k=256: the product is infinite in half precision, 741455.2 in float32."""
    keys = np.stack([np.full((1, 128), 256.0), np.full((1, 128), 255.0)]).astype(np.float32)
    cache, metadata = one_sequence(2, 1, head_size=128, keys=keys, values=np.array([1.0, 2.0]).reshape(2, 1, 1), dtype=np.float16)
    query = jnp.full((1, 1, 128), 256.0, jnp.float16)
    out, lse = pp.paged_attention(query, cache, metadata, return_lse=True, implementation="xla")
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0)
    np.testing.assert_allclose(np.asarray(lse), 741455.2, rtol=1e-6)


def test_every_query_of_cross_attention_sees_every_key():
    """vllm#38321: 3 queries over 20 encoder tokens, and three calls of one."""
    cache, metadata = one_sequence(20, 3)
    metadata = replace(metadata, causal=False)
    query = jax.random.normal(jax.random.key(1), (3, 1, 32))
    np.testing.assert_allclose(pp.paged_attention(0 * query, cache, metadata, implementation="xla"), 9.5, rtol=1e-6)
    together = pp.paged_attention(query, cache, metadata, implementation="xla")
    for i in range(3):
        alone, one = one_sequence(20, 1)
        part = pp.paged_attention(query[i : i + 1], alone, replace(one, causal=False), implementation="xla")
        assert_close(part, np.asarray(together[i : i + 1], np.float64), dtype=np.float32)


def test_no_tokens_no_sequences_and_no_width_are_answers():
    cache, _ = one_sequence(4, 1)
    empty = pp.make_metadata([], [], np.zeros((0, 0), np.int64), block_size=16)
    assert pp.paged_attention(jnp.zeros((0, 1, 32)), cache, empty, implementation="xla").shape == (0, 1, 32)
    padded = pp.make_metadata([0], [0], np.zeros((1, 0), np.int64), block_size=16, num_tokens=4)
    out, lse = pp.paged_attention(jnp.ones((4, 1, 32)), cache, padded, return_lse=True, implementation="xla")
    assert np.all(np.asarray(out) == 0) and np.all(np.isneginf(np.asarray(lse)))


def test_a_pool_past_int32_elements_is_read_where_it_lies():
    """int32 block strides (vllm#50427): block 65536 of 32 Ki elements starts at exactly 2**31."""
    spec = pp.CacheSpec(num_blocks=65537, block_size=16, num_kv_heads=16, head_size=64, dtype=jnp.float8_e4m3fn)
    assert spec.size > 2**31
    cache = pp.init_cache(spec)
    data = jax.jit(lambda d: d.at[0, 65536].set(0x38), donate_argnums=0)(cache.data)  # 1.0 in e4m3fn
    cache = replace(cache, data=data)
    metadata = pp.make_metadata([1, 1], [16, 16], np.array([[65536], [0]]), block_size=16)
    out = pp.paged_attention(jnp.ones((2, 16, 64), jnp.bfloat16), cache, metadata, implementation="xla")
    np.testing.assert_array_equal(np.asarray(out[0], np.float32), 1.0)
    np.testing.assert_array_equal(np.asarray(out[1], np.float32), 0.0)


def compiled(queries, length, *, seqs=1, widen=1, num_heads=32, kv_heads=8, head_size=128, block_size=16):
    """`paged_attention` compiled for shapes alone."""
    blocks = length // block_size
    spec = pp.CacheSpec(num_blocks=seqs * blocks, block_size=block_size, num_kv_heads=kv_heads, head_size=head_size, dtype=jnp.float32)
    cache = jax.eval_shape(lambda: pp.init_cache(spec))
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    metadata = pp.AttentionMetadata(i32(seqs + 1), i32(seqs), i32(seqs, blocks * widen), i32(seqs * queries), max_query_len=queries)
    query = jax.ShapeDtypeStruct((seqs * queries, num_heads, head_size), jnp.float32)
    return jax.jit(lambda q, c, m: pp.paged_attention(q, c, m, implementation="xla")).lower(query, cache, metadata).compile()


def test_memory_is_bounded_by_a_chunk_not_by_the_context():
    assert compiled(2048, 32768).memory_analysis().temp_size_in_bytes < 256 << 20
    assert compiled(1, 32768, seqs=8).memory_analysis().temp_size_in_bytes < 64 << 20


def test_work_follows_seq_lens_not_the_table():
    """Loop trips, counted where they happen: the chunks of a batch in a table eight times as wide."""
    from purepage.kernels.xla import attention

    def trips(widen):
        count = []
        load = attention.PagedSource.load

        def counting(self, items, index, dtype):
            jax.debug.callback(lambda i: count.append(int(i)), index)
            return load(self, items, index, dtype)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention.PagedSource, "load", counting)
            cache, metadata = one_sequence(1500, 1)
            table = jnp.pad(metadata.block_table, ((0, 0), (0, (widen - 1) * metadata.block_table.shape[1])))
            metadata = replace(metadata, block_table=table, max_seq_len=None)
            jax.block_until_ready(
                jax.jit(lambda q: attention._paged_attention(call(q, cache, metadata), None, platform="cpu"))(jnp.ones((1, 1, 32)))
            )
            jax.effects_barrier()
        return len(count)

    def call(query, cache, metadata):
        captured = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("purepage.functional.dispatch.run", lambda _, call, __: captured.append(call) or (query, None))
            pp.paged_attention(query, cache, metadata)
        return captured[0]

    assert trips(1) == trips(8) == -(-1500 // attention.chunk_tokens("cpu"))


def test_a_growing_batch_compiles_a_handful_of_times():
    traces = []

    @jax.jit
    def step(query, cache, metadata):
        traces.append(1)
        return pp.paged_attention(query, cache, metadata, implementation="xla")

    cache, _ = one_sequence(150, 1)
    table = np.random.default_rng(150).permutation(13)[None, :10]
    for length in range(1, 101):
        metadata = pp.make_metadata([1], [length], table, block_size=16)
        out = step(jnp.zeros((1, 1, 32)), cache, metadata)
        assert float(out[0, 0, 0]) == pytest.approx((length - 1) / 2)
    assert len(traces) <= 8


def test_scales_of_any_spelling_share_one_trace():
    traces = []
    cache, metadata = one_sequence(5, 1)

    @jax.jit
    def step(query, scale):
        traces.append(1)
        return pp.paged_attention(query, cache, metadata, q_scale=scale, implementation="xla")

    query = jnp.ones((1, 1, 32), jnp.bfloat16)
    outs = [step(query, jnp.asarray(s, jnp.float32).reshape(())) for s in (2.0, np.float32(2), np.array([2.0]))]
    assert len(traces) == 1 and all(out.dtype == jnp.bfloat16 for out in outs)
    eager = [
        pp.paged_attention(query, cache, metadata, q_scale=s, implementation="xla")
        for s in (2.0, np.float32(2), np.array([2.0]), jnp.array(2.0, jnp.bfloat16))
    ]
    assert all(e.dtype == jnp.bfloat16 and np.array_equal(np.asarray(e), np.asarray(outs[0])) for e in eager)


def test_a_traced_scale_equals_a_static_one():
    batch = random_batch(8)
    static = attend(batch, scale=0.3)
    traced = jax.jit(lambda s: attend(batch, scale=s))(jnp.float32(0.3))
    assert_close(traced, np.asarray(static, np.float64), dtype=np.float32)


def test_one_program_serves_every_layer_of_a_scan_and_every_batch_of_a_bucket():
    batches = [random_batch(seed, num_layers=3) for seed in (1, 2, 3)]
    traces = []

    @jax.jit
    def all_layers(query, cache, metadata):
        traces.append(1)
        return jax.lax.scan(
            lambda _, layer: (None, pp.paged_attention(query, cache, metadata, layer=layer, implementation="xla")), None, jnp.arange(3)
        )[1]

    for batch in batches:
        outs = all_layers(jnp.asarray(batch.query), batch.cache(), batch.metadata)
        for layer in range(3):
            assert_close(outs[layer], batch.reference(layer)[0], dtype=np.float32, what=f"layer {layer}")
    assert len(traces) == 1


def test_reading_never_copies_the_cache():
    spec = pp.CacheSpec(num_blocks=4096, block_size=16, num_kv_heads=2, head_size=64, num_layers=4, dtype=jnp.bfloat16)
    for content, order in itertools.product(("packed", "xpacked", "flash"), ("LBHNC", "LHBNC")):
        cache = jax.eval_shape(lambda c=content, o=order: pp.init_cache(replace(spec, content=c, order=o)))
        i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        metadata = pp.AttentionMetadata(i32(9), i32(8), i32(8, 8), i32(8), max_query_len=1)
        query = jax.ShapeDtypeStruct((8, 4, 64), jnp.bfloat16)
        layers = jax.jit(
            lambda q, c, m: jax.lax.scan(
                lambda x, layer: (pp.paged_attention(x, c, m, layer=layer, implementation="xla"), None), q, jnp.arange(4)
            )[0]
        )
        analysis = layers.lower(query, cache, metadata).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < spec.nbytes // 8, (content, order)


def test_vmap_over_a_leading_axis_is_a_stack_of_calls():
    batches = [random_batch(seed) for seed in (1, 2)]
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
    call = lambda q, c, m: pp.paged_attention(q, c, m, implementation="xla")  # noqa: E731
    outs = jax.vmap(call)(
        stack([jnp.asarray(b.query) for b in batches]), stack([b.cache() for b in batches]), stack([b.metadata for b in batches])
    )
    for out, batch in zip(outs, batches, strict=True):
        assert_close(out, batch.reference()[0], dtype=np.float32)


def test_heads_sharded_over_devices_stay_local(run_with_devices):
    run_with_devices(
        4,
        """
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        batch = random_batch(7, num_heads=8, num_kv_heads=4, num_layers=2)
        mesh = Mesh(np.array(jax.devices()), ("heads",))
        for content in ("packed", "xpacked", "flash"):
            cache = batch.cache(content=content)
            spec = P(*("heads" if axis == "H" else None for axis in cache.spec.axes))
            shards = pp.KVCache(spec, P(), P(), cache.spec)
            call = lambda q, c, m: pp.paged_attention(q, c, m, layer=jnp.int32(1), implementation="xla")
            sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(P(None, "heads"), shards, P()), out_specs=P(None, "heads")))
            placed = pp.KVCache(jax.device_put(cache.data, NamedSharding(mesh, spec)), cache.k_scale, cache.v_scale, cache.spec)
            text = sharded.lower(jnp.asarray(batch.query), placed, batch.metadata).compile().as_text()
            assert "all-gather" not in text and "all-reduce" not in text
            assert_close(sharded(jnp.asarray(batch.query), placed, batch.metadata), batch.reference(1)[0], dtype=np.float32)
        """,
    )


BAD_CALLS = {
    "query of rank 2": (lambda q, c, m: pp.paged_attention(q[0], c, m), ValueError, "query"),
    "integer query": (lambda q, c, m: pp.paged_attention(q.astype(int), c, m), TypeError, "query"),
    "another head size": (lambda q, c, m: pp.paged_attention(q[..., :16], c, m), ValueError, "head_size"),
    "heads that no KV head divides": (lambda q, c, m: pp.paged_attention(q[:, :3], c, m), ValueError, "multiple of num_kv_heads"),
    "no cache": (lambda q, c, m: pp.paged_attention(q, c.data, m), TypeError, "KVCache"),
    "no metadata": (lambda q, c, m: pp.paged_attention(q, c, None), TypeError, "metadata"),
    "layer past the cache": (lambda q, c, m: pp.paged_attention(q, c, m, layer=1), ValueError, "layer is 1"),
    "negative layer": (lambda q, c, m: pp.paged_attention(q, c, m, layer=-1), ValueError, "layer"),
    "float layer": (lambda q, c, m: pp.paged_attention(q, c, m, layer=0.0), TypeError, "layer"),
    "window -2": (lambda q, c, m: pp.paged_attention(q, c, m, sliding_window=-2), ValueError, "sliding_window"),
    "window as text": (lambda q, c, m: pp.paged_attention(q, c, m, sliding_window="4"), TypeError, "sliding_window"),
    "scale as text": (lambda q, c, m: pp.paged_attention(q, c, m, scale="0.5"), TypeError, "scale"),
    "soft cap as text": (lambda q, c, m: pp.paged_attention(q, c, m, logits_soft_cap="5"), TypeError, "logits_soft_cap"),
    "complex sinks": (lambda q, c, m: pp.paged_attention(q, c, m, sinks=[1j] * 4), TypeError, "sinks"),
    "ragged sinks": (lambda q, c, m: pp.paged_attention(q, c, m, sinks=[[1], [2, 3]]), ValueError, "sinks"),
    "an infinite sink": (lambda q, c, m: pp.paged_attention(q, c, m, sinks=[0, np.inf, 0, 0]), ValueError, r"sinks\[1\]"),
    "a NaN slope": (lambda q, c, m: pp.paged_attention(q, c, m, alibi_slopes=[0, 0, np.nan, 0]), ValueError, r"alibi_slopes\[2\]"),
    "a NaN bias": (lambda q, c, m: pp.paged_attention(q, c, m, qq_bias=[[np.nan]]), ValueError, "qq_bias"),
    "traced window": (lambda q, c, m: jax.jit(lambda w: pp.paged_attention(q, c, m, sliding_window=w))(3.0), TypeError, "sliding_window"),
    "negative soft cap": (lambda q, c, m: pp.paged_attention(q, c, m, logits_soft_cap=-1.0), ValueError, "logits_soft_cap"),
    "traced soft cap": (
        lambda q, c, m: jax.jit(lambda w: pp.paged_attention(q, c, m, logits_soft_cap=w))(3.0),
        TypeError,
        "logits_soft_cap",
    ),
    "slopes of another length": (lambda q, c, m: pp.paged_attention(q, c, m, alibi_slopes=np.ones(3)), ValueError, "alibi_slopes"),
    "sinks per KV head": (lambda q, c, m: pp.paged_attention(q, c, m, sinks=np.ones(2)), ValueError, "sinks"),
    "q_scale 0": (lambda q, c, m: pp.paged_attention(q, c, m, q_scale=0.0), ValueError, "q_scale"),
    "q_scale per head": (lambda q, c, m: pp.paged_attention(q, c, m, q_scale=np.ones(4)), ValueError, "q_scale"),
    "infinite output_scale": (lambda q, c, m: pp.paged_attention(q, c, m, output_scale=np.inf), ValueError, "output_scale"),
    "fp8 output without a scale": (lambda q, c, m: pp.paged_attention(q, c, m, output_dtype=jnp.float8_e4m3fn), ValueError, "output_scale"),
    "a scaled output that is not fp8": (
        lambda q, c, m: pp.paged_attention(q, c, m, output_scale=1.0, output_dtype=jnp.float32),
        ValueError,
        "fp8",
    ),
    "qq_bias of rank 1": (lambda q, c, m: pp.paged_attention(q, c, m, qq_bias=np.ones(4)), ValueError, "qq_bias"),
    "NaN scale": (lambda q, c, m: pp.paged_attention(q, c, m, scale=float("nan")), ValueError, "scale"),
    "unknown implementation": (lambda q, c, m: pp.paged_attention(q, c, m, implementation="cuda"), ValueError, "implementation"),
    "table for other sequences": (
        lambda q, c, m: pp.paged_attention(q, c, replace(m, block_table=m.block_table[:2])),
        ValueError,
        "block_table",
    ),
    "float lengths": (lambda q, c, m: pp.paged_attention(q, c, replace(m, seq_lens=m.seq_lens * 1.0)), TypeError, "seq_lens"),
    "a cache of another rank": (lambda q, c, m: pp.paged_attention(q, replace(c, data=c.data[0]), m), ValueError, "cache.data"),
    "a cache of another dtype": (
        lambda q, c, m: pp.paged_attention(q, replace(c, data=c.data.astype(jnp.int8)), m),
        TypeError,
        "cache.data",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_are_named(name):
    batch = random_batch(1)
    call, error, words = BAD_CALLS[name]
    with pytest.raises(error, match=words):
        call(jnp.asarray(batch.query), batch.cache(), batch.metadata)


def test_an_integer_of_any_width_is_the_same_metadata():
    batch = random_batch(4)
    expected = np.asarray(attend(batch))
    for dtype in (jnp.int8, jnp.int16, jnp.uint32):
        table = jnp.clip(batch.metadata.block_table, 0, 100).astype(dtype)
        metadata = replace(batch.metadata, block_table=table, seq_lens=batch.metadata.seq_lens.astype(dtype))
        out = pp.paged_attention(jnp.asarray(batch.query), batch.cache(), metadata, implementation="xla")
        np.testing.assert_array_equal(np.asarray(out), expected)


def test_jit_equals_eager():
    batch = random_batch(6, dtype=BF16)
    eager = attend(batch)
    jitted = jax.jit(lambda q, c, m: pp.paged_attention(q, c, m, implementation="xla"))(
        jnp.asarray(batch.query), batch.cache(), batch.metadata
    )
    np.testing.assert_array_equal(np.asarray(eager), np.asarray(jitted))


def test_the_oracle_disagrees_with_a_wrong_mask():
    """The comparison above can fail."""
    batch = random_batch(6)
    wrong = reference_attention(
        batch.query,
        batch.key_cache[0],
        batch.value_cache[0],
        batch.metadata.query_start_loc,
        batch.metadata.seq_lens,
        batch.metadata.block_table,
        sliding_window=3,
    )[0]
    with pytest.raises(AssertionError):
        assert_close(attend(batch), wrong, dtype=np.float32)
