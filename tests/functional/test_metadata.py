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
        ({"lengths": (6, 13, 5)}, r"seq_lens\[1\] is 13.*at most 12, the 3 blocks of 4 tokens"),
        ({"lengths": (6, 3)}, "seq_lens"),
        ({"lengths": (6, -3, 5)}, r"seq_lens\[1\] is -3"),
        ({"lengths": (6, 2**31, 5)}, r"seq_lens\[1\]"),
        ({"table": TABLE[:2]}, "block_table"),
        ({"table": TABLE[0]}, "block_table"),
        ({"table": TABLE.astype(float)}, "block_table"),
        ({"queries": (2.0, 0.0, 5.0)}, "query_lens"),
        ({"table": [[1.5, 2.5, 0], [1, 2, 3], [4, 5, 6]]}, "block_table"),
        ({"table": None}, "block_table"),
        ({"table": [[1, 2], [3]]}, "block_table"),
        ({"queries": (True, False, True)}, "query_lens"),
        ({"max_query_len": 7.5}, "max_query_len"),
        ({"max_query_len": "7"}, "max_query_len"),
        ({"max_seq_len": True}, "max_seq_len"),
        ({"num_tokens": 10.0}, "num_tokens"),
        ({"num_seqs": "5"}, "num_seqs"),
        ({"causal": "False"}, "causal"),
        ({"causal": 1}, "causal"),
    ],
)
def test_the_builder_names_what_does_not_fit(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        build(**options)


def test_the_builder_runs_on_the_host():
    with pytest.raises(TypeError, match="host"):
        jax.jit(lambda q: build(queries=q))(jnp.array([1, 1, 1]))


def test_a_negative_entry_gives_no_slot():
    """It is not the last block."""
    np.testing.assert_array_equal(pp.make_metadata([2], [6], np.array([[3, -1]]), block_size=4).slot_mapping, [-1, -1])


def test_a_sequence_that_outgrows_its_row_is_refused():
    """vllm#54296: a position past the row is not the next row's block."""
    pp.make_metadata([1], [32], [[0, 1]], block_size=16)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 33: .*at most 32"):
        pp.make_metadata([1], [33], [[0, 1]], block_size=16)
    with pytest.raises(ValueError, match=r"encoder_lens\[1\] is 40"):
        pp.cross_metadata([1, 1], [3, 40], [[0, 1], [2, 3]], block_size=16, write=True)


def test_a_batch_without_a_table_has_no_slots():
    metadata = pp.make_metadata([3, 2], [3, 2], np.zeros((2, 0), np.int64), block_size=16)
    assert metadata.slot_mapping.tolist() == [-1] * 5 and metadata.max_seq_len == 3


def test_queries_may_outnumber_keys():
    """The first of them lie before the sequence: no slot, no key."""
    metadata = pp.make_metadata([3, 2], [1, 2], [[2], [1]], block_size=16)
    assert metadata.slot_mapping.tolist() == [-1, -1, 32, 16, 17]
    pp.validate_metadata(metadata, pp.CacheSpec(num_blocks=3, block_size=16, num_kv_heads=1, head_size=8))


def test_queries_of_cross_attention_have_no_slots():
    metadata = build(causal=False)
    assert not metadata.causal and metadata.slot_mapping.tolist() == [-1] * 7
    pp.validate_metadata(metadata, SPEC)


def test_the_encoders_tokens_are_written_once_sequence_after_sequence():
    lengths = (6, 0, 5)
    first = pp.cross_metadata((2, 1, 0), lengths, TABLE, block_size=4, write=True, num_encoder_tokens=13, num_seqs=4)
    assert first.slot_mapping.tolist() == [12, 13, 14, 15, 4, 5, 36, 37, 38, 39, 16, -1, -1]
    assert first.query_start_loc.tolist() == [0, 2, 3, 3, 3] and first.seq_lens.tolist() == [6, 0, 5, 0]
    assert not first.causal and first.block_size == 4 and first.max_seq_len == 12
    later = pp.cross_metadata((1, 1, 1), lengths, TABLE, block_size=4, write=False)
    assert later.slot_mapping.shape == (0,) and later.slot_mapping.dtype == np.int32
    for metadata in (first, later):
        pp.validate_metadata(metadata, SPEC)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"write": 1}, "write"),
        ({"write": False, "num_encoder_tokens": 20}, "num_encoder_tokens"),
        ({"write": True, "num_encoder_tokens": 10}, r"num_encoder_tokens is 10: .*11"),
        ({"write": True, "num_tokens": 1}, r"num_tokens is 1: .*2"),
        ({"write": True, "block_size": 0}, "block_size"),
    ],
)
def test_the_builder_of_cross_attention_names_what_does_not_fit(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        pp.cross_metadata((2, 0, 0), (6, 0, 5), TABLE, **{"block_size": 4, **options})


def test_a_decode_step_is_what_the_host_builder_makes():
    lengths = np.array([6, 1, 12])
    expected = pp.make_metadata([1, 1, 1], lengths, TABLE, block_size=4, max_seq_len=12)
    for make in (pp.decode_metadata, jax.jit(pp.decode_metadata, static_argnames=("block_size", "max_seq_len"))):
        assert make(lengths, TABLE, block_size=4, max_seq_len=12) == expected
    pp.validate_metadata(pp.decode_metadata(lengths, TABLE, block_size=4), SPEC)
    assert pp.decode_metadata(lengths, TABLE, block_size=4).max_seq_len is None


def test_a_decode_position_without_a_block_has_no_slot():
    table = np.array([[3, -1], [3, 2], [2**29, 1], [-(2**31), 1]])
    metadata = pp.decode_metadata(np.array([5, 9, 3, 1]), table, block_size=4)
    assert metadata.slot_mapping.tolist() == [-1, -1, -1, -1]
    assert pp.decode_metadata(np.array([0, 1]), table[:2], block_size=4).slot_mapping.tolist() == [-1, 12]
    assert pp.decode_metadata([2], np.zeros((1, 0), np.int32), block_size=4).slot_mapping.tolist() == [-1]
    largest = pp.decode_metadata([4], [[2**29 - 1]], block_size=4).slot_mapping
    assert largest.tolist() == [2**31 - 1]


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([1.0], [[1]]), {}, "seq_lens"),
        (([[1]], [[1]]), {}, "seq_lens"),
        (([1], [1]), {}, "block_table"),
        (([1, 2], [[1]]), {}, "block_table"),
        (([1], [[1]]), {"block_size": 2.0}, "block_size"),
        (([1], [[1]]), {"max_seq_len": -1}, "max_seq_len"),
        (([1], [[1]]), {"max_seq_len": 2.5}, "max_seq_len"),
    ],
)
def test_a_decode_step_names_what_does_not_fit(arguments, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        pp.decode_metadata(*arguments, **{"block_size": 4, **options})


def test_a_decode_loop_in_one_jit_attends_what_a_loop_of_host_steps_does():
    """Nothing is made by hand inside: lengths are the scan's carry, metadata and slots follow from them."""
    spec = pp.CacheSpec(num_blocks=10, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    rng = np.random.default_rng(0)
    steps, start = 6, np.array([5, 1, 4])
    query, key, value = (jnp.asarray(rng.standard_normal((steps, 3, heads, 8)), jnp.float32) for heads in (2, 1, 1))

    def step(cache, metadata, q, k, v):
        cache = pp.update_cache(cache, k, v, metadata.slot_mapping, implementation="xla")
        return cache, pp.paged_attention(q, cache, metadata, implementation="xla")

    @jax.jit
    def decode(cache, lengths, table):
        def body(carry, tokens):
            cache, lengths = carry
            cache, out = step(cache, pp.decode_metadata(lengths + 1, table, block_size=4), *tokens)
            return (cache, lengths + 1), out

        return jax.lax.scan(body, (cache, lengths), (query, key, value))

    (cache, lengths), outs = decode(pp.init_cache(spec), jnp.asarray(start), jnp.asarray(TABLE))
    assert lengths.tolist() == (start + steps).tolist()
    expected = pp.init_cache(spec)
    for i in range(steps):
        metadata = pp.make_metadata([1, 1, 1], start + i + 1, TABLE, block_size=4)
        expected, out = step(expected, metadata, query[i], key[i], value[i])
        np.testing.assert_allclose(outs[i], out, rtol=1e-6, atol=1e-6)
    assert cache == expected


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
    arrays = {name: jnp.asarray(value) for name, value in changes.items() if isinstance(value, list)}
    return replace(metadata, **{**changes, **arrays})


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (lambda: changed(query_start_loc=[1, 2, 2, 7]), r"query_start_loc\[0\] is 1"),
        (lambda: changed(query_start_loc=[0, 2, 1, 7]), r"query_start_loc\[2\].*sequence 1"),
        (lambda: changed(query_start_loc=[0, 2, 2, 8], max_query_len=8, seq_lens=[6, 3, 8]), r"query_start_loc\[-1\] is 8"),
        (lambda: changed(max_query_len=4), "max_query_len is 4.*sequence 2"),
        (lambda: changed(max_seq_len=5), r"max_seq_len is 5.*seq_lens\[0\]"),
        (lambda: changed(seq_lens=[1, 3, 5]), r"slot_mapping\[0\].*is 4: it must be negative"),
        (lambda: changed(seq_lens=[6, 13, 5], max_seq_len=16), r"block_table\[1\].*4 blocks"),
        (lambda: changed(block_table=[[3, 10, 7], [2, 5, 0], [9, 4, 6]]), r"block_table\[0, 1\] is 10.*sequence 0"),
        (lambda: changed(block_table=[[3, 1, 7], [-1, 5, 0], [9, 4, 6]]), r"block_table\[1, 0\] is -1"),
        (lambda: changed(block_table=[[3, 3, 7], [2, 5, 0], [9, 4, 6]], slot_mapping=[12, 13, 36, 37, 38, 39, 16]), "block 3 twice"),
        (lambda: changed(slot_mapping=[4, 5, 36, 37, 38, 39, 40]), r"slot_mapping\[6\] is 40"),
        (
            lambda: changed(slot_mapping=[4, 5, 36, 37, 38, 39, 36]),
            r"slot_mapping\[6\] \(of the query token of sequence 2\) is 36: it must be 16",
        ),
        (lambda: changed(slot_mapping=[4, 5, 36, 37, 38, 39, 16, 0]), r"slot_mapping\[7\] is 0: .*padding"),
        (lambda: changed(slot_mapping=[5, 4, 36, 37, 38, 39, 16]), r"slot_mapping\[0\].*is 5: it must be 4"),
        (
            lambda: replace(build((3, 0, 5), (1, 3, 5)), slot_mapping=jnp.array([0, -1, 12, 36, 37, 38, 39, 16])),
            r"slot_mapping\[0\].*negative",
        ),
        (lambda: changed(query_start_loc=[0, 1, 3, 0], seq_lens=[6, 3, 0]), r"query_start_loc\[3\] is 0: .*sequence 2"),
        (lambda: changed(seq_lens=[-1, 3, 5]), r"seq_lens\[0\] is -1"),
        (lambda: changed(block_size=8), "metadata.block_size is 8: .* the cache's 4"),
        (lambda: changed(seq_lens=np.array([2**32 + 6, 3, 5])), r"max_seq_len is 12: .*seq_lens\[0\]"),
        (lambda: changed(block_table=np.array([[3, 2**32 + 1, 7], [2, 5, 0], [9, 4, 6]])), r"block_table\[0, 1\] is 4294967297"),
        (lambda: changed(slot_mapping=np.array([4, 5, 36, 37, 38, 39, 2**32 + 16])), r"slot_mapping\[6\] is 4294967312"),
    ],
)
def test_the_validator_names_the_sequence(metadata, words):
    with pytest.raises(ValueError, match=words):
        pp.validate_metadata(metadata(), SPEC)


def test_the_validator_allows_what_no_query_needs():
    table = [[3, 1, 99], [2, -1, -1], [9, 4, 2**31 - 1]]
    pp.validate_metadata(changed(block_table=table), SPEC)
    pp.validate_metadata(changed(block_table=[[3, 1, 7], [3, 5, 0], [9, 4, 6]]), SPEC)  # a shared prefix that is not written
    pp.validate_metadata(changed(slot_mapping=[4, -1, 36, -1, 38, 39, -7]), SPEC)  # tokens that are not stored


def test_blocks_before_the_window_are_free():
    """vLLM puts its null block, 0, or -1 there, in every sequence alike."""
    spec = pp.CacheSpec(num_blocks=10, block_size=4, num_kv_heads=1, head_size=8)
    for freed in (0, -1, 99):
        metadata = pp.make_metadata([1, 2], [11, 12], [[freed, freed, 3], [freed, 5, 6]], block_size=4)
        pp.validate_metadata(metadata, spec, sliding_window=3)
        for window in (None, 0, -1, 4):  # position 10 sees 7 and on with a window of 4
            with pytest.raises(ValueError, match=r"block_table\[0"):
                pp.validate_metadata(metadata, spec, sliding_window=window) if freed else pp.validate_metadata(
                    replace(metadata, block_table=jnp.asarray([[-1, -1, 3], [1, 5, 6]])), spec, sliding_window=window
                )
    written = pp.make_metadata([1], [9], [[0, 0, 0]], block_size=4)
    pp.validate_metadata(written, spec, sliding_window=1)
    with pytest.raises(ValueError, match="block 0 twice"):
        pp.validate_metadata(written, spec, sliding_window=2)
    with pytest.raises(TypeError, match="sliding_window"):
        pp.validate_metadata(written, spec, sliding_window=2.5)


def test_what_is_not_written_may_be_shared_and_repeated():
    """A block twice in one sequence, or in the written part of two, is read alike by both."""
    twice = changed(block_table=[[3, 3, 7], [2, 5, 0], [9, 4, 6]], slot_mapping=[-1] * 7)
    pp.validate_metadata(twice, SPEC)
    shared = build((1, 1), (6, 6), [[3, 1], [3, 1]])
    with pytest.raises(ValueError, match=r"block_table\[0\].*sequence 1 needs block 1 too"):
        pp.validate_metadata(shared, SPEC)
    pp.validate_metadata(shared, SPEC, writes=False)
    pp.validate_metadata(changed(slot_mapping=[0, 1, 2, 3, 3, 3, 99]), SPEC, writes=False)


def test_slots_of_a_batch_that_is_not_causal_are_the_queries_or_the_encoders():
    decoder = replace(build(), causal=False)  # bidirectional spans in a decoder
    pp.validate_metadata(decoder, SPEC)
    encoder = pp.cross_metadata((2, 0, 5), (6, 3, 5), TABLE, block_size=4, write=True)
    pp.validate_metadata(encoder, SPEC)
    mixed = replace(encoder, slot_mapping=encoder.slot_mapping.at[-1].set(12))
    with pytest.raises(ValueError, match=r"slot_mapping\[13\] \(of the encoder token of sequence 2\) is 12"):
        pp.validate_metadata(mixed, SPEC)
    pp.validate_metadata(mixed, SPEC, writes=False)


def test_another_block_size_than_the_caches_is_refused_wherever_both_are():
    """Their defaults differ between the two backends: writes would land in another sequence's block."""
    metadata, spec = build(), replace(SPEC, block_size=8)
    assert metadata.block_size == 4
    cache, query = pp.init_cache(spec), jnp.zeros((7, 1, 8))
    calls = {
        "validate": lambda m: pp.validate_metadata(m, spec),
        "attention": lambda m: pp.paged_attention(query, cache, m),
        "jit": lambda m: jax.jit(pp.paged_attention)(query, cache, m),
        "cascade": lambda m: pp.cascade_attention(query, cache, m, common_prefix_len=0),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=r"metadata\.block_size is 4: it must be the cache's 8"):
            call(metadata)
    pp.paged_attention(query, cache, replace(metadata, block_size=None))
    with pytest.raises((TypeError, ValueError), match=r"metadata.block_size"):
        pp.paged_attention(query, cache, replace(metadata, block_size="4"))


def test_a_stated_block_size_shares_the_trace_of_one_that_is_not():
    from purepage.functional.attention import paged_attention_call

    metadata, cache, query = build(), pp.init_cache(SPEC), jnp.zeros((7, 1, 8))
    trees = {jax.tree.structure(paged_attention_call(query, cache, replace(metadata, block_size=size))) for size in (4, None)}
    assert len(trees) == 1


def test_the_validator_needs_values():
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda m: pp.validate_metadata(m, SPEC))(build())


def test_metadata_is_a_pytree_with_four_static_fields():
    leaves, tree = jax.tree.flatten(build())
    assert len(leaves) == 4
    assert tree != jax.tree.structure(build(max_query_len=9)) and tree == jax.tree.structure(build((1, 1, 5), (4, 4, 7)))
    assert tree != jax.tree.structure(replace(build(), block_size=None))


def test_metadata_is_equal_by_value():
    one, other = build(), build()
    assert one == other and not one != other and one == jax.device_get(one)
    different = [build((1, 1, 5)), build(max_seq_len=9), build(num_tokens=9), replace(one, block_size=None), build(causal=False), None, 3]
    assert all(one != each for each in different)
    assert one != replace(one, seq_lens=one.seq_lens.astype(jnp.int16)) and one != pp.rocm_attn.build(0, one)
    assert pp.rocm_attn.build(0, one) == pp.rocm_attn.build(0, other) != pp.rocm_attn.build(0, build(num_tokens=9))
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    shapes = jax.eval_shape(lambda: one)
    assert shapes == jax.eval_shape(lambda: other) != jax.eval_shape(lambda: build(num_tokens=9))


def test_equality_of_traced_metadata_is_refused():
    one = build()
    assert jax.jit(lambda m: jnp.int32(m == m))(one) == 1
    with pytest.raises(TypeError, match="AttentionMetadata has no value under tracing"):
        jax.jit(lambda m: jnp.int32(m == one))(one)


@pytest.mark.parametrize(("option", "value"), [("spec", None), ("writes", 1), ("sliding_window", "3"), ("metadata", None)])
def test_the_validator_names_an_argument_of_another_type(option, value):
    with pytest.raises(TypeError, match=option):
        pp.validate_metadata(**{"metadata": build(), "spec": SPEC, option: value})


def test_a_decoder_attends_every_token_that_its_encoder_wrote():
    """Token k of 20 holds k: equal weights give 9.5, in the first step, which writes, and in the next, which does not."""
    spec = pp.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=1, head_size=8, dtype="float32")
    table = [[5, 2]]
    first = pp.cross_metadata([3], [20], table, block_size=16, write=True)
    value = jnp.broadcast_to(jnp.arange(20.0)[:, None, None], (20, 1, 8))
    cache = pp.update_cache(pp.init_cache(spec), jnp.zeros((20, 1, 8)), value, first.slot_mapping, implementation="xla")
    later = pp.cross_metadata([1], [20], table, block_size=16, write=False)
    assert pp.update_cache(cache, value, value, later.slot_mapping, implementation="xla") == cache
    for metadata, tokens in ((first, 3), (later, 1)):
        out = pp.paged_attention(jnp.zeros((tokens, 1, 8)), cache, metadata, implementation="xla")
        np.testing.assert_allclose(out, 9.5, rtol=1e-6)
    queries = pp.make_metadata([3], [20], table, block_size=16, causal=False)
    assert pp.update_cache(cache, value[:3], value[:3], queries.slot_mapping, implementation="xla") == cache
