"""A `Program` as jax-triton custom calls: no Python when it runs, at the price of one call for each launch.

jax-triton passes a kernel its arrays first and its outputs last (0.3: an aliased output once more, as a pointer of its own; 0.4: not),
while a launch has its arguments in the kernel's own order. So each launch is a small kernel, generated here, that takes its arguments in
jax-triton's order and calls the real one. Integers become constants in it: Triton's own launcher specializes them (to 1, to multiples of
16), jax-triton does not, and a stride of unknown divisibility costs the wide loads.
"""

import hashlib
import importlib
import importlib.util
import linecache
import os
import warnings
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..functional.target import Target, current_target, variable_of
from ..kernels.launch import Arg, Descriptor, Launch, Program
from . import launcher
from .callback import check_inputs

OLDEST = (0, 3, 1)
_ALIASES_TAKE_NO_PARAMETER = (0, 4)
_BROKEN: dict[tuple[int, ...], tuple[int, int]] = {(0, 4, 0): (0, 12), (0, 4, 1): (0, 12)}
"""jax-triton release to the first jax whose dead-code elimination its rule does not fit."""


def unavailable(target: Target | None = None) -> str | None:
    """Why this bridge can't run on `target` (default: the current one); None where it can."""
    target = current_target() if target is None else target
    if target.platform not in ("cuda", "rocm"):
        return f"jax runs on {target.platform}, and jax-triton has kernels for GPUs only"
    if target.wave_size == 32 and target.platform == "rocm":
        return f"{target.arch} runs 32 threads a wave, and jaxlib launches Triton kernels with 64 on ROCm"
    if target.settings.interpret:
        return f"{variable_of('interpret')} is set: there are no compiled kernels"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed (pip install jax-triton)"
    try:
        module = _load()
    except ImportError as err:
        return f"jax-triton does not import: {err}"
    return refusal_of_versions(tuple(module.__version_info__), jax.__version_info__)


def refusal_of_versions(jax_triton_version: tuple[int, ...], jax_version: tuple[int, ...]) -> str | None:
    """Why two releases do not work together; None where they do, as far as we know."""
    name = "jax-triton " + ".".join(map(str, jax_triton_version))
    if jax_triton_version < OLDEST:
        return f"{name} is older than {'.'.join(map(str, OLDEST))}"
    limit = _BROKEN.get(tuple(jax_triton_version[:3]))
    if limit is not None and tuple(jax_version[:2]) >= limit:
        return f"{name} does not work with jax {'.'.join(map(str, limit))} and later"
    return None


@cache
def _load() -> ModuleType:
    """jax-triton, imported without its side effect: it empties or unsets TRITON_CACHE_DIR, which is where Triton's compiled kernels are
    kept.
    """
    kept = os.environ.get("TRITON_CACHE_DIR")
    try:
        return importlib.import_module("jax_triton")
    finally:
        if kept is not None:
            os.environ["TRITON_CACHE_DIR"] = kept
        else:
            os.environ.pop("TRITON_CACHE_DIR", None)


def run_program(program: Program, arrays: Mapping[str, Array], target: Target | None = None) -> tuple[Array, ...]:
    """Runs a program, one custom call for each launch; see `callback.run_program`, whose results these are bit for bit.

    Scratch and outputs start uninitialised: the first launch that names one among its `writes` creates it, later ones update it in place.

    Raises:
      ValueError: an array is missing, or of another shape or dtype than the plan's; a launch reads a buffer that no launch wrote.
    """
    target = current_target() if target is None else target
    names = [name for name, _ in program.inputs]
    values = {name: _as_pointed(array) for name, array in zip(names, check_inputs(program, arrays), strict=True)}
    buffers = dict((*program.inputs, *program.outputs, *program.scratch))
    for launch in program.launches:
        if 0 not in launch.grid:
            _run_launch(program, launch, values, buffers, target)
    for name, buffer in program.outputs:
        if name not in values:  # an empty grid; an output that no launch writes is the plan's fault and is caught by its tests
            values[name] = jnp.zeros(buffer.shape, buffer.dtype)
    results = (*(name for name, _ in program.outputs), *program.updates)
    return tuple(_as_declared(values[name], buffers[name].dtype) for name in results)


def _as_declared(array: Array, dtype: str) -> Array:
    return array if array.dtype == jnp.dtype(dtype) else jax.lax.bitcast_convert_type(array, jnp.dtype(dtype))


def _as_pointed(array: Array) -> Array:
    """The array with the dtype that a kernel's pointer has; a bitcast, which XLA does for nothing."""
    name = jnp.dtype(array.dtype).name
    pointed = launcher.pointer_dtype(name)
    return array if pointed == name else jax.lax.bitcast_convert_type(array, jnp.dtype(pointed))


def _run_launch(program: Program, launch: Launch, values: dict[str, Array], buffers: Mapping[str, Any], target: Target) -> None:
    module = _load()
    version = tuple(module.__version_info__)
    named = tuple(dict.fromkeys(arg for arg in launch.args if isinstance(arg, str)))
    operands = tuple(name for name in named if name in values)
    fresh = tuple(name for name in named if name not in values)
    unwritten = [name for name in fresh if name not in launch.writes]
    if unwritten:
        raise ValueError(f"{program.name}: {launch.kernel} reads {', '.join(unwritten)}, which no launch before it wrote")
    updated = tuple(name for name in operands if name in launch.writes)
    extra = updated if version < _ALIASES_TAKE_NO_PARAMETER else ()
    floats = tuple(arg for arg in launch.args if _is_runtime_float(arg))
    with launcher.describe_failure(program, launch), warnings.catch_warnings():
        # 0.4 would rather have mutable Refs; 0.3 knows none.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*input_output_aliases.*")
        out = module.triton_call(
            *(values[name] for name in operands),
            *(np.float32(value) if version < _ALIASES_TAKE_NO_PARAMETER else value for value in floats),
            kernel=_compile_wrapper(wrapper_source(launch, operands, fresh, len(extra)), launch.kernel),
            grid=launch.grid,
            name=f"{program.name}_{launch.name}",
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            input_output_aliases={operands.index(name): len(fresh) + i for i, name in enumerate(updated)},
            **{
                "out_shape" if version < _ALIASES_TAKE_NO_PARAMETER else "out_type": [
                    jax.ShapeDtypeStruct(buffers[name].shape, jnp.dtype(launcher.pointer_dtype(buffers[name].dtype)))
                    for name in (*fresh, *updated)
                ]
            },
            **_options(launch, version, target),
            **{f"c_{name}": value for name, value in launch.constants},
        )
    values.update(zip((*fresh, *updated), out, strict=True))


def _options(launch: Launch, version: tuple[int, ...], target: Target) -> dict[str, Any]:
    """Compile options. 0.3 can't pass those that tune AMD's compiler, which change no result."""
    options = launcher.compile_options(launch, _triton_target(target))
    if version < _ALIASES_TAKE_NO_PARAMETER:
        return {"enable_fp_fusion": options["enable_fp_fusion"]}
    return {"backend_options": options}


def _triton_target(target: Target) -> Any:
    from triton.backends.compiler import GPUTarget

    if target.platform == "rocm":
        return GPUTarget("hip", target.arch, target.wave_size)
    return GPUTarget("cuda", int(target.arch.removeprefix("sm_")), target.wave_size)


def _is_runtime_float(arg: Arg) -> TypeGuard[float]:
    """jax-triton 0.3 turns a 1.0 into the integer constant 1, so that one is written as a constant instead."""
    return isinstance(arg, float) and arg != 1.0


def wrapper_source(launch: Launch, operands: tuple[str, ...], fresh: tuple[str, ...], num_extra: int) -> str:
    """Source of a kernel that takes (operands, floats, fresh outputs, `num_extra` pointers that it ignores, constants) and calls the
    launch's own.
    """
    kernel = launcher.resolve_kernel(launch.kernel)
    runtime = [name for name, is_constant in launcher.parameters(kernel) if not is_constant]
    pinned = {p.name for p in getattr(kernel, "params", ()) if p.do_not_specialize}
    floats: list[str] = []
    passed = []
    for name, arg in zip(runtime, launch.args, strict=True):
        if isinstance(arg, str):
            text = f"b_{arg}"
        elif isinstance(arg, Descriptor):
            text = "None"  # this way of launching passes none
        elif _is_runtime_float(arg):
            text = f"f_{len(floats)}"
            floats.append(text)
        else:
            text = _constant(arg, specialize=name not in pinned)
        passed.append(f"{name}={text}")
    names = [f"b_{name}" for name in operands], floats, [f"b_{name}" for name in fresh], [f"unused_{i}" for i in range(num_extra)]
    header = [*(name for group in names for name in group), *(f"c_{name}: tl.constexpr" for name, _ in launch.constants)]
    passed += [f"{name}=c_{name}" for name, _ in launch.constants]
    return f"def {launch.name}_call({', '.join(header)}):\n    kernel({', '.join(passed)})\n"


def _constant(arg: float | bool | None, *, specialize: bool) -> str:
    """A number as Triton's launcher would type it: 1 is a constexpr, an integer is int32 where it fits, a float is float32."""
    if arg is None or isinstance(arg, bool) or (specialize and isinstance(arg, int) and arg == 1):
        return repr(arg)
    if isinstance(arg, float):
        return f"tl.full((), {arg!r}, tl.float32)"
    return f"tl.full((), {arg}, {'tl.int32' if -(2**31) <= arg < 2**31 else 'tl.int64'})"


@cache
def _compile_wrapper(source: str, kernel_path: str) -> Any:
    """The kernel of a source text. One for each text: jax-triton keeps its compiled kernels by function."""
    import triton
    import triton.language as tl

    digest = hashlib.sha256(f"{kernel_path}\n{source}".encode()).hexdigest()[:16]
    filename = f"<purepage jax-triton call {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # Triton reads a kernel's source back
    namespace = {"__name__": __name__, "tl": tl, "kernel": launcher.resolve_kernel(kernel_path)}
    exec(compile(source, filename, "exec"), namespace)
    return triton.jit(namespace[source[len("def ") : source.index("(")]])
