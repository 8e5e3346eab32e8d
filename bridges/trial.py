"""Do the installed packages work in this process? Tried, not guessed from files: a trial import, and one HIP runtime for all.

A process with two HIP runtimes has two sets of streams and memory; a launch through the one that JAX does not use can't be in order with
JAX's work. `pip install torch` for ROCm brings a runtime of its own, and JAX's plugin loads the system's.
"""

import importlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import jax

from ..functional.errors import DOCUMENTATION
from ..functional.target import Target

HIP_LIBRARY = "libamdhip64"
MAPS = Path("/proc/self/maps")


@cache
def import_failure(package: str) -> str | None:
    """What an import of an installed package raises; None where it imports."""
    try:
        importlib.import_module(package)
    except (Exception, SystemExit) as error:
        said = (str(error).splitlines() or [""])[0][:300]
        return f"{package} is installed and does not import: {type(error).__name__}: {said}"
    return None


def mapped(library: str, maps: Iterable[str]) -> tuple[str, ...]:
    """Paths of the files of this library that a process has mapped, one for each inode, sorted.

    Args:
      library: how the file's name begins.
      maps: lines of /proc/PID/maps: range, permissions, offset, device, inode, path.
    """
    found: dict[tuple[str, str], str] = {}
    for line in maps:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].strip().rpartition("/")[2].startswith(library):
            found.setdefault((fields[3], fields[4]), fields[5].strip())
    return tuple(sorted(found.values()))


def foreign_runtime(paths: tuple[str, ...]) -> str | None:
    """What to say where a process has mapped several HIP runtimes; None where it has one or none."""
    if len(paths) < 2:
        return None
    return (
        f"JAX and torch have a HIP runtime each in this process, {' and '.join(paths)}: install a torch that is built against the system's "
        f"ROCm, or set PUREPAGE_BRIDGE=native, which needs no torch; see {DOCUMENTATION}/rocm.html"
    )


def on_gpu() -> bool:
    """Whether JAX computes on a GPU here: only there a call leads to torch and Triton without being asked."""
    return jax.default_backend() != "cpu"


def broken(packages: Iterable[str], target: Target) -> str | None:
    """Why a GPU's call can't go through these installed packages in this process; None where it can, and where JAX computes on no GPU.

    Args:
      packages: names to import, in order.
      target: what is planned for.
    """
    if not on_gpu():
        return None
    packages = tuple(packages)
    for package in packages:
        if why := import_failure(package):
            return why
    if target.platform == "rocm" and "torch" in packages:
        return _foreign_runtime_in(MAPS)
    return None


@cache
def _foreign_runtime_in(maps: Path) -> str | None:
    """`foreign_runtime` of this process, read once: after torch is imported its runtime is mapped, or never will be."""
    return foreign_runtime(mapped(HIP_LIBRARY, maps.read_text().splitlines())) if maps.exists() else None
