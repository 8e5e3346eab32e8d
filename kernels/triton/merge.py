"""Merge of two attention results over disjoint keys."""

import triton
import triton.language as tl

from .slots import round_to


@triton.jit
def weighted(out, share, pointers_ok, offsets):
    """share * out, float32; a side without weight is not read, it may hold anything."""
    values = tl.load(out + offsets, mask=pointers_ok & (share != 0.0)[:, None], other=0.0).to(tl.float32)
    return share[:, None] * values


@triton.jit
def merge_states_kernel(
    out,
    lse,
    out_a,
    lse_a,
    out_b,
    lse_b,
    num_rows,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KIND: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid: blocks of ROWS rows, a row a token and head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    a = tl.load(lse_a + row, mask=is_row, other=float("-inf"))
    b = tl.load(lse_b + row, mask=is_row, other=float("-inf"))
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is NaN; two empty sides are not
    weight_a = tl.exp(a - base)
    weight_b = tl.exp(b - base)
    total = weight_a + weight_b
    divisor = tl.where(total == 0.0, 1.0, total)

    d = tl.arange(0, HEAD_PAD)
    offsets = row.to(tl.int64)[:, None] * HEAD_SIZE + d[None, :]
    ok = is_row[:, None] & (d < HEAD_SIZE)[None, :]
    merged = weighted(out_a, weight_a / divisor, ok, offsets) + weighted(out_b, weight_b / divisor, ok, offsets)
    tl.store(out + offsets, round_to(merged, KIND, INTERPRETED), mask=ok)
    tl.store(lse + row, base + tl.log(total), mask=is_row)
