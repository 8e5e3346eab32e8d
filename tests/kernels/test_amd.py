"""Every Triton kernel compiles for every AMD architecture, without a GPU, and keeps the thresholds of `benchmarks/amd_isa.py`.

CI compiles a part of the grid of `benchmarks/amd_isa.py`; PUREPAGE_FULL_AMD=1 compiles all of it.
"""

import os
from dataclasses import replace

import pytest

from purepage.kernels import compile_check
from purepage.kernels.archs import FNUZ, OCP, arch_facts
from purepage.kernels.compile_check import compile_for, jobs_of

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.amd_isa import ARCHS, CACHE, VARIANTS, Row, attention, code_hashes, differences, failed_thresholds, rows_of, writer

PART = (
    "attention D64 bf16 all features",
    "attention D128 bf16 xpacked, all features",
    "attention D128 native fp8 all features",
    "attention D128 bf16 key ranges",
    "attention D256 bf16",
    "attention D512 foreign fp8 all features",
    "encoder D256 f32 all features",
    "encoder D128 bf16 all features",
    "write D256 foreign fp8 interleaved",
    "qk-norm+mrope+write D128 native fp8",
)
SMALLER_PART = PART[3:6]
"""Of an architecture that follows another one, for which all of `PART` is compiled."""
FULL = os.environ.get("PUREPAGE_FULL_AMD") == "1"
CHOSEN = [(arch, variant) for arch in ARCHS for variant in (VARIANTS if FULL else SMALLER_PART if arch_facts(arch).follows else PART)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("arch, variant", CHOSEN)
def test_the_kernels_that_the_tables_choose_keep_every_threshold(arch, variant):
    rows = list(rows_of({variant: VARIANTS[variant]}, (arch,), 1))
    assert rows
    failed = [f"{row.usage.kernel}: {text}" for row in rows for text in failed_thresholds(row)]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", sorted(OCP | FNUZ))
def test_a_kernel_converts_in_hardware_only_the_fp8_kinds_that_the_arch_has(arch, kind):
    for program in (attention(128, cache=kind)(arch), writer(128, kind)(arch)):
        asked = [fact for launch in program.launches for name, fact in launch.facts.items() if name.rpartition(".")[2] == "hardware_fp8"]
        assert asked and all(hardware == (kind in arch_facts(arch).hardware_fp8) for hardware in asked)


class Deadly(str):
    """An architecture that ends the process which unpickles it, as an abort inside LLVM does."""

    def __reduce__(self):
        return os._exit, (3,)


def test_an_abort_of_the_compiler_is_a_result_and_the_next_kernel_is_compiled_all_the_same():
    good = jobs_of(writer(64, tokens=1)("gfx1100"), "gfx1100")[0]
    first, second = compile_for([replace(good, arch=Deadly("gfx1100x")), good])
    assert first.error and "3" in first.error and not second.error and second.vgprs > 0


def test_a_kernel_is_compiled_once(monkeypatch):
    job = jobs_of(writer(64, tokens=1)("gfx942"), "gfx942")[0]
    first = compile_for([job, job], cache_dir=CACHE)
    monkeypatch.setattr(compile_check, "_Compiler", None)
    assert compile_for([job], cache_dir=CACHE) == first[:1]
    assert first[0] == first[1] and first[0].arch == "gfx942"


def test_the_hash_of_the_code_is_that_of_its_instructions_alone():
    """The same kernel under another name and with other debug lines has the same hash, another kernel or option has not."""
    plain, wide = (jobs_of(writer(64, tokens=tokens)("gfx942"), "gfx942")[0] for tokens in (1, 4096))
    nvidia = jobs_of(writer(64, tokens=1)("sm_90"), "sm_90")[0]
    usages = compile_for([plain, replace(plain, launch=replace(plain.launch, num_stages=2)), wide, nvidia], cache_dir=CACHE)
    first, again, other, ptx = (usage.code_hash for usage in usages)
    assert first == again != other and ptx not in (first, other) and all(len(found) == 16 for found in (first, other, ptx))
    text = ".globl a\n; -- Begin function a\na:\n.loc 1 2 3\n v_add v0, v1 ; line 3\n s_endpgm\n.section x\n"
    moved = text.replace("function a\na:", "function b\nb:").replace(".loc 1 2 3", ".loc 1 9 9").replace("line 3", "line 9")
    assert compile_check._amd_code(text) == compile_check._amd_code(moved) == " v_add v0, v1 "
    rows = [Row("v", job, usage) for job, usage in zip((plain, wide), usages[::2], strict=True)]
    assert code_hashes(rows) == {"gfx942|v": f"{first} {other}"}
    assert differences({"gfx942|v": f"{first} {other}"}, code_hashes(rows)) == []
    assert differences({}, code_hashes(rows)) == [f"gfx942|v: not in the file -> {first} {other}"]
