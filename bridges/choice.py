"""Which bridge carries a program's launches where none is named: `choose`, and why.

DLPack (`callback`) where torch is healthy and XLA records the launches; there a launch costs the same through each bridge. `native` where
Python would run for every launch, or torch can't.
"""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ..functional.errors import DOCUMENTATION
from ..functional.target import Target, variable_of, xla_flags
from . import trial
from .native import library

RECORDED_FROM = 5
"""Commands in a row that XLA records in a command buffer, by default. A program is one command."""


@cache
def recorded_from(flags: str) -> int | None:
    """Commands in a row that XLA records under these XLA_FLAGS; None where it records none."""
    if re.search(r"--xla_gpu_enable_command_buffer=(\s|$)", flags):
        return None
    asked = re.findall(r"--xla_gpu_graph_min_graph_size=(\d+)", flags)
    return int(asked[-1]) if asked else RECORDED_FROM


@dataclass(frozen=True)
class Choice:
    """A bridge, and why it is the one."""

    bridge: str
    why: str


def needed_packages(bridge: str) -> tuple[str, ...]:
    """The callback bridge hands Triton's launcher torch tensors; the others need no torch."""
    return ("triton", "torch") if bridge == "callback" else ("triton",)


@cache
def missing_packages(packages: Sequence[str]) -> tuple[str, ...]:
    """Those that are not installed."""
    return tuple(package for package in packages if importlib.util.find_spec(package) is None)


def torch_failure(target: Target) -> str | None:
    """Why this process can't hand torch tensors to Triton's launcher; None where it can."""
    if missing_packages(("torch",)):
        return "torch is not installed"
    return trial.broken(("torch",), target)


def refusal(target: Target) -> tuple[str, bool] | None:
    """(Why no launch can go through the bridge of these settings here, is an installed package broken); None where one can.

    Args:
      target: what is planned for. It need not be this machine: nothing is built or loaded, but for a trial import on a GPU.
    """
    named = target.settings.bridge
    if named is None and target.platform != "cpu" and library.obstacle() is None:
        named = "native"  # needs less than `callback`
    packages = needed_packages(named or "callback")
    hint = "" if target.settings.bridge or target.platform == "cpu" else f"; the native bridge needs no torch, but {library.obstacle()}"
    if missing := missing_packages(packages):
        hint = hint if "torch" in missing else ""
        # That extra brings PyPI's torch and Triton, which are CUDA's.
        on_amd = target.platform == "rocm" or not missing_packages(("jax_rocm7_plugin",))
        remedy = f"see {DOCUMENTATION}/rocm.html" if on_amd else "pip install 'purepage[triton]'"
        return f"needs {' and '.join(missing)}, not installed here: {remedy}{hint}", False
    if target.platform != "cpu" and (why := trial.broken(packages, target)):
        return why + hint, True
    return None


def choose(target: Target, calls: int, *, exported: bool = False) -> Choice:
    """The bridge of a program, and why.

    Args:
      target: what it was planned for. As in `refusal`, nothing is built or loaded.
      calls: programs in the traced function, or the body of the loop, that this one is in.
      exported: whether `jax.export` asks.
    """
    settings = target.settings
    if settings.bridge is not None:
        return Choice(settings.bridge, f"asked for by {variable_of('bridge')} or using_bridge")
    if target.platform == "cpu":
        return Choice("callback", "the interpreter's")
    if why := library.obstacle():
        return Choice("callback", f"the native bridge can't be loaded: {why}")
    if why := torch_failure(target):
        return Choice("native", why)
    if exported:
        return Choice("native", "an exported function can't call Python")
    if not target.records_launches:
        return Choice("native", f"nothing is recorded ({target.recording_reason}), so the callback bridge would run Python for each call")
    least = recorded_from(xla_flags())
    if least is None:
        return Choice("native", "XLA_FLAGS turn command buffers off, so the callback bridge would run Python for each call")
    if calls < least:
        return Choice("native", f"XLA records no less than {least} commands in a row, and {calls} of this library may be all")
    return Choice("callback", f"{calls} programs in a row, which XLA records")
