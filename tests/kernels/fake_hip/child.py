"""Runs `launched_kernels.py` in a process that has the stub runtime, and a Triton other than the installed one if asked."""

import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from processes import IMPORTABLE, ROOT, run

from .runtime import build, describe

SCRIPT = Path(__file__).resolve().parents[1] / "launched_kernels.py"
EMULATOR = ROOT.parent / "shared"
"""The folder that has the package of the emulator."""


@dataclass(frozen=True)
class Outcome:
    """What a process found: the version of its Triton, and what was wrong with each name, or None."""

    triton: str
    wrong: dict[str, str | None]


def has_emulator() -> bool:
    return (EMULATOR / "amdemu" / "__init__.py").exists()


def build_stub(folder: Path, packages: Path | None = None) -> Path:
    """The stub for the installed Triton, or for the one in `packages`; returns the library's path."""
    return build(folder, _installed() if packages is None else packages / "triton")


def _installed() -> Path:
    found = importlib.util.find_spec("triton")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def run_child(command: str, arch: str, *names: str, stub: Path, packages: Path | None = None) -> Outcome:
    """Runs a command of `launched_kernels.py`.

    Args:
      command, arch, names: see there; no names are all of the command.
      stub: the library that `build_stub` made for the same packages.
      packages: a folder with another Triton, as `pip install --target` fills it.

    Raises:
      AssertionError: the process ended before its time; the message is what it printed.
    """
    path = [*([packages] if packages else []), *IMPORTABLE]
    environment = {
        "FAKE_HIP_DEVICE": describe(arch),
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TRITON_INTERPRET": None,
        "TRITON_LIBHIP_PATH": str(stub),
    }
    done = run([sys.executable, str(SCRIPT), command, arch, str(EMULATOR), *names], environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines[0][0] == "triton", done.stdout
    return Outcome(lines[0][1], dict(lines[1:]))
