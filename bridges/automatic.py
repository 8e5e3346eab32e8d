"""Running a `Program` through the bridge that `choice` takes when XLA's program is made: only then is it known how many launches are in a
row, and whether the function is exported.

Until then the program is one JAX primitive. Where there is nothing to wait for, it is none.
"""

from collections.abc import Mapping
from threading import local
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive, get_opaque_trace_state
from jax.interpreters import batching, mlir
from jaxtyping import Array

from ..functional import host_slots
from ..functional.errors import UnsupportedError
from ..functional.target import Target
from ..kernels.launch import Program
from . import callback, choice, native


class Counter:
    """How many programs a trace has had so far. One for each trace, compared by identity."""

    def __init__(self) -> None:
        self.calls = 0


class _Traces(local):
    """Counters of the latest traces of a thread, the latest last."""

    def __init__(self) -> None:
        self.counters: list[tuple[Any, Counter]] = []


_MANY = 1 << 30  # programs of a trace that nothing is known of

_TRACES, _KEPT = _Traces(), 16
"""A trace that is not among the `_KEPT` latest starts to count anew, which costs nothing where the native bridge is healthy."""


def counted() -> Counter:
    """The counter of the current trace, with one more program."""
    here = get_opaque_trace_state()
    counter = next((counter for trace, counter in _TRACES.counters if trace == here), None)
    if counter is None:
        counter = Counter()
        _TRACES.counters = [*_TRACES.counters[1 - _KEPT :], (here, counter)]
    counter.calls += 1
    return counter


def run_program(program: Program, arrays: Mapping[str, Array], target: Target) -> tuple[Array, ...]:
    """Runs a program; see `callback.run_program`, whose results these are bit for bit."""
    inputs = callback.check_inputs(program, arrays)
    if host_slots.CURRENT.get() is not None:  # XLA is partitioning: there is no later
        return _run(program, target, _MANY, inputs)
    if not any(isinstance(array, Tracer) for array in inputs):
        return _run(program, target, 1, inputs)
    return tuple(_program_p.bind(*inputs, program=program, target=target, counter=counted()))


def _run(program: Program, target: Target, calls: int, inputs: tuple[Any, ...], *, exported: bool = False) -> tuple[Array, ...]:
    arrays = dict(zip(dict(program.inputs), inputs, strict=True))
    chosen = choice.choose(target, calls, exported=exported)
    if chosen.bridge == "native":
        failed = native.unavailable(target)
        if failed is None:
            return native.run_program(program, arrays, target)
        if exported or choice.torch_failure(target) is not None:
            raise UnsupportedError(
                f"{program.name}: the native bridge can't run: {failed}; the callback bridge can't either: {chosen.why}; "
                "implementation='xla' needs none"
            )
    elif exported:
        raise UnsupportedError(f"{program.name} can't be exported through the callback bridge, which calls Python; {chosen.why}")
    return callback.run_program(program, arrays, target)


_program_p = Primitive("purepage_program")
_program_p.multiple_results = True


@_program_p.def_abstract_eval
def _results(*avals: Any, program: Program, target: Target, counter: Counter) -> list[ShapedArray]:
    given = dict(program.inputs)
    buffers = [*dict(program.outputs).values(), *map(given.__getitem__, program.updates)]
    return [ShapedArray(buffer.shape, jnp.dtype(buffer.dtype)) for buffer in buffers]


@_program_p.def_impl
def _evaluate(*inputs: Any, program: Program, target: Target, counter: Counter) -> tuple[Array, ...]:
    return _run(program, target, counter.calls, inputs)


def _lower(ctx: Any, *values: Any, program: Program, target: Target, counter: Counter) -> Any:
    exported = bool(getattr(ctx.module_context.lowering_parameters, "for_export", False))

    def run(*inputs: Any) -> tuple[Array, ...]:
        return _run(program, target, counter.calls, inputs, exported=exported)

    return mlir.lower_fun(run, multiple_results=True)(ctx, *values)


mlir.register_lowering(_program_p, _lower)


def _batch(inputs: Any, axes: Any, **parameters: Any) -> tuple[Any, Any]:
    """One entry of the batch after another, as both bridges do."""
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(inputs, axes, strict=True)]
    mapped = [axis is not None for axis in axes]

    def one(entries: list[Any]) -> Any:
        given, here = iter(entries), {**parameters, "counter": counted()}
        return _program_p.bind(*(next(given) if each else x for x, each in zip(moved, mapped, strict=True)), **here)

    outs = jax.lax.map(one, [x for x, each in zip(moved, mapped, strict=True) if each])
    return outs, [0] * len(outs)


batching.primitive_batchers[_program_p] = _batch
