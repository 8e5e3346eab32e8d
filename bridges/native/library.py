"""The shared library with the handler, built from `launch.cc` on first use where a C++ compiler is installed."""

import ctypes
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import jax

TARGET = "purepage_launch"
"""Name of the custom call."""

SOURCE = Path(__file__).with_name("launch.cc")


def header_version(include_dir: str) -> tuple[int, int]:
    """(major, minor) of XLA's foreign function interface as a folder of headers declares it."""
    found = {}
    for line in (Path(include_dir) / "xla" / "ffi" / "api" / "c_api.h").read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "#define" and words[1] in ("XLA_FFI_API_MAJOR", "XLA_FFI_API_MINOR"):
            found[words[1]] = int(words[2])
    return found["XLA_FFI_API_MAJOR"], found["XLA_FFI_API_MINOR"]


def compiler() -> str | None:
    """Path of a C++ compiler: g++, clang++ or c++ on PATH, or the one that the variable CXX names; None where there is none."""
    given = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, (given,) if given else ("g++", "clang++", "c++"))), None)


def build(target: Path) -> Path:
    """Compiles `launch.cc` with the headers of the installed jaxlib into `target`.

    Raises:
      RuntimeError: there is no compiler, or it failed; the message has what it printed.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("the native bridge needs a C++ compiler (g++, clang++ or c++ on PATH, or the one that CXX names)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        command = [cxx, "-std=c++17", "-O2", "-shared", "-fPIC", "-I", jax.ffi.include_dir(), "-o", str(fresh), str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        os.replace(fresh, target)  # atomic: of several processes that build it, each leaves a whole library
    return target


def library_path() -> Path:
    """Where the built library is kept, in `$XDG_CACHE_HOME/purepage` (default `~/.cache/purepage`), by the source and jaxlib's release."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "purepage"
    major, minor = header_version(jax.ffi.include_dir())
    digest = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("jaxlib").encode()).hexdigest()[:16]
    return folder / f"libpurepage_launch-ffi{major}.{minor}-{digest}.so"


@cache
def load() -> str | None:
    """Loads the library, building it first where needed, and registers the custom call for CUDA and ROCm; why that failed, or None."""
    try:
        path = library_path()
        library = ctypes.CDLL(str(path if path.exists() else build(path)))
    except (OSError, RuntimeError) as error:
        return str(error)
    stages = {"initialize": library.purepage_initialize, "execute": library.purepage_execute}
    for platform in ("CUDA", "ROCM"):
        jax.ffi.register_ffi_target(TARGET, {name: jax.ffi.pycapsule(function) for name, function in stages.items()}, platform=platform)
    return None
