"""`check_attention` passes an honest kernel, names what a wrong one gets wrong, and shows the smallest batch of it."""

from dataclasses import replace
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.testing import FEATURES, check_attention, random_batch


def honest(batch, **changes):
    out, lse = batch.reference(**{**batch.options, **changes})
    return out.astype(batch.query.dtype), lse.astype(np.float32)


def kinds(report):
    return [dict(failure.kinds) for failure in report.failures]


def test_an_honest_kernel_passes_every_kind_and_pair(capsys):
    report = check_attention(honest)
    assert report.ok and report.failed == 0 and not report.refused and not report.failures
    assert set(report.tested) == {(feature, kind) for feature, kinds in FEATURES.items() for kind in kinds}
    assert report.passed > len(report.tested) > 40
    assert capsys.readouterr().out == f"{report}\n"


def first_key_twice(batch):
    """Reads the token before the window, as a kernel does that counts from 0 instead of 1."""
    window = batch.sliding_window
    return honest(batch, sliding_window=window and window + 1)


def zero_times_nan(batch):
    """Multiplies weights of 0 with whatever the last block holds."""
    out, _ = honest(batch)
    N, table = batch.key_cache.shape[2], np.asarray(batch.metadata.block_table)
    for s, n in enumerate(batch.seq_lens):
        rows = slice(*np.asarray(batch.metadata.query_start_loc)[s : s + 2])
        last = batch.value_cache[0, table[s, max(n - 1, 0) // N]] if n else np.zeros(1)
        if np.isnan(last).any():
            out[rows] = np.nan
    return out


def one_scale_for_all_heads(batch):
    k_scale, v_scale = (np.full_like(scale[0], scale[0].flat[0]) for scale in (batch.k_scale, batch.v_scale))
    return honest(batch, k_scale=k_scale, v_scale=v_scale)


def sinks_are_capped(batch):
    sinks, cap = batch.sinks, batch.logits_soft_cap
    return honest(batch, sinks=sinks if sinks is None or cap is None else cap * np.tanh(2 * sinks / cap))


MISTAKES = {
    "a window one too wide": (first_key_twice, lambda failing: {"window"} <= failing),
    "NaN of unused slots spreads": (zero_times_nan, lambda failing: "unused slots" in failing or "newest key" in failing),
    "one scale for all heads": (one_scale_for_all_heads, lambda failing: failing == {"cache"}),
    "capped sinks": (sinks_are_capped, lambda failing: failing == {"sinks", "soft cap"}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found_by_name_and_nothing_else_is(mistake):
    kernel, blamed = MISTAKES[mistake]
    report = check_attention(kernel, verbose=False)
    assert not report.ok and report.failures
    assert all(blamed(set(found)) for found in kinds(report)), kinds(report)
    for failure in report.failures:
        batch = random_batch(failure.seed, **failure.options)
        out = kernel(batch)
        with pytest.raises(AssertionError) as raised:
            batch.check(*(out if isinstance(out, tuple) else (out,)), padding=False)
        assert str(raised.value) == failure.error
        assert failure.name in str(report)


def test_the_case_of_a_failure_is_the_smallest_that_fails():
    def forgets_the_second_block(batch):
        out, _ = honest(batch)
        for s, n in enumerate(batch.seq_lens):
            if n > 16:
                out[slice(*np.asarray(batch.metadata.query_start_loc)[s : s + 2])] *= 1.5
        return out

    report = check_attention(forgets_the_second_block, verbose=False)
    assert kinds(report) == [{}] and report.failures[0].options["seq_lens"] == [17] and report.failures[0].options["query_lens"] == [1]
    assert "FAILS: plain attention\n    random_batch(0, query_lens=[1], seq_lens=[17], " in str(report)


def test_a_smaller_case_of_another_failure_is_not_taken():
    """An empty sequence fails as well, and is shorter; it is no case of the failure with a window."""

    def kernel(batch):
        out, _ = first_key_twice(batch)
        out[: batch.num_tokens][np.repeat(batch.seq_lens == 0, batch.query_lens)] = np.nan
        return out

    report = check_attention(kernel, pairs=False, verbose=False)
    found = {tuple(failure.kinds.items()): failure.options["seq_lens"] for failure in report.failures}
    assert found == {
        (("lengths", "decode beside an empty sequence"),): [0],
        (("lengths", "cross attention"),): [0],
        (("window", "1"),): [2],
        (("window", "7"),): [8],
        (("window", "a block"),): [17],
    }


def test_what_a_kernel_refuses_is_listed_and_takes_no_other_kind_along():
    def plain_decode(batch):
        if batch.metadata.max_query_len > 1:
            raise NotImplementedError("decode only")
        return honest(batch, **batch.pick("sliding_window"))

    report = check_attention(plain_decode, pairs=False, verbose=False)
    assert report.ok and report.refused["lengths", "prefill"] == "decode only" and "sinks" in report.refused["sinks", "drawn for each head"]
    refused = {feature for feature, _ in report.refused}
    assert refused == {"lengths", "key range", "bias", "soft cap", "ALiBi", "sinks", "scale"}
    assert ("window", "7") in report.tested and "  window: passes none, 1, 7, a block\n" in str(report)
    nothing = check_attention(refuse, verbose=False)
    assert not nothing.ok and nothing.passed == nothing.failed == 0 and list(nothing.refused.values()) == ["no GPU"]


def refuse(batch):
    raise NotImplementedError("no GPU")


def test_an_error_of_the_kernel_is_a_failure_that_says_where():
    def breaks(batch):
        if batch.key_cache.shape[2] == 48:
            raise ZeroDivisionError("block of 48")
        return honest(batch)

    report = check_attention(breaks, pairs=False, verbose=False)
    assert kinds(report) == [{"block size": "48"}]
    assert report.failures[0].error.startswith("ZeroDivisionError: block of 48 (breaks, test_check_attention.py:")
    assert check_attention(breaks, pairs=False, verbose=False, refusals=(ZeroDivisionError,)).ok


def test_features_can_be_restricted_replaced_and_added():
    seen = []

    def record(batch):
        seen.append(batch)
        return honest(batch)

    report = check_attention(
        record,
        features={"dtype": ["bfloat16"], "head size": "128", "cache": ["fp8"], "layers": {"2": {"num_layers": 2}, "1": {"num_layers": 1}}},
        pairs=False,
        verbose=False,
    )
    assert report.ok and {batch.query.dtype.name for batch in seen} == {"bfloat16"} and {batch.query.shape[-1] for batch in seen} == {128}
    assert {batch.key_cache.dtype for batch in seen} == {np.dtype(ml_dtypes.float8_e4m3fn)}
    assert [batch.key_cache.shape[0] for batch in seen].count(1) == 1
    with pytest.raises(ValueError, match=r"features\['dtype'\] is 'int8': it must be one of 'float32', 'bfloat16', 'float16'"):
        check_attention(record, features={"dtype": ["int8"]})
    with pytest.raises(ValueError, match="'colour'"):
        check_attention(record, features={"colour": ["red"]})


def test_padding_rows_count_where_they_are_asked_for():
    def leaves_padding(batch):
        out, _ = honest(batch)
        out[batch.num_tokens :] = np.nan
        return out

    assert check_attention(leaves_padding, pairs=False, verbose=False).ok
    assert kinds(check_attention(leaves_padding, pairs=False, verbose=False, padding=True)) == [{"padding": "tokens and sequences"}]


def test_products_in_a_coarse_dtype_need_to_be_said():
    def coarse(batch):
        rounded = (np.asarray(array).astype(np.float16).astype(np.float64) for array in (batch.key_cache, batch.value_cache))
        keys, values = rounded
        return replace(batch, key_cache=keys, value_cache=values).reference(**batch.options)[0].astype(np.float32)

    only = {"dtype": ["float32"], "cache": ["the model's dtype"], "scale": ["D ** -0.5"]}
    assert not check_attention(coarse, pairs=False, verbose=False, features=only).ok
    assert check_attention(coarse, pairs=False, verbose=False, features=only, compute_dtype=ml_dtypes.bfloat16).ok


def ours(implementation):
    attend = jax.jit(partial(pp.paged_attention, return_lse=True, implementation=implementation), static_argnames=STATIC)
    return lambda batch: attend(batch.query, batch.cache(), batch.metadata, **batch.options)


STATIC = ("scale", "sliding_window", "logits_soft_cap")


def test_our_plain_kernel_passes_what_one_trace_serves():
    several = ("unused slots", "newest key", "unused table entries")
    features = {name: list(kinds)[: None if name in several else 1] for name, kinds in FEATURES.items()}
    report = check_attention(ours("xla"), features={**features, "lengths": ["chunked prefill"]}, padding=True, verbose=False)
    assert report.ok and not report.refused and report.passed > 6, report


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla"])
def test_our_kernels_pass_the_whole_grid(implementation):
    report = check_attention(ours(implementation), padding=True, verbose=False)
    assert report.ok and not report.refused, report
