"""The `xla` implementation of paged attention and encoder attention: where keys come from, around the loops of `passes` and `tiles`."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from purepage.functional.cache import KVCache, take_blocks
from purepage.functional.calls import EncoderAttentionCall, PagedAttentionCall
from purepage.functional.fp8 import quantize
from purepage.functional.integers import INT32_MAX
from purepage.functional.intervals import Interval, hulls, visible_intervals
from purepage.kernels.xla.explicit import axis_sharding, with_explicit_results
from purepage.kernels.xla.passes import attend
from purepage.kernels.xla.tiles import Items, Problem, operand_dtype, window_range

CHUNK_TOKENS = {"cpu": 256, "accelerator": 512}
"""A causal mask hides less of a smaller chunk, and a smaller chunk stays in a CPU's cache. One still smaller leaves a core idle in a
prefill (`passes.query_tile`).
"""


def chunk_tokens(platform: str) -> int:
    return CHUNK_TOKENS["cpu" if platform == "cpu" else "accelerator"]


@dataclass(frozen=True)
class PagedSource:
    """Stored codes of one layer of a cache, not scaled. `table` is padded to whole chunks."""

    cache: KVCache
    layer: Int[Array, ""]
    table: Int[Array, "S M"]
    blocks: int
    """Cache blocks of a chunk."""

    @property
    def chunk(self) -> int:
        return self.blocks * self.cache.spec.block_size

    @property
    def num_kv_heads(self) -> int:
        return self.cache.local_spec.num_kv_heads

    @property
    def value_size(self) -> int:
        return self.cache.spec.value_size

    def load(self, items: Items, index: Array, dtype: np.dtype):
        spec = self.cache.local_spec
        ids = lax.dynamic_slice_in_dim(self.table[items.sequence], index * self.blocks, self.blocks, axis=1)
        sides = take_blocks(self.cache, self.layer, jnp.clip(ids, 0, spec.num_blocks - 1))
        shape = (ids.shape[0], spec.num_kv_heads, self.chunk, -1)
        key, value = (jnp.transpose(side, (0, 3, 1, 2, 4)).reshape(shape).astype(dtype) for side in sides)
        return key, value


@dataclass(frozen=True)
class DenseSource:
    """This step's tokens themselves, packed like the queries."""

    key: Float[Array, "T H D"]
    value: Float[Array, "T H Dv"]
    query_start_loc: Int[Array, " S+1"]
    chunk: int

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def value_size(self) -> int:
        return self.value.shape[2]

    def rows(self, items: Items, index: Array) -> Int[Array, "R C"]:
        position = index * self.chunk + jnp.arange(self.chunk, dtype=jnp.int32)[None]
        return self.query_start_loc[items.sequence][:, None] + position - items.context[:, None]

    def load(self, items: Items, index: Array, dtype: np.dtype):
        rows = jnp.clip(self.rows(items, index), 0, self.key.shape[0] - 1)
        key, value = (jnp.moveaxis(side[rows], 2, 1).astype(dtype) for side in (self.key, self.value))
        return key, value


@dataclass(frozen=True)
class OverlaidSource:
    """The context from a cache, scaled, and this step's tokens at full precision."""

    paged: PagedSource
    dense: DenseSource
    k_scale: Float[Array, " H"]
    v_scale: Float[Array, " H"]

    @property
    def chunk(self) -> int:
        return self.paged.chunk

    @property
    def num_kv_heads(self) -> int:
        return self.paged.num_kv_heads

    @property
    def value_size(self) -> int:
        return self.paged.value_size

    def load(self, items: Items, index: Array, dtype: np.dtype):
        starts = self.dense.query_start_loc
        rows = self.dense.rows(items, index)
        begin, end = starts[items.sequence][:, None], starts[items.sequence + 1][:, None]
        is_new = (rows >= begin) & (rows < end) & (end - begin > 1)  # a sequence of one query token reads its own token from the cache
        is_new = is_new[:, None, :, None]
        key, value = self.dense.load(items, index, dtype)
        old_key, old_value = self.paged.load(items, index, dtype)
        k_scale, v_scale = (scale[None, :, None, None] for scale in (self.k_scale, self.v_scale))
        return jnp.where(is_new, key, old_key * k_scale), jnp.where(is_new, value, old_value * v_scale)


def needs_missing_block(
    query_start_loc: Int[Array, " S+1"],
    contexts: Int[Array, " S"],
    lengths: Int[Array, " S"],
    table: Int[Array, "S M"],
    *,
    num_blocks: int,
    block_size: int,
    sliding_window: int | Array | None,
    causal: bool,
    intervals: Interval | None = None,
) -> Bool[Array, " S"]:
    """Which sequences have a block outside [0, num_blocks) between the first and the last key below `lengths` that some query may see."""
    last = contexts + query_start_loc[1:] - query_start_loc[:-1] - 1
    start, stop = window_range(contexts, last, jnp.zeros_like(contexts), lengths, sliding_window, causal=causal)
    if intervals is not None:
        begin, end = hulls(intervals, query_start_loc)
        start, stop = jnp.maximum(start, begin), jnp.minimum(stop, end)
    column = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    needed = (column >= (start // block_size)[:, None]) & (column < (-(-stop // block_size))[:, None])
    return jnp.any(needed & ((table < 0) | (table >= num_blocks)), axis=1)


def _masks(
    call: PagedAttentionCall | EncoderAttentionCall, starts: Array, contexts: Array, lengths: Array, *, causal: bool
) -> dict[str, Any]:
    """What a row sees, as `Problem` and `needs_missing_block` have it: causality and a window, or, with key ranges, one interval."""
    window = call.sliding_window if call.traced_window is None else call.traced_window
    if call.key_range is None:
        return {"causal": causal, "sliding_window": window}
    intervals = visible_intervals(starts, contexts, lengths, call.key_range, causal=causal, window=window)
    return {"causal": False, "sliding_window": None, "intervals": intervals}


def _paged_attention(call: PagedAttentionCall, new_tokens, *, platform: str):
    spec, metadata = call.cache.local_spec, call.metadata
    starts, seq_lens, table = (getattr(metadata, name).astype(jnp.int32) for name in ("query_start_loc", "seq_lens", "block_table"))
    width = table.shape[1]
    blocks = max(1, min(chunk_tokens(platform) // spec.block_size, width))
    padded = jnp.pad(table, ((0, 0), (0, max(blocks, -(-width // blocks) * blocks) - width)))
    source = PagedSource(call.cache, call.layer, padded, blocks)
    dtype = operand_dtype(call.query.dtype, spec.dtype, platform)
    k_scale, v_scale = (
        jnp.broadcast_to(scale[call.layer], (spec.num_kv_heads,)) if spec.is_quantized else jnp.ones((spec.num_kv_heads,), jnp.float32)
        for scale in (call.cache.k_scale, call.cache.v_scale)
    )
    factor = jnp.float32(call.scale) if call.score_scale is None else call.scale * call.score_scale
    contexts = seq_lens - (starts[1:] - starts[:-1])
    # A position past the table has no block.
    lengths = jnp.minimum(contexts if call.context_only else seq_lens, min(width * spec.block_size, INT32_MAX))
    masks = _masks(call, starts, contexts, lengths, causal=metadata.causal)
    if new_tokens is not None:
        dtype = jnp.dtype(jnp.float32)
        key, value = new_tokens
        source = OverlaidSource(source, DenseSource(key, value, starts, source.chunk), k_scale, v_scale)
        k_scale, v_scale = jnp.ones_like(k_scale), None
    problem = Problem(
        query=call.query,
        query_start_loc=starts,
        lengths=lengths,
        contexts=contexts,
        source=source,
        score_factor=factor * k_scale,
        sinks=call.sinks,
        alibi_slopes=call.alibi_slopes,
        qq_bias=call.qq_bias,
        logits_soft_cap=call.logits_soft_cap,
        max_query_len=metadata.max_query_len,
        dtype=dtype,
        varying=(call, new_tokens),
        **masks,
    )
    # Positions that are read from the new tokens need no block.
    cached = problem if new_tokens is None else replace(problem, lengths=jnp.minimum(problem.lengths, jnp.maximum(contexts, 0)))
    invalid = needs_missing_block(
        starts,
        contexts,
        cached.lengths,
        table,
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        **masks,
    )
    problem = replace(problem, invalid=invalid)
    out, lse = attend(problem, platform)
    if v_scale is not None and spec.is_quantized:
        out = out * jnp.repeat(v_scale, call.query.shape[1] // spec.num_kv_heads)[None, :, None]
    if call.output_scale is not None:
        return quantize(out, call.output_scale, call.output_dtype), lse
    return out.astype(call.output_dtype), lse


def _encoder_attention(call: EncoderAttentionCall, *, platform: str):
    starts = call.metadata.query_start_loc.astype(jnp.int32)
    lengths = starts[1:] - starts[:-1]
    heads = call.key.shape[1]
    factor = jnp.float32(call.scale) if call.score_scale is None else call.scale * call.score_scale
    contexts = jnp.zeros_like(lengths)
    problem = Problem(
        query=call.query,
        query_start_loc=starts,
        lengths=lengths,
        contexts=contexts,
        source=DenseSource(call.key, call.value, starts, min(chunk_tokens(platform), max(1, call.key.shape[0]))),
        score_factor=jnp.broadcast_to(factor, (heads,)),
        sinks=call.sinks,
        alibi_slopes=call.alibi_slopes,
        qq_bias=None,
        logits_soft_cap=call.logits_soft_cap,
        max_query_len=call.metadata.max_query_len,
        dtype=operand_dtype(call.query.dtype, call.key.dtype, platform),
        varying=call,
        **_masks(call, starts, contexts, lengths, causal=call.causal),
    )
    out, lse = attend(problem, platform)
    out = out.astype(call.query.dtype)
    return (out, lse) if call.return_lse else out


_jitted_paged = jax.jit(_paged_attention, static_argnames=("platform",))
_jitted_encoder = jax.jit(_encoder_attention, static_argnames=("platform",))


def paged_attention(call: PagedAttentionCall):
    """(out [T, Hq, D], lse f32[T, Hq]) of a checked call."""
    return _sharded_paged(call, None)


def paged_attention_with_new_tokens(call: PagedAttentionCall, key: Float[Array, "T H D"], value: Float[Array, "T H D"]):
    """As `paged_attention`, but this step's tokens are attended from the dense `key` and `value`, at full precision.

    That is what ROCM_ATTN's prefix prefill does: with an fp8 cache its new tokens do not pass through fp8
    (docs/semantics.md, This step's tokens).
    """
    return _sharded_paged(call, (key, value))


def encoder_attention(call: EncoderAttentionCall):
    """out [T, Hq, D] of a checked call, and lse f32[T, Hq] where it asks for that."""

    def specs():
        out, lse = _specs(call.query, axis_sharding(call.key, 1))
        return (out, lse) if call.return_lse else out

    return with_explicit_results(partial(_jitted_encoder, platform=jax.default_backend()), (call,), specs)


def _sharded_paged(call: PagedAttentionCall, new_tokens):
    attend_all = partial(_jitted_paged, platform=jax.default_backend())
    heads = call.cache.spec.axes.index("H")
    return with_explicit_results(attend_all, (call, new_tokens), lambda: _specs(call.query, axis_sharding(call.cache.data, heads)))


def _specs(query: Array, kv_heads: Any) -> tuple[PartitionSpec, PartitionSpec]:
    """Shardings of (out, lse): the query's, its heads sharded as the KV heads are where the query's are not."""
    tokens, heads, channels = (axis_sharding(query, axis) for axis in range(3))
    heads = kv_heads if heads is None else heads
    return PartitionSpec(tokens, heads, channels), PartitionSpec(tokens, heads)
