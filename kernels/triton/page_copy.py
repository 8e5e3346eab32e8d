"""Copies the pages of sequences in prefill to a matrix with a token a row, in the dtype of the matrix products.

Prefill reads each key and value once for every block of query rows. Where pages are fp8, or their layout is not one from which whole tiles
can be fetched, one copy costs less than to decode and gather them every time.
"""

import triton
import triton.language as tl

from .address import dim_offsets, side_base, token_offsets
from .dtypes import to_compute
from .kv_block import block_ids
from .masks import sequence_bounds, window_of


@triton.jit
def copy_side(target, cache, ids, page, layer, kv_head, ok, sign, STRIDES: tl.constexpr, S: tl.constexpr):
    """Writes the keys or the values of one page and KV head; `sign` is f32 or None."""
    KV: tl.constexpr = S.kv
    STORED: tl.constexpr = S.kv.dtype
    OUT: tl.constexpr = S.out_dtype
    base, token = token_offsets(ids, page, S.page_size, STRIDES, KV)
    channel = dim_offsets(tl.arange(0, S.head_size), STRIDES)
    pointers = side_base(cache, layer, kv_head, STRIDES, STORED) + base + (token[:, None] + channel[None, :])
    values = to_compute(tl.load(pointers, mask=ok[:, None], other=0), STORED, OUT, S.hardware_fp8)
    if sign is not None:
        values = (values * sign).to(values.dtype)
    row = tl.arange(0, S.page_size)[:, None] * (2 * S.head_size) + tl.arange(0, S.head_size)[None, :]
    tl.store(target + row, values)


@triton.jit
def copy_pages(
    copy,  # [S * copy_width, H, page_size, 2 * D] out_dtype: page i of sequence s is page s * copy_width + i
    copy_table,  # [S, copy_width] i32: block table of the copy
    cache,  # the whole cache in its storage dtype
    k_scale,  # [L] or [L, H] f32
    query_start_loc,  # [S + 1] i32
    seq_lens,  # [S] i32
    block_table,  # [S, M] i32
    layer,  # i32: the layer, then the `masks` that are data
    table_width,  # i32: M
    copy_width,  # i32: pages of a sequence in the copy
    S: tl.constexpr,  # PageCopySpec
):
    """Grid: pages of the copy x KV heads. Tokens past a sequence's end are 0; pages that no query sees are not written."""
    KV: tl.constexpr = S.kv
    KEY: tl.constexpr = S.kv.key
    VALUE: tl.constexpr = S.kv.value
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = index // copy_width
    page = index % copy_width
    query_len = tl.load(query_start_loc + seq + 1) - tl.load(query_start_loc + seq)
    kv_len = tl.load(seq_lens + seq)
    masks = layer + 1
    begin, end = sequence_bounds(masks, seq, query_len, kv_len, True, window_of(masks, S), S)
    seen = (query_len > S.split_tokens) & (page * S.page_size < end) & ((page + 1) * S.page_size > begin)
    position = page * S.page_size + tl.arange(0, S.page_size)
    table_row = block_table + tl.cast(seq, tl.int64) * table_width
    if kv_head == 0:
        # A page with a needed block that is not in the cache has no page in the copy either: prefill's rows are then NaN.
        block = position // S.kv.block_size
        needed = (position < end) & ((block + 1) * S.kv.block_size > begin)
        entries = tl.load(table_row + block, mask=needed & (block < table_width), other=-1)
        lost = tl.max((needed & ((entries < 0) | (entries >= S.kv.num_blocks))).to(tl.int32), 0)
        tl.store(copy_table + index, tl.where(seen & (lost > 0), -1, index))
    if not seen:
        return
    ids = block_ids(table_row, page, table_width, S.page_size, False, KV)
    ok = position < kv_len
    target = copy + (tl.cast(index, tl.int64) * S.num_kv_heads + kv_head) * (S.page_size * 2 * S.head_size)
    layer_index = tl.load(layer)
    if S.sign_keys:
        scale = tl.load(k_scale + layer_index * S.scale_heads + (kv_head if S.scale_heads > 1 else 0))
        sign = tl.where(scale < 0, -1.0, 1.0)
    else:
        sign = None
    copy_side(target, cache, ids, page, layer_index, kv_head, ok, sign, KEY, S)
    target += S.head_size
    copy_side(target, cache, ids, page, layer_index, kv_head, ok, None, VALUE, S)
