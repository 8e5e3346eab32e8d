"""Key ranges: which keys each row of a batch may see, as (start, stop), i32[T] each, for `key_range` of attention.

    position, sequence = pp.key_ranges.rows(metadata, num_tokens)
    local = pp.key_ranges.chunked(position, 8192)                            # Llama 4
    image = pp.key_ranges.spans(position, first[sequence], last[sequence])   # Gemma 3, with metadata of causal=False
    out = pp.paged_attention(query, cache, metadata, key_range=pp.key_ranges.intersection(local, image))

A row sees `start <= key < stop`, of those keys that causality, window and length of the call leave it. Where a row sees keys after itself,
the metadata must say `causal=False`; the range then says by itself what is seen. Every function is pure and takes traced values.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .config import int_or_none, is_array
from .errors import bad_type, bad_value
from .integers import INT32_MAX, saturate
from .intervals import token_sequences
from .metadata import AttentionMetadata, check_metadata

__all__ = ["causal", "chunked", "documents", "intersection", "prefix", "rows", "spans", "window"]

KeyRange = tuple[Int[Array, " T"], Int[Array, " T"]]


def rows(metadata: AttentionMetadata, num_tokens: int) -> KeyRange:
    """Where each row of a batch stands.

    Args:
      metadata: of the step.
      num_tokens: T, the rows of the query.

    Returns:
      (position in its sequence, sequence), i32[T] each. Padding rows have position 0.

    Raises:
      ValueError, TypeError: names the argument, what it was and what it must be.
    """
    metadata = check_metadata(metadata)
    count = int_or_none(num_tokens)
    if count is None or isinstance(num_tokens, bool):
        bad_type("num_tokens", num_tokens, "a static int")
    if count < 0:
        bad_value("num_tokens", num_tokens, "at least 0")
    if not metadata.seq_lens.shape[0]:
        return jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.int32)
    starts = metadata.query_start_loc
    sequence, inside = token_sequences(starts, count)
    position = (metadata.seq_lens - (starts[1:] - starts[:-1]))[sequence] + inside
    return jnp.where(jnp.arange(count) < starts[-1], position, 0), sequence


def causal(position: Int[Array, " T"]) -> KeyRange:
    """A row sees itself and all keys before it.

    Args:
      position: i32[T].

    Returns:
      (0, position + 1).

    Raises:
      ValueError, TypeError: `position` is no integer vector.
    """
    position = _vector("position", position)
    return jnp.zeros_like(position), _plus(position, 1)


def window(position: Int[Array, " T"], left: Any = None, right: Any = None) -> KeyRange:
    """A row sees `left` keys before itself, itself, and `right` keys after it.

    Args:
      position: i32[T].
      left, right: an int of at least 0 or an integer scalar array, also traced; None is all.

    Returns:
      (position - left, position + right + 1), each within int32 and start at least 0.

    Raises:
      ValueError, TypeError: names the argument, what it was and what it must be.
    """
    position = _vector("position", position)
    left, right = _distance("left", left), _distance("right", right)
    start = jnp.zeros_like(position) if left is None else jnp.where(position > left, position - left, 0)
    stop = jnp.full_like(position, INT32_MAX) if right is None else _plus(_plus(position, right), 1)
    return start, stop


def chunked(position: Int[Array, " T"], size: Any) -> KeyRange:
    """A row sees the chunk that it is in: chunked local attention, as in Llama 4. A causal call sees the part up to the row.

    Args:
      position: i32[T].
      size: tokens of a chunk, a static int above 0 or an integer scalar array.

    Returns:
      (first key of the chunk, one past its last).

    Raises:
      ValueError, TypeError: names the argument, what it was and what it must be.
    """
    position = _vector("position", position)
    length = _distance("size", size)
    if length is None:
        bad_type("size", None, "a positive int or an integer scalar array")
    if isinstance(length, int) and length < 1:
        bad_value("size", size, "a positive int")
    start = position // length * length
    return start, _plus(start, length)


def prefix(position: Int[Array, " T"], length: Any) -> KeyRange:
    """A row sees the whole prefix of its sequence and all keys up to itself: a prefix LM, such as PaliGemma. The metadata is not causal.

    Args:
      position: i32[T].
      length: tokens of the prefix: i32[T], one for each row, or a scalar.

    Returns:
      (0, the later of position + 1 and length).

    Raises:
      ValueError, TypeError: names the argument, what it was and what it must be.
    """
    position = _vector("position", position)
    return jnp.zeros_like(position), jnp.maximum(_plus(position, 1), _per_row("length", length, position, 1)[..., 0])


def spans(position: Int[Array, " T"], start: Any, stop: Any) -> KeyRange:
    """A row sees all keys up to itself, and a row in a span sees up to the span's end: images in Gemma 3. The metadata is not causal.

    Args:
      position: i32[T].
      start, stop: positions where spans start and end, of each row's sequence: [T, N], or [N] where all rows have the same. Spans do not
        overlap; one with stop <= start is none.

    Returns:
      (0, the end of the row's span, or position + 1 where it is in none).

    Raises:
      ValueError, TypeError: names the argument, what it was and what it must be.
    """
    position = _vector("position", position)
    start, stop = _per_row("start", start, position, 2), _per_row("stop", stop, position, 2)
    if start.shape[-1] != stop.shape[-1]:
        bad_value("stop", stop, f"of as many spans as start has ({start.shape[-1]})")
    inside = (start <= position[:, None]) & (position[:, None] < stop)
    end = jnp.max(jnp.where(inside, stop, 0), axis=1, initial=0)
    return jnp.zeros_like(position), jnp.maximum(_plus(position, 1), end)


def documents(position: Int[Array, " T"], start: Any) -> KeyRange:
    """A row sees the document that it is in: documents packed into one sequence. A causal call sees the part up to the row.

    Args:
      position: i32[T].
      start: positions where documents start, of each row's sequence, in any order: [T, N], or [N] where all rows have the same. The keys
        before the first one are a document too.

    Returns:
      (first key of the document, one past its last). The last document has no end but the sequence's.

    Raises:
      ValueError, TypeError: names the argument, what it was and what it must be.
    """
    position = _vector("position", position)
    start = _per_row("start", start, position, 2)
    before = start <= position[:, None]
    first = jnp.max(jnp.where(before, start, 0), axis=1, initial=0)
    return first, jnp.min(jnp.where(before, INT32_MAX, start), axis=1, initial=INT32_MAX)


def intersection(*ranges: KeyRange) -> KeyRange:
    """A row sees what all of the ranges show it.

    Args:
      ranges: at least one (start, stop).

    Returns:
      (the latest start, the earliest stop); where stop <= start a row sees nothing.

    Raises:
      ValueError, TypeError: there is none, or one is no pair of integer vectors.
    """
    if not ranges:
        bad_value("ranges", ranges, "at least one (start, stop)")
    found = []
    for pair in ranges:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            bad_type("ranges", pair, "pairs (start, stop) of integer vectors")
        found.append([_vector("ranges", side) for side in pair])
        if len({side.shape for side in (*found[0], *found[-1])}) > 1:
            bad_value("ranges", found[-1], "vectors of one length")
    start, stop = found[0]
    for other in found[1:]:
        start, stop = jnp.maximum(start, other[0]), jnp.minimum(stop, other[1])
    return start, stop


def _plus(position: Array, count: int | Array) -> Array:
    """The sum, within int32."""
    return jnp.where(position > INT32_MAX - count, INT32_MAX, position + count)


def _integers(name: str, values: Any, rule: str) -> Array:
    try:
        array = values if is_array(values) else np.asarray(values)
    except Exception:
        bad_value(name, values, rule)
    if array.size == 0 and not is_array(values):
        array = array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        bad_type(name, values, rule)
    return saturate(array)


def _vector(name: str, values: Any) -> Int[Array, " T"]:
    rule = "an integer array of shape [T]"
    array = _integers(name, values, rule)
    if array.ndim != 1:
        bad_value(name, values, rule)
    return array


def _per_row(name: str, values: Any, position: Array, ndim: int) -> Int[Array, "T N"]:
    """[T, N] from that or from [N] (`ndim` 2), or [T, 1] from [T] or a scalar (`ndim` 1)."""
    tokens = position.shape[0]
    rule = f"integers of shape [T, N] with T = {tokens}, or [N]" if ndim == 2 else f"integers of shape [T] = [{tokens}], or a scalar"
    array = _integers(name, values, rule)
    if ndim == 1:
        array = array[..., None]
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[0] != tokens):
        bad_value(name, values, rule)
    return jnp.broadcast_to(array, (tokens, array.shape[-1]))


def _distance(name: str, value: Any) -> int | Array | None:
    """None, a static int within int32, or an i32 scalar."""
    rule = "an int of at least 0 or an integer scalar array"
    number = None if isinstance(value, bool) or is_array(value) else int_or_none(value)
    if number is not None:
        if number < 0:
            bad_value(name, value, rule)
        return min(number, INT32_MAX)
    if value is None:
        return None
    if not is_array(value):
        bad_type(name, value, rule)
    array = _integers(name, value, rule)
    if array.shape != ():
        bad_value(name, value, rule)
    return array
