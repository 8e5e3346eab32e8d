"""The attention oracle against closed forms, before anything is judged by it."""

import inspect
import itertools
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from purepage.functional.testing import random_batch, reference_attention, reference_cache, reference_encoder_attention, reference_merge
from purepage.functional.testing import reference_attention as reference

bf16, e4m3fn, e4m3fnuz, e5m2, e5m2fnuz = (
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
)
FP8 = (e4m3fn, e4m3fnuz, e5m2, e5m2fnuz)
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
    assert all(line.startswith("from .reference_attention import") for line in own)
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


@pytest.mark.parametrize("block", [-1, 6, 2**31 - 1])
def test_a_sequence_that_needs_a_block_outside_the_pool_is_nan_in_all_its_rows_and_no_other(block):
    case = positions(20, 2)
    good = case["block_table"][0]
    case.update(
        query=np.zeros((5, 1, 4)), query_start_loc=[0, 2, 4], seq_lens=[20, 20], block_table=[[good[0], block, -1, -1], [*good[:2], -1, -1]]
    )
    out, lse = reference_attention(**case)
    assert np.isnan(out[:2]).all() and np.isnan(lse[:2]).all()
    np.testing.assert_allclose(out[2:4, 0, 0], [9.0, 9.5])
    assert np.all(out[4] == 0) and np.all(lse[4] == -np.inf)


def test_a_table_too_narrow_for_its_sequence_is_an_error():
    with pytest.raises(IndexError):
        reference_attention(**{**positions(20), "block_table": [[1]]})


@pytest.mark.parametrize("side", ["key_cache", "value_cache"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    ("options", "hidden", "mean"),
    [
        ({"sliding_window": 3}, range(17), 18.0),
        ({"key_range": ([4], [9])}, [*range(4), *range(9, 20)], 6.0),
        ({"key_range": ([4], [9]), "causal": False}, [*range(4), *range(9, 20)], 6.0),
        ({"qq_bias": [[-np.inf]]}, [19], 9.0),
        ({"qq_bias": [[[-np.inf]]]}, [19], 9.0),
        ({}, range(20, 32), 9.5),
    ],
    ids=["window", "key range", "key range alone", "bias", "bias of each sequence", "length"],
)
def test_what_a_masked_key_holds_never_matters(options, hidden, mean, poison, side):
    case = positions(20)
    table, k = np.array(case["block_table"][0]), np.array(hidden)
    case[side][table[k // 16], k % 16] = poison
    np.testing.assert_allclose(means(case, **options), [mean], rtol=1e-15)


def test_a_key_range_is_one_of_the_masks():
    case = positions(10, 4)
    start, stop = [0, 3, 8, 2], [4, 100, 9, 2]
    out, lse = reference_attention(**case, key_range=(start, stop))
    np.testing.assert_allclose(out[:, 0, 0], [1.5, 5.0, 8.0, 0.0])  # rows are at 6, 7, 8, 9
    assert lse[3] == -np.inf
    out, _ = reference_attention(**case, key_range=(start, stop), causal=False)
    np.testing.assert_allclose(out[:, 0, 0], [1.5, 6.0, 8.0, 0.0])
    values = np.broadcast_to(np.arange(10.0)[:, None, None], (10, 1, 4))
    ranges = (np.array([0] * 6 + start), np.array([10] * 6 + stop))
    encoded, _ = reference_encoder_attention(case["query"][[0] * 10], np.ones((10, 1, 4)), values, [0, 10], key_range=ranges)
    np.testing.assert_allclose(encoded[6:], out)


def test_a_range_from_the_windows_formula_is_the_window():
    case, p = positions(40, 7), np.arange(33, 40)
    for mine, wanted in zip(
        reference_attention(**case, key_range=(p - 4, p + 1)), reference_attention(**case, sliding_window=5), strict=True
    ):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("window", [0, -1, None, 2**31 - 1, 2**40])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_that_are_off_or_wider_than_everything_hide_nothing(causal, window):
    assert means(positions(20), causal=causal, sliding_window=window) == [9.5]


def test_each_sequence_has_a_bias_of_its_own():
    draw = np.random.default_rng(0).standard_normal
    batch = random_batch(3, kind="chunked")
    tables = draw((len(batch.seq_lens), 12, 12))
    out, lse = batch.reference(qq_bias=tables)
    for s, (a, b) in enumerate(itertools.pairwise(np.asarray(batch.metadata.query_start_loc))):
        alone, alone_lse = batch.reference(qq_bias=tables[s])
        np.testing.assert_array_equal(out[a:b], alone[a:b])
        np.testing.assert_array_equal(lse[a:b], alone_lse[a:b])


def test_values_may_be_wider_or_narrower_than_keys():
    case = positions(20, 3)
    case["value_cache"] = np.concatenate([case["value_cache"], 2 * case["value_cache"][..., :2]], axis=-1)
    out, _ = reference_attention(**case)
    assert out.shape == (3, 1, 6)
    np.testing.assert_allclose(out[:, 0] / out[:, 0, :1], np.broadcast_to([1, 1, 1, 1, 2, 2], (3, 6)))
    encoded, _ = reference_encoder_attention(np.zeros((4, 2, 8)), np.zeros((4, 1, 8)), np.ones((4, 1, 3)), [0, 4])
    np.testing.assert_array_equal(encoded, np.ones((4, 2, 3)))


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
    row_sum = [sum(math.exp(-0.5 * d) for d in range(n + 1)) for n in range(4)]
    np.testing.assert_allclose(out[:, 0, 0], [s / (s + 1) for s in row_sum], rtol=1e-14)


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


@pytest.mark.parametrize("no_key", [-np.inf, np.inf], ids=["minus infinity", "plus infinity"])
def test_merging_empty_states(no_key):
    empty, none = np.zeros((1, 1, 2)), np.full((1, 1), no_key)
    some, lse = np.full((1, 1, 2), 3.0), np.full((1, 1), -800.0)
    out, merged = reference_merge(empty, none, empty, none)
    assert np.all(out == 0) and np.all(merged == -np.inf)
    for a, b in (((some, lse), (np.full_like(some, np.nan), none)), ((np.full_like(some, np.nan), none), (some, lse))):
        out, merged = reference_merge(*a, *b)
        np.testing.assert_array_equal(out, some)
        np.testing.assert_array_equal(merged, lse)
