"""The keys of one sequence for one block of rows, on the device: all its tiles, those that need no mask in a pipelined loop."""

import triton
import triton.language as tl

from .tiles import attend_tile, block_ids


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
    STORED: tl.constexpr,
    COMPUTE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    WIDE: tl.constexpr,
    K_SIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
):
    """Tiles [lo, hi): those in [full_lo, full_hi) in a pipelined loop, then the few at either edge with masks.

    HASTY: the edges are attended as if no key in them were NaN, which costs less than to see to it. NaN or infinities that come of it show
    in the accumulator, and the block is done again with care.
    `pages`: descriptor of the cache, or None; `places`: `matrix_place` of the keys and of the values.
    """
    start_mass = mass
    start_peak = peak
    if SUMS > 0:
        # A sum over a whole tile crosses lanes; partial sums do not, and are added up once.
        mass = tl.where((tl.arange(0, SUMS) == 0)[None, :], mass[:, None], 0.0)
    ids = block_ids(table_row, full_lo, table_width, NUM_BLOCKS, BLOCK_SIZE, TILE)
    for tile in tl.range(full_lo, full_hi):
        # The next tile's blocks are fetched a whole tile ahead: no load of keys waits for the block table.
        next_ids = block_ids(table_row, tile + 1, table_width, NUM_BLOCKS, BLOCK_SIZE, TILE)
        acc, mass, peak = attend_tile(
            acc, mass, peak, q, q_source, ids, tile, key_base, value_base, pages, places, factor, position, key_begin, key_end, slope,
            bias_row, bias_row_ok, context, False, True, SUMS, SAME_KEYS, RELOAD_QUERY, QUERY_KIND, ROW_FACTOR, CAUSAL, WINDOW, SOFT_CAP,
            ALIBI, BIAS_COLUMNS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, STORED, COMPUTE, HARDWARE_FP8, WIDE, K_SIDE, V_SIDE,
        )  # fmt: skip
        ids = next_ids
    if SUMS > 0:
        mass = tl.sum(mass, 1)
    left = full_lo - lo
    for edge in tl.range(0, left + hi - full_hi, num_stages=1):
        tile = tl.where(edge < left, lo + edge, full_hi + edge - left)
        ids = block_ids(table_row, tile, table_width, NUM_BLOCKS, BLOCK_SIZE, TILE)
        acc, mass, peak = attend_tile(
            acc, mass, peak, q, q_source, ids, tile, key_base, value_base, pages, places, factor, position, key_begin, key_end, slope,
            bias_row, bias_row_ok, context, True, not HASTY, 0, SAME_KEYS, RELOAD_QUERY, QUERY_KIND, ROW_FACTOR, CAUSAL, WINDOW, SOFT_CAP,
            ALIBI, BIAS_COLUMNS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, STORED, COMPUTE, HARDWARE_FP8, WIDE, K_SIDE, V_SIDE,
        )  # fmt: skip
    if HASTY:
        if tl.min(tl.min((tl.abs(acc) < float("inf")).to(tl.int32), 1), 0) == 0:
            acc = tl.zeros(acc.shape, tl.float32)
            mass = start_mass
            peak = start_peak
            for tile in tl.range(lo, hi, num_stages=1):
                ids = block_ids(table_row, tile, table_width, NUM_BLOCKS, BLOCK_SIZE, TILE)
                acc, mass, peak = attend_tile(
                    acc, mass, peak, q, q_source, ids, tile, key_base, value_base, None, places, factor, position, key_begin, key_end,
                    slope, bias_row, bias_row_ok, context, True, True, 0, SAME_KEYS, RELOAD_QUERY, QUERY_KIND, ROW_FACTOR, CAUSAL, WINDOW,
                    SOFT_CAP, ALIBI, BIAS_COLUMNS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, STORED, COMPUTE, HARDWARE_FP8, WIDE,
                    K_SIDE, V_SIDE,
                )  # fmt: skip
    return acc, mass, peak
