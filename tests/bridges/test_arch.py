"""What a device is called in the tuning tables."""

from types import SimpleNamespace

import jax
import pytest

from purepage.functional.target import Settings, Target, current_settings, current_target, gfx_name, target_of, wave_size
from purepage.kernels.archs import ARCHS


def device(platform="gpu", *, version="", capability="", kind="", cores=0):
    client = SimpleNamespace(platform_version=version)
    return SimpleNamespace(platform=platform, client=client, compute_capability=capability, device_kind=kind, core_count=cores)


DEVICES = {
    "cpu": (device("cpu"), Target("cpu", "cpu", 1, 1)),
    "H200": (device(version="PJRT C API\ncuda 12090", capability="9.0", kind="NVIDIA H200", cores=132), Target("cuda", "sm_90", 132, 32)),
    "A100": (device(version="cuda 12090", capability="8.0", cores=108), Target("cuda", "sm_80", 108, 32)),
    "MI300X": (device(version="rocm 60300", capability="gfx942", cores=304), Target("rocm", "gfx942", 304, 64)),
    "MI300X with features": (device(version="rocm 7", capability="gfx942:sramecc+:xnack-", cores=304), Target("rocm", "gfx942", 304, 64)),
    "RX 7900 by its kind": (device("rocm", kind="gfx1100", cores=96), Target("rocm", "gfx1100", 96, 32)),
    "tpu": (device("tpu", kind="TPU v5"), Target("tpu", "tpu", 1, 1)),
}


@pytest.mark.parametrize("case", DEVICES)
def test_a_device_has_the_name_of_its_tuning_tables(case):
    given, expected = DEVICES[case]
    assert target_of(given, Settings()) == expected


@pytest.mark.parametrize("name", ARCHS)
def test_a_wave_has_the_threads_that_the_facts_say(name):
    assert wave_size(name) == ARCHS[name].wave_size


@pytest.mark.parametrize(("name", "threads"), [("gfx908", 64), ("gfx1030", 32), ("sm_100", 32)])
def test_gfx9_has_64_threads_a_wave_and_other_gpus_without_facts_32(name, threads):
    assert wave_size(name) == threads


@pytest.mark.parametrize(("text", "name"), [("gfx90a:sramecc+", "gfx90a"), ("AMD gfx1201", "gfx1201"), ("9.4", ""), ("", "")])
def test_the_bare_name_is_cut_out_of_a_target_id(text, name):
    assert gfx_name(text) == name


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a CPU")
def test_the_default_device_of_a_cpu_is_the_interpreter():
    assert current_target() == Target("cpu", "cpu", 1, 1, current_settings())
    with jax.default_device(jax.devices()[0]):
        assert current_target().arch == "cpu"
