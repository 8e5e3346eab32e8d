"""Merging of attention states, and cascade attention: reading a shared prefix once changes nothing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.functional.fp8 import quantize
from purepage.testing import assert_close, random_batch, reference_merge

F32, F16, BF16 = np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2Z = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2fnuz)
SINKS = np.linspace(-1.5, 1.5, 4).astype(np.float32)


def states(seed, dtype, other_dtype=None):
    """Two sides; some rows of either have no key and NaN for an output."""
    rng = np.random.default_rng(seed)
    outs = [rng.standard_normal((12, 3, 8)).astype(kind) for kind in (dtype, other_dtype or dtype)]
    lses = [(4 * rng.standard_normal((12, 3))).astype(np.float32) for _ in outs]
    for out, lse, empty in zip(outs, lses, (slice(0, 4), slice(2, 7)), strict=True):
        lse[empty] = -np.inf
        out[empty] = np.nan
    return outs[0], lses[0], outs[1], lses[1]


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F16, F32), (BF16, F32)], ids=lambda d: "-".join(x.name for x in d))
def test_merge_equals_the_oracle_and_reads_no_empty_side(dtypes):
    sides = states(0, *dtypes)
    out, lse = jax.jit(lambda *a: pp.merge_attention_states(*a, implementation="xla"))(*sides)
    expected, expected_lse = reference_merge(*sides)
    assert_close(out, expected, dtype=dtypes[0])
    assert_close(lse, expected_lse, dtype="lse")
    assert np.all(np.asarray(out[2:4], np.float32) == 0) and np.all(np.isneginf(lse[2:4]))


@pytest.mark.parametrize("empty", [np.inf, -np.inf], ids=str)
def test_an_infinite_lse_is_a_side_without_keys(empty):
    """FlashAttention 2 writes +inf for a row without keys, whose output is NaN."""
    value, nothing = jnp.full((1, 1, 4), 2.0), jnp.full((1, 1, 4), jnp.nan)
    lse, none = jnp.full((1, 1), 0.5), jnp.full((1, 1), empty)
    for sides in ((value, lse, nothing, none), (nothing, none, value, lse)):
        out, merged = pp.merge_attention_states(*sides, implementation="xla")
        np.testing.assert_array_equal(out, value)
        np.testing.assert_array_equal(merged, lse)
    out, merged = pp.merge_attention_states(nothing, none, nothing, -none, implementation="xla")
    assert np.all(np.asarray(out) == 0) and np.all(np.isneginf(merged))


@pytest.mark.parametrize("magnitude", np.logspace(-6, 37, 8))
def test_merging_keeps_float32s_relative_error_over_every_decade(magnitude):
    rng = np.random.default_rng(2)
    outs = [(magnitude * rng.standard_normal((6, 2, 4))).astype(np.float32) for _ in "ab"]
    base = min(magnitude, 1e30)
    lses = [(base + rng.standard_normal((6, 2))).astype(np.float32) for _ in "ab"]
    expected, expected_lse = reference_merge(outs[0], lses[0], outs[1], lses[1])
    out, lse = pp.merge_attention_states(outs[0], lses[0], outs[1], lses[1], implementation="xla")
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6 * magnitude)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


def test_a_merge_may_round_to_fp8_or_to_another_dtype_once():
    sides = states(3, BF16)
    exact, _ = pp.merge_attention_states(*(np.asarray(side, np.float32) for side in sides), implementation="xla")
    out, _ = pp.merge_attention_states(*sides, output_scale=0.02, implementation="xla")
    assert out.dtype == E4M3
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(quantize(exact, 0.02, E4M3), np.float32))
    half, _ = pp.merge_attention_states(*sides, output_dtype="float16", implementation="xla")
    np.testing.assert_array_equal(half, np.asarray(exact).astype(np.float16))


def test_two_empty_states_merge_to_an_empty_one():
    out, lse = pp.merge_attention_states(*2 * (jnp.zeros((1, 1, 4)), jnp.full((1, 1), -jnp.inf)), implementation="xla")
    assert np.all(np.asarray(out) == 0) and np.all(np.isneginf(lse))


def test_merging_is_associative_over_sixteen_splits_of_one_key():
    """Fifteen splits are empty, as where a kernel has more splits than tiles."""
    value = jnp.asarray(np.random.default_rng(1).standard_normal((1, 2, 4)), jnp.float32)
    state = (jnp.zeros_like(value), jnp.full((1, 2), -jnp.inf))
    for split in range(16):
        other = (value, jnp.full((1, 2), 0.25)) if split == 9 else (jnp.full_like(value, jnp.nan), jnp.full((1, 2), -jnp.inf))
        state = pp.merge_attention_states(*state, *other, implementation="xla")
    np.testing.assert_array_equal(state[0], value)
    np.testing.assert_array_equal(state[1], np.full((1, 2), 0.25, np.float32))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"out_a": np.zeros((2, 3), np.float32)}, ValueError, "out_a"),
        ({"out_b": np.zeros((12, 3, 4), np.float32)}, ValueError, "out_b"),
        ({"out_b": np.zeros((12, 3, 8), E4M3)}, TypeError, "out_b"),
        ({"lse_a": np.zeros((12, 3, 8), np.float32)}, ValueError, "lse_a"),
        ({"lse_b": np.zeros((12, 3), np.int32)}, TypeError, "lse_b"),
        ({"implementation": "cuda"}, ValueError, "implementation"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_merge_names_a_bad_argument(change, error, words):
    arguments = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), states(0, F32), strict=True))
    with pytest.raises(error, match=words):
        pp.merge_attention_states(**{**arguments, **change})


CASES = {
    "mixed": ({"kind": "mixed", "common_prefix_blocks": 1}, {}, {}),
    "decode-xpacked": ({"kind": "decode", "common_prefix_blocks": 2, "max_seq_len": 90}, {"content": "xpacked", "order": "LHBNC"}, {}),
    "cross-sinks": ({"kind": "cross", "common_prefix_blocks": 1}, {"content": "flash"}, {"sinks": SINKS}),
    "sinks-cap-qq_bias": (
        {"kind": "mixed", "common_prefix_blocks": 2, "max_seq_len": 90},
        {},
        {"sinks": SINKS, "logits_soft_cap": 4.0, "qq_bias": np.random.default_rng(3).standard_normal((5, 7)).astype(np.float32)},
    ),
    "fp8": ({"query_dtype": E4M3, "dtype": BF16, "cache_dtype": E4M3, "scales": "head", "common_prefix_blocks": 1}, {}, {"scale": 0.2}),
}


def cascade(batch, layout=None, *, prefix, jit=True, **options):
    options = {"q_scale": batch.q_scale, "implementation": "xla", **options}

    def call(query, cache, metadata):
        return pp.cascade_attention(query, cache, metadata, common_prefix_len=prefix, **options)

    return (jax.jit(call) if jit else call)(jnp.asarray(batch.query), batch.cache(**(layout or {})), batch.metadata)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_cascade_equals_attention_over_everything(case):
    made, layout, options = CASES[case]
    batch = random_batch(7, **made)
    out, lse = cascade(batch, layout, prefix=16 * made["common_prefix_blocks"], return_lse=True, **options)
    expected, expected_lse = batch.reference(**options)
    assert_close(out, expected, dtype=BF16 if case == "fp8" else F32)
    assert_close(lse, expected_lse, dtype="lse")


def with_empty_first_rows(batch):
    """Two rows before the batch's own: one without tokens, one of queries whose sequence is empty (which sees nothing)."""
    m = batch.metadata
    pads = jnp.full((2, m.block_table.shape[1]), -1, jnp.int32)
    return replace(
        m,
        query_start_loc=jnp.concatenate([jnp.zeros(2, jnp.int32), m.query_start_loc]),
        seq_lens=jnp.concatenate([jnp.zeros(2, jnp.int32), m.seq_lens]),
        block_table=jnp.concatenate([pads, m.block_table]),
    )


def test_the_prefix_comes_from_the_first_row_with_tokens():
    batch = random_batch(8, common_prefix_blocks=1)
    query, cache, metadata = jnp.asarray(batch.query), batch.cache(), with_empty_first_rows(batch)
    out = pp.cascade_attention(query, cache, metadata, common_prefix_len=16, implementation="xla")
    assert_close(out, batch.reference()[0], dtype=F32)


def test_cascade_quantizes_the_merged_result_once():
    batch = random_batch(9, common_prefix_blocks=1)
    out = cascade(batch, prefix=16, output_scale=0.01, output_dtype=E5M2Z)
    expected, _ = batch.reference(output_scale=0.01, output_dtype=E5M2Z)
    assert_close(out, expected, dtype=E5M2Z, compute_dtype=F32)


def test_without_a_prefix_cascade_is_paged_attention():
    batch = random_batch(10, sliding_window=6)
    slopes = np.array([0.5, 0.25, 0.125, -0.1], np.float32)
    out = cascade(batch, prefix=0, jit=False, sliding_window=6, alibi_slopes=slopes)
    assert_close(out, batch.reference(sliding_window=6, alibi_slopes=slopes)[0], dtype=F32)


def other_first_block(batch, row):
    m = batch.metadata
    return replace(batch, metadata=replace(m, block_table=m.block_table.at[row, 0].set(m.block_table[row - 1, 1])))


def test_a_sequence_that_does_not_share_the_prefix_raises_or_gives_nan_under_jit():
    batch = random_batch(11, common_prefix_blocks=1)
    broken = other_first_block(batch, 2)
    with pytest.raises(ValueError, match=r"common_prefix_len is 16.*sequence 2"):
        cascade(broken, prefix=16, jit=False)
    out = np.asarray(cascade(broken, prefix=16))
    starts = np.asarray(batch.metadata.query_start_loc)
    own = np.arange(starts[2], starts[3])
    assert own.size and np.all(np.isnan(out[own]))
    expected = batch.reference()[0]
    expected[own] = np.nan
    assert_close(out, expected, dtype=F32, equal_nan=True)


def test_a_query_inside_the_prefix_raises():
    batch = random_batch(12, kind="prefill")
    table = jnp.broadcast_to(batch.metadata.block_table[:1], batch.metadata.block_table.shape)
    batch = replace(batch, metadata=replace(batch.metadata, block_table=table))
    with pytest.raises(ValueError, match=r"common_prefix_len is 16.*before its first query"):
        cascade(batch, prefix=16, jit=False)


@pytest.mark.parametrize(
    ("prefix", "error"),
    [(8, ValueError), (-16, ValueError), (16 * 99, ValueError), (True, TypeError), (jnp.ones(2), TypeError), (1.5, TypeError)],
)
def test_cascade_names_a_bad_prefix(prefix, error):
    with pytest.raises(error, match="common_prefix_len"):
        cascade(random_batch(13, common_prefix_blocks=1), prefix=prefix, jit=False)


@pytest.mark.parametrize("option", [{"sliding_window": 4}, {"alibi_slopes": SINKS}], ids=lambda option: next(iter(option)))
def test_cascade_refuses_what_needs_positions(option):
    with pytest.raises(pp.UnsupportedError, match=next(iter(option))):
        cascade(random_batch(13, common_prefix_blocks=1), prefix=16, **option)


def test_cascade_without_tokens_gives_none():
    batch = random_batch(14, common_prefix_blocks=1)
    empty = replace(batch.metadata, query_start_loc=jnp.zeros_like(batch.metadata.query_start_loc), slot_mapping=jnp.zeros(0, jnp.int32))
    out = pp.cascade_attention(jnp.zeros((0, 4, 32)), batch.cache(), empty, common_prefix_len=16, implementation="xla")
    assert out.shape == (0, 4, 32)
