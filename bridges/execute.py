"""Running a `Program` inside `jax.jit` through the bridge that the settings name."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from jaxtyping import Array

from ..functional.errors import UnsupportedError, bad_value
from ..functional.target import BRIDGES, Target, current_target, using_settings
from ..kernels.launch import Program


@contextmanager
def using_bridge(bridge: str | None) -> Iterator[None]:
    """Functions that are called inside run their Triton programs through `bridge`; part of the key of `jax.jit`.

    Args:
      bridge: one of `purepage.functional.target.BRIDGES`; None: the one that `choice.choose` takes.

    Raises:
      ValueError: another name.
    """
    with using_settings(bridge=bridge):
        yield


def run(program: Program, arrays: Mapping[str, Array], bridge: str | None = None, *, target: Target | None = None) -> tuple[Array, ...]:
    """Runs a program inside or outside `jax.jit`; `program.outputs` come back, then `program.updates`.

    Args:
      program: what to run.
      arrays: an array for each of `program.inputs`.
      bridge: "callback" (DLPack and Triton's own launcher), "jax_triton" (jax-triton's custom calls) or "native" (one custom call, launched
        by a C++ handler without Python or torch); default: as the target's settings say, else the one that `choice.choose` takes.
      target: what the program was planned for; default: the current target.

    Raises:
      ValueError: another bridge.
      UnsupportedError: the bridge can't work here; the message has the reason.
    """
    target = current_target() if target is None else target
    bridge = target.settings.bridge if bridge is None else bridge
    if bridge is None and target.platform == "cpu":
        bridge = "callback"
    if bridge is None:
        from .automatic import run_program

        return run_program(program, arrays, target)
    if bridge not in BRIDGES:
        bad_value("bridge", bridge, f"None or one of {', '.join(map(repr, BRIDGES))}")
    if bridge == "callback":
        from .callback import run_program

        return run_program(program, arrays, target)
    from . import jax_triton, native

    chosen = native if bridge == "native" else jax_triton
    reason = chosen.unavailable(target)
    if reason:
        raise UnsupportedError(f"{program.name}: the {bridge} bridge can't run: {reason}; the callback bridge can")
    return chosen.run_program(program, arrays, target)
