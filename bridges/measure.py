"""Seconds of a JAX function in steady state: the median of blocked calls, each of a chain of steps."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Timed:
    """Seconds of one step: the median, the fastest and the slowest call; and of making the program."""

    median: float
    best: float
    worst: float
    compile_s: float


def time_steps(
    step: Callable[[Any, Any], Any], state: Any, operands: Any, *, chain: int = 1, calls: int = 9, seconds: float = 2.0
) -> Timed:
    """Times `step(state, operands) -> state`, each step of a chain waiting for the one before.

    Args:
      step: traceable; must need what the step before returned, or XLA would leave steps out.
      state: a pytree of arrays. The caller keeps its own: what the program takes is a copy, which it may overwrite.
      operands: a pytree of arrays.
      chain: steps of one program. Starting it and waiting for its end are spread over them.
      calls: calls that are timed, after one that is not.
      seconds: no call is begun after so long.

    Returns:
      A `Timed`; at least one call is in it.
    """

    begin = time.perf_counter()
    compiled = jax.jit(chained(step, chain), donate_argnums=0).lower(state, operands).compile()
    compile_s = time.perf_counter() - begin
    state = jax.block_until_ready(compiled(jax.tree.map(jnp.copy, state), operands))
    begin, took = time.perf_counter(), []
    for _ in range(max(1, calls)):
        start = time.perf_counter()
        state = jax.block_until_ready(compiled(state, operands))
        end = time.perf_counter()
        took.append((end - start) / chain)
        if end - begin > seconds:
            break
    return Timed(statistics.median(took), min(took), max(took), compile_s)


def chained(step: Callable[[Any, Any], Any], chain: int) -> Callable[[Any, Any], Any]:
    """A function of `chain` steps, each after the one before."""

    def program(state: Any, operands: Any) -> Any:
        for _ in range(chain):
            state = jax.lax.optimization_barrier(step(state, operands))  # or XLA would fuse steps into one
        return state

    return program
