"""Prefill on Hopper: pages fetched by the copy engine, products by asynchronous matrix units. Pallas' Mosaic GPU backend compiles it.

A thread block attends 128 consecutive new tokens of one sequence with one query head. It has three warp groups, after FlashAttention 3
(Shah et al., 2024): one copies tiles of keys and values from the pages into shared memory, two attend 64 tokens each and take turns, so
that one multiplies while the other exponentiates. What a token sees is one interval of keys, as in `attention.py`. A tile of keys that
every token of a warp group sees needs no mask; a tile that no token of it sees is passed over.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from purepage.functional.integers import INT32_MAX
from purepage.functional.intervals import token_sequences
from purepage.kernels.pallas.attention import query_tiles

ROWS = 64
"""Tokens of a warp group, the rows of one matrix instruction."""
GROUPS = 2
"""Warp groups that compute."""
REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Of a thread; together they fill a multiprocessor's register file."""
LOG2E = math.log2(math.e)
LOWEST = -3.0e38
"""What a row's largest score starts from: finite, so that differences of it are numbers."""

TOKEN, ROW, COUNT, FIRST, FULL, PARTIAL, LAST, BEGIN, END, OLDEST, NEWEST, SEQUENCE = range(12)
"""Columns of `warp_group_tiles`."""


@dataclass(frozen=True)
class Spec:
    """Static facts of a call.

    Attributes:
      axes, num_blocks, block_size, head_size: of the cache, see `refs.Pool`.
      dtype: of query, keys and values; the cache's buffer has it or `storage`, the integers with its bits.
      group: query heads of a KV head.
      block_n: keys of a tile.
      stages: tiles of keys, and of values, in shared memory at a time.
      cap: soft cap of the scores.
    """

    axes: tuple[str, ...]
    num_blocks: int
    block_size: int
    head_size: int
    dtype: np.dtype
    storage: np.dtype
    group: int
    block_n: int
    stages: int
    cap: float | None
    has_sinks: bool

    @property
    def piece(self) -> int:
        """Keys of one copy: what one page has of a tile."""
        return min(self.block_size, self.block_n)

    def page(self, cache, side: int, layer, block, head, start):
        """The reference to [piece, D]: keys (side 0) or values (1) of a head in a page, from its token `start`."""
        at = {
            "L": layer,
            "B": block,
            "N": pl.ds(start, self.piece),
            "H": head,
            "2": side,
            "D": pl.ds(0, self.head_size),
            "2D": pl.ds(side * self.head_size, self.head_size),
        }
        return cache.at[tuple(at[axis] for axis in self.axes)]


def warp_group_tiles(
    tiles: Int[Array, "tiles 3"], visible: tuple[Int[Array, " T"], Int[Array, " T"]], block_n: int
) -> tuple[Int[Array, "tiles 2 12"], Int[Array, "tiles 2 2 64"], Int[Array, " tiles"]]:
    """What each warp group of each thread block does, the keys that each row sees, and `order`: block i has tile order[i].

    Of a warp group: its first row's token (`TOKEN`; its rows lie inside the array), the first row and the number of those that are its
    own (`ROW`, `COUNT`), and its tiles of keys: masked ones from `FIRST`, whole ones from `FULL`, masked ones from `PARTIAL` to `LAST`.
    Of the thread block: `BEGIN` and `END` of its tiles of keys, the keys that some row sees from `OLDEST` to `NEWEST`, and `SEQUENCE`.
    """
    start, stop = visible
    tokens = start.shape[0]
    half = jnp.arange(GROUPS, dtype=jnp.int32) * ROWS
    count = jnp.clip(tiles[:, 2:] - half, 0, ROWS)
    token = jnp.where(count > 0, tiles[:, 1:2] + half, 0)
    inside = jnp.minimum(token, tokens - ROWS)
    at = inside[..., None] + jnp.arange(ROWS, dtype=jnp.int32)
    own = (at >= token[..., None]) & (at < (token + count)[..., None]) & (start[at] < stop[at])
    some = own.any(-1)
    oldest, full_from = jnp.where(own, start[at], INT32_MAX).min(-1), jnp.where(own, start[at], 0).max(-1)
    newest, full_to = jnp.where(own, stop[at], 0).max(-1), jnp.where(own, stop[at], INT32_MAX).min(-1)
    first, last = jnp.where(some, oldest // block_n, 0), jnp.where(some, pl.cdiv(newest, block_n), 0)
    begin = jnp.where(some, first, INT32_MAX).min(-1, keepdims=True)
    begin = jnp.where(some.any(-1, keepdims=True), begin, 0)
    first, last = jnp.where(some, first, begin), jnp.where(some, last, begin)
    full = jnp.clip((full_from + block_n - 1) // block_n, first, last)
    partial_from = jnp.clip(full_to // block_n, full, last)
    end = last.max(-1, keepdims=True)
    shared = begin, end, oldest.min(-1, keepdims=True), newest.max(-1, keepdims=True), tiles[:, :1]
    columns = inside, token - inside, count, first, full, partial_from, last, *(jnp.broadcast_to(x, count.shape) for x in shared)
    order = jnp.argsort(begin[:, 0] - end[:, 0])
    return jnp.stack(columns, -1)[order], jnp.stack([start[at], stop[at]], 2)[order], order


def produce(plan, table, cache, layer, buffers, arrived, consumed, kv_head, spec: Spec) -> None:
    """The warp group that copies: each tile of keys and values, as soon as its place in shared memory is free."""
    begin, end, sequence = plan(0, BEGIN), plan(0, END), plan(0, SEQUENCE)
    per_tile, per_page = spec.block_n // spec.piece, spec.block_size // spec.piece

    @pl.loop(begin, end)
    def _(tile):
        slot = lax.rem(tile - begin, spec.stages)
        for side in (0, 1):

            @pl.when(tile - begin >= spec.stages)
            def _(side=side):
                plgpu.barrier_wait(consumed[side].at[slot])

            for index in range(per_tile):
                piece = tile * per_tile + index
                column = jnp.minimum(lax.div(piece, per_page), table.shape[1] - 1)
                block = jnp.clip(table[sequence, column], 0, spec.num_blocks - 1)
                page = spec.page(cache, side, layer, block, kv_head, lax.rem(piece, per_page) * spec.piece)
                place = buffers[side].at[slot, pl.ds(index * spec.piece, spec.piece)]
                plgpu.copy_gmem_to_smem(page, place, arrived[side].at[slot])


def rows(values, shape):
    return lax.broadcast_in_dim(values, shape, [0])


def consume(plan, group, query, out, lse, sums, factor, sink, bounds, scratch, barriers, block, head, spec: Spec) -> None:
    """A warp group that computes 64 rows with one head."""
    q_smem, k_smem, v_smem, out_smem, lse_smem, sums_smem, bounds_smem = scratch
    q_arrived, k_arrived, v_arrived, k_consumed, v_consumed, turn, cleaned = barriers
    begin, end, token = plan(group, BEGIN), plan(group, END), plan(group, TOKEN)
    oldest, newest = plan(group, OLDEST), plan(group, NEWEST)
    size, block_n = spec.head_size, spec.block_n
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    plgpu.copy_gmem_to_smem(query.at[pl.ds(token, ROWS), head], q_smem, q_arrived)
    plgpu.copy_gmem_to_smem(bounds.at[block, group], bounds_smem, q_arrived)
    plgpu.barrier_wait(q_arrived)

    def take_turns():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def wait_for_values(slot, tile, *, masked: bool):
        """Values of keys that no row sees may be NaN, which a weight of 0 does not stop: the first warp group clears them for both."""
        plgpu.barrier_wait(v_arrived.at[slot])
        if not masked:
            return

        @pl.when((tile * block_n < oldest) | ((tile + 1) * block_n > newest))
        def _():
            @pl.when(group == 0)
            def _():
                for part in range(0, block_n, ROWS):
                    place = v_smem.at[slot, pl.ds(part, ROWS)]
                    values = plgpu.load(place, (), layout=plgpu.Layout.WGMMA)
                    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, size), 0, layout=plgpu.Layout.WGMMA) + (tile * block_n + part)
                    seen = (key >= oldest) & (key < newest)
                    place[...] = jnp.where(seen, values, jnp.zeros((ROWS, size), values.dtype))
                plgpu.commit_smem()

            plgpu.barrier_arrive(cleaned)
            plgpu.barrier_wait(cleaned)

    def wait_for_next_keys(tile):
        @pl.when(tile + 1 < end)
        def _():
            plgpu.barrier_wait(k_arrived.at[lax.rem(tile + 1 - begin, spec.stages)])

    def attend(tile, state, *, masked: bool):
        acc, row_max, row_sum = state
        slot = lax.rem(tile - begin, spec.stages)

        def product(scores):
            plgpu.wgmma(scores, q_smem, k_smem.at[slot].transpose((1, 0)))
            take_turns()
            return scores[...]

        scores = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, block_n), jnp.float32))
        plgpu.barrier_arrive(k_consumed.at[slot])
        if spec.cap is None:
            scores = scores * (factor * LOG2E)
        else:
            scores = jnp.tanh(scores * (factor / spec.cap)) * (spec.cap * LOG2E)
        if masked:
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS, block_n), 1, layout=plgpu.Layout.WGMMA) + tile * block_n
            lower, upper = (rows(plgpu.load(bounds_smem.at[side], (), layout=row_layout), key.shape) for side in (0, 1))
            scores = jnp.where((key >= lower) & (key < upper), scores, -jnp.inf)
        new_max = jnp.maximum(row_max, scores.max(axis=1))
        rescale = jnp.exp2(row_max - new_max)
        weights = jnp.exp2(scores - rows(new_max, scores.shape))
        acc = acc * rows(rescale, acc.shape)
        row_sum = row_sum * rescale
        operand = weights.astype(spec.dtype)

        def end_of_turn():
            plgpu.barrier_arrive(turn)
            wait_for_values(slot, tile, masked=masked)
            plgpu.barrier_wait(turn)

        if size <= 128:
            row_sum += weights.sum(axis=1)
            acc, row_sum, new_max, operand = lax.optimization_barrier((acc, row_sum, new_max, operand))
            end_of_turn()
        else:
            end_of_turn()
            row_sum += weights.sum(axis=1)

        def accumulate(acc):
            plgpu.wgmma(acc, operand, v_smem.at[slot])
            wait_for_next_keys(tile)

        acc = pl.run_state(accumulate)(plgpu.WGMMAAccumulatorRef.init(acc))
        plgpu.barrier_arrive(v_consumed.at[slot])
        return acc, new_max, row_sum

    def pass_over(tile, _):
        slot = lax.rem(tile - begin, spec.stages)
        take_turns()
        plgpu.barrier_arrive(k_consumed.at[slot])
        plgpu.barrier_arrive(turn)
        wait_for_values(slot, tile, masked=True)
        plgpu.barrier_wait(turn)
        wait_for_next_keys(tile)
        plgpu.barrier_arrive(v_consumed.at[slot])

    state = (
        plgpu.layout_cast(jnp.full((ROWS, size), 0, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), row_layout),
        plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), row_layout),
    )

    @pl.when(begin < end)
    def _():
        plgpu.barrier_wait(k_arrived.at[0])

    pl.when(group == 1)(take_turns)
    first, full, partly, last = (plan(group, column) for column in (FIRST, FULL, PARTIAL, LAST))
    lax.fori_loop(begin, first, pass_over, None)
    state = lax.fori_loop(first, full, partial(attend, masked=True), state)
    state = lax.fori_loop(full, partly, partial(attend, masked=False), state)
    state = lax.fori_loop(partly, last, partial(attend, masked=True), state)
    lax.fori_loop(last, end, pass_over, None)
    pl.when(group == 0)(take_turns)

    acc, row_max, row_sum = state
    if spec.has_sinks:
        new_max = jnp.maximum(row_max, sink * LOG2E)
        rescale = jnp.exp2(row_max - new_max)
        acc = acc * rows(rescale, acc.shape)
        row_sum = row_sum * rescale + jnp.exp2(sink * LOG2E - new_max)
        row_max = new_max
    acc = acc * rows(1.0 / jnp.where(row_sum == 0, 1.0, row_sum), acc.shape)
    out_smem[...] = acc.astype(out.dtype)
    lse_smem[...] = row_max * (1 / LOG2E) + jnp.log(row_sum)
    sums_smem[...] = acc.sum(axis=1)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(lse_smem, lse.at[head, block, group])
    plgpu.copy_smem_to_gmem(sums_smem, sums.at[head, block, group])
    row, count = plan(group, ROW), plan(group, COUNT)
    height = ROWS
    while height:  # a copy has a static height: those of the bits of `count`

        @pl.when((count & height) != 0)
        def _(height=height, row=row):
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(row, height)], out.at[pl.ds(token + row, height), head])

        row, height = row + (count & height), height // 2
    plgpu.wait_smem_to_gmem(0)


def attention_kernel(
    plans,  # i32[tiles, 2, 12], see `warp_group_tiles`
    bounds,  # i32[tiles, 2, 2, 64], first key that a row sees, and one past the last
    table,  # i32[S, M]
    layer,  # i32[1]
    factor,  # f32[Hq], of the scores
    sinks,  # f32[Hq]
    query,  # [T, Hq, D]
    cache,  # the whole buffer of the cache
    out,  # [T, Hq, D]
    lse,  # f32[Hq, tiles, 2, 64]
    sums,  # f32[Hq, tiles, 2, 64], of each row of out
    *scratch,
    spec: Spec,
):
    """One thread block: tile x query head."""
    (q, o), (k_bits, k), (v_bits, v), *small, q_arrived, k_arrived, v_arrived, k_consumed, v_consumed, turn, cleaned = scratch
    head, block, group = (lax.axis_index(name) for name in ("heads", "tiles", "group"))

    def plan(group, column):
        return plans[block, group, column]

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(REGISTERS, action="increase")
        mine = [ref.at[group] for ref in (q, o, *small)]
        consume(
            plan,
            group,
            query,
            out,
            lse,
            sums,
            factor[head],
            sinks[head],
            bounds,
            (mine[0], k, v, *mine[1:]),
            (q_arrived.at[group], k_arrived, v_arrived, k_consumed, v_consumed, turn, cleaned),
            block,
            head,
            spec,
        )

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        kv_head = lax.div(head, spec.group)
        produce(plan, table, cache, layer[0], (k_bits, v_bits), (k_arrived, v_arrived), (k_consumed, v_consumed), kv_head, spec)


def attend(
    query: Float[Array, "T Hq D"],
    data: Array,
    spec: Spec,
    *,
    starts: Int[Array, " S+1"],
    table: Int[Array, "S M"],
    visible: tuple[Int[Array, " T"], Int[Array, " T"]],
    layer: Int[Array, ""],
    factor: Float[Array, " Hq"],
    sinks: Float[Array, " Hq"] | None,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"], Bool[Array, ""]]:
    """(out, lse, suspect) of rows that belong to a sequence; other rows hold anything.

    `suspect` says that some row of `out` is not finite. Then a value that is not finite may have reached a row that does not see it.
    """
    num_tokens, num_heads, size = query.shape
    tiles = query_tiles(starts, GROUPS * ROWS, num_tokens // (GROUPS * ROWS) + table.shape[0])
    plans, bounds, order = warp_group_tiles(tiles, visible, spec.block_n)
    tiling = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    stored = (spec.stages, spec.block_n, size)
    pieces = spec.block_n // spec.piece
    pages = plgpu.RefUnion(*(plgpu.SMEM(stored, dtype, transforms=tiling) for dtype in (data.dtype, spec.dtype)))
    own = GROUPS, ROWS, size
    scratch = [
        plgpu.RefUnion(plgpu.SMEM(own, spec.dtype, transforms=tiling), plgpu.SMEM(own, query.dtype)),
        pages,
        pages,
        plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        plgpu.SMEM((GROUPS, 2, ROWS), jnp.int32),
        plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),
        plgpu.Barrier(num_arrivals=pieces, num_barriers=spec.stages),
        plgpu.Barrier(num_arrivals=pieces, num_barriers=spec.stages),
        plgpu.Barrier(num_arrivals=GROUPS, num_barriers=spec.stages),
        plgpu.Barrier(num_arrivals=GROUPS, num_barriers=spec.stages),
        plgpu.Barrier(num_arrivals=GROUPS),
        plgpu.Barrier(num_arrivals=GROUPS),
    ]
    of_rows = jax.ShapeDtypeStruct((num_heads, *plans.shape[:2], ROWS), jnp.float32)
    out, lse, sums = plgpu.kernel(
        partial(attention_kernel, spec=spec),
        out_type=(jax.ShapeDtypeStruct(query.shape, query.dtype), of_rows, of_rows),
        scratch_types=scratch,
        grid=(num_heads, plans.shape[0]),
        grid_names=("heads", "tiles"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(plans, bounds, table, layer[None], factor, jnp.zeros(1) if sinks is None else sinks, query, data)
    row = jnp.arange(ROWS, dtype=jnp.int32)
    own = (row >= plans[..., ROW, None]) & (row < (plans[..., ROW] + plans[..., COUNT])[..., None])
    # Where each token's row went.
    sequence, inside = token_sequences(starts, num_tokens)
    before = jnp.cumsum(pl.cdiv(starts[1:] - starts[:-1], GROUPS * ROWS)) - pl.cdiv(starts[1:] - starts[:-1], GROUPS * ROWS)
    place = jnp.argsort(order)[jnp.clip(before[sequence] + inside // (GROUPS * ROWS), 0, order.shape[0] - 1)]
    group = inside // ROWS % GROUPS
    at = jnp.clip(jnp.arange(num_tokens) - plans[place, group, TOKEN], 0, ROWS - 1)
    return out, lse[:, place, group, at].T, (own & ~jnp.isfinite(sums)).any()
