"""`explain`: which implementation and which kernels would run, on this machine or on a named architecture, without running anything."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import jax
import jax.numpy as jnp
import pytest

import purepage as pp
from purepage.bridges.arch import default_arch

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
    before = default_arch()
    found = pp.explain(pp.paged_attention, shape(8, 32, 128), SPEC, decode_batch(8, 64), arch=arch, implementation="triton")
    choice = only(found)
    assert (found.arch.name, choice.operation, choice.implementation) == (arch, "paged_attention", "triton")
    assert [launch.kernel.partition(":")[2] for launch in choice.program.launches] == ["paged_attention_decode", "paged_attention_reduce"]
    text = str(found)
    assert "paged_attention_decode: grid" in text and "block_n" in text and "scratch" in text and "not pallas" in text
    assert default_arch() == before


def test_on_a_cpu_the_interpreter_is_named_as_the_reason_against_triton():
    choice = only(pp.explain(pp.update_cache, SPEC, shape(8, 8, 128), shape(8, 8, 128), shape(8, dtype=jnp.int32), arch="cpu"))
    assert choice.implementation == "xla" and choice.program is None
    assert any("interpreter" in reason for reason in choice.refusals["triton"])


def test_an_arch_without_tuning_is_refused_by_triton_with_its_name():
    choice = only(pp.explain(pp.update_cache, SPEC, shape(8, 8, 128), shape(8, 8, 128), shape(8, dtype=jnp.int32), arch="gfx803"))
    assert choice.implementation == "xla" and any("gfx803" in reason for reason in choice.refusals["triton"])


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
