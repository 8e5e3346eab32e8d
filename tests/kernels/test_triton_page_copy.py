"""Prefill over a copy of its pages, through Triton's interpreter: the answer is the one that the pages themselves give."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import ml_dtypes
import numpy as np
import pytest

from purepage import CacheSpec
from purepage.functional.testing import random_batch
from purepage.kernels.archs.configs import DecodeConfig, PrefillConfig
from purepage.kernels.launch import Descriptor
from purepage.kernels.plans.attention import plan_paged_attention
from purepage.kernels.plans.page_copy import MAX_BYTES, PAGE_COPY_KERNEL
from purepage.kernels.plans.shapes import PagedAttentionShape

pytest.importorskip("torch")
pytest.importorskip("triton")
attention = pytest.importorskip("test_triton_attention")

BF16, F16 = ml_dtypes.bfloat16, np.float16
E4M3, E4M3Z, E5M2, E5M2Z = (getattr(ml_dtypes, f"float8_{kind}") for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))
SPLIT = DecodeConfig(16, 1, 1, 2, max_block_m=16)
LONG = {"max_query_len": 40, "max_seq_len": 100}
ROW = PrefillConfig(16, 16, 1, 1, optimistic=True, partial_sums=4, kv_descriptor=True, page_copy_from=1)


def goes_over_a_copy(program):
    copy, prefill = program.launches[:2]
    assert copy.kernel == PAGE_COPY_KERNEL
    assert {arg.buffer for arg in prefill.args if isinstance(arg, Descriptor)} == {"page_copy"}
    assert "cache" not in prefill.args


def check(batch, **options):
    attention.check(batch, rows={"tiled": ROW, "split": SPLIT}, look=goes_over_a_copy, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("content, order", [(c, o) for c in ("xpacked", "xpacked_interleaved_v", "shuffled") for o in ("LBHNC", "LHBNC")])
def test_pages_of_every_layout_in_vectors(content, order):
    check(random_batch(31, dtype=BF16, num_layers=2, **LONG), layer=1, content=content, order=order)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("query, cache", [(BF16, E4M3), (BF16, E5M2), (F16, E4M3Z), (F16, E5M2Z)], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("scales", ["layer", "head"])
def test_pages_in_fp8_with_the_scales_of_their_layer(query, cache, scales):
    check(random_batch(32, dtype=query, cache_dtype=cache, num_layers=2, scales=scales, **LONG), layer=1)


@pytest.mark.parametrize("cache", [BF16, E4M3], ids=lambda d: np.dtype(d).name)
def test_a_negative_scale_of_the_scores(cache):
    check(random_batch(35, dtype=BF16, cache_dtype=cache, **LONG), scale=-0.2, content="xpacked")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sliding_window": 9}, id="window"),
        pytest.param({"logits_soft_cap": 15.0, "sinks": [0.3, -1.0, 5.0, -np.inf]}, id="soft cap and sinks"),
        pytest.param({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "sliding_window": 20}, id="ALiBi in a window"),
    ],
)
@pytest.mark.parametrize("kind", ["mixed", "prefill", "chunked"])
def test_masks_and_sequences_of_every_kind(kind, options):
    check(random_batch(33, kind=kind, dtype=BF16, cache_dtype=E4M3, max_seq_len=150, max_query_len=70), **options)


@pytest.mark.parametrize("masks", [{"key_range": True}, {"sliding_window": 20}], ids="-".join)
def test_masks_as_data(masks):
    batch = random_batch(36, dtype=BF16, cache_dtype=E4M3, max_seq_len=150, max_query_len=70, **masks)
    check(batch, traced="key_range" not in masks, **batch.masks)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block_size", [8, 24, 128])
def test_pages_of_any_size(block_size):
    check(random_batch(34, dtype=BF16, block_size=block_size, **LONG), content="xpacked")


def launches(*, num_seqs=1, max_query_len=4096, table_width=64, query="bfloat16", arch="sm_90", **spec):
    spec = {"num_blocks": 600, "block_size": 64, "num_kv_heads": 8, "head_size": 128, "dtype": E4M3, **spec}
    shape = PagedAttentionShape(
        num_tokens=4096,
        num_seqs=num_seqs,
        num_heads=32,
        table_width=table_width,
        cache=CacheSpec(**spec),
        query_dtype=query,
        output_dtype="bfloat16",
        max_query_len=max_query_len,
        scale=0.1,
    )
    return [launch.kernel.partition(":")[2] for launch in plan_paged_attention(shape, arch, num_cus=132).launches]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param({}, id="fp8"),
        pytest.param({"dtype": BF16, "content": "xpacked"}, id="x-packed"),
        pytest.param({"dtype": BF16, "block_size": 16}, id="blocks of 16"),
    ],
)
def test_on_hopper_long_prefill_goes_over_a_copy_where_pages_cannot_be_fetched_whole(call):
    assert launches(**call) == ["copy_pages", "paged_attention_prefill"]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param({"dtype": BF16}, id="pages are fetched as they are"),
        pytest.param({"max_query_len": 128}, id="few queries"),
        pytest.param({"num_seqs": 256, "table_width": 512}, id="the copy would be too large"),
        pytest.param({"query": "float32"}, id="a float32 query"),
        pytest.param({"dtype": np.float16}, id="a query of another dtype"),
        pytest.param({"head_size": 96}, id="a padded head"),
        pytest.param({"arch": "gfx942"}, id="AMD"),
    ],
)
def test_no_copy_where_it_does_not_pay(call):
    assert "copy_pages" not in launches(**call)


def test_a_copy_keeps_within_its_bound():
    widest = MAX_BYTES // (64 * 8 * 2 * 128 * 2)
    assert launches(table_width=widest, num_blocks=9000)[0] == "copy_pages"
    assert "copy_pages" not in launches(table_width=widest + 1, num_blocks=9000)
