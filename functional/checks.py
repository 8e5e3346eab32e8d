"""Checks of array arguments that several public functions share."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .cache import FP8_DTYPES, CacheSpec
from .config import check_float, check_vector, concrete, is_array, is_floating, real_number
from .debug import check_written_slots
from .errors import UnsupportedError, bad_type, bad_value, describe
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


def check_static_tokens(name: str, array: Array) -> None:
    """Attention is traced for one number of tokens: tiles and loops are sized by it. (`jax.export` can make it symbolic.)"""
    if not isinstance(array.shape[0], int):
        raise UnsupportedError(f"{name} is {describe(array)}: attention needs a static number of tokens, not a symbolic one")


def check_head_ratio(num_heads: int, spec_heads: int, name: str = "query") -> None:
    if num_heads == 0 or num_heads % spec_heads:
        bad_value(f"{name} heads", num_heads, f"a multiple of num_kv_heads ({spec_heads})")


def check_query(query: Any, spec: CacheSpec, *, fp8: bool = False) -> Array:
    array = check_tokens("query", query, None, spec.head_size, fp8=fp8)
    check_head_ratio(array.shape[1], spec.num_kv_heads)
    return array


def optional_vector(name: str, value: Any, query: Array, others: Any) -> Float[Array, " Hq"] | None:
    """`None`, or f32[Hq] of the query's heads, from a vector of that length or, inside `shard_map`, from the whole model's.

    Args:
      name: the argument, for the errors.
      value: `None`, or a vector of the heads of `query`, or of as many times more as the mesh axis has devices that the heads lie on.
      query: [T, Hq, D].
      others: arrays that are not divided by heads (the metadata): a mesh axis that they vary over is not the heads'.
    """
    if value is None:
        return None
    heads = query.shape[1]
    rule = f"None or an array of shape [num_heads] = [{heads}]"
    axes = mesh_axes_of_heads(query, others)
    check_vector(name, value, (heads, *(heads * size for size in axes.values())), rule)
    vector = jnp.asarray(value, jnp.float32)
    if vector.shape[0] == heads:
        return vector
    found = [axis for axis, size in axes.items() if heads * size == vector.shape[0]]
    if len(found) > 1:
        bad_value(name, value, f"{rule}, this shard's part: any of the mesh axes {', '.join(map(str, found))} may be the heads'")
    return lax.dynamic_slice_in_dim(vector, lax.axis_index(found[0]) * heads, heads)


def mesh_axes_of_heads(query: Array, others: Any) -> dict[Any, int]:
    """Sizes of the mesh axes, in `shard_map`, that the query's heads may be divided over; empty outside.

    These are the manual axes over which the query varies and no array of `others` does. Where `shard_map` does not keep track of that
    (`check_vma=False`), all manual axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = {axis: mesh.shape[axis] for axis in mesh.manual_axes if mesh.shape[axis] > 1}
    varying = varying_axes(query)
    if not varying:
        return manual if not any(map(varying_axes, jax.tree.leaves(others))) else {}
    fixed = frozenset().union(*map(varying_axes, jax.tree.leaves(others)))
    return {axis: size for axis, size in manual.items() if axis in varying - fixed}


def varying_axes(array: Any) -> frozenset:
    """The mesh axes that an array varies over inside `shard_map`."""
    kind = jax.typeof(array)
    manual = getattr(kind, "manual_axis_type", None)  # `vma` up to jax 0.9
    return frozenset(manual.varying if manual is not None else getattr(kind, "vma", ()))


def optional_scalar(name: str, value: Any) -> Float[Array, ""] | None:
    """`None`, or an f32 scalar from a float, a NumPy scalar, or an array of shape () or (1,); where it is concrete, normal and above 0."""
    if value is None:
        return None
    rule = "None or a real scalar (per tensor)"
    if is_array(value):
        if tuple(value.shape) not in ((), (1,)):
            bad_value(name, value, rule)
        if not (is_floating(value.dtype) or np.issubdtype(value.dtype, np.integer)):
            bad_type(name, value, rule)
        values = concrete(value)
    elif real_number(value) is None:
        bad_type(name, value, rule)
    else:
        values = np.asarray(real_number(value))
    if values is not None:
        check_float(name, values.reshape(()))
    return jnp.asarray(value, jnp.float32).reshape(())


def split_scale(scale: Any, head_size: int) -> tuple[float, Float[Array, ""] | None]:
    """A softmax scale as (static factor, traced factor): a number is static, an array is traced."""
    if scale is None:
        return head_size**-0.5, None
    rule = "None, a float or a real scalar array"
    if isinstance(scale, jax.Array):
        if scale.shape not in ((), (1,)):
            bad_value("scale", scale, rule)
        if not (is_floating(scale.dtype) or np.issubdtype(scale.dtype, np.integer)):
            bad_type("scale", scale, rule)
        return 1.0, jnp.asarray(scale, jnp.float32).reshape(())
    if real_number(scale) is None:
        bad_type("scale", scale, rule)
    return check_float("scale", scale, zero=True, negative=True, alternative="None or "), None


def check_bool(name: str, value: Any) -> bool:
    """A static bool; ints, text and traced values are refused."""
    if not isinstance(value, bool):
        bad_type(name, value, "a static bool")
    return value


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
    return narrow(check_written_slots(slot_mapping, spec), spec.num_slots)
