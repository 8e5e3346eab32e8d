"""One KV tile of attention, on the device: which tiles a row block needs, fetching them through the block table, and the online softmax.

Scores are kept in base 2. A *full* tile is one that every row sees whole: it runs without any mask. Only the tiles at the edges of the
causal triangle, the window or the sequence are masked. Tiles outside are never read.
"""

import triton
import triton.language as tl

from .common import axis_offsets, cast, to_compute, typed, uniform
from .query import reload_query

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def key_bounds(first, last, kv_len, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Keys [begin, end) that some query at positions [first, last] sees, and [full_begin, full_end) that all of them see."""
    end = kv_len
    full_end = kv_len
    begin = tl.minimum(first, 0) * 0
    full_begin = begin
    if CAUSAL:
        end = tl.minimum(end, last + 1)
        full_end = tl.minimum(full_end, first + 1)
    if WINDOW > 0:
        begin = tl.maximum(first - (WINDOW - 1), 0)
        full_begin = tl.maximum(last - (WINDOW - 1), 0)
        if not CAUSAL:
            end = tl.minimum(end, last + WINDOW)
            full_end = tl.minimum(full_end, first + WINDOW)
    return begin, tl.maximum(end, begin), full_begin, tl.maximum(full_end, 0)


@triton.jit
def tile_bounds(begin, end, full_begin, full_end, TILE: tl.constexpr):
    """The same in tiles: [lo, hi) to read and [full_lo, full_hi) within it that need no mask."""
    lo = begin // TILE
    hi = tl.where(end > begin, (end + TILE - 1) // TILE, lo)
    full_lo = tl.minimum(tl.maximum((full_begin + TILE - 1) // TILE, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_end // TILE, full_lo), hi)
    return lo, hi, full_lo, full_hi


@triton.jit
def fetch_ids(table_row, tile, table_width, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block of a tile, or one block per key where a tile straddles pages. Unneeded ids may be anything: see `clamped`.

    Without a table blocks lie one after another.
    """
    if BLOCK_SIZE % TILE == 0:
        page = tile // (BLOCK_SIZE // TILE)
    else:
        page = (tile * TILE + tl.arange(0, TILE)) // BLOCK_SIZE
    if table_row is None:
        return page
    else:
        return tl.load(table_row + page, mask=page < table_width, other=0)


@triton.jit
def clamped(ids, NUM_BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, AMD: tl.constexpr):
    """Ids of `fetch_ids` that address no memory but the cache's; NUM_BLOCKS is 0 without a table: ids are right then."""
    if NUM_BLOCKS > 0:
        ids = tl.minimum(tl.maximum(ids, 0), NUM_BLOCKS - 1)
    if BLOCK_SIZE % TILE != 0:
        # A run of tokens never straddles a page, so layouts with tokens side by side still load 128 bits at a time. Said here, where the
        # ids are made: on a function's argument the hint is lost.
        RUN: tl.constexpr = 16 if BLOCK_SIZE % 16 == 0 else (8 if BLOCK_SIZE % 8 == 0 else 1)
        ids = tl.max_constancy(ids, [RUN])
    elif NUM_BLOCKS > 0:
        ids = uniform(ids, AMD)
    return ids


@triton.jit
def block_ids(
    table_row, tile, table_width, NUM_BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, AMD: tl.constexpr = False
):
    return clamped(fetch_ids(table_row, tile, table_width, BLOCK_SIZE, TILE), NUM_BLOCKS, BLOCK_SIZE, TILE, AMD)


@triton.jit
def token_offsets(
    ids,
    tile,
    SIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Element offsets of a tile's tokens: one for the whole tile, and one per token, in 64 bits only where gathered pages need it.

    SIDE is a `SideStrides` as a tuple.
    """
    BLOCK: tl.constexpr = SIDE[2]
    OUTER: tl.constexpr = SIDE[4]
    INNER: tl.constexpr = SIDE[5]
    VECTOR: tl.constexpr = SIDE[6]
    if BLOCK_SIZE % TILE == 0:
        start = (tile % (BLOCK_SIZE // TILE)) * TILE
        return ids.to(tl.int64) * BLOCK + (start // VECTOR) * OUTER, axis_offsets(tl.arange(0, TILE), OUTER, INNER, VECTOR)
    else:
        if WIDE:
            paged = ids.to(tl.int64) * BLOCK
        else:
            paged = ids * BLOCK
        n = tl.arange(0, TILE)
        if VECTOR == 1:
            return 0, paged + (tile * TILE + n) % BLOCK_SIZE * OUTER
        else:
            # A tile starts with a vector: the compiler sees that the places within one are side by side.
            vector = (tile * (TILE // VECTOR) + n // VECTOR) % (BLOCK_SIZE // VECTOR)
            return 0, paged + (vector * OUTER + n % VECTOR * INNER)


@triton.jit
def dim_offsets(d, SIDE: tl.constexpr):
    OUTER: tl.constexpr = SIDE[7]
    INNER: tl.constexpr = SIDE[8]
    VECTOR: tl.constexpr = SIDE[9]
    return axis_offsets(d, OUTER, INNER, VECTOR)


@triton.jit
def side_base(cache, layer, kv_head, SIDE: tl.constexpr, STORED: tl.constexpr):
    """Where one head of one layer of a side starts; in 64 bits, a cache may pass 2**31 elements."""
    OFFSET: tl.constexpr = SIDE[0]
    LAYER: tl.constexpr = SIDE[1]
    HEAD: tl.constexpr = SIDE[3]
    return typed(cache, STORED) + (OFFSET + layer.to(tl.int64) * LAYER + tl.cast(kv_head, tl.int64) * HEAD)


@triton.jit
def matrix_place(layer, kv_head, SIDE: tl.constexpr):
    """(row, column) of a head's first token in the cache seen as a matrix with a token a row; see `Descriptor`."""
    PITCH: tl.constexpr = SIDE[4]
    place = SIDE[0] + layer.to(tl.int64) * SIDE[1] + tl.cast(kv_head, tl.int64) * SIDE[3]
    return (place // PITCH).to(tl.int32), (place % PITCH).to(tl.int32)


@triton.jit
def fetch_tile(pages, place, ids, tile, SIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """[TILE, HEAD_SIZE] of a side through the descriptor of the cache, for tiles that lie within a page; `place` is `matrix_place`'s."""
    return pages.load([place[0] + ids * (SIDE[2] // SIDE[4]) + tile % (BLOCK_SIZE // TILE) * TILE, place[1]])


@triton.jit
def load_tile(pointers, d_ok, n_ok, PAD: tl.constexpr, MASKED: tl.constexpr):
    if PAD and MASKED:
        return tl.load(pointers, mask=d_ok & n_ok, other=0)
    elif PAD:
        return tl.load(pointers, mask=d_ok, other=0)
    elif MASKED:
        return tl.load(pointers, mask=n_ok, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def load_values(
    value_base,
    ids,
    tile,
    visible,
    MASKED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
):
    """[TILE, HEAD_PAD] stored values of a tile; MASKED: 0 for keys that are not `visible`."""
    # Tokens side by side in memory: a mask along them would break 128-bit loads, so such a side is loaded whole and masked after.
    BY_TOKEN: tl.constexpr = V_SIDE[6] > 1 or V_SIDE[4] == 1
    d = tl.arange(0, HEAD_PAD)
    v_tile, v_token = token_offsets(ids, tile, V_SIDE, BLOCK_SIZE, TILE, WIDE)
    v_dim = dim_offsets(d, V_SIDE)
    v_pointers = value_base + v_tile + (v_token[:, None] + v_dim[None, :])
    v = load_tile(v_pointers, d[None, :] < HEAD_SIZE, visible[:, None], HEAD_PAD != HEAD_SIZE, MASKED and not BY_TOKEN)
    if MASKED and BY_TOKEN:
        v = tl.where(visible[:, None], v, 0)
    return v


@triton.jit
def sees(visible, key, position, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """[rows, TILE] whether a row sees a key, [1, TILE] where all of them see the same; a bias left aside."""
    keep = visible[None, :]
    if CAUSAL:
        keep = keep & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        keep = keep & (position[:, None] - key[None, :] < WINDOW)
        if not CAUSAL:
            keep = keep & (key[None, :] - position[:, None] < WINDOW)
    return keep


@triton.jit
def attend_tile(
    acc,
    row_sum,
    row_max,
    q,
    q_source,
    ids,
    tile,
    key_base,
    value_base,
    pages,
    places,
    factor,
    position,
    key_begin,
    key_end,
    slope,
    bias_row,
    bias_row_ok,
    context,
    MASKED: tl.constexpr,
    NAN_SAFE: tl.constexpr,
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
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STORED: tl.constexpr,
    COMPUTE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    WIDE: tl.constexpr,
    K_SIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
    AMD: tl.constexpr = False,
    VALUES_FIRST: tl.constexpr = False,
):
    """Adds one tile to the running (accumulator, row_sum, row_max) of the rows; `q_source` is that of `reload_query`.

    NAN_SAFE: a key that only some rows see may hold NaN, which is kept from the others; else the caller looks for NaN in what comes out.
    Keys that no row sees never matter.
    FROZEN_MAX: `row_max` stays as it is, and nothing decays; see `attend_range`.
    SUMS: 0, or the partial sums that `row_sum` has a row.
    """
    GUARDED: tl.constexpr = MASKED and NAN_SAFE
    PAD: tl.constexpr = HEAD_PAD != HEAD_SIZE
    d = tl.arange(0, HEAD_PAD)
    key = tile * TILE + tl.arange(0, TILE)
    visible = (key >= key_begin) & (key < key_end)

    if RELOAD_QUERY > 0:
        k_tile, k_token = token_offsets(ids, tile, K_SIDE, BLOCK_SIZE, TILE, WIDE)
        s = tl.zeros([acc.shape[0], TILE], tl.float32)
        for first in tl.range(0, HEAD_PAD, RELOAD_QUERY, num_stages=1):
            c = first + tl.arange(0, RELOAD_QUERY)
            k_pointers = key_base + k_tile + (dim_offsets(c, K_SIDE)[:, None] + k_token[None, :])
            k_part = load_tile(k_pointers, c[:, None] < HEAD_SIZE, visible[None, :], PAD, GUARDED)
            q_part = reload_query(q_source, tile, c, QUERY_KIND, COMPUTE, HARDWARE_FP8, ROW_FACTOR, HEAD_SIZE, HEAD_PAD)
            s = tl.dot(q_part, to_compute(k_part, STORED, COMPUTE, HARDWARE_FP8), s, input_precision="ieee")
    else:
        if pages is not None and not GUARDED:
            k = tl.trans(fetch_tile(pages, places[0], ids, tile, K_SIDE, BLOCK_SIZE, TILE))
        else:
            k_tile, k_token = token_offsets(ids, tile, K_SIDE, BLOCK_SIZE, TILE, WIDE)
            k_pointers = key_base + k_tile + (dim_offsets(d, K_SIDE)[:, None] + k_token[None, :])
            k = load_tile(k_pointers, d[:, None] < HEAD_SIZE, visible[None, :], PAD, GUARDED)
        if VALUES_FIRST:
            v = load_values(value_base, ids, tile, visible, MASKED, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, WIDE, V_SIDE)
        s = tl.dot(q, to_compute(k, STORED, COMPUTE, HARDWARE_FP8), input_precision="ieee")

    PLAIN: tl.constexpr = SOFT_CAP == 0.0 and not ALIBI and BIAS_COLUMNS == 0
    if PLAIN and not MASKED:
        if FROZEN_MAX:
            new_max = row_max
        else:
            new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
        if ROW_FACTOR:
            p = tl.exp2(s * factor[:, None] - new_max[:, None])
        else:
            p = tl.exp2(s * factor - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
    else:
        if ROW_FACTOR:
            s = s * factor[:, None]
        else:
            s = s * factor
        if SOFT_CAP != 0.0:  # cap * tanh(z / cap), with exp2(s) = exp(2 z / cap): neither end overflows into NaN
            s = (SOFT_CAP * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(s)))
        if ALIBI:
            s += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        if BIAS_COLUMNS > 0:
            column = key - context
            bias_ok = bias_row_ok[:, None] & ((column >= 0) & (column < BIAS_COLUMNS))[None, :]
            bias = tl.load(bias_row[:, None] + column[None, :], mask=bias_ok, other=0.0)
            s = tl.where(bias == float("-inf"), bias, s + LOG2E * bias)  # a bias of -inf is a mask, also of a NaN key
        if MASKED:
            s = tl.where(sees(visible, key, position, CAUSAL, WINDOW), s, float("-inf"))
        if FROZEN_MAX:
            new_max = row_max
            floor = row_max
        else:
            new_max = tl.maximum(row_max, tl.max(s, 1))
            # A row that has seen no key yet has no row_max: -inf - -inf would be NaN.
            floor = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - floor[:, None])
        rescale = tl.exp2(row_max - floor)
    if SUMS > 0:
        more = tl.sum(tl.reshape(p, (p.shape[0], TILE // SUMS, SUMS)), 1)
    else:
        more = tl.sum(p, 1)
    if FROZEN_MAX:
        row_sum = row_sum + more
        if tile < 0:  # never: but where nothing touches the accumulator between two products, NVIDIA's assembler makes all of them wait
            acc = acc * 0.5
    else:
        row_sum = row_sum * (rescale[:, None] if SUMS > 0 else rescale) + more
        acc = acc * rescale[:, None]

    if pages is not None and not GUARDED:
        v = fetch_tile(pages, places[1], ids, tile, V_SIDE, BLOCK_SIZE, TILE)
        if MASKED:
            v = tl.where(visible[:, None], v, 0)
    elif not VALUES_FIRST or RELOAD_QUERY > 0:
        v = load_values(value_base, ids, tile, visible, MASKED, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, WIDE, V_SIDE)
    v = to_compute(v, STORED, COMPUTE, HARDWARE_FP8)
    if GUARDED and not SAME_KEYS:
        # A key that only some rows see may hold NaN or Inf: 0 * NaN must not reach the others. Rows that do see it get NaN, by way of a
        # product past float32's range that is added to the same accumulator: another one would not fit the registers.
        spoilt = ~(tl.abs(v.to(tl.float32)) < float("inf"))
        v = tl.where(spoilt, 0.0, v).to(v.dtype)
        acc = tl.dot(cast(p, COMPUTE), v, acc, input_precision="ieee")
        if tl.max(tl.max(spoilt.to(tl.int32), 1), 0) > 0:
            WIDE_KIND: tl.constexpr = "float32" if COMPUTE == "float32" else "bfloat16"
            if AMD and BIAS_COLUMNS == 0 and HEAD_PAD <= 256:
                # Seldom needed, and made again from little: kept, scores and values would take registers from every tile. As in
                # `reload_query`, no tile's number has 30 bits.
                again = value_base + (tile >> 30) * HEAD_PAD
                stored = load_values(again, ids, tile, visible, True, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, WIDE, V_SIDE)
                bad = ~(tl.abs(to_compute(stored, STORED, COMPUTE, HARDWARE_FP8).to(tl.float32)) < float("inf"))
                seen = sees(visible, key, position, CAUSAL, WINDOW)
            else:
                bad = spoilt
                seen = s != float("-inf")
            seen = cast(tl.where(seen, 1e38, 0.0), WIDE_KIND)
            acc = tl.dot(seen, cast(tl.where(bad, 1e38, 0.0), WIDE_KIND), acc, input_precision="ieee")
            acc = tl.where(tl.abs(acc) == float("inf"), float("nan"), acc)
    else:
        acc = tl.dot(cast(p, COMPUTE), v, acc, input_precision="ieee")
    return acc, row_sum, new_max
