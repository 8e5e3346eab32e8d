"""Prefill against peaks that masked tiles gave, through Triton's interpreter: scores far above and below them change no result."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import ml_dtypes
import numpy as np
import pytest

from purepage import CacheSpec
from purepage.functional.testing import random_batch
from purepage.kernels.archs.configs import DecodeConfig, PrefillConfig
from purepage.kernels.plans.attention import plan_paged_attention
from purepage.kernels.plans.shapes import PagedAttentionShape

pytest.importorskip("torch")
pytest.importorskip("triton")
attention = pytest.importorskip("test_triton_attention")

BF16 = ml_dtypes.bfloat16
FIXED = {"optimistic": True, "frozen_max": True}
ROWS = {
    "sums": PrefillConfig(16, 16, 1, 1, **FIXED, partial_sums=4),
    "one sum": PrefillConfig(16, 16, 1, 1, **FIXED),
    "small edges": PrefillConfig(32, 16, 1, 1, **FIXED, partial_sums=4, masked_block_n=8),
    "descriptors": PrefillConfig(16, 16, 1, 1, **FIXED, partial_sums=4, kv_descriptor=True),
}
SPLIT = DecodeConfig(16, 1, 1, 2, max_block_m=16)
LONG = {"dtype": BF16, "max_query_len": 40, "max_seq_len": 130}


def check(batch, row, **options):
    attention.check(batch, rows={"tiled": row, "split": SPLIT}, **options)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("gain", [0.01, 1, 30, 100, 1000])
def test_scores_of_any_range_give_the_oracles_result(gain, row):
    """Standard deviations of `gain`: from scores that hardly differ to some that no float32 weight can hold beside each other."""
    batch = random_batch(31, **LONG)
    batch.query[:] = (batch.query.astype(np.float32) * gain).astype(BF16)
    check(batch, ROWS[row])


@pytest.mark.parametrize("above", [20, 60, 85, 100, 300, -300])
def test_one_key_of_another_tile_may_stand_out_by_any_amount(above):
    """Every query scores the first key `above` the others; the margin allows weights of about e**91."""
    batch = random_batch(32, kind="prefill", num_seqs=2, share_prefixes=False, head_size=64, scales="one", **LONG)
    batch.query[..., 0] = 8
    batch.key_cache[..., 0] = 0
    table = np.asarray(batch.metadata.block_table)
    batch.key_cache[:, table[:2, 0], 0, :, 0] = above  # times 8 by 64**-0.5
    check(batch, ROWS["sums"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", ["mixed", "prefill", "cross"])
@pytest.mark.parametrize("masks", [{"key_range": True}, {"key_range": True, "sliding_window": 50}, {"sliding_window": 50}], ids="-".join)
def test_masks_as_data_and_tiles_without_them(masks, kind, row):
    batch = random_batch(33, kind=kind, **LONG, **masks)
    check(batch, ROWS[row], traced="key_range" not in masks, **batch.masks)


@pytest.mark.parametrize("row", ["sums", "descriptors"])
def test_a_range_of_all_keys_hides_none(row):
    batch = random_batch(34, kind="cross", **LONG)
    check(batch, ROWS[row], key_range=(np.full(len(batch.query), -5), np.full(len(batch.query), 2**31 - 1)))


FEATURES = {
    "window": {"sliding_window": 21},
    "window of one tile": {"sliding_window": 16},
    "soft cap": {"logits_soft_cap": 15.0},
    "sinks": {"sinks": [0.3, -1.0, 30.0, -np.inf]},
    "ALiBi": {"alibi_slopes": [8.0, 0.25, -4.0, 0.0625]},
    "everything": {
        "sliding_window": 37,
        "logits_soft_cap": 300.0,
        "sinks": [0.3, -1.0, 5.0, -np.inf],
        "alibi_slopes": [2.0, 0.25, -2.0, 0.06],
    },
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("gain", [1, 60])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_mask_and_bias_over_scores_of_any_range(feature, gain):
    batch = random_batch(33, sliding_window=FEATURES[feature].get("sliding_window"), **LONG)
    batch.query[:] = (batch.query.astype(np.float32) * gain).astype(BF16)
    check(batch, ROWS["sums"], **FEATURES[feature])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_key_that_only_later_queries_see_spoils_them_alone(poison):
    attention.check_a_spoilt_key(poison, rows={"tiled": ROWS["sums"], "split": SPLIT})


def launched(dtype, query_dtype):
    spec = CacheSpec(num_blocks=70, block_size=64, num_kv_heads=8, head_size=128, dtype=dtype)
    shape = PagedAttentionShape(
        num_tokens=512,
        num_seqs=4,
        num_heads=32,
        table_width=16,
        cache=spec,
        query_dtype=query_dtype,
        output_dtype=query_dtype,
        max_query_len=128,
        max_seq_len=1024,
        scale=0.1,
    )
    return plan_paged_attention(shape, "sm_90", num_cus=132).launches[0].facts


@pytest.mark.parametrize(
    "dtype, query_dtype, frozen",
    [("bfloat16", "bfloat16", True), ("float16", "float16", False), ("float8_e4m3fn", "bfloat16", False), ("float32", "float32", False)],
)
def test_the_maximum_is_frozen_only_where_bfloat16_holds_the_weights(dtype, query_dtype, frozen):
    assert launched(dtype, query_dtype)["frozen_max"] is frozen
