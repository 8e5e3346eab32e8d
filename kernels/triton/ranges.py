"""The keys of one sequence for one block of rows, on the device: all its tiles, those that need no mask in a pipelined loop."""

import triton
import triton.language as tl

from .tiles import attend_tile, block_ids, clamped, fetch_ids

MARGIN: tl.constexpr = tl.constexpr(32.0)
"""Room above the peak of a few keys, in powers of two, for scores of all others: with LARGEST_MASS 2**132 times their weight. Weights below
2**-94 of it lose precision.
"""
LARGEST_MASS: tl.constexpr = tl.constexpr(2.0**100)
"""Of a row that is divided by it without loss: the reciprocal is no subnormal number."""


@triton.jit
def attend_range(
    acc,
    mass,
    peak,
    q,
    q_source,
    factor,
    lo,
    hi,
    full_lo,
    full_hi,
    table_row,
    table_width,
    key_base,
    value_base,
    pages,
    places,
    position,
    key_begin,
    key_end,
    slope,
    bias_row,
    bias_row_ok,
    context,
    HASTY: tl.constexpr,
    FIXED: tl.constexpr,
    SUMS: tl.constexpr,
    SAME_KEYS: tl.constexpr,
    RELOAD_QUERY: tl.constexpr,
    QUERY_KIND: tl.constexpr,
    ROW_FACTOR: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS_COLUMNS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    EDGE: tl.constexpr,
    STORED: tl.constexpr,
    COMPUTE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    WIDE: tl.constexpr,
    K_SIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
    AMD: tl.constexpr = False,
    LATE_CLAMP: tl.constexpr = False,
    VALUES_FIRST: tl.constexpr = False,
):
    """Tiles [lo, hi): those in [full_lo, full_hi) in a pipelined loop, the few at either edge with masks, after them or before.

    HASTY: the edges are attended as if no key in them were NaN, which costs less than to see to it. NaN or infinities that come of it show
    in the accumulator, and the block is done again with care.
    FIXED, with HASTY: the edges come first, and the peaks of their scores, raised by MARGIN, stand for the other tiles, which neither look
    for a greater one nor let anything decay. Where a weight outgrows float32, or a row sees no key of an edge, whose weights are infinite
    then, the block is done again. (Softmax with one reference value, and once more where it overflows: FlashDecoding++, Hong et al., 2023.)
    EDGE: keys of a masked tile, which divide a TILE.
    LATE_CLAMP: the ids of a tile's blocks are clamped with the tile, not when they are fetched, where a pipelined loop would wait for them.
    VALUES_FIRST: a tile's values are on their way while the scores are made.
    `pages`: descriptor of the cache, or None; `places`: `matrix_place` of the keys and of the values.
    """
    start_mass = mass
    start_peak = peak
    if EDGE < TILE:
        edge_lo, edge_hi = lo * (TILE // EDGE), hi * (TILE // EDGE)
        left_hi, right_lo = full_lo * (TILE // EDGE), full_hi * (TILE // EDGE)
        # Those that hold no key to be seen are left out.
        edge_lo = tl.minimum(tl.maximum(edge_lo, key_begin // EDGE), left_hi)
        edge_hi = tl.maximum(tl.minimum(edge_hi, (key_end + EDGE - 1) // EDGE), right_lo)
    else:
        edge_lo, edge_hi, left_hi, right_lo = lo, hi, full_lo, full_hi
    left = left_hi - edge_lo
    for part in tl.static_range(2):
        if (part == 0) == FIXED:
            for edge in tl.range(0, left + edge_hi - right_lo, num_stages=1):
                tile = tl.where(edge < left, edge_lo + edge, right_lo + edge - left)
                edge_ids = block_ids(table_row, tile, table_width, NUM_BLOCKS, BLOCK_SIZE, EDGE, AMD)
                acc, mass, peak = attend_tile(
                    acc, mass, peak, q, q_source, edge_ids, tile, key_base, value_base, pages, places, factor, position, key_begin, key_end,
                    slope, bias_row, bias_row_ok, context, True, not HASTY, False, 0, SAME_KEYS, RELOAD_QUERY, QUERY_KIND, ROW_FACTOR,
                    CAUSAL, WINDOW, SOFT_CAP, ALIBI, BIAS_COLUMNS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, EDGE, STORED, COMPUTE, HARDWARE_FP8,
                    WIDE, K_SIDE, V_SIDE, AMD, VALUES_FIRST,
                )  # fmt: skip
            if FIXED:
                margin = tl.where(full_hi > full_lo, MARGIN, 0.0)
                peak = peak + margin
                acc = acc * tl.exp2(-margin)
                mass = mass * tl.exp2(-margin)
        else:
            if SUMS > 0:
                # A sum over a whole tile crosses lanes; partial sums do not, and are added up once.
                mass = tl.where((tl.arange(0, SUMS) == 0)[None, :], mass[:, None], 0.0)
            ids = fetch_ids(table_row, full_lo, table_width, BLOCK_SIZE, TILE)
            if not LATE_CLAMP:
                ids = clamped(ids, NUM_BLOCKS, BLOCK_SIZE, TILE, AMD)
            for tile in tl.range(full_lo, full_hi):
                # The next tile's blocks are fetched a whole tile ahead: no load of keys waits for the block table.
                next_ids = fetch_ids(table_row, tile + 1, table_width, BLOCK_SIZE, TILE)
                if LATE_CLAMP:
                    ids = clamped(ids, NUM_BLOCKS, BLOCK_SIZE, TILE, AMD)
                else:
                    next_ids = clamped(next_ids, NUM_BLOCKS, BLOCK_SIZE, TILE, AMD)
                acc, mass, peak = attend_tile(
                    acc, mass, peak, q, q_source, ids, tile, key_base, value_base, pages, places, factor, position, key_begin, key_end,
                    slope, bias_row, bias_row_ok, context, False, True, FIXED, SUMS, SAME_KEYS, RELOAD_QUERY, QUERY_KIND, ROW_FACTOR,
                    CAUSAL, WINDOW, SOFT_CAP, ALIBI, BIAS_COLUMNS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, STORED, COMPUTE, HARDWARE_FP8,
                    WIDE, K_SIDE, V_SIDE, AMD, VALUES_FIRST,
                )  # fmt: skip
                ids = next_ids
            if SUMS > 0:
                mass = tl.sum(mass, 1)
    if HASTY:
        finite = tl.min((tl.abs(acc) < float("inf")).to(tl.int32), 1)
        if FIXED:
            finite = tl.where(mass < LARGEST_MASS, finite, 0)
        if tl.min(finite, 0) == 0:
            acc = tl.zeros(acc.shape, tl.float32)
            mass = start_mass
            peak = start_peak
            for tile in tl.range(lo, hi, num_stages=1):
                ids = block_ids(table_row, tile, table_width, NUM_BLOCKS, BLOCK_SIZE, TILE, AMD)
                acc, mass, peak = attend_tile(
                    acc, mass, peak, q, q_source, ids, tile, key_base, value_base, None, places, factor, position, key_begin, key_end,
                    slope, bias_row, bias_row_ok, context, True, True, False, 0, SAME_KEYS, RELOAD_QUERY, QUERY_KIND, ROW_FACTOR,
                    CAUSAL, WINDOW, SOFT_CAP, ALIBI, BIAS_COLUMNS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, STORED, COMPUTE, HARDWARE_FP8,
                    WIDE, K_SIDE, V_SIDE, AMD, VALUES_FIRST,
                )  # fmt: skip
    return acc, mass, peak
