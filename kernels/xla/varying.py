"""Loop states inside `shard_map`."""

from typing import Any, TypeVar

import jax
from jax import lax

from purepage.functional.checks import varying_axes

Tree = TypeVar("Tree")


def vary_like(state: Tree, inputs: Any) -> Tree:
    """`state` marked as varying over every mesh axis that some array of `inputs` varies over.

    Inside `shard_map` a loop's state must have one type before and after its body; a constant starts out equal on all devices, and what
    the body makes of sharded inputs is not.
    """
    axes = frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(inputs)))
    return jax.tree.map(lambda leaf: _vary(leaf, tuple(sorted(axes - varying_axes(leaf), key=str))), state)


def _vary(array: jax.Array, axes: tuple) -> jax.Array:
    return lax.pcast(array, axes, to="varying") if axes else array
