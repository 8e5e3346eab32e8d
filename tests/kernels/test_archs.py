"""One file an architecture: what depends on the architecture follows from its facts, or says what was forgotten."""

import ast
import pkgutil
import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks.amd_isa import attention, encoder, merge, native_fp8, rope, writer
from purepage.bridges import jax_triton
from purepage.bridges.aiter import rules
from purepage.functional.errors import UnsupportedError
from purepage.functional.fp8 import e4m3_dtype, kv_cache_dtype
from purepage.functional.target import named_target
from purepage.kernels import archs
from purepage.kernels.archs import ARCHS, OCP, amd_archs, arch_facts, arch_names, find_arch, resolve_arch
from purepage.kernels.archs.configs import ANY, KINDS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PLANS = {"attention": attention(128), "encoder": encoder(64), "write": writer(128), "rope": rope(128), "merge": merge(128)}


@pytest.fixture
def fake(monkeypatch):
    """An architecture that differs from every other one in what the rest of the package asks for."""
    facts = replace(
        ARCHS["gfx942"],
        name="gfx9990",
        products={"MI999": 7},
        steppings=(),
        num_cus=77,
        wave_size=32,
        hardware_fp8=OCP,
        vllm_e4m3="float8_e4m3fn",
        aiter_e4m3="float8_e4m3fn",
        aiter_splits_decode=True,
    )
    monkeypatch.setitem(archs.ARCHS, facts.name, facts)
    return facts


def test_every_file_of_the_package_with_an_arch_is_in_the_table():
    modules = {found.name for found in pkgutil.iter_modules(archs.__path__)} - {"facts", "configs", "choice"}
    assert modules == set(ARCHS)
    assert all(arch.name == name for name, arch in ARCHS.items())


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_the_configurations_of_an_arch_keep_its_limits(arch):
    for table in (arch.prefill, arch.decode):
        assert ANY in table and set(table) <= set(KINDS)
        for config in (config for sizes in table.values() for config in sizes.values()):
            assert config.num_warps * arch.wave_size <= arch.max_threads
            assert config.block_n % (config.masked_block_n or config.block_n) == 0


@pytest.mark.parametrize("arch", [arch for arch in ARCHS.values() if arch.follows], ids=lambda arch: arch.name)
def test_an_arch_that_follows_another_has_its_very_configurations(arch):
    assert arch.prefill is ARCHS[arch.follows].prefill and arch.decode is ARCHS[arch.follows].decode


def test_names_products_and_steppings_are_a_closed_set():
    assert len(set(arch_names())) == len(arch_names())
    assert {resolve_arch(name).name for name in arch_names()} == set(ARCHS)
    assert resolve_arch("MI300A").name == "gfx942" and resolve_arch("MI300A").num_cus == 228
    assert resolve_arch("AMD Instinct MI300X") == resolve_arch("mi300x") == resolve_arch("gfx940") == ARCHS["gfx942"]
    with pytest.raises(ValueError, match=r"arch is 'gfx803': it must be one of gfx90a, .*MI300X") as error:
        resolve_arch("gfx803")
    assert all(name in str(error.value) for name in arch_names())
    with pytest.raises(ValueError, match=r"arch is 942"):
        resolve_arch(942)  # pyright: ignore[reportArgumentType]
    assert find_arch(None) is None


@pytest.mark.parametrize("operation", PLANS)
def test_plans_follow_a_new_arch_and_refuse_an_unknown_one(fake, operation):
    assert PLANS[operation](fake.name).launches
    with pytest.raises(UnsupportedError, match=f"gfx803.*{fake.name}"):
        PLANS[operation]("gfx803")


def test_fp8_kinds_follow_a_new_arch(fake):
    assert native_fp8(fake.name) == "float8_e4m3fn" != native_fp8("gfx942")
    assert e4m3_dtype(fake.name) == kv_cache_dtype("fp8", model_dtype=jnp.bfloat16, arch=fake.name) == jnp.float8_e4m3fn
    assert e4m3_dtype("gfx942") == e4m3_dtype("gfx940") == e4m3_dtype("gfx941") == jnp.float8_e4m3fnuz


def test_the_bridges_follow_a_new_arch(fake):
    device = named_target(fake.name)
    assert (device.platform, device.compute_units, device.wave_size) == ("rocm", 77, 32)
    assert "32 threads a wave" in (jax_triton.unavailable(device) or "")
    assert rules.platform_fp8(device) == "float8_e4m3fn" and rules.splits_every_decode(device)
    assert not rules.splits_every_decode(named_target("gfx942"))


def test_tools_follow_a_new_arch(fake):
    assert fake.name in amd_archs() and fake.name in amd_archs(configured_alone=True)
    assert "gfx1151" in amd_archs() and "gfx1151" not in amd_archs(configured_alone=True)


def verified():
    """The README's words on what was compiled and what was executed by the emulator."""
    *first, last = amd_archs()
    alone = set(amd_archs()) - set(amd_archs(configured_alone=True))
    return f"compiled for {', '.join(first)} and {last} without a GPU, and all but {' and '.join(sorted(alone))}'s assembly executed"


def test_the_readme_says_which_archs_were_compiled_and_emulated():
    assert verified() in README.read_text()


def test_the_readme_and_the_page_on_rocm_complain_of_a_new_arch(fake):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    import test_rocm_docs

    assert verified() not in README.read_text()
    assert f" {fake.name} |" in test_rocm_docs.table().splitlines()[0]
    assert test_rocm_docs.PAGE.read_text() != test_rocm_docs.with_generated(test_rocm_docs.PAGE.read_text())


NAMED = {
    "functional/backends/hip_gates.py": "vLLM's own gate names its architectures",
    "bridges/aiter/package.py": "the architecture whose configurations AITER's kernels take where the device has none of theirs",
}


def _named_archs(path):
    tree = ast.parse(path.read_text())
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in strings if id(node) not in documents and re.fullmatch(r"gfx[0-9a-f]{3,}|sm_\d+", node.value)]


def test_no_other_file_of_the_package_names_an_arch():
    for package in ("functional", "kernels", "bridges"):
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if not name.startswith("kernels/archs/") and name not in NAMED:
                assert not _named_archs(path), f"{name}: ask purepage.kernels.archs instead"


def test_an_arch_is_known_by_triton_under_its_own_name_alone():
    assert arch_facts("gfx942") is ARCHS["gfx942"]
    with pytest.raises(UnsupportedError, match="MI300X"):
        arch_facts("MI300X")
