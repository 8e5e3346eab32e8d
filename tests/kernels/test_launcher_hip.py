"""Every Triton kernel through Triton's own HIP driver and launcher, over a stub runtime: what a GPU would be given is what was planned.

What the stub captured is executed by the emulator on memory that stands for the buffers, and compared with the oracle. No AMD GPU is there:
the launcher is real, the runtime is not.
"""

import importlib
import pkgutil
import re
import shutil

import pytest

from benchmarks.amd_isa import VARIANTS
from purepage.kernels import plans

pytest.importorskip("triton")
pytest.importorskip("torch")

from fake_hip.child import build_stub, has_emulator, run_child
from fake_hip.code_object import kernels_of
from launched_kernels import CASES, SPOILED

if shutil.which("cc") is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

ARCHS = ("gfx942", "gfx950", "gfx1100", "gfx1201")
PARTS = 4
"""Processes for the cases of an arch."""
QUICK = ("attention D128 bf16 over 2^31 elements", "decode D128 native fp8", "write D128 bf16 xpacked")
NOTICED = {
    "grid": r"update_cache_kernel: grid \(4096, 2, 1\), not \(4096, 1, 1\)",
    "swapped buffers": r"update_cache_kernel: argument 4 is \w+, not 'k_scale'",
    "number": r"update_cache_kernel: argument 7 is 00001010, not 4096",
    "waves": r"update_cache_kernel: block \(256, 1, 1\), not 128 threads",
    "stream": r"1 launches are on a stream that is not captured",
    "module load": r"calls of the runtime during a capture: .*hipModuleLoadDataEx",
    "allocation": r"calls of the runtime during a capture: hipMalloc",
    "wait": r"calls of the runtime during a capture: hipDeviceSynchronize",
    "LDS": r"update_cache_kernel: \d+ bytes of dynamic LDS, not",
    "cooperative": r"update_cache_kernel is a cooperative launch",
    "scratch memory": r"update_cache_kernel: argument 9 is 0101010101010101, not 0",
}


@pytest.fixture(scope="session")
def stub(tmp_path_factory):
    return build_stub(tmp_path_factory.mktemp("fake_hip"))


def nothing_is_wrong(outcome, count):
    failures = [f"{name}: {failure}" for name, failure in outcome.wrong.items() if failure is not None]
    assert not failures, "\n".join(failures)
    assert len(outcome.wrong) == count, outcome.wrong


@pytest.mark.skipif(not has_emulator(), reason="the emulator of AMD GPUs is not beside this checkout, at ../shared/amdemu")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", ARCHS)
def test_what_the_launcher_passes_gives_the_oracles_result_in_the_emulator(arch, part, stub):
    names = list(CASES)[part::PARTS]
    nothing_is_wrong(run_child("execute", arch, *names, stub=stub), len(names))


@pytest.mark.parametrize("arch", [ARCHS[0], *(pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHS[1:])])
def test_launches_of_large_shapes_are_passed_as_planned(arch, stub):
    nothing_is_wrong(run_child("launch", arch, *QUICK, stub=stub), len(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", ARCHS)
def test_launches_of_every_variant_are_passed_as_planned(arch, part, stub):
    names = list(VARIANTS)[part::PARTS]
    nothing_is_wrong(run_child("launch", arch, *names, stub=stub), len(names))


def test_a_launch_that_differs_and_a_call_that_no_recording_allows_are_noticed(stub):
    found = run_child("spoil", ARCHS[0], stub=stub).wrong
    assert found.keys() == SPOILED.keys() == NOTICED.keys()
    for name, message in NOTICED.items():
        assert re.match(message, found[name] or "not noticed"), f"{name}: {found[name]}"


def test_no_kernel_is_left_out():
    """Plans name their kernels in constants. The variants have all but the copy of pages, for which there is a case."""
    modules = [importlib.import_module(f"{plans.__name__}.{found.name}") for found in pkgutil.iter_modules(plans.__path__)]
    kernels = {value for module in modules for name, value in vars(module).items() if name.endswith("_KERNEL")}
    planned = {launch.kernel for plan in VARIANTS.values() for launch in plan(ARCHS[0]).launches}
    assert kernels - planned == {"purepage.kernels.triton.page_copy:copy_pages"}


def test_what_is_no_code_object_is_refused():
    with pytest.raises(ValueError, match="not a code object"):
        kernels_of(b"\x7fELF" + bytes(60))
