"""Integers that address the cache or a sequence: slots, block ids, table entries, positions, lengths.

Implementations count in int32. Without 64-bit mode JAX keeps the low 32 bits of a wider integer, so 2**32 + k would become k, which is the
slot of another sequence. Every such integer is therefore compared in its own width here, before its width changes.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.errors import JAXTypeError
from jaxtyping import Array, Int

from .config import is_array
from .errors import bad_type, bad_value

INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)


def as_integers(name: str, values: Any, ndim: int) -> Any:
    """`values` as an array of `ndim` dimensions in its own width: a JAX array as it is, everything else as a NumPy array.

    Args:
      name: the argument's name, for the error.
      values: an array or nested sequences of integers. Python integers may have any size that int64 or uint64 holds.
      ndim: the number of dimensions.

    Returns:
      A `jax.Array` (traced or not) or a `numpy.ndarray`, of an integer dtype. An empty sequence is int64.

    Raises:
      TypeError: not an array, or not of an integer dtype; booleans are refused.
      ValueError: another number of dimensions.
    """
    array = values if is_array(values) else _from_sequence(name, values, ndim)
    if not is_array(values) and array.size == 0:
        array = array.astype(np.int64)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        bad_type(name, values, _rule(ndim))
    if array.ndim != ndim:
        bad_value(name, array, _rule(ndim))
    return array


def _rule(ndim: int) -> str:
    return f"integers in {ndim} dimension{'s' if ndim != 1 else ''}"


def _from_sequence(name: str, values: Any, ndim: int) -> Any:
    try:
        return np.asarray(values)
    except JAXTypeError:  # a sequence that holds traced scalars
        return jnp.asarray(values)
    except Exception:
        bad_type(name, values, _rule(ndim))


def narrow(values: Any, limit: int) -> Int[Array, "..."]:
    """Indices into `limit` places as int32: an index inside [0, limit) stays itself, one outside stays outside.

    Args:
      values: integers of any dtype, NumPy or JAX, traced or not.
      limit: the number of places, static. Places past 2**31 can't be addressed and count as outside.

    Returns:
      i32 of the same shape. An index that int32 can't hold becomes -1.
    """
    top = min(limit, INT32_MAX + 1)
    if isinstance(values, np.ndarray):
        inside = (values >= 0) & (values < top)
        return jnp.asarray(np.where(inside, np.where(inside, values, 0).astype(np.int32), np.int32(-1)))
    if not _is_wide(values.dtype):
        return _int32(values)
    inside = values < np.asarray(top, values.dtype)
    if jnp.issubdtype(values.dtype, jnp.signedinteger):
        inside &= values >= np.asarray(0, values.dtype)
    return jnp.where(inside, values.astype(jnp.int32), -1)


def saturate(values: Any) -> Int[Array, "..."]:
    """Lengths and offsets as int32; one that int32 can't hold becomes the int32 nearest to it.

    Args:
      values: integers of any dtype, NumPy or JAX, traced or not.

    Returns:
      i32 of the same shape.
    """
    if isinstance(values, np.ndarray):
        low = INT32_MIN if np.issubdtype(values.dtype, np.signedinteger) else 0
        return jnp.asarray(np.clip(values.astype(np.int64) if values.dtype.itemsize < 8 else values, low, INT32_MAX).astype(np.int32))
    if not _is_wide(values.dtype):
        return _int32(values)
    low = INT32_MIN if jnp.issubdtype(values.dtype, jnp.signedinteger) else 0
    return jnp.clip(values, np.asarray(low, values.dtype), np.asarray(INT32_MAX, values.dtype)).astype(jnp.int32)


def _int32(values: Any) -> Int[Array, "..."]:
    return values if values.dtype == jnp.int32 else values.astype(jnp.int32)  # `astype` to the same dtype takes JAX 20 us


def _is_wide(dtype: Any) -> bool:
    """Whether the dtype has values that int32 has not."""
    return jnp.iinfo(dtype).max > INT32_MAX
