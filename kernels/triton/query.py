"""A block of query rows, on the device: query tokens times query heads of one KV head, so that heads fill the matrix unit."""

import triton
import triton.language as tl

from .address import uniform
from .dtypes import cast, to_compute, typed
from .spec import QuerySource

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def block_rows(kv_head, group_block, S: tl.constexpr):
    """(token within the block, query head, whether the row exists) of each row."""
    row = tl.arange(0, S.block_m)
    in_group = group_block * S.block_heads + row % S.block_heads
    token = row // S.block_heads
    head = kv_head * S.queries_per_kv_head + in_group
    return token, head, (row < S.block_tokens * S.block_heads) & (in_group < S.queries_per_kv_head)


@triton.jit
def locate_block(block, query_start_loc, num_seqs, S: tl.constexpr):
    """(sequence, its first token, its query tokens, the block's first token within it) of a block of query tokens.

    Sequence s has the blocks from query_start_loc[s] // block_tokens + s on, so a block finds its sequence without a prefix sum. A block
    past its sequence's end starts at or after its last token.
    """
    seqs = tl.arange(0, S.seqs_pad)
    starts = tl.load(query_start_loc + seqs, mask=seqs < num_seqs, other=0)
    seq = uniform(tl.sum(((starts // S.block_tokens + seqs <= block) & (seqs < num_seqs)).to(tl.int32), 0) - 1, S.amd)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    return seq, query_start, query_len, (block - (query_start // S.block_tokens + seq)) * S.block_tokens


@triton.jit
def head_scale(scales, layer, kv_head, S: tl.constexpr):
    """The cache's scale of a layer and KV head; `scales` is f32 [L] or [L, H]."""
    return tl.load(scales + layer * S.scale_heads + (kv_head if S.scale_heads > 1 else 0))


@triton.jit
def score_factor(score_scale, k_scale, layer, kv_head, S: tl.constexpr):
    """Factor from <query, stored key> to a base-2 score; with a soft cap, to the exponent of its tanh."""
    if S.soft_cap != 0.0:
        factor = S.scale * 2.0 * LOG2E / S.soft_cap
    else:
        factor = S.scale * LOG2E
    if score_scale is not None:
        factor = factor * tl.load(score_scale)
    if S.is_quantized:
        factor = factor * head_scale(k_scale, layer, kv_head, S)
    return factor


@triton.jit
def bias_table(qq_bias, seq, S: tl.constexpr):
    """The bias of a sequence: its own, or the one of all."""
    if S.bias_per_sequence:
        return qq_bias + tl.cast(seq, tl.int64) * (S.bias_rows * S.bias_columns)
    else:
        return qq_bias


@triton.jit
def load_query(query, first_token, row_token, head, ok, factor, S: tl.constexpr):
    """Rows of the query in the compute dtype, their source, and their factor: at least 0, one in all or, with row_factor, one for each row.

    `query` points to [T, Hq, D]. Without signed_factor the keys already have the factor's sign.
    """
    QUERY: tl.constexpr = S.query_dtype
    base = query + first_token.to(tl.int64) * (S.num_heads * S.head_size)
    offsets = (row_token * S.num_heads + head) * S.head_size
    d = tl.arange(0, S.head_pad)
    bits = tl.load(typed(base, QUERY) + offsets[:, None] + d[None, :], mask=ok[:, None] & (d < S.head_size)[None, :], other=0)
    # The row maximum is taken before scaling, so the sign of a negative factor goes into the query, which is exact. On NVIDIA a query that
    # was multiplied goes to the product from registers, one that was only loaded from shared memory, which is faster.
    if S.signed_factor:
        multiplier = tl.where(factor < 0, -1.0, 1.0)
    else:
        multiplier = 1.0
    factor = tl.abs(factor)
    if S.row_factor:
        # bfloat16 rows meet fp8 keys in float16, which holds every fp8 value: an exact power of two brings a row's largest entry to [1, 2).
        power = tl.minimum(tl.max(tl.abs(bits.to(tl.float32)), 1).to(tl.int32, bitcast=True) & 0x7F800000, 253 << 23)
        multiplier = ((254 << 23) - power).to(tl.float32, bitcast=True) * multiplier
        factor = factor * power.to(tl.float32, bitcast=True)
    return multiplied(bits, multiplier, S), QuerySource(base, offsets, ok, multiplier), factor


@triton.jit
def multiplied(bits, multiplier, S: tl.constexpr):
    """Stored query elements times their multiplier, in the compute dtype."""
    QUERY: tl.constexpr = S.query_dtype
    COMPUTE: tl.constexpr = S.compute_dtype
    if S.row_factor:
        return cast(bits.to(tl.float32) * multiplier[:, None], COMPUTE)
    else:
        return cast(to_compute(bits, QUERY, "float32", S.hardware_fp8) * multiplier, COMPUTE)


@triton.jit
def reload_query(source, tile, d, S: tl.constexpr):
    """Channels `d` of the rows once more, for one tile: wide heads leave no registers to keep the rows in, so they come with every tile."""
    QUERY: tl.constexpr = S.query_dtype
    # `tile >> 30` is always 0; it keeps LICM from hoisting the load out of the loop and spilling. head_pad keeps the pointer aligned.
    pointers = typed(source.base, QUERY) + (tile >> 30) * S.head_pad + source.offsets[:, None] + d[None, :]
    bits = tl.load(pointers, mask=source.ok[:, None] & (d < S.head_size)[None, :], other=0)
    return multiplied(bits, source.multiplier, S)
