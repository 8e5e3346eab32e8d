"""Rounding that XLA must not undo."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_F16_SMALLEST_NORMAL = 2.0**-14
_F16_STEPS_PER_UNIT = 2.0**24


def round_to(x: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """float32 values rounded to nearest even in `dtype`, still as float32.

    A conversion to 16 bits and back is dropped by XLA's GPU compiler, which keeps the excess precision; `reduce_precision` stays. That
    flushes what is subnormal in float16, so these are rounded as multiples of their fixed step.
    """
    if dtype == jnp.float32:
        return x
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if dtype != jnp.float16:
        return rounded
    fine = lax.round(x * _F16_STEPS_PER_UNIT, lax.RoundingMethod.TO_NEAREST_EVEN) / _F16_STEPS_PER_UNIT
    return jnp.where(jnp.abs(x) < _F16_SMALLEST_NORMAL, fine, rounded)
