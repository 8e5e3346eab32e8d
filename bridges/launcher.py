"""Runs the launches of a `Program` on raw buffers with Triton's own launcher: compiled on a GPU, interpreted on a CPU.

On a GPU the launch is one C call per kernel: kernels are compiled from shapes alone before the first run, and a launch passes integer
pointers to the compiled kernel, past `JITFunction.run` and its checks of every argument.
"""

import importlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax.numpy as jnp

from ..functional.errors import UnsupportedError
from ..kernels.launch import Buffer, Descriptor, Launch, Program
from ..kernels.triton.run import argument, compile_options, tensor_descriptor

_COMPILING = threading.Lock()
_INTERPRETING = threading.Lock()  # Triton's interpreter keeps the program id in one global

_COMPILED: dict[tuple[Program, int, tuple[bool, ...]], tuple["CompiledLaunch", ...]] = {}
"""Compiled launches by program, device and which buffers are aligned to 16 bytes; a cache, never a setting."""


def resolve_kernel(path: str) -> Any:
    """The `@triton.jit` function that `Launch.kernel` names, "package.module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def is_interpreted(kernel: Any) -> bool:
    """Whether the kernel's module was imported with TRITON_INTERPRET=1; Triton decides it there, once."""
    return type(kernel).__name__ == "InterpretedFunction"


def refuse_unless_runnable(program: Program, *, on_cpu: bool) -> None:
    """Raises `UnsupportedError` where the kernels, as they were imported, can't run on the platform."""
    for launch in program.launches:
        interpreted = is_interpreted(resolve_kernel(launch.kernel))
        if on_cpu and not interpreted:
            raise UnsupportedError(
                f"{program.name}: triton kernels run on a CPU only through Triton's interpreter; "
                "set TRITON_INTERPRET=1 in the environment before the first import of purepage's kernels, or use implementation='xla'"
            )
        if interpreted and not on_cpu:
            raise UnsupportedError(f"{program.name}: TRITON_INTERPRET=1 is set, but the arrays are on a GPU; unset it and start again")


@cache
def parameters(kernel: Any) -> tuple[tuple[str, bool], ...]:
    """(name, is it a constexpr) of each parameter, for a compiled and an interpreted kernel alike."""
    if hasattr(kernel, "params"):
        return tuple((p.name, bool(p.is_constexpr)) for p in kernel.params)
    annotations = {name: str(getattr(kind, "__name__", kind)) for name, kind in kernel.fn.__annotations__.items()}
    return tuple((name, "constexpr" in annotations.get(name, "")) for name in kernel.arg_names)


def bind(launch: Launch, kernel: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """`values` of the runtime parameters and the launch's constants in the kernel's own order."""
    constants = dict(launch.constants)
    wanted = {name for name, is_constant in parameters(kernel) if is_constant}
    if set(constants) != wanted or len(values) != len(parameters(kernel)) - len(wanted):
        raise _mismatch(launch, kernel)
    runtime = iter(values)
    return tuple([constants[name] if is_constant else next(runtime) for name, is_constant in parameters(kernel)])


def _mismatch(launch: Launch, kernel: Any) -> TypeError:
    names = [f"{name}{': constexpr' if is_constant else ''}" for name, is_constant in parameters(kernel)]
    return TypeError(
        f"{launch.kernel} takes ({', '.join(names)}): "
        f"the launch has {len(launch.args)} args and constants {[name for name, _ in launch.constants]}"
    )


def pointer_dtype(dtype: str) -> str:
    """What a kernel's pointer to a buffer points to: the buffer's dtype, but bytes for the fp8 kinds, which kernels decode themselves."""
    return "uint8" if dtype.startswith("float8") else dtype


def interpret(program: Program, tensors: dict[str, Any]) -> None:
    """Runs the program on CPU tensors through Triton's interpreter."""
    refuse_unless_runnable(program, on_cpu=True)
    with _INTERPRETING:
        for launch in program.launches:
            if 0 in launch.grid:
                continue
            kernel = resolve_kernel(launch.kernel)
            with describe_failure(program, launch):
                args = bind(launch, kernel, [argument(arg, tensors) for arg in launch.args])
                kernel[launch.grid](*args, num_warps=launch.num_warps, num_stages=launch.num_stages)


@contextmanager
def describe_failure(program: Program, launch: Launch) -> Iterator[None]:
    """Re-raises what a launch raises with the names of the program and its kernel."""
    try:
        yield
    except Exception as err:
        raise RuntimeError(f"{program.name}: {launch.kernel} failed: {type(err).__name__}: {err}") from err


@dataclass(frozen=True)
class CompiledLaunch:
    """A kernel on one device with all but its pointers and the stream bound.

    `args` are the values for Triton's launcher; `pointers` are (place in args, index of the buffer), `descriptors` (place, index, what);
    `binary` is Triton's compiled kernel, with its assembly.
    """

    launch: Callable[..., None]
    grid: tuple[int, int, int]
    function: Any
    metadata: Any
    args: tuple[Any, ...]
    pointers: tuple[tuple[int, int], ...]
    descriptors: tuple[tuple[int, int, Descriptor], ...] = ()
    binary: Any = None

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        args = list(self.args)
        for place, index in self.pointers:
            args[place] = addresses[index]
        for place, index, descriptor in self.descriptors:
            args[place] = tensor_descriptor(_Address(addresses[index], torch_dtype(descriptor.dtype)), descriptor)
        self.launch(*self.grid, stream, self.function, self.metadata, None, None, None, *args)


@dataclass(frozen=True)
class _Address:
    """What Triton's launcher looks at in the tensor of a descriptor."""

    address: int
    dtype: Any

    def data_ptr(self) -> int:
        return self.address


class _Pointer:
    """What Triton's specialization looks at in a tensor: the dtype, whether it is aligned, how far it reaches (2 GiB matters on AMD)."""

    def __init__(self, dtype: Any, nbytes: int, aligned: bool) -> None:
        self.dtype, self._nbytes, self._aligned = dtype, nbytes, aligned

    def data_ptr(self) -> int:
        return 0 if self._aligned else 1

    def ptr_range(self) -> int:
        return self._nbytes


def compiled(program: Program, device: int, aligned: tuple[bool, ...]) -> tuple[CompiledLaunch, ...]:
    """The program's launches for GPU `device` (an ordinal), compiled and loaded.

    Args:
      aligned: for each of `buffer_names(program)`, whether it starts at a multiple of 16 bytes.
    """
    key = (program, device, aligned)
    found = _COMPILED.get(key)
    if found is None:
        with _COMPILING:
            found = _COMPILED.get(key)
            if found is None:
                found = _COMPILED[key] = _compile(program, device, aligned)
    return found


def buffer_names(program: Program) -> tuple[str, ...]:
    """All buffers of a program: inputs, outputs, scratch."""
    return tuple(name for name, _ in (*program.inputs, *program.outputs, *program.scratch))


def _compile(program: Program, device: int, aligned: tuple[bool, ...]) -> tuple[CompiledLaunch, ...]:
    import torch
    from triton.runtime import driver

    buffers = dict((*program.inputs, *program.outputs, *program.scratch))
    index = {name: i for i, name in enumerate(buffer_names(program))}
    launches = []
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes sure that torch has a context: Triton asks it for the device
        target = driver.active.get_current_target()
        for launch in program.launches:
            if 0 in launch.grid:
                continue
            kernel = resolve_kernel(launch.kernel)
            with describe_failure(program, launch):
                # The copy engine starts at multiples of 16 bytes.
                given = [None if isinstance(arg, Descriptor) and not aligned[index[arg.buffer]] else arg for arg in launch.args]
                mock = [_mock(arg, buffers, index, aligned) for arg in given]
                bound = bind(launch, kernel, mock)
                binary = kernel.run(
                    *bound,
                    grid=launch.grid,
                    warmup=True,
                    num_warps=launch.num_warps,
                    num_stages=launch.num_stages,
                    **compile_options(launch, target),
                )
                binary = binary.result() if hasattr(binary, "result") else binary
                run = binary.run  # loads the module: not something to do while XLA records a command buffer
                places = [place for place, (_, is_constant) in enumerate(parameters(kernel)) if not is_constant]
                launches.append(
                    CompiledLaunch(
                        launch=run,
                        grid=launch.grid,
                        function=binary.function,
                        metadata=binary.packed_metadata,
                        args=tuple(0 if isinstance(value, _Pointer) else value for value in bound),
                        pointers=tuple((place, index[arg]) for place, arg in zip(places, given, strict=True) if isinstance(arg, str)),
                        descriptors=tuple(
                            (place, index[arg.buffer], arg) for place, arg in zip(places, given, strict=True) if isinstance(arg, Descriptor)
                        ),
                        binary=binary,
                    )
                )
    return tuple(launches)


def _mock(arg: Any, buffers: dict[str, Buffer], index: dict[str, int], aligned: tuple[bool, ...]) -> Any:
    """What Triton compiles for, in an argument's place."""
    if isinstance(arg, Descriptor):
        return tensor_descriptor(_Address(0, torch_dtype(arg.dtype)), arg)
    if isinstance(arg, str):
        return _Pointer(torch_dtype(pointer_dtype(buffers[arg].dtype)), _nbytes(buffers[arg]), aligned[index[arg]])
    return arg


def _nbytes(buffer: Buffer) -> int:
    return math.prod(buffer.shape) * jnp.dtype(buffer.dtype).itemsize


@cache
def torch_dtype(name: str) -> Any:
    """The torch dtype of a JAX dtype's name; the names agree."""
    import torch

    return getattr(torch, name)
