"""The buffer of a cache as memory: where each token's key and value lie."""

from dataclasses import replace
from typing import Any

import numpy as np

from ..functional.cache import CacheSpec, KVCache
from ..functional.layout import SideStrides
from .axes import blended, colors, new_axes, text_color
from .batches import _spec

_LABELS_UP_TO = 600
"""Cells above which elements are not named."""


def layout(
    spec: CacheSpec | KVCache, *, blocks: int | None = None, row: int | None = None, labels: bool | None = None, ax: Any = None
) -> Any:
    """Draws the first elements of the buffer in the order of memory, a cell an element, colored by token; values are pale.

    A small spec says most: blocks of 4 to 16 tokens and heads of 4 to 16 channels. A cell reads "K0.3" for channel 3 of head 0's key.

    Args:
      spec: of the cache, or the cache; one layer is drawn.
      blocks: how many blocks the cache is taken to have, 1 by default, 2 where the order puts the head slot outside the block.
      row: elements of a row of the picture; default what makes it about twice as wide as high.
      labels: whether elements are named; default up to some hundreds.
      ax: axes to draw into; None makes a figure.

    Returns:
      The axes.

    Raises:
      TypeError: no spec.
    """
    spec = _spec(spec)
    small = replace(spec, num_layers=1, num_blocks=blocks or (1 if spec.order == "LBHNC" else 2))
    owner = _owners(small)
    row = row or _row(small)
    height = -(-small.size // row)
    tones = colors(small.block_size * small.num_blocks)
    image = np.ones((height * row, 3))
    for at, (side, block, _, token, _) in enumerate(owner):
        tone = tones[(block * small.block_size + token) % len(tones)]
        image[at] = blended(tone, 0.9 if side == 0 else 0.4)
    ax = new_axes(ax, (max(7.0, 0.33 * row), 1.0 + 0.26 * height))
    ax.imshow(image.reshape(height, row, 3), aspect="auto", extent=(0, row, height, 0), interpolation="nearest")
    ax.set(xlabel="element in a row of memory", yticks=np.arange(height) + 0.5, yticklabels=[str(i * row) for i in range(height)])
    ax.set_ylabel("first element")
    ax.set_xticks(np.arange(0, row + 1, max(1, row // 8)))
    ax.tick_params(labelsize=7, length=0)
    ax.vlines(np.arange(row + 1), 0, height, color="white", linewidth=0.4)
    ax.hlines(np.arange(height + 1), 0, row, color="white", linewidth=0.4)
    if labels if labels is not None else small.size <= _LABELS_UP_TO:
        for at, (side, _, head, _, dim) in enumerate(owner):
            color = text_color(image[at])
            ax.text(at % row + 0.5, at // row + 0.5, f"{'KV'[side]}{head}.{dim}", ha="center", va="center", fontsize=5.5, color=color)
    several = f", {small.num_blocks} blocks" if small.num_blocks > 1 else ", one block"
    ax.set_title(f"{spec.content}, {spec.order}{several}: {' '.join(small.axes)} = {' x '.join(map(str, small.shape))}", fontsize=9)
    _legend(ax, small, tones)
    return ax


def _owners(spec: CacheSpec) -> list[tuple[int, int, int, int, int]]:
    """(side, block, head, token, channel) of each element of one layer, in the order of memory."""
    found: list[tuple[int, int, int, int, int]] = [(0, 0, 0, 0, 0)] * spec.size
    for side, strides in enumerate(spec.side_strides):
        channels = spec.head_size if side == 0 else getattr(spec, "head_size_v", None) or spec.head_size
        for block in range(spec.num_blocks):
            for head in range(spec.num_kv_heads):
                for token in range(spec.block_size):
                    for dim in range(channels):
                        found[_at(strides, block, head, token, dim)] = (side, block, head, token, dim)
    return found


def _at(strides: SideStrides, block: int, head: int, token: int, dim: int) -> int:
    outer, inner = divmod(token, strides.n_vector)
    far, near = divmod(dim, strides.d_vector)
    at = strides.offset + block * strides.block + head * strides.head
    return at + outer * strides.token_outer + inner * strides.token + far * strides.dim_outer + near * strides.dim


def _row(spec: CacheSpec) -> int:
    """A row that holds whole runs of the innermost axis of a side, and keeps the picture about twice as wide as high."""
    row = min(spec.extents.of(axes[-1]) for axes in spec.side_axes)
    while 2 * row <= min(64, (2 * spec.size) ** 0.5):
        row *= 2
    return row


def _legend(ax: Any, spec: CacheSpec, tones: list[Any]) -> None:
    from matplotlib.patches import Patch

    handles = []
    for place in range(min(len(tones), 16)):
        block, token = divmod(place, spec.block_size)
        name = f"token {token}" + (f" of block {block}" if spec.num_blocks > 1 else "")
        handles.append(Patch(facecolor=blended(tones[place], 0.9), label=name))
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)
