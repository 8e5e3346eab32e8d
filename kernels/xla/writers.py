"""The cache writer in plain JAX: one scatter of bits for each side, or one for both where key and value lie alike.

The scatter's indices are per axis (layer, block, side, token), so no flat index of the cache is ever formed and none can overflow.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int
from purepage.functional.cache import CacheSpec, KVCache, to_bits
from purepage.functional.calls import UpdateCacheCall
from purepage.functional.fp8 import quantize


def stored_bits(values: Float[Array, "T H D"], scale: Float[Array, "..."], layer: Int[Array, ""], spec: CacheSpec) -> Array:
    """What a cache holds for these values: bits of their codes, or of the values cast. `scale`: [L] or [L, H]."""
    if not spec.is_quantized:
        return to_bits(values.astype(spec.dtype), spec)
    of_layer = lax.dynamic_index_in_dim(scale, layer, keepdims=False)
    return to_bits(quantize(values, of_layer[:, None] if of_layer.ndim else of_layer, spec.dtype), spec)


def scatter(data: Array, sides: tuple[Array, Array], slots: Int[Array, " T"], layer: Int[Array, ""], spec: CacheSpec) -> Array:
    """`data` with the (key, value) bits [T, H, D] of each token in its slot; tokens whose slot is not in the cache are dropped."""
    # -1 would wrap to the last block; the block after the last is dropped. Slots past the cache have a block past it already.
    token = slots % spec.block_size
    at = {"L": layer, "B": jnp.where(slots < 0, spec.num_blocks, slots // spec.block_size), "N": token}
    split = {"N/x": token // spec.vector, "x": token % spec.vector}
    key_axes, value_axes = spec.side_axes
    if key_axes == value_axes:
        kept = [axis for axis in key_axes if axis not in at]
        rows = jnp.stack([_as_it_lies(side, kept, spec) for side in sides], axis=1 + kept.index("2"))
        return _set(data, rows, key_axes, at, spec)
    for side, (bits, axes) in enumerate(zip(sides, spec.side_axes, strict=True)):
        where = {**at, "2": side, **(split if "N/x" in axes else {})}
        kept = [axis for axis in axes if axis not in where]
        data = _set(data, _as_it_lies(bits, kept, spec), axes, where, spec)
    return data


def _as_it_lies(bits: Array, kept: list[str], spec: CacheSpec) -> Array:
    """[T, H, D] as [T, the axes that no index takes, without the side's]. Heads come before channels in every layout."""
    return bits.reshape(bits.shape[0], *(spec.extents.of(axis) for axis in kept if axis != "2"))


def _set(data: Array, rows: Array, axes: tuple[str, ...], at: dict[str, Array | int], spec: CacheSpec) -> Array:
    view = data.reshape(spec.extents.shape(axes))
    index = tuple(at.get(axis, slice(None)) for axis in axes)
    return view.at[index].set(rows, mode="drop").reshape(data.shape)


@jax.jit
def update_cache(call: UpdateCacheCall) -> KVCache:
    cache, spec = call.cache, call.cache.local_spec
    sides = (
        stored_bits(call.key, cache.k_scale, call.layer, spec),
        stored_bits(call.value, cache.v_scale, call.layer, spec),
    )
    data = scatter(to_bits(cache.data, spec), sides, call.slot_mapping, call.layer, spec)
    if cache.data.dtype != data.dtype:
        data = lax.bitcast_convert_type(data, cache.data.dtype)
    return KVCache(data, cache.k_scale, cache.v_scale, cache.spec)
