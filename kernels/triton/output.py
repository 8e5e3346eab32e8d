"""Writing rows of the output, on the device."""

import triton
import triton.language as tl

from .dtypes import cast, typed
from .fp8 import float32_to_fp8
from .query import LOG2E


@triton.jit
def store_rows(out, lse, token, head, ok, state, value_scale, output_scale, S: tl.constexpr):
    """Normalises and writes rows; `token` is i64. A row whose sum is 0 has seen no key: its output is exactly 0, its lse -inf."""
    OUT: tl.constexpr = S.out_dtype
    acc, row_sum, row_max = state
    d = tl.arange(0, S.value_pad)
    row = token * S.num_heads + head
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    result = tl.where(empty[:, None], 0.0, acc * (value_scale / row_sum)[:, None])
    pointers = typed(out, OUT) + row[:, None] * S.value_size + d[None, :]
    store_ok = ok[:, None] & (d < S.value_size)[None, :]
    if output_scale is not None:
        result = result / tl.load(output_scale)
    if OUT == "float32" or OUT == "float16" or OUT == "bfloat16":
        tl.store(pointers, cast(result, OUT), mask=store_ok)
    else:
        tl.store(pointers, float32_to_fp8(result, OUT), mask=store_ok)
    if lse is not None:
        tl.store(lse + row, tl.where(empty, float("-inf"), (row_max + tl.log2(row_sum)) / LOG2E), mask=ok)


@triton.jit
def store_zeros(out, lse, token, head, ok, S: tl.constexpr):
    """Writes 0 and an lse of -inf, for padding tokens; `token` is i64."""
    OUT: tl.constexpr = S.out_dtype
    d = tl.arange(0, S.value_pad)
    row = token * S.num_heads + head
    pointers = typed(out, OUT) + row[:, None] * S.value_size + d[None, :]
    zeros = (row[:, None] * 0 + d[None, :] * 0).to(pointers.dtype.element_ty)
    tl.store(pointers, zeros, mask=ok[:, None] & (d < S.value_size)[None, :])
    if lse is not None:
        tl.store(lse + row, (row * 0).to(tl.float32) - float("inf"), mask=ok)


@triton.jit
def zero_padding(out, lse, order, used_tokens, num_tokens, row_token, head, is_row, S: tl.constexpr):
    """Writes the padding tokens among those of the `order`-th block of query tokens."""
    if (order + 1) * S.block_tokens > used_tokens:
        token = order * S.block_tokens + row_token
        padding = is_row & (token >= used_tokens) & (token < num_tokens)
        store_zeros(out, lse, token.to(tl.int64), head, padding, S)
