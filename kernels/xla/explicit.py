"""Meshes of Explicit axes: results whose shardings follow from the arguments', around code that leaves its shardings to XLA.

In Explicit mode every intermediate value has a sharding in its type, and the states of a loop must keep theirs. Attention's loops are
written without shardings; XLA's partitioner splits them over the heads as it does for Auto axes, and moves no cache.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, auto_axes


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """The mesh with Explicit axes that some array of `tree` is sharded over; None where there is none."""
    for leaf in jax.tree.leaves(tree):
        mesh = jax.typeof(leaf).sharding.mesh
        if mesh.explicit_axes:
            return mesh
    return None


def axis_sharding(array: Any, axis: int) -> Any:
    """The mesh axes that an axis of `array` is sharded over; None where it is replicated, or not of an Explicit mesh."""
    spec = jax.typeof(array).sharding.spec
    return spec[axis] if axis < len(spec) else None


def with_explicit_results(function: Callable[..., Any], arguments: tuple[Any, ...], specs: Callable[[], Any]) -> Any:
    """`function(*arguments)`, whose body XLA shards; under a mesh of Explicit axes the results have the shardings `specs()`.

    Args:
      function: a function of pytrees of arrays.
      arguments: its arguments.
      specs: makes a `PartitionSpec` for each result, as a pytree like the results; called under an Explicit mesh alone.
    """
    mesh = explicit_mesh(arguments)
    if mesh is None:
        return function(*arguments)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(), is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    return auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)(*arguments)
