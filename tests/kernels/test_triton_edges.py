"""Masked tiles smaller than the others, values asked for before scores, and block ids clamped late, through Triton's interpreter."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import ml_dtypes
import numpy as np
import pytest

from purepage.functional.testing import random_batch
from purepage.kernels.archs.configs import DecodeConfig, PrefillConfig

pytest.importorskip("torch")
pytest.importorskip("triton")
attention = pytest.importorskip("test_triton_attention")

BF16 = ml_dtypes.bfloat16
LATER = {"masked_block_n": 8, "late_clamp": True}
ROWS = {
    "within a page": {"tiled": PrefillConfig(16, 16, 1, 1, **LATER), "split": DecodeConfig(16, 1, 1, 2, **LATER, values_first=True)},
    "over pages": {"tiled": PrefillConfig(16, 32, 1, 1, **LATER), "split": DecodeConfig(32, 1, 1, 2, 16, **LATER, values_first=True)},
}
FEATURES = {
    "causal": {},
    "window": {"sliding_window": 21},
    "soft cap and sinks": {"logits_soft_cap": 15.0, "sinks": [0.3, -1.0, 5.0, -np.inf]},
    "ALiBi and window": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "sliding_window": 9},
}
LONG = {"max_query_len": 40, "max_seq_len": 100}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("content", ["packed", "shuffled"])
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_small_edges_and_early_values_change_no_result(kind, content, rows, feature):
    batch = random_batch(31, kind=kind, dtype=BF16, num_layers=2, **(LONG if kind == "mixed" else {"max_seq_len": 100}))
    attention.check(batch, layer=1, content=content, rows=ROWS[rows], **FEATURES[feature])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_key_that_only_later_queries_see_spoils_them_alone_at_small_edges(rows, poison):
    attention.check_a_spoilt_key(poison, rows=ROWS[rows])
