"""Random batches keep their promises, and the comparison passes honest arithmetic and no mistake."""

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from purepage import make_metadata, validate_metadata
from purepage.functional.cache import cache_to_logical
from purepage.functional.testing import KINDS, TOLERANCES, assert_close, random_batch, reference_update_cache, round_to, tolerance

bf16, e4m3fn, e4m3fnuz, e5m2, e5m2fnuz = (
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
)
FP8 = (e4m3fn, e4m3fnuz, e5m2, e5m2fnuz)
DTYPES = tuple(np.dtype(d) for d in (np.float32, np.float16, bf16, *FP8))


def name_of(value):
    return np.dtype(value).name


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


@pytest.mark.parametrize("kind", ["mixed", "decode", "cross"])
def test_keys_outside_every_window_can_be_nan(kind):
    plain, blanked = random_batch(5, kind=kind), random_batch(5, kind=kind, sliding_window=6)
    assert np.isnan(blanked.key_cache).sum() > np.isnan(plain.key_cache).sum()
    for mine, expected in zip(blanked.reference(sliding_window=6), plain.reference(sliding_window=6), strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert np.isnan(blanked.reference(sliding_window=7)[0]).any()


MASKS = {
    "window": {"sliding_window": 6},
    "key range": {"key_range": True},
    "shared bias": {"qq_bias": "shared"},
    "bias of each sequence": {"qq_bias": "each"},
    "all of them": {"sliding_window": 20, "key_range": True, "qq_bias": "each"},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["mixed", "chunked", "cross"])
def test_what_every_source_of_a_mask_hides_is_nan_and_reaches_no_result(kind, mask):
    plain, blanked = (random_batch(5, kind=kind, num_seqs=9, **options) for options in ({}, MASKS[mask]))
    assert set(blanked.masks) == {"sliding_window", "key_range", "qq_bias"} & set(MASKS[mask])
    assert np.isnan(blanked.key_cache).sum() > np.isnan(plain.key_cache).sum()
    out, lse = blanked.reference(**blanked.masks)
    assert np.isfinite(out).all() and not np.isnan(lse).any()
    for mine, expected in zip((out, lse), plain.reference(**blanked.masks), strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert np.isnan(blanked.reference()[0]).any()


def test_a_writer_still_makes_the_cache_of_a_batch_with_hidden_new_tokens():
    batch = random_batch(5, kind="chunked", qq_bias="each")
    before = cache_to_logical(batch.cache_before(), 0)
    after = reference_update_cache(*before, batch.key, batch.value, batch.metadata.slot_mapping)
    for mine, side in zip(after, (batch.key_cache, batch.value_cache), strict=True):
        np.testing.assert_array_equal(mine, side[0])


def test_a_poisoned_newest_key_reaches_the_last_row_of_its_sequence_alone():
    plain, poisoned = (random_batch(4, kind="chunked", poison_newest=poison) for poison in (False, True))
    out, expected = poisoned.reference()[0], plain.reference()[0]
    last = np.asarray(plain.metadata.query_start_loc)[1:][plain.query_lens > 1] - 1
    assert len(last) == 5 and np.isnan(out[last]).all()
    others = np.delete(np.arange(len(out)), last)
    np.testing.assert_array_equal(out[others], expected[others])


def test_lengths_can_be_asked_for():
    batch = random_batch(0, seq_lens=[1, 16])
    assert batch.query_lens.tolist() == batch.seq_lens.tolist() == [1, 16, 0]
    batch = random_batch(0, kind="decode", seq_lens=[1, 16], padding_seqs=0)
    assert batch.query_lens.tolist() == [1, 1] and batch.metadata.max_query_len == 1
    batch = random_batch(0, query_lens=[5, 1, 0, 3], seq_lens=[2, 1, 70, 3], max_query_len=8, max_seq_len=128)
    assert batch.query_lens.tolist() == [5, 1, 0, 3, 0] and batch.seq_lens.tolist() == [2, 1, 70, 3, 0]
    assert (batch.metadata.max_query_len, batch.metadata.max_seq_len) == (8, 128)
    out, lse = batch.reference()
    assert np.all(out[:3] == 0) and np.all(lse[:3] == -np.inf) and np.all(lse[3:9] > -np.inf)  # more queries than keys
    assert np.asarray(batch.metadata.slot_mapping)[:3].tolist() == [-1] * 3
    assert random_batch(0, query_lens=[4, 2]).seq_lens.tolist() == [4, 2, 0]
    assert random_batch(0, kind="cross", query_lens=[4, 2], seq_lens=[0, 33]).reference()[1].shape[0] >= 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "decoding"}, "kind.*decoding.*'mixed', 'decode', 'prefill', 'chunked', 'cross'"),
        ({"scales": "token"}, "scales.*token.*'one', 'layer', 'head'"),
        ({"qq_bias": "tree"}, "qq_bias.*tree.*None, 'shared', 'each'"),
        ({"query_lens": [1], "seq_lens": [1, 2]}, "query_lens"),
        ({"seq_lens": [1, -2]}, "seq_lens"),
        ({"seq_lens": [1, 9], "max_seq_len": 8}, "seq_lens.*at most 8"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_option_outside_its_set_is_refused_with_the_set(options, says):
    with pytest.raises(ValueError, match=says):
        random_batch(0, **options)


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


def low_precision_attention(batch, dtype, *, window, output_dtype, scale=None):
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
            scores = np.einsum("hd,khd->hk", batch.query[starts[s] + i].astype(np.float32), keys[keep]) * np.float32(
                keys.shape[-1] ** -0.5 if scale is None else scale
            )
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


@pytest.mark.parametrize("scale", [1.0, 8.0, 64.0])
@pytest.mark.parametrize("seed", range(4))
def test_honest_arithmetic_passes_whatever_the_size_of_the_scores(seed, scale):
    batch = random_batch(seed, kind="chunked", head_size=240)
    expected, lse = batch.reference(sliding_window=40, scale=scale)
    assert np.abs(lse[np.isfinite(lse)]).max() > 30 * scale
    honest = low_precision_attention(batch, np.float32, window=40, output_dtype=np.float32, scale=scale)
    assert_close(honest, expected, dtype=np.float32, lse=lse)
    if scale == 8:
        with pytest.raises(AssertionError):
            assert_close(honest, expected, dtype=np.float32)


LARGE_SCORES = {
    "window one too wide": {"sliding_window": 33},
    "window one too narrow": {"sliding_window": 31},
    "scale off by a thousandth": {"scale": 1.001},
    "soft cap far above the scores": {"logits_soft_cap": 300.0},
    "slope of a thousandth": {"alibi_slopes": [0.0, 0.0, 0.0, 1e-3]},
    "not causal": {"causal": False},
}


@pytest.mark.parametrize("mistake", LARGE_SCORES)
def test_no_mistake_passes_for_the_size_of_its_scores(mistake):
    batch = random_batch(3, kind="chunked", head_size=240)
    expected, lse = batch.reference(sliding_window=32, scale=1.0)
    wrong, _ = batch.reference(**{"sliding_window": 32, "scale": 1.0, **LARGE_SCORES[mistake]})
    with pytest.raises(AssertionError, match="of float32"):
        assert_close(wrong.astype(np.float32), expected, dtype=np.float32, lse=lse)


def test_a_row_of_small_scores_gets_no_more_beside_one_of_large_scores():
    right = np.ones((2, 1, 4))
    wrong = (right + 1e-4).astype(np.float32)
    wrong[0] = 1
    assert_close(wrong, right, dtype=np.float32, lse=np.array([[0.0], [100.0]]))
    with pytest.raises(AssertionError, match="4 of 8"):
        assert_close(wrong, right, dtype=np.float32, lse=np.array([[100.0], [-np.inf]]))


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
    steps = 2 if dtype != np.float32 else 128  # float32 sums cost more than the last rounding
    with pytest.raises(AssertionError):
        assert_close((one + steps * eps).astype(dtype), one, dtype=dtype, compute_dtype=np.float32)


def test_float32_terms_below_the_smallest_normal_number_may_be_flushed_but_no_other():
    expected = np.full((1, 4), 1.2e-36)
    assert_close((expected - 1.1e-38).astype(np.float32), expected, dtype=np.float32)
    with pytest.raises(AssertionError, match="are off"):
        assert_close((expected - 1e-37).astype(np.float32), expected, dtype=np.float32)
    with pytest.raises(AssertionError, match="are off"):
        assert_close(np.full((1, 4), 1e-38, np.float32), np.zeros((1, 4)), dtype=np.float32)
