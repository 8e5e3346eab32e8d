"""Options of a random batch: closed sets, groups, layouts, scores and masks that go with it, and the comparison that follows its scores."""

from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.functional.testing.batch_options import GROUPS, BatchOptions
from purepage.testing import KINDS, assert_close, random_batch

SCORES = {
    "scale": {"scale": 0.5},
    "soft cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
}
SETS = {
    "content": ("tiled", "'packed', 'xpacked', 'xpacked_interleaved_v', 'shuffled', 'flash'"),
    "order": ("BLHNC", "'LBHNC', 'LHBNC'"),
    "unused": ("inf", "'nan', 'zero'"),
    "table_padding": ("none", "'wild', 'zero'"),
    "dtype": (np.float64, "float32, float16, bfloat16"),
    "cache_dtype": (np.int8, "float32.*float8_e5m2fnuz"),
    "num_heads": (3, "a multiple of num_kv_heads"),
}


def test_every_option_is_in_one_group_and_in_the_typed_dict():
    names = [field.name for group in GROUPS for field in fields(group)]
    assert len(names) == len(set(names))
    assert list(BatchOptions.__annotations__) == names
    for group in GROUPS:
        assert all(BatchOptions.__annotations__[f.name] == group.__annotations__[f.name] for f in fields(group))
        assert all(f.name in (group.__doc__ or "") for f in fields(group))


@pytest.mark.parametrize("name", SETS)
def test_a_value_outside_its_set_is_refused_with_the_set(name):
    value, known = SETS[name]
    with pytest.raises(ValueError, match=f"{name} is .*{known}"):
        random_batch(0, **{name: value})


def test_an_unknown_option_is_refused_with_those_that_exist():
    with pytest.raises(TypeError, match=r"num_head'.*num_heads.*num_kv_heads"):
        random_batch(0, num_head=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"common_prefix_blocks.*'prefill'"):
        random_batch(0, kind="prefill", common_prefix_blocks=1)


@pytest.mark.parametrize("order", ["LBHNC", "LHBNC"])
def test_a_layout_that_is_asked_for_is_the_caches(order):
    batch = random_batch(0, content="shuffled", order=order, num_layers=2)
    for cache in (batch.cache(), batch.cache_before()):
        assert (cache.spec.content, cache.spec.order) == ("shuffled", order)
    np.testing.assert_array_equal(pp.cache_to_logical(batch.cache(), 1)[0], batch.key_cache[1])
    assert batch.cache(content="flash").spec.order == order


@pytest.mark.parametrize("scores", SCORES)
def test_the_options_of_a_batch_are_those_of_attention(scores):
    batch = random_batch(3, sliding_window=9, **SCORES[scores])
    assert len(batch.options) == 2 and batch.masks == {"sliding_window": 9}
    out, lse = batch.reference(**batch.options)
    batch.check(out.astype(np.float32), lse.astype(np.float32))
    with pytest.raises(AssertionError):
        batch.check(out.astype(np.float32), lse.astype(np.float32) + np.float32(1e-3))
    with pytest.raises(AssertionError):
        batch.check(batch.reference(**batch.masks)[0].astype(np.float32))
    with pytest.raises(NotImplementedError, match="sliding_window"):
        batch.pick(*SCORES[scores])
    assert batch.pick("sliding_window", "sinks", "alibi_slopes", "logits_soft_cap", "scale") == batch.options


MASKS = {"sliding_window": 6, "key_range": True, "qq_bias": "each"}


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_in_unused_slots_change_no_result(kind):
    wild, tame = (random_batch(5, kind=kind, **MASKS, **how) for how in ({}, {"unused": "zero", "table_padding": "zero"}))
    for name in ("query", "new_keys", "new_values", "key_cache", "value_cache"):
        assert np.isfinite(getattr(tame, name)).all() and np.isnan(getattr(wild, name)).any(), name
    blocks = tame.key_cache.shape[1]
    assert np.all((np.asarray(tame.metadata.block_table) >= 0) & (np.asarray(tame.metadata.block_table) < blocks))
    for mine, expected in zip(tame.reference(**tame.options), wild.reference(**wild.options), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_a_poisoned_newest_key_needs_no_nan_elsewhere():
    batch = random_batch(4, kind="chunked", poison_newest=True, unused="zero")
    last = np.asarray(batch.metadata.query_start_loc)[1:][batch.query_lens > 1] - 1
    out, _ = batch.reference()
    assert np.isnan(out[last]).all() and np.isnan(out).sum() == np.isnan(out[last]).sum()
    assert np.isnan(batch.key_cache).sum() == len(last) * 2 * 32
    batch.check(out.astype(np.float32))  # rows that must be NaN are not compared


def test_a_value_may_be_narrower_than_a_key():
    batch = random_batch(0, head_size=48, head_size_v=32)
    assert batch.key_cache.shape[-1] == batch.new_keys.shape[-1] == 48
    assert batch.value_cache.shape[-1] == batch.new_values.shape[-1] == batch.reference()[0].shape[-1] == 32


def test_the_check_leaves_padding_out_where_it_is_told_to():
    batch = random_batch(0)
    out = batch.reference()[0].astype(np.float32)
    out[batch.num_tokens :] = np.nan
    batch.check(out, padding=False)
    with pytest.raises(AssertionError, match="mine"):
        batch.check(out, what="mine")
    out[0, 0, 0] += 1e-2
    with pytest.raises(AssertionError, match="1 of"):
        batch.check(out, padding=False)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_bound_of_scores_holds_and_is_near(dtype, scale):
    batch = random_batch(1, dtype=dtype, kind="chunked", scale=scale, head_size=64)
    lse = batch.reference(**batch.options)[1]
    size = batch.score_size()[: batch.num_tokens]
    largest = np.abs(lse[: batch.num_tokens]) - np.log(60)
    assert np.all(size > largest) and np.median(size / np.abs(lse[: batch.num_tokens])) < 10
    assert np.all(batch.score_size()[batch.num_tokens :] == 0)


def test_scores_whose_terms_cancel_get_the_error_of_their_terms():
    """Channels come in pairs of opposite keys: scores are small, their terms are not, and float32 sums them in some order."""
    batch = random_batch(2, kind="decode", num_heads=1, num_kv_heads=1, head_size=64, scale=1.0)
    keys = batch.key_cache.copy()
    keys[..., :32] *= 300
    keys[..., 32:] = -keys[..., :32] + keys[..., 32:] * np.float32(0.3)
    query = batch.query.copy()
    query[..., 32:] = query[..., :32]

    batch = replace(batch, query=query, key_cache=keys)
    expected, lse = batch.reference(**batch.options)
    out = jax.jit(partial(pp.paged_attention, implementation="xla", scale=1.0))(batch.query, batch.cache(), batch.metadata)
    batch.check(out)
    assert np.abs(lse[: batch.num_tokens]).max() < 40 < batch.score_size()[: batch.num_tokens].min()
    with pytest.raises(AssertionError):
        assert_close(np.asarray(out), expected, dtype=np.float32, lse=lse)
    with pytest.raises(AssertionError):
        batch.check(jnp.asarray(batch.reference(scale=1.5)[0], jnp.float32))
