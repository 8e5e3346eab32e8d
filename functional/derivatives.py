"""Refusal of derivatives: the functions of this package compute what a server does, and have no gradients.

Without a refusal a gradient would be 0 where a cache keeps bits as integers, and an error about loops elsewhere.
"""

from functools import partial
from typing import Any, TypeVar

import jax
from jax.core import Tracer

from .config import is_floating
from .errors import UnsupportedError

Tree = TypeVar("Tree")


def refuse_derivatives(operation: str, tree: Tree) -> Tree:
    """`tree` itself, but a derivative of what is computed from its traced floats is an error when it is traced.

    Reverse and forward mode (`jax.grad`, `vjp`, `linearize`, `jvp`) are refused alike. Arrays behind `lax.stop_gradient`, or that do not
    depend on what is differentiated, pass. The compiled program is the same as without this call.

    Args:
      operation: the public function, for the error.
      tree: a pytree of its arguments.

    Raises:
      UnsupportedError: when a derivative with respect to a float of `tree` is traced.
    """
    leaves, structure = jax.tree.flatten(tree)
    traced = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tracer) and is_floating(leaf.dtype)]
    if not traced:
        return tree
    for place, leaf in zip(traced, _identity(operation, [leaves[place] for place in traced]), strict=True):
        leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _identity(operation: str, arrays: list[Any]) -> list[Any]:
    return arrays


@_identity.defjvp
def _refuse(operation: str, primals: Any, tangents: Any) -> Any:
    raise UnsupportedError(
        f"{operation} has no derivatives: neither jax.grad nor jax.jvp can go through it; lax.stop_gradient on its arguments leaves it out"
    )
