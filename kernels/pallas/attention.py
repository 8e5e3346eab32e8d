"""Paged attention as one Pallas kernel: prefill, chunked prefill and mixed batches in tiles of queries, decode with its keys split.

A program attends one tile of queries of one sequence with the heads of one KV head: the rows of a matrix. It walks the keys that some row
sees, 64 at a time, with the online softmax of FlashAttention (Dao et al., 2022). What a row sees is one interval of keys, made before the
kernel from lengths, causality, window and key range; so the kernel knows one mask.

Where a step has one query for each sequence, tiles are few. Then several programs share the keys of a tile, as in Flash-Decoding (Dao et
al., 2023), and `reduce_kernel` merges their partial results by lse.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from purepage.functional.integers import INT32_MAX
from purepage.kernels.pallas.refs import Pool, compiler_params, dot, load, power_of_two
from purepage.kernels.xla.tiles import operand_dtype

BLOCK_N = 64
"""Keys of a step of the loop."""
ROWS = 64
"""Rows of a tile: queries times the query heads of a KV head."""
PROGRAMS = 512
"""Splits are added until a decode step has about this many programs."""


@dataclass(frozen=True)
class Spec:
    """Static facts of a call. `group` is the number of query heads of a KV head, `tokens` and `rows` those of a tile,
    `dtype` the operands' of its products."""

    pool: Pool
    group: int
    tokens: int
    rows: int
    splits: int
    dtype: np.dtype
    cap: float | None
    has_slopes: bool
    has_sinks: bool


def capped(scores: Float[Array, "R C"], cap: float | None) -> Float[Array, "R C"]:
    """cap * tanh(scores / cap); the identity where the quotient is too small for tanh to differ from it."""
    if cap is None:
        return scores
    return jnp.where(jnp.abs(scores) < cap * 2.0**-16, scores, cap * jnp.tanh(scores / cap))


def weighted(weights: Float[Array, "R C"], seen: Array, value: Float[Array, "C D"]) -> Float[Array, "R D"]:
    """`weights @ value`, in which a value that is not finite reaches only the rows that see it: 0 * NaN would reach all."""

    def plain(value):
        return dot(weights.astype(value.dtype), value)

    def guarded(value):
        def sees(bad):
            return dot(seen.astype(jnp.float32), bad.astype(jnp.float32)) > 0

        out = plain(jnp.where(jnp.isfinite(value), value, jnp.zeros((), value.dtype)))
        out = jnp.where(sees(value == jnp.inf), jnp.inf, out) + jnp.where(sees(value == -jnp.inf), -jnp.inf, 0.0)
        return jnp.where(sees(jnp.isnan(value)), jnp.nan, out)

    bad = jnp.sum((~jnp.isfinite(value)).astype(jnp.int32))  # Pallas' Triton backend has no `all`
    return jax.lax.cond(bad == 0, plain, guarded, value)


def attention_kernel(
    tiles,  # i32[tiles, 3]: sequence, first token, number of tokens
    table,  # i32[S, M]
    first,  # i32[T], first key that a token sees
    stop,  # i32[T], one past the last
    position,  # i32[T]
    layer,  # i32[1]
    factor,  # f32[H], of the scores
    slopes,  # f32[Hq]
    sinks,  # f32[Hq]
    query,  # [T, Hq, D]
    cache,  # the whole buffer of the cache
    out,  # [splits, T, Hq, D]
    lse,  # f32[splits, T, Hq]
    *,
    spec: Spec,
):
    """One program: tile x KV head x split."""
    tile, kv_head, split = (pl.program_id(axis) for axis in range(3))
    pool = spec.pool
    sequence, start, count = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
    row = jnp.arange(spec.rows, dtype=jnp.int32)
    exists = row // spec.group < count
    token = jnp.where(exists, start + row // spec.group, query.shape[0])
    head = kv_head * spec.group + row % spec.group
    channel = jnp.arange(pool.channels, dtype=jnp.int32)[None]
    q = load(query.at[token[:, None], head[:, None], channel], exists[:, None] & pool.is_channel()).astype(spec.dtype)
    begin, end, at = (plgpu.load(side.at[token], mask=exists, other=0) for side in (first, stop, position))
    live = begin < end
    oldest, newest = jnp.min(jnp.where(live, begin, INT32_MAX)), jnp.max(jnp.where(live, end, 0))

    def step(index, state):
        row_max, row_sum, acc = state
        key_at = index * BLOCK_N + jnp.arange(BLOCK_N, dtype=jnp.int32)
        needed = (key_at >= oldest) & (key_at < newest)
        column = jnp.minimum(key_at // pool.block_size, table.shape[1] - 1)
        block = jnp.clip(plgpu.load(table.at[sequence, column], mask=needed, other=0), 0, pool.num_blocks - 1)
        mask = needed[:, None] & pool.is_channel()
        places = block, key_at % pool.block_size, kv_head
        key, value = (pool.decoded(load(pool.rows(cache, side, layer[0], *places), mask)).astype(spec.dtype) for side in (0, 1))
        scores = capped(dot(q, key.T) * factor[kv_head], spec.cap)
        if spec.has_slopes:
            slope = plgpu.load(slopes.at[head], mask=live, other=0.0)
            scores += slope[:, None] * (key_at[None] - at[:, None]).astype(jnp.float32)
        seen = live[:, None] & (key_at[None] >= begin[:, None]) & (key_at[None] < end[:, None])
        scores = jnp.where(seen, scores, -jnp.inf)
        new_max = jnp.maximum(row_max, jnp.max(scores, axis=1))
        base = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        weights, rescale = jnp.exp(scores - base[:, None]), jnp.exp(row_max - base)
        return new_max, row_sum * rescale + jnp.sum(weights, axis=1), acc * rescale[:, None] + weighted(weights, seen, value)

    tile_begin, tile_end = oldest // BLOCK_N, pl.cdiv(newest, BLOCK_N)
    share = pl.cdiv(jnp.maximum(tile_end - tile_begin, 0), spec.splits)
    tile_begin += split * share
    tile_end = jnp.minimum(tile_end, tile_begin + share)
    row_max, row_sum = jnp.full(spec.rows, -jnp.inf), jnp.zeros(spec.rows)
    if spec.has_sinks:  # a key without a value, which the first split counts
        sink = plgpu.load(sinks.at[head], mask=exists & (split == 0), other=-jnp.inf)
        row_max, row_sum = sink, jnp.where(sink == -jnp.inf, 0.0, 1.0)
    acc = jnp.zeros((spec.rows, pool.channels))
    row_max, row_sum, acc = jax.lax.fori_loop(tile_begin, tile_end, step, (row_max, row_sum, acc))
    acc = acc / jnp.where(row_sum == 0, 1.0, row_sum)[:, None]
    mask = exists[:, None] & pool.is_channel()
    plgpu.store(out.at[split, token[:, None], head[:, None], channel], acc.astype(out.dtype), mask=mask)
    plgpu.store(lse.at[split, token, head], row_max + jnp.log(row_sum), mask=exists)


def reduce_kernel(
    parts,  # f32[splits, T, Hq, D]
    part_lse,  # f32[splits, T, Hq]
    out,  # [T, Hq, D]
    lse,  # f32[T, Hq]
    *,
    pool: Pool,
):
    """One program: token x query head. Weighs each split by exp of its lse."""
    token, head = pl.program_id(0), pl.program_id(1)
    splits = part_lse.shape[0]
    split = jnp.arange(splits, dtype=jnp.int32)
    channel = jnp.arange(pool.channels, dtype=jnp.int32)
    each = part_lse[split, token, head]
    top = jnp.max(each)
    weights = jnp.exp(each - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights)
    values = load(parts.at[split[:, None], token, head, channel[None]], jnp.broadcast_to(pool.is_channel(), (splits, pool.channels)))
    values = jnp.where((each == -jnp.inf)[:, None], 0.0, values * weights[:, None])
    merged = jnp.sum(values, axis=0) / jnp.where(total == 0, 1.0, total)
    plgpu.store(out.at[token, head, channel], merged.astype(out.dtype), mask=pool.is_channel()[0])
    lse[token, head] = top + jnp.log(total)


def query_tiles(starts: Int[Array, " S+1"], tokens: int, num_tiles: int) -> Int[Array, "tiles 3"]:
    """(sequence, first token, number of tokens) of each tile of up to `tokens` consecutive new tokens of one sequence."""
    lengths = starts[1:] - starts[:-1]
    ends = jnp.cumsum(pl.cdiv(lengths, tokens))
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, tile, side="right").astype(jnp.int32), lengths.shape[0] - 1)
    offset = (tile - (ends[sequence] - pl.cdiv(lengths[sequence], tokens))) * tokens
    count = jnp.clip(lengths[sequence] - offset, 0, tokens)
    return jnp.stack([sequence, jnp.where(count > 0, starts[sequence] + offset, 0), count], axis=1)


def attend(
    query: Float[Array, "T Hq D"],
    data: Array,
    pool: Pool,
    num_kv_heads: int,
    *,
    starts: Int[Array, " S+1"],
    table: Int[Array, "S M"],
    visible: tuple[Int[Array, " T"], Int[Array, " T"]],
    position: Int[Array, " T"],
    layer: Int[Array, ""],
    factor: Float[Array, " H"],
    slopes: Float[Array, " Hq"] | None,
    sinks: Float[Array, " Hq"] | None,
    cap: float | None,
    max_query_len: int,
    max_seq_len: int,
    out_dtype: jnp.dtype,
    interpret: bool,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"]]:
    """(out, lse) of rows that belong to a sequence; other rows hold anything.

    Args:
      query: of float32, float16 or bfloat16.
      data: the cache's buffer, as `pool` describes it.
      visible: first key, and one past the last, that each row sees; equal where it sees none.
      factor: of the raw products, with the keys' scale.
      out_dtype: of `out`; lse is float32.
    """
    num_tokens, num_heads, head_size = query.shape
    seqs, group = table.shape[0], num_heads // num_kv_heads
    tokens = max(1, min(max_query_len, ROWS // group))
    num_tiles = seqs if max_query_len == 1 else pl.cdiv(num_tokens, tokens) + seqs
    splits = 1
    if max_query_len == 1:
        longest = pl.cdiv(max_seq_len, BLOCK_N)
        while splits * 2 <= longest and splits * 2 * num_tiles * num_kv_heads <= PROGRAMS:
            splits *= 2
    dtype = operand_dtype(query.dtype, pool.dtype, "gpu")
    spec = Spec(pool, group, tokens, power_of_two(tokens * group), splits, dtype, cap, slopes is not None, sinks is not None)
    none = jnp.zeros(1, jnp.float32)
    shape = (splits, num_tokens, num_heads)
    out, lse = pl.pallas_call(
        partial(attention_kernel, spec=spec),
        grid=(num_tiles, num_kv_heads, splits),
        out_shape=(
            jax.ShapeDtypeStruct((*shape, head_size), out_dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        compiler_params=compiler_params(),
        interpret=interpret,
        name="paged_attention",
    )(
        query_tiles(starts, tokens, num_tiles),
        table,
        *visible,
        position,
        layer[None],
        factor,
        none if slopes is None else slopes,
        none if sinks is None else sinks,
        query,
        data,
    )
    if splits == 1:
        return out[0], lse[0]
    return pl.pallas_call(
        partial(reduce_kernel, pool=pool),
        grid=(num_tokens, num_heads),
        out_shape=(jax.ShapeDtypeStruct(query.shape, out_dtype), jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32)),
        compiler_params=compiler_params(1),
        interpret=interpret,
        name="paged_attention_reduce",
    )(out, lse)
