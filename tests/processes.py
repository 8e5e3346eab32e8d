"""Programs in a process of their own: another number of devices, another environment, or a fresh interpreter."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HANG_GUARD_S = 1800
"""Ends a process that hangs. It decides no result: it is far above what a program takes on a loaded machine."""
IMPORTABLE = (ROOT, ROOT / "src", ROOT / "tests", ROOT / "tests/bridges")
"""Where a child finds the package and the helpers of the tests."""


def run(command: list[str], *, environment: Mapping[str, str | None] = {}, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command whose Python finds this checkout's package and the helpers of the tests; captures what it prints.

    Args:
      command: program and arguments.
      environment: variables besides those of this process; None removes one.
      cwd: working directory; default this process's.

    Returns:
      The finished process, whatever its exit status.
    """
    changed = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, IMPORTABLE), os.environ.get("PYTHONPATH", "")]), **environment}
    return subprocess.run(
        command,
        env={name: value for name, value in changed.items() if value is not None},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )


def run_python(
    program: str,
    *arguments: str,
    devices: int | None = None,
    environment: Mapping[str, str | None] = {},
    cwd: Path | None = None,
) -> str:
    """Runs the text of a program and returns what it printed.

    Args:
      program: Python source; common indentation is removed.
      arguments: `sys.argv[1:]` of the program.
      devices: JAX then has this many CPU devices.
      environment, cwd: see `run`.

    Raises:
      AssertionError: the program's exit status is not 0; the message is what it printed.
    """
    if devices is not None:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **environment}
    done = run([sys.executable, "-c", textwrap.dedent(program), *arguments], environment=environment, cwd=cwd)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout
