"""What a traced call consists of: kernels, launches, foreign operators and loops of products, one line each.

`explain(..., side_by_side=True)` shows them for every implementation that can serve a call. They are read off the jaxpr that the
implementation's plan traces to, so that a new implementation needs nothing here.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from ..functional.dispatch import Plan

COUNTED = {"dot_general": "product", "gather": "gather", "scatter": "scatter", "dynamic_update_slice": "update in place"}
"""Primitives that are counted, as they are called in a line. The others, bookkeeping and element-wise operations, are not shown."""


def steps_of(plan: Plan, call: Any) -> tuple[str, ...]:
    """The steps of an implementation's plan for a call, in the order of its program.

    Args:
      plan: what the implementation does; it is traced, not computed.
      call: the call, whose arrays may be traced.

    Returns:
      A line a step. Products outside every loop and kernel, and writes of a plan without either, are one line at the end.
    """
    if plan.program is not None:
        return tuple(f"Triton kernel {launch.name}: grid {'x'.join(map(str, launch.grid))}" for launch in plan.program.launches)
    outside: Counter[str] = Counter()
    lines = list(_steps(jax.make_jaxpr(plan.run)(call), outside))
    if outside["product"] or (not lines and outside):
        lines.append(f"XLA operations: {_counts(outside)}")
    return tuple(lines)


def pallas_kernels(plan: Plan, call: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(name, grid) of each Pallas kernel of a plan, in the order of its program."""
    return tuple(_pallas_kernels(jax.make_jaxpr(plan.run)(call)))


def _pallas_kernels(jaxpr: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["name"], tuple(equation.params["grid_mapping"].grid)
        else:
            for inner in _inner(equation.params):
                yield from _pallas_kernels(inner)


def _steps(jaxpr: Any, outside: Counter[str]) -> Iterator[str]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = equation.primitive.name, equation.params
        if name == "pallas_call":
            yield f"Pallas kernel {params['name']}: grid {'x'.join(map(str, params['grid_mapping'].grid))}"
        elif name == "buffer_callback":
            yield f"torch operator {params['callback'].name}"
        elif name in ("scan", "while"):
            inside: Counter[str] = Counter()
            called = list(_steps_inside(params, inside))
            yield from called
            if not called and inside["product"]:
                times = f"{params['length']} iterations" if name == "scan" else "as many iterations as the data asks for"
                yield f"XLA loop, {times}: {_counts(inside)} each"
            elif not called:
                outside.update(inside)
        else:
            outside[COUNTED.get(name, "")] += name in COUNTED
            yield from _steps_inside(params, outside)


def _steps_inside(params: dict[str, Any], outside: Counter[str]) -> Iterator[str]:
    """Steps of the jaxprs that an equation holds: bodies of loops, branches, jitted functions."""
    for inner in _inner(params):
        yield from _steps(inner, outside)


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    return (value for value in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr) if _is_jaxpr(value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _counts(found: Counter[str]) -> str:
    named = ((name, found[name]) for name in COUNTED.values() if found[name])
    return ", ".join(f"{count} {name}{'s' * (count > 1 and name != COUNTED['dynamic_update_slice'])}" for name, count in named)
