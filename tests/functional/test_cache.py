"""The cache type: layouts against the address formulas, conversions, moves of blocks, and what it refuses."""

import gc
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.functional.layout import CONTENTS, ORDERS
from purepage.testing import reference_address

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
LAYOUTS = [(content, order) for content in CONTENTS for order in ORDERS]
layouts = pytest.mark.parametrize(("content", "order"), LAYOUTS, ids=[f"{c}-{o}" for c, o in LAYOUTS])


def spec_of(content="packed", order="LBHNC", dtype="float32", **changes):
    sizes = {"num_layers": 2, "num_blocks": 5, "block_size": 32, "num_kv_heads": 3, "head_size": 32, **changes}
    return pp.CacheSpec(content=content, order=order, dtype=dtype, **sizes)


def random_sides(spec, seed=0):
    """Random bit patterns, NaN codes included, as keys and values [L, B, N, H, D]."""
    rng = np.random.default_rng(seed)
    shape = (spec.num_layers, spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
    integers = np.dtype(f"u{spec.dtype.itemsize}")
    return [rng.integers(0, np.iinfo(integers).max, shape, integers, endpoint=True).view(spec.dtype) for _ in range(2)]


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def from_sides(spec, key, value):
    """A cache from NumPy bit patterns; through integers, since a conversion may touch the payload of a NaN."""
    move = lambda side: jax.lax.bitcast_convert_type(jnp.asarray(bits(side)), spec.dtype)  # noqa: E731
    return pp.cache_from_logical(spec, move(key), move(value))


@layouts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_every_element_is_at_its_address(content, order, dtype):
    spec = spec_of(content, order, dtype)
    key, value = random_sides(spec)
    cache = from_sides(spec, key, value)
    assert cache.data.shape == spec.shape and cache.data.nbytes == spec.nbytes
    flat = bits(cache.data).reshape(-1)
    rng = np.random.default_rng(1)
    for side, array in enumerate((key, value)):
        for layer, b, n, h, d in zip(*(rng.integers(0, size, 200) for size in key.shape), strict=True):
            at = reference_address(
                content,
                order,
                num_blocks=spec.num_blocks,
                num_kv_heads=spec.num_kv_heads,
                block_size=spec.block_size,
                head_size=spec.head_size,
                itemsize=spec.dtype.itemsize,
                side=side,
                layer=layer,
                block=b,
                head=h,
                token=n,
                dim=d,
            )
            assert flat[at] == bits(array)[layer, b, n, h, d]
            s = spec.side_strides[side]
            terms = (
                s.offset,
                layer * s.layer,
                b * s.block,
                h * s.head,
                n // s.n_vector * s.token_outer + n % s.n_vector * s.token,
                d // s.d_vector * s.dim_outer + d % s.d_vector * s.dim,
            )
            assert sum(map(int, terms)) == at


@pytest.mark.sampled(20)
@layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_logical_round_trips_keep_every_bit(content, order, dtype):
    spec = spec_of(content, order, dtype)
    key, value = random_sides(spec)
    cache = from_sides(spec, key, value)
    for layer in range(spec.num_layers):
        found_key, found_value = pp.cache_to_logical(cache, layer)
        assert found_key.dtype == found_value.dtype == spec.dtype
        np.testing.assert_array_equal(bits(found_key), bits(key[layer]))
        np.testing.assert_array_equal(bits(found_value), bits(value[layer]))


@layouts
def test_any_layout_converts_to_any_other(content, order):
    spec = spec_of(content, order, "bfloat16")
    key, value = random_sides(spec)
    cache = from_sides(spec, key, value)
    for other_content, other_order in LAYOUTS:
        target = replace(spec, content=other_content, order=other_order)
        converted = pp.convert_cache(cache, target)
        assert converted.spec == target
        np.testing.assert_array_equal(np.asarray(converted.data), np.asarray(from_sides(target, key, value).data))


def test_a_conversion_changes_the_layout_alone():
    cache = pp.init_cache(spec_of(dtype="float8_e4m3fn"), k_scale=0.5, v_scale=2.0)
    converted = pp.convert_cache(cache, spec_of("flash", dtype="float8_e4m3fn"))
    assert np.all(np.asarray(converted.k_scale) == 0.5) and np.all(np.asarray(converted.v_scale) == 2.0)
    for wrong in (
        spec_of(dtype="float8_e5m2"),
        spec_of(dtype="float8_e4m3fn", num_blocks=6),
        spec_of(dtype="float8_e4m3fn", block_size=16),
    ):
        with pytest.raises(ValueError, match="spec"):
            pp.convert_cache(cache, wrong)


@layouts
def test_blocks_move_between_caches_of_one_layout(content, order):
    spec = spec_of(content, order, "bfloat16", num_blocks=6)
    key, value = random_sides(spec)
    cache = from_sides(spec, key, value)
    blocks = pp.gather_blocks(cache, jnp.array([4, 1]))
    moved = pp.scatter_blocks(pp.init_cache(spec), jnp.array([0, 3]), blocks)
    for layer in range(spec.num_layers):
        for side, array in zip(pp.cache_to_logical(moved, layer), (key, value), strict=True):
            np.testing.assert_array_equal(bits(side)[[0, 3]], bits(array)[layer, [4, 1]])
            assert not np.any(bits(side)[[1, 2, 4, 5]])


@layouts
def test_blocks_copied_inside_a_cache_are_read_before_any_is_written(content, order):
    spec = spec_of(content, order, num_blocks=6)
    key, value = random_sides(spec)
    swapped = pp.copy_blocks(from_sides(spec, key, value), jnp.array([0, 5, 2]), jnp.array([5, 0, 3]))
    expected = [0, 1, 2, 3, 4, 5]
    for target, source in ((5, 0), (0, 5), (3, 2)):
        expected[target] = source
    for layer in range(spec.num_layers):
        for side, array in zip(pp.cache_to_logical(swapped, layer), (key, value), strict=True):
            np.testing.assert_array_equal(bits(side), bits(array)[layer, expected])


def test_block_ids_outside_the_pool_are_skipped():
    spec = spec_of(num_blocks=4)
    key, value = random_sides(spec)
    cache = from_sides(spec, key, value)
    before = np.asarray(cache.data).copy()
    blocks = pp.gather_blocks(cache, jnp.array([1, -1, 4]))
    assert not np.any(np.asarray(jnp.take(blocks.data, jnp.array([1, 2]), axis=spec.axes.index("B"))))
    for touched in (
        pp.scatter_blocks(cache, jnp.array([-1, 4, 2**31 - 1]), blocks),
        pp.copy_blocks(cache, jnp.array([0, 0, -1, 4]), jnp.array([-1, 4, 1, 2])),
    ):
        np.testing.assert_array_equal(bits(touched.data), bits(before))


def test_moves_refuse_blocks_of_another_layout():
    blocks = pp.gather_blocks(pp.init_cache(spec_of()), jnp.array([0]))
    with pytest.raises(ValueError, match="blocks"):
        pp.scatter_blocks(pp.init_cache(spec_of("flash")), jnp.array([0]), blocks)
    with pytest.raises(ValueError, match="block_ids"):
        pp.scatter_blocks(pp.init_cache(spec_of()), jnp.array([0, 1]), blocks)
    with pytest.raises(TypeError, match="blocks"):
        pp.scatter_blocks(pp.init_cache(spec_of()), jnp.array([0]), blocks.data)
    with pytest.raises(ValueError, match="dst"):
        pp.copy_blocks(pp.init_cache(spec_of()), jnp.array([0]), jnp.array([0, 1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_moves_are_in_place_under_donation(dtype):
    spec = spec_of(dtype=dtype, num_blocks=512)
    cache = jax.eval_shape(lambda: pp.init_cache(spec))
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    compiled = jax.jit(pp.copy_blocks, donate_argnames="cache").lower(cache, ids, ids).compile()
    analysis = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes < spec.nbytes // 8
    assert analysis.alias_size_in_bytes >= spec.nbytes


def test_no_two_leaves_of_a_new_cache_share_a_buffer():
    """jax#9635: donating one buffer twice is an error."""
    cache = pp.init_cache(spec_of(num_layers=1))
    step = jax.jit(lambda c: replace(c, data=c.data + 1, k_scale=c.k_scale * 2), donate_argnums=0)
    after = step(cache)
    assert cache.data.is_deleted() and float(after.k_scale[0]) == 2.0 and float(after.v_scale[0]) == 1.0


@pytest.mark.parametrize(
    "scale", [2.0, np.float32(2), np.array(2.0), np.array([2.0]), jnp.array(2.0, jnp.bfloat16), np.full(2, 2.0)], ids=repr
)
def test_a_scale_of_any_spelling_is_one_type(scale):
    cache = pp.init_cache(spec_of(dtype="float8_e4m3fn"), k_scale=scale)
    assert cache.k_scale.shape == (2,) and cache.k_scale.dtype == jnp.float32 and np.all(np.asarray(cache.k_scale) == 2)


def test_scales_per_head_keep_their_rank():
    per_head = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    cache = pp.init_cache(spec_of(dtype="float8_e4m3fn"), k_scale=per_head)
    np.testing.assert_array_equal(np.asarray(cache.k_scale), per_head)
    for wrong in (per_head.T, np.ones((2, 2)), np.ones(3)):
        with pytest.raises(ValueError, match="k_scale"):
            pp.init_cache(spec_of(dtype="float8_e4m3fn"), k_scale=wrong)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_scales_are_finite_and_positive(scale):
    with pytest.raises(ValueError, match="v_scale"):
        pp.init_cache(spec_of(dtype="float8_e5m2"), v_scale=scale)


def test_an_unquantized_cache_has_no_scale():
    with pytest.raises(ValueError, match=r"k_scale is 0.5.*unquantized"):
        pp.init_cache(spec_of(dtype="bfloat16"), k_scale=0.5)


BAD_SPECS = {
    "num_blocks": [0, -1, 2.0, True, "4", None],
    "block_size": [0],
    "num_kv_heads": [0],
    "head_size": [0],
    "num_layers": [0],
    "dtype": ["int8", "uint8", "float64", "nonsense"],
    "content": ["nhd", None, [], {}, ["packed"], 1],
    "order": ["BLHNC", "NHD", [], {}, None, ["LBHNC"]],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD_SPECS.items() for v in values], ids=str)
def test_a_bad_spec_names_its_field(field, value):
    with pytest.raises((ValueError, TypeError), match=field):
        spec_of(**{field: value})


def test_vectors_of_16_bytes_must_fit():
    with pytest.raises(ValueError, match=r"head_size is 36.*multiple of 8"):
        spec_of("xpacked", dtype="bfloat16", head_size=36)
    with pytest.raises(ValueError, match=r"block_size is 24.*multiple of 16"):
        spec_of("shuffled", dtype="float8_e4m3fn", block_size=24)
    assert spec_of("xpacked", dtype="bfloat16", block_size=12).shape == (2, 5, 2, 3, 12 * 32)


def test_a_spec_is_a_value():
    assert spec_of() == spec_of() and hash(spec_of()) == hash(spec_of()) and spec_of() != spec_of("flash")
    assert spec_of(dtype="float8_e4m3fn").nbytes == 2 * 5 * 2 * 3 * 32 * 32
    assert spec_of(num_blocks=np.int64(5)) == spec_of()


def test_the_closed_sets_are_listed():
    for field, names in (("content", CONTENTS), ("order", ORDERS)):
        for value in ("nhd", [], None):
            with pytest.raises(ValueError, match=field) as raised:
                spec_of(**{field: value})
            assert all(repr(name) in str(raised.value) for name in names)


@layouts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2fnuz"])
def test_a_spec_survives_json(content, order, dtype):
    spec = spec_of(content, order, dtype)
    assert pp.CacheSpec.from_json(spec.to_json()) == spec
    found = json.loads(spec.to_json())
    assert found["dtype"] == dtype and found["num_blocks"] == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "text"),
        ("[]", "text"),
        ("3", "text"),
        (None, "text"),
        ('{"num_blocks": 2}', "num_kv_heads"),
        ('{"num_blocks": 2, "block_size": 16, "num_kv_heads": 1, "head_size": 8, "pages": 3}', "CacheSpec"),
        ('{"num_blocks": 2.5, "block_size": 16, "num_kv_heads": 1, "head_size": 8}', "num_blocks"),
        ('{"num_blocks": 2, "block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": "int8"}', "dtype"),
    ],
)
def test_json_of_no_spec_is_refused(text, words):
    with pytest.raises((ValueError, TypeError), match=words):
        pp.CacheSpec.from_json(text)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("content", CONTENTS)
def test_a_block_may_be_of_any_size_that_its_vectors_divide(content):
    """1 is vLLM's page-size probe."""
    by_vectors = content in ("xpacked_interleaved_v", "shuffled")
    for size in (1, 3, 4, 5, 20, 256):
        if by_vectors and size % 4:
            with pytest.raises(ValueError, match=f"block_size is {size}"):
                spec_of(content, block_size=size)
            continue
        spec = spec_of(content, block_size=size)
        key, value = random_sides(spec)
        found, _ = pp.cache_to_logical(from_sides(spec, key, value), 1)
        np.testing.assert_array_equal(bits(found), bits(key[1]))
        assert spec.nbytes == 2 * 2 * 5 * size * 3 * 32 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_cache_on_the_host_serves_every_move(dtype):
    """After `jax.device_get` (a swap to host memory) the leaves are NumPy arrays."""
    spec = spec_of("xpacked", "LHBNC", dtype)
    cache = from_sides(spec, *random_sides(spec))
    host = jax.device_get(cache)
    assert isinstance(host.data, np.ndarray) and host == cache
    blocks = pp.gather_blocks(cache, [1, 3])
    moves = {
        "copy": lambda c: pp.copy_blocks(c, [0, 1], [2, 4]),
        "scatter": lambda c: pp.scatter_blocks(c, [0, 4], blocks),
        "scatter from the host": lambda c: pp.scatter_blocks(c, [0, 4], jax.device_get(blocks)),
        "convert": lambda c: pp.convert_cache(c, replace(spec, content="flash")),
        "gather": lambda c: pp.gather_blocks(c, [4, 0]),
    }
    for name, move in moves.items():
        moved = move(host)
        assert moved == move(cache), name
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(moved)), name
    for side, expected in zip(pp.cache_to_logical(host, 1), pp.cache_to_logical(cache, 1), strict=True):
        np.testing.assert_array_equal(bits(side), bits(expected))
    token = np.ones((1, 3, 32), np.float32)
    assert pp.update_cache(host, token, token, np.array([5])) == pp.update_cache(cache, token, token, np.array([5]))


def test_blocks_of_a_buffer_in_the_caches_own_dtype_move_as_bits():
    spec = spec_of(dtype="bfloat16")
    cache = from_sides(spec, *random_sides(spec))
    direct = replace(cache, data=jax.lax.bitcast_convert_type(cache.data, jnp.bfloat16))
    blocks = pp.gather_blocks(direct, [1, 3])
    assert blocks == pp.gather_blocks(cache, [1, 3])
    copied = pp.copy_blocks(direct, [1], [2])
    assert copied.data.dtype == jnp.bfloat16 and np.array_equal(bits(copied.data), pp.copy_blocks(cache, [1], [2]).data)
    blocks = replace(blocks, data=jax.lax.bitcast_convert_type(blocks.data, jnp.bfloat16))
    assert pp.scatter_blocks(cache, [0, 4], blocks) == pp.scatter_blocks(cache, [0, 4], pp.gather_blocks(cache, [1, 3]))


def test_a_cache_is_equal_by_its_bits():
    spec = spec_of(dtype="float8_e4m3fn")
    cache = from_sides(spec, *random_sides(spec))  # NaN codes included
    assert cache == from_sides(spec, *random_sides(spec)) and cache != from_sides(spec, *random_sides(spec, seed=1))
    assert cache != replace(cache, k_scale=2 * cache.k_scale) and cache != pp.init_cache(spec_of()) and cache != 3
    nan = from_sides(spec_of(), *random_sides(spec_of()))
    assert nan == jax.tree.map(jnp.array, nan)
    blocks = pp.gather_blocks(cache, [1, 2])
    assert blocks == pp.gather_blocks(cache, [1, 2]) != pp.gather_blocks(cache, [2, 1])
    for value in (cache, blocks):
        with pytest.raises(TypeError, match="unhashable"):
            hash(value)


def test_layout_is_part_of_the_type():
    """Two users of one pool can't disagree on its layout (vllm#47035): the tree structures differ."""
    trees = {jax.tree.structure(pp.init_cache(spec_of(c, o, num_blocks=1))) for c, o in LAYOUTS}
    assert len(trees) == len(LAYOUTS)


def test_the_repr_says_what_a_reader_needs():
    text = repr(pp.init_cache(spec_of("xpacked", "LHBNC", "float8_e4m3fn")))
    for part in ("float8_e4m3fn", "2x2x5x3x1024", "xpacked/LHBNC", "2 layers", "5 blocks of 32 tokens", "60 KiB", "scales per layer"):
        assert part in text
    assert "KVCache" in repr(jax.eval_shape(lambda: pp.init_cache(spec_of())))


def test_fp8_kinds_read_the_same_bytes_differently():
    """vllm#45562: fnuz bytes read as fn are twice their value; the kind is in the type, and bare bytes are refused."""
    values = np.array([1, 2, 3.5, 0.25], ml_dtypes.float8_e4m3fnuz)
    np.testing.assert_array_equal(values.view(ml_dtypes.float8_e4m3fn).astype(np.float32), 2 * values.astype(np.float32))
    with pytest.raises(ValueError, match=r"uint8.*fp8 kind"):
        spec_of(dtype="uint8")


def test_from_logical_checks_shape_and_dtype():
    spec = spec_of()
    key, value = random_sides(spec)
    with pytest.raises(ValueError, match="key"):
        pp.cache_from_logical(spec, key[0], value)
    with pytest.raises(TypeError, match="value"):
        pp.cache_from_logical(spec, key, value.view(np.int32))


def test_an_exported_view_does_not_outlive_its_cache_in_secret():
    """jax#26216: a NumPy view kept alive makes donation copy. The old array must stay readable or be gone, never be overwritten."""
    cache = pp.init_cache(spec_of())
    view = np.asarray(cache.data)
    after = jax.jit(lambda c: replace(c, data=c.data + 1), donate_argnums=0)(cache)
    jax.block_until_ready(after.data)
    assert np.all(view == 0)
    del view
    gc.collect()
