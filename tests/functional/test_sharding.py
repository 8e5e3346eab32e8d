"""Sharded caches: `pp.sharding`, and every operation over meshes of eight fake devices against the same call on one."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from processes import run_python
from sharded import MESHES

import purepage as pp
from purepage.sharding import Collective, Shardings, collectives, join_metadata, validate_metadata
from purepage.testing import reference_attention

SPEC = pp.CacheSpec(num_blocks=16, block_size=16, num_kv_heads=4, head_size=32)


def over(**axes):
    return Shardings(AbstractMesh(tuple(axes.values()), tuple(axes)))


def run_cases(program, *, triton=False):
    """Runs a program that imports `tests/sharded.py`, with eight devices."""
    environment = {"TRITON_INTERPRET": "1"} if triton else {}
    return run_python("from sharded import *\n" + textwrap.dedent(program), devices=8, environment=environment)


# What lies where.


def test_each_type_has_its_axes():
    s = over(data=2, context=2, model=2)
    cache = s.cache(SPEC)
    assert cache.data.spec == PartitionSpec(None, ("data", "context"), "model", None, None)
    assert cache.k_scale.spec == PartitionSpec()
    assert s.cache(SPEC, scales_per_head=True).v_scale.spec == PartitionSpec(None, "model")
    assert s.tokens.spec == PartitionSpec("data", "model") and s.rows.spec == PartitionSpec("data")
    assert s.heads.spec == PartitionSpec("model") and s.replicated.spec == PartitionSpec()
    metadata = pp.make_metadata([1, 1], [3, 20], [[1, 2], [3, 4]], block_size=16)
    placed = s.metadata(metadata)
    assert placed.query_start_loc.spec == PartitionSpec() and placed.block_table.spec == PartitionSpec("data", None)
    assert placed.seq_lens.spec == placed.slot_mapping.spec == PartitionSpec("data")
    assert jax.tree.structure(placed) == jax.tree.structure(metadata)
    assert jax.tree.structure(cache) == jax.tree.structure(pp.init_cache(SPEC))
    blocks = pp.gather_blocks(pp.init_cache(SPEC), [1, 2])
    assert s.blocks(blocks).data.spec == PartitionSpec(None, None, "model", None, None)


@pytest.mark.parametrize("content", ["packed", "xpacked", "shuffled", "flash"])
@pytest.mark.parametrize("order", ["LBHNC", "LHBNC"])
def test_heads_and_blocks_are_found_in_every_layout(content, order):
    spec = pp.CacheSpec(num_blocks=16, block_size=16, num_kv_heads=4, head_size=32, content=content, order=order)
    found = over(data=2, model=4).cache(spec).data.spec
    assert {axis: name for axis, name in zip(spec.axes, found, strict=True) if name} == {"B": "data", "H": "model"}


def test_an_axis_that_the_mesh_lacks_is_left_out_and_names_can_be_chosen():
    assert over(model=2).tokens.spec == PartitionSpec(None, "model")
    s = Shardings(AbstractMesh((2, 4), ("dp", "tp")), model="tp", data="dp")
    assert s.cache(SPEC).data.spec == PartitionSpec(None, "dp", "tp", None, None)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "padded", "stored"),
    [(8, 4, 4, 8, 4), (8, 2, 4, 8, 4), (32, 1, 8, 32, 8), (9, 3, 2, 12, 6), (64, 8, 16, 64, 16), (6, 3, 4, 12, 12), (4, 4, 1, 4, 4)],
)
def test_few_kv_heads_are_held_more_than_once(heads, kv_heads, devices, padded, stored):
    s = over(model=devices)
    assert (s.num_heads(heads, kv_heads), s.num_kv_heads(kv_heads)) == (padded, stored)
    assert s.cache_spec(pp.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=kv_heads, head_size=32)).num_kv_heads == stored
    # Query head h of the model is one of the padded ones, whose KV head is a copy of its own.
    queries = np.arange(heads) + 1
    at = np.asarray(s.pad_heads(queries, kv_heads, axis=0))
    copies = np.asarray(s.repeat_kv_heads(np.arange(kv_heads), axis=-1))
    assert at.shape == (padded,) and copies.shape == (stored,)
    assert sorted(at[at > 0]) == sorted(queries)
    for place, number in enumerate(at):
        if number:
            assert copies[place // (padded // stored)] == (number - 1) // (heads // kv_heads)


def test_repeated_and_padded_heads_attend_as_the_model_does():
    rng = np.random.default_rng(0)
    s = over(model=2)
    spec = pp.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=3, head_size=32, dtype=jnp.float32)
    metadata = pp.make_metadata([5], [5], [[2]], block_size=16)
    query, key, value = (rng.standard_normal((5, heads, 32)).astype(np.float32) for heads in (9, 3, 3))
    key, value, padded = s.repeat_kv_heads(key, axis=1), s.repeat_kv_heads(value, axis=1), s.pad_heads(query, 3, axis=1)
    cache = pp.update_cache(pp.init_cache(s.cache_spec(spec)), key, value, metadata.slot_mapping)
    out = np.asarray(pp.paged_attention(padded, cache, metadata)).reshape(5, 3, 4, 32)
    plain = pp.update_cache(pp.init_cache(spec), key[:, ::2], value[:, ::2], metadata.slot_mapping)
    expected = np.asarray(pp.paged_attention(query, plain, metadata)).reshape(5, 3, 3, 32)
    np.testing.assert_allclose(out[:, :, :3], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Shardings("model"), "mesh is 'model'"),
        (lambda: Shardings(AbstractMesh((2,), ("x",)), model="x", data="x"), "context is 'context'"),
        (lambda: over(model=3).cache(SPEC), "spec.num_kv_heads is 4.*multiple of the 3 devices of axis 'model'"),
        (lambda: over(data=5).cache(SPEC), "spec.num_blocks is 16.*multiple of the 5 devices"),
        (lambda: over(data=3).metadata(pp.make_metadata([1, 1], [3, 20], [[1, 2], [3, 4]], block_size=16)), "metadata.seq_lens"),
        (lambda: pp.init_cache(SPEC, sharding="model"), "sharding is 'model'"),
        (lambda: over(model=2).num_heads(5, 4), "num_heads is 5"),
        (lambda: over(model=2).cache("spec"), "cache is 'spec'"),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_joined_metadata_is_that_of_the_parts_alone():
    """By the oracle: rows of the whole are the rows of the parts, and padding is 0."""
    rng = np.random.default_rng(0)
    spec = pp.CacheSpec(num_blocks=16, block_size=16, num_kv_heads=1, head_size=16, dtype=jnp.float32)
    tables = [rng.permutation(8)[:4].reshape(2, 2) for _ in range(2)]
    lens = [[20, 3], [9, 31]]
    parts = [
        pp.make_metadata(queries, seq, table, block_size=16, num_tokens=8, num_seqs=4)
        for queries, seq, table in zip(([5, 1], [2, 3]), lens, tables, strict=True)
    ]
    whole = join_metadata(parts, num_blocks=16)
    pp.validate_metadata(whole, spec)
    validate_metadata(whole, spec, over(data=2))
    assert np.all(np.diff(np.asarray(whole.query_start_loc)) <= whole.max_query_len)
    pool = [rng.standard_normal((16, 16, 1, 16)) for _ in range(2)]
    query = rng.standard_normal((16, 1, 16))

    def attend(metadata, query, pool):
        found = reference_attention(query, pool[0], pool[1], metadata.query_start_loc, metadata.seq_lens, metadata.block_table, scale=0.25)
        return found[0] if isinstance(found, tuple) else found

    out = attend(whole, query, pool)
    for number, part in enumerate(parts):
        rows, blocks = slice(8 * number, 8 * number + 8), slice(8 * number, 8 * number + 8)
        np.testing.assert_array_equal(out[rows], attend(part, query[rows], [side[blocks] for side in pool]))


def test_joined_metadata_needs_a_sequence_for_its_padding():
    full = pp.make_metadata([2], [5], [[1]], block_size=16, num_tokens=4, num_seqs=1)
    with pytest.raises(ValueError, match=r"parts\[0\] is .*2 padding tokens.*larger num_seqs"):
        join_metadata([full, full], num_blocks=8)
    with pytest.raises(ValueError, match="num_blocks is 9"):
        join_metadata([full, full], num_blocks=9)
    with pytest.raises(TypeError, match="parts is"):
        join_metadata([], num_blocks=8)


def test_a_sequence_with_blocks_of_another_device_is_named():
    parts = [pp.make_metadata([1], [5], [[1]], block_size=16)] * 2
    whole = join_metadata(parts, num_blocks=16)
    validate_metadata(whole, SPEC, over(data=2))
    strayed = pp.make_metadata([1, 1], [5, 5], [[9], [1]], block_size=16)
    with pytest.raises(ValueError, match=r"sequence 0 is 'block 9': .*blocks 0 to 8 of its device 0 of axis 'data'"):
        validate_metadata(strayed, SPEC, over(data=2))
    uneven = pp.make_metadata([3, 1], [5, 5], [[1], [9]], block_size=16)
    with pytest.raises(ValueError, match="sequence 0 is 'rows 0 to 3'"):
        validate_metadata(uneven, SPEC, over(data=2))


# What a program moves.

HLO = """
HloModule step
%body (p: f32[4]) -> f32[4] {
  %r = f32[4,8]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add
}
ENTRY %main (a: bf16[2]) -> bf16[8] {
  %g = bf16[8,16]{1,0} all-gather(%a), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  %s = (u8[2,4]{1,0}, u8[8,4]{1,0}) all-gather-start(%b), replica_groups={{0,1,2,3}}, dimensions={0}
  %d = u8[8,4]{1,0} all-gather-done(%s)
  %t = f32[2]{0} reduce-scatter(%c), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
  %p = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%c), source_target_pairs={{0,1},{1,0}}
  %m = f32[16]{0} all-reduce(%c), replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}, to_apply=%add
  %n = f32[] add(%x, %y), metadata={op_name="all-reduce"}
}
"""


def test_collectives_of_anything_but_text_are_refused_by_name():
    with pytest.raises(TypeError, match=r"text is .*: it must be the text of a compiled program"):
        collectives(jax.jit(lambda x: x).lower(1.0).compile())


def test_the_collectives_of_a_program_are_read_with_their_sizes():
    found = collectives(HLO)
    assert found == [
        Collective("all-reduce", ("f32[4,8]",), 128, 4, True),
        Collective("all-gather", ("bf16[8,16]",), 256, 4, False),
        Collective("all-gather", ("u8[8,4]",), 32, 4, False),
        Collective("reduce-scatter", ("f32[2]",), 8, 8, False),
        Collective("collective-permute", ("f32[3]",), 12, 0, False),
        Collective("all-reduce", ("f32[16]",), 64, 4, False),
    ]
    assert [each.sent for each in found] == [192, 192, 24, 56, 12, 96]
    assert [each.largest_operand for each in found] == [128, 64, 8, 64, 12, 64]


# Eight devices.


def test_a_step_over_every_mesh_is_that_of_one_device_and_moves_no_cache():
    run_cases(
        """
        check_step("data x context x model", "Auto", "xla", dtype="float8_e4m3fn")
        check_step("data x context x model", "Explicit", "xla", write="qk_norm", mode="mixed", options=(("sliding_window", 20),))
        check_step("data x model", "Auto", "xla", mode="mixed", write="update", dtype="bfloat16")
        """
    )


@pytest.mark.parametrize("implementation", ["triton"])
def test_kernels_under_plain_jit_are_divided(implementation):
    pytest.importorskip("triton")
    run_cases(
        """
        check_step("context x model", "Auto", "triton", write="update")
        """,
        triton=True,
    )


def test_a_block_that_no_device_has_and_what_can_not_be_divided():
    run_cases("check_lost_and_refused('Auto')")


@pytest.mark.slow
def test_a_block_that_no_device_has_and_what_can_not_be_divided_over_explicit_axes():
    run_cases("check_lost_and_refused('Explicit')")


@pytest.mark.slow
def test_arguments_on_one_device_with_in_shardings_and_vmap_on_many():
    run_cases("check_shardings_of_jit_alone()")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_other_operations_over_every_mesh(kind):
    run_cases(f"for mesh in MESHES: check_other_operations(mesh, '{kind}')")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_writer_and_dtype_over_every_mesh(mesh, kind, implementation):
    run_cases(
        f"""
        for write, dtype in (("rope", "float8_e4m3fn"), ("qk_norm", "float32"), ("update", "bfloat16")):
            check_step("{mesh}", "{kind}", "{implementation}", write=write, dtype=dtype, eager=True)
        for options in ((), (("sliding_window", 20), ("traced", True)), (("ranges", True), ("sliding_window", 9))):
            check_step("{mesh}", "{kind}", "{implementation}", mode="mixed", options=options)
        """,
        triton=implementation == "triton",
    )
