"""The keys of one sequence for one block of rows, on the device: full tiles in a pipelined loop, the few masked tiles around them."""

import triton
import triton.language as tl

from .kv_block import block_ids, clamped, fetch_ids
from .softmax import attend_tile
from .spec import SoftmaxState

HEADROOM: tl.constexpr = tl.constexpr(32.0)
"""Log2 headroom added to the frozen row maximum: with LARGEST_ROW_SUM, scores may be 2**132 times the weight of the maximum of the masked
tiles. Weights below 2**-94 of it lose precision.
"""
LARGEST_ROW_SUM: tl.constexpr = tl.constexpr(2.0**100)
"""Largest row sum whose reciprocal is no subnormal number."""


@triton.jit
def attended_again(state, start_sum, start_max, rows, keys, lo, hi, S: tl.constexpr):
    """`state`, or with NaN safety the state after tiles [lo, hi) of a block that shows NaN, infinities or weights that were too large."""
    KV: tl.constexpr = S.kv
    finite = tl.min((tl.abs(state.acc) < float("inf")).to(tl.int32), 1)
    if S.frozen_max:
        finite = tl.where(state.row_sum < LARGEST_ROW_SUM, finite, 0)
    if tl.min(finite, 0) == 0:
        state = SoftmaxState(tl.zeros(state.acc.shape, tl.float32), start_sum, start_max)
        for tile in tl.range(lo, hi, num_stages=1):
            ids = block_ids(keys.table_row, tile, keys.table_width, S.block_n, S.amd, KV)
            state = attend_tile(state, rows, keys, ids, tile, True, True, False, 0, S.block_n, S)
    return state


@triton.jit
def attend_keys(
    state,  # SoftmaxState
    rows,  # QueryRows
    keys,  # SequenceKeys
    lo,  # i32: first tile
    hi,  # i32: end of the tiles
    full_lo,  # i32: first full tile
    full_hi,  # i32: end of the full tiles
    S: tl.constexpr,
):
    """The state after tiles [lo, hi): those in [full_lo, full_hi) in a pipelined loop, the masked ones on either side after them or before.

    optimistic: masked tiles are computed as if no key in them were NaN, which is cheaper. NaN or infinities that come of it show in the
    accumulator, and the block is computed again with NaN safety.
    frozen_max, with optimistic: the masked tiles come first, and the row maxima of their scores, raised by HEADROOM, serve the full tiles,
    which neither look for a greater maximum nor rescale. Where a weight overflows float32, or a row sees no key of a masked tile, so that
    its weights are infinite, the block is computed again. (Softmax with one reference value, recomputed on overflow: FlashDecoding++,
    Hong et al., 2023.)
    """
    PARTIAL_SUMS: tl.constexpr = S.partial_sums
    RATIO: tl.constexpr = S.block_n // S.masked_block_n
    KV: tl.constexpr = S.kv
    start_sum = state.row_sum
    start_max = state.row_max
    if RATIO > 1:
        edge_lo, edge_hi = lo * RATIO, hi * RATIO
        left_hi, right_lo = full_lo * RATIO, full_hi * RATIO
        # Masked tiles that hold no visible key are left out.
        edge_lo = tl.minimum(tl.maximum(edge_lo, keys.begin // S.masked_block_n), left_hi)
        edge_hi = tl.maximum(tl.minimum(edge_hi, (keys.end + S.masked_block_n - 1) // S.masked_block_n), right_lo)
    else:
        edge_lo, edge_hi, left_hi, right_lo = lo, hi, full_lo, full_hi
    left = left_hi - edge_lo
    for part in tl.static_range(2):
        if (part == 0) == S.frozen_max:
            for edge in tl.range(0, left + edge_hi - right_lo, num_stages=1):
                tile = tl.where(edge < left, edge_lo + edge, right_lo + edge - left)
                edge_ids = block_ids(keys.table_row, tile, keys.table_width, S.masked_block_n, S.amd, KV)
                state = attend_tile(state, rows, keys, edge_ids, tile, True, not S.optimistic, False, 0, S.masked_block_n, S)
            if S.frozen_max:
                headroom = tl.where(full_hi > full_lo, HEADROOM, 0.0)
                row_max = state.row_max + headroom
                shrink = tl.exp2(-headroom)
                state = SoftmaxState(state.acc * shrink, state.row_sum * shrink, row_max)
        else:
            if PARTIAL_SUMS > 0:
                # A sum over a whole tile crosses lanes; partial sums do not, and are added up once.
                partial = tl.where((tl.arange(0, PARTIAL_SUMS) == 0)[None, :], state.row_sum[:, None], 0.0)
                state = SoftmaxState(state.acc, partial, state.row_max)
            ids = fetch_ids(keys.table_row, full_lo, keys.table_width, S.block_n, KV)
            if not S.late_clamp:
                ids = clamped(ids, S.block_n, S.amd, KV)
            for tile in tl.range(full_lo, full_hi):
                # The next tile's block ids are fetched a whole tile ahead, so that no load of keys waits for the block table.
                next_ids = fetch_ids(keys.table_row, tile + 1, keys.table_width, S.block_n, KV)
                if S.late_clamp:
                    ids = clamped(ids, S.block_n, S.amd, KV)
                else:
                    next_ids = clamped(next_ids, S.block_n, S.amd, KV)
                state = attend_tile(state, rows, keys, ids, tile, False, True, S.frozen_max, PARTIAL_SUMS, S.block_n, S)
                ids = next_ids
            if PARTIAL_SUMS > 0:
                state = SoftmaxState(state.acc, tl.sum(state.row_sum, 1), state.row_max)
    if S.optimistic:
        state = attended_again(state, start_sum, start_max, rows, keys, lo, hi, S)
    return state


@triton.jit
def attend_all(
    state,  # SoftmaxState
    rows,  # QueryRows
    keys,  # SequenceKeys
    ids,  # ids of the first tile, see `fetch_ids`
    lo,  # i32: first tile
    hi,  # i32: end of the tiles
    S: tl.constexpr,
):
    """The state after tiles [lo, hi) in one pipelined loop that masks every tile.

    A block of few tiles waits for memory, so the masks cost nothing, and no tile is outside the pipeline. Where all rows see the same keys,
    those that none sees may be NaN: their scores are replaced, and their values are loaded as 0. Otherwise the block is optimistic, see
    `attend_keys`.
    """
    PARTIAL_SUMS: tl.constexpr = S.partial_sums
    KV: tl.constexpr = S.kv
    start_sum = state.row_sum
    start_max = state.row_max
    if PARTIAL_SUMS > 0:
        partial = tl.where((tl.arange(0, PARTIAL_SUMS) == 0)[None, :], state.row_sum[:, None], 0.0)
        state = SoftmaxState(state.acc, partial, state.row_max)
    ids = clamped(ids, S.block_n, S.amd, KV)
    for tile in tl.range(lo, hi):
        next_ids = fetch_ids(keys.table_row, tile + 1, keys.table_width, S.block_n, KV)
        next_ids = clamped(next_ids, S.block_n, S.amd, KV)
        state = attend_tile(state, rows, keys, ids, tile, True, False, False, PARTIAL_SUMS, S.block_n, S)
        ids = next_ids
    if PARTIAL_SUMS > 0:
        state = SoftmaxState(state.acc, tl.sum(state.row_sum, 1), state.row_max)
    if S.optimistic:
        state = attended_again(state, start_sum, start_max, rows, keys, lo, hi, S)
    return state
