"""The keys of one sequence for one block of rows, on the device: all its tiles, those that need no mask in a pipelined loop."""

import triton
import triton.language as tl

from .kv_block import attend_tile, block_ids, clamped, fetch_ids

MARGIN: tl.constexpr = tl.constexpr(32.0)
"""Room above the row_max of a few keys, in powers of two, for scores of all others: with LARGEST_ROW_SUM 2**132 times their weight. Weights below
2**-94 of it lose precision.
"""
LARGEST_ROW_SUM: tl.constexpr = tl.constexpr(2.0**100)
"""Of a row that is divided by it without loss: the reciprocal is no subnormal number."""


@triton.jit
def attend_range(
    acc,
    row_sum,
    row_max,
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
    OPTIMISTIC: tl.constexpr,
    FROZEN_MAX: tl.constexpr,
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

    OPTIMISTIC: the edges are attended as if no key in them were NaN, which costs less than to see to it. NaN or infinities that come of it show
    in the accumulator, and the block is done again with care.
    FROZEN_MAX, with OPTIMISTIC: the edges come first, and the row_maxes of their scores, raised by MARGIN, stand for the other tiles, which neither look
    for a greater one nor let anything rescale. Where a weight outgrows float32, or a row sees no key of an edge, whose weights are infinite
    then, the block is done again. (Softmax with one reference value, and once more where it overflows: FlashDecoding++, Hong et al., 2023.)
    EDGE: keys of a masked tile, which divide a TILE.
    LATE_CLAMP: the ids of a tile's blocks are clamped with the tile, not when they are fetched, where a pipelined loop would wait for them.
    VALUES_FIRST: a tile's values are on their way while the scores are made.
    `pages`: descriptor of the cache, or None; `places`: `matrix_place` of the keys and of the values.
    """
    start_sum = row_sum
    start_max = row_max
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
        if (part == 0) == FROZEN_MAX:
            for edge in tl.range(0, left + edge_hi - right_lo, num_stages=1):
                tile = tl.where(edge < left, edge_lo + edge, right_lo + edge - left)
                edge_ids = block_ids(table_row, tile, table_width, NUM_BLOCKS, BLOCK_SIZE, EDGE, AMD)
                acc, row_sum, row_max = attend_tile(
                    acc, row_sum, row_max, q, q_source, edge_ids, tile, key_base, value_base, pages, places, factor, position, key_begin, key_end,
                    slope, bias_row, bias_row_ok, context, True, not OPTIMISTIC, False, 0, SAME_KEYS, RELOAD_QUERY, QUERY_KIND, ROW_FACTOR,
                    CAUSAL, WINDOW, SOFT_CAP, ALIBI, BIAS_COLUMNS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, EDGE, STORED, COMPUTE, HARDWARE_FP8,
                    WIDE, K_SIDE, V_SIDE, AMD, VALUES_FIRST,
                )  # fmt: skip
            if FROZEN_MAX:
                margin = tl.where(full_hi > full_lo, MARGIN, 0.0)
                row_max = row_max + margin
                acc = acc * tl.exp2(-margin)
                row_sum = row_sum * tl.exp2(-margin)
        else:
            if SUMS > 0:
                # A sum over a whole tile crosses lanes; partial sums do not, and are added up once.
                row_sum = tl.where((tl.arange(0, SUMS) == 0)[None, :], row_sum[:, None], 0.0)
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
                acc, row_sum, row_max = attend_tile(
                    acc, row_sum, row_max, q, q_source, ids, tile, key_base, value_base, pages, places, factor, position, key_begin, key_end,
                    slope, bias_row, bias_row_ok, context, False, True, FROZEN_MAX, SUMS, SAME_KEYS, RELOAD_QUERY, QUERY_KIND, ROW_FACTOR,
                    CAUSAL, WINDOW, SOFT_CAP, ALIBI, BIAS_COLUMNS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, STORED, COMPUTE, HARDWARE_FP8,
                    WIDE, K_SIDE, V_SIDE, AMD, VALUES_FIRST,
                )  # fmt: skip
                ids = next_ids
            if SUMS > 0:
                row_sum = tl.sum(row_sum, 1)
    if OPTIMISTIC:
        finite = tl.min((tl.abs(acc) < float("inf")).to(tl.int32), 1)
        if FROZEN_MAX:
            finite = tl.where(row_sum < LARGEST_ROW_SUM, finite, 0)
        if tl.min(finite, 0) == 0:
            acc = tl.zeros(acc.shape, tl.float32)
            row_sum = start_sum
            row_max = start_max
            for tile in tl.range(lo, hi, num_stages=1):
                ids = block_ids(table_row, tile, table_width, NUM_BLOCKS, BLOCK_SIZE, TILE, AMD)
                acc, row_sum, row_max = attend_tile(
                    acc, row_sum, row_max, q, q_source, ids, tile, key_base, value_base, None, places, factor, position, key_begin, key_end,
                    slope, bias_row, bias_row_ok, context, True, True, False, 0, SAME_KEYS, RELOAD_QUERY, QUERY_KIND, ROW_FACTOR,
                    CAUSAL, WINDOW, SOFT_CAP, ALIBI, BIAS_COLUMNS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, STORED, COMPUTE, HARDWARE_FP8,
                    WIDE, K_SIDE, V_SIDE, AMD, VALUES_FIRST,
                )  # fmt: skip
    return acc, row_sum, row_max
