"""`import purepage` gives the whole contract, and asks for nothing that a CPU-only jax installation lacks."""

import importlib
import pkgutil
import textwrap

import pytest
from processes import run_python

import purepage as pp

OPTIONAL = (
    "accelerate",
    "aiter",
    "gguf",
    "hypothesis",
    "jax_triton",
    "matplotlib",
    "pytest",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
)
OF_THE_TEST_KIT = {"pytest_plugin": "pytest", "strategies": "hypothesis"}
"""Modules of `purepage.testing` that need a package of the extra `testing`."""
TYPES = "AttentionConfig AttentionMetadata AttentionType CacheSpec Capabilities KVCache UnsupportedError"
FUNCTIONS = """
    cache_from_logical cache_to_logical cascade_attention convert_cache copy_blocks encoder_attention gather_blocks init_cache make_metadata
    merge_attention_states paged_attention qk_norm_mrope_and_update_cache qk_norm_rope_and_update_cache rope_and_update_cache
    rotary_embedding scatter_blocks update_cache validate_metadata
"""
BACKENDS = ("rocm_attn", "rocm_aiter_unified_attn")
METHODS = "cache_spec forward init_cache kv_cache_update qk_norm_rope_and_kv_cache_update rope_and_kv_cache_update supports".split()


def run(program: str, **environment: str) -> str:
    """What a program prints in a process where no optional package can be imported."""
    block = f"""
        import sys
        class Without:
            def __init__(self, finder):
                self.finder = finder
            def __getattr__(self, name):
                return getattr(self.finder, name)
            def find_spec(self, name, path=None, target=None):
                return None if name.partition(".")[0] in {OPTIONAL!r} else self.finder.find_spec(name, path, target)
        sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    """
    return run_python(textwrap.dedent(block) + textwrap.dedent(program), environment=environment)


@pytest.mark.parametrize("name", [*TYPES.split(), *FUNCTIONS.split(), *BACKENDS])
def test_every_name_of_the_contract_is_at_the_top(name):
    assert hasattr(pp, name)
    assert name in pp.__all__


@pytest.mark.parametrize("name", [*TYPES.split(), *FUNCTIONS.split()])
def test_functional_and_the_top_share_their_objects(name):
    assert getattr(pp, name) is getattr(importlib.import_module("purepage.functional"), name)


def test_all_is_sorted_and_complete():
    assert pp.__all__ == sorted(pp.__all__)
    assert all(hasattr(pp, name) for name in pp.__all__)
    assert set(importlib.import_module("purepage.functional").__all__) <= set(pp.__all__)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_is_one_module_however_it_is_reached(backend):
    module = importlib.import_module(f"purepage.{backend}")
    assert getattr(pp, backend) is module
    behind = importlib.import_module(f"purepage.functional.backends.{backend}")
    assert module.__all__ == behind.__all__
    assert all(getattr(module, name) is getattr(behind, name) for name in behind.__all__)
    assert {*METHODS, "CAPABILITIES"} <= set(module.__all__)


def test_both_backends_have_the_methods_of_their_vllm_classes():
    only_unified = {"qk_norm_mrope_and_kv_cache_update"}
    assert only_unified <= set(pp.rocm_aiter_unified_attn.__all__)
    assert not only_unified & set(pp.rocm_attn.__all__)


def test_import_asks_for_no_optional_package_and_starts_no_device():
    out = run(
        """
        import jax
        before = set(sys.modules)
        import purepage
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*sorted(name for name in new if name not in sys.stdlib_module_names))
        print("purepage.functional.testing" in sys.modules)
        """,
        JAX_PLATFORMS="no_such_platform",  # initialising any backend fails
    )
    packages, oracle = out.splitlines()
    assert set(packages.split()) <= {"jax", "jaxlib", "jaxtyping", "numpy", "purepage", "typing_extensions", "wadler_lindig"}
    assert oracle == "False", "the oracle is imported when first used"


def test_the_oracle_comes_on_first_use_by_either_name():
    assert run("import purepage as pp; oracle = pp.testing; import purepage.testing as other; print(oracle is other)") == "True\n"
    assert "testing" in dir(pp)


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = pp.no_such_name


def modules(package: str) -> list[str]:
    path = importlib.import_module(package).__path__
    return [package, *(found.name for found in pkgutil.walk_packages(path, f"{package}."))]


def test_the_functional_core_and_plain_jax_kernels_import_without_optional_packages():
    names = {*modules("purepage.functional"), *modules("purepage.kernels.xla"), *modules("purepage.kernels.archs")}
    names = sorted(names - {f"purepage.functional.testing.{name}" for name in OF_THE_TEST_KIT})
    assert len(names) > 20
    run(f"import importlib\nfor name in {names!r}: importlib.import_module(name)")


@pytest.mark.parametrize("module", OF_THE_TEST_KIT)
def test_a_module_of_the_test_kit_says_which_extra_it_needs(module):
    out = run(
        f"""
        try:
            import purepage.testing.{module}
        except ImportError as error:
            print(error)
        """
    )
    assert f"needs {OF_THE_TEST_KIT[module]}" in out and "pip install 'purepage[testing]'" in out


def test_a_picture_without_matplotlib_says_which_extra_it_needs():
    out = run(
        """
        import purepage as pp
        try:
            pp.viz.roofline({}, flops_per_s=1.0, bytes_per_s=1.0)
        except ImportError as error:
            print(error)
        """
    )
    assert out == "purepage.viz needs matplotlib: pip install 'purepage[viz]'\n"


def test_without_optional_packages_the_call_runs_and_a_named_kernel_says_what_is_missing():
    out = run(
        """
        import jax.numpy as jnp, purepage as pp
        cache = pp.init_cache(pp.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=1, head_size=32, dtype=jnp.float32))
        metadata = pp.make_metadata([1], [3], [[2]], block_size=16)
        query = jnp.ones((1, 2, 32))
        print(pp.paged_attention(query, cache, metadata).shape)
        for name in ("triton", "aiter"):
            try:
                pp.paged_attention(query, cache, metadata, implementation=name)
            except pp.UnsupportedError as error:
                print(error)
        """
    )
    shape, *refusals = out.splitlines()
    assert shape == "(1, 2, 32)"
    assert len(refusals) == 2
    assert all("xla can" in line for line in refusals)
