"""Finding AITER's operators, whatever the release: by import path and signature, never by version.

On a ROCm machine the package is imported as it is, but for one helper of its attention kernels (see `soft_cap`). Elsewhere its `__init__`
files, which look for a ROCm install, are side-stepped: only the Triton operators can then be used, on NVIDIA GPUs (for benchmarks) and
through Triton's interpreter (for tests).
"""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ...functional.errors import DOCUMENTATION
from ...functional.target import Target, current_target

PACKAGE = "aiter"
NOT_INSTALLED = f"needs amd-aiter, not installed here: see {DOCUMENTATION}/rocm.html"
FOREIGN_ARCH = "gfx950"
"""What AITER is told where no AMD GPU is: its fp8 kind there is e4m3fn, which NVIDIA has too."""
FOREIGN_COMPUTE_UNITS = 4
"""Compute units that AITER is told under the interpreter."""


@dataclass(frozen=True)
class Operator:
    """Where releases keep an operator, newest path first; `hip`: compiled for ROCm when first called, so it runs nowhere else."""

    name: str
    modules: tuple[str, ...]
    hip: bool


OPERATORS: Mapping[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator("unified_attention", ("ops.triton.attention.unified_attention", "ops.triton.unified_attention"), False),
        Operator("paged_attention_decode", ("ops.triton.attention.pa_decode", "ops.triton.pa_decode"), False),
        Operator(
            "fused_qk_rope_reshape_and_cache",
            ("ops.triton.fusions.fused_kv_cache", "ops.triton.rope.fused_kv_cache", "ops.triton.fused_kv_cache"),
            False,
        ),
        Operator("reshape_and_cache", ("ops.cache",), True),
        Operator("reshape_and_cache_flash", ("ops.cache",), True),
        Operator("fused_qk_norm_rope_cache_pts_quant_shuffle", ("ops.fused_qk_norm_rope_cache_quant",), True),
        Operator("fused_qk_norm_mrope_3d_cache_pts_quant_shuffle", ("ops.fused_qk_norm_mrope_cache_quant",), True),
    )
}
"""What the adapters call. The HIP operators were never run by this project: see docs/rocm.md."""


QK_NORM_OPERATORS = ("fused_qk_norm_rope_cache_pts_quant_shuffle", "fused_qk_norm_mrope_3d_cache_pts_quant_shuffle")
"""Names of the qk-norm writers: without and with sections of multimodal positions."""


@cache
def root() -> Path | None:
    """The installed package's folder, found without importing it; None where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE) if PACKAGE not in sys.modules else sys.modules[PACKAGE].__spec__
    places = list(spec.submodule_search_locations or ()) if spec else list(getattr(sys.modules.get(PACKAGE), "__path__", ()))
    return Path(places[0]) if places else None


@cache
def source(name: str) -> tuple[str, ast.FunctionDef] | None:
    """(module, definition) of an operator as the installed files have it; None where this release lacks it."""
    base = root()
    for module in OPERATORS[name].modules if base else ():
        path = base.joinpath(*module.split(".")).with_suffix(".py")  # pyright: ignore[reportOptionalMemberAccess]
        if path.is_file():
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return module, node
    return None


SOFT_CAP = ("ops.triton._triton_kernels.attention.unified_attention", "ops.triton._triton_kernels.unified_attention")
"""Where releases keep the kernels of `unified_attention`, with their `apply_softcap`."""


@cache
def soft_cap_module() -> str | None:
    """The module whose `apply_softcap(S, x)` the kernels call; None where this release has no such function."""
    base = root()
    for module in SOFT_CAP if base else ():
        path = base.joinpath(*module.split(".")).with_suffix(".py")  # pyright: ignore[reportOptionalMemberAccess]
        for node in ast.parse(path.read_text()).body if path.is_file() else ():
            if isinstance(node, ast.FunctionDef) and node.name == "apply_softcap" and [a.arg for a in node.args.args] == ["S", "x"]:
                return module
    return None


@cache
def parameters(name: str) -> tuple[str, ...]:
    """Names of an operator's parameters in this release; empty where it lacks the operator."""
    found = source(name)
    return tuple(argument.arg for argument in (*found[1].args.args, *found[1].args.kwonlyargs)) if found else ()


def unavailable(name: str, target: Target) -> str | None:
    """Why an operator can't run on this machine at all; None where it can."""
    if root() is None:
        return NOT_INSTALLED
    if source(name) is None:
        return f"the installed AITER has no {name}"
    if OPERATORS[name].hip and target.platform != "rocm":
        return f"{name} is HIP code: it runs on rocm, not {target.platform}"
    return None


@cache
def load(name: str) -> Callable[..., Any]:
    """The operator itself, imported.

    Raises:
      RuntimeError: this release lacks it, or its module can't be imported; the import's own error is the cause.
    """
    found = source(name)
    if found is None:
        raise RuntimeError(f"AITER: no {name} in {[f'{PACKAGE}.{m}' for m in OPERATORS[name].modules]} of {root()}")
    platform = current_target().platform
    if platform != "rocm":
        _side_step(platform)
    module = importlib.import_module(f"{PACKAGE}.{found[0]}")
    if platform == "cuda":
        _strip_amd_options(module)
    if name == "unified_attention" and soft_cap_module():
        from .soft_cap import apply_softcap

        importlib.import_module(f"{PACKAGE}.{soft_cap_module()}").apply_softcap = apply_softcap  # pyright: ignore[reportAttributeAccessIssue]
    operator = getattr(module, name)
    missing = set(parameters(name)) - set(inspect.signature(operator).parameters)
    if missing and not OPERATORS[name].hip:
        raise RuntimeError(f"AITER: {name} of {module.__file__} has no parameters {sorted(missing)}, which its source declares")
    return operator


def e4m3_name() -> str:
    """The fp8 kind that AITER's Triton operators of this process take for e4m3: "float8_e4m3fn" or "float8_e4m3fnuz"."""
    platform = current_target().platform
    if platform != "rocm":
        _side_step(platform)
    return str(importlib.import_module(f"{PACKAGE}.ops.triton.utils.types").e4m3_dtype).removeprefix("torch.")


@cache
def _side_step(platform: str) -> None:
    """Lets the Triton operators be imported where no ROCm is: bare packages, an architecture, a number of compute units."""
    if PACKAGE not in sys.modules:
        base = root()
        for name in (PACKAGE, f"{PACKAGE}.ops", f"{PACKAGE}.ops.triton"):
            package = ModuleType(name, f"{name}, without its __init__: no ROCm here")
            package.__path__ = [str(base.joinpath(*name.split(".")[1:]))]  # pyright: ignore[reportOptionalMemberAccess]
            sys.modules[name] = package
    arch_info = importlib.import_module(f"{PACKAGE}.ops.triton.utils._triton.arch_info")
    arch_info.get_arch = lambda: FOREIGN_ARCH  # pyright: ignore[reportAttributeAccessIssue]
    if platform == "cpu":
        device_info = importlib.import_module(f"{PACKAGE}.ops.triton.utils.device_info")
        device_info.get_num_sms = lambda: FOREIGN_COMPUTE_UNITS  # pyright: ignore[reportAttributeAccessIssue]


def _strip_amd_options(module: ModuleType) -> None:
    """Takes compile options that only AMD's backend knows out of the operator's configurations."""

    def stripped(select: Callable[..., Any]) -> Callable[..., Any]:
        def configure(*args: Any, **kwargs: Any) -> Any:
            chosen = select(*args, **kwargs)
            for config in chosen if isinstance(chosen, tuple) else (chosen,):
                config.pop("waves_per_eu", None)
            return chosen

        return configure

    for name in ("select_2d_config", "select_3d_config"):
        if hasattr(module, name):
            setattr(module, name, stripped(getattr(module, name)))
