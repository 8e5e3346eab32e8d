"""Integers that address the cache keep their value: no width and no sign turns a far one into a near one."""

from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purepage as pp
from purepage.functional.integers import as_integers, narrow, saturate

FAR = {
    "int64": [2**31, 2**31 + 1, 2**32, 2**32 + 1, 2**33 + 1, 2**62 + 1, -(2**31) - 1, -(2**32), -(2**32) + 1, -(2**62) + 1],
    "uint64": [2**31, 2**31 + 1, 2**32, 2**32 + 1, 2**33 + 1, 2**62 + 1, 2**63, 2**63 + 1, 2**64 - 1, 2**64 - 2**32 + 1],
    "uint32": [2**31, 2**31 + 1, 2**31 + 2, 2**31 + 5, 2**31 + 80, 2**32 - 1, 2**32 - 2, 2**32 - 6, 3 * 2**30, 3 * 2**30 + 1],
}
"""Integers outside every cache, whose low 32 bits often are not, and their signed reading neither; as many of each dtype."""
COUNT = 10
WIDTHS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
WAYS = [(dtype, place) for dtype in FAR for place in ("host", "device", "traced")]
each_way = pytest.mark.parametrize(("dtype", "place"), WAYS, ids=["-".join(way) for way in WAYS])
SPEC = pp.CacheSpec(num_blocks=24, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


def numbered_cache(spec=SPEC):
    """Block b holds b + 1 everywhere, in keys and values."""
    shape = (spec.num_layers, spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
    sides = np.broadcast_to(np.arange(1.0, spec.num_blocks + 1)[None, :, None, None, None], shape).astype(spec.dtype)
    return pp.cache_from_logical(spec, jnp.asarray(sides), jnp.asarray(sides))


def blocks_of(cache):
    """The number that each block holds; NaN where its slots differ."""
    flat = np.asarray(pp.cache_to_logical(cache)[0]).reshape(cache.spec.num_blocks, -1)
    return np.where((flat == flat[:, :1]).all(axis=1), flat[:, 0], np.nan)


def call(run, dtype, place, near):
    """`run` of the integers `[*near, *far]`: as NumPy, on the device, or traced; 64 bits of them need JAX's 64-bit mode on a device."""
    integers = np.array([*near, *FAR[dtype]], dtype)
    with jax.enable_x64(True) if place != "host" and integers.itemsize == 8 else nullcontext():
        given = integers if place == "host" else jnp.asarray(integers)
        assert given.dtype == integers.dtype
        return jax.tree.map(np.asarray, (jax.jit(run) if place == "traced" else run)(given))


@each_way
def test_a_far_index_stays_outside_and_a_near_one_stays_itself(dtype, place):
    found = call(lambda ids: narrow(ids, 24), dtype, place, [0, 23])
    assert found.dtype == np.int32 and found[:2].tolist() == [0, 23]
    assert not np.any((found[2:] >= 0) & (found[2:] < 24))
    lengths = call(saturate, dtype, place, [0, 5])
    assert lengths.tolist() == [0, 5, *(2**31 - 1 if far > 0 else -(2**31) for far in FAR[dtype])]


@pytest.mark.parametrize("dtype", WIDTHS)
def test_no_width_is_too_small_for_the_limit(dtype):
    """A limit of 300 has no int8; an id of that width is compared all the same."""
    values = np.array([0, 127, 3], dtype)
    for given in (values, *([jnp.asarray(values)] if values.dtype.itemsize < 8 else [])):
        assert narrow(given, 300).tolist() == saturate(given).tolist() == [0, 127, 3]
    if values.dtype.kind == "i":
        assert narrow(np.array([-1, 1], dtype), 300).tolist() == [-1, 1]


@each_way
def test_a_block_move_skips_a_far_id(dtype, place):
    cache = numbered_cache()
    gathered = call(lambda ids: pp.gather_blocks(cache, ids).data, dtype, place, [1])
    assert np.all(gathered[:, 0] == 2) and not np.any(gathered[:, 1:])
    blocks = pp.gather_blocks(cache, np.arange(2, 3 + COUNT))
    after = [*range(1, 21), 3, *range(22, 25)]
    assert blocks_of(call(lambda ids: pp.scatter_blocks(cache, ids, blocks), dtype, place, [20])).tolist() == after
    others = np.arange(2, 3 + COUNT)
    assert blocks_of(call(lambda dst: pp.copy_blocks(cache, others, dst), dtype, place, [20])).tolist() == after
    after = [1, 2, 21, *range(4, 25)]
    assert blocks_of(call(lambda src: pp.copy_blocks(cache, src, others), dtype, place, [20])).tolist() == after


@each_way
def test_a_writer_skips_a_far_slot(dtype, place):
    tokens, table, cache = jnp.full((2 + COUNT, 1, 8), 99.0), jnp.ones((16, 8)), numbered_cache()
    rope = lambda slots: pp.rope_and_update_cache(tokens, tokens, tokens, np.arange(2 + COUNT), table, cache, slots)[2]  # noqa: E731
    for write in (lambda slots: pp.update_cache(cache, tokens, tokens, slots), rope):
        value = np.asarray(pp.cache_to_logical(call(write, dtype, place, [1, 90]))[1])
        assert np.flatnonzero(value[..., 0].reshape(-1) == 99.0).tolist() == [1, 90]


@each_way
def test_a_far_position_is_no_row_of_the_rotary_table(dtype, place):
    """A NumPy position raises; one on a device makes its token NaN."""
    x, table = jnp.ones((1 + COUNT, 1, 8)), jnp.ones((8, 8))
    rotate = lambda positions: pp.rotary_embedding(positions, x, x, table)[0]  # noqa: E731
    if place == "host":
        with pytest.raises(ValueError, match=f"positions is {FAR[dtype][0]}"):
            call(rotate, dtype, place, [1])
        return
    out = call(rotate, dtype, place, [1])
    assert np.isfinite(out[0]).all() and np.isnan(out[1:]).all()


@pytest.mark.sampled(4)
@each_way
def test_a_far_table_entry_or_length_reads_no_near_block(dtype, place):
    """Entries that no position needs may be far. A far length is past the table, not a short sequence."""
    metadata = pp.make_metadata([1] * (1 + COUNT), [4] * (1 + COUNT), [[3, 0]] * (1 + COUNT), block_size=4)
    query, cache = jnp.zeros((1 + COUNT, 1, 8)), numbered_cache()

    def attend(**changes):
        return pp.paged_attention(query, cache, replace(metadata, **changes), implementation="xla")

    def wide(far):
        columns = (np.full_like(far, 3), far) if place == "host" else (jnp.full_like(far, 3), far)
        return (np if place == "host" else jnp).stack(columns, axis=1)

    np.testing.assert_allclose(call(lambda far: attend(block_table=wide(far)), dtype, place, [5]), 4.0)
    out = call(lambda far: attend(seq_lens=far), dtype, place, [4])
    np.testing.assert_allclose(out[0], 4.0)
    if dtype != "int64":  # a negative length is an empty sequence
        assert not np.any(out[1:] == 4.0)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_ids_of_every_width_name_the_same_blocks(dtype):
    ids = np.array([4, 0, 2], dtype)
    gathered = pp.gather_blocks(numbered_cache(), ids)
    assert np.asarray(gathered.data)[0, :, 0, 0, 0].tolist() == [5, 1, 3]
    assert blocks_of(pp.copy_blocks(numbered_cache(), ids, np.array([1, 3, 5], dtype)))[:6].tolist() == [1, 5, 3, 1, 5, 3]


@pytest.mark.parametrize("ids", [[1.5, 2.5], [True, False], None, "12", [None], [[1], [2, 3]], 1j, [1 + 0j], np.zeros(2), {1}], ids=repr)
def test_what_is_no_list_of_integers_is_refused_by_name(ids):
    with pytest.raises((TypeError, ValueError), match="block_ids"):
        pp.gather_blocks(numbered_cache(), ids)


def test_ids_may_be_traced_scalars_in_a_list():
    moved = jax.jit(lambda a: pp.gather_blocks(numbered_cache(), [a, 2]).data)(3)
    assert np.asarray(moved)[0, :, 0, 0, 0].tolist() == [4, 3]


def test_a_number_of_dimensions_is_checked():
    assert as_integers("x", [], 1).dtype == np.int64
    with pytest.raises(ValueError, match=r"x is int64\[1,1\]: it must be integers in 1 dimension"):
        as_integers("x", [[1]], 1)


def test_a_pool_whose_slots_are_no_int32_is_refused():
    with pytest.raises(ValueError, match=r"num_blocks is 134217728: .*134217727"):
        replace(SPEC, num_blocks=2**27, block_size=16)
