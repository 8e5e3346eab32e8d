"""Layouts as axis strings: where each content and order keeps the key and the value of a token in the one cache buffer.

A side (key or value) is a reshape of the physical buffer to named axes, plus an index for each axis. Packing, unpacking, scattering
and gathering read the string; no layout has code of its own. Names:

    L layer · B block · 2 side (0 key, 1 value) · H KV head · N token in its block · D channel
    D/x x   a channel split in vectors of x elements (16 bytes): d // x, d % x
    N/x x   a token's place split likewise: n // x, n % x

Source of the layouts: vLLM's `KVCacheLayout` and `PagedAttention.split_kv_cache`, AITER's shuffled cache (docs/semantics.md,
Cache and writers).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

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


LAYOUT_PROPERTIES = frozenset(
    (
        "tokens_are_rows",
        "heads_are_adjacent",
        "sides_are_adjacent",
        "sides_are_apart",
        "key_has_vectors_of_channels",
        "value_has_vectors_of_tokens",
        "value_has_tokens_innermost",
    )
)
"""Names of all properties that a `Layout` of the table has: its questions."""


@dataclass(frozen=True)
class Layout:
    """What kernels ask of a layout. `key` and `value` are the axes of one block of a side, the axis "2" included.

    Attributes:
      name: as in `CONTENTS`.
      key, value: axis names.
    """

    name: str
    key: tuple[str, ...]
    value: tuple[str, ...]

    @property
    def tokens_are_rows(self) -> bool:
        """The D channels of a token's head are contiguous, in key and value, and tokens are equally far apart."""
        return all(axes[-1] == "D" and "N" in axes for axes in (self.key, self.value))

    @property
    def heads_are_adjacent(self) -> bool:
        """The heads of a token follow each other: its H * D channels are contiguous."""
        return all(axes[-2:] == ("H", "D") for axes in (self.key, self.value))

    @property
    def sides_are_adjacent(self) -> bool:
        """A token's value follows its key, head by head."""
        return all(axes[-2:] == ("2", "D") for axes in (self.key, self.value))

    @property
    def sides_are_apart(self) -> bool:
        """All keys of a block are contiguous, and all values."""
        return all(axes[0] == "2" for axes in (self.key, self.value))

    @property
    def key_has_vectors_of_channels(self) -> bool:
        """A key block is [H, D/x, N, x]."""
        return self.key[1:] == ("H", "D/x", "N", "x")

    @property
    def value_has_vectors_of_tokens(self) -> bool:
        """A value block is [H, N/x, D, x]."""
        return self.value[1:] == ("H", "N/x", "D", "x")

    @property
    def value_has_tokens_innermost(self) -> bool:
        """A value block is [H, D, N]."""
        return self.value[1:] == ("H", "D", "N")

    @cached_property
    def properties(self) -> frozenset[str]:
        """Names of the questions above that are answered with yes, and a name of its own for a side that none of them describes."""
        found = {name for name in LAYOUT_PROPERTIES if getattr(self, name)}
        if not (self.tokens_are_rows or self.key_has_vectors_of_channels):
            found.add(f"key axes [{', '.join(self.key)}]")
        if not (self.tokens_are_rows or self.value_has_vectors_of_tokens or self.value_has_tokens_innermost):
            found.add(f"value axes [{', '.join(self.value)}]")
        return frozenset(found)


@cache
def layout_of(content: str) -> Layout:
    """The `Layout` of a content of the table."""
    key, value = CONTENTS[content]
    return Layout(content, tuple(key.split()), tuple(value.split()))


def _with_order(axes: str, order: str) -> tuple[str, ...]:
    slot, *rest = axes.split()
    return ("L", "B", slot, *rest) if order == "LBHNC" else ("L", slot, "B", *rest)


@cache
def physical_axes(content: str, order: str) -> tuple[str, ...]:
    """Names of the physical buffer's axes; `"2D"` and `"DN"` are merged ones."""
    return _with_order(_PHYSICAL[content], order)


@cache
def side_axes(content: str, order: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the axes of the (key, value) views; each is a reshape of the buffer, never a transpose."""
    key, value = CONTENTS[content]
    return _with_order(key, order), _with_order(value, order)


@dataclass(frozen=True)
class Extents:
    """The sizes that turn axis names into shapes. `vector` is x, the elements in 16 bytes; `value_size` the channels of a value.

    Where these are not the key's, only a layout whose sides are adjacent has a place for both: a row "2D" is a key and then its value, and
    a side is no reshape of the buffer.
    """

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_size: int
    vector: int
    value_size: int

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis by its name."""
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
            "2D": self.head_size + self.value_size,
            "DN": self.head_size * self.block_size,
        }

    def of(self, axis: str) -> int:
        return self.sizes[axis]

    def shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(map(self.sizes.__getitem__, axes))


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
    rows_of_two = extents.value_size != extents.head_size  # see Extents
    for side, axes in enumerate(side_axes(content, order)):
        axes = physical_axes(content, order) if rows_of_two else axes
        shape = extents.shape(axes)
        stride, step = {}, 1
        for axis, size in zip(reversed(axes), reversed(shape), strict=True):
            stride[axis] = step
            step *= size
        if rows_of_two:
            stride |= {"D": stride["2D"], "2": extents.head_size * stride["2D"]}
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
