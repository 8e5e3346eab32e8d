"""Programs as custom calls of the native handler: kernels compiled from shapes alone, arguments packed as integers. See `launch.cc`."""

import base64
import hashlib
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ...functional.errors import UnsupportedError
from ...functional.target import Target, current_target, variable_of
from ...kernels.archs import arch_facts
from ...kernels.compile_check import Job, compile_job, jobs_of, type_of
from ...kernels.launch import Descriptor, Program
from ..callback import check_inputs
from ..launcher import describe_failure
from . import library

BUFFER, INT32, INT64, FLOAT32, NULL, TENSOR_MAP = range(6)
"""Kinds of arguments, as `launch.cc` reads them."""

TENSOR_MAP_DTYPES: Mapping[str, int] = {"float16": 6, "bfloat16": 9}
"""The CUDA driver's `CUtensorMapDataType` of each dtype that a `Descriptor` has."""

SCRATCH_POINTERS = 2
"""Triton appends two pointers to a kernel's parameters, for global and profiling scratch. The kernels here use neither."""


def unavailable(target: Target | None = None) -> str | None:
    """Why this bridge can't run on `target` (default: the current one); None where it can."""
    target = current_target() if target is None else target
    if target.platform not in ("cuda", "rocm"):
        return f"jax runs on {target.platform}, and the native bridge launches kernels on GPUs only"
    if target.settings.interpret:
        return f"{variable_of('interpret')} is set: there are no compiled kernels"
    return library.load()


def run_program(program: Program, arrays: Mapping[str, Array], target: Target | None = None) -> tuple[Array, ...]:
    """Runs a program in one custom call; see `callback.run_program`, whose results these are bit for bit.

    Args:
      program: what to run.
      arrays: an array for each of `program.inputs`, of exactly that shape and dtype.
      target: what to compile for; default: the current target. It need not be this machine where the function is exported.

    Returns:
      `program.outputs`, then `program.updates`. An update is in place where its input is donated (under `jit`), else on a copy.

    Raises:
      ValueError: an array is missing, or of another shape or dtype than the plan's.
      RuntimeError: a kernel did not compile; names the program and the kernel.
    """
    inputs = check_inputs(program, arrays)
    target = current_target() if target is None else target
    given = dict(program.inputs)
    names = list(given)
    results = [*(buffer for _, buffer in program.outputs), *(given[name] for name in program.updates), *(b for _, b in program.scratch)]
    call = jax.ffi.ffi_call(
        library.TARGET if target.records_launches else library.UNRECORDED,
        tuple(jax.ShapeDtypeStruct(buffer.shape, jnp.dtype(buffer.dtype)) for buffer in results),
        input_output_aliases={names.index(name): len(program.outputs) + i for i, name in enumerate(program.updates)},
        vmap_method="sequential",
    )
    out = call(*inputs, **packed(program, target.arch))
    return tuple(out[: len(program.outputs) + len(program.updates)])


@cache
def packed(program: Program, arch: str) -> dict[str, Any]:
    """The handler's attributes for a program on an architecture. Needs Triton but no GPU.

    Raises:
      RuntimeError: a kernel did not compile; names the program and the kernel.
    """
    facts = arch_facts(arch)
    place = _places(program)
    numbers: list[int] = []
    symbols, modules = [], []
    for job in jobs_of(program, arch):
        if 0 in job.launch.grid:
            continue
        with describe_failure(program, job.launch):
            compiled = compile_job(job)
            arguments = list(_arguments(job, compiled.metadata, place))
        numbers += [*job.launch.grid, job.launch.num_warps * facts.wave_size, compiled.metadata.shared, len(arguments)]
        numbers += [number for argument in arguments for number in argument]
        symbols.append(compiled.metadata.name)
        modules.append(base64.b64encode(compiled.asm["cubin" if facts.vendor == "nvidia" else "hsaco"]).decode())
    attributes = {"program": program.name, "arch": arch, "symbols": "\n".join(symbols), "modules": "\n".join(modules)}
    digest = hashlib.sha256(repr((attributes, numbers)).encode()).digest()
    return {
        **attributes,
        "digest": np.int64(int.from_bytes(digest[:8], "little", signed=True)),
        "launches": np.array(numbers, np.int64),
    }


def _places(program: Program) -> dict[str, int]:
    """Where the handler finds each buffer: inputs, outputs, updates, scratch. An update is found among the results."""
    names = [name for name, _ in program.inputs]
    results = [*(name for name, _ in program.outputs), *program.updates, *(name for name, _ in program.scratch)]
    return {name: i for i, name in enumerate(names)} | {name: len(names) + i for i, name in enumerate(results)}


def _arguments(job: Job, metadata: Any, place: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """The kernel's parameters in its own order. What Triton compiled into the kernel is no parameter."""
    for need in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, need, 0):
            raise UnsupportedError(f"{job.launch.kernel} has a {need} of {getattr(metadata, need)}: the native bridge passes no scratch")
    buffers = dict(job.buffers)
    descriptors = iter(getattr(metadata, "tensordesc_meta", None) or ())
    for arg in job.launch.args:
        kind = type_of(arg, buffers)
        if kind == "constexpr":
            continue
        if isinstance(arg, Descriptor):
            rows, columns = arg.shape
            found: Any = next(descriptors)
            layout = found["swizzle"], found["elem_size"]
            yield TENSOR_MAP, place[arg.buffer], TENSOR_MAP_DTYPES[arg.dtype], *layout, rows, columns, *found["block_size"]
            yield from ((INT32, rows), (INT32, columns), (INT64, columns), (INT64, 1))
        elif isinstance(arg, str):
            yield BUFFER, place[arg]
        elif isinstance(arg, float):
            yield FLOAT32, struct.unpack("<I", struct.pack("<f", arg))[0]
        else:
            yield (INT64 if kind == "i64" else INT32), int(arg or 0)
    yield from ((NULL,) for _ in range(SCRATCH_POINTERS))
