"""Settings that must come before the first import, and fixtures that several test files share."""

import importlib.util
import os
import textwrap

if not os.environ.get("PUREPAGE_TEST_GPU"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share two cores
os.environ["PUREPAGE_CACHE_DIR"] = "/nonexistent/purepage"  # what was tuned or probed on this machine changes no test

import pytest
from pairwise import sample
from processes import run_python

_PRELUDE = """
import jax, jax.numpy as jnp, numpy as np
import purepage as pp
from purepage.testing import assert_close, random_batch
"""

_WITHOUT_TRITON = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="runs slow tests, and every case of sampled ones: hours (make test-all)")


def pytest_collection_modifyitems(config, items):
    """Skips cases that need what is not installed, and leaves out slow tests and most cases of sampled ones.

    A case whose parameter `implementation` is "triton" needs torch and triton. Tests marked `slow` and most cases of those marked `sampled`
    run with --all, or where the name of a test (`::`) is given.
    """
    for item in items:
        if _WITHOUT_TRITON and hasattr(item, "callspec") and item.callspec.params.get("implementation") == "triton":
            item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(_WITHOUT_TRITON)}"))
    if config.getoption("--all") or any("::" in argument for argument in config.args):
        return
    left_out = {item for item in items if item.get_closest_marker("slow")}
    groups = {}
    for item in items:
        if item.get_closest_marker("sampled") and item not in left_out:
            groups.setdefault((item.path, item.originalname), []).append(item)
    for group in groups.values():
        (count,) = group[0].get_closest_marker("sampled").args
        kept = sample([tuple(item.callspec.params.values()) for item in group], count)
        left_out |= {item for place, item in enumerate(group) if place not in kept}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def run_with_devices():
    """Runs a program's text in a process of its own with this many CPU devices; fails with what it printed."""
    return lambda count, body: run_python(_PRELUDE + textwrap.dedent(body), devices=count)
