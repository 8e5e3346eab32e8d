"""Self attention of packed sequences without a cache: the tiles of paged attention over the adjacent keys of a sequence."""

import triton
import triton.language as tl

from .kv_loop import attend_keys
from .masks import key_bounds, range_bounds, ranges_of, tile_bounds, window_of
from .output import store_rows, zero_padding
from .query import LOG2E, block_rows, load_query, locate_block, score_factor
from .softmax import initial_state
from .spec import QueryRows, SequenceKeys


@triton.jit
def encoder_attention(
    out,  # [T, Hq, Dv] model dtype
    lse,  # [T, Hq] f32, or None
    query,  # [T, Hq, D] model dtype
    key,  # [T, H, D] model dtype
    value,  # [T, H, Dv] model dtype
    query_start_loc,  # [S + 1] i32
    masks,  # i32: the `masks` that are data, or None
    alibi_slopes,  # [Hq] f32, or None
    sinks,  # [Hq] f32, or None
    score_scale,  # [1] f32, or None
    num_tokens,  # i32: T
    num_seqs,  # i32: S
    S: tl.constexpr,  # AttentionSpec whose `kv` describes [T, H, D]
):
    """Grid: blocks of query tokens x blocks of heads."""
    program = tl.program_id(0)
    head_block = program % S.head_blocks
    order = program // S.head_blocks
    kv_head = head_block // S.group_blocks
    row_token, head, is_row = block_rows(kv_head, head_block % S.group_blocks, S)
    used_tokens = tl.load(query_start_loc + num_seqs)
    zero_padding(out, lse, order, used_tokens, num_tokens, row_token, head, is_row, S)

    # The last blocks run first: under a causal mask they have the most tiles, and the light ones fill the tail.
    block = used_tokens // S.block_tokens + num_seqs - 1 - order
    if block < 0:
        return
    _, seq_start, length, first = locate_block(block, query_start_loc, num_seqs, S)
    if first >= length:
        return
    count = tl.minimum(length - first, S.block_tokens)
    ok = is_row & (row_token < count)
    position = first + row_token

    factor = score_factor(score_scale, None, 0, kv_head, S)
    q, source, factor = load_query(query, seq_start + first, row_token, head, ok, factor, S)
    state = initial_state(sinks, head, ok, 0, S)
    if S.has_alibi:
        slope = LOG2E * tl.load(alibi_slopes + head, mask=ok, other=0.0)
    else:
        slope = None
    token = (seq_start + first).to(tl.int64) + row_token
    window = window_of(masks, S)

    key_base = key + seq_start.to(tl.int64) * (S.num_kv_heads * S.head_size) + kv_head * S.head_size
    value_base = value + seq_start.to(tl.int64) * (S.num_kv_heads * S.value_size) + kv_head * S.value_size
    if S.ranged:
        ranges = ranges_of(masks, num_seqs, seq_start + first, S)
        key_begin, key_end, full_begin, full_end = range_bounds(ranges, ok, S)
    else:
        ranges = None
        key_begin, key_end, full_begin, full_end = key_bounds(first, first + count - 1, length, window, S)
    lo, hi, full_lo, full_hi = tile_bounds(key_begin, key_end, full_begin, full_end, S.block_n)
    rows = QueryRows(q, source, factor, position, window, ranges, slope, None, ok)
    keys = SequenceKeys(None, 0, key_base, value_base, None, None, None, key_begin, key_end, 0)
    state = attend_keys(state, rows, keys, lo, hi, full_lo, full_hi, S)
    store_rows(out, lse, token, head, ok, state, 1.0, None, S)
