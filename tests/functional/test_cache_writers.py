"""`update_cache`: what lands where, bit for bit in the whole pool, and that it lands in place."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from processes import run_python

import purepage as pp
from purepage.testing import quantize, random_batch, reference_address, reference_update_cache

F32, F16, BF16 = np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
E4M3, E4M3Z, E5M2, E5M2Z = (np.dtype(getattr(ml_dtypes, f"float8_{kind}")) for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))
DTYPES = (F32, F16, BF16, E4M3, E4M3Z, E5M2, E5M2Z)
CONTENTS = ("packed", "xpacked", "xpacked_interleaved_v", "shuffled", "flash")
ORDERS = ("LBHNC", "LHBNC")
in_every_layout = pytest.mark.parametrize(
    ("content", "order"), list(itertools.product(CONTENTS, ORDERS)), ids=[f"{c}-{o}" for c, o in itertools.product(CONTENTS, ORDERS)]
)


def same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bits = f"u{actual.dtype.itemsize}"
    np.testing.assert_array_equal(actual.view(bits), expected.view(bits))


def nan_cache(spec, **scales):
    """Every slot NaN, so that a write elsewhere shows."""
    bits = np.full(spec.shape, np.nan, spec.dtype).view(spec.storage_dtype)
    empty = pp.init_cache(spec, **scales)
    return pp.KVCache(jnp.asarray(bits), empty.k_scale, empty.v_scale, spec)


def tokens(seed, count, heads, head_size, dtype=F32):
    """Normal values with NaN, both infinities, both zeros and a large one among them."""
    rng = np.random.default_rng(seed)
    key, value = rng.standard_normal((2, count, heads, head_size)).astype(dtype)
    for array in (key, value):
        array.reshape(-1)[rng.choice(array.size, 6, replace=False)] = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1000.0]).astype(dtype)
    return key, value


def distinct_slots(seed, count, num_slots):
    """Random distinct slots, the first and the last of the pool among them, and some that skip their token."""
    rng = np.random.default_rng(seed)
    slots = np.concatenate([[0, num_slots - 1], 1 + rng.permutation(num_slots - 2)])[:count]
    skipped = rng.choice(np.arange(2, count), 6, replace=False)
    slots[skipped] = [-1, -2, num_slots, num_slots + 1, -(2**31), 2**31 - 1]
    return rng.permutation(slots)


def written(cache, key, value, slots, layer=0):
    """The flat bits of `cache` after a write: the oracle's codes at the oracle's addresses, everything else as it was."""
    spec = cache.spec
    flat = np.array(cache.data).reshape(-1)
    slots = np.asarray(slots).astype(np.int64)
    live = np.flatnonzero((slots >= 0) & (slots < spec.num_slots))
    for side, (new, scale) in enumerate(((key, cache.k_scale), (value, cache.v_scale))):
        scale = np.asarray(scale)[layer].reshape(-1, 1)
        address = reference_address(
            spec.content,
            spec.order,
            num_blocks=spec.num_blocks,
            num_kv_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            head_size=spec.head_size,
            itemsize=spec.dtype.itemsize,
            side=side,
            layer=layer,
            block=slots[live, None, None] // spec.block_size,
            head=np.arange(spec.num_kv_heads)[:, None],
            token=slots[live, None, None] % spec.block_size,
            dim=np.arange(spec.head_size),
        )
        flat[address] = quantize(np.asarray(new)[live], spec.dtype, scale).view(flat.dtype)
    return flat.reshape(spec.shape)


# Every dtype with every content; orders, model dtypes, heads, head sizes, block sizes and kinds of scale in turn (pairwise, not a product).
SHAPES = [(2, 64, 16), (8, 80, 32), (1, 256, 16), (3, 96, 48), (16, 64, 16), (2, 128, 544)]
GRID = [
    (dtype, content, ORDERS[(i + j) % 2], (F32, F16, BF16)[(i + 2 * j) % 3], SHAPES[(2 * i + j) % 6], ("head", "layer", "one")[(i + j) % 3])
    for i, dtype in enumerate(DTYPES)
    for j, content in enumerate(CONTENTS)
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("dtype", "content", "order", "model_dtype", "shape", "scales"),
    GRID,
    ids=["-".join((d.name, c, o, m.name, "x".join(map(str, s)), k)) for d, c, o, m, s, k in GRID],
)
def test_a_donated_write_is_in_place_and_changes_its_slots_alone(dtype, content, order, model_dtype, shape, scales):
    heads, head_size, block_size = shape
    blocks = max(3, (640 + 4096 // heads) // block_size)
    spec = pp.CacheSpec(
        num_blocks=blocks,
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        num_layers=2,
        dtype=dtype,
        content=content,
        order=order,
    )
    rng = np.random.default_rng(5)
    size = {"one": (), "layer": (2,), "head": (2, heads)}[scales]
    factors = rng.uniform(0.02, 2.0, (2, *size)).astype(np.float32) if spec.is_quantized else np.ones(2)
    cache = nan_cache(spec, k_scale=factors[0], v_scale=factors[1])
    key, value = tokens(11, 42, heads, head_size, model_dtype)
    slots = distinct_slots(13, 42, spec.num_slots)

    def write(cache, key, value, slots, layer):
        return pp.update_cache(cache, key, value, slots, layer=layer, implementation="xla")

    arguments = (cache, key, value, jnp.asarray(slots, jnp.int32), jnp.int32(1))
    compiled = jax.jit(write, donate_argnums=0).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= spec.nbytes
    assert memory.temp_size_in_bytes < spec.nbytes / 8
    expected = written(cache, key, value, slots, layer=1)
    out = compiled(*arguments)
    assert cache.data.is_deleted() and out.spec == spec
    same_bits(out.data, expected)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", [F32, BF16, E4M3], ids=lambda d: d.name)
@in_every_layout
def test_every_element_is_at_the_address_of_its_layout(content, order, dtype):
    """Heads as many as a block's slots, so that no shape tells the layout (x = 4, 8 and 16); one numbered element a channel."""
    sizes = {"num_blocks": 3, "num_kv_heads": 16, "block_size": 16, "head_size": 32}
    spec = pp.CacheSpec(**sizes, num_layers=2, dtype=dtype, content=content, order=order)
    slots = np.array([37, 0, 31])
    # codes 1..120 of fp8 stay away from its NaNs; two numbers per element tell sides, tokens, heads and channels apart
    numbers = np.arange(2 * 3 * 16 * 32).reshape(2, 3, 16, 32)
    for digit in (numbers % 113, numbers // 113):
        bits = (1 + digit).astype(f"u{dtype.itemsize}")
        values = bits.view(dtype).astype(np.float32)
        cache = pp.init_cache(spec)
        out = pp.update_cache(cache, values[0], values[1], slots, layer=1, implementation="xla")
        expected = np.zeros(spec.size, bits.dtype)
        t, h, d = np.meshgrid(range(3), range(16), range(32), indexing="ij")
        for side in range(2):
            where = reference_address(
                content,
                order,
                **sizes,
                itemsize=dtype.itemsize,
                side=side,
                layer=1,
                block=slots[t] // 16,
                head=h,
                token=slots[t] % 16,
                dim=d,
            )
            expected[where] = bits[side]
        np.testing.assert_array_equal(np.asarray(out.data).reshape(-1).view(bits.dtype), expected)


def small(dtype=F32, **changes):
    return pp.CacheSpec(**{"num_blocks": 5, "block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": dtype, **changes})


@pytest.mark.parametrize("content", ["packed", "shuffled"])
def test_slots_outside_the_pool_skip_both_key_and_value(content):
    """-1 would wrap to the last slot."""
    cache = nan_cache(small(content=content))
    slots = np.array([-1, -16, -80, -(2**31), 80, 81, 96, 2**31 - 1])
    key, value = tokens(1, len(slots), 2, 32)
    for write in (pp.update_cache, jax.jit(pp.update_cache)):
        same_bits(write(cache, key, value, jnp.asarray(slots, jnp.int32)).data, cache.data)


def test_rows_past_the_end_of_the_slots_are_ignored():
    cache = nan_cache(small())
    key, value = tokens(2, 8, 2, 32)
    slots = np.array([3, 70, -1, 12, 44])
    want = pp.update_cache(cache, key[:5], value[:5], slots)
    key[5:] = value[5:] = np.nan
    same_bits(pp.update_cache(cache, key, value, slots).data, want.data)
    same_bits(want.data, written(cache, key, value, slots))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"])
def test_every_integer_dtype_of_the_slots_writes_the_same_cache(dtype):
    cache = nan_cache(small(num_blocks=20))  # 320 slots, more than 8 bits hold: an index in the slots' own dtype would overflow
    key, value = tokens(3, 4, 2, 32)
    slots = np.array([0, 127, 40, 17])
    want = pp.update_cache(cache, key, value, slots.astype(np.int32))
    same_bits(pp.update_cache(cache, key, value, slots.astype(dtype)).data, want.data)
    if np.dtype(dtype).itemsize < 8:
        same_bits(jax.jit(pp.update_cache)(cache, key, value, slots.astype(dtype)).data, want.data)


def test_the_old_cache_survives_a_write_without_donation():
    cache = nan_cache(small(BF16))
    before = np.array(cache.data)
    key, value = tokens(5, 3, 2, 32)
    out = jax.jit(pp.update_cache)(cache, key, value, np.array([1, 2, 3]))
    pp.update_cache(cache, key, value, np.array([1, 2, 3]))
    same_bits(cache.data, before)
    assert not np.array_equal(np.asarray(out.data), before)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=lambda d: d.name)
def test_a_cache_whose_data_is_in_its_own_dtype_is_written_alike(dtype):
    spec = small(dtype, content="xpacked")
    cache = nan_cache(spec)
    typed = pp.KVCache(jax.lax.bitcast_convert_type(cache.data, dtype), cache.k_scale, cache.v_scale, spec)
    key, value = tokens(6, 4, 2, 32)
    slots = np.array([5, -1, 79, 16])
    out = pp.update_cache(typed, key, value, slots)
    assert out.data.dtype == dtype
    same_bits(jax.lax.bitcast_convert_type(out.data, spec.storage_dtype), pp.update_cache(cache, key, value, slots).data)


@pytest.mark.parametrize("dtype", [F16, BF16, E4M3, E5M2Z], ids=lambda d: d.name)
def test_eager_and_jitted_writes_give_the_same_bits(dtype):
    scales = {"k_scale": 0.3, "v_scale": 0.9} if dtype.itemsize == 1 else {}
    cache = nan_cache(small(dtype), **scales)
    key, value = tokens(7, 5, 2, 32)
    slots = np.array([5, -1, 79, 16, 2])
    eager = pp.update_cache(cache, key, value, slots)
    same_bits(jax.jit(pp.update_cache)(cache, key, value, slots).data, eager.data)
    closed = jax.jit(lambda k, v: pp.update_cache(cache, k, v, slots))(key, value)  # cache and scales are constants here
    same_bits(closed.data, eager.data)


@pytest.mark.parametrize(
    ("dtype", "value", "byte"),
    [(E4M3, 1000, 0x7E), (E4M3, -1000, 0xFE), (E4M3Z, 1000, 0x7F), (E4M3Z, -np.inf, 0xFF), (E4M3Z, -1e-7, 0x00), (E5M2, 1e5, 0x7B)],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_an_fp8_cache_saturates(dtype, value, byte):
    new = np.full((1, 2, 32), value, np.float32)
    out = pp.update_cache(pp.init_cache(small(dtype)), new, np.ones_like(new), np.array([17]))
    key, _ = pp.cache_to_logical(out)
    assert np.all(np.asarray(key).view(np.uint8)[1, 1] == byte)


def test_key_and_value_take_their_own_scale_of_their_own_layer_and_head():
    spec = small(E4M3, num_layers=2)
    ones = np.ones((1, 2, 32), np.float32)
    k_scale, v_scale = np.array([[1, 0.5], [0.25, 0.125]], np.float32), np.array([[2, 4], [8, 16]], np.float32)
    cache = pp.init_cache(spec, k_scale=k_scale, v_scale=v_scale)
    for layer in range(2):
        out = pp.update_cache(cache, ones, 64 * ones, np.array([0]), layer=layer)
        key, value = (np.asarray(side, np.float32)[0, 0, :, 0] for side in pp.cache_to_logical(out, layer))
        np.testing.assert_array_equal(key, 1 / k_scale[layer])
        np.testing.assert_array_equal(value, 64 / v_scale[layer])


def test_a_scale_may_be_spelled_in_any_way():
    spec = small(E4M3)
    key, value = tokens(8, 3, 2, 32)
    spellings = (0.25, np.float32(0.25), jnp.float32(0.25), np.array([0.25]), jnp.full(1, 0.25, BF16))
    caches = [pp.init_cache(spec, k_scale=scale, v_scale=scale) for scale in spellings]
    count = 0

    @jax.jit
    def write(cache):
        nonlocal count
        count += 1
        return pp.update_cache(cache, key, value, np.array([1, 2, 3]))

    outs = [write(cache) for cache in caches]
    assert count == 1
    for out in outs[1:]:
        same_bits(out.data, outs[0].data)


@in_every_layout
def test_a_cache_of_one_head_is_written_in_place(content, order):
    """MQA, or one KV head a device: XLA moves axes of size 1 about, and copies the cache for it if it may."""
    spec = small(BF16, num_kv_heads=1, num_blocks=400, content=content, order=order)
    new = jnp.ones((5, 1, 32), BF16)
    compiled = jax.jit(pp.update_cache, donate_argnums=0).lower(pp.init_cache(spec), new, new, jnp.arange(5)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < spec.nbytes / 8


def test_a_scan_over_layers_updates_one_donated_cache_in_place():
    spec = small(BF16, num_layers=4, num_blocks=200)
    cache = nan_cache(spec)
    keys, values = (np.stack(side) for side in zip(*(tokens(20 + i, 6, 2, 32, BF16) for i in range(4)), strict=True))
    slots = np.array([4, 80, -1, 3199, 7, 16])

    def step(cache, keys, values, slots):
        def layer(cache, new):
            index, key, value = new
            return pp.update_cache(cache, key, value, slots, layer=index), None

        return jax.lax.scan(layer, cache, (jnp.arange(4), keys, values))[0]

    before = jax.tree.map(jnp.copy, cache)
    arguments = (cache, keys, values, jnp.asarray(slots, jnp.int32))
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < spec.nbytes / 8
    out = compiled(*arguments)
    for index in range(4):
        before = pp.update_cache(before, keys[index], values[index], slots, layer=index)
    same_bits(out.data, before.data)


def test_a_decode_loop_of_donated_writes_warns_of_nothing_and_keeps_its_buffer():
    spec = small(BF16)
    key, value = tokens(9, 2, 2, 32)
    write = jax.jit(pp.update_cache, donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = pp.init_cache(spec)
        pointer = cache.data.unsafe_buffer_pointer()
        for step in range(4):
            cache = write(cache, key, value, jnp.array([step, 16 + step]))
        assert cache.data.unsafe_buffer_pointer() == pointer


def test_a_cache_past_2_to_the_31_elements_is_written_at_its_far_end():
    """2 GiB of bytes; element offset 2**31 is the first of the last block."""
    spec = pp.CacheSpec(num_blocks=65537, block_size=16, num_kv_heads=16, head_size=64, dtype=E4M3)
    assert spec.size == 2_147_516_416
    key, value = tokens(10, 2, 16, 64)
    slots = np.array([65536 * 16 + 3, 65537 * 16])
    cache = jax.jit(pp.update_cache, donate_argnums=0)(pp.init_cache(spec), key, value, slots)
    last = np.asarray(cache.data[0, 65536])
    expected = np.zeros((16, 16, 128), np.uint8)
    stored = np.zeros((1, 16, 16, 64), E4M3)
    k, v = reference_update_cache(stored, stored, key, value, np.array([3]))
    expected[:] = np.concatenate([k[0], v[0]], axis=-1).transpose(1, 0, 2).view(np.uint8)
    np.testing.assert_array_equal(last, expected)
    for block in (0, 1, 32767, 32768, 65535):  # 2**31 and 2**32 back from the truth, and neighbours
        assert not np.asarray(cache.data[0, block]).any()


def test_eager_writes_compile_once_for_every_layer_batch_and_scale():
    from purepage.kernels.xla.writers import update_cache as implementation

    spec = small(E4M3, num_layers=3, head_size=96)
    before = implementation._cache_size()
    for seed in range(3):
        cache = pp.init_cache(spec, k_scale=[0.1, np.float32(0.2), jnp.float32(0.3)][seed])
        key, value = tokens(seed, 5, 2, 96)
        pp.update_cache(cache, key, value, np.arange(5) + seed, layer=[0, np.int64(1), jnp.int32(2)][seed])
    assert implementation._cache_size() == before + 1


def test_no_tokens_write_nothing():
    cache = nan_cache(small())
    empty = np.zeros((0, 2, 32), np.float32)
    same_bits(pp.update_cache(cache, empty, empty, np.zeros(0, np.int32)).data, cache.data)
    key, value = tokens(12, 3, 2, 32)
    same_bits(pp.update_cache(cache, key, value, np.zeros(0, np.int32)).data, cache.data)


def test_vmap_writes_a_cache_of_its_own_for_each_row():
    spec = small(E4M3)
    pairs = [tokens(30 + i, 4, 2, 32) for i in range(3)]
    keys, values = (np.stack(side) for side in zip(*pairs, strict=True))
    slots = np.array([[1, 2, 3, -1], [79, 0, 80, 5], [9, 8, 7, 6]])
    caches = [nan_cache(spec, k_scale=0.1 * (i + 1), v_scale=0.5) for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    out = jax.vmap(pp.update_cache)(stacked, keys, values, slots)
    for i in range(3):
        same_bits(out.data[i], pp.update_cache(caches[i], keys[i], values[i], slots[i]).data)


@in_every_layout
def test_one_batch_reads_back_alike_from_every_layout(content, order):
    batch = random_batch(3, num_layers=2, cache_dtype=E4M3, scales="head", block_size=16)
    spec = batch.spec(content=content, order=order)
    cache, wanted = batch.cache_before(spec), batch.cache(spec)
    for layer in range(2):
        cache = pp.update_cache(cache, batch.new_keys[layer], batch.new_values[layer], batch.metadata.slot_mapping, layer=layer)
    same_bits(cache.data, wanted.data)


GOOD = {
    "cache": nan_cache(small()),
    "key": np.ones((3, 2, 32), np.float32),
    "value": np.ones((3, 2, 32), np.float32),
    "slot_mapping": np.arange(3),
}


def cache_of(data, scale):
    return {"cache": pp.KVCache(data, scale, jnp.ones(1), small())}


BAD = {
    "cache is an array": ({"cache": jnp.zeros(3)}, TypeError, "cache is float32"),
    "cache of another shape": (cache_of(jnp.zeros((1, 5, 2, 8, 64)), jnp.ones(1)), ValueError, r"cache\.data"),
    "cache of another dtype": (cache_of(jnp.zeros(small().shape, jnp.int32), jnp.ones(1)), TypeError, r"cache\.data"),
    "scale of two layers": (cache_of(jnp.zeros(small().shape), jnp.ones(2)), ValueError, r"cache\.k_scale"),
    "key without heads": ({"key": np.ones((3, 64), np.float32)}, ValueError, r"key is float32\[3,64\]"),
    "key of other heads": ({"key": np.ones((3, 4, 32), np.float32)}, ValueError, r"key is .* of 2 heads"),
    "value of another head size": ({"value": np.ones((3, 2, 64), np.float32)}, ValueError, r"value is .* of head_size 32"),
    "value of fewer tokens": ({"value": np.ones((2, 2, 32), np.float32)}, ValueError, r"value is .* of the key's 3 tokens"),
    "key of integers": ({"key": np.ones((3, 2, 32), np.int32)}, TypeError, "key is int32"),
    "key in fp8": ({"key": np.ones((3, 2, 32), E4M3)}, TypeError, "key is float8_e4m3fn"),
    "key is None": ({"key": None}, ValueError, "key is None"),
    "slots as a list": ({"slot_mapping": [0, 1, 2]}, ValueError, "slot_mapping is"),
    "slots in two dimensions": ({"slot_mapping": np.zeros((1, 3), np.int32)}, ValueError, "slot_mapping is"),
    "slots as floats": ({"slot_mapping": np.zeros(3, np.float32)}, TypeError, "slot_mapping is float32"),
    "more slots than tokens": ({"slot_mapping": np.arange(4)}, ValueError, r"slot_mapping is int64\[4\]"),
    "layer past the cache": ({"layer": 1}, ValueError, "layer is 1"),
    "negative layer": ({"layer": -1}, ValueError, "layer is -1"),
    "layer is a float": ({"layer": 0.0}, TypeError, r"layer is 0\.0"),
    "unknown implementation": ({"implementation": "cuda"}, ValueError, "implementation is 'cuda'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_raises_with_its_name_and_value(case):
    change, error, message = BAD[case]
    with pytest.raises(error, match=message):
        pp.update_cache(**{**GOOD, **change})


def test_heads_sharded_over_a_mesh_are_written_where_they_are():
    """By `jit` alone and under `shard_map`, on eight fake devices: the same bits, and no shard travels."""
    script = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        import purepage as pp

        mesh = jax.make_mesh((8,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
        rng = np.random.default_rng(0)
        key, value = rng.standard_normal((2, 6, 8, 32)).astype(np.float32)
        slots = jnp.array([3, 79, -1, 0, 80, 40], jnp.int32)
        for content, order, dtype in (
            ("packed", "LBHNC", "bfloat16"),
            ("shuffled", "LHBNC", "float8_e4m3fn"),
            ("flash", "LBHNC", "float32"),
        ):
            layout = dict(dtype=dtype, content=content, order=order)
            spec = pp.CacheSpec(num_blocks=5, block_size=16, num_kv_heads=8, head_size=32, num_layers=2, **layout)
            axes = P(*("heads" if axis == "H" else None for axis in spec.axes))
            scales = dict(k_scale=np.linspace(.1, .8, 16).reshape(2, 8), v_scale=np.full((2, 8), .5)) if spec.is_quantized else {}
            by_head = P(None, "heads") if scales else P()
            shards = pp.KVCache(axes, by_head, by_head, spec)
            cache = pp.init_cache(spec, sharding=NamedSharding(mesh, axes), **scales)
            want = np.asarray(pp.update_cache(pp.init_cache(spec, **scales), key, value, slots, layer=1).data)

            def write(cache, key, value):
                return pp.update_cache(cache, key, value, slots, layer=1, implementation="xla")

            rows = P(None, "heads", None)
            put = lambda x: jax.device_put(x, NamedSharding(mesh, rows))
            mapped = jax.shard_map(write, mesh=mesh, in_specs=(shards, rows, rows), out_specs=shards)
            placed = jax.tree.map(lambda p: NamedSharding(mesh, p), shards, is_leaf=lambda p: isinstance(p, P))
            for step in (jax.jit(write, out_shardings=placed), jax.jit(mapped)):
                compiled = step.lower(jax.device_put(cache, placed), put(key), put(value)).compile()
                text = compiled.as_text()
                assert not any(op in text for op in ("all-gather", "all-reduce", "all-to-all", "collective-permute")), (content, text)
                out = compiled(jax.device_put(cache, placed), put(key), put(value))
                assert out.data.sharding.shard_shape(out.data.shape)[spec.axes.index("H")] == 1
                np.testing.assert_array_equal(np.asarray(out.data), want)
        print("written")
    """
    assert "written" in run_python(script, devices=8)
