"""A ragged batch as passes over tiles: which queries advance together, and where their results go.

The loop of a pass runs over the items that exist, so time follows the batch and not the shapes. Sequences with one query (decode) and with
many (prefill) are separate passes with tiles of their own size. The batch layout is that of AITER's `unified_attention`.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from purepage.kernels.xla.tiles import LOG_ZERO, SMALL_QUERIES, Items, Problem, attend_items
from purepage.kernels.xla.varying import vary_like

QUERY_TILE = 128
CPU_PRODUCT_ROWS = 512
LARGEST_CPU_TILE = 256
"""The last tile of a sequence is computed whole, however few queries it has."""
SCORE_ELEMENTS = 1 << 22
"""Bound on items * queries * heads * chunk of one step: 16 MiB of float32 scores."""
GATHERED_ELEMENTS = {"cpu": 1 << 19, "accelerator": 1 << 23}
"""Bound on items * chunk * KV heads * head size. A CPU runs items one after another, an accelerator wants many side by side."""


def query_tile(group: int, platform: str) -> int:
    """Queries of an item of a prefill, of `group` query heads to a KV head.

    XLA's CPU compiler gives a second core part of a product only if the product is large: 512 rows by the 256 keys of a chunk are. The rows
    are the queries of a group's heads; few heads need more queries.
    """
    if platform == "cpu" and QUERY_TILE * group < CPU_PRODUCT_ROWS:
        return LARGEST_CPU_TILE
    return QUERY_TILE


def _tiling(problem: Problem, queries: int, platform: str) -> tuple[int, int]:
    """(queries of an item, items that advance together)."""
    num_heads, head_size = problem.query.shape[1:]
    chunk = problem.source.chunk
    rows = max(1, min(queries, SCORE_ELEMENTS // (num_heads * chunk)))
    most_gathered = GATHERED_ELEMENTS["cpu" if platform == "cpu" else "accelerator"]
    by_scores = SCORE_ELEMENTS // max(1, rows * num_heads * chunk)
    if platform == "cpu" and rows > SMALL_QUERIES:
        return rows, 1  # items that advance together run as far as the longest of them
    return rows, max(1, min(problem.lengths.shape[0], by_scores, most_gathered // (chunk * problem.source.num_kv_heads * head_size)))


def _passes(max_query_len: int, num_tokens: int, tile: int) -> tuple[tuple[int, int, int], ...]:
    """(shortest, longest, tile) query lengths of each pass over the batch."""
    longest = min(max_query_len, num_tokens)
    if longest <= SMALL_QUERIES:
        return ((1, longest, longest),)
    return ((1, 1, 1), (2, longest, min(tile, longest)))


def _attend_pass(problem: Problem, bounds: tuple[int, int, int], platform: str, done: tuple[Array, Array]):
    """`done`, out f32[T, Hq, D] and lse f32[T, Hq], with the rows of the sequences that this pass serves."""
    shortest, longest, tile = bounds
    tokens, num_heads, _ = problem.query.shape
    seqs = problem.lengths.shape[0]
    queries, together = _tiling(problem, tile, platform)
    starts = problem.query_start_loc
    lens = starts[1:] - starts[:-1]
    mine = (lens >= shortest) & (lens <= longest)
    tiles = jnp.where(mine, -(-lens // queries), 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    most = min(seqs, tokens) if longest == 1 else -(-tokens // queries) + min(seqs, tokens)
    groups = max(1, -(-most // together))
    needed = -(-ends[-1] // together)

    def items_of(group) -> Items:
        index = group * together + jnp.arange(together, dtype=jnp.int32)
        sequence = jnp.minimum(jnp.searchsorted(ends, index, side="right"), seqs - 1).astype(jnp.int32)
        inside = (index - (ends - tiles)[sequence]) * queries
        return Items(
            sequence=sequence,
            first=starts[sequence] + inside,
            count=jnp.where(index < ends[-1], jnp.clip(lens[sequence] - inside, 0, queries), 0),
            first_position=problem.contexts[sequence] + inside,
            seq_len=problem.lengths[sequence],
            context=problem.contexts[sequence],
        )

    def in_place(group, state):
        items = items_of(group)
        parts = attend_items(problem, items, queries, platform)
        # A tile that would end past the batch is written to the batch's last rows, moved down by as much.
        first = jnp.minimum(items.first[0], tokens - queries)
        row = first + jnp.arange(queries, dtype=jnp.int32) - items.first[0]
        inside = (row >= 0) & (row < items.count[0])

        def written(rows, part):
            part = part[0, jnp.clip(row, 0, queries - 1)]
            old = lax.dynamic_slice_in_dim(rows, first, queries, axis=0)
            keep = inside.reshape(-1, *[1] * (part.ndim - 1))
            return lax.dynamic_update_slice_in_dim(rows, jnp.where(keep, part, old), first, axis=0)

        return tuple(written(rows, part) for rows, part in zip(state, parts, strict=True))

    if together == 1 and queries > 1:
        return lax.fori_loop(jnp.zeros_like(needed), needed, in_place, vary_like(done, problem.varying))

    def side_by_side(group, state):
        parts = attend_items(problem, items_of(group), queries, platform)
        return tuple(lax.dynamic_update_slice_in_dim(rows, part, group * together, axis=0) for rows, part in zip(state, parts, strict=True))

    shape = (groups * together, queries, num_heads)
    empty = jnp.zeros((*shape, problem.source.value_size), jnp.float32), jnp.full(shape, LOG_ZERO, jnp.float32)
    state = vary_like(empty, problem.varying)
    outs, lses = lax.fori_loop(jnp.zeros_like(needed), needed, side_by_side, state)

    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.clip(jnp.searchsorted(starts, token, side="right") - 1, 0, seqs - 1)
    served = (token < starts[-1]) & mine[sequence]
    inside = token - starts[sequence]
    item = jnp.clip((ends - tiles)[sequence] + inside // queries, 0, shape[0] - 1)
    row = jnp.clip(inside % queries, 0, queries - 1)
    out, lse = done
    return jnp.where(served[:, None, None], outs[item, row], out), jnp.where(served[:, None], lses[item, row], lse)


def attend(problem: Problem, platform: str) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"]]:
    """(out f32[T, Hq, D], lse f32[T, Hq]) of a ragged batch; padding tokens give 0 and -inf."""
    tokens, num_heads, _ = problem.query.shape
    out = jnp.zeros((tokens, num_heads, problem.source.value_size), jnp.float32)
    lse = jnp.full((tokens, num_heads), LOG_ZERO, jnp.float32)
    if tokens and problem.lengths.shape[0] and problem.max_query_len:
        tile = query_tile(num_heads // problem.source.num_kv_heads, platform)
        for bounds in _passes(problem.max_query_len, tokens, tile):
            out, lse = _attend_pass(problem, bounds, platform, (out, lse))
    return out, lse
