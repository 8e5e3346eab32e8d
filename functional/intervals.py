"""What each row of a batch sees, as one interval of keys: a key range, length, causality and a window intersected.

Implementations that are given `key_range` compute these once, before their kernels, which then know one mask. A bias of -inf is no interval
and stays theirs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .integers import INT32_MAX

Interval = tuple[Int[Array, "..."], Int[Array, "..."]]
"""First and one past the last."""


def token_sequences(query_start_loc: Int[Array, " S+1"], num_tokens: int) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """(sequence, place among the new tokens of that sequence) of each row; nonsense for padding."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    found = jnp.searchsorted(query_start_loc, token, side="right").astype(jnp.int32) - 1
    sequence = jnp.clip(found, 0, query_start_loc.shape[0] - 2)
    return sequence, token - query_start_loc[sequence]


def visible_intervals(
    query_start_loc: Int[Array, " S+1"],
    contexts: Int[Array, " S"],
    lengths: Int[Array, " S"],
    key_range: Interval,
    *,
    causal: bool,
    window: int | Array | None,
) -> Interval:
    """[start, stop) of the keys that each row sees, i32[T] each; (0, 0) for a row that sees none and for padding.

    Args:
      query_start_loc: as in `AttentionMetadata`.
      contexts: position of the first new token of each sequence.
      lengths: keys of each sequence.
      key_range: start and stop of each row.
      causal: whether a row sees no later key.
      window: W >= 1, an int or a traced scalar, or None. No sum leaves int32.
    """
    tokens = key_range[0].shape[0]
    if not query_start_loc.shape[0] - 1:
        return jnp.zeros(tokens, jnp.int32), jnp.zeros(tokens, jnp.int32)
    sequence, inside = token_sequences(query_start_loc, tokens)
    position, length = contexts[sequence] + inside, lengths[sequence]
    start, stop = jnp.maximum(key_range[0], 0), jnp.minimum(key_range[1], length)
    if causal:
        stop = jnp.minimum(stop, position + 1)
    if window is not None:
        start = jnp.maximum(start, jnp.where(position > window - 1, position - (window - 1), 0))
        if not causal:
            stop = jnp.where(stop - position > window, position + window, stop)
    live = (start < stop) & (jnp.arange(tokens, dtype=jnp.int32) < query_start_loc[-1])
    return jnp.where(live, start, 0), jnp.where(live, stop, 0)


def hulls(intervals: Interval, query_start_loc: Int[Array, " S+1"]) -> Interval:
    """The smallest interval that holds those of all rows of a sequence, i32[S] each; (0, 0) where they are empty."""
    start, stop = intervals
    seqs = query_start_loc.shape[0] - 1
    if not seqs or not start.shape[0]:
        return jnp.zeros(seqs, jnp.int32), jnp.zeros(seqs, jnp.int32)
    sequence, _ = token_sequences(query_start_loc, start.shape[0])
    sort = {"num_segments": seqs, "indices_are_sorted": True}
    begin = jax.ops.segment_min(jnp.where(start < stop, start, INT32_MAX), sequence, **sort)
    end = jax.ops.segment_max(stop, sequence, **sort)
    return jnp.where(begin < end, begin, 0), jnp.where(begin < end, end, 0)
