"""The shared library with the handler: the one that came with the wheel, or built from `launch.cc` on first use where a C++ compiler is."""

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

UNRECORDED = "purepage_launch_unrecorded"
"""Name of the custom call that XLA does not record in command buffers."""

SOURCE = Path(__file__).with_name("launch.cc")
NO_COMPILER = (
    "the native bridge needs a C++ compiler (g++, clang++ or c++ on PATH, or the one that CXX names), or a wheel that has it built"
)
OPTIONS = ("-std=c++17", "-O2", "-shared", "-fPIC")


@cache
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


def build(target: Path, options: tuple[str, ...] = ()) -> Path:
    """Compiles `launch.cc` with the headers of the installed jaxlib into `target`.

    Args:
      target: the library.
      options: more of the compiler's.

    Raises:
      RuntimeError: there is no compiler, or it failed; the message has what it printed.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError(NO_COMPILER)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        command = [cxx, *OPTIONS, "-I", jax.ffi.include_dir(), "-o", str(fresh), str(SOURCE), *options, "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        os.replace(fresh, target)  # atomic: of several processes that build it, each leaves a whole library
    return target


def prebuilt_name(version: tuple[int, int]) -> str:
    """The file that a wheel has, built for this version of XLA's foreign function interface."""
    return f"libpurepage_launch-ffi{version[0]}.{version[1]}.so"


def serves(built_for: tuple[int, int], runtime: tuple[int, int]) -> bool:
    """Whether XLA of one version takes a handler that was built for another: of its own major version, and not newer."""
    return built_for[0] == runtime[0] and built_for[1] <= runtime[1]


def prebuilt(folder: Path = SOURCE.parent) -> Path | None:
    """The library that came with the wheel, where the installed jaxlib takes it."""
    runtime = header_version(jax.ffi.include_dir())
    for path in sorted(folder.glob("libpurepage_launch-ffi*.so")):
        major, _, minor = path.stem.rpartition("-ffi")[2].partition(".")
        if serves((int(major), int(minor)), runtime):
            return path
    return None


def library_path() -> Path:
    """Where the built library is kept, in `$XDG_CACHE_HOME/purepage` (default `~/.cache/purepage`), by the source and jaxlib's release."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "purepage"
    major, minor = header_version(jax.ffi.include_dir())
    digest = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("jaxlib").encode()).hexdigest()[:16]
    return folder / f"libpurepage_launch-ffi{major}.{minor}-{digest}.so"


@cache
def obstacle() -> str | None:
    """Why the library can't be had; None where it is there, or can be built, which `load` does."""
    try:
        return None if prebuilt() or library_path().exists() or compiler() else NO_COMPILER
    except (OSError, KeyError, RuntimeError) as error:  # jaxlib without headers; no home folder
        return f"{type(error).__name__}: {error}"


@cache
def load() -> str | None:
    """Loads the library, building it first where needed, and registers the custom calls for CUDA and ROCm; why that failed, or None."""
    try:
        path = prebuilt() or library_path()
        library = ctypes.CDLL(str(path if path.exists() else build(path)))
        version = divmod(library.purepage_ffi_version(), 1000)
    except (OSError, KeyError, RuntimeError, AttributeError) as error:
        return str(error)
    runtime = header_version(jax.ffi.include_dir())
    if not serves(version, runtime):
        return f"{path} was built for version {version} of XLA's foreign function interface, jaxlib has {runtime}"
    for target, execute in ((TARGET, library.purepage_execute), (UNRECORDED, library.purepage_execute_unrecorded)):
        stages = {"initialize": library.purepage_initialize, "execute": execute}
        for platform in ("CUDA", "ROCM"):
            jax.ffi.register_ffi_target(target, {name: jax.ffi.pycapsule(each) for name, each in stages.items()}, platform=platform)
    return None
