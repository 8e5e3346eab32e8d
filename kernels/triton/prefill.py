"""Paged attention for prefill and mixed batches: one program per block of query tokens and group of query heads, over all its KV tiles."""

import triton
import triton.language as tl

from .common import uniform
from .kv_block import LOG2E, key_bounds, matrix_place, side_base, tile_bounds
from .kv_loop import attend_range
from .output import block_rows, score_factor, start_rows, store_rows, store_zeros
from .query import load_query


@triton.jit
def paged_attention_tiled(
    out,
    lse,
    query,
    cache,
    k_scale,
    v_scale,
    query_start_loc,
    seq_lens,
    block_table,
    layer,
    alibi_slopes,
    sinks,
    qq_bias,
    score_scale,
    output_scale,
    num_tokens,
    num_seqs,
    table_width,
    pages,
    SEQS_PAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    CONTEXT_ONLY: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    BIAS_COLUMNS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    RELOAD_QUERY: tl.constexpr,
    OPTIMISTIC: tl.constexpr,
    FROZEN_MAX: tl.constexpr,
    SUMS: tl.constexpr,
    LATE_CLAMP: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    EDGE: tl.constexpr,
    QUERY_KIND: tl.constexpr,
    STORED: tl.constexpr,
    COMPUTE: tl.constexpr,
    OUT_KIND: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    ROW_FACTOR: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SCALE_HEADS: tl.constexpr,
    SIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    AMD: tl.constexpr,
    K_SIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
):
    """Sequences of at most SPLIT_TOKENS query tokens are left to the split kernel; padding tokens are zeroed here.

    `pages` is a descriptor of the cache as a matrix with a token a row, or None.
    The sequence s owns the row blocks from query_start_loc[s] // TOKENS + s on, so a block finds its sequence without a prefix sum.
    """
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = tl.program_id(0)
    head_block = program % (NUM_KV_HEADS * HEAD_TILES)
    order = program // (NUM_KV_HEADS * HEAD_TILES)
    kv_head = head_block // HEAD_TILES
    row_token, head, is_row = block_rows(kv_head, head_block % HEAD_TILES, GROUP, HEADS, TOKENS, ROWS)

    used_tokens = tl.load(query_start_loc + num_seqs)
    if (order + 1) * TOKENS > used_tokens:
        token = order * TOKENS + row_token
        padding = is_row & (token >= used_tokens) & (token < num_tokens)
        store_zeros(out, lse, token.to(tl.int64), head, padding, NUM_HEADS, HEAD_SIZE, HEAD_PAD, OUT_KIND)

    # Last blocks first: under a causal mask they have the most tiles, and the light ones fill the tail.
    block = used_tokens // TOKENS + num_seqs - 1 - order
    if block < 0:
        return
    seqs = tl.arange(0, SEQS_PAD)
    starts = tl.load(query_start_loc + seqs, mask=seqs < num_seqs, other=0)
    seq = uniform(tl.sum(((starts // TOKENS + seqs <= block) & (seqs < num_seqs)).to(tl.int32), 0) - 1, AMD)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    first = (block - (query_start // TOKENS + seq)) * TOKENS
    if (first >= query_len) | (query_len <= SPLIT_TOKENS):
        return
    kv_len = tl.load(seq_lens + seq)
    layer_index = tl.load(layer)
    context = kv_len - query_len
    count = tl.minimum(query_len - first, TOKENS)
    ok = is_row & (row_token < count)
    position = context + first + row_token
    token = (query_start + first).to(tl.int64) + row_token

    factor = score_factor(score_scale, k_scale, layer_index, kv_head, SCALE, SOFT_CAP, QUANTIZED, SCALE_HEADS)
    q_base = query + (query_start + first).to(tl.int64) * (NUM_HEADS * HEAD_SIZE)
    q_offsets = (row_token * NUM_HEADS + head) * HEAD_SIZE
    q, factor, multiplier = load_query(
        q_base, q_offsets, ok, factor, QUERY_KIND, COMPUTE, HARDWARE_FP8, ROW_FACTOR, HEAD_SIZE, HEAD_PAD, SIGNED
    )
    source = (q_base, q_offsets, ok, multiplier)
    row_sum, row_max = start_rows(sinks, head, ok, 0, ROWS)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    if alibi_slopes is not None:
        slope = LOG2E * tl.load(alibi_slopes + head, mask=ok, other=0.0)
    else:
        slope = None
    if BIAS_COLUMNS > 0:
        bias_row = qq_bias + (first + row_token) * BIAS_COLUMNS
    else:
        bias_row = None

    keys = context if CONTEXT_ONLY else kv_len
    key_begin, key_end, full_begin, full_end = key_bounds(context + first, context + first + count - 1, keys, CAUSAL, WINDOW)
    if BIAS_COLUMNS > 0:
        full_end = tl.minimum(full_end, tl.maximum(context, 0))  # biased tiles are loaded with care: their columns have an end
    SAME_KEYS: tl.constexpr = BIAS_COLUMNS == 0 and (TOKENS == 1 or (not CAUSAL and WINDOW == 0))
    FROZEN_MAX_HERE: tl.constexpr = FROZEN_MAX and not SAME_KEYS
    if FROZEN_MAX_HERE:
        full_end = tl.maximum(full_end - 1, 0)  # the last key that every row sees is left to a masked tile
    lo, hi, full_lo, full_hi = tile_bounds(key_begin, key_end, full_begin, full_end, TILE)
    if pages is not None:
        places = (matrix_place(layer_index, kv_head, K_SIDE), matrix_place(layer_index, kv_head, V_SIDE))
    else:
        places = (0, 0)
    acc, row_sum, row_max = attend_range(
        acc,
        row_sum,
        row_max,
        q,
        source,
        factor,
        lo,
        hi,
        full_lo,
        full_hi,
        block_table + tl.cast(seq, tl.int64) * table_width,
        table_width,
        side_base(cache, layer_index, kv_head, K_SIDE, STORED),
        side_base(cache, layer_index, kv_head, V_SIDE, STORED),
        pages,
        places,
        position,
        key_begin,
        key_end,
        slope,
        bias_row,
        ok & (first + row_token < BIAS_ROWS),
        context,
        OPTIMISTIC and not SAME_KEYS,
        FROZEN_MAX_HERE,
        SUMS,
        SAME_KEYS,
        RELOAD_QUERY,
        QUERY_KIND,
        ROW_FACTOR,
        CAUSAL,
        WINDOW,
        SOFT_CAP,
        alibi_slopes is not None,
        BIAS_COLUMNS,
        HEAD_SIZE,
        HEAD_PAD,
        NUM_BLOCKS,
        BLOCK_SIZE,
        TILE,
        EDGE,
        STORED,
        COMPUTE,
        HARDWARE_FP8,
        WIDE,
        K_SIDE,
        V_SIDE,
        AMD,
        LATE_CLAMP,
    )
    if QUANTIZED:
        value_scale = tl.load(v_scale + layer_index * SCALE_HEADS + (kv_head if SCALE_HEADS > 1 else 0))
    else:
        value_scale = 1.0
    store_rows(out, lse, token, head, ok, acc, row_sum, row_max, value_scale, output_scale, NUM_HEADS, HEAD_SIZE, HEAD_PAD, OUT_KIND)
