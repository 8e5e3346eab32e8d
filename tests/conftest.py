"""Settings that must come before the first import, and fixtures that several test files share."""

import os
import subprocess
import sys
import textwrap

if not os.environ.get("PUREPAGE_TEST_GPU"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share two cores

import pytest


def _run_with_devices(count: int, body: str, timeout: float = 240) -> None:
    prelude = """
        import jax, jax.numpy as jnp, numpy as np
        import purepage as pp
        from purepage.testing import assert_close, random_batch
    """
    program = textwrap.dedent(prelude) + textwrap.dedent(body)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def run_with_devices():
    """Runs a program's text in a process of its own with this many CPU devices; fails with what it printed."""
    return _run_with_devices
