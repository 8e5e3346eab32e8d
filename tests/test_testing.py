"""The oracle against closed forms, before anything is judged by it; and the comparison against mistakes that it must catch."""

import inspect
import math
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from purepage.functional import reference, reference_cache
from purepage.functional.cache import cache_to_logical
from purepage.functional.metadata import make_metadata, validate_metadata
from purepage.functional.testing import (
    KINDS,
    TOLERANCES,
    assert_close,
    mrope_rows,
    quantize,
    random_batch,
    reference_address,
    reference_attention,
    reference_encoder_attention,
    reference_merge,
    reference_qk_norm_rope,
    reference_rope,
    reference_update_cache,
    round_to,
    tolerance,
)

bf16, e4m3fn, e4m3fnuz, e5m2, e5m2fnuz = (
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
)
FP8 = (e4m3fn, e4m3fnuz, e5m2, e5m2fnuz)
DTYPES = tuple(np.dtype(d) for d in (np.float32, np.float16, bf16, *FP8))
SIGMOID_1 = 1 / (1 + math.exp(-1))


def name_of(value):
    return np.dtype(value).name


def paged(keys, values, query, *, block_size=16, dtype=np.float64):
    """Arguments of one sequence: keys, values [L, H, D] in shuffled blocks of a pool that is NaN elsewhere; query [q, Hq, D]."""
    length, heads, dim = keys.shape
    count = -(-length // block_size)
    table = np.arange(count)[::-1] * 2 + 1
    caches = np.full((2, 2 * count + 2, block_size, heads, dim), np.nan)
    k = np.arange(length)
    caches[0, table[k // block_size], k % block_size] = keys
    caches[1, table[k // block_size], k % block_size] = values
    return {
        "query": query,
        "key_cache": caches[0].astype(dtype),
        "value_cache": caches[1].astype(dtype),
        "query_start_loc": [0, len(query)],
        "seq_lens": [length],
        "block_table": [[*table, -1, 2**31 - 1]],
    }


def positions(length, query_len=1, *, heads=1, kv_heads=1, dim=4, **options):
    """q = 0 and V[j] = j: every output is the mean of the positions that its query attends."""
    values = np.broadcast_to(np.arange(length, dtype=np.float64)[:, None, None], (length, kv_heads, dim))
    keys = np.random.default_rng(length).standard_normal((length, kv_heads, dim))
    return paged(keys, values, np.zeros((query_len, heads, dim)), **options)


def means(arguments, **options):
    out, _ = reference_attention(**arguments, **options)
    assert np.all(out == out[:, :, :1])
    return out[:, 0, 0]


def two_keys(first, second, *, query=1.0, dtype=np.float64, dim=1, values=(0.0, 1.0)):
    """One query [query, 0, ..] over keys [first, 0, ..], [second, 0, ..]."""
    keys, q = np.zeros((2, 1, dim)), np.zeros((1, 1, dim))
    keys[:, 0, 0], q[0, 0, 0] = (first, second), query
    return paged(keys, np.broadcast_to(np.array(values)[:, None, None], (2, 1, dim)), q, dtype=dtype)


# --- the oracle stands alone


@pytest.mark.parametrize("module", [reference, reference_cache], ids=lambda m: m.__name__.rsplit(".", 1)[-1])
def test_the_oracle_imports_nothing_of_the_library_it_judges(module):
    lines = [line.strip() for line in inspect.getsource(module).splitlines() if line.startswith(("import ", "from "))]
    own = [line for line in lines if line.startswith("from .") or "purepage" in line]
    assert all(line.startswith("from .reference import") for line in own)
    assert not any("jax." in line or line == "import jax" for line in lines)


# --- masks and windows


def test_windows_slide_with_the_queries_of_a_chunk():  # vllm#4405
    np.testing.assert_allclose(means(positions(67, 3), sliding_window=2), [63.5, 64.5, 65.5], rtol=1e-15)


@pytest.mark.parametrize("poison", ["nan", "no block"])
def test_blocks_before_the_window_are_never_read(poison):  # vllm#30887
    case = positions(64)
    table = np.array(case["block_table"])
    if poison == "nan":
        case["key_cache"][table[0, :3]] = np.nan
        case["value_cache"][table[0, :3]] = np.nan
    else:
        table[0, :3] = -1
    assert means({**case, "block_table": table}, sliding_window=8) == [59.5]


@pytest.mark.parametrize("query_len", [1, 5, 10], ids=["decode", "chunk", "prefill"])
@pytest.mark.parametrize(("window", "mean"), [(1, 9.0), (4, 7.5), (9, 5.0), (10, 4.5), (11, 4.5), (None, 4.5)])
def test_a_window_counts_the_query_itself_however_the_prompt_is_cut(window, mean, query_len):
    assert means(positions(10, query_len), sliding_window=window)[-1] == pytest.approx(mean, rel=1e-15)


@pytest.mark.parametrize(("window", "rows"), [(3, {0: 1.0, 5: 5.0, 9: 8.0}), (1, {0: 0.0, 5: 5.0, 9: 9.0}), (None, {0: 4.5, 9: 4.5})])
def test_an_encoder_window_is_symmetric(window, rows):  # sglang#33603, vllm#44040
    values = np.broadcast_to(np.arange(10.0)[:, None, None], (10, 1, 2))
    out, _ = reference_encoder_attention(np.zeros((10, 1, 2)), np.ones((10, 1, 2)), values, [0, 10], sliding_window=window)
    assert {row: out[row, 0, 0] for row in rows} == pytest.approx(rows, rel=1e-15)


def test_a_window_that_is_not_causal_is_symmetric_over_pages_too():
    case = positions(10, 10, block_size=4)
    np.testing.assert_allclose(means(case, causal=False, sliding_window=3)[[0, 5, 9]], [1.0, 5.0, 8.0], rtol=1e-15)


def test_a_window_edge_inside_a_block_is_exact():
    assert means(positions(40), sliding_window=20) == [29.5]


def test_every_query_of_cross_attention_sees_every_key_whatever_their_number():  # vllm#38321
    together = means(positions(20, 3), causal=False)
    assert together == pytest.approx([9.5] * 3, rel=1e-15)
    assert means(positions(20, 1), causal=False) == pytest.approx(together[:1], rel=0)
    assert means(positions(2, 5), causal=False) == pytest.approx([0.5] * 5)  # more queries than keys


def test_the_first_query_of_a_chunk_keeps_its_whole_window():  # executorch#20346
    assert means(positions(32, 16), sliding_window=8)[0] == 12.5


def test_packed_encoder_sequences_see_their_own_tokens_only():  # HunyuanVideo#310
    values = np.repeat([1.0, 2.0, 3.0], [2, 3, 4])[:, None, None]
    draw = np.random.default_rng(0).standard_normal
    out, lse = reference_encoder_attention(draw((11, 2, 1)), draw((11, 1, 1)), np.concatenate([values, [[[np.nan]]] * 2]), [0, 2, 5, 9])
    np.testing.assert_allclose(out[:9, 1, 0], values[:, 0, 0], rtol=1e-15)
    assert np.all(out[9:] == 0) and np.all(lse[9:] == -np.inf)


@pytest.mark.parametrize(("scale", "expected"), [(1 / 64, 0.731059), (None, 0.999665), (1.0, 1.0)])
def test_the_given_scale_is_the_scale(scale, expected):  # vllm#32149
    query, key, value = np.zeros((2, 1, 64)), np.zeros((2, 1, 64)), np.zeros((2, 1, 64))
    query[0, 0, 0] = key[1, 0, 0] = 8
    value[1] = 1
    out, _ = reference_encoder_attention(query, key, value, [0, 2], scale=scale)
    np.testing.assert_allclose(out[0], expected, atol=5e-7)
    paged_out, _ = reference_attention(**paged(key, value, query[:1]), scale=scale)
    np.testing.assert_allclose(paged_out[0], expected, atol=5e-7)


def test_new_queries_attend_to_the_cached_prefix():  # xllm#2161
    np.testing.assert_allclose(means(positions(6, 2)), [2.0, 2.5], rtol=1e-15)


@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
def test_a_block_table_is_indexed_by_block_not_by_token(block_size):  # aiter#4440
    np.testing.assert_allclose(means(positions(20, 20, block_size=block_size)), np.arange(20) / 2, rtol=1e-15)


def test_a_visible_key_in_a_block_that_does_not_exist_is_an_error():
    case = positions(20)
    with pytest.raises(IndexError, match="sequence 0 sees a key in block -1"):
        reference_attention(**{**case, "block_table": [[1, -1]]})
    with pytest.raises(IndexError):
        reference_attention(**{**case, "block_table": [[1]]})


# --- empty things


@pytest.mark.parametrize("sinks", [None, [0.25, -1.0]], ids=["no sinks", "sinks"])
def test_tokens_without_keys_give_zero_and_their_sink(sinks):  # vllm#57094
    case = positions(5, 1, heads=2)
    draw = np.random.default_rng(0).standard_normal
    case.update(
        query=np.concatenate([draw((3, 2, 4)), np.full((2, 2, 4), np.nan)]),
        query_start_loc=[0, 1, 2, 2, 3],
        seq_lens=[5, 0, 0, 5],
        block_table=[case["block_table"][0], [-1] * 3, [9] * 3, case["block_table"][0]],
    )
    out, lse = reference_attention(**case, sinks=sinks)
    assert np.all(out[1] == 0) and np.all(out[3:] == 0)
    np.testing.assert_array_equal(lse[1], [-np.inf] * 2 if sinks is None else sinks)
    assert np.all(lse[3:] == -np.inf)
    alone, alone_lse = reference_attention(**{**case, "query": case["query"][:1], "query_start_loc": [0, 1], "seq_lens": [5]}, sinks=sinks)
    np.testing.assert_array_equal(out[0], alone[0])
    np.testing.assert_array_equal(lse[0], alone_lse[0])
    assert np.all(out[2] != 0)


def test_queries_before_the_sequence_see_nothing():  # q_len > kv_len, aiter's own grid
    out, lse = reference_attention(**positions(2, 5))
    np.testing.assert_array_equal(out[:, 0, 0], [0, 0, 0, 0, 0.5])
    assert np.all(lse[:3] == -np.inf) and np.all(np.isfinite(lse[3:]))


# --- soft cap, alibi, sinks, bias


@pytest.mark.parametrize(("score", "expected"), [(4400.0, 50.0), (5000.0, 50.0), (-10000.0, -50.0), (1.0, 50 * math.tanh(0.02))])
def test_a_soft_cap_saturates_and_is_never_nan(score, expected):
    _, lse = reference_attention(
        **paged(np.full((1, 1, 1), score), np.ones((1, 1, 1)), np.ones((1, 1, 1))), scale=1.0, logits_soft_cap=50.0
    )
    np.testing.assert_allclose(lse, expected, rtol=1e-14)


def test_a_soft_cap_does_not_lift_masked_keys():
    values = np.array([0.0, 1.0])[:, None, None]
    out, _ = reference_attention(**paged(np.ones((2, 1, 1)), values, np.zeros((2, 1, 1))), logits_soft_cap=1.0)
    np.testing.assert_array_equal(out[:, 0, 0], [0.0, 0.5])


@pytest.mark.parametrize(("cap", "expected"), [(2.0, 0.880797), (None, 1.0), (0, 1.0), (0.0, 1.0)])
def test_a_soft_cap_follows_the_scale(cap, expected):
    out, _ = reference_attention(**two_keys(0, 800), scale=1 / 8, logits_soft_cap=cap)
    np.testing.assert_allclose(out[0, 0, 0], expected, atol=5e-7)


@pytest.mark.parametrize(("sink", "expected"), [(100.0, 2 * math.exp(-100)), (-np.inf, 1.0), (1e4, 0.0), (0.0, 2 / 3), (math.log(2), 0.5)])
def test_a_sink_is_a_logit_of_the_denominator(sink, expected):
    out, lse = reference_attention(**paged(np.ones((2, 1, 1)), np.ones((2, 1, 1)), np.zeros((1, 1, 1))), sinks=[sink])
    np.testing.assert_allclose(out[0, 0, 0], expected, rtol=1e-12)
    np.testing.assert_allclose(lse[0, 0], np.logaddexp(math.log(2), sink), rtol=1e-15)


def test_a_sink_is_neither_scaled_nor_capped():
    out, _ = reference_attention(**two_keys(0, 0, query=0), sinks=[3.0], scale=1 / 8, logits_soft_cap=2.0)
    np.testing.assert_allclose(out[0, 0, 0], 1 / (2 + math.exp(3)), rtol=1e-14)


def test_every_query_head_has_its_own_sink():  # tpu-inference#3167
    case = paged(np.ones((1, 2, 8)), np.ones((1, 2, 8)), np.zeros((1, 10, 8)))
    out, _ = reference_attention(**case, sinks=np.log(np.arange(10) + 1))
    np.testing.assert_allclose(out[0, :, 0], 1 / (np.arange(10) + 2), rtol=1e-14)


def test_alibi_is_relative_to_the_query():  # vllm#945; sinks tell the conventions apart
    case = paged(np.ones((4, 1, 1)), np.ones((4, 1, 1)), np.zeros((4, 1, 1)))
    out, _ = reference_attention(**case, alibi_slopes=[0.5], sinks=[0.0])
    np.testing.assert_allclose(out[3, 0, 0], 0.687260, atol=5e-7)
    mass = [sum(math.exp(-0.5 * d) for d in range(n + 1)) for n in range(4)]
    np.testing.assert_allclose(out[:, 0, 0], [m / (m + 1) for m in mass], rtol=1e-14)


def test_alibi_keeps_far_distances_apart():
    values = np.zeros((4096, 1, 1))
    values[0], values[1] = 1e6, -1e6 * math.exp(-(2**-8))
    out, _ = reference_attention(**paged(np.ones((4096, 1, 1)), values, np.zeros((1, 1, 1))), alibi_slopes=[2**-8])
    assert abs(out[0, 0, 0]) < 1e-9  # exp(-4095 s) cancels exp(-4094 s) * exp(-s)


def test_alibi_comes_after_the_soft_cap():
    case = two_keys(0, 100)
    _, lse = reference_attention(**case, scale=1.0, logits_soft_cap=2.0, alibi_slopes=[3.0])
    np.testing.assert_allclose(lse[0, 0], np.logaddexp(-3.0, 2.0), rtol=1e-14)


def test_qq_bias_adds_to_the_keys_of_this_step_only():
    bias = np.log([[1.0, 9.0, 9.0], [3.0, 1.0, 9.0], [1.0, 5.0, 2.0]])
    case = positions(6, 3)
    out, _ = reference_attention(**case, qq_bias=bias)
    weights = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 3, 1, 0], [1, 1, 1, 1, 5, 2]])
    np.testing.assert_allclose(out[:, 0, 0], weights @ np.arange(6) / weights.sum(1), rtol=1e-14)
    narrow, _ = reference_attention(**case, qq_bias=bias[:, :1])
    weights = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 3, 1, 0], [1, 1, 1, 1, 1, 1]])
    np.testing.assert_allclose(narrow[:, 0, 0], weights @ np.arange(6) / weights.sum(1), rtol=1e-14)


def test_qq_bias_of_minus_infinity_masks():
    case = positions(6, 3)
    bias = np.where(np.eye(3, dtype=bool), 0, -np.inf)
    out, _ = reference_attention(**case, qq_bias=bias)
    np.testing.assert_allclose(out[:, 0, 0], [(0 + 1 + 2 + k) / 4 for k in (3, 4, 5)], rtol=1e-14)
    hidden, lse = reference_attention(**positions(3, 3), qq_bias=np.full((3, 3), -np.inf))
    assert np.all(hidden == 0) and np.all(lse == -np.inf)


# --- scales and fp8


def test_a_query_scale_multiplies_the_scores():
    case = two_keys(0, 1, query=4.0)
    case["query"] = case["query"].astype(e4m3fn)
    for q_scale, expected in ((0.25, 0.731059), (None, 0.982014)):
        np.testing.assert_allclose(reference_attention(**case, scale=1.0, q_scale=q_scale)[0][0, 0, 0], expected, atol=5e-7)


@pytest.mark.parametrize("spelling", [float, np.float32, np.array, lambda x: np.array([x])], ids=["float", "float32", "0-d", "[1]"])
@pytest.mark.parametrize("dtype", FP8, ids=name_of)
def test_key_and_value_scales_keep_to_their_sides(dtype, spelling):
    case = two_keys(0, 2, dtype=dtype)
    for k_scale, v_scale, expected in ((0.5, 2.0, 1.462117), (1.0, 1.0, 0.880797), (2.0, 0.5, 0.491007)):
        out, _ = reference_attention(**case, scale=1.0, k_scale=spelling(k_scale), v_scale=spelling(v_scale))
        np.testing.assert_allclose(out[0, 0, 0], expected, atol=5e-7)


def test_every_kv_head_has_its_own_scales():
    keys = np.ones((2, 3, 1)) * np.array([0.0, 2.0])[:, None, None]
    values = np.ones((2, 3, 1)) * np.array([0.0, 1.0])[:, None, None]
    k_scale, v_scale = np.array([0.5, 1.0, 2.0]), np.array([3.0, 5.0, 7.0])
    out, _ = reference_attention(**paged(keys, values, np.ones((1, 6, 1))), scale=1.0, k_scale=k_scale, v_scale=v_scale)
    np.testing.assert_allclose(out[0, :, 0], np.repeat(v_scale / (1 + np.exp(-2 * k_scale)), 2), rtol=1e-14)


def test_a_scale_of_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="k_scale"):
        reference_attention(**two_keys(0, 2), k_scale=[1.0, 2.0])


def test_scales_of_the_same_data_agree():  # aiter#5661: the reference itself
    rng = np.random.default_rng(0)
    keys, values, query = rng.integers(-8, 9, (9, 1, 4)) / 4.0, rng.integers(-8, 9, (9, 1, 4)) / 4.0, rng.standard_normal((2, 1, 4))
    whole, _ = reference_attention(**paged(keys, values, query))
    halved, _ = reference_attention(**paged(keys * 2, values * 4, query, dtype=e4m3fn), k_scale=0.5, v_scale=0.25)
    np.testing.assert_allclose(halved, whole, rtol=1e-14)


def test_an_output_scale_divides_and_ties_go_to_even():
    case = paged(np.ones((1, 1, 1)), np.full((1, 1, 1), 100.0), np.zeros((1, 1, 1)))
    codes, _ = reference_attention(**case, output_scale=0.25)
    assert codes.dtype == e4m3fn and float(codes[0, 0, 0]) == 384


@pytest.mark.parametrize(
    ("dtype", "largest"), list(zip(FP8, (448, 240, 57344, 57344), strict=True)), ids=["fn", "fnuz", "e5m2", "e5m2fnuz"]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_fp8_outputs_saturate(dtype, largest, sign):
    case = paged(np.ones((1, 1, 1)), np.full((1, 1, 1), sign * 1e5), np.zeros((1, 1, 1)))
    codes, _ = reference_attention(**case, output_scale=1.0, output_dtype=dtype)
    assert codes.dtype == dtype and float(codes[0, 0, 0]) == sign * largest


def test_an_output_dtype_without_a_scale_rounds_once():
    case = paged(np.ones((1, 1, 1)), np.full((1, 1, 1), 1 + 2**-8 + 2**-30), np.zeros((1, 1, 1)))
    out, _ = reference_attention(**case, output_dtype=bf16)
    assert float(out[0, 0, 0]) == 1 + 2**-7  # through float32 it would tie, and fall to 1


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
def test_this_steps_tokens_can_be_attended_at_full_precision(dtype):
    batch = random_batch(4, dtype=bf16, cache_dtype=dtype, kind="chunked")
    stepped, _ = batch.reference(step_key=batch.key, step_value=batch.value)
    cached, _ = batch.reference()
    assert not np.allclose(stepped, cached, rtol=1e-3)
    exact = random_batch(4, dtype=bf16, kind="chunked")
    np.testing.assert_array_equal(exact.reference(step_key=exact.key, step_value=exact.value)[0], exact.reference()[0])
    # Without context there is nothing to read from the cache.
    fresh = random_batch(4, dtype=bf16, cache_dtype=dtype, kind="prefill")
    alone = fresh.reference(step_key=fresh.key, step_value=fresh.value)
    encoded = reference_encoder_attention(fresh.query, fresh.key, fresh.value, fresh.metadata.query_start_loc, causal=True)
    np.testing.assert_allclose(alone[0], encoded[0], rtol=1e-12)


# --- heads


@pytest.mark.parametrize(("num_heads", "kv_heads"), [(10, 2), (12, 2), (14, 2), (7, 1), (3, 3), (71, 1)])
def test_query_heads_share_kv_heads_in_runs(num_heads, kv_heads):
    group = num_heads // kv_heads
    values = np.broadcast_to(np.arange(1.0, kv_heads + 1)[None, :, None], (6, kv_heads, 8))
    keys = np.zeros((6, kv_heads, 8))
    keys[np.arange(kv_heads), np.arange(kv_heads), 0] = 50
    case = paged(keys, values, np.zeros((1, num_heads, 8)))
    out, _ = reference_attention(**case)
    np.testing.assert_allclose(out[0, :, 0], np.arange(num_heads) // group + 1, rtol=1e-14)
    query = np.zeros((1, num_heads, 8))
    query[..., 0] = 1
    where = np.broadcast_to(np.arange(6.0)[:, None, None], (6, kv_heads, 8))
    out, _ = reference_attention(**paged(keys, where, query), scale=1.0)
    np.testing.assert_allclose(out[0, :, 0], np.arange(num_heads) // group, atol=1e-12)


@pytest.mark.parametrize("dim", [32, 72, 80, 96, 112, 160, 192, 224, 256, 512])
def test_every_channel_counts_once(dim):
    keys = np.broadcast_to(np.array([0.0, 1.0])[:, None, None], (2, 1, dim))
    out, _ = reference_attention(**paged(keys, keys, np.ones((1, 1, dim))), scale=1 / dim)
    np.testing.assert_allclose(out, SIGMOID_1, rtol=1e-14)


def test_large_half_precision_products_stay_finite():
    query = np.full((1, 1, 128), 256, np.float16)
    keys = np.full((2, 1, 128), 256, np.float16)
    _, lse = reference_attention(**paged(keys, keys, query, dtype=np.float16))
    np.testing.assert_allclose(lse, 128 * 65536 / math.sqrt(128) + math.log(2), rtol=1e-14)


# --- merging


def test_merging_two_halves_gives_the_whole():
    batch = random_batch(2, kind="decode", num_seqs=3)
    whole, lse = batch.reference(sinks=[0.1, -0.2, 0.3, 2.0])
    lengths = np.asarray(batch.metadata.seq_lens)
    near = {"sliding_window": 7}
    right, right_lse = batch.reference(**near, sinks=[0.1, -0.2, 0.3, 2.0])
    left_lengths = np.maximum(lengths - 7, 0)
    left, left_lse = replace(batch, metadata=replace(batch.metadata, seq_lens=left_lengths)).reference()
    out, merged = reference_merge(left, left_lse, right, right_lse)
    np.testing.assert_allclose(out, whole, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(merged, lse, rtol=1e-12)


def test_merging_empty_states():
    empty, none = np.zeros((1, 1, 2)), np.full((1, 1), -np.inf)
    some, lse = np.full((1, 1, 2), 3.0), np.full((1, 1), -800.0)
    out, merged = reference_merge(empty, none, empty, none)
    assert np.all(out == 0) and np.all(merged == -np.inf)
    for a, b in (((some, lse), (np.full_like(some, np.nan), none)), ((np.full_like(some, np.nan), none), (some, lse))):
        out, merged = reference_merge(*a, *b)
        np.testing.assert_array_equal(out, some)
        np.testing.assert_array_equal(merged, lse)


# --- rounding and the cache writer


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_round_to_takes_the_nearest_and_the_even_of_two(dtype):
    info = ml_dtypes.finfo(dtype)
    codes = (
        np.arange(256, dtype=np.uint8).view(dtype) if dtype.itemsize == 1 else np.random.default_rng(0).standard_normal(300).astype(dtype)
    )
    exact = np.unique(codes.astype(np.float64)[np.isfinite(codes.astype(np.float64))])
    np.testing.assert_array_equal(round_to(exact, dtype).astype(np.float64), exact)
    if dtype.itemsize == 1:
        middles, low, high = (exact[:-1] + exact[1:]) / 2, exact[:-1], exact[1:]
        np.testing.assert_array_equal(round_to(np.nextafter(middles, -np.inf), dtype).astype(np.float64), low)
        np.testing.assert_array_equal(round_to(np.nextafter(middles, np.inf), dtype).astype(np.float64), high)
        tied = round_to(middles, dtype)
        assert np.all((tied.view(np.uint8) & 1) == 0)
    one = round_to([1 + float(info.eps) / 2, 1 + float(info.eps) * 1.5], dtype).astype(np.float64)
    np.testing.assert_array_equal(one, [1, 1 + 2 * float(info.eps)])


@pytest.mark.parametrize(
    ("dtype", "plus", "minus"), [(e4m3fn, 0x7E, 0xFE), (e4m3fnuz, 0x7F, 0xFF), (e5m2, 0x7B, 0xFB), (e5m2fnuz, 0x7F, 0xFF)]
)
def test_fp8_stores_saturate_and_keep_nan(dtype, plus, minus):
    values = np.array([1e6, -1e6, np.inf, -np.inf, np.nan], np.float32)
    stored = quantize(values, dtype)
    assert stored.view(np.uint8)[:4].tolist() == [plus, minus, plus, minus]
    assert np.isnan(stored[4].astype(np.float64))
    assert quantize(np.float32([3e38]), dtype, 1e-5).view(np.uint8)[0] == plus  # the quotient overflows float32


def test_fp8_stores_follow_their_formula():
    assert float(quantize(np.float32(0.703125), e4m3fn, 0.9)) == 0.75  # a division; times the reciprocal gives 0.8125
    assert float(quantize(np.float32(1.0627), e4m3fn)) == 1.125  # one rounding; through bfloat16 it is 1.0
    assert quantize(np.float32([-1e-7]), e4m3fnuz).view(np.uint8)[0] == 0  # -0 of fnuz would be NaN
    np.testing.assert_array_equal(quantize(np.zeros(4, bf16), e5m2, 0.3).astype(np.float32), 0)
    bits = quantize(np.float32([1, 2, 3.5, 0.25]), e4m3fnuz).view(e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(bits, [2, 4, 7, 0.5])  # the two kinds differ by a factor of two


@pytest.mark.parametrize("cache_dtype", [np.float32, bf16, e4m3fn], ids=name_of)
def test_the_writer_stores_live_slots_and_nothing_else(cache_dtype):
    rng = np.random.default_rng(1)
    key, value = rng.standard_normal((2, 8, 2, 4)).astype(bf16)
    key[7] = np.nan
    caches = np.full((2, 3, 4, 2, 4), 7.0, cache_dtype)
    slots = np.array([5, -1, 0, 12, 11, 2**31 + 5, -7], np.int64)
    new = reference_update_cache(*caches, key, value, slots, k_scale=[0.5, 2.0], v_scale=3.0)
    for side, rows, scale in ((new[0], key, np.array([0.5, 2.0])[:, None]), (new[1], value, np.float64(3.0))):
        assert side.dtype == cache_dtype
        flat = side.reshape(12, 2, 4)
        live = {5: 0, 0: 2, 11: 4}
        for slot in range(12):
            divided = rows[live[slot]].astype(np.float32) / (scale if cache_dtype is e4m3fn else 1) if slot in live else np.float32(7)
            np.testing.assert_array_equal(flat[slot], np.broadcast_to(np.asarray(divided, np.float32).astype(cache_dtype), (2, 4)))
    assert np.all(caches == 7)


# --- rotary embedding


def angles(rotary, rows=800, theta=10000.0):
    phase = np.arange(rows)[:, None] * theta ** (-np.arange(0, rotary, 2) / rotary)
    return np.concatenate([np.cos(phase), np.sin(phase)], axis=1)


@pytest.mark.parametrize("position", [0, 1, 700])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
def test_partial_rotary_turns_pairs_within_the_rotary_channels(position, is_neox):
    x = np.random.default_rng(2).standard_normal((1, 3, 8))
    out = reference_rope([position], x, angles(4), is_neox=is_neox)
    pairs = [(0, 2), (1, 3)] if is_neox else [(0, 1), (2, 3)]
    for (a, b), frequency in zip(pairs, (1.0, 0.01), strict=True):
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * position * frequency)
        np.testing.assert_allclose(out[..., a] + 1j * out[..., b], turned, rtol=1e-10)
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])


def test_rope_reads_the_row_of_its_position_and_rounds_once():
    table = np.concatenate([np.arange(1.0, 6)[:, None] * [1, 10], np.zeros((5, 2))], axis=1)
    x = np.ones((3, 1, 4), bf16)
    out = reference_rope([4, 0, 2], x, table)
    assert out.dtype == bf16
    np.testing.assert_array_equal(out[:, 0].astype(float), [[5, 50, 5, 50], [1, 10, 1, 10], [3, 30, 3, 30]])
    tilted = np.array([[1.0, 2**-8 + 2**-30]])
    assert float(reference_rope([0], np.ones((1, 1, 2), bf16), tilted)[0, 0, 1]) == 1 + 2**-7


@pytest.mark.parametrize("position", [-1, 5, 2**31])
def test_a_position_outside_the_table_is_an_error(position):
    with pytest.raises(IndexError):
        reference_rope([position], np.ones((1, 1, 2)), np.ones((5, 2)))


@pytest.mark.parametrize(
    ("section", "interleaved", "rows"),
    [((4, 1, 1), True, [0, 1, 2, 0, 0, 0]), ((2, 2, 2), True, [0, 1, 2, 0, 1, 2]), ((2, 3, 1), False, [0, 0, 1, 1, 1, 2])],
)
def test_mrope_takes_each_frequency_from_its_axis(section, interleaved, rows):
    assert mrope_rows(section, is_interleaved=interleaved) == rows
    table = np.concatenate([np.broadcast_to(np.arange(9.0)[:, None] + 1, (9, 6)), np.zeros((9, 6))], axis=1)
    qkv = np.ones((1, 3 * 12))
    query, key, value = reference_qk_norm_rope(
        qkv, np.ones(12), np.ones(12), [[0], [3], [8]], table, num_heads=1, eps=0.0, mrope_section=section, is_interleaved=interleaved
    )
    expected = np.array([1, 4, 9])[rows]
    for rotated in (query, key):
        np.testing.assert_allclose(rotated[0, 0], np.tile(expected, 2), rtol=1e-14)
    np.testing.assert_array_equal(value[0, 0], np.ones(12))


def test_mrope_of_equal_rows_is_rope():
    rng = np.random.default_rng(3)
    arguments = (rng.standard_normal((5, 4 * 8)), rng.standard_normal(8), rng.standard_normal(8))
    plain = reference_qk_norm_rope(*arguments, np.arange(5), angles(8), num_heads=2)
    for where in (np.arange(5), np.tile(np.arange(5), (3, 1))):
        same = reference_qk_norm_rope(*arguments, where, angles(8), num_heads=2, mrope_section=(2, 1, 1), is_interleaved=True)
        assert all(np.array_equal(a, b) for a, b in zip(plain, same, strict=True))


@pytest.mark.parametrize(("eps", "expected"), [(1e-5, 0.301511), (1e-6, 0.707107)])
def test_eps_is_added_inside_the_root(eps, expected):
    qkv = np.full((1, 3 * 8), 1e-3)
    query, key, value = reference_qk_norm_rope(qkv, np.ones(8), np.full(8, 2.0), [0], angles(8), num_heads=1, eps=eps)
    np.testing.assert_allclose(query, expected, atol=5e-7)
    np.testing.assert_allclose(key, 2 * expected, atol=1e-6)
    np.testing.assert_array_equal(value, 1e-3)


def test_the_norm_is_per_head_and_rounds_before_it_turns():
    rng = np.random.default_rng(4)
    qkv = (rng.standard_normal((3, 4 * 8)) * np.repeat([1, 10, 100, 1], 8)).astype(bf16)
    weight = (1 + 0.3 * rng.standard_normal(8)).astype(bf16)
    query, _, value = reference_qk_norm_rope(qkv, weight, weight, [1, 2, 3], angles(4), num_heads=2)
    x = qkv.reshape(3, 4, 8)[:, :2].astype(np.float64)
    normed = (x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)).astype(np.float32).astype(bf16)
    np.testing.assert_array_equal(query, reference_rope([1, 2, 3], normed, angles(4)))
    np.testing.assert_array_equal(value, qkv.reshape(3, 4, 8)[:, 3:])


# --- addresses

CONTENTS = ("packed", "xpacked", "xpacked_interleaved_v", "shuffled", "flash")


@pytest.mark.parametrize("order", ["LBHNC", "LHBNC"])
@pytest.mark.parametrize("content", CONTENTS)
def test_addresses_cover_the_buffer_once(content, order):
    extents = {"num_blocks": 3, "num_kv_heads": 2, "block_size": 16, "head_size": 32, "itemsize": 2}
    index = np.ix_(range(2), range(3), range(2), range(16), range(32))
    names = ("layer", "block", "head", "token", "dim")
    sides = [reference_address(content, order, **extents, side=side, **dict(zip(names, index, strict=True))) for side in (0, 1)]
    assert sorted(np.concatenate([side.ravel() for side in sides])) == list(range(2 * 2 * 3 * 2 * 16 * 32))


@pytest.mark.parametrize(
    ("content", "order", "key", "value"),
    [
        # l=1 b=2 h=1 n=5 d=11 with B=3 H=2 N=16 D=32 x=8, worked by hand
        ("packed", "LBHNC", ((((1 * 3 + 2) * 2 + 1) * 16) + 5) * 64 + 11, ((((1 * 3 + 2) * 2 + 1) * 16) + 5) * 64 + 43),
        ("packed", "LHBNC", ((((1 * 2 + 1) * 3 + 2) * 16) + 5) * 64 + 11, ((((1 * 2 + 1) * 3 + 2) * 16) + 5) * 64 + 43),
        ("xpacked", "LBHNC", 10 * 1024 + ((4 + 1) * 16 + 5) * 8 + 3, 11 * 1024 + (32 + 11) * 16 + 5),
        ("xpacked", "LHBNC", 8 * 1024 + ((4 + 1) * 16 + 5) * 8 + 3, 11 * 1024 + (32 + 11) * 16 + 5),
        ("xpacked_interleaved_v", "LBHNC", 10 * 1024 + ((4 + 1) * 16 + 5) * 8 + 3, 11 * 1024 + 512 + 0 * 256 + 11 * 8 + 5),
        ("shuffled", "LHBNC", 8 * 1024 + ((4 + 1) * 16 + 5) * 8 + 3, 11 * 1024 + 512 + 0 * 256 + 11 * 8 + 5),
        ("flash", "LBHNC", 10 * 1024 + (5 * 2 + 1) * 32 + 11, 11 * 1024 + (5 * 2 + 1) * 32 + 11),
    ],
)
def test_addresses_worked_by_hand(content, order, key, value):
    extents = {"num_blocks": 3, "num_kv_heads": 2, "block_size": 16, "head_size": 32, "itemsize": 2}
    where = {"layer": 1, "block": 2, "head": 1, "token": 5, "dim": 11}
    assert [reference_address(content, order, **extents, side=side, **where) for side in (0, 1)] == [key, value]


def test_addresses_do_not_overflow():
    far = reference_address(
        "flash",
        "LBHNC",
        num_blocks=65537,
        num_kv_heads=16,
        block_size=16,
        head_size=128,
        itemsize=1,
        side=0,
        layer=0,
        block=65536,
        head=0,
        token=3,
        dim=0,
    )
    assert far == 2**32 + 3 * 16 * 128


# --- random batches


def arrays_of(batch):
    metadata = (batch.metadata.query_start_loc, batch.metadata.seq_lens, batch.metadata.block_table, batch.metadata.slot_mapping)
    return [np.asarray(x) for x in (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache, batch.k_scale, *metadata)]


def test_a_batch_is_a_function_of_its_seed():
    one, same, other = (arrays_of(random_batch(seed, num_layers=2, cache_dtype=e5m2)) for seed in (7, 7, 8))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one, same, strict=True))
    assert all(a.tobytes() != b.tobytes() for a, b in zip(one[:5], other[:5], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_one_trace_serves_every_seed(kind):
    batches = [random_batch(seed, kind=kind) for seed in range(6)]
    signatures = {(*(x.shape for x in arrays_of(b)), b.metadata.max_query_len, b.metadata.max_seq_len) for b in batches}
    assert len(signatures) == 1
    assert len({tuple(b.seq_lens) for b in batches}) > 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_batches_are_valid_and_their_unused_slots_are_nan(kind, seed):
    batch = random_batch(seed, kind=kind, num_layers=2, num_seqs=7, block_size=8)
    validate_metadata(batch.metadata, batch.spec())
    table, slots = np.asarray(batch.metadata.block_table), np.asarray(batch.metadata.slot_mapping)
    starts = np.asarray(batch.metadata.query_start_loc)
    owned = np.zeros(batch.key_cache.shape[1:3], bool)
    for s, (q, n) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        assert starts[s + 1] - starts[s] == q
        for k in range(n):
            owned[table[s, k // 8], k % 8] = True
    for side in (batch.key_cache, batch.value_cache):
        for layer in side:
            np.testing.assert_array_equal(np.isnan(layer).any((-1, -2)), ~owned)
            np.testing.assert_array_equal(np.isnan(layer).all((-1, -2)), ~owned)
    assert not owned.all() and np.all(slots[batch.num_tokens :] == -1) and np.isnan(batch.query[batch.num_tokens :]).all()
    assert len(batch.query) > batch.num_tokens
    if kind == "cross":
        assert np.all(slots == -1) and not batch.metadata.causal
        return
    made = make_metadata(batch.query_lens, batch.seq_lens, table, block_size=8, num_tokens=len(slots))
    np.testing.assert_array_equal(made.slot_mapping, slots)
    for side, news in ((batch.key_cache, batch.new_keys), (batch.value_cache, batch.new_values)):
        for layer, new in zip(side, news, strict=True):
            np.testing.assert_array_equal(layer.reshape(-1, *new.shape[1:])[slots[: batch.num_tokens]], new[: batch.num_tokens])
    assert not np.any(np.equal(*batch.key_cache[:, owned]))  # layers differ


def test_kinds_are_what_they_say():
    def pairs(kind):
        drawn = [random_batch(seed, kind=kind, padding_seqs=0) for seed in range(4)]
        return [(int(q), int(n)) for b in drawn for q, n in zip(b.query_lens, b.seq_lens, strict=True)]

    assert all(q == 1 < n for q, n in pairs("decode"))
    assert all(0 < q == n for q, n in pairs("prefill"))
    assert all(1 < q < n for q, n in pairs("chunked"))
    mixed = pairs("mixed")
    assert (0, 0) in mixed and any(q == 0 < n for q, n in mixed) and any(q == 1 < n for q, n in mixed)
    assert any(0 < q == n for q, n in mixed) and any(1 < q < n for q, n in mixed)
    crossed = pairs("cross")
    assert any(q > n > 0 for q, n in crossed) and any(0 < q < n for q, n in crossed) and any(q > 0 == n for q, n in crossed)


def test_tables_are_shuffled_shared_and_padded():
    tables, shared = [], 0
    for seed in range(8):
        batch = random_batch(seed, kind="chunked", num_seqs=6, max_seq_len=80)
        table, blocks = np.asarray(batch.metadata.block_table), batch.key_cache.shape[1]
        needed = [table[s, : -(-n // 16)].tolist() for s, n in enumerate(batch.seq_lens)]
        everything = [block for row in needed for block in row]
        shared += len(everything) - len(set(everything))
        pads = np.concatenate([row[-(-n // 16) :] for row, n in zip(table, batch.seq_lens, strict=True)])
        assert {-1, 2**31 - 1, blocks} >= set(pads.tolist())
        tables += [row for row in needed if len(row) > 2]
    assert shared > 5
    assert any(row != sorted(row) for row in tables)


def test_a_common_prefix_leads_every_sequence():
    batch = random_batch(0, kind="mixed", common_prefix_blocks=2, max_seq_len=90)
    table = np.asarray(batch.metadata.block_table)
    assert len({tuple(row[:2]) for row in table[:5]}) == 1
    assert all(n - q >= 32 for q, n in zip(batch.query_lens[:5], batch.seq_lens[:5], strict=True))


@pytest.mark.parametrize("scales", ["one", "layer", "head"])
@pytest.mark.parametrize("cache_dtype", FP8, ids=name_of)
def test_fp8_caches_hold_what_the_writer_stores(cache_dtype, scales):
    batch = random_batch(1, dtype=bf16, cache_dtype=cache_dtype, num_layers=2, scales=scales)
    before_k, before_v = cache_to_logical(batch.cache_before(), 1)
    after = reference_update_cache(
        before_k,
        before_v,
        batch.new_keys[1],
        batch.new_values[1],
        batch.metadata.slot_mapping,
        k_scale=batch.k_scale[1],
        v_scale=batch.v_scale[1],
    )
    for mine, side in zip(after, (batch.key_cache, batch.value_cache), strict=True):
        np.testing.assert_array_equal(mine.view(np.uint8), side[1].view(np.uint8))
    assert not np.array_equal(np.asarray(before_k).view(np.uint8), batch.key_cache[1].view(np.uint8))
    values = np.concatenate([batch.k_scale.ravel(), batch.v_scale.ravel()])
    assert np.all(values == 1) if scales == "one" else len(np.unique(values)) == len(values)


def test_an_fp8_query_comes_with_its_scale():
    batch = random_batch(0, dtype=bf16, query_dtype=e4m3fn, kind="prefill")
    assert batch.query.dtype == e4m3fn and batch.key.dtype == bf16
    spread = batch.query[: batch.num_tokens].astype(np.float64).std() * batch.q_scale
    assert 0.9 < spread < 1.1


# --- tolerances


def rounded(batch, dtype, out):
    """An honest kernel's result: the exact output rounded to `dtype` (fp8: over a scale)."""
    return round_to(out, dtype, saturate=dtype.itemsize == 1)


def low_precision_attention(batch, dtype, *, window, output_dtype):
    """What a tiled kernel computes: float32 scores, softmax weights rounded to the matrix unit's `dtype`, float32 sums."""
    table, starts = np.asarray(batch.metadata.block_table), np.asarray(batch.metadata.query_start_loc)
    out = np.zeros(batch.query.shape, np.float32)
    group = batch.query.shape[1] // batch.key_cache.shape[3]
    for s, (q_len, n) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        k = np.arange(n)
        keys, values = (
            np.repeat(c[0][table[s, k // 16], k % 16], group, axis=1).astype(np.float32) for c in (batch.key_cache, batch.value_cache)
        )
        for i in range(q_len):
            p = n - q_len + i
            keep = (k <= p) & (p - k < window)
            scores = np.einsum("hd,khd->hk", batch.query[starts[s] + i].astype(np.float32), keys[keep]) * np.float32(keys.shape[-1] ** -0.5)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[starts[s] + i] = np.einsum("hk,khd->hd", weights.astype(dtype).astype(np.float32), values[keep]) / weights.sum(-1)[:, None]
    return round_to(out, output_dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize > 1], ids=name_of)
def test_honest_arithmetic_passes(dtype, seed):
    batch = random_batch(seed, dtype=dtype, kind="chunked", head_size=64)
    expected, lse = batch.reference(sliding_window=40)
    assert_close(low_precision_attention(batch, dtype, window=40, output_dtype=dtype), expected, dtype=dtype)
    assert_close(lse.astype(np.float32), lse, dtype="lse")
    codes, _ = batch.reference(sliding_window=40, output_scale=0.01)
    honest = low_precision_attention(batch, dtype, window=40, output_dtype=np.float32) / np.float32(0.01)
    assert_close(round_to(honest, e4m3fn, saturate=True), codes, dtype=e4m3fn)


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
def test_products_in_fp8_need_to_be_said(dtype):
    batch = random_batch(0, dtype=bf16, kind="chunked", head_size=64)
    expected, _ = batch.reference(sliding_window=40)
    coarse = low_precision_attention(batch, dtype, window=40, output_dtype=bf16)
    assert_close(coarse, expected, dtype=bf16, compute_dtype=dtype)
    with pytest.raises(AssertionError):
        assert_close(coarse, expected, dtype=bf16)


def wrong_block(batch):
    """The longest sequence finds another's first block where its first query's last key is."""
    table = np.array(batch.metadata.block_table)
    longest, other = np.argsort(batch.seq_lens)[[-1, -2]]
    block = (batch.seq_lens[longest] - batch.query_lens[longest]) // 16
    assert batch.seq_lens[other] >= 16 and table[longest, block] != table[other, 0]
    table[longest, block] = table[other, 0]
    return replace(batch, metadata=replace(batch.metadata, block_table=jnp.asarray(table)))


MISTAKES = {
    "window one too wide": lambda b: b.reference(sliding_window=33)[0],
    "window one too narrow": lambda b: b.reference(sliding_window=31)[0],
    "window ignored": lambda b: b.reference()[0],
    "scale of another head size": lambda b: b.reference(sliding_window=32, scale=128**-0.5)[0],
    "value scale of another layer": lambda b: b.reference(sliding_window=32)[0] * 1.5,
    "key scale dropped": lambda b: b.reference(sliding_window=32, k_scale=1.0)[0],
    "one wrong block": lambda b: wrong_block(b).reference(sliding_window=32)[0],
    "not causal": lambda b: b.reference(sliding_window=32, causal=False)[0],
    "heads interleaved": lambda b: b.reference(sliding_window=32)[0][:, [0, 2, 1, 3]],
    "padding not zero": lambda b: b.reference(sliding_window=32)[0] + (np.arange(len(b.query)) >= b.num_tokens)[:, None, None] * 0.05,
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_no_mistake_passes(dtype, mistake):
    batch = random_batch(3, dtype=np.float32, cache_dtype=e4m3fn, kind="chunked", head_size=64, max_seq_len=60, share_prefixes=False)
    right = batch.reference(sliding_window=32)[0]
    quantum = 0.01 if dtype.itemsize == 1 else 1.0
    assert_close(rounded(batch, dtype, right / quantum), right / quantum, dtype=dtype)
    with pytest.raises(AssertionError, match=f"of {dtype.name}"):
        assert_close(rounded(batch, dtype, MISTAKES[mistake](batch) / quantum), right / quantum, dtype=dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, "lse"], ids=lambda d: d if d == "lse" else name_of(d))
@pytest.mark.parametrize("place", [(0, 0, 0), (2, 1, 3)])
def test_one_nan_never_passes(dtype, place):
    real = np.float32 if dtype == "lse" else dtype
    right = np.random.default_rng(0).standard_normal((3, 2, 4))
    wrong = round_to(right, real)
    wrong[place] = np.nan
    with pytest.raises(AssertionError, match="1 elements are NaN"):
        assert_close(wrong, right, dtype=dtype)
    poisoned = right.copy()
    poisoned[place] = np.nan
    with pytest.raises(AssertionError):
        assert_close(round_to(right, real), poisoned, dtype=dtype)
    with pytest.raises(AssertionError):
        assert_close(wrong, poisoned, dtype=dtype)
    assert_close(wrong, poisoned, dtype=dtype, equal_nan=True)
    with pytest.raises(AssertionError):
        assert_close(wrong, right, dtype=dtype, equal_nan=True)


def test_infinities_must_be_equal():
    right = np.array([[0.0, -np.inf, 1.0]])
    assert_close(right.astype(np.float32), right, dtype="lse")
    for wrong in ([0.0, np.inf, 1.0], [0.0, -3e38, 1.0], [-np.inf, -np.inf, 1.0], [0.0, -np.inf, np.nan]):
        with pytest.raises(AssertionError):
            assert_close(np.array([wrong], np.float32), right, dtype="lse")


def test_shapes_and_dtypes_must_match():
    right = np.ones((2, 3))
    with pytest.raises(AssertionError, match="dtype is float64, not float32"):
        assert_close(right, right, dtype=np.float32)
    with pytest.raises(AssertionError, match="dtype is bfloat16, not float16"):
        assert_close(right.astype(bf16), right, dtype=np.float16)
    with pytest.raises(AssertionError, match=r"shape is \(2, 3\), not \(3, 2\)"):
        assert_close(right.astype(np.float32), right.T, dtype=np.float32)
    with pytest.raises(AssertionError, match=r"shape is \(2, 3\), not \(3,\)"):
        assert_close(right.astype(np.float32), right[0], dtype=np.float32)
    with pytest.raises(AssertionError, match="expected array is int64"):
        assert_close(right.astype(np.float32), right.astype(np.int64), dtype=np.float32)
    with pytest.raises(KeyError):
        assert_close(right, right, dtype=np.float64)
    assert_close(jnp.ones((2, 3), jnp.bfloat16), right, dtype=bf16)
    assert_close(np.ones((0, 3), np.float32), np.ones((0, 3)), dtype=np.float32)


def test_a_failure_says_what_where_and_by_how_much():
    right = np.ones((2, 3))
    wrong = right.astype(np.float32)
    wrong[1, 2] = 1.5
    with pytest.raises(AssertionError) as caught:
        assert_close(wrong, right, dtype=np.float32, what="decode")
    message = str(caught.value)
    assert "decode: 1 of 6 elements of float32[2, 3]" in message
    assert "worst at (1, 2)" in message and "1.5" in message and "off by 0.5" in message


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_two_codes_off_fail(dtype):
    """One code is a tie that fell the other way; an error of two is a mistake (where nothing else in the row is larger)."""
    bounds = tolerance(dtype, np.float32)
    assert TOLERANCES[dtype.name].ulp == float(ml_dtypes.finfo(dtype).eps) == bounds.ulp
    eps = float(ml_dtypes.finfo(dtype).eps)
    one = np.ones((1, 1))
    assert_close((one + eps).astype(dtype), one, dtype=dtype, compute_dtype=np.float32)
    steps = 2 if dtype != np.float32 else 64
    with pytest.raises(AssertionError):
        assert_close((one + steps * eps).astype(dtype), one, dtype=dtype, compute_dtype=np.float32)
