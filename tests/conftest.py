"""Settings that must come before the first import, and fixtures that several test files share."""

import os
import textwrap

if not os.environ.get("PUREPAGE_TEST_GPU"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share two cores

import pytest
from processes import run_python

_PRELUDE = """
import jax, jax.numpy as jnp, numpy as np
import purepage as pp
from purepage.testing import assert_close, random_batch
"""


@pytest.fixture
def run_with_devices():
    """Runs a program's text in a process of its own with this many CPU devices; fails with what it printed."""
    return lambda count, body: run_python(_PRELUDE + textwrap.dedent(body), devices=count)
