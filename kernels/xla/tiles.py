"""Attention of tiles of queries in plain JAX: an online softmax over the chunks of keys that they see.

One work item is a tile of queries of one sequence. The loop runs over the chunks of keys that the item can see, so time follows the
sequence's length and the window, and memory is that of a chunk. Where keys come from is a `Source`: a paged cache, dense arrays, or both.

The online softmax is that of FlashAttention (Dao et al., 2022).
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from purepage.functional.integers import INT32_MAX
from purepage.functional.intervals import Interval
from purepage.kernels.xla.varying import vary_like

LOG_ZERO = -jnp.inf

SMALL_QUERIES = 16
"""A batch whose longest query is up to this long is one pass."""


@dataclass(frozen=True)
class Items:
    """R work items: a tile of consecutive queries of one sequence each. A count of 0 is no item."""

    sequence: Int[Array, " R"]
    first: Int[Array, " R"]
    """Row of the flat batch where the tile starts."""
    count: Int[Array, " R"]
    first_position: Int[Array, " R"]
    """Position of that row's token in its sequence."""
    seq_len: Int[Array, " R"]
    context: Int[Array, " R"]
    """Tokens of the sequence before this step's."""


class Source(Protocol):
    """Where the keys and values of a sequence come from, `chunk` positions at a time."""

    @property
    def chunk(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def value_size(self) -> int: ...

    def load(self, items: Items, index: Array, dtype: np.dtype) -> tuple[Float[Array, "R H C D"], Float[Array, "R H C Dv"]]:
        """Keys and values of positions `index * chunk` onwards; those that no query sees may hold anything."""
        ...


@dataclass(frozen=True)
class Problem:
    """What is attended to what. `lengths` bounds the keys of each sequence, `score_factor` f32[H] multiplies the raw products."""

    query: Float[Array, "T Hq D"]
    query_start_loc: Int[Array, " S+1"]
    lengths: Int[Array, " S"]
    contexts: Int[Array, " S"]
    source: Source
    score_factor: Float[Array, " H"]
    sinks: Float[Array, " Hq"] | None
    alibi_slopes: Float[Array, " Hq"] | None
    qq_bias: Float[Array, "*S Lq Lk"] | None
    causal: bool
    sliding_window: int | Array | None
    logits_soft_cap: float | None
    max_query_len: int
    dtype: np.dtype
    """Dtype of the products' operands."""
    varying: object
    """The arrays that the results depend on, for the types of loop states inside `shard_map`."""
    invalid: Bool[Array, " S"] | None = None
    """Sequences whose rows are NaN, since they need a block that the cache does not have."""
    intervals: Interval | None = None
    """The keys that each row sees, i32[T] each; causality, window and length are in them, and `causal` and `sliding_window` off."""


def _visible(
    problem: Problem, items: Items, spans: Interval | None, rows: int, keys: Int[Array, "1 C"], qq_bias: Array | None
) -> Bool[Array, "R Q C"]:
    """The one definition of what a query sees: length, causality, window, `spans` [R, Q] and a bias of -inf."""
    row = jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    query_at = items.first_position[:, None, None] + row
    key_at = keys[:, None, :]
    keep = key_at < items.seq_len[:, None, None]
    if problem.causal:
        keep &= key_at <= query_at
    if problem.sliding_window is not None:
        keep &= query_at - key_at < problem.sliding_window
        if not problem.causal:
            keep &= key_at - query_at < problem.sliding_window
    if spans is not None:
        keep &= (key_at >= spans[0][:, :, None]) & (key_at < spans[1][:, :, None])
    if qq_bias is not None:
        keep &= qq_bias != -jnp.inf
    return keep & (row < items.count[:, None, None])


def window_range(
    first: Array, last: Array, start: Array, stop: Array, window: int | Array | None, *, causal: bool
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """[start, stop) without the keys that no query at positions `first` to `last` has in its window. No sum can overflow int32."""
    if window is None:
        return start, stop
    oldest = first - start
    start = start + jnp.where(oldest > window - 1, oldest - (window - 1), 0)
    if not causal:
        stop = jnp.where(stop - last > window, last + window, stop)
    return start, stop


def _alibi(problem: Problem, items: Items, rows: int, keys: Int[Array, "1 C"]) -> Float[Array, "R Hq Q C"] | None:
    if problem.alibi_slopes is None:
        return None
    query_at = items.first_position[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    distance = (keys[:, None, :] - query_at[:, :, None]).astype(jnp.float32)
    return problem.alibi_slopes[None, :, None, None] * distance[:, None]


def _qq_bias(problem: Problem, items: Items, rows: int, keys: Int[Array, "1 C"]) -> Float[Array, "R Q C"] | None:
    """Bias of this step's queries and keys; 0 where a key is of an earlier step, or past the given bias."""
    if problem.qq_bias is None or 0 in problem.qq_bias.shape:
        return None
    height, width = problem.qq_bias.shape[-2:]
    row = items.first_position[:, None] + jnp.arange(rows, dtype=jnp.int32)[None] - items.context[:, None]
    column = keys - items.context[:, None]
    inside = ((row >= 0) & (row < height))[:, :, None] & ((column >= 0) & (column < width))[:, None, :]
    at = jnp.clip(row, 0, height - 1)[:, :, None], jnp.clip(column, 0, width - 1)[:, None, :]
    picked = problem.qq_bias[at if problem.qq_bias.ndim == 2 else (items.sequence[:, None, None], *at)]
    return jnp.where(inside, picked, 0.0)


def _soft_capped(scores: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """cap * tanh(scores / cap) with float32's relative error, whatever the cap.

    XLA divides by a constant with a product by its reciprocal, and flushes subnormal results. Under a large cap either gives a score of 0
    or infinity, so that small scores, for which tanh is the identity, go around it and the division stays one.
    """
    if cap < 2.0**64:
        return cap * jnp.tanh(scores / cap)
    divisor = lax.optimization_barrier(jnp.float32(cap))
    return jnp.where(jnp.abs(scores) < cap * 2.0**-16, scores, cap * jnp.tanh(scores / divisor))


def _dot(spec: str, left: Array, right: Array) -> Float[Array, "..."]:
    return jnp.einsum(spec, left, right, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _weighted_values(
    weights: Float[Array, "R H G Q C"], values: Float[Array, "R H C D"], keep: Bool[Array, "R Q C"] | None
) -> Float[Array, "R H G Q D"]:
    """`weights @ values`, in which a non-finite value reaches only the queries that see its key: 0 * NaN would reach all.

    Without `keep` all queries see all keys.
    """

    def plain(values):
        flat = weights.reshape(*weights.shape[:2], -1, weights.shape[-1]).astype(values.dtype)
        return _dot("rhmc,rhcd->rhmd", flat, values).reshape(*weights.shape[:-1], values.shape[-1])

    if keep is None or keep.shape[1] == 1:  # the values that a single query does not see are 0 already
        return plain(values)
    seen = keep.astype(jnp.float32)

    def guarded(values):
        finite = jnp.isfinite(values)
        out = plain(jnp.where(finite, values, jnp.zeros((), values.dtype)))

        def sees(bad):
            return _dot("rqc,rhcd->rhqd", seen, bad.astype(jnp.float32))[:, :, None] > 0

        up, down, undefined = sees(values == jnp.inf), sees(values == -jnp.inf), sees(jnp.isnan(values))
        out = jnp.where(up, jnp.inf, jnp.where(down, -jnp.inf, out))
        return jnp.where(undefined | (up & down), jnp.nan, out)

    return lax.cond(jnp.all(jnp.isfinite(values)), plain, guarded, values)


def _item_range(problem: Problem, items: Items, spans: Interval | None, rows: int) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """[start, stop) of the keys that some query of an item sees."""
    last_position = items.first_position + items.count - 1
    stop = jnp.minimum(items.seq_len, last_position + 1) if problem.causal else items.seq_len
    start, stop = window_range(
        items.first_position, last_position, jnp.zeros_like(stop), stop, problem.sliding_window, causal=problem.causal
    )
    if spans is not None:
        sees = (jnp.arange(rows, dtype=jnp.int32)[None] < items.count[:, None]) & (spans[0] < spans[1])
        start = jnp.maximum(start, jnp.min(jnp.where(sees, spans[0], INT32_MAX), axis=1))
        stop = jnp.minimum(stop, jnp.max(jnp.where(sees, spans[1], 0), axis=1))
    return start, stop


def _full_chunks(
    problem: Problem, items: Items, spans: Interval | None, rows: int, live: Bool[Array, " R"], chunk: int
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """[first, end) of the chunks that all queries of all live items see whole; first may lie beyond end."""
    last_position = items.first_position + items.count - 1
    stop = jnp.minimum(items.seq_len, items.first_position + 1) if problem.causal else items.seq_len
    if problem.qq_bias is not None:  # which may mask a key of this step
        stop = jnp.minimum(stop, items.context)
    start, stop = window_range(
        last_position, items.first_position, jnp.zeros_like(stop), stop, problem.sliding_window, causal=problem.causal
    )
    if spans is not None:
        exists = jnp.arange(rows, dtype=jnp.int32)[None] < items.count[:, None]
        start = jnp.maximum(start, jnp.max(jnp.where(exists, spans[0], 0), axis=1))
        stop = jnp.minimum(stop, jnp.min(jnp.where(exists, spans[1], INT32_MAX), axis=1))
    return jnp.max(jnp.where(live, -(-start // chunk), 0)), jnp.min(jnp.where(live, stop // chunk, INT32_MAX))


def attend_items(problem: Problem, items: Items, rows: int, platform: str):
    """Online softmax over the chunks that the items see: (out f32[R, Q, Hq, D], lse f32[R, Q, Hq])."""
    count = items.sequence.shape[0]
    tokens, num_heads, head_size = problem.query.shape
    chunk, heads = problem.source.chunk, problem.source.num_kv_heads
    group = num_heads // heads
    token = items.first[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    token = jnp.minimum(token, tokens - 1)
    spans = None if problem.intervals is None else (problem.intervals[0][token], problem.intervals[1][token])
    query = problem.query[token].astype(problem.dtype).reshape(count, rows, heads, group, head_size)
    # Queries of one KV head as the rows of one matrix: a product with more free axes is transposed for each chunk.
    query = jnp.transpose(query, (0, 2, 3, 1, 4)).reshape(count, heads, group * rows, head_size)
    factor = problem.score_factor
    if problem.dtype == jnp.float32:  # here it costs one product a query, not one a score
        query, factor = query * factor[None, :, None, None], None

    start, stop = _item_range(problem, items, spans, rows)
    live = (items.count > 0) & (start < stop)
    end_chunk = jnp.max(jnp.where(live, -(-stop // chunk), 0))
    first_chunk = jnp.minimum(jnp.min(jnp.where(live, start // chunk, INT32_MAX)), end_chunk)

    def step(index, state, masked: bool):
        row_max, row_sum, out = state
        keys = index * chunk + jnp.arange(chunk, dtype=jnp.int32)[None]
        key, value = problem.source.load(items, index, problem.dtype)
        scores = _dot("rhmd,rhcd->rhmc", query, key).reshape(count, heads, group, rows, chunk)
        if factor is not None:
            scores = scores * factor[None, :, None, None, None]
        if problem.logits_soft_cap is not None:
            scores = _soft_capped(scores, problem.logits_soft_cap)
        alibi, qq_bias = _alibi(problem, items, rows, keys), _qq_bias(problem, items, rows, keys)
        if alibi is not None:
            scores += jnp.broadcast_to(alibi, (count, num_heads, rows, chunk)).reshape(scores.shape)
        if qq_bias is not None:
            scores += qq_bias[:, None, None]
        keep = None
        if masked:
            keep = _visible(problem, items, spans, rows, keys, qq_bias)
            scores = jnp.where(keep[:, None, None], scores, LOG_ZERO)
            if rows == 1:
                seen = keep[:, 0]
            else:  # the keys that any of the tile's queries sees lie in one range; `_weighted_values` takes care of each query's
                seen = live[:, None] & (keys >= start[:, None]) & (keys < stop[:, None])
            value = jnp.where(seen[:, None, :, None], value, jnp.zeros((), value.dtype))

        new_max = jnp.maximum(row_max, jnp.max(scores, axis=-1))
        base = jnp.where(new_max == LOG_ZERO, 0.0, new_max)
        weights = jnp.exp(scores - base[..., None])
        rescale = jnp.exp(row_max - base)
        row_sum = row_sum * rescale + jnp.sum(weights, axis=-1)
        out = out * rescale[..., None] + _weighted_values(weights, value, keep)
        return new_max, row_sum, out

    shape = (count, heads, group, rows)
    if problem.sinks is None:
        row_max, row_sum = jnp.full(shape, LOG_ZERO, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        row_max = jnp.broadcast_to(problem.sinks.reshape(1, heads, group, 1), shape)
        row_sum = jnp.where(row_max == LOG_ZERO, 0.0, 1.0)
    state = vary_like((row_max, row_sum, jnp.zeros((*shape, problem.source.value_size), jnp.float32)), problem.varying)
    if rows > SMALL_QUERIES and platform == "cpu":
        # Chunks that every query sees whole: there is nothing to mask. The others lie before and after them.
        first_full, end_full = _full_chunks(problem, items, spans, rows, live, chunk)
        first_full = jnp.clip(first_full, first_chunk, end_chunk)
        end_full = jnp.clip(end_full, first_full, end_chunk)
        state = lax.fori_loop(first_full, end_full, partial(step, masked=False), state)
        width = end_full - first_full

        def masked_step(index, state):
            return step(jnp.where(index < first_full, index, index + width), state, masked=True)

        row_max, row_sum, out = lax.fori_loop(first_chunk, end_chunk - width, masked_step, state)
    else:
        row_max, row_sum, out = lax.fori_loop(first_chunk, end_chunk, partial(step, masked=True), state)

    out = out / jnp.where(row_sum == 0, 1.0, row_sum)[..., None]  # without a visible key out is 0
    lse = row_max + jnp.log(row_sum)
    if problem.invalid is not None:
        invalid = problem.invalid[items.sequence][:, None, None, None]
        out, lse = jnp.where(invalid[..., None], jnp.nan, out), jnp.where(invalid, jnp.nan, lse)
    out = jnp.moveaxis(out, 3, 1).reshape(count, rows, num_heads, problem.source.value_size)
    return out, jnp.moveaxis(lse, 3, 1).reshape(count, rows, num_heads)


def operand_dtype(query_dtype: np.dtype, key_dtype: np.dtype, platform: str) -> np.dtype:
    """Dtype of the products: exact for both operands; a CPU has no faster unit than float32's."""
    if platform == "cpu":
        return jnp.dtype(jnp.float32)
    query_dtype, key_dtype = jnp.dtype(query_dtype), jnp.dtype(key_dtype)
    if query_dtype.itemsize == key_dtype.itemsize == 1:
        return jnp.dtype(jnp.bfloat16)
    if 1 in (query_dtype.itemsize, key_dtype.itemsize):
        return max(query_dtype, key_dtype, key=lambda dtype: dtype.itemsize)
    return jnp.promote_types(query_dtype, key_dtype)
