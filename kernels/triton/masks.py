"""Which keys a query sees, on the device: in whole tiles for the loops, key by key where a tile needs a mask.

A *full* tile is one that every row of a block sees whole: it runs without a mask. Only the tiles at the edges of the causal triangle, the
window or the sequence are masked. Tiles that no row sees are never read.
"""

import triton
import triton.language as tl


@triton.jit
def key_bounds(first, last, kv_len, S: tl.constexpr):
    """Keys [begin, end) that some query at positions [first, last] sees, and [full_begin, full_end) that all of them see."""
    end = kv_len
    full_end = kv_len
    begin = tl.minimum(first, 0) * 0
    full_begin = begin
    if S.causal:
        end = tl.minimum(end, last + 1)
        full_end = tl.minimum(full_end, first + 1)
    if S.window > 0:
        begin = tl.maximum(first - (S.window - 1), 0)
        full_begin = tl.maximum(last - (S.window - 1), 0)
        if not S.causal:
            end = tl.minimum(end, last + S.window)
            full_end = tl.minimum(full_end, first + S.window)
    return begin, tl.maximum(end, begin), full_begin, tl.maximum(full_end, 0)


@triton.jit
def tile_bounds(begin, end, full_begin, full_end, BLOCK_N: tl.constexpr):
    """The same in tiles: [lo, hi) to read and [full_lo, full_hi) within it that need no mask."""
    lo = begin // BLOCK_N
    hi = tl.where(end > begin, (end + BLOCK_N - 1) // BLOCK_N, lo)
    full_lo = tl.minimum(tl.maximum((full_begin + BLOCK_N - 1) // BLOCK_N, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_end // BLOCK_N, full_lo), hi)
    return lo, hi, full_lo, full_hi


@triton.jit
def sees(visible, key, position, S: tl.constexpr):
    """[block_m, block_n] whether a row sees a key, [1, block_n] where all rows see the same; the bias is not considered."""
    keep = visible[None, :]
    if S.causal:
        keep = keep & (key[None, :] <= position[:, None])
    if S.window > 0:
        keep = keep & (position[:, None] - key[None, :] < S.window)
        if not S.causal:
            keep = keep & (key[None, :] - position[:, None] < S.window)
    return keep
