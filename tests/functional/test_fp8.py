"""fp8: the one quantization, bit for bit against ml_dtypes, and which kind a name means."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.functional.fp8 import FP8_MAX, e4m3_dtype, e4m3fn_to_fnuz, kv_cache_dtype, quantize
from purepage.testing import quantize as reference_quantize

E4M3, E4M3Z, E5M2, E5M2Z = (np.dtype(getattr(ml_dtypes, f"float8_{kind}")) for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))
KINDS = (E4M3, E4M3Z, E5M2, E5M2Z)
BF16 = np.dtype(ml_dtypes.bfloat16)
by_kind = pytest.mark.parametrize("dtype", KINDS, ids=lambda d: d.name)


def byte(array) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def every_edge(dtype: np.dtype, scale: np.float32) -> np.ndarray:
    """Values whose quotients are the codes, their midpoints and the float32 neighbours of both; the ends; NaN; random ones."""
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    codes = np.unique(codes[np.isfinite(codes)])
    midpoints = (codes[1:] + codes[:-1]) / 2
    with np.errstate(over="ignore"):
        edges = (np.concatenate([codes, midpoints]) * np.float64(scale)).astype(np.float32)
    around = [edges]
    for direction in (np.inf, -np.inf):
        step = edges
        for _ in range(3):
            step = np.nextafter(step, np.float32(direction))
            around.append(step)
    with np.errstate(over="ignore"):
        top = np.float32(codes.max()) * scale
    ends = np.array([2 * top, -2 * top, 3e38, -3e38, np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-7, -1e-7], np.float32)
    return np.concatenate([*around, ends, np.random.default_rng(7).standard_normal(2000).astype(np.float32) * scale])


@pytest.mark.sampled(12)
@pytest.mark.parametrize("scale", [1.0, 0.9, 0.05, 3.7, 2.0**-6, 1e30, 1e-30, 1e34, 8e37])
@by_kind
def test_quantize_has_the_bits_of_a_division_clamped_and_rounded_once(dtype, scale):
    scale = np.float32(scale)
    values = every_edge(dtype, scale)
    expected = byte(reference_quantize(values, dtype, scale))
    np.testing.assert_array_equal(byte(jax.jit(lambda x, s: quantize(x, s, dtype))(values, scale)), expected, err_msg="traced scale")
    # XLA makes a product with the reciprocal of this one
    np.testing.assert_array_equal(byte(jax.jit(lambda x: quantize(x, scale, dtype))(values)), expected, err_msg="constant scale")
    np.testing.assert_array_equal(byte(quantize(jnp.asarray(values), scale, dtype)), expected, err_msg="eager")


def test_a_quotient_at_a_tie_is_divided_not_multiplied_by_the_reciprocal():
    value, scale = np.float32(0.703125), np.float32(0.9)
    assert float((value * (np.float32(1) / scale)).astype(E4M3)) == 0.8125  # what this guards against
    for run in (quantize, jax.jit(quantize, static_argnums=2)):
        assert float(run(jnp.full(16, value), scale, E4M3)[3]) == 0.75
    assert float(jax.jit(lambda x: quantize(x, scale, E4M3))(jnp.full(16, value))[3]) == 0.75


@pytest.mark.parametrize(
    ("dtype", "top", "positive", "negative"),
    [(E4M3, 448.0, 0x7E, 0xFE), (E4M3Z, 240.0, 0x7F, 0xFF), (E5M2, 57344.0, 0x7B, 0xFB), (E5M2Z, 57344.0, 0x7F, 0xFF)],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_what_is_out_of_range_saturates_and_nan_stays_nan(dtype, top, positive, negative):
    assert FP8_MAX[dtype] == top
    beyond = np.array([top * 1.2, 1e6, np.inf], np.float32)
    assert byte(quantize(jnp.asarray(beyond), 1.0, dtype)).tolist() == [positive] * 3
    assert byte(quantize(jnp.asarray(-beyond), 1.0, dtype)).tolist() == [negative] * 3
    assert float(quantize(jnp.asarray([top * 0.25]), 0.25, dtype)[0]) == top  # a scaled amax meets the last code
    assert np.isnan(np.asarray(quantize(jnp.asarray([np.nan]), 1.0, dtype)).astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "zero"),
    [(E4M3, 0x80), (E4M3Z, 0x00), (E5M2, 0x80), (E5M2Z, 0x00)],
    ids=lambda v: getattr(v, "name", hex(v) if isinstance(v, int) else v),
)
def test_a_negative_zero_is_zero_in_the_fnuz_kinds(dtype, zero):
    """Byte 0x80 is NaN there."""
    values = jnp.asarray([-0.0, -1e-9, -1e-30], jnp.float32)
    assert byte(quantize(values, 1.0, dtype)).tolist() == [zero] * 3
    assert np.all(np.asarray(quantize(values, 0.3, dtype)).astype(np.float32) == 0)


@by_kind
def test_zeros_quantize_to_zero_at_any_scale(dtype):
    for scale in (1e-30, 1.0, 1e30):
        assert byte(quantize(jnp.zeros((2, 3)), scale, dtype)).tolist() == [[0] * 3] * 2


@pytest.mark.parametrize("source", [np.dtype("float16"), BF16], ids=lambda d: d.name)
def test_16_bit_values_are_divided_in_float32(source):
    values = np.random.default_rng(1).standard_normal(512).astype(source)
    expected = byte(reference_quantize(values.astype(np.float32), E4M3, 0.037))
    np.testing.assert_array_equal(byte(quantize(jnp.asarray(values), 0.037, E4M3)), expected)


def test_float32_values_are_rounded_once_not_by_way_of_bfloat16():
    value = np.float32(1.0627)
    assert float(value.astype(BF16).astype(E4M3)) == 1.0  # what this guards against
    assert float(quantize(jnp.asarray([value]), 1.0, E4M3)[0]) == 1.125


def test_scales_broadcast_over_heads():
    values = np.random.default_rng(2).standard_normal((5, 3, 8)).astype(np.float32)
    scales = np.array([0.1, 0.9, 3.0], np.float32)[:, None]
    np.testing.assert_array_equal(byte(quantize(jnp.asarray(values), scales, E4M3)), byte(reference_quantize(values, E4M3, scales)))


def test_quantize_refuses_a_dtype_that_is_not_fp8():
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        quantize(jnp.ones(3), 1.0, jnp.int8)


@pytest.mark.parametrize(
    ("name", "arch", "dtype"),
    [
        ("auto", "gfx942", "bfloat16"),
        ("fp8", "gfx942", "float8_e4m3fnuz"),
        ("fp8_e4m3", "gfx940", "float8_e4m3fnuz"),
        ("fp8", "gfx950", "float8_e4m3fn"),
        ("fp8", "gfx90a", "float8_e4m3fn"),
        ("fp8_e4m3", "gfx1100", "float8_e4m3fn"),
        ("fp8", "gfx1201", "float8_e4m3fn"),
        ("fp8", "gfx1250", "float8_e4m3fn"),
        ("fp8", "sm_90", "float8_e4m3fn"),
        ("fp8", "cpu", "float8_e4m3fn"),
        ("fp8", None, "float8_e4m3fn"),
        ("fp8_e5m2", "gfx942", "float8_e5m2"),
        ("float8_e4m3fn", "gfx942", "float8_e4m3fn"),
        ("float8_e4m3fnuz", "gfx950", "float8_e4m3fnuz"),
        ("float8_e5m2fnuz", None, "float8_e5m2fnuz"),
        ("float16", "gfx942", "float16"),
        ("half", None, "float16"),
        ("bfloat16", None, "bfloat16"),
        ("float32", None, "float32"),
    ],
)
def test_a_cache_dtype_string_means_one_dtype_per_arch(name, arch, dtype):
    assert kv_cache_dtype(name, model_dtype=jnp.bfloat16, arch=arch).name == dtype


def test_e4m3_is_fnuz_on_gfx94x_alone():
    fnuz = {
        arch for arch in (None, "cpu", "sm_90", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950", "gfx1100") if e4m3_dtype(arch) == E4M3Z
    }
    assert fnuz == {"gfx940", "gfx941", "gfx942"}


@pytest.mark.parametrize("name", ["fp8_e3m4", "int8", "", "FP8"])
def test_an_unknown_cache_dtype_string_raises_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"kv_cache_dtype is .*'fp8_e4m3'"):
        kv_cache_dtype(name, model_dtype=jnp.bfloat16)


def test_a_cache_dtype_that_is_no_string_and_a_model_dtype_that_is_no_float_raise():
    with pytest.raises(TypeError, match="kv_cache_dtype"):
        kv_cache_dtype(None, model_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="model_dtype is 'int32'"):
        kv_cache_dtype("auto", model_dtype=jnp.int32)


def test_fn_codes_become_fnuz_codes_of_the_same_values():
    codes = np.arange(256, dtype=np.uint8).view(E4M3)
    moved, scale = e4m3fn_to_fnuz(jnp.asarray(codes), 0.25)
    assert moved.dtype == E4M3Z and float(scale) == 0.5
    np.testing.assert_array_equal(np.asarray(moved).astype(np.float32) * 0.5, codes.astype(np.float32) * np.float32(0.25))
    assert byte(moved)[0x80] == 0
    with pytest.raises(TypeError, match="codes"):
        e4m3fn_to_fnuz(moved, 1.0)


def test_the_same_bytes_mean_twice_as_much_in_a_cache_of_the_other_kind():
    """So the kind is part of a cache's static type, and one byte per element says nothing by itself."""
    values = np.array([1, 2, 3.5, 0.25] * 8, np.float32)
    caches = []
    for dtype in (E4M3Z, E4M3):
        spec = pp.CacheSpec(num_blocks=1, block_size=16, num_kv_heads=1, head_size=32, dtype=dtype)
        cache = pp.init_cache(spec)
        caches.append(pp.update_cache(cache, values.reshape(1, 1, 32), values.reshape(1, 1, 32), np.array([0])))
    fnuz, fn = caches
    assert jax.tree.structure(fnuz) != jax.tree.structure(fn)
    read = pp.cache_to_logical(pp.KVCache(fnuz.data, fnuz.k_scale, fnuz.v_scale, fn.spec))[0][0, 0, 0]
    np.testing.assert_array_equal(np.asarray(read).astype(np.float32), 2 * values)
    with pytest.raises(ValueError, match="dtype is 'uint8'"):
        pp.CacheSpec(num_blocks=1, block_size=16, num_kv_heads=1, head_size=32, dtype=jnp.uint8)
