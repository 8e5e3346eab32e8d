"""Context parallel attention: the blocks of one sequence lie on several devices, and each attends what it has.

A device's blocks of a sequence, one after another, are a sequence of their own: its keys are in the order of the whole, so what a query
sees of the whole, an interval of positions, is an interval here too. The devices' results are merged by their lse (FlashAttention's
split, Dao et al., 2022).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .calls import PagedAttentionCall
from .errors import UnsupportedError
from .fp8 import quantize
from .integers import INT32_MAX
from .intervals import token_sequences, visible_intervals

Names = tuple[Any, ...]


def attend_own_blocks(
    serve: Callable[..., Any], call: PagedAttentionCall, blocks: Names, context: Names, sizes: Mapping[Any, int]
) -> tuple[Array, Array]:
    """(out, lse) of a call whose sequences have blocks on all devices of the axes `context`.

    Args:
      serve: serves a call of one device, to (out, lse).
      call: the device's part of the cache, and queries that are the same on all devices of `context`. Block ids count over `blocks`.
      blocks: the mesh axes of the cache's blocks, `context` among them.
      context: those over which a sequence's blocks lie.
      sizes: devices of each axis.

    Raises:
      UnsupportedError: an option that depends on the distance of a key from its query.
    """
    for name in ("alibi_slopes", "qq_bias"):
        if getattr(call, name) is not None:
            raise UnsupportedError(
                f"{name} needs the distance of each key from its query, which is lost where the blocks of a sequence lie over the mesh "
                f"axes {', '.join(map(str, context))}; divide the cache by KV heads or sequences instead"
            )
    metadata, size = call.metadata, call.cache.spec.block_size
    starts, width = metadata.query_start_loc, metadata.block_table.shape[1]
    contexts = metadata.seq_lens - (starts[1:] - starts[:-1])
    lengths = jnp.clip(contexts if call.context_only else metadata.seq_lens, 0, min(width * size, INT32_MAX))
    column = jnp.arange(width, dtype=jnp.int32)[None]
    ids, is_lost = _own_blocks(call, blocks, context, sizes)
    mine = ((ids >= 0) | (is_lost & (lax.axis_index(context) == 0))) & (column < -(-lengths // size)[:, None])
    before = jnp.cumsum(mine, axis=1, dtype=jnp.int32) - mine  # blocks here that lie before each column
    rows = jnp.arange(mine.shape[0], dtype=jnp.int32)[:, None]
    table = jnp.full_like(ids, -1).at[rows, jnp.where(mine, before, width)].set(ids, mode="drop")
    here = jnp.sum(jnp.where(mine, jnp.clip(lengths[:, None] - column * size, 0, size), 0), axis=1, dtype=jnp.int32)

    def count(sequence: Array, position: Array) -> Array:
        """Keys here that lie before a position of the whole sequence."""
        at = jnp.clip(position // size, 0, width - 1)
        inside = jnp.where(mine[sequence, at], jnp.clip(position - at * size, 0, size), 0)
        return before[sequence, at] * size + inside

    part = replace(
        call,
        metadata=replace(metadata, block_table=table, seq_lens=here),
        sinks=None if call.sinks is None else jnp.where(lax.axis_index(context) == 0, call.sinks, -jnp.inf),
        output_scale=None,
        output_dtype=jnp.dtype(jnp.float32),
        return_lse=True,
        context_only=False,
    )
    plain = call.sliding_window is None and call.traced_window is None and call.key_range is None
    if not plain or (metadata.causal and not call.context_only and metadata.max_query_len > 1):
        tokens = call.query.shape[0]
        everything = jnp.zeros(tokens, jnp.int32), jnp.full(tokens, INT32_MAX, jnp.int32)
        window = call.sliding_window if call.traced_window is None else call.traced_window
        start, stop = visible_intervals(starts, contexts, lengths, call.key_range or everything, causal=metadata.causal, window=window)
        sequence, _ = token_sequences(starts, tokens)
        part = replace(
            part,
            metadata=replace(part.metadata, causal=False),
            key_range=(count(sequence, start), count(sequence, stop)),
            sliding_window=None,
            traced_window=None,
        )
    elif call.context_only:
        part = replace(part, metadata=replace(part.metadata, causal=False))
    out, lse = merge_over(context, *serve(part))
    return out.astype(call.output_dtype) if call.output_scale is None else quantize(out, call.output_scale, call.output_dtype), lse


def _own_blocks(call: PagedAttentionCall, blocks: Names, context: Names, sizes: Mapping[Any, int]) -> tuple[Array, Array]:
    """(block ids among this device's own, -1 for others; which ids no device of `context` has)."""
    ids, count = call.metadata.block_table, call.cache.local_spec.num_blocks
    owner = jnp.where(ids >= 0, ids // count, -1)
    own = jnp.where(owner == lax.axis_index(blocks), ids % count, -1)
    is_near, rest = ids >= 0, owner
    for name in reversed(blocks):
        if name not in context:
            is_near &= rest % sizes[name] == lax.axis_index(name)
        rest = rest // sizes[name]
    return own, ~is_near | (rest != 0)


def merge_over(axes: Names, out: Float[Array, "T Hq D"], lse: Float[Array, "T Hq"]) -> tuple[Array, Array]:
    """Results of the same queries over the keys of each device, as one over all; two all-reduces, of lse and of out with its weight.

    Args:
      axes: mesh axes.
      out, lse: of this device, in float32; -inf where it has no key that the query sees.
    """
    largest = lax.pmax(jnp.where(jnp.isnan(lse), -jnp.inf, lse), axes)
    base = jnp.where(largest == -jnp.inf, 0.0, largest)
    weight = jnp.exp(lse - base)[..., None]
    total = lax.psum(jnp.concatenate([jnp.where(weight == 0, 0.0, weight * out), weight], axis=-1), axes)
    out, weight = total[..., :-1], total[..., -1:]
    return out / jnp.where(weight == 0, 1.0, weight), base + jnp.log(weight[..., 0])
