"""The Triton cache writer through Triton's interpreter, inside `jax.jit`: every slot of the pool bit for bit, in every layout and dtype."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from pairwise import case_id, pairwise
from pool import bits, expected_pool, random_cache

import purepage as pp
from purepage.functional.layout import CONTENTS, ORDERS
from purepage.kernels.archs import ARCHS
from purepage.kernels.launch import Buffer, Launch, Program
from purepage.kernels.plans.writers import CacheShape, UpdateShape, plan_update_cache
from purepage.testing import round_to

pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from purepage.bridges.execute import run  # noqa: E402
from purepage.kernels.triton.rounding import divided, quantized  # noqa: E402

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
FP8 = tuple(getattr(ml_dtypes, f"float8_{kind}") for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))
NAN_CODE = {FP8[0]: 0x7F, FP8[1]: 0x80, FP8[2]: 0x7E, FP8[3]: 0x80}


CASES = pairwise(
    {
        "content": tuple(CONTENTS),
        "order": ORDERS,
        "dtype": (F32, F16, BF16, *FP8),
        "model": (F32, F16, BF16),
        "head_size": (32, 48, 80),
        "block_size": (16, 48),
        "heads": (1, 3),
        "scales": ("layer", "head"),
    }
)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_write_changes_its_slots_to_the_right_bits_and_nothing_else(case):
    heads, size, layers = case["heads"], case["head_size"], 2
    spec = pp.CacheSpec(
        num_blocks=3,
        block_size=case["block_size"],
        num_kv_heads=heads,
        head_size=size,
        num_layers=layers,
        dtype=case["dtype"],
        content=case["content"],
        order=case["order"],
    )
    rng = np.random.default_rng(1)
    scale_shape = (layers, heads) if case["scales"] == "head" else (layers,)
    scales = {name: rng.uniform(0.01, 0.1, scale_shape).astype(F32) for name in ("k_scale", "v_scale")} if spec.is_quantized else {}
    cache = random_cache(spec, **scales)
    tokens = 19
    with np.errstate(over="ignore"):
        key, value = ((rng.standard_normal((tokens, heads, size)) * 10).astype(case["model"]) for _ in range(2))
        key[0, 0, :5] = [np.inf, -np.inf, np.nan, -0.0, 6e4]
        value[1, 0, :5] = [1e-7, -1e-7, -np.nan, -6e4, 448.0]
    slots = np.concatenate([np.arange(13, 24), rng.permutation(np.arange(24, spec.num_slots))[:5], [-1, spec.num_slots, 2**31 - 1]]).astype(
        np.int32
    )

    @jax.jit
    def write(cache, key, value, slots, layer):
        return pp.update_cache(cache, key, value, slots, layer=layer, implementation="triton")

    before = np.array(cache.data)
    after = write(cache, jnp.asarray(key), jnp.asarray(value), jnp.asarray(slots), jnp.int32(1))
    np.testing.assert_array_equal(bits(after.data), expected_pool(cache, key, value, slots, 1).view(bits(after.data).dtype))
    np.testing.assert_array_equal(bits(cache.data), bits(before))


@pytest.mark.parametrize("dtype", FP8, ids=lambda dtype: dtype.__name__)
def test_fp8_codes_are_nearest_even_at_every_code_and_every_midpoint_between_two(dtype):
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    finite = np.unique(codes[np.isfinite(codes)])
    middle = (finite[1:] + finite[:-1]) / 2
    exact = np.concatenate([finite, middle]).astype(F32)
    points = np.concatenate([exact, np.nextafter(exact, F32(np.inf)), np.nextafter(exact, F32(-np.inf))])
    points = np.concatenate([points, F32([-0.0, np.inf, -np.inf, 1e30, -1e30, 1e-30, -1e-30, 1e-45, -1e-45, np.nan])])
    size = 1 << (len(points) - 1).bit_length()
    x = np.resize(points, size)

    inputs, outputs = (("x", Buffer((size,), "float32")),), (("codes", Buffer((size,), "uint8")),)
    launch = Launch(
        "test_triton_writers:quantize_kernel", (1, 1, 1), ("codes", "x"), ("codes",), (("SIZE", size), ("KIND", dtype.__name__))
    )
    program = Program("quantize", inputs, outputs, (), (), (launch,))
    (found,) = jax.jit(lambda x: run(program, {"x": x}))(jnp.asarray(x))
    wanted = bits(round_to(x, dtype, saturate=True)).copy()
    wanted[np.isnan(x)] = NAN_CODE[dtype]
    np.testing.assert_array_equal(np.asarray(found), wanted)


@triton.jit
def quantize_kernel(codes, x, SIZE: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(codes + i, quantized(tl.load(x + i), KIND, False))


@triton.jit
def divide_kernel(quotients, x, scale, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(quotients + i, divided(tl.load(x + i), tl.load(scale), "float8_e5m2fnuz", False))


def test_a_scale_so_small_that_a_remainder_would_not_fit_float32_divides_exactly():
    """A GPU's short division would give the float32 below this tie of two codes: its remainder has bits under the smallest subnormal."""
    x, scale = (np.full((size,), code, np.uint32).view(F32) for size, code in ((16, 106956057), (1, 234881770)))
    assert 1.57e-30 < scale[0] < 1.58e-30 and x[0] / scale[0] == F32(1.75 * 2**-16)
    inputs = (("x", Buffer((16,), "float32")), ("scale", Buffer((1,), "float32")))
    outputs = (("quotients", Buffer((16,), "float32")),)
    launch = Launch("test_triton_writers:divide_kernel", (1, 1, 1), ("quotients", "x", "scale"), ("quotients",), (("SIZE", 16),))
    program = Program("divide", inputs, outputs, (), (), (launch,))
    (found,) = jax.jit(lambda x, scale: run(program, {"x": x, "scale": scale}))(jnp.asarray(x), jnp.asarray(scale))
    np.testing.assert_array_equal(np.asarray(found), x / scale)


def test_the_scale_divides_where_its_reciprocal_would_give_another_code():
    spec = pp.CacheSpec(num_blocks=1, block_size=16, num_kv_heads=1, head_size=16, dtype=FP8[0])
    cache = pp.init_cache(spec, k_scale=0.9, v_scale=0.9)
    row = jnp.full((1, 1, 16), 0.703125, jnp.float32)
    key, _ = pp.cache_to_logical(pp.update_cache(cache, row, row, jnp.array([3]), implementation="triton"))
    assert np.asarray(key)[0, 3].astype(F32).tolist() == [[0.75] * 16]


@pytest.mark.parametrize("content", CONTENTS)
def test_a_donated_write_comes_back_in_the_same_memory(content):
    spec = pp.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=2, head_size=32, content=content)
    cache = random_cache(spec)
    place, before = cache.data.unsafe_buffer_pointer(), np.array(cache.data)
    key = value = jnp.ones((2, 2, 32), jnp.bfloat16)
    write = jax.jit(lambda cache: pp.update_cache(cache, key, value, jnp.array([5, -1]), implementation="triton"), donate_argnums=0)
    after = write(cache)
    assert after.data.unsafe_buffer_pointer() == place and cache.data.is_deleted()
    assert 0 < np.sum(bits(after.data) != bits(before)) <= 2 * 2 * 32


def test_one_trace_writes_every_layer_of_a_scan():
    layers = 3
    spec = pp.CacheSpec(num_blocks=2, block_size=16, num_kv_heads=1, head_size=32, num_layers=layers, dtype=jnp.float32)
    keys = np.random.default_rng(0).standard_normal((layers, 2, 1, 32)).astype(F32)

    @jax.jit
    def write_all(cache, keys):
        def step(cache, layer_and_key):
            layer, key = layer_and_key
            return pp.update_cache(cache, key, 2 * key, jnp.array([31, 4]), layer=layer, implementation="triton"), None

        return jax.lax.scan(step, cache, (jnp.arange(layers), keys))[0]

    cache = write_all(pp.init_cache(spec), jnp.asarray(keys))
    for layer in range(layers):
        key, value = (np.asarray(side) for side in pp.cache_to_logical(cache, layer))
        np.testing.assert_array_equal(key[[1, 0], [15, 4]], keys[layer])
        np.testing.assert_array_equal(value, 2 * key)


@pytest.mark.parametrize("dtype", (np.int64, np.uint64), ids=str)
def test_a_wide_slot_is_outside_the_cache_even_where_its_low_bits_are_inside(dtype):
    spec = pp.CacheSpec(num_blocks=2, block_size=16, num_kv_heads=1, head_size=32)
    cache = random_cache(spec)
    slots = np.array([2**32 + 5, 2**31, 2**63 - 1, 3], dtype)
    key = jnp.ones((4, 1, 32), jnp.bfloat16)
    after = pp.update_cache(cache, key, key, slots, implementation="triton")
    only = pp.update_cache(cache, key, key, np.array([-1, -1, -1, 3], np.int32), implementation="triton")
    np.testing.assert_array_equal(bits(after.data), bits(only.data))
    assert np.any(bits(after.data) != bits(cache.data))


def test_no_tokens_leave_the_cache_as_it_was():
    spec = pp.CacheSpec(num_blocks=2, block_size=16, num_kv_heads=1, head_size=32)
    cache = random_cache(spec)
    key = jnp.zeros((0, 1, 32), jnp.bfloat16)
    after = pp.update_cache(cache, key, key, jnp.zeros((0,), jnp.int32), implementation="triton")
    np.testing.assert_array_equal(bits(after.data), bits(cache.data))


def test_a_cache_past_two_to_the_31_elements_is_addressed_in_64_bits():
    """Block 65536 of 32 KiB blocks: its first byte is at 2**31, which 32 bits read as a negative number."""
    spec = pp.CacheSpec(num_blocks=65537, block_size=16, num_kv_heads=1, head_size=1024, dtype=FP8[0])
    if spec.nbytes + 2**30 > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        pytest.skip("too little memory free for a cache of 2 GiB")
    row = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 1024)), jnp.float32)

    @jax.jit
    def write_and_read(key):
        cache = pp.KVCache(jnp.zeros(spec.shape, jnp.uint8), jnp.ones((1,)), jnp.ones((1,)), spec)
        after = pp.update_cache(cache, key, 2 * key, jnp.array([65536 * 16 + 3]), implementation="triton")
        return after.data[0, 65536, 0, 3], after.data[0, 0]

    written, first_block = write_and_read(row)
    wanted = np.concatenate([bits(round_to(np.asarray(factor * row)[0, 0], spec.dtype, saturate=True)) for factor in (1, 2)])
    np.testing.assert_array_equal(np.asarray(written), wanted)
    assert not np.any(np.asarray(first_block))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_plan_fits_its_arch_and_covers_every_token(arch):
    for tokens in (1, 7, 256, 8192):
        for content in CONTENTS:
            spec = pp.CacheSpec(num_blocks=9, block_size=64, num_kv_heads=8, head_size=128, content=content)
            shape = UpdateShape(num_tokens=tokens, cache=CacheShape(spec=spec), key_dtype="bfloat16", value_dtype="bfloat16")
            (launch,) = plan_update_cache(shape, arch).launches
            constants = dict(launch.constants)["S"]
            assert launch.grid[0] == -(-tokens // constants.block_tokens) * spec.num_kv_heads
            assert launch.num_warps * ARCHS[arch].wave_size <= ARCHS[arch].max_threads


def test_the_interpreter_serves_calls_by_name_only():
    from purepage.bridges.triton import plan
    from purepage.functional.target import named_target

    assert any("ask for it by name" in reason for reason in plan("update_cache", None, named_target("cpu"), explicit=False).reasons)
