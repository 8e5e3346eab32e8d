"""Layouts as axis strings: where each content and order keeps the key and the value of a token in the one cache buffer.

A side (key or value) is a reshape of the physical buffer to named axes, plus an index for each axis. Packing, unpacking, scattering
and gathering read the string; no layout has code of its own. Names:

    L layer · B block · 2 side (0 key, 1 value) · H KV head · N token in its block · D channel
    D/x x   a channel split in vectors of x elements (16 bytes): d // x, d % x
    N/x x   a token's place split likewise: n // x, n % x

Source of the layouts: vLLM's `KVCacheLayout` and `PagedAttention.split_kv_cache`, AITER's shuffled cache (SEMANTICS.md, II.2 and II.6).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

CONTENTS: Mapping[str, tuple[str, str]] = {
    "packed": ("H N 2 D", "H N 2 D"),
    "xpacked": ("2 H D/x N x", "2 H D N"),
    "xpacked_interleaved_v": ("2 H D/x N x", "2 H N/x D x"),
    "shuffled": ("2 H D/x N x", "2 H N/x D x"),
    "flash": ("2 N H D", "2 N H D"),
}
"""Axes of one block for (key, value); the first axis is the "head slot" of the order."""

ORDERS = ("LBHNC", "LHBNC")
"""Layer, block, head slot, token, content; or the head slot before the block."""

_PHYSICAL: Mapping[str, str] = {
    "packed": "H N 2D",
    "xpacked": "2 H DN",
    "xpacked_interleaved_v": "2 H DN",
    "shuffled": "2 H DN",
    "flash": "2 N H D",
}
"""Axes of the buffer itself: the finest that key and value share, so that the head axis can be sharded in every layout."""


def _with_order(axes: str, order: str) -> tuple[str, ...]:
    slot, *rest = axes.split()
    return ("L", "B", slot, *rest) if order == "LBHNC" else ("L", slot, "B", *rest)


def physical_axes(content: str, order: str) -> tuple[str, ...]:
    """Names of the physical buffer's axes; `"2D"` and `"DN"` are merged ones."""
    return _with_order(_PHYSICAL[content], order)


def side_axes(content: str, order: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the axes of the (key, value) views; each is a reshape of the buffer, never a transpose."""
    key, value = CONTENTS[content]
    return _with_order(key, order), _with_order(value, order)


@dataclass(frozen=True)
class Extents:
    """The sizes that turn axis names into shapes. `vector` is x, the elements in 16 bytes."""

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_size: int
    vector: int

    def of(self, axis: str) -> int:
        return {
            "L": self.num_layers,
            "B": self.num_blocks,
            "H": self.num_kv_heads,
            "N": self.block_size,
            "D": self.head_size,
            "2": 2,
            "x": self.vector,
            "D/x": self.head_size // self.vector,
            "N/x": self.block_size // self.vector,
            "2D": 2 * self.head_size,
            "DN": self.head_size * self.block_size,
        }[axis]

    def shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.of(axis) for axis in axes)


@dataclass(frozen=True)
class SideStrides:
    """Element strides of one side, for kernels: a token's element (l, b, h, n, d) is at

    `offset + l*layer + b*block + h*head + (n // n_vector)*token_outer + (n % n_vector)*token
    + (d // d_vector)*dim_outer + (d % d_vector)*dim`

    where a vector of 1 means that the axis is not split (then `outer` is the plain stride and the inner term is 0).
    """

    offset: int
    layer: int
    block: int
    head: int
    token_outer: int
    token: int
    n_vector: int
    dim_outer: int
    dim: int
    d_vector: int


@cache
def side_strides(content: str, order: str, extents: Extents) -> tuple[SideStrides, SideStrides]:
    """Strides of (key, value) in elements; exact Python integers, which may pass 2**31."""
    sides = []
    for side, axes in enumerate(side_axes(content, order)):
        shape = extents.shape(axes)
        stride, step = {}, 1
        for axis, size in zip(reversed(axes), reversed(shape), strict=True):
            stride[axis] = step
            step *= size
        splits_dim = "D/x" in axes
        splits_token = "N/x" in axes
        sides.append(
            SideStrides(
                offset=side * stride["2"],
                layer=stride["L"],
                block=stride["B"],
                head=stride["H"],
                token_outer=stride["N/x"] if splits_token else stride["N"],
                token=stride["x"] if splits_token else 0,
                n_vector=extents.vector if splits_token else 1,
                dim_outer=stride["D/x"] if splits_dim else stride["D"],
                dim=stride["x"] if splits_dim else 0,
                d_vector=extents.vector if splits_dim else 1,
            )
        )
    return sides[0], sides[1]
