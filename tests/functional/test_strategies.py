"""Hypothesis strategies: examples are valid, shrink to what is needed, and print as the call that makes them."""

import ml_dtypes
import numpy as np
import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import find, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from purepage import CacheSpec, validate_metadata  # noqa: E402
from purepage.functional.testing import random_batch, strategies  # noqa: E402
from purepage.functional.testing.batch_options import grouped  # noqa: E402

QUICK = settings(max_examples=12, deadline=None, database=None, derandomize=True)
SEARCH = settings(max_examples=500, deadline=None, database=None, derandomize=True)


@QUICK
@given(strategies.batches(seed=st.integers(0, 9)))
def test_a_batch_is_valid_and_its_oracle_judges_it(batch):
    validate_metadata(batch.metadata, batch.spec(), writes=batch.metadata.causal)
    out, lse = batch.reference(**batch.options)
    batch.check(out.astype(np.float32), lse.astype(np.float32))
    again = eval(repr(batch), {"random_batch": random_batch})
    assert again.query.tobytes() == batch.query.tobytes() and again.key_cache.tobytes() == batch.key_cache.tobytes()
    np.testing.assert_array_equal(again.metadata.block_table, batch.metadata.block_table)


@QUICK
@given(strategies.cache_specs(num_layers=2, dtype=st.sampled_from([np.float16])))
def test_a_spec_is_valid_and_keeps_what_is_fixed(spec):
    assert CacheSpec.from_json(spec.to_json()) == spec and spec.num_layers == 2 and spec.dtype == np.float16


SMALLEST = {
    "a long sequence": (lambda o: max(o["seq_lens"]) > 20, {"query_lens": [0], "seq_lens": [21]}),
    "two sequences": (lambda o: sum(n > 0 for n in o["seq_lens"]) > 1, {"query_lens": [0, 0], "seq_lens": [1, 1]}),
    "sinks": (lambda o: o.get("sinks") and max(o["query_lens"]) > 1, {"query_lens": [2], "seq_lens": [2], "sinks": True}),
    "fp8": (lambda o: "cache_dtype" in o, {"query_lens": [0], "seq_lens": [0], "cache_dtype": np.dtype(ml_dtypes.float8_e4m3fn)}),
    "a range and a window": (
        lambda o: "key_range" in o and "sliding_window" in o,
        {"query_lens": [0], "seq_lens": [0], "key_range": True, "sliding_window": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_options_shrink_to_what_is_needed(name):
    wanted, options = SMALLEST[name]
    plain = {"num_heads": 1, "num_kv_heads": 1, "head_size": 32, "dtype": np.dtype(np.float32)}
    assert find(strategies.batch_options(), wanted, settings=SEARCH) == {**plain, **options}


def test_a_spec_shrinks_to_what_is_needed():
    found = find(strategies.cache_specs(), lambda spec: spec.content == "shuffled" and spec.is_quantized, settings=SEARCH)
    expected = CacheSpec(num_blocks=1, block_size=16, num_kv_heads=1, head_size=32, dtype=ml_dtypes.float8_e4m3fn, content="shuffled")
    assert found == expected


@QUICK
@given(strategies.batch_options(num_heads=4, num_kv_heads=2, seq_lens=[3, 20], sinks=False, cache_dtype=None))
def test_what_is_fixed_is_not_drawn(options):
    assert {"num_heads": 4, "num_kv_heads": 2, "seq_lens": [3, 20], "sinks": False, "cache_dtype": None}.items() <= options.items()
    assert "query_lens" not in options and "kind" not in options
    grouped(options)


def test_a_fixed_option_is_checked_before_anything_is_drawn():
    with pytest.raises(TypeError, match="num_head"):
        strategies.batches(num_head=4)
    with pytest.raises(ValueError, match="'tiled'"):
        strategies.batch_options(content="tiled")


@QUICK
@given(strategies.attention_options(alibi=False))
def test_attention_options_are_masks_and_scores(options):
    assert options["alibi"] is False
    grouped(options)
