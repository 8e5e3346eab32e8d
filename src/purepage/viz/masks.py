"""What each query sees, and how much of it: masks from their definition, weights from the library itself."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..functional.attention import paged_attention
from ..functional.cache import KVCache, cache_from_logical, cache_to_logical
from ..functional.errors import bad_value
from ..functional.metadata import AttentionMetadata
from .axes import INK, new_axes


def visible_keys(
    metadata: AttentionMetadata, sequence: int = 0, *, sliding_window: int | None = None, key_range: Any = None, qq_bias: Any = None
) -> np.ndarray:
    """Which keys each query of a sequence sees, from the definition of the masks (docs/semantics.md).

    Args:
      metadata: of the step, with concrete arrays.
      sequence: its place in the batch.
      sliding_window, key_range, qq_bias: as `paged_attention` takes them.

    Returns:
      bool [queries, keys].

    Raises:
      ValueError: no such sequence.
    """
    rows, n = _rows(metadata, sequence)
    q = rows.stop - rows.start
    position, k = n - q + np.arange(q)[:, None], np.arange(n)[None]
    keep = (k <= position) if metadata.causal else np.ones((q, n), bool)
    if sliding_window is not None and int(sliding_window) > 0:
        keep &= (position - k < int(sliding_window)) & (metadata.causal | (k - position < int(sliding_window)))
    if key_range is not None:
        start, stop = (bound if bound.ndim == 0 else bound[rows, None] for bound in map(np.asarray, key_range))
        keep &= (start <= k) & (k < stop)
    if qq_bias is not None:
        bias = np.asarray(qq_bias)
        bias = bias[sequence] if bias.ndim == 3 else bias
        for i in range(min(q, bias.shape[0])):
            for j in range(max(0, q - n), min(q, bias.shape[1])):
                keep[i, n - q + j] &= bias[i, j] != -np.inf
    return keep


def mask(metadata: AttentionMetadata, sequence: int = 0, *, ax: Any = None, **masks: Any) -> Any:
    """Draws which keys each query of a sequence sees; a bar at the left end of a row spans its range of keys.

    Args:
      metadata, sequence: see `visible_keys`.
      ax: axes to draw into; None makes a figure.
      masks: `sliding_window`, `key_range`, `qq_bias`.

    Returns:
      The axes.

    Raises:
      ValueError: no such sequence.
    """
    keep = visible_keys(metadata, sequence, **masks)
    queries, keys = keep.shape
    ax = new_axes(ax, _size(queries, keys))
    ax.pcolormesh(keep.astype(float), cmap="Blues", vmin=0, vmax=1.4, edgecolors="white", linewidth=0.4)
    for i, row in enumerate(keep):
        seen = np.flatnonzero(row)
        if len(seen):
            ax.plot([seen[0], seen[-1] + 1], [i + 0.5, i + 0.5], color=INK, linewidth=0.8, marker="|", markersize=5)
    _ticks(ax, metadata, sequence, keep.shape)
    ax.set_title(f"{int(keep.sum())} of {keep.size} pairs are visible", fontsize=9)
    return ax


def attention_weights(
    query: Any, cache: KVCache, metadata: AttentionMetadata, *, sequence: int = 0, layer: int = 0, **options: Any
) -> np.ndarray:
    """The softmax weights that `paged_attention` gives to each key, computed by it: over values that are unit vectors.

    Args:
      query, cache, metadata, layer: as `paged_attention` takes them, concrete.
      sequence: its place in the batch.
      options: other options of `paged_attention`; with sinks a row sums to less than 1.

    Returns:
      float32 [queries, Hq, keys].

    Raises:
      ValueError: no such sequence.
    """
    rows, n = _rows(metadata, sequence)
    key, value = cache_to_logical(cache, layer)
    width = value.shape[-1]
    spec = cache.spec
    block = np.asarray(metadata.block_table)[sequence, np.arange(n) // spec.block_size]
    place, parts = np.arange(n) % spec.block_size, []
    attend = jax.jit(lambda query, probe: paged_attention(query, probe, metadata, **{**options, "output_dtype": jnp.float32}))
    for first in range(0, n, width):
        here = np.arange(first, min(first + width, n))
        units = np.zeros(value.shape, np.float32)
        units[block[here], place[here], :, here - first] = 1
        probe = cache_from_logical(
            replace(spec, num_layers=1), key[None], jnp.asarray(units, value.dtype)[None], k_scale=cache.k_scale[layer : layer + 1]
        )
        parts.append(np.asarray(attend(query, probe))[rows, :, : len(here)])
    return np.concatenate(parts, axis=-1) if parts else np.zeros((rows.stop - rows.start, query.shape[1], 0), np.float32)


def attention_map(
    query: Any, cache: KVCache, metadata: AttentionMetadata, *, sequence: int = 0, head: int = 0, ax: Any = None, **options: Any
) -> Any:
    """Draws the softmax weights of one head, white where a key is not seen.

    Args:
      query, cache, metadata: as `paged_attention` takes them, concrete.
      sequence: its place in the batch.
      head: the query head.
      ax: axes to draw into; None makes a figure.
      options: `layer` and other options of `paged_attention`.

    Returns:
      The axes.

    Raises:
      ValueError: no such sequence or head.
    """
    weights = attention_weights(query, cache, metadata, sequence=sequence, **options)
    if not 0 <= head < weights.shape[1]:
        bad_value("head", head, f"in [0, {weights.shape[1]})")
    shown = np.ma.masked_equal(weights[:, head], 0.0)
    ax = new_axes(ax, _size(*shown.shape))
    drawn = ax.pcolormesh(shown, cmap="viridis", vmin=0, vmax=max(float(shown.max() or 0), 1e-6), edgecolors="white", linewidth=0.3)
    ax.figure.colorbar(drawn, ax=ax, shrink=0.8, label="weight")
    _ticks(ax, metadata, sequence, shown.shape)
    return ax


def _rows(metadata: AttentionMetadata, sequence: int) -> tuple[slice, int]:
    """(rows of a sequence's queries, its keys)."""
    starts, lens = np.asarray(metadata.query_start_loc), np.asarray(metadata.seq_lens)
    if not 0 <= sequence < len(lens):
        bad_value("sequence", sequence, f"in [0, {len(lens)}), the sequences of the batch")
    return slice(int(starts[sequence]), int(starts[sequence + 1])), int(lens[sequence])


def _size(queries: int, keys: int) -> tuple[float, float]:
    return min(10.0, 1.8 + 0.22 * keys), min(8.0, 1.2 + 0.22 * queries)


def _ticks(ax: Any, metadata: AttentionMetadata, sequence: int, shape: tuple[int, ...]) -> None:
    queries, keys = shape
    first = keys - queries
    ax.set(xlabel="position of the key", ylabel="position of the query", xlim=(0, keys), ylim=(queries, 0))
    for axis, count, base in ((ax.xaxis, keys, 0), (ax.yaxis, queries, first)):
        step = max(1, count // 12)
        axis.set_ticks(np.arange(0, count, step) + 0.5, labels=[str(base + i) for i in range(0, count, step)])
    ax.tick_params(labelsize=7)
    ax.set_aspect("equal" if max(shape) <= 60 else "auto")
