"""What every pytree of the library has beside its leaves: equality by value, and a form for `jax.export`."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import export
from jax.core import Tracer


def equal_by_value(left: Any, right: Any) -> bool:
    """Whether two pytrees have one structure, equal static fields, and leaves of equal dtypes, shapes and bits.

    A NaN equals a NaN of the same bits. Arrays on a device are copied to the host, which waits for them.

    Raises:
      TypeError: a leaf is traced and not the same object on both sides: it has no value yet.
    """
    left_leaves, left_tree = jax.tree.flatten(left)
    right_leaves, right_tree = jax.tree.flatten(right)
    if left_tree != right_tree:
        return False
    return all(_equal_leaves(a, b, type(left).__name__) for a, b in zip(left_leaves, right_leaves, strict=True))


def _equal_leaves(left: Any, right: Any, owner: str) -> bool:
    if left is right:
        return True
    if isinstance(left, Tracer) or isinstance(right, Tracer):
        raise TypeError(f"== of two {owner} has no value under tracing: compare their arrays with jnp.array_equal")
    if isinstance(left, jax.ShapeDtypeStruct) or isinstance(right, jax.ShapeDtypeStruct):
        return bool(left == right)
    left, right = np.asarray(left), np.asarray(right)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(np.array_equal(_bits(left), _bits(right)))


def _bits(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "iub" else np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def register_for_export(
    kind: type,
    static_fields: tuple[str, ...],
    to_json: Callable[[Any], Any] = lambda value: value,
    from_json: Callable[[Any], Any] = lambda v: v,
) -> None:
    """Lets `jax.export` serialise functions whose arguments or results hold a `kind`.

    The name in the file is "purepage." and the class's name, the static fields are one JSON object. Another process reads it, and so does a
    later version that has added a field with a default.

    Args:
      kind: a dataclass that is registered as a pytree with these static fields, in this order.
      static_fields: names of the static fields.
      to_json, from_json: a static field's value as what JSON holds, and back.
    """

    def serialize(values: Any) -> bytes:
        return json.dumps({name: to_json(value) for name, value in zip(static_fields, values, strict=True)}).encode()

    def deserialize(text: bytes) -> tuple[Any, ...]:
        found = json.loads(text)
        return tuple(from_json(found[name]) if name in found else kind.__dataclass_fields__[name].default for name in static_fields)

    export.register_pytree_node_serialization(
        kind, serialized_name=f"purepage.{kind.__name__}", serialize_auxdata=serialize, deserialize_auxdata=deserialize
    )
