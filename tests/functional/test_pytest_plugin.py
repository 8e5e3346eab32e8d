"""The pytest plugin: its option, its fixtures, and what a test prints where a kernel is wrong or a call is not served."""

import sys

import pytest
from processes import run

CONFTEST = 'pytest_plugins = ["purepage.testing.pytest_plugin"]\n'
TESTS = """
import numpy as np
import purepage as pp


def test_names(purepage_implementation, purepage_batch):
    print(f"ran {purepage_implementation} with {len(purepage_batch.seq_lens)} sequences")


def test_attends(purepage_attention):
    spec = pp.CacheSpec(num_blocks=2, block_size=16, num_kv_heads=1, head_size=32, dtype=np.float32, content="xpacked")
    metadata = pp.make_metadata([1], [1], [[1]], block_size=16)
    out = purepage_attention(np.ones((1, 1, 32), np.float32), pp.init_cache(spec), metadata)
    assert not np.asarray(out).any()


def test_right(purepage_check):
    assert purepage_check(lambda batch: batch.reference(**batch.options)[0].astype(batch.query.dtype), pairs=False).ok


def test_wrong(purepage_check):
    purepage_check(lambda batch: batch.reference()[0].astype(batch.query.dtype), pairs=False)


def test_bad_metadata(purepage_checks):
    spec = pp.CacheSpec(num_blocks=2, block_size=16, num_kv_heads=1, head_size=32, dtype=np.float32)
    metadata = pp.make_metadata([1], [1], [[5]], block_size=16)
    pp.paged_attention(np.ones((1, 1, 32), np.float32), pp.init_cache(spec), metadata)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_kernel.py").write_text(TESTS)
    return folder


def test_the_option_chooses_what_runs_and_fixtures_judge_it(project):
    options = ["--purepage-implementation", "xla", "--purepage-implementation", "pallas"]
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *options]
    text = run(command, environment={"JAX_PLATFORMS": "cpu"}, cwd=project).stdout
    assert "ran xla with 6 sequences" in text and "ran pallas with 6 sequences" in text
    assert "PASSED test_kernel.py::test_attends[xla]" in text
    assert "SKIPPED" in text and "pallas can't serve" in text
    assert "PASSED test_kernel.py::test_right" in text
    assert "FAILED test_kernel.py::test_wrong - Failed: " in text and "window: passes none; FAILS 1" in text
    assert "FAILED test_kernel.py::test_bad_metadata - ValueError: " in text
    assert "2 failed, 12 passed, 1 skipped" in text


def test_an_implementation_outside_the_set_is_refused_with_the_set(project):
    done = run([sys.executable, "-m", "pytest", "--purepage-implementation", "cuda"], environment={"JAX_PLATFORMS": "cpu"}, cwd=project)
    assert done.returncode != 0 and "choose from" in done.stderr and "triton" in done.stderr
