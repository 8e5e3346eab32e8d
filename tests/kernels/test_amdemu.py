"""Every Triton kernel compiled for each AMD architecture, and the assembly executed on the CPU: results against the oracle, emulated."""

import json
import sys
from pathlib import Path

import pytest
from processes import run

from purepage.kernels.archs import amd_archs

pytest.importorskip("triton")
pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT.parent / "shared"
ARCHS = amd_archs(configured_alone=True)
HALVES = ("even", "odd")
QUICK = (("gfx942", "even"), ("gfx1100", "odd"))
"""Every kernel once, on one arch of each wave size. An arch takes a minute or two, and `make test-all` runs them all."""
CASES = 12
GRID = [(arch, half) for arch in ARCHS for half in HALVES]

pytestmark = pytest.mark.skipif(
    not (EMULATOR / "amdemu" / "__init__.py").exists(), reason="the emulator of AMD GPUs is not beside this checkout, at ../shared/amdemu"
)


@pytest.mark.parametrize("arch, half", [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in GRID])
def test_the_emulated_assembly_of_every_kernel_gives_the_oracles_result(arch, half):
    command = [sys.executable, str(ROOT / "tests" / "kernels" / "amd_emulation.py"), arch, str(EMULATOR), half]
    done = run(command, environment={"TRITON_INTERPRET": None, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"})
    cases = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = [f"{name}: {failure}" for name, failure in cases.items() if failure is not None]
    assert not wrong, "\n".join(wrong)
    assert len(cases) == CASES // 2, cases
