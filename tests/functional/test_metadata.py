"""The metadata builder and its validator: what they derive, pad, bucket and refuse."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purepage as pp

SPEC = pp.CacheSpec(num_blocks=10, block_size=4, num_kv_heads=1, head_size=8)
TABLE = np.array([[3, 1, 7], [2, 5, 0], [9, 4, 6]])


def build(queries=(2, 0, 5), lengths=(6, 3, 5), table=TABLE, **options):
    return pp.make_metadata(queries, lengths, table, block_size=4, **options)


def test_slots_follow_the_table():
    """Token i of a sequence is at position seq_len - query_len + i, in the block of that position (vLLM's slot_mapping)."""
    metadata = build()
    np.testing.assert_array_equal(metadata.query_start_loc, [0, 2, 2, 7])
    np.testing.assert_array_equal(metadata.slot_mapping, [1 * 4 + 0, 1 * 4 + 1, 36, 37, 38, 39, 16])
    pp.validate_metadata(metadata, SPEC)


def test_padding_adds_empty_sequences_and_skipped_tokens():
    metadata = build(num_tokens=10, num_seqs=5)
    np.testing.assert_array_equal(metadata.query_start_loc, [0, 2, 2, 7, 7, 7])
    np.testing.assert_array_equal(metadata.seq_lens, [6, 3, 5, 0, 0])
    assert metadata.block_table.shape == (5, 3) and metadata.slot_mapping.shape == (10,)
    assert np.all(np.asarray(metadata.slot_mapping[7:]) == -1)
    pp.validate_metadata(metadata, SPEC)


def test_maxima_are_rounded_up_and_single_token_steps_stay_single():
    assert build((1, 1, 0), (6, 3, 5)).max_query_len == 1
    assert {build((q, 0, 0), (12, 3, 5)).max_query_len for q in range(2, 13)} == {16}
    wide = np.arange(3 * 100).reshape(3, 100)
    assert {pp.make_metadata([1, 1, 1], [n, 1, 1], wide, block_size=4).max_seq_len for n in range(1, 401)} == {128, 256, 400}
    assert build(max_query_len=7, max_seq_len=9).max_query_len == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_query_len": 4}, "max_query_len is 4.*5"),
        ({"max_seq_len": 5}, "max_seq_len is 5.*6"),
        ({"num_tokens": 6}, "num_tokens is 6.*7"),
        ({"num_seqs": 2}, "num_seqs is 2.*3"),
        ({"lengths": (1, 3, 5)}, r"seq_lens\[0\] is 1.*query_lens\[0\] = 2"),
        ({"lengths": (6, 3)}, "seq_lens"),
        ({"lengths": (6, -3, 5)}, r"seq_lens\[1\] is -3"),
        ({"lengths": (6, 2**31, 5)}, r"seq_lens\[1\]"),
        ({"table": TABLE[:2]}, "block_table"),
        ({"table": TABLE[0]}, "block_table"),
        ({"table": TABLE.astype(float)}, "block_table"),
        ({"queries": (2.0, 0.0, 5.0)}, "query_lens"),
    ],
)
def test_the_builder_names_what_does_not_fit(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        build(**options)


def test_the_builder_runs_on_the_host():
    with pytest.raises(TypeError, match="host"):
        jax.jit(lambda q: build(queries=q))(jnp.array([1, 1, 1]))


def test_positions_without_a_block_get_no_slot():
    """vllm#54296: a position past the row is not the next row's block; a negative entry is not the last block."""
    metadata = pp.make_metadata([3], [10], np.array([[3, 1]]), block_size=4)
    np.testing.assert_array_equal(metadata.slot_mapping, [1 * 4 + 3, -1, -1])
    np.testing.assert_array_equal(pp.make_metadata([2], [6], np.array([[3, -1]]), block_size=4).slot_mapping, [-1, -1])


def test_slots_past_int32_are_refused():
    with pytest.raises(ValueError, match="block_table"):
        pp.make_metadata([1], [1], np.array([[2**27]]), block_size=16)


def test_later_changes_to_the_arguments_do_not_reach_the_metadata():
    """jax#37830: a 64-byte aligned NumPy array may be aliased by the device array."""
    lengths = np.frombuffer(bytearray(64 + 4096), np.uint8)
    start = -lengths.ctypes.data % 64
    aligned = lengths[start : start + 16 * 4].view(np.int32)
    aligned[:] = 5
    metadata = pp.make_metadata(np.ones(16, np.int32), aligned, np.arange(32).reshape(16, 2), block_size=4)
    aligned[:] = 7
    assert np.all(np.asarray(metadata.seq_lens) == 5)


def test_integers_of_any_width_build_the_same_metadata():
    expected = build()
    for dtype in (np.int8, np.uint8, np.int16, np.int64):
        got = build(np.array([2, 0, 5], dtype), np.array([6, 3, 5], dtype), TABLE.astype(dtype))
        assert all(
            np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        )


def changed(**changes):
    metadata = build()
    arrays = {name: jnp.asarray(value) for name, value in changes.items() if not isinstance(value, (int, bool))}
    return replace(metadata, **{**changes, **arrays})


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (lambda: changed(query_start_loc=[1, 2, 2, 7]), r"query_start_loc\[0\] is 1"),
        (lambda: changed(query_start_loc=[0, 2, 1, 7]), r"query_start_loc\[2\].*sequence 1"),
        (lambda: changed(query_start_loc=[0, 2, 2, 8], max_query_len=8, seq_lens=[6, 3, 8]), r"query_start_loc\[-1\] is 8"),
        (lambda: changed(max_query_len=4), "max_query_len is 4.*sequence 2"),
        (lambda: changed(max_seq_len=5), r"max_seq_len is 5.*seq_lens\[0\]"),
        (lambda: changed(seq_lens=[1, 3, 5]), r"seq_lens\[0\] is 1"),
        (lambda: changed(seq_lens=[6, 13, 5], max_seq_len=16), r"block_table\[1\].*4 blocks"),
        (lambda: changed(block_table=[[3, 10, 7], [2, 5, 0], [9, 4, 6]]), r"block_table\[0, 1\] is 10.*sequence 0"),
        (lambda: changed(block_table=[[3, 1, 7], [-1, 5, 0], [9, 4, 6]]), r"block_table\[1, 0\] is -1"),
        (lambda: changed(block_table=[[3, 3, 7], [2, 5, 0], [9, 4, 6]]), "block 3 twice"),
        (lambda: changed(slot_mapping=[4, 5, 36, 37, 38, 39, 40]), r"slot_mapping\[6\] is 40"),
        (lambda: changed(slot_mapping=[4, 5, 36, 37, 38, 39, 36]), r"36 for tokens \[2, 6\]"),
    ],
)
def test_the_validator_names_the_sequence(metadata, words):
    with pytest.raises(ValueError, match=words):
        pp.validate_metadata(metadata(), SPEC)


def test_the_validator_allows_what_nobody_needs():
    table = [[3, 1, 99], [2, -1, -1], [9, 4, 2**31 - 1]]
    pp.validate_metadata(changed(block_table=table), SPEC)
    pp.validate_metadata(changed(block_table=[[3, 1, 7], [3, 5, 0], [9, 4, 6]]), SPEC)  # a shared prefix
    pp.validate_metadata(replace(changed(seq_lens=[1, 3, 5]), causal=False), SPEC)


def test_the_validator_needs_values():
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda m: pp.validate_metadata(m, SPEC))(build())


def test_metadata_is_a_pytree_with_three_static_fields():
    leaves, tree = jax.tree.flatten(build())
    assert len(leaves) == 4
    assert tree != jax.tree.structure(build(max_query_len=9)) and tree == jax.tree.structure(build((1, 1, 5), (4, 4, 7)))
