"""Merge of two attention results over disjoint keys."""

import triton
import triton.language as tl

from .rounding import round_to


@triton.jit
def weighted(out, share, pointers_ok, offsets):
    """share * out in float32. A side whose share is 0 is not read, so it can hold anything."""
    values = tl.load(out + offsets, mask=pointers_ok & (share != 0.0)[:, None], other=0.0).to(tl.float32)
    return share[:, None] * values


@triton.jit
def without_inf(lse):
    """+inf, which FlashAttention 2 writes for a side without keys, as -inf."""
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def merge_states_kernel(
    out,  # [T, Hq, D] dtype of out_a
    lse,  # [T, Hq] f32
    out_a,  # [T, Hq, D] model dtype
    lse_a,  # [T, Hq] f32
    out_b,  # [T, Hq, D] model dtype
    lse_b,  # [T, Hq] f32
    num_rows,  # i32: T * Hq
    S: tl.constexpr,  # MergeSpec
):
    """Grid: blocks of rows; a row is one token of one head."""
    DTYPE: tl.constexpr = S.dtype
    row = tl.program_id(0) * S.block_m + tl.arange(0, S.block_m)
    is_row = row < num_rows
    a = without_inf(tl.load(lse_a + row, mask=is_row, other=float("-inf")))
    b = without_inf(tl.load(lse_b + row, mask=is_row, other=float("-inf")))
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(top == float("-inf"), 0.0, top)  # avoids -inf - -inf, which is NaN, where neither side has a key
    weight_a = tl.exp(a - base)
    weight_b = tl.exp(b - base)
    total = weight_a + weight_b
    divisor = tl.where(total == 0.0, 1.0, total)

    d = tl.arange(0, S.head_pad)
    offsets = row.to(tl.int64)[:, None] * S.head_size + d[None, :]
    ok = is_row[:, None] & (d < S.head_size)[None, :]
    merged = weighted(out_a, weight_a / divisor, ok, offsets) + weighted(out_b, weight_b / divisor, ok, offsets)
    tl.store(out + offsets, round_to(merged, DTYPE, S.interpreted), mask=ok)
    tl.store(lse + row, base + tl.log(total), mask=is_row)
