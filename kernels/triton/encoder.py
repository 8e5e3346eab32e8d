"""Self attention of packed sequences without a cache: the tiles of paged attention, with the keys of a sequence side by side."""

import triton
import triton.language as tl

from .common import uniform
from .kv_block import key_bounds, tile_bounds
from .kv_loop import attend_range
from .output import block_rows, score_factor, start_rows, store_rows, store_zeros
from .query import load_query


@triton.jit
def encoder_attention_kernel(
    out,
    query,
    key,
    value,
    query_start_loc,
    sinks,
    score_scale,
    num_tokens,
    num_seqs,
    SEQS_PAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    RELOAD_QUERY: tl.constexpr,
    SUMS: tl.constexpr,
    TILE: tl.constexpr,
    EDGE: tl.constexpr,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    AMD: tl.constexpr,
):
    """Grid: row blocks x KV heads x tiles of their query heads. Sequence s owns the row blocks from query_start_loc[s] // TOKENS + s on."""
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # A `SideStrides` of [T, H, D] in which every tile is a block of its own, so that long sequences are addressed in 64 bits.
    SIDE: tl.constexpr = (0, 0, TILE * NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, NUM_KV_HEADS * HEAD_SIZE, 0, 1, 1, 0, 1)
    program = tl.program_id(0)
    head_block = program % (NUM_KV_HEADS * HEAD_TILES)
    order = program // (NUM_KV_HEADS * HEAD_TILES)
    kv_head = head_block // HEAD_TILES
    row_token, head, is_row = block_rows(kv_head, head_block % HEAD_TILES, GROUP, HEADS, TOKENS, ROWS)

    used_tokens = tl.load(query_start_loc + num_seqs)
    if (order + 1) * TOKENS > used_tokens:
        token = order * TOKENS + row_token
        padding = is_row & (token >= used_tokens) & (token < num_tokens)
        store_zeros(out, None, token.to(tl.int64), head, padding, NUM_HEADS, HEAD_SIZE, HEAD_PAD, KIND)

    # Last blocks first: under a causal mask they have the most tiles, and the light ones fill the tail.
    block = used_tokens // TOKENS + num_seqs - 1 - order
    if block < 0:
        return
    seqs = tl.arange(0, SEQS_PAD)
    starts = tl.load(query_start_loc + seqs, mask=seqs < num_seqs, other=0)
    seq = uniform(tl.sum(((starts // TOKENS + seqs <= block) & (seqs < num_seqs)).to(tl.int32), 0) - 1, AMD)
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    first = (block - (start // TOKENS + seq)) * TOKENS
    if first >= length:
        return
    count = tl.minimum(length - first, TOKENS)
    ok = is_row & (row_token < count)
    position = first + row_token

    factor = score_factor(score_scale, None, 0, kv_head, SCALE, SOFT_CAP, False, 1)
    q_base = query + (start + first).to(tl.int64) * (NUM_HEADS * HEAD_SIZE)
    q_offsets = (row_token * NUM_HEADS + head) * HEAD_SIZE
    q, factor, multiplier = load_query(q_base, q_offsets, ok, factor, KIND, COMPUTE, False, False, HEAD_SIZE, HEAD_PAD)
    source = (q_base, q_offsets, ok, multiplier)
    row_sum, row_max = start_rows(sinks, head, ok, 0, ROWS)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)

    base = start.to(tl.int64) * (NUM_KV_HEADS * HEAD_SIZE) + kv_head * HEAD_SIZE
    SAME_KEYS: tl.constexpr = TOKENS == 1 or (not CAUSAL and WINDOW == 0)
    key_begin, key_end, full_begin, full_end = key_bounds(first, first + count - 1, length, CAUSAL, WINDOW)
    lo, hi, full_lo, full_hi = tile_bounds(key_begin, key_end, full_begin, full_end, TILE)
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
        None,
        0,
        key + base,
        value + base,
        None,
        (0, 0),
        position,
        key_begin,
        key_end,
        None,
        None,
        ok,
        0,
        False,  # in haste it would read past the last key
        False,
        SUMS,
        SAME_KEYS,
        RELOAD_QUERY,
        KIND,
        False,
        CAUSAL,
        WINDOW,
        SOFT_CAP,
        False,
        0,
        HEAD_SIZE,
        HEAD_PAD,
        0,
        TILE,
        TILE,
        EDGE,
        KIND,
        COMPUTE,
        False,
        False,
        SIDE,
        SIDE,
        AMD,
    )
    token = (start + first).to(tl.int64) + row_token
    store_rows(out, None, token, head, ok, acc, row_sum, row_max, 1.0, None, NUM_HEADS, HEAD_SIZE, HEAD_PAD, KIND)
