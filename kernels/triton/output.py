"""A block of rows of attention, on the device: query tokens times query heads of one KV head, so that heads fill the matrix unit."""

import triton
import triton.language as tl

from .common import cast, float32_to_fp8, typed
from .kv_block import LOG2E


@triton.jit
def block_rows(kv_head, head_tile, GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """(token within the block, query head, whether the row is one) of ROWS rows; a block has TOKENS tokens x HEADS of the GROUP heads."""
    row = tl.arange(0, ROWS)
    in_group = head_tile * HEADS + row % HEADS
    return row // HEADS, kv_head * GROUP + in_group, (row < TOKENS * HEADS) & (in_group < GROUP)


@triton.jit
def score_factor(
    score_scale, k_scale, layer, kv_head, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, QUANTIZED: tl.constexpr, SCALE_HEADS: tl.constexpr
):
    """What turns <query, stored key> into a base-2 score; with a soft cap, into the exponent of its tanh."""
    if SOFT_CAP != 0.0:
        factor = SCALE * 2.0 * LOG2E / SOFT_CAP
    else:
        factor = SCALE * LOG2E
    if score_scale is not None:
        factor = factor * tl.load(score_scale)
    if QUANTIZED:
        factor = factor * tl.load(k_scale + layer * SCALE_HEADS + (kv_head if SCALE_HEADS > 1 else 0))
    return factor


@triton.jit
def start_rows(sinks, head, ok, skipped, ROWS: tl.constexpr):
    """(row_sum, row_max) of rows that have seen no key; where there are sinks and no tile was `skipped`, the sink's logit is in both."""
    if sinks is not None:
        # The comparison is one of vectors: Triton's interpreter turns a mask `&` a scalar into integers.
        row_max = LOG2E * tl.load(sinks + head, mask=ok & (head * 0 + skipped == 0), other=float("-inf"))
        return tl.where(row_max == float("-inf"), 0.0, 1.0), row_max
    else:
        return tl.zeros([ROWS], tl.float32), tl.full([ROWS], float("-inf"), tl.float32)


@triton.jit
def store_rows(
    out,
    lse,
    token,
    head,
    ok,
    acc,
    row_sum,
    row_max,
    value_scale,
    output_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    OUT_KIND: tl.constexpr,
):
    """Normalises and writes rows; `token` is i64. A row of no row_sum is exactly 0, its lse -inf."""
    d = tl.arange(0, HEAD_PAD)
    row = token * NUM_HEADS + head
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    result = tl.where(empty[:, None], 0.0, acc * (value_scale / row_sum)[:, None])
    pointers = typed(out, OUT_KIND) + row[:, None] * HEAD_SIZE + d[None, :]
    store_ok = ok[:, None] & (d < HEAD_SIZE)[None, :]
    if output_scale is not None:
        result = result / tl.load(output_scale)
    if OUT_KIND == "float32" or OUT_KIND == "float16" or OUT_KIND == "bfloat16":
        tl.store(pointers, cast(result, OUT_KIND), mask=store_ok)
    else:
        tl.store(pointers, float32_to_fp8(result, OUT_KIND), mask=store_ok)
    if lse is not None:
        tl.store(lse + row, tl.where(empty, float("-inf"), (row_max + tl.log2(row_sum)) / LOG2E), mask=ok)


@triton.jit
def store_zeros(
    out,
    lse,
    token,
    head,
    ok,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    OUT_KIND: tl.constexpr,
):
    """Padding tokens: 0 and -inf."""
    d = tl.arange(0, HEAD_PAD)
    row = token * NUM_HEADS + head
    pointers = typed(out, OUT_KIND) + row[:, None] * HEAD_SIZE + d[None, :]
    tl.store(pointers, (row[:, None] * 0 + d[None, :] * 0).to(pointers.dtype.element_ty), mask=ok[:, None] & (d < HEAD_SIZE)[None, :])
    if lse is not None:
        tl.store(lse + row, (row * 0).to(tl.float32) - float("inf"), mask=ok)
