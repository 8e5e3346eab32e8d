"""Time of one call on the device, in steady state.

A JAX function is chained: one jitted program calls it many times, each call needing the one before, and the program is started many times
before anyone waits. A torch function is captured into a CUDA graph of many calls. Either way Python is not timed, and the gap between two
programs is spread over all calls of one.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from purepage.bridges.callback import counted_python
from purepage.bridges.tune.timing import compiled_chain

BATCHES = 5
BATCH_S = {"gpu": 0.06, "cpu": 0.4}
"""Seconds that one batch of a median should take; on a GPU so long that starting it and waiting for its end are less than 1 % of it."""
CHAIN_S = 0.002
"""Seconds that one program of chained calls should take on a GPU: starting it is then little of it."""
LONGEST_CHAIN, SHORTEST_CHAIN = 64, 6
"""XLA records no command buffer for fewer than five commands."""


@dataclass(frozen=True)
class Timed:
    """Seconds of one call: the median of batches, and the fastest and slowest batch."""

    median: float
    best: float
    worst: float
    calls: int
    how: str
    cpu: float = 0.0
    """Seconds of this process's cores a call, over all batches; means something on a CPU, where others may share the cores."""
    compile_s: float = 0.0
    python_calls: int = 0
    """Times that XLA called into Python while it was timed: 0 where it replays its command buffer."""


def on_gpu() -> bool:
    return jax.default_backend() != "cpu"


def chain_of(about: float) -> int:
    """Calls of one program, where a call takes about so many seconds."""
    return max(SHORTEST_CHAIN, min(LONGEST_CHAIN, round(CHAIN_S / max(about, 1e-7))))


def batches(run: Callable[[int], float], once: float, per_run: int) -> dict[str, Any]:
    """The times of `Timed`; `run(n)` takes n runs and returns seconds, one run is `per_run` calls."""
    count = max(1, min(200, round(BATCH_S["gpu" if on_gpu() else "cpu"] / max(once, 1e-7))))
    calls, begin = BATCHES * count * per_run, time.process_time()
    took = [run(count) / (count * per_run) for _ in range(BATCHES)]
    cpu = (time.process_time() - begin) / calls
    return {"median": statistics.median(took), "best": min(took), "worst": max(took), "calls": calls, "cpu": cpu}


def time_jax(
    step: Callable[..., Any], state: Any, operands: Any, *, chain: int | None = None, about: float = 0.0, donate: bool = False
) -> Timed:
    """Time of `step(state, operands, i) -> state`, i the static number of the call in its chain.

    Args:
      state: a pytree of arrays; a step must need what the step before returned.
      operands: a pytree of arrays.
      chain: calls of one program; default: by `about`, the rough seconds of one call; 1 on a CPU.
      donate: give the state's buffers away, as an update of a cache does.
    """
    if chain is None:
        chain = chain_of(about) if on_gpu() else 1

    run, compile_s = compiled_chain(step, state, operands, chain=chain, donated=donate)
    for _ in range(3 if on_gpu() else 1):
        once = run(1)
    with counted_python() as python_calls:
        times = batches(run, min(once, run(2) / 2), chain)
    return Timed(**times, how=f"jit, chain of {chain}", compile_s=compile_s, python_calls=python_calls[0])


def rough_seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call of several in a row, for `about`; means nothing on a CPU, where nothing is chained."""
    if not on_gpu():
        return 0.0
    begin = time.perf_counter()
    jax.block_until_ready([call() for _ in range(SHORTEST_CHAIN)])
    return (time.perf_counter() - begin) / SHORTEST_CHAIN


def time_torch(call: Callable[[], Any]) -> Timed:
    """Time of a torch function: replays of a CUDA graph between two events, or plain calls on a CPU."""
    import torch

    if not torch.cuda.is_available() or not on_gpu():

        def plain(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                call()
            return time.perf_counter() - start

        once = min(plain(1), plain(1))
        return Timed(**batches(plain, once, 1), how="torch")

    torch.cuda.synchronize()  # what was enqueued elsewhere on these tensors
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
        stream.synchronize()
        begin = time.perf_counter()
        for _ in range(SHORTEST_CHAIN):
            call()
        stream.synchronize()
        chain = chain_of((time.perf_counter() - begin) / SHORTEST_CHAIN)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(chain):
                call()

    run = partial(replays, graph)
    run(1)
    return Timed(**batches(run, run(1), chain), how=f"CUDA graph of {chain}")


def replays(graph: Any, count: int) -> float:
    """Seconds between two events around so many replays of a CUDA graph."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3
