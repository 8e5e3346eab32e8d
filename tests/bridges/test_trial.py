"""A package that is installed and broken, or that brings a second HIP runtime, is passed over with one warning; by name it is refused."""

import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

import purepage as pp
from purepage.bridges import trial
from purepage.functional import dispatch
from purepage.functional.dispatch import Unsupported, choose, plan_with, preferred
from purepage.functional.target import Settings, Target, assuming_target, current_target, using_settings
from purepage.testing import random_batch

pytest.importorskip("torch")
pytest.importorskip("triton")

MI300X = Target("rocm", "gfx942", 304, 64, Settings(bridge="callback"))
MAPS = """\
7f00-7f01 r-xp 00000000 fe:01 11    /opt/rocm/lib/libamdhip64.so.7.2
7f01-7f02 rw-p 00001000 fe:01 11    /opt/rocm/lib/libamdhip64.so.7.2
7f02-7f03 r-xp 00000000 fe:01 12    /opt/rocm/lib/libhsa-runtime64.so.1
7f03-7f04 rw-p 00000000 00:00 0
7f04-7f05 r-xp 00000000 fe:01 33    /venv/lib/python3.12/site-packages/torch/lib/libamdhip64.so (deleted)
"""


@pytest.fixture
def gpu(monkeypatch):
    """What JAX would compute on; the planning of a call needs no more of it."""
    monkeypatch.setattr(trial, "on_gpu", lambda: True)
    dispatch._warn_once.cache_clear()
    with assuming_target(MI300X):
        yield
    dispatch._warn_once.cache_clear()


def call():
    batch = random_batch(1, dtype=jnp.bfloat16)
    from purepage.functional.attention import paged_attention_call

    return paged_attention_call(batch.query, batch.cache(), batch.metadata, layer=0)


def break_package(monkeypatch, tmp_path, name, body):
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    for known in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, known)
    trial.import_failure.cache_clear()


def test_two_runtimes_are_two_inodes_of_one_library():
    lines = MAPS.splitlines()
    found = trial.mapped("libamdhip64", lines)
    assert found == ("/opt/rocm/lib/libamdhip64.so.7.2", "/venv/lib/python3.12/site-packages/torch/lib/libamdhip64.so (deleted)")
    said = trial.foreign_runtime(found)
    assert said is not None and all(path in said for path in found) and "PUREPAGE_BRIDGE=native" in said
    assert trial.foreign_runtime(trial.mapped("libamdhip64", lines[:4])) is None
    assert trial.foreign_runtime(trial.mapped("libamdhip64", lines[3:4])) is None


@pytest.mark.parametrize(
    "body", ["raise OSError('libamdhip64.so.7: cannot open shared object file')", "raise SystemExit(3)", "import not_there_at_all"]
)
def test_an_import_that_fails_is_told_whatever_it_raises(monkeypatch, tmp_path, body):
    break_package(monkeypatch, tmp_path, "purepage_broken_package", body)
    said = trial.import_failure("purepage_broken_package")
    assert said is not None and said.startswith("purepage_broken_package is installed and does not import: ")
    assert body.partition(" ")[2].partition("(")[0] in said or "not_there_at_all" in said
    assert trial.import_failure("json") is None


@pytest.mark.usefixtures("gpu")
def test_a_broken_torch_leads_to_xla_with_one_warning_and_is_a_refusal_by_name(monkeypatch):
    why = "torch is installed and does not import: OSError: libamdhip64.so.7: cannot open shared object file"
    monkeypatch.setattr(trial, "import_failure", lambda package: why if package == "torch" else None)
    with pytest.warns(RuntimeWarning, match=f"triton is passed over, xla serves its calls: {why}") as told:
        assert choose("paged_attention", call())[0] == "xla"
    assert len([each for each in told if "passed over" in str(each.message)]) == len({str(each.message) for each in told})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("paged_attention", call())[0] == "xla"
    with pytest.raises(pp.UnsupportedError, match=f"triton can't serve this paged_attention: {why}"):
        choose("paged_attention", call(), "triton")


@pytest.mark.usefixtures("gpu")
def test_a_bridge_without_torch_does_not_mind_a_broken_torch(monkeypatch):
    monkeypatch.setattr(trial, "import_failure", lambda package: "torch is broken" if package == "torch" else None)
    native = Target("rocm", "gfx942", 304, 64, Settings(bridge="native"))
    assert not isinstance(plan_with("triton", "paged_attention", call(), native, explicit=False), Unsupported)


@pytest.mark.usefixtures("gpu")
def test_a_second_hip_runtime_is_refused_with_both_paths(monkeypatch, tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    monkeypatch.setattr(trial, "MAPS", maps)
    planned = plan_with("triton", "paged_attention", call(), MI300X, explicit=True)
    assert isinstance(planned, Unsupported) and planned.broken
    assert "/opt/rocm/lib/libamdhip64.so.7.2 and /venv/lib/" in planned.reasons[0]
    cuda = Target("cuda", "sm_90", 132, 32, Settings(bridge="callback"))
    assert not isinstance(plan_with("triton", "paged_attention", call(), cuda, explicit=True), Unsupported)


def test_nothing_is_imported_on_a_cpu_that_was_not_asked_for(monkeypatch):
    tried = []
    monkeypatch.setattr(trial, "import_failure", lambda package: tried.append(package))
    assert jax.default_backend() == "cpu"
    assert choose("paged_attention", call())[0] == "xla" and not tried


def test_one_switch_sends_to_aiter_whatever_it_serves_by_name():
    assert preferred(MI300X, "paged_attention", call()).names[:2] == ("triton", "aiter")
    with using_settings(prefer_aiter=True):
        order = preferred(current_target(), "paged_attention", call())
        assert order.names == ("aiter", "triton", "pallas", "xla") and "PUREPAGE_PREFER_AITER is on" in order.why
    from purepage.bridges.aiter import package

    if package.root() is None:
        pytest.skip("amd-aiter is not installed")
    batch = random_batch(1, dtype=jnp.bfloat16)
    arguments = (pp.paged_attention, batch.query, batch.cache(), batch.metadata)
    assert "paged_attention: triton" in str(pp.explain(*arguments, arch="MI300X"))
    with using_settings(prefer_aiter=True):
        assert "paged_attention: aiter" in str(pp.explain(*arguments, arch="MI300X"))
