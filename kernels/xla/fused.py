"""The fused writers in plain JAX: the same functions one after another, for XLA to fuse, so fused and unfused calls give the same bits."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from purepage.functional.cache import KVCache
from purepage.functional.calls import QkNormRopeUpdateCall, RopeUpdateCall, RotaryCall, UpdateCacheCall
from purepage.kernels.xla.rotary import cos_sin, rotary_embedding, rotate
from purepage.kernels.xla.rounding import round_to
from purepage.kernels.xla.writers import update_cache


@jax.jit
def rope_and_update_cache(call: RopeUpdateCall) -> tuple[Array, Array, KVCache]:
    query, key = rotary_embedding(
        RotaryCall(positions=call.positions, query=call.query, key=call.key, cos_sin_cache=call.cos_sin_cache, is_neox=call.is_neox)
    )
    return query, key, _write(call, key, call.value)


def _write(call: RopeUpdateCall | QkNormRopeUpdateCall, key: Array, value: Array) -> KVCache:
    return update_cache(UpdateCacheCall(cache=call.cache, key=key, value=value, slot_mapping=call.slot_mapping, layer=call.layer))


def rms_norm(x: Float[Array, "T H D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "T H D"]:
    """round(x * rsqrt(mean(x^2) + eps) * weight) over the whole head, in float32, rounded once to the dtype of `x`."""
    exact = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(exact * exact, axis=-1, keepdims=True) + eps)
    return round_to(exact * inverse * weight[None, None], x.dtype).astype(x.dtype)


def mrope_cos_sin(
    table: Float[Array, "P R"], positions: Int[Array, "3 T"], section: tuple[int, int, int], *, is_interleaved: bool
) -> tuple[Float[Array, "T R/2"], Float[Array, "T R/2"]]:
    """cos and sin of each token, every frequency from the row (time, height, width) that it belongs to."""
    frequency = jnp.arange(table.shape[1] // 2, dtype=jnp.int32)[None]
    t, h, w = section
    if is_interleaved:
        takes_h, takes_w = ((frequency % 3 == row) & (frequency < 3 * size) for row, size in ((1, h), (2, w)))
    else:
        takes_w = frequency >= t + h
        takes_h = (frequency >= t) & ~takes_w
    cos, sin = (jnp.where(takes_w, x[2], jnp.where(takes_h, x[1], x[0])) for x in cos_sin(table, positions))
    return cos, sin


@jax.jit
def qk_norm_rope_and_update_cache(call: QkNormRopeUpdateCall) -> tuple[Array, Array, Array, KVCache]:
    spec = call.cache.local_spec
    tokens, heads = call.qkv.shape[0], call.num_heads + spec.num_kv_heads
    rotated = heads * spec.head_size
    query, key = jnp.split(call.qkv[:, :rotated].reshape(tokens, heads, spec.head_size), (call.num_heads,), axis=1)
    value = call.qkv[:, rotated:].reshape(tokens, spec.num_kv_heads, spec.value_size)
    if call.mrope_section is None:
        cos, sin = cos_sin(call.cos_sin_cache, call.positions)
    else:
        cos, sin = mrope_cos_sin(call.cos_sin_cache, call.positions, call.mrope_section, is_interleaved=call.is_interleaved)
    query = rotate(rms_norm(query, call.q_weight, call.eps), cos, sin, is_neox=call.is_neox)
    key = rotate(rms_norm(key, call.k_weight, call.eps), cos, sin, is_neox=call.is_neox)
    return query, key, value, _write(call, key, value)


qk_norm_mrope_and_update_cache = qk_norm_rope_and_update_cache
