"""A kernel launch as plain data.

The functions of `purepage.kernels.plans` turn shapes, dtypes and an architecture into a `Program`. The bridges run it inside `jax.jit`, the
tests run it through Triton's interpreter, and `compile_check` compiles it for AMD. All take the same value, so the program that is compiled
for one target is the one that runs on another. Nothing here imports Triton.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

Scalar = int | float | bool | None


@dataclass(frozen=True)
class Buffer:
    """One array that a program reads or writes.

    Attributes:
      shape: its shape.
      dtype: JAX name of its dtype; of a cache it is the storage dtype, which for fp8 is uint8.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Descriptor:
    """Triton's tensor descriptor: a buffer as a matrix of which a kernel loads whole rectangles, on NVIDIA through the copy engine.

    Attributes:
      buffer: name of the buffer.
      dtype: JAX name of the dtype of the matrix.
      shape: rows and columns; the rows are adjacent.
      block: rows and columns of a rectangle.
    """

    buffer: str
    dtype: str
    shape: tuple[int, int]
    block: tuple[int, int]


Arg = str | int | float | bool | None | Descriptor


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
      kernel: import path of the `@triton.jit` function, "package.module:name".
      grid: programs along each axis. The grid is static, so for a ragged batch it is an upper bound.
      args: one entry for each parameter that is not constexpr, in order: a buffer's name, a number, None, or a `Descriptor` of a buffer
        that is passed by name as well. A kernel that gets None in place of a descriptor reads through pointers and computes the same bits.
      writes: names of the buffers among `args` that the kernel writes.
      constants: (name, value) for each constexpr parameter. A value may be a frozen dataclass, which holds the kernel's facts by name.
      num_warps, num_stages: as Triton takes them.
      options: further (name, value) compile options, such as ("waves_per_eu", 2) on AMD. A target that lacks an option drops it.
    """

    kernel: str
    grid: tuple[int, int, int]
    args: tuple[Arg, ...]
    writes: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int = 4
    num_stages: int = 2
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Name of the kernel's function."""
        return self.kernel.partition(":")[2]

    @property
    def facts(self) -> dict[str, Any]:
        """Constants by name. Fields of a dataclass stand in its place: those of S by their names, those of S.kv as "kv.dtype"."""
        return dict(_named_facts(self.constants))


@dataclass(frozen=True)
class Program:
    """Launches that run one after another on named buffers. It is hashable.

    Attributes:
      name: the operation, for error messages and profiles.
      inputs: (name, buffer) of each array that is passed in, in order.
      outputs: (name, buffer) of each new array that is returned, in order. The launches write every element.
      updates: names of the inputs that are written in place and returned after `outputs`, in this order.
      scratch: (name, buffer) of arrays that exist only while the program runs. They start uninitialised.
      launches: the launches, in order.
    """

    name: str
    inputs: tuple[tuple[str, Buffer], ...]
    outputs: tuple[tuple[str, Buffer], ...]
    updates: tuple[str, ...]
    scratch: tuple[tuple[str, Buffer], ...]
    launches: tuple[Launch, ...]


def _named_facts(constants: Iterable[tuple[str, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in constants:
        if is_dataclass(value):
            inner = "" if name == "S" else f"{prefix}{name}."
            yield from _named_facts(((field.name, getattr(value, field.name)) for field in fields(value)), inner)
        else:
            yield f"{prefix}{name}", value


def without_descriptors(launch: Launch) -> Launch:
    """The launch with None in place of each descriptor, for a runtime that passes none."""
    return replace(launch, args=tuple(None if isinstance(arg, Descriptor) else arg for arg in launch.args))
