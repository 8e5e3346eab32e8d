"""Checks of array arguments that several public doors share."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from .cache import FP8_DTYPES, CacheSpec
from .config import is_array
from .errors import bad_type, bad_value
from .integers import narrow

MODEL_DTYPES = tuple(jnp.dtype(name) for name in ("float32", "float16", "bfloat16"))


def check_tokens(name: str, array: Any, heads: int | None, head_size: int | None, *, fp8: bool = False) -> Array:
    """A `[T, heads, head_size]` array of a model dtype (or fp8 where allowed); `None` sizes are free."""
    if not is_array(array) or len(array.shape) != 3:
        bad_value(name, array, "an array of shape [tokens, heads, head_size]")
    allowed = MODEL_DTYPES + (FP8_DTYPES if fp8 else ())
    if jnp.dtype(array.dtype) not in allowed:
        bad_type(name, array, f"of dtype {', '.join(d.name for d in allowed)}")
    if heads is not None and array.shape[1] != heads:
        bad_value(name, array, f"of {heads} heads")
    if head_size is not None and array.shape[2] != head_size:
        bad_value(name, array, f"of head_size {head_size}")
    return jnp.asarray(array)


def check_head_ratio(num_heads: int, spec_heads: int, name: str = "query") -> None:
    if num_heads == 0 or num_heads % spec_heads:
        bad_value(f"{name} heads", num_heads, f"a multiple of num_kv_heads ({spec_heads})")


def check_query(query: Any, spec: CacheSpec, *, fp8: bool = False) -> Array:
    array = check_tokens("query", query, None, spec.head_size, fp8=fp8)
    check_head_ratio(array.shape[1], spec.num_kv_heads)
    return array


def optional_vector(name: str, value: Any, length: int) -> Float[Array, " n"] | None:
    """`None`, or f32[length] from anything of that shape."""
    if value is None:
        return None
    if tuple(np.shape(value)) != (length,):
        bad_value(name, value, f"None or an array of shape [num_heads] = [{length}]")
    return jnp.asarray(value, jnp.float32)


def optional_scalar(name: str, value: Any) -> Float[Array, ""] | None:
    """`None`, or an f32 scalar from a float, a NumPy scalar, or an array of shape () or (1,); where it is concrete, finite and above 0."""
    if value is None:
        return None
    if tuple(np.shape(value)) not in ((), (1,)):
        bad_value(name, value, "a scalar (per tensor)")
    if not isinstance(value, Tracer):
        number = float(np.asarray(value, np.float32).reshape(()))
        if not math.isfinite(number) or number <= 0:
            bad_value(name, value, "finite and above 0")
    return jnp.asarray(value, jnp.float32).reshape(())


def split_scale(scale: Any, head_size: int) -> tuple[float, Float[Array, ""] | None]:
    """A softmax scale as (static factor, traced factor): a number is static, an array is traced."""
    if scale is None:
        return head_size**-0.5, None
    if isinstance(scale, jax.Array):
        if scale.shape not in ((), (1,)):
            bad_value("scale", scale, "None, a float or a scalar array")
        return 1.0, jnp.asarray(scale, jnp.float32).reshape(())
    try:
        number = float(scale)
    except (TypeError, ValueError):
        bad_type("scale", scale, "None, a float or a scalar array")
    if not math.isfinite(number):
        bad_value("scale", scale, "finite")
    return number, None


def product(*factors: Float[Array, ""] | None) -> Float[Array, ""] | None:
    given = [factor for factor in factors if factor is not None]
    return None if not given else math.prod(given[1:], start=given[0])


def check_slots(slot_mapping: Any, num_tokens: int, spec: CacheSpec) -> Int[Array, " T"]:
    """Slots of at most `num_tokens` tokens as i32; a slot outside the cache stays outside, however wide its integer is."""
    if not is_array(slot_mapping) or len(slot_mapping.shape) != 1:
        bad_value("slot_mapping", slot_mapping, "an integer array of shape [T]")
    if not np.issubdtype(slot_mapping.dtype, np.integer):
        bad_type("slot_mapping", slot_mapping, "of an integer dtype")
    if slot_mapping.shape[0] > num_tokens:
        bad_value("slot_mapping", slot_mapping, f"at most as long as there are tokens ({num_tokens})")
    return narrow(slot_mapping, spec.num_slots)
