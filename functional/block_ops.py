"""Moves of whole blocks: between layouts, out of and into a cache, and inside one. They carry bits; no value is rescaled."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .cache import CacheSpec, KVCache, cache_from_logical, cache_to_logical, check_cache, to_bits
from .derivatives import refuse_derivatives
from .errors import UnsupportedError, bad_type, bad_value, describe
from .integers import as_integers, narrow
from .pytrees import equal_by_value, register_for_export


def convert_cache(cache: KVCache, spec: CacheSpec) -> KVCache:
    """The same contents in another content and order.

    Args:
      cache: any cache; its leaves may be NumPy arrays (after `jax.device_get`).
      spec: a spec that differs from `cache.spec` in `content` and `order` alone.

    Returns:
      A cache of `spec` with the same codes and scales, on the default device or where `cache` is.

    Raises:
      ValueError: the specs differ elsewhere; a change of dtype is a new quantization, not a conversion.
      TypeError: not a cache, or not a spec.
    """
    cache = refuse_derivatives("convert_cache", cache)
    check_cache(cache)
    if not isinstance(spec, CacheSpec):
        bad_type("spec", spec, "a CacheSpec")
    if replace(cache.spec, content=spec.content, order=spec.order) != spec:
        bad_value("spec", spec, f"{cache.spec} in all but content and order")
    keys, values = jax.vmap(lambda layer: cache_to_logical(cache, layer))(jnp.arange(spec.num_layers))
    converted = cache_from_logical(spec, keys, values)
    return KVCache(converted.data, jnp.asarray(cache.k_scale), jnp.asarray(cache.v_scale), spec)


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["spec"])
@dataclass(frozen=True, eq=False)
class Blocks:
    """Some blocks of a cache, all layers, in the layout of their cache: what a KV connector sends and a swap keeps.

    Two are equal where their specs and bits are; they have no hash.

    Attributes:
      data: bits in `spec.storage_dtype`, shape `spec.shape` with as many blocks as were asked for (`spec.dtype` itself is accepted).
      spec: the cache's spec with that number of blocks.
    """

    data: Array
    spec: CacheSpec

    def __eq__(self, other: object) -> bool:
        return equal_by_value(self, other) if isinstance(other, Blocks) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal by value, and arrays have no hash


register_for_export(Blocks, ("spec",), CacheSpec.to_json, CacheSpec.from_json)


def gather_blocks(cache: KVCache, block_ids: Any) -> Blocks:
    """Copies blocks out of every layer of a cache.

    Args:
      cache: any cache; its leaves may be NumPy arrays.
      block_ids: [n] integers of any dtype, traced or not. An id outside [0, num_blocks) gives zeros.

    Returns:
      `Blocks` of n blocks, in the cache's layout.

    Raises:
      TypeError, ValueError: `block_ids` is not a vector of integers.
      UnsupportedError: their number is symbolic (`jax.export`).
    """
    cache = refuse_derivatives("gather_blocks", cache)
    spec = check_cache(cache)
    ids = _block_ids("block_ids", block_ids, spec)
    if not isinstance(ids.shape[0], int):
        raise UnsupportedError(f"block_ids is {describe(ids)}: the number of blocks is a static field of Blocks, and can't be symbolic")
    axis = spec.axes.index("B")
    taken = _take_blocks(cache, ids, axis)
    mask = jnp.expand_dims(_inside(ids, spec.num_blocks), [i for i in range(taken.ndim) if i != axis])
    return Blocks(jnp.where(mask, taken, jnp.zeros((), taken.dtype)), replace(spec, num_blocks=max(ids.shape[0], 1)))


def scatter_blocks(cache: KVCache, block_ids: Any, blocks: Blocks) -> KVCache:
    """Stores blocks in every layer of a cache. In place under donation.

    Args:
      cache: never changed, unless donated; its leaves may be NumPy arrays.
      block_ids: [n] distinct integers of any dtype, traced or not. An id outside [0, num_blocks) is skipped.
      blocks: n blocks of a cache of the same layout, dtype and sizes (see `gather_blocks`).

    Returns:
      The cache with `blocks` stored.

    Raises:
      ValueError: the blocks come from a cache of another layout, dtype or size, or are not as many as the ids.
      TypeError: `block_ids` is not a vector of integers, or `blocks` not `Blocks`.
    """
    cache, blocks = refuse_derivatives("scatter_blocks", (cache, blocks))
    spec = check_cache(cache)
    ids = _block_ids("block_ids", block_ids, spec)
    if not isinstance(blocks, Blocks):
        bad_type("blocks", blocks, "Blocks (see gather_blocks)")
    if replace(blocks.spec, num_blocks=spec.num_blocks) != spec:
        bad_value("blocks", blocks.spec, f"blocks of {spec}; convert_cache changes a layout")
    axis = spec.axes.index("B")
    if blocks.data.shape[axis] != ids.shape[0]:
        bad_value("block_ids", ids, f"as many as there are blocks ({blocks.data.shape[axis]})")
    return _with_blocks(cache, ids, to_bits(jnp.asarray(blocks.data), spec), axis)


def copy_blocks(cache: KVCache, src: Any, dst: Any) -> KVCache:
    """Copies block `src[i]` to block `dst[i]` in every layer; all reads come before all writes.

    In place under donation, but for a copy of the n blocks.

    Args:
      cache: never changed, unless donated; its leaves may be NumPy arrays.
      src, dst: [n] integers of any dtype, traced or not, those of `dst` distinct. A pair with an id outside [0, num_blocks) is skipped.

    Returns:
      The cache with the blocks copied.

    Raises:
      ValueError, TypeError: `src` or `dst` is not a vector of integers, or they differ in length.
    """
    cache = refuse_derivatives("copy_blocks", cache)
    spec = check_cache(cache)
    sources, targets = _block_ids("src", src, spec), _block_ids("dst", dst, spec)
    if sources.shape != targets.shape:
        bad_value("dst", targets, f"of the shape of src {list(sources.shape)}")
    axis = spec.axes.index("B")
    taken = _take_blocks(cache, sources, axis)
    return _with_blocks(cache, jnp.where(_inside(sources, spec.num_blocks), targets, -1), taken, axis)


def _block_ids(name: str, ids: Any, spec: CacheSpec) -> Int[Array, " n"]:
    """Ids as i32[n]: those inside [0, B) as they are, all others still outside it."""
    return narrow(as_integers(name, ids, 1), spec.num_blocks)


def _inside(ids: Int[Array, " n"], num_blocks: int) -> Bool[Array, " n"]:
    return (ids >= 0) & (ids < num_blocks)


def _take_blocks(cache: KVCache, ids: Int[Array, " n"], axis: int) -> Array:
    """The bits of the blocks of the ids; an id outside takes some other block. Bits, since XLA may change the payload of a NaN."""
    data = to_bits(jnp.asarray(cache.data), cache.spec)
    return jnp.take(data, jnp.clip(ids, 0, data.shape[axis] - 1), axis=axis, mode="clip")


def _with_blocks(cache: KVCache, ids: Int[Array, " n"], blocks: Array, axis: int) -> KVCache:
    """The cache, all leaves on a device, with the bits of blocks stored; ids outside are dropped."""
    cache = jax.tree.map(jnp.asarray, cache)
    data = to_bits(cache.data, cache.spec)
    num_blocks = data.shape[axis]
    ids = jnp.where(_inside(ids, num_blocks), ids, num_blocks)  # past the end is dropped; -1 would wrap to the last block
    index = (slice(None),) * axis + (ids,)
    data = data.at[index].set(blocks, mode="drop")
    return replace(cache, data=data if cache.data.dtype == data.dtype else jax.lax.bitcast_convert_type(data, cache.data.dtype))
