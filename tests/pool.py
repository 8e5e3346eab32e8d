"""Whole-pool checks of cache writers: a cache of random bits, and the bits that must be in it after a write."""

import jax.numpy as jnp
import numpy as np

import purepage as pp
from purepage.testing import reference_address, reference_update_cache


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def random_cache(spec, seed=0, **scales):
    """A cache of random bits: a slot that is touched by mistake shows, whatever is written."""
    data = np.random.default_rng(seed).integers(0, 256, (spec.nbytes,), np.uint8)
    blank = pp.init_cache(spec, **scales)
    return pp.KVCache(jnp.asarray(data.view(np.dtype(spec.storage_dtype)).reshape(spec.shape)), blank.k_scale, blank.v_scale, spec)


def expected_pool(cache, key, value, slots, layer):
    """The bits of the buffer after the write, element by element through the hand-written addresses."""
    spec = cache.spec
    pool = np.array(bits(cache.data)).reshape(-1)
    sizes = spec.head_size, spec.value_size
    blanks = [np.zeros((spec.num_blocks, spec.block_size, spec.num_kv_heads, size), spec.dtype) for size in sizes]
    scales = {"k_scale": np.asarray(cache.k_scale)[layer], "v_scale": np.asarray(cache.v_scale)[layer]} if spec.is_quantized else {}
    sides = reference_update_cache(*blanks, key, value, slots, **scales)
    live = slots[(slots >= 0) & (slots < spec.num_slots)].astype(np.int64)
    for side, stored in enumerate(sides):
        place = {
            "layer": layer,
            "block": (live // spec.block_size)[:, None, None],
            "head": np.arange(spec.num_kv_heads)[None, :, None],
            "token": (live % spec.block_size)[:, None, None],
            "dim": np.arange(sizes[side])[None, None, :],
        }
        address = _address_of_two_sizes(spec, side, **place) if sizes[0] != sizes[1] else _address(spec, side, **place)
        pool[address] = bits(stored[live // spec.block_size, live % spec.block_size])
    return pool.reshape(spec.shape)


def _address(spec, side, **place):
    shape = {name: getattr(spec, name) for name in ("num_blocks", "num_kv_heads", "block_size", "head_size")}
    return reference_address(spec.content, spec.order, **shape, itemsize=spec.dtype.itemsize, side=side, **place)


def _address_of_two_sizes(spec, side, *, layer, block, head, token, dim):
    """A packed row is a key and then its value (docs/semantics.md, Layouts)."""
    blocks, heads = spec.num_blocks, spec.num_kv_heads
    outer = (layer * blocks + block) * heads + head if spec.order == "LBHNC" else (layer * heads + head) * blocks + block
    return (outer * spec.block_size + token) * (spec.head_size + spec.value_size) + side * spec.head_size + dim
