"""Moves of whole blocks: between layouts, out of and into a cache, and inside one. They carry bits; no value is rescaled."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .cache import CacheSpec, KVCache, cache_from_logical, cache_to_logical, check_cache
from .derivatives import refuse_derivatives
from .errors import bad_type, bad_value
from .integers import as_integers, narrow


def convert_cache(cache: KVCache, spec: CacheSpec) -> KVCache:
    """The same contents in another content and order.

    Args:
      cache: any cache.
      spec: a spec that differs from `cache.spec` in `content` and `order` alone.

    Raises:
      ValueError: the specs differ elsewhere; a change of dtype is a new quantization, not a conversion.
    """
    cache = refuse_derivatives("convert_cache", cache)
    check_cache(cache)
    if not isinstance(spec, CacheSpec):
        bad_type("spec", spec, "a CacheSpec")
    if replace(cache.spec, content=spec.content, order=spec.order) != spec:
        bad_value("spec", spec, f"{cache.spec} in all but content and order")
    keys, values = jax.vmap(lambda layer: cache_to_logical(cache, layer))(jnp.arange(spec.num_layers))
    converted = cache_from_logical(spec, keys, values)
    return KVCache(converted.data, cache.k_scale, cache.v_scale, spec)


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["spec"])
@dataclass(frozen=True)
class Blocks:
    """Some blocks of a cache, all layers, in the layout of their cache: what a KV connector sends and a swap keeps.

    Attributes:
      data: the buffer of `gather_blocks`, shape `spec.shape` with as many blocks as were asked for.
      spec: the cache's spec with that number of blocks.
    """

    data: Array
    spec: CacheSpec


def _block_ids(name: str, ids: Any, spec: CacheSpec) -> Int[Array, " n"]:
    """Ids as i32[n], those inside [0, B) as they are and all others outside it still."""
    return narrow(as_integers(name, ids, 1), spec.num_blocks)


def gather_blocks(cache: KVCache, block_ids: Any) -> Blocks:
    """The blocks `block_ids` i32[n] of every layer. Ids outside [0, B) give zeros."""
    cache = refuse_derivatives("gather_blocks", cache)
    spec = check_cache(cache)
    ids = _block_ids("block_ids", block_ids, spec)
    axis = spec.axes.index("B")
    inside = (ids >= 0) & (ids < spec.num_blocks)
    taken = jnp.take(cache.data, jnp.clip(ids, 0, spec.num_blocks - 1), axis=axis)
    mask = inside.reshape([-1 if i == axis else 1 for i in range(taken.ndim)])
    return Blocks(jnp.where(mask, taken, jnp.zeros((), taken.dtype)), replace(spec, num_blocks=max(ids.shape[0], 1)))


def scatter_blocks(cache: KVCache, block_ids: Any, blocks: Blocks) -> KVCache:
    """`cache` with `blocks` stored at `block_ids` i32[n] of every layer; ids outside [0, B) are skipped. In place under donation.

    Raises:
      ValueError: the blocks come from a cache of another layout, dtype or size, or are not as many as the ids.
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
    return replace(cache, data=_store_blocks(cache.data, ids, blocks.data, axis))


def copy_blocks(cache: KVCache, src: Any, dst: Any) -> KVCache:
    """`cache` with block `src[i]` copied to `dst[i]`, i32[n] each, in every layer; all reads come before all writes.

    A pair with an id outside [0, B) is skipped. In place under donation, but for the copied blocks.
    """
    cache = refuse_derivatives("copy_blocks", cache)
    spec = check_cache(cache)
    sources, targets = _block_ids("src", src, spec), _block_ids("dst", dst, spec)
    if sources.shape != targets.shape:
        bad_value("dst", targets, f"of the shape of src {list(sources.shape)}")
    axis = spec.axes.index("B")
    targets = jnp.where((sources >= 0) & (sources < spec.num_blocks), targets, -1)
    taken = jnp.take(cache.data, jnp.clip(sources, 0, spec.num_blocks - 1), axis=axis)
    return replace(cache, data=_store_blocks(cache.data, targets, taken, axis))


def _store_blocks(data: Array, ids: Array, blocks: Array, axis: int) -> Array:
    num_blocks = data.shape[axis]
    ids = jnp.where((ids >= 0) & (ids < num_blocks), ids, num_blocks)  # past the end is dropped; -1 would wrap to the last block
    index = (slice(None),) * axis + (ids,)
    return data.at[index].set(blocks.astype(data.dtype), mode="drop")
