"""How AITER's operators see our cache: pages of their own inside the one buffer, found by strides. Nothing is copied.

AITER takes a key cache and a value cache `[pages, page size, H, D]` with any strides. The layer may be traced, so a view can't start at it:
a *unit* is a page whose first elements may start anywhere that is a multiple of the view's first stride, and a block of a layer is then a
number of units. The page size is ours to choose, any divisor of the block size:

    unit of token n of block b of layer l = l * layer + b * block + n // page

so that operators that assert on some block sizes (48) are given others, and kernels that don't mask a tile of exactly one page are given
smaller pages.

Writers also take x-packed keys with plain or interleaved values, as whole contiguous blocks: those of all layers and both sides are then
numbered through.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...functional.cache import CacheSpec
from ...functional.calls import PagedAttentionCall
from ...functional.layout import layout_of
from ...functional.metadata import AttentionMetadata
from ...kernels.xla.attention import needs_missing_block

INT32_MAX = 2**31 - 1
TILE = 64
"""Most keys that a kernel of AITER's loads at once."""


@dataclass(frozen=True)
class Pages:
    """Pages of `page` tokens over the buffer of a cache whose tokens are rows; strides in elements."""

    page: int
    token: int
    head: int
    offsets: tuple[int, int]
    layer_units: int
    block_units: int
    count: int
    heads: int
    head_size: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.count, self.page, self.heads, self.head_size

    @property
    def strides(self) -> tuple[int, int, int, int]:
        return self.page * self.token, self.token, self.head, 1

    def views(self, buffer: Any, dtype: Any) -> tuple[Any, Any]:
        """(key, value) tensors over a torch buffer that holds the cache's bits."""
        flat = buffer.view(dtype).view(-1)
        key, value = (flat.as_strided(self.shape, self.strides, flat.storage_offset() + offset) for offset in self.offsets)
        return key, value

    def units(self, blocks: Int[Array, "..."], layer: Int[Array, ""]) -> Int[Array, "..."]:
        """First unit of each block of a layer."""
        return layer.astype(jnp.int32) * self.layer_units + blocks.astype(jnp.int32) * self.block_units


@dataclass(frozen=True)
class Blocks:
    """Whole blocks over the buffer of a cache whose keys are vectors of channels."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    offsets: tuple[int, int]
    layer_blocks: int
    block_step: int

    def views(self, buffer: Any, dtype: Any) -> tuple[Any, Any]:
        """(key, value) tensors over a torch buffer that holds the cache's bits."""
        flat = buffer.view(dtype).view(-1)
        key, value = (flat[at:][: prod(shape)].view(shape) for shape, at in zip(self.shapes, self.offsets, strict=True))
        return key, value


def whole_blocks(spec: CacheSpec) -> Blocks:
    """The view of a cache whose sides are x-packed. One side's block is as long as the other's."""
    key, value = spec.side_strides
    heads, size, tokens, x = spec.num_kv_heads, spec.head_size, spec.block_size, spec.vector
    block = heads * size * tokens
    count = (spec.size - value.offset) // block
    innermost = layout_of(spec.content).value_has_tokens_innermost
    values = (heads, size, tokens) if innermost else (heads, tokens // x, size, x)
    return Blocks(
        shapes=((count, heads, size // x, tokens, x), (count, *values)),
        offsets=(key.offset, value.offset),
        layer_blocks=key.layer // block,
        block_step=key.block // block,
    )


def sides(spec: CacheSpec, slots: Int[Array, " T"], layer: Int[Array, ""]) -> tuple[Pages | Blocks, Int[Array, " T"]]:
    """(how a writer sees a cache, its slots there; -1 for every slot that is skipped)."""
    block, n = jnp.clip(slots // spec.block_size, 0, spec.num_blocks - 1), slots % spec.block_size
    if layout_of(spec.content).tokens_are_rows:
        view = pages(spec, 1)
        physical = view.units(block, layer) + n
    else:
        view = whole_blocks(spec)
        physical = (layer * view.layer_blocks + block * view.block_step) * spec.block_size + n
    return view, jnp.where((slots >= 0) & (slots < spec.num_slots), physical, -1).astype(jnp.int32)


def pages(spec: CacheSpec, page: int) -> Pages:
    """The view of a cache as pages of `page` tokens, which must divide the block size."""
    key, value = spec.side_strides
    unit = page * key.token_outer
    last = (page - 1) * key.token_outer + (spec.num_kv_heads - 1) * key.head + spec.head_size
    return Pages(
        page=page,
        token=key.token_outer,
        head=key.head,
        offsets=(key.offset, value.offset),
        layer_units=key.layer // unit,
        block_units=key.block // unit,
        count=(spec.size - max(key.offset, value.offset) - last) // unit + 1,
        heads=spec.num_kv_heads,
        head_size=spec.head_size,
    )


def native_page(spec: CacheSpec) -> int:
    """The largest page that AITER's own choice of tiles accepts: a power of two, no longer than a tile."""
    return min(spec.block_size & -spec.block_size, TILE)


def why_no_pages(spec: CacheSpec, page: int) -> str | None:
    """Why a cache can't be seen as pages; None where it can."""
    if not layout_of(spec.content).tokens_are_rows:
        return f"reads and writes caches whose tokens are rows, not {spec.content!r} (cache.spec.content)"
    if pages(spec, page).count > INT32_MAX:
        return f"a cache of {spec.size} elements has pages past 2**31, and its tables are int32"
    return None


def page_table(table: Int[Array, "S M"], layer: Int[Array, ""], view: Pages, spec: CacheSpec, *, multiple: int) -> Int[Array, "S P"]:
    """A block table as one of pages; every entry is a valid page, and rows are padded to a multiple of `multiple` pages: the kernels load
    whole tiles of a row.
    """
    first = view.units(jnp.clip(table, 0, spec.num_blocks - 1), layer)
    split = spec.block_size // view.page
    rows = (first[:, :, None] + jnp.arange(split, dtype=jnp.int32)).reshape(table.shape[0], -1)
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple)), mode="edge" if rows.shape[1] else "constant")


def window_table(
    table: Int[Array, "S M"], layer: Int[Array, ""], view: Pages, spec: CacheSpec, *, first: Int[Array, " S"], width: int
) -> Int[Array, "S P"]:
    """Pages of one token: entry j of a row is the token at position `first + j`. What lies before no kernel can touch."""
    positions = first[:, None] + jnp.arange(width, dtype=jnp.int32)
    block = jnp.clip(positions // spec.block_size, 0, table.shape[1] - 1)
    physical = jnp.clip(jnp.take_along_axis(table, block, axis=1), 0, spec.num_blocks - 1)
    return view.units(physical, layer) + positions % spec.block_size


def lost_sequences(call: PagedAttentionCall) -> Bool[Array, " S"]:
    """Sequences with a visible position in a block outside the cache: their rows are NaN. AITER reads another block there."""
    metadata, spec = call.metadata, call.cache.local_spec
    query_lens = metadata.query_start_loc[1:] - metadata.query_start_loc[:-1]
    return needs_missing_block(
        metadata.query_start_loc,
        metadata.seq_lens - query_lens,
        metadata.seq_lens,
        metadata.block_table,
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        sliding_window=call.sliding_window,
        causal=True,
    )


def with_lost_rows(out: Float[Array, "T Hq D"], call: PagedAttentionCall) -> Float[Array, "T Hq D"]:
    """`out` with 0 for tokens that see no key, and NaN for those of `lost_sequences`."""
    sequence, visible = token_sequences(call.metadata, call.query.shape[0])
    lost = lost_sequences(call)[sequence]
    out = jnp.where(lost[:, None, None], jnp.asarray(jnp.nan, out.dtype), out)
    return jnp.where(visible[:, None, None], out, jnp.zeros((), out.dtype))


def token_sequences(metadata: AttentionMetadata, tokens: int) -> tuple[Int[Array, " T"], Bool[Array, " T"]]:
    """(sequence of each token, whether the token sees any key)."""
    starts, lengths = metadata.query_start_loc, metadata.seq_lens
    token = jnp.arange(tokens, dtype=starts.dtype)
    sequence = jnp.clip(jnp.searchsorted(starts, token, side="right") - 1, 0, lengths.shape[0] - 1)
    position = lengths[sequence] - (starts[sequence + 1] - token)
    return sequence, (token < starts[-1]) & (position >= 0)
