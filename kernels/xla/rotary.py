"""Rotary embedding in plain JAX: float32 throughout, one rounding at the end."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from purepage.functional.calls import RotaryCall
from purepage.kernels.xla.rounding import round_to


def cos_sin(table: Float[Array, "P R"], positions: Int[Array, "..."]) -> tuple[Float[Array, "... R/2"], Float[Array, "... R/2"]]:
    """float32 cos and sin of each position; NaN where there is no such row. (A plain index would clamp, and read -1 as the last row.)"""
    max_pos = table.shape[0]
    rows = table.at[jnp.where(positions < 0, max_pos, positions)].get(mode="fill", fill_value=jnp.nan).astype(jnp.float32)
    half = table.shape[1] // 2
    return rows[..., :half], rows[..., half:]


def rotate(x: Float[Array, "T H D"], cos: Float[Array, "T R/2"], sin: Float[Array, "T R/2"], *, is_neox: bool) -> Float[Array, "T H D"]:
    """`x` rotated in float32, and rounded to its dtype."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned, rest = jnp.split(x, (2 * half,), axis=-1)
    turned = turned.astype(jnp.float32)
    pairs = turned.reshape(*turned.shape[:-1], *((2, half) if is_neox else (half, 2)))
    axis = -2 if is_neox else -1
    first, second = jnp.take(pairs, 0, axis=axis), jnp.take(pairs, 1, axis=axis)
    both = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=axis)
    return jnp.concatenate([round_to(both, x.dtype).astype(x.dtype).reshape(turned.shape), rest], axis=-1)


@jax.jit
def rotary_embedding(call: RotaryCall) -> tuple[Float[Array, "T Hq D"], Float[Array, "T H D"]]:
    cos, sin = cos_sin(call.cos_sin_cache, call.positions)
    return rotate(call.query, cos, sin, is_neox=call.is_neox), rotate(call.key, cos, sin, is_neox=call.is_neox)
