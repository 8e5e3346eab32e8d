"""Descriptors and optimistic masks, through Triton's interpreter: results are those of pointers and NaN-safe masks."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import ml_dtypes
import numpy as np
import pytest

from purepage import CacheSpec
from purepage.functional.testing import random_batch
from purepage.kernels.archs.configs import DecodeConfig, PrefillConfig
from purepage.kernels.launch import Descriptor, without_descriptors
from purepage.kernels.plans.attention import plan_paged_attention
from purepage.kernels.plans.shapes import PagedAttentionShape

pytest.importorskip("torch")
pytest.importorskip("triton")
attention = pytest.importorskip("test_triton_attention")

BF16 = ml_dtypes.bfloat16
ROWS = {
    "pointers": PrefillConfig(16, 16, 1, 1, optimistic=True, partial_sums=4),
    "descriptors": PrefillConfig(16, 16, 1, 1, optimistic=True, partial_sums=4, kv_descriptor=True),
    "part of a page": PrefillConfig(16, 8, 1, 1, optimistic=True, partial_sums=8, kv_descriptor=True),
}
UNUSED = {"NaN": np.nan, "infinite": np.inf, "finite": 3.0}


def fill_unused(batch, value):
    """Fills the slots that no sequence owns with `value` in place of NaN."""
    for cache in (batch.key_cache, batch.value_cache):
        cache[np.isnan(cache.astype(np.float32))] = value


SPLIT = DecodeConfig(16, 1, 1, 2, max_block_m=16)
LONG = {"max_query_len": 40, "max_seq_len": 100}
"""Of these batches the split kernel takes the short sequences, the tiled kernel the others."""


def planned(row):
    """Plans with the row, and makes sure that it comes to run."""

    def look(program):
        assert program.launches[0].kernel.endswith("paged_attention_prefill")
        assert any(isinstance(arg, Descriptor) for arg in program.launches[0].args) == row.kv_descriptor

    return {"rows": {"tiled": row, "split": SPLIT}, "look": look}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("unused", UNUSED)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("content, order", [("packed", "LBHNC"), ("packed", "LHBNC"), ("flash", "LBHNC"), ("flash", "LHBNC")])
def test_an_optimistic_pass_and_descriptors_change_no_result_whatever_unused_slots_hold(content, order, row, unused):
    batch = random_batch(21, dtype=BF16, num_layers=2, **LONG)
    fill_unused(batch, UNUSED[unused])
    attention.check(batch, layer=1, content=content, order=order, **planned(ROWS[row]))


FEATURES = {
    "window": {"sliding_window": 9},
    "soft cap and sinks": {"logits_soft_cap": 15.0, "sinks": [0.3, -1.0, 5.0, -np.inf]},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("unused", ["NaN", "finite"])
@pytest.mark.parametrize("feature", FEATURES)
def test_an_optimistic_pass_and_descriptors_with_every_mask(feature, unused):
    batch = random_batch(22, dtype=BF16, **LONG)
    fill_unused(batch, UNUSED[unused])
    attention.check(batch, **planned(ROWS["descriptors"]), **FEATURES[feature])


@pytest.mark.parametrize("row", ["pointers", "descriptors"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_key_that_only_later_queries_see_spoils_them_alone_in_an_optimistic_pass(row, poison):
    attention.check_a_spoilt_key(poison, prepare=lambda batch: fill_unused(batch, 1.0), **planned(ROWS[row]))


def descriptor_of(*, content="packed", order="LBHNC", block_size=64, dtype=BF16, head_size=128, arch="sm_90", **changes):
    spec = CacheSpec(
        num_layers=3, num_blocks=70, block_size=block_size, num_kv_heads=8, head_size=head_size, dtype=dtype, content=content, order=order
    )
    shape = {"num_tokens": 4096, "num_seqs": 1, "num_heads": 32, "table_width": 64}
    shape |= {"query_dtype": "bfloat16", "output_dtype": "bfloat16"}
    program = plan_paged_attention(PagedAttentionShape(**(shape | changes), cache=spec, max_query_len=4096, scale=0.1), arch, num_cus=132)
    launch = program.launches[0]
    assert not any(isinstance(arg, Descriptor) for arg in without_descriptors(launch).args)
    return next((arg for arg in launch.args if isinstance(arg, Descriptor)), None)


@pytest.mark.parametrize(
    "content, order, columns",
    [("packed", "LBHNC", 256), ("packed", "LHBNC", 256), ("flash", "LBHNC", 1024), ("flash", "LHBNC", 1024)],
)
def test_a_cache_with_a_token_a_row_has_a_descriptor_of_all_its_rows(content, order, columns):
    descriptor = descriptor_of(content=content, order=order)
    elements = 3 * 70 * 64 * 8 * 2 * 128
    assert descriptor == Descriptor("cache", "bfloat16", (elements // columns, columns), (64, 128))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param({"content": "xpacked"}, id="channels in vectors"),
        pytest.param({"content": "shuffled"}, id="tokens in vectors"),
        pytest.param({"block_size": 16}, id="tiles straddle pages"),
        pytest.param({"dtype": ml_dtypes.float8_e4m3fn}, id="fp8 goes through registers"),
        pytest.param({"dtype": np.float32, "query_dtype": "float32"}, id="float32 has no matrix unit"),
        pytest.param({"head_size": 80}, id="a padded head would take in its neighbour"),
        pytest.param({"arch": "sm_80"}, id="no copy engine"),
        pytest.param({"arch": "gfx942"}, id="AMD"),
    ],
)
def test_no_descriptor_where_rows_of_the_cache_are_not_what_a_tile_needs(call):
    assert descriptor_of(**call) is None


def test_the_callback_bridge_interprets_a_descriptor():
    import bridge_descriptors
    import torch

    from purepage.bridges import launcher

    matrix = torch.randn(16, 128).to(torch.bfloat16)
    tensors = {"x": matrix.view(torch.uint16).reshape(-1), "out": torch.full((8, 64), float("nan"), dtype=torch.bfloat16)}
    launcher.interpret(bridge_descriptors.fetch_program(), tensors)
    assert torch.equal(tensors["out"], matrix[8:, 64:])
