"""The cache writer in plain JAX: one scatter of bits for each side, or one for both where key and value lie alike.

The scatter's indices are per axis of the buffer as it is, so no flat index is ever formed and none can overflow, and the buffer is never
reshaped: where an axis has size 1 (one KV head a device), XLA gives a reshape another layout, and copies the cache to undo it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
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


def divided_like(bits: Array, data: Array, spec: CacheSpec) -> Array:
    """Bits [T, H, D] with their heads over the mesh axes of explicit sharding that the cache's heads are over.

    A fused writer makes them from heads that are packed in one axis, which is not divided.
    """
    heads = jax.typeof(data).sharding.spec[spec.axes.index("H")]
    if heads is None or jax.typeof(bits).sharding.spec[1] == heads:
        return bits
    return jax.sharding.reshard(bits, PartitionSpec(None, heads, None))


def scatter(data: Array, sides: tuple[Array, Array], slots: Int[Array, " T"], layer: Int[Array, ""], spec: CacheSpec) -> Array:
    """`data` with the (key, value) bits [T, H, D] of each token in its slot; tokens whose slot is not in the cache are dropped."""
    sides = divided_like(sides[0], data, spec), divided_like(sides[1], data, spec)
    slots = slots[:, None]
    token = slots % spec.block_size
    # A slot outside the cache has a block outside it (division floors), and a window outside is dropped: unlike `.at[]`, nothing wraps.
    at = {"L": layer, "B": slots // spec.block_size}
    if "N" in spec.axes:  # a token's channels lie in one piece, its key beside or before its value
        rows = [axis for axis in spec.axes if axis not in ("L", "B", "N")]
        both = jnp.concatenate(sides, axis=-1) if "2D" in rows else jnp.stack(sides, axis=1 + rows.index("2"))
        return _set(data, both[:, None], {**at, "N": token}, spec)
    for side, (bits, lie) in enumerate(zip(sides, spec.side_strides, strict=True)):
        pieces = spec.head_size // lie.d_vector
        start = (
            token // lie.n_vector * lie.token_outer
            + token % lie.n_vector * lie.token
            + jnp.arange(pieces, dtype=jnp.int32)[None] * lie.dim_outer
        )
        rows = bits.reshape(slots.shape[0], spec.num_kv_heads, pieces, lie.d_vector).swapaxes(1, 2)
        data = _set(data, rows, {**at, "2": side, "DN": start}, spec)
    return data


def _set(data: Array, rows: Array, at: dict[str, Array | int], spec: CacheSpec) -> Array:
    """`data` with windows set. `at`: where each starts, [T, pieces]; `rows`: [T, pieces, the axes that `at` lacks, and the piece of DN]."""
    axes = spec.axes
    indexed = [i for i, axis in enumerate(axes) if axis in at]
    starts = jnp.stack(jnp.broadcast_arrays(*(jnp.asarray(at[axes[i]], jnp.int32) for i in indexed)), axis=-1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(2, rows.ndim)),
        inserted_window_dims=tuple(i for i in indexed if axes[i] != "DN"),
        scatter_dims_to_operand_dims=tuple(indexed),
    )
    return lax.scatter(data, starts, rows, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)


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
