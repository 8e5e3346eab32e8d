"""Copies the pages of sequences in prefill to a matrix with a token a row, in the dtype of the matrix products.

Prefill reads each key and value once for every block of query rows. Where pages are fp8, or their layout is not one that tiles can be
fetched from whole, one pass over them costs less than to decode and to gather them every time.
"""

import triton
import triton.language as tl

from .common import to_compute
from .kv_block import block_ids, dim_offsets, side_base, token_offsets


@triton.jit
def stage_side(
    staged,
    cache,
    ids,
    page,
    layer,
    kv_head,
    ok,
    sign,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STORED: tl.constexpr,
    COMPUTE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    WIDE: tl.constexpr,
    SIDE: tl.constexpr,
):
    tile, token = token_offsets(ids, page, SIDE, BLOCK_SIZE, TILE, WIDE)
    channel = dim_offsets(tl.arange(0, HEAD_SIZE), SIDE)
    pointers = side_base(cache, layer, kv_head, SIDE, STORED) + tile + (token[:, None] + channel[None, :])
    values = to_compute(tl.load(pointers, mask=ok[:, None], other=0), STORED, COMPUTE, HARDWARE_FP8)
    if sign is not None:
        values = (values * sign).to(values.dtype)
    row = tl.arange(0, TILE)[:, None] * (2 * HEAD_SIZE) + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(staged + row, values)


@triton.jit
def stage_pages(
    staged,
    staged_table,
    cache,
    k_scale,
    query_start_loc,
    seq_lens,
    block_table,
    layer,
    table_width,
    staged_width,
    NUM_KV_HEADS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STORED: tl.constexpr,
    COMPUTE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    SIGN_KEYS: tl.constexpr,
    SCALE_HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    K_SIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
):
    """One program a page of TILE tokens and KV head. `staged` is [pages, NUM_KV_HEADS, TILE, 2 * HEAD_SIZE], page s * staged_width + i the
    i-th of sequence s, and `staged_table` says so. With SIGN_KEYS the keys take the sign of their scale. Tokens past a sequence's end are
    0; pages that no query sees are left as they are.
    """
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = index // staged_width
    page = index % staged_width
    if kv_head == 0:
        tl.store(staged_table + index, index)
    query_len = tl.load(query_start_loc + seq + 1) - tl.load(query_start_loc + seq)
    kv_len = tl.load(seq_lens + seq)
    seen = (query_len > SPLIT_TOKENS) & (page * TILE < kv_len)
    if WINDOW > 0:
        seen = seen & ((page + 1) * TILE > kv_len - query_len - (WINDOW - 1))
    if not seen:
        return
    ids = block_ids(block_table + tl.cast(seq, tl.int64) * table_width, page, table_width, NUM_BLOCKS, BLOCK_SIZE, TILE)
    ok = page * TILE + tl.arange(0, TILE) < kv_len
    target = staged + (tl.cast(index, tl.int64) * NUM_KV_HEADS + kv_head) * (TILE * 2 * HEAD_SIZE)
    layer_index = tl.load(layer)
    if SIGN_KEYS:
        scale = tl.load(k_scale + layer_index * SCALE_HEADS + (kv_head if SCALE_HEADS > 1 else 0))
        sign = tl.where(scale < 0, -1.0, 1.0)
    else:
        sign = None
    stage_side(
        target, cache, ids, page, layer_index, kv_head, ok, sign, HEAD_SIZE, BLOCK_SIZE, TILE, STORED, COMPUTE, HARDWARE_FP8, WIDE, K_SIDE
    )  # fmt: skip
    target += HEAD_SIZE
    stage_side(
        target, cache, ids, page, layer_index, kv_head, ok, None, HEAD_SIZE, BLOCK_SIZE, TILE, STORED, COMPUTE, HARDWARE_FP8, WIDE, V_SIDE
    )  # fmt: skip
