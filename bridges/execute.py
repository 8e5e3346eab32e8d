"""One door to the two bridges that run a `Program` inside `jax.jit`."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from jaxtyping import Array

from ..functional.errors import UnsupportedError, bad_value
from ..kernels.launch import Program

BRIDGES = ("callback", "jax_triton")
BRIDGE_VARIABLE = "PUREPAGE_BRIDGE"
"""Environment variable that names the bridge where the code does not."""

_CHOSEN: ContextVar[str | None] = ContextVar("purepage_bridge", default=None)


def _checked(bridge: str) -> str:
    if bridge not in BRIDGES:
        bad_value("bridge", bridge, f"None or one of {', '.join(map(repr, BRIDGES))}")
    return bridge


@contextmanager
def using_bridge(bridge: str) -> Iterator[None]:
    """Functions that are traced inside run their programs through `bridge`; what was traced before keeps its own."""
    token = _CHOSEN.set(_checked(bridge))
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def chosen_bridge() -> str:
    """The bridge of `using_bridge`, else of `PUREPAGE_BRIDGE`, else "callback"."""
    return _CHOSEN.get() or _checked(os.environ.get(BRIDGE_VARIABLE) or "callback")


def run(program: Program, arrays: Mapping[str, Array], bridge: str | None = None) -> tuple[Array, ...]:
    """Runs a program inside or outside `jax.jit`; `program.outputs` come back, then `program.updates`.

    Args:
      program: what to run.
      arrays: an array for each of `program.inputs`.
      bridge: "callback" (DLPack, Triton's own launcher) or "jax_triton" (a custom call: no Python at run time); None: `chosen_bridge()`.

    Raises:
      UnsupportedError: the bridge can't work here; the message says why.
    """
    bridge = chosen_bridge() if bridge is None else _checked(bridge)
    if bridge == "callback":
        from .callback import run_program

        return run_program(program, arrays)
    from . import jax_triton

    reason = jax_triton.unavailable()
    if reason:
        raise UnsupportedError(f"{program.name}: the jax_triton bridge can't run: {reason}; the callback bridge can")
    return jax_triton.run_program(program, arrays)
