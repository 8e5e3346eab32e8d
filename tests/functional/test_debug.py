"""Debug checks: eager and jitted calls say which sequence or token is wrong, and nothing is checked outside."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purepage as pp

SPEC = pp.CacheSpec(num_blocks=10, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
QUERY = jnp.ones((7, 2, 8))
METADATA = pp.make_metadata([2, 0, 5], [6, 3, 5], [[3, 1, 7], [2, 5, 0], [9, 4, 6]], block_size=4)
CACHE = pp.init_cache(SPEC)


def changed(**arrays):
    return replace(METADATA, **{name: jnp.asarray(values, jnp.int32) for name, values in arrays.items()})


def attend(metadata=METADATA, query=QUERY, **options):
    return pp.paged_attention(query, CACHE, metadata, implementation="xla", **options)


def write(slots):
    token = jnp.ones((len(slots), 1, 8))
    return pp.update_cache(CACHE, token, token, jnp.asarray(slots), implementation="xla").data


FAULTS = {
    "another sequence's slot": (attend, changed(slot_mapping=[4, 5, 36, 37, 38, 39, 12]), r"token of sequence 2\) is 12: it must be 16"),
    "a block outside the pool": (
        attend,
        changed(block_table=[[3, 1, 7], [2, 5, 0], [9, 77, 6]]),
        r"block_table\[2, 1\] is 77: .*sequence 2",
    ),
    "falling query starts": (attend, changed(query_start_loc=[0, 2, 7, 0], seq_lens=[6, 5, 0]), r"query_start_loc\[3\] is 0: .*sequence 2"),
    "fewer rows than tokens": (lambda m: attend(m, QUERY[:2]), METADATA, r"query is '2 rows': .*query_start_loc\[-1\] = 7 rows"),
    "encoder starts": (
        lambda m: pp.encoder_attention(QUERY, QUERY, QUERY, m, implementation="xla"),
        changed(query_start_loc=[0, 2, 7, 0]),
        r"query_start_loc\[3\] is 0",
    ),
    "cascade": (
        lambda m: pp.cascade_attention(QUERY, CACHE, m, common_prefix_len=4, implementation="xla"),
        changed(block_table=[[3, 1, 7], [3, 5, 0], [3, 77, 6]], query_start_loc=[0, 2, 2, 3]),
        r"block_table\[2, 1\] is 77",
    ),
    "one slot twice": (write, [3, 8, 3], r"slot_mapping is '3 for tokens \[0, 2\]'"),
    "a slot past the cache": (write, [3, 40, -1], r"slot_mapping\[1\] is 40"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_eager_call_says_what_is_wrong(name):
    call, argument, words = FAULTS[name]
    with pp.debug_checks(), pytest.raises(ValueError, match=words):
        call(argument)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAULTS)
def test_a_jitted_call_says_what_is_wrong(name):
    call, argument, words = FAULTS[name]
    with pp.debug_checks(), pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(jax.jit(call)(jax.tree.map(jnp.asarray, argument, is_leaf=lambda leaf: isinstance(leaf, list))))


def test_a_right_step_passes_and_gives_the_same():
    expected, written = attend(), write([3, -1, 8])
    with pp.debug_checks():
        for call in (attend, jax.jit(attend)):
            np.testing.assert_allclose(call(METADATA), expected, rtol=1e-6)
        freed = changed(block_table=[[-1, 1, 7], [-1, 5, 0], [9, 4, 6]], seq_lens=[6, 0, 5])
        jax.block_until_ready(jax.jit(lambda m: attend(m, sliding_window=1))(freed))
        prefix = pp.make_metadata([2, 1], [6, 5], [[3, 1], [3, 2]], block_size=4)
        cascade = lambda m: pp.cascade_attention(QUERY[:3], CACHE, m, common_prefix_len=4, implementation="xla")  # noqa: E731
        np.testing.assert_allclose(jax.jit(cascade)(prefix), cascade(prefix), rtol=1e-6)
        np.testing.assert_array_equal(jax.jit(write)(jnp.array([3, -1, 8])), written)


def test_the_checks_are_part_of_the_key_of_jit_and_end_with_the_context():
    """A function that ran before is checked inside, and runs unchecked again after."""
    bad = changed(slot_mapping=[4, 5, 36, 37, 38, 39, 12])
    step = jax.jit(attend)
    unchecked = step(bad)
    with pp.debug_checks(), pytest.raises(jax.errors.JaxRuntimeError, match="sequence 2"):
        jax.block_until_ready(step(bad))
    np.testing.assert_array_equal(step(bad), unchecked)
    assert "callback" not in step.lower(bad).as_text()
