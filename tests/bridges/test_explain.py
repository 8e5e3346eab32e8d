"""`explain`: which implementation and which kernels would run, on this machine or on a named architecture, without running anything."""

import contextlib
import io
import os
import re
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import jax
import jax.numpy as jnp
import pytest

import purepage as pp
from purepage.bridges.aiter import package
from purepage.bridges.steps import steps_of
from purepage.functional.dispatch import IMPLEMENTATIONS, Plan
from purepage.functional.target import current_target

pytest.importorskip("torch")
pytest.importorskip("triton")

SPEC = pp.CacheSpec(num_blocks=4096, block_size=64, num_kv_heads=8, head_size=128, num_layers=4)
BF16 = jnp.bfloat16


def shape(*sizes, dtype=BF16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def decode_batch(seqs, blocks):
    ints = [shape(*sizes, dtype=jnp.int32) for sizes in ((seqs + 1,), (seqs,), (seqs, blocks), (seqs,))]
    return pp.AttentionMetadata(*ints, max_query_len=1)


def only(explanation):
    (choice,) = explanation.choices
    return choice


@pytest.mark.parametrize("arch", ("gfx90a", "gfx942", "gfx1100", "sm_90"))
def test_shapes_alone_give_the_kernels_of_an_arch_that_is_not_here(arch):
    before = current_target()
    found = pp.explain(pp.paged_attention, shape(8, 32, 128), SPEC, decode_batch(8, 64), arch=arch, implementation="triton")
    choice = only(found)
    assert (found.target.arch, choice.operation, choice.implementation) == (arch, "paged_attention", "triton")
    assert [launch.kernel.partition(":")[2] for launch in choice.program.launches] == ["paged_attention_decode", "paged_attention_reduce"]
    text = str(found)
    assert "paged_attention_decode: grid" in text and "block_n" in text and "scratch" in text and "not pallas" in text
    assert current_target() == before


def test_on_a_cpu_the_interpreter_is_named_as_the_reason_against_triton():
    choice = only(pp.explain(pp.update_cache, SPEC, shape(8, 8, 128), shape(8, 8, 128), shape(8, dtype=jnp.int32), arch="cpu"))
    assert choice.implementation == "xla" and choice.program is None
    assert any("interpreter" in reason for reason in choice.unsupported_reasons["triton"])


@pytest.mark.parametrize("arch", ["banana", "gfx803", 942, []], ids=str)
def test_an_unknown_arch_raises_and_lists_what_there_is(arch):
    for implementation in (None, *IMPLEMENTATIONS):
        with pytest.raises(ValueError, match=r"arch is .*it must be one of .*gfx942.*MI300X"):
            pp.explain(pp.update_cache, SPEC, *(shape(8, 8, 128),) * 2, shape(8), arch=arch, implementation=implementation)


@pytest.mark.parametrize(("product", "arch", "units"), [("MI300X", "gfx942", 304), ("AMD Instinct MI355X", "gfx950", 256)])
def test_a_product_is_its_arch(product, arch, units):
    target = pp.explain(pp.paged_attention, shape(8, 32, 128), SPEC, decode_batch(8, 64), arch=product).target
    assert (target.arch, target.compute_units) == (arch, units)


@pytest.mark.parametrize("implementation", ["tritonn", [], 3], ids=str)
def test_an_unknown_implementation_raises_and_lists_what_there_is(implementation):
    with pytest.raises(ValueError, match=r"implementation is .*None or one of 'triton', 'aiter', 'pallas', 'xla'"):
        pp.explain(pp.update_cache, SPEC, *(shape(8, 8, 128),) * 2, shape(8, dtype=jnp.int32), implementation=implementation)


def small_step():
    """(a jitted step, its arguments): a write and an attention by the `triton` implementation."""
    spec = pp.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=1, head_size=32, dtype="float32")
    cache, metadata = pp.init_cache(spec), pp.make_metadata([3], [3], [[2]], block_size=16)
    states = jnp.ones((metadata.slot_mapping.shape[0], 1, 32))

    @jax.jit
    def step(cache, states, metadata):
        cache = pp.update_cache(cache, states, states, metadata.slot_mapping, implementation="triton")
        layers = jax.lax.scan(lambda x, _: (pp.paged_attention(x, cache, metadata, implementation="triton"), None), states, length=2)
        return layers[0], cache

    return step, (cache, states, metadata)


def primitives(jaxpr):
    """Names of the primitives of a jaxpr and of those inside."""
    return {each.primitive.name for each in jaxpr.eqns} | {
        name
        for each in jaxpr.eqns
        for value in jax.tree.leaves(each.params, is_leaf=lambda x: hasattr(x, "jaxpr"))
        if hasattr(value, "jaxpr")
        for name in primitives(value.jaxpr)
    }


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="runs Triton's interpreter")
def test_explaining_a_jitted_function_changes_nothing_that_it_runs():
    step, arguments = small_step()
    pp.explain(step, *arguments)
    assert "buffer_callback" in primitives(jax.make_jaxpr(step)(*arguments).jaxpr)
    assert "buffer_callback" in step.lower(*arguments).as_text() or "callback" in step.lower(*arguments).as_text()
    out, _ = step(*arguments)
    assert out.shape == arguments[1].shape and jnp.all(out[:3] == 1)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="runs Triton's interpreter")
def test_a_jitted_function_is_explained_alike_before_and_after_it_ran():
    step, arguments = small_step()
    before = [str(pp.explain(step, *arguments, arch=arch)) for arch in ("MI300X", "sm_90", None)]
    step(*arguments)
    after = [str(pp.explain(step, *arguments, arch=arch)) for arch in ("MI300X", "sm_90", None)]
    assert before == after and len(set(after)) == 3
    assert all(text.count("update_cache: triton") == text.count("paged_attention: triton") == 1 for text in after)


def test_the_fp8_kind_of_an_explained_backend_is_that_of_the_explained_arch():
    spec = pp.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=1, head_size=64, content="xpacked", order="LHBNC")
    config = pp.AttentionConfig(num_heads=1, num_kv_heads=1, head_size=64)
    dtypes = {}
    for arch in ("gfx942", "gfx950"):

        def forward(query, cache, metadata, arch=arch):
            dtypes[arch] = pp.rocm_attn.forward(query, None, None, cache, metadata, config, output_scale=jnp.float32(0.5)).dtype.name

        pp.explain(forward, shape(2, 1, 64), spec, decode_batch(2, 2), arch=arch)
    assert dtypes == {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn"}


def test_every_operation_of_a_function_is_explained_in_order():
    def step(cache, query, key, metadata, layer):
        cache = pp.update_cache(cache, key, key, metadata.slot_mapping, layer=layer)
        return pp.paged_attention(query, cache, metadata, layer=layer)

    found = pp.explain(step, SPEC, shape(8, 32, 128), shape(8, 8, 128), decode_batch(8, 4), 2, arch="gfx950")
    assert [choice.operation for choice in found.choices] == ["update_cache", "paged_attention"]
    assert "writes cache in place" in str(found)


def test_a_bad_call_raises_what_the_function_raises():
    with pytest.raises(ValueError, match="head_size"):
        pp.explain(pp.update_cache, SPEC, shape(8, 8, 64), shape(8, 8, 64), shape(8, dtype=jnp.int32))


def test_real_arrays_are_not_computed_with_and_the_cache_is_kept():
    spec = pp.CacheSpec(num_blocks=2, block_size=16, num_kv_heads=1, head_size=32)
    cache, key = pp.init_cache(spec), jnp.ones((1, 1, 32), BF16)
    pp.explain(pp.update_cache, cache, key, key, jnp.array([0]), arch="sm_90")
    assert not jnp.any(cache.data)


def test_another_implementation_that_could_serve_is_told_from_a_refusal():
    batch = pp.testing.random_batch(1)
    arguments = (pp.paged_attention, batch.query, batch.cache(), batch.metadata)
    assert "not pallas: can serve it, triton" not in str(pp.explain(*arguments, arch="gfx942"))
    text = str(pp.explain(*arguments, arch="gfx942", implementation="triton"))
    assert "not xla: can serve it, triton is asked for by name" in text
    assert "not xla: can serve it, triton comes first" in str(pp.explain(*arguments, arch="gfx90a"))


def test_every_implementation_that_serves_a_call_shows_its_steps_side_by_side():
    arguments = pp.paged_attention, shape(8, 32, 128), SPEC, decode_batch(8, 64)
    found = pp.explain(*arguments, arch="gfx942", side_by_side=True)
    steps = only(found).steps
    assert list(steps) == [name for name in IMPLEMENTATIONS if name in steps]
    assert [step.split(":")[0] for step in steps["triton"]] == [
        "Triton kernel paged_attention_decode",
        "Triton kernel paged_attention_reduce",
    ]
    assert [step.split(":")[0] for step in steps["pallas"]] == ["Pallas kernel paged_attention", "Pallas kernel paged_attention_reduce"]
    assert steps["xla"] == ("XLA loop, as many iterations as the data asks for: 2 products, 3 gathers each",)
    if "aiter" in steps:
        assert steps["aiter"] == ("torch operator aiter unified_attention",)
    text, html = str(found), found._repr_html_()
    for name, lines in steps.items():
        assert f"  as {name}:\n    1. {lines[0]}" in text and lines[0] in html
    assert only(pp.explain(*arguments, arch="gfx942")).steps == {} and "  as " not in str(pp.explain(*arguments, arch="gfx942"))


def test_the_page_about_concepts_shows_what_is_printed():
    page = (Path(__file__).parents[2] / "docs/concepts.md").read_text()
    program, shown = re.search(r"```python\n(spec = [^`]*side_by_side=True[^`]*)```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    names = {"pp": pp, "jax": jax, "jnp": jnp}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, names)
    if package.root() is None:
        shown = re.sub(r"  as aiter:\n(    .*\n)*", "", shown)
    assert printed.getvalue().rstrip().endswith(shown.rstrip())


def test_the_steps_of_a_writer_are_its_kernel_or_its_scatter():
    arguments = pp.update_cache, SPEC, shape(8, 8, 128), shape(8, 8, 128), shape(8, dtype=jnp.int32)
    steps = only(pp.explain(*arguments, arch="gfx1100", side_by_side=True)).steps
    assert steps["xla"] == ("XLA operations: 1 scatter",)
    assert steps["triton"][0].startswith("Triton kernel update_cache_kernel: grid") and len(steps["triton"]) == 1


def test_steps_of_a_scan_say_how_often_it_runs():
    def twice(query, cache, metadata):
        return pp.paged_attention(query, cache, metadata) @ jnp.ones((128, 128), BF16)

    def scanned(plan_call):
        return jax.lax.scan(lambda carry, _: (carry @ carry, None), plan_call, length=7)[0]

    assert steps_of(Plan(scanned), jnp.ones((4, 4))) == ("XLA loop, 7 iterations: 1 product each",)
    assert steps_of(Plan(lambda x: x @ x), jnp.ones((4, 4))) == ("XLA operations: 1 product",)
    assert len(pp.explain(twice, shape(8, 32, 128), SPEC, decode_batch(8, 64), side_by_side=True).choices) == 1
