"""Torch functions and Triton programs inside `jax.jit`, through `jax.experimental.buffer_callback`.

The Python body gets XLA's own device buffers: nothing is copied, and an aliased argument is updated in place. On a GPU the body may be
recorded into XLA's command buffer: it then runs while XLA records and not on later calls, which replay the kernels with new contents. So
a body may depend on shapes only, launches on the stream that it is given, neither allocates nor waits, and calls no JAX function (that
deadlocks).

`vmap` runs a body once for each entry of the batch, one after another. Over sharded arrays, wrap the call in `jax.shard_map`: XLA does
not know how to split a body. Arrays that are seen to be sharded are refused; where the compiler shards by itself (`AxisType.Auto` under
`jit`) that can't be detected here: XLA gathers the arguments first, and the result is right.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.buffer_callback import buffer_callback
from jaxtyping import Array

from ..functional import host_slots
from ..functional.errors import UnsupportedError, bad_value, describe
from ..functional.target import Target, current_target
from ..kernels.launch import Program
from . import launcher

_CPU = 1  # kDLCPU; see dlpack.py for the others


def run_program(
    program: Program, arrays: Mapping[str, Array], target: Target | None = None, *, command_buffer: bool | None = None
) -> tuple[Array, ...]:
    """Runs a program's launches, all in one callback.

    Args:
      program: what to run. Equal programs share kernels, traces and executables.
      arrays: an array for each of `program.inputs`, of exactly that shape and dtype.
      target: what the program was planned for; default: the current target.
      command_buffer: whether the launches may be recorded into a command buffer; default: as the target says.

    Returns:
      `program.outputs`, then `program.updates`. An update is in place where its input is donated (under `jit`), else on a copy.

    Raises:
      ValueError: an array is missing, or of another shape or dtype than the plan's.
      UnsupportedError: on a CPU without Triton's interpreter.
      RuntimeError: a kernel did not compile; names the program and the kernel.
    """
    target = current_target() if target is None else target
    inputs = check_inputs(program, arrays)
    _prepare(program, target.platform)
    given = dict(program.inputs)
    names = list(given)
    buffers = [*dict(program.outputs).values(), *map(given.__getitem__, program.updates), *dict(program.scratch).values()]
    aliases = {names.index(name): len(program.outputs) + i for i, name in enumerate(program.updates)}
    recorded = target.records_launches if command_buffer is None else command_buffer
    out = _call(_ProgramBody(program), inputs, [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in buffers], aliases, recorded)
    return out[: len(program.outputs) + len(program.updates)]


def call_torch(
    fn: Callable[[tuple[Any, ...], tuple[Any, ...]], None],
    inputs: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    aliases: Mapping[int, int] | None = None,
    name: str | None = None,
    command_buffer: bool | None = None,
) -> tuple[Array, ...]:
    """Runs a function of torch tensors.

    Args:
      fn: called as `fn(inputs, outputs)` with tuples of tensors that share the buffers' memory; writes every element of the outputs,
        returns None. JAX's stream is torch's current stream while it runs. Give a function of module level, a method or a frozen
        dataclass: an equal `fn` is compiled once. Memory that it allocates through torch must not outlive the call, nor be needed when
        `command_buffer`.
      inputs: arrays; their tensors must not be written, but for aliased ones.
      outputs: shape and dtype of each result.
      aliases: input index to output index: those share memory, so the output starts with the input's contents.
      name: for error messages; default the function's own.
      command_buffer: whether what `fn` enqueues may be recorded, so that `fn` is not called again. Default False: torch functions may
        allocate, or look at values.

    Returns:
      The outputs.
    """
    body = _TorchBody(fn, name or getattr(fn, "__name__", type(fn).__name__))
    return _call(body, [jnp.asarray(x) for x in inputs], outputs, dict(aliases or {}), bool(command_buffer))


def _call(
    body: Callable[..., None],
    inputs: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: dict[int, int],
    command_buffer: bool,
) -> tuple[Array, ...]:
    slots = host_slots.CURRENT.get()
    if slots is not None:
        return _call_in_place(slots, body, inputs, outputs, aliases, command_buffer)
    return buffer_callback(
        body,
        tuple(outputs),
        input_output_aliases=aliases,
        command_buffer_compatible=command_buffer,
        vmap_method="sequential",
    )(*inputs)


def _call_in_place(
    slots: host_slots.HostSlots,
    body: Callable[..., None],
    inputs: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: dict[int, int],
    command_buffer: bool,
) -> tuple[Array, ...]:
    """What `buffer_callback` makes, with the Python function in a place that the program has already."""
    target = "xla_buffer_python_cpu_callback" if jax.default_backend() == "cpu" else "xla_buffer_python_gpu_callback"
    if command_buffer and jax.default_backend() != "cpu":
        target += "_cmd_buffer"
    call = jax.ffi.ffi_call(target, tuple(outputs), input_output_aliases=aliases)
    return tuple(call(*inputs, index=np.uint64(slots.index_of(_FlatBody(body, len(inputs))))))


@dataclass(frozen=True)
class _FlatBody:
    """A body as the runtime calls it: inputs, then results."""

    body: Callable[..., None]
    num_inputs: int

    def __call__(self, context: Any, *buffers: Any) -> tuple[()]:
        self.body(context, buffers[self.num_inputs :], *buffers[: self.num_inputs])
        return ()


def check_inputs(program: Program, arrays: Mapping[str, Any]) -> tuple[Array, ...]:
    """The arrays in the program's order, each checked against the plan."""
    expected = dict(program.inputs)
    if set(arrays) != set(expected):
        bad_value("arrays", sorted(arrays), f"the inputs of {program.name}: {sorted(expected)}")
    for name, buffer in expected.items():
        array = arrays[name]
        if tuple(array.shape) != buffer.shape or jnp.dtype(array.dtype) != jnp.dtype(buffer.dtype):
            bad_value(f"{program.name}: input {name}", array, f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]")
        if _is_sharded(array):
            raise UnsupportedError(
                f"{program.name}: input {name} is {describe(array)}, sharded as {jax.typeof(array).sharding.spec}: "
                "kernels see one device's memory; wrap the call in jax.shard_map"
            )
    return tuple(map(arrays.__getitem__, expected))


def _is_sharded(array: Array) -> bool:
    """Whether the array is known to be cut up: a concrete one, or a traced one over axes of explicit sharding. Axes that the compiler
    shards by itself can't be seen here.
    """
    if isinstance(array, Tracer):
        spec = tuple(jax.typeof(array).sharding.spec)
        return spec.count(None) != len(spec)
    return not getattr(array, "is_fully_replicated", True)


@cache
def _prepare(program: Program, platform: str) -> None:
    """Refuses, or compiles and loads the kernels: at trace time, when an error has a stack and no command buffer is being recorded."""
    on_cpu = platform == "cpu"
    launcher.refuse_unless_runnable(program, on_cpu=on_cpu)
    if not on_cpu:
        aligned = (True,) * len(launcher.buffer_names(program))
        for device in jax.local_devices():
            launcher.compiled(program, device.local_hardware_id, aligned)


@dataclass(frozen=True)
class _ProgramBody:
    """The callback of a program. Frozen, so that JAX sees equal programs as one function."""

    program: Program
    launches: dict[tuple[int, tuple[bool, ...]], tuple[launcher.CompiledLaunch, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """By device and alignment: a look-up here does not hash the program, which takes longer than a launch."""

    def __call__(self, context: Any, results: Sequence[Any], *inputs: Any) -> None:
        import torch

        program = self.program
        buffers = _by_name(program, inputs, results)
        kind, device = buffers[0].__dlpack_device__()
        tensors = [torch.from_dlpack(buffer.__dlpack__()) for buffer in buffers]
        if kind == _CPU:
            launcher.interpret(program, dict(zip(launcher.buffer_names(program), tensors, strict=True)))
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = device, tuple([address % 16 == 0 for address in addresses])
        launches = self.launches.get(key)
        if launches is None:
            launches = self.launches[key] = launcher.compiled(program, *key)
        stream = context.stream
        with nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device):
            for launch in launches:
                launch(stream, addresses)


def _by_name(program: Program, inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The buffers in the order of `launcher.buffer_names`; of an update, the result (which shares the input's memory, and may be
    written).
    """
    fresh = len(program.outputs)
    updated = dict(zip(program.updates, results[fresh:], strict=False))
    return [
        *(updated.get(name, buffer) for (name, _), buffer in zip(program.inputs, inputs, strict=True)),
        *results[:fresh],
        *results[fresh + len(program.updates) :],
    ]


@dataclass(frozen=True)
class _TorchBody:
    fn: Callable[..., None]
    name: str

    def __call__(self, context: Any, results: Sequence[Any], *inputs: Any) -> None:
        import torch

        tensors = [torch.from_dlpack(buffer.__dlpack__()) for buffer in (*inputs, *results)]
        split = len(inputs)
        try:
            if not tensors or not tensors[0].is_cuda:
                self.fn(tuple(tensors[:split]), tuple(tensors[split:]))
                return
            device = tensors[0].device
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(context.stream, device=device)):
                self.fn(tuple(tensors[:split]), tuple(tensors[split:]))
        except Exception as err:
            raise RuntimeError(f"{self.name} failed: {type(err).__name__}: {err}") from err


@contextmanager
def counted_python() -> Iterator[list[int]]:
    """Counts how often XLA calls into Python for a program, or a torch function, of this bridge: 0 where it replays a command buffer."""
    bodies: tuple[Any, ...] = (_ProgramBody, _TorchBody)
    count, originals = [0], [body.__call__ for body in bodies]

    def counting(original: Callable[..., None]) -> Callable[..., None]:
        def call(self: Any, *args: Any) -> None:
            count[0] += 1
            original(self, *args)

        return call

    for body, original in zip(bodies, originals, strict=True):
        body.__call__ = counting(original)
    try:
        yield count
    finally:
        for body, original in zip(bodies, originals, strict=True):
            body.__call__ = original
