"""The pool of blocks: whose each block is and how full, in one step and over many."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from ..functional.cache import CacheSpec, KVCache
from ..functional.errors import bad_type, bad_value
from ..functional.metadata import AttentionMetadata
from .axes import FREE, INK, blended, colors, new_axes


def _spec(spec: Any) -> CacheSpec:
    spec = spec.local_spec if isinstance(spec, KVCache) else spec
    if not isinstance(spec, CacheSpec):
        bad_type("spec", spec, "a CacheSpec or a KVCache")
    return spec


def _tables(metadata: Any, spec: CacheSpec) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """(new tokens [S], tokens in the cache [S], blocks of each sequence)."""
    if not isinstance(metadata, AttentionMetadata):
        bad_type("metadata", metadata, "AttentionMetadata (see make_metadata)")
    starts, lens, table = (np.asarray(x).astype(np.int64) for x in (metadata.query_start_loc, metadata.seq_lens, metadata.block_table))
    return np.diff(starts), lens, [table[s, : -(-int(n) // spec.block_size)] for s, n in enumerate(lens)]


def block_table(metadata: AttentionMetadata, spec: CacheSpec | KVCache, *, ax: Any = None, columns: int = 16) -> Any:
    """Draws the pool, a cell for each block, a strip for each token slot: filled where a sequence has a token there, darker where this step
    writes it. A block of several sequences has the colors of all; a free block is grey.

    Args:
      metadata: of the step, with concrete arrays.
      spec: of the cache, or the cache.
      ax: axes to draw into; None makes a figure.
      columns: blocks in a row.

    Returns:
      The axes; their title says how many blocks and slots are used.

    Raises:
      TypeError: no metadata or spec.
      ValueError: a block that a sequence needs lies outside the cache.
    """
    from matplotlib.patches import Patch, Rectangle

    spec = _spec(spec)
    queries, lens, tables = _tables(metadata, spec)
    columns = min(columns, spec.num_blocks)
    rows = ceil(spec.num_blocks / columns)
    ax = new_axes(ax, (max(6.0, 0.7 * columns), 0.8 + 0.75 * rows))
    owners: dict[int, list[tuple[int, int]]] = {}
    for s, blocks in enumerate(tables):
        for place, block in enumerate(map(int, blocks)):
            if not 0 <= block < spec.num_blocks:
                bad_value(f"metadata.block_table[{s}, {place}]", block, f"in [0, num_blocks = {spec.num_blocks})")
            owners.setdefault(block, []).append((s, place))
    tones, N, used = colors(len(tables)), spec.block_size, 0
    for block in range(spec.num_blocks):
        x, y = block % columns, block // columns
        ax.add_patch(Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, facecolor=FREE, edgecolor="none"))
        held = owners.get(block, [])
        filled = 0
        for lane, (s, place) in enumerate(held):
            height = 0.88 / len(held)
            tokens = np.arange(place * N, min((place + 1) * N, int(lens[s])))
            filled = max(filled, len(tokens))
            for token in tokens:
                new = token >= lens[s] - queries[s] and metadata.causal
                ax.add_patch(
                    Rectangle(
                        (x + 0.04 + 0.92 * (token % N) / N, y + 0.06 + lane * height),
                        0.92 / N,
                        height,
                        facecolor=blended(tones[s], 1.0 if new else 0.55),
                        edgecolor="white",
                        linewidth=0.3,
                    )
                )
        used += filled
        ax.text(x + 0.5, y + 0.5, str(block), ha="center", va="center", fontsize=8, color=INK)
    ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[])
    ax.set_title(f"{len(owners)} of {spec.num_blocks} blocks of {N} tokens, {used} of {spec.num_slots} slots in use", fontsize=10)
    shown = [s for s, n in enumerate(lens) if n][:20]
    handles = [Patch(facecolor=blended(tones[s], 0.55), label=f"sequence {s}: {queries[s]} new of {lens[s]}") for s in shown]
    ax.legend(
        handles=[*handles, Patch(facecolor=FREE, label="free")], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False
    )
    for side in ax.spines.values():
        side.set_visible(False)
    return ax


def occupancy(steps: Sequence[AttentionMetadata | Sequence[int]], *, num_blocks: int, block_size: int | None = None, ax: Any = None) -> Any:
    """Draws how many blocks each row of the batch has, step after step, stacked; a dashed line is the pool.

    A block of several sequences counts once, for the first of them.

    Args:
      steps: the metadata of each step, or the blocks of each row of the batch as numbers.
      num_blocks: blocks of the pool.
      block_size: tokens a block, where the metadata does not state it.
      ax: axes to draw into; None makes a figure.

    Returns:
      The axes.

    Raises:
      ValueError: metadata without a block size, and none given.
    """
    ax = new_axes(ax, (8.0, 3.2))
    counts = [_blocks_of_rows(step, block_size) if isinstance(step, AttentionMetadata) else list(step) for step in steps]
    rows = max(map(len, counts), default=0)
    filled = np.array([[*count, *[0] * (rows - len(count))] for count in counts]).reshape(len(counts), rows)
    ax.stackplot(np.arange(len(counts)), filled.T, colors=[blended(tone, 0.7) for tone in colors(rows)], step="post")
    ax.axhline(num_blocks, color=INK, linestyle="--", linewidth=1)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="step", ylabel="blocks", ylim=(0, num_blocks * 1.05), xlim=(0, max(len(counts) - 1, 1)))
    return ax


def _blocks_of_rows(metadata: AttentionMetadata, block_size: int | None) -> list[int]:
    size = metadata.block_size or block_size
    if size is None:
        bad_value("block_size", block_size, "given where the metadata states none")
    seen: set[int] = set()
    counts = []
    for n, row in zip(np.asarray(metadata.seq_lens), np.asarray(metadata.block_table), strict=True):
        blocks = set(map(int, row[: -(-int(n) // size)]))
        counts.append(len(blocks - seen))
        seen |= blocks
    return counts
