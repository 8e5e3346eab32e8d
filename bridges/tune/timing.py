"""Time of a call in steady state: a chain of calls in one program, started many times before anyone waits, contenders in turn."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Clock = Callable[[], float]
Run = Callable[[int], float]
"""Takes so many runs of a program, returns the seconds of all."""


@dataclass(frozen=True)
class Budget:
    """How long is measured.

    Attributes:
      batch_s: seconds of one batch of a median.
      rounds: batches of each contender.
      chain_s: seconds of one program of chained calls.
      shortest, longest: calls of a chain. XLA records no fewer than five commands.
      hopeless: a contender whose first batch takes so many times as long gets no further ones.
    """

    batch_s: float = 0.03
    rounds: int = 5
    chain_s: float = 0.002
    shortest: int = 6
    longest: int = 64
    hopeless: float = 1.4

    def chain(self, about: float) -> int:
        return max(self.shortest, min(self.longest, round(self.chain_s / max(about, 1e-7))))


DEFAULT = Budget()


def compiled_chain(
    step: Callable[[Any, Any, int], Any], state: Any, operands: Any, *, chain: int, donated: bool, clock: Clock = time.perf_counter
) -> tuple[Run, float]:
    """Compiles `step(state, operands, i) -> state`, so often in a chain: (what runs it, seconds of compilation). Nothing has run.

    Args:
      step: i is the static number of the call.
      state, operands: pytrees of arrays; those of the caller stay.
      chain: calls of one program.
      donated: whether a program gets its state's buffers.
      clock: seconds of the runs.
    """

    def program(state: Any, operands: Any) -> Any:
        for i in range(chain):
            state = step(state, operands, i)
        return state

    begin = time.perf_counter()
    compiled = jax.jit(program, donate_argnums=(0,) if donated else ()).lower(state, operands).compile()
    compile_s = time.perf_counter() - begin
    held = [jax.tree.map(jnp.copy, state) if donated else state]

    def run(count: int) -> float:
        jax.block_until_ready(held[0])
        begin, result = clock(), None
        for _ in range(count):
            if donated:
                held[0] = result = compiled(held[0], operands)
            else:
                result = None  # freed before the next run, so that it gets the same memory and a recorded program stays valid
                result = compiled(state, operands)
        jax.block_until_ready(result)
        return clock() - begin

    return run, compile_s


def chained(
    step: Callable[[Any, Any, int], Any], state: Any, operands: Any, *, chain: int, donated: bool, clock: Clock = time.perf_counter
) -> Run:
    """As `compiled_chain`, run twice, so that a command buffer has been recorded."""
    run, _ = compiled_chain(step, state, operands, chain=chain, donated=donated, clock=clock)
    run(1)
    run(1)
    return run


def interleaved(runs: Sequence[Run], budget: Budget) -> list[float]:
    """Medians of the seconds of one run of each, batches of all in turn, so that a clock that drifts drifts for all.

    The first of `runs` is the incumbent: one that is hopeless beside it after a batch has the time of that batch.
    """
    counts = [max(1, min(200, round(budget.batch_s / max(run(1), 1e-7)))) for run in runs]
    times = [[run(count) / count] for run, count in zip(runs, counts, strict=True)]
    hopeful = [place for place in range(len(runs)) if place == 0 or times[place][0] < budget.hopeless * times[0][0]]
    for _ in range(budget.rounds - 1 if len(hopeful) > 1 or len(runs) == 1 else 0):
        for place in hopeful:
            times[place].append(runs[place](counts[place]) / counts[place])
    return [statistics.median(each) for each in times]


def rough_seconds(call: Callable[[], Any], clock: Clock = time.perf_counter, calls: int = 6) -> float:
    """Seconds of one call of several in a row, after one that compiles."""
    jax.block_until_ready(call())
    begin = clock()
    jax.block_until_ready([call() for _ in range(calls)])
    return (clock() - begin) / calls
