"""Which keys a query sees, on the device: in whole tiles for the loops, key by key where a tile needs a mask.

A *full* tile is one that every row of a block sees whole: it runs without a mask. Only the tiles at the edges of the causal triangle, the
window or the sequence are masked. Tiles that no row sees are never read.

`masks` points to what is data, i32: W where S.traced_window; the first key and one past the last of each sequence [S, 2] and then of each
token [T, 2] where S.ranged (see `purepage.functional.intervals`).
"""

import triton
import triton.language as tl

from .address import uniform

ANY_KEY: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def window_of(masks, S: tl.constexpr):
    """W, above every position where it is off; 0 for a static window that is off."""
    if S.traced_window:
        window = tl.load(masks)
    else:
        window = S.window
    return window


@triton.jit
def key_bounds(first, last, kv_len, window, S: tl.constexpr):
    """Keys [begin, end) that some query at positions [first, last] sees, and [full_begin, full_end) that all of them see."""
    end = kv_len
    full_end = kv_len
    begin = tl.minimum(first, 0) * 0
    full_begin = begin
    if S.causal:
        end = tl.minimum(end, last + 1)
        full_end = tl.minimum(full_end, first + 1)
    if S.has_window:
        begin = tl.maximum(first - (window - 1), 0)
        full_begin = tl.maximum(last - (window - 1), 0)
        if not S.causal:
            end = tl.minimum(end, last + window)
            full_end = tl.minimum(full_end, first + window)
    return begin, tl.maximum(end, begin), full_begin, tl.maximum(full_end, 0)


@triton.jit
def sequence_bounds(masks, seq, query_len, kv_len, is_seq, window, S: tl.constexpr):
    """Keys [begin, end) that some query of a sequence sees; of one sequence, or of a vector of them."""
    if S.ranged:
        begin = tl.load(masks + 2 * seq, mask=is_seq, other=0)
        end = tl.load(masks + 2 * seq + 1, mask=is_seq, other=0)
    else:
        context = kv_len - query_len
        begin, end, _, _ = key_bounds(context, kv_len - 1, context if S.context_only else kv_len, window, S)
    return begin, end


@triton.jit
def ranges_of(masks, num_seqs, first_token, S: tl.constexpr):
    """Pointer to the range of a block's first token."""
    return masks + 2 * num_seqs + 2 * first_token.to(tl.int64)


@triton.jit
def row_ranges(ranges, ok, S: tl.constexpr):
    """([block_m] first key, [block_m] one past the last) that each row sees; rows that are not `ok` see all keys, so they never matter."""
    pointers = ranges + 2 * (tl.arange(0, S.block_m) // S.block_heads)
    return tl.load(pointers, mask=ok, other=0), tl.load(pointers + 1, mask=ok, other=ANY_KEY)


@triton.jit
def range_bounds(ranges, ok, S: tl.constexpr):
    """What `key_bounds` gives, of the rows' own ranges."""
    start, stop = row_ranges(ranges, ok, S)
    end = uniform(tl.max(tl.where(ok, stop, 0), 0), S.amd)
    begin = uniform(tl.min(tl.where(ok & (start < stop), start, ANY_KEY), 0), S.amd)
    return tl.minimum(begin, end), end, uniform(tl.max(start, 0), S.amd), uniform(tl.min(stop, 0), S.amd)


@triton.jit
def tile_bounds(begin, end, full_begin, full_end, BLOCK_N: tl.constexpr):
    """The same in tiles: [lo, hi) to read and [full_lo, full_hi) within it that need no mask."""
    lo = begin // BLOCK_N
    hi = tl.where(end > begin, (end + BLOCK_N - 1) // BLOCK_N, lo)
    full_lo = tl.minimum(tl.maximum((full_begin + BLOCK_N - 1) // BLOCK_N, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_end // BLOCK_N, full_lo), hi)
    return lo, hi, full_lo, full_hi


@triton.jit
def sees(visible, key, rows, tile, S: tl.constexpr):
    """[block_m, block_n] whether a row sees a key of a tile, [1, block_n] where all rows see the same; the bias is not considered."""
    keep = visible[None, :]
    # The keys of a block with one token are that token's.
    if S.block_tokens > 1 and S.ranged:
        # Loaded for each masked tile: full ones need the registers. `tile >> 30` is always 0 and keeps LICM from hoisting the load.
        start, stop = row_ranges(rows.ranges + (tile >> 30), rows.source.ok, S)
        keep = keep & (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
    if S.block_tokens > 1 and S.causal:
        keep = keep & (key[None, :] <= rows.position[:, None])
    if S.block_tokens > 1 and S.has_window:
        keep = keep & (rows.position[:, None] - key[None, :] < rows.window)
        if not S.causal:
            keep = keep & (key[None, :] - rows.position[:, None] < rows.window)
    return keep
