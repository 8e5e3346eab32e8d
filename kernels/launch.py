"""A kernel launch as plain data.

`plan` functions (in `purepage.kernels.triton`) turn shapes, dtypes, an arch and a tuning row into a `Program`. The bridges run it
inside `jax.jit`, the tests run it through Triton's interpreter, and the AMD checks compile it: all take the same value, so what is compiled
for one target is what runs on another. Nothing here imports Triton.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

Scalar = int | float | bool | None


@dataclass(frozen=True)
class Buffer:
    """One array that a program touches. `dtype` is the JAX dtype's name, for a cache the storage dtype (bits)."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Descriptor:
    """A buffer as a matrix of which a kernel fetches whole rectangles: Triton's tensor descriptor, on NVIDIA a map for the copy engine.

    Attributes:
      buffer: name of the buffer.
      dtype: what its bits mean, as the JAX dtype's name.
      shape: rows and columns; one row starts where the last one ends.
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
      grid: programs along each axis; static, so it is an upper bound where the work is ragged.
      args: one entry for each non-constexpr parameter, in order: a buffer's name, a number, None, or a `Descriptor` of a buffer that is
        passed by name as well. A kernel takes None in a descriptor's place: it then reads through pointers, to the same bits.
      writes: names of the buffers among `args` that the kernel writes.
      constants: (name, value) for each constexpr parameter; a value may be a frozen dataclass, which holds the facts of a kernel by name.
      num_warps, num_stages: as Triton takes them.
      options: further (name, value) compile options, e.g. ("waves_per_eu", 2) on AMD; a target that lacks an option drops it.
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
    def facts(self) -> dict[str, Any]:
        """Constants by name, with the fields of a dataclass in its place: ("S", AttentionSpec(block_m=64, kv=KVLayout(dtype="float16"))) is
        block_m and kv.dtype.
        """
        return dict(_named_facts(self.constants))


@dataclass(frozen=True)
class Program:
    """Launches that run one after another on named buffers; hashable.

    Attributes:
      name: the operation, for error messages and profiles.
      inputs: (name, buffer) of each array passed in, in order.
      outputs: (name, buffer) of each fresh array that comes back, in order; the launches write every element of these.
      updates: names of the inputs that are written in place and come back after `outputs`, in this order.
      scratch: (name, buffer) of arrays that live only while the program runs; uninitialised.
      launches: in order.
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
    """The launch for a runtime that passes no descriptors."""
    return replace(launch, args=tuple(None if isinstance(arg, Descriptor) else arg for arg in launch.args))
