"""The oracle of rounding, writers, RoPE and addresses against closed forms and hand-worked numbers."""

import ml_dtypes
import numpy as np
import pytest

from purepage.functional.testing import (
    mrope_rows,
    quantize,
    reference_address,
    reference_qk_norm_rope,
    reference_rope,
    reference_update_cache,
    round_to,
)

bf16, e4m3fn, e4m3fnuz, e5m2, e5m2fnuz = (
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
)
FP8 = (e4m3fn, e4m3fnuz, e5m2, e5m2fnuz)
DTYPES = tuple(np.dtype(d) for d in (np.float32, np.float16, bf16, *FP8))


def name_of(value):
    return np.dtype(value).name


# --- rounding and the cache writer


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_round_to_takes_the_nearest_and_the_even_of_two(dtype):
    info = ml_dtypes.finfo(dtype)
    codes = (
        np.arange(256, dtype=np.uint8).view(dtype) if dtype.itemsize == 1 else np.random.default_rng(0).standard_normal(300).astype(dtype)
    )
    exact = np.unique(codes.astype(np.float64)[np.isfinite(codes.astype(np.float64))])
    np.testing.assert_array_equal(round_to(exact, dtype).astype(np.float64), exact)
    if dtype.itemsize == 1:
        middles, low, high = (exact[:-1] + exact[1:]) / 2, exact[:-1], exact[1:]
        np.testing.assert_array_equal(round_to(np.nextafter(middles, -np.inf), dtype).astype(np.float64), low)
        np.testing.assert_array_equal(round_to(np.nextafter(middles, np.inf), dtype).astype(np.float64), high)
        tied = round_to(middles, dtype)
        assert np.all((tied.view(np.uint8) & 1) == 0)
    one = round_to([1 + float(info.eps) / 2, 1 + float(info.eps) * 1.5], dtype).astype(np.float64)
    np.testing.assert_array_equal(one, [1, 1 + 2 * float(info.eps)])


@pytest.mark.parametrize(
    ("dtype", "plus", "minus"), [(e4m3fn, 0x7E, 0xFE), (e4m3fnuz, 0x7F, 0xFF), (e5m2, 0x7B, 0xFB), (e5m2fnuz, 0x7F, 0xFF)]
)
def test_fp8_stores_saturate_and_keep_nan(dtype, plus, minus):
    values = np.array([1e6, -1e6, np.inf, -np.inf, np.nan], np.float32)
    stored = quantize(values, dtype)
    assert stored.view(np.uint8)[:4].tolist() == [plus, minus, plus, minus]
    assert np.isnan(stored[4].astype(np.float64))
    assert quantize(np.float32([3e38]), dtype, 1e-5).view(np.uint8)[0] == plus  # the quotient overflows float32


def test_fp8_stores_follow_their_formula():
    assert float(quantize(np.float32(0.703125), e4m3fn, 0.9)) == 0.75  # a division; times the reciprocal gives 0.8125
    assert float(quantize(np.float32(1.0627), e4m3fn)) == 1.125  # one rounding; through bfloat16 it is 1.0
    assert quantize(np.float32([-1e-7]), e4m3fnuz).view(np.uint8)[0] == 0  # -0 of fnuz would be NaN
    np.testing.assert_array_equal(quantize(np.zeros(4, bf16), e5m2, 0.3).astype(np.float32), 0)
    bits = quantize(np.float32([1, 2, 3.5, 0.25]), e4m3fnuz).view(e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(bits, [2, 4, 7, 0.5])  # the two kinds differ by a factor of two


@pytest.mark.parametrize("cache_dtype", [np.float32, bf16, e4m3fn], ids=name_of)
def test_the_writer_stores_live_slots_and_nothing_else(cache_dtype):
    rng = np.random.default_rng(1)
    key, value = rng.standard_normal((2, 8, 2, 4)).astype(bf16)
    key[7] = np.nan
    caches = np.full((2, 3, 4, 2, 4), 7.0, cache_dtype)
    slots = np.array([5, -1, 0, 12, 11, 2**31 + 5, -7], np.int64)
    new = reference_update_cache(*caches, key, value, slots, k_scale=[0.5, 2.0], v_scale=3.0)
    for side, rows, scale in ((new[0], key, np.array([0.5, 2.0])[:, None]), (new[1], value, np.float64(3.0))):
        assert side.dtype == cache_dtype
        flat = side.reshape(12, 2, 4)
        live = {5: 0, 0: 2, 11: 4}
        for slot in range(12):
            divided = rows[live[slot]].astype(np.float32) / (scale if cache_dtype is e4m3fn else 1) if slot in live else np.float32(7)
            np.testing.assert_array_equal(flat[slot], np.broadcast_to(np.asarray(divided, np.float32).astype(cache_dtype), (2, 4)))
    assert np.all(caches == 7)


# --- rotary embedding


def angles(rotary, rows=800, theta=10000.0):
    phase = np.arange(rows)[:, None] * theta ** (-np.arange(0, rotary, 2) / rotary)
    return np.concatenate([np.cos(phase), np.sin(phase)], axis=1)


@pytest.mark.parametrize("position", [0, 1, 700])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
def test_partial_rotary_turns_pairs_within_the_rotary_channels(position, is_neox):
    x = np.random.default_rng(2).standard_normal((1, 3, 8))
    out = reference_rope([position], x, angles(4), is_neox=is_neox)
    pairs = [(0, 2), (1, 3)] if is_neox else [(0, 1), (2, 3)]
    for (a, b), frequency in zip(pairs, (1.0, 0.01), strict=True):
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * position * frequency)
        np.testing.assert_allclose(out[..., a] + 1j * out[..., b], turned, rtol=1e-10)
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])


def test_rope_reads_the_row_of_its_position_and_rounds_once():
    table = np.concatenate([np.arange(1.0, 6)[:, None] * [1, 10], np.zeros((5, 2))], axis=1)
    x = np.ones((3, 1, 4), bf16)
    out = reference_rope([4, 0, 2], x, table)
    assert out.dtype == bf16
    np.testing.assert_array_equal(out[:, 0].astype(float), [[5, 50, 5, 50], [1, 10, 1, 10], [3, 30, 3, 30]])
    tilted = np.array([[1.0, 2**-8 + 2**-30]])
    assert float(reference_rope([0], np.ones((1, 1, 2), bf16), tilted)[0, 0, 1]) == 1 + 2**-7


@pytest.mark.parametrize("position", [-1, 5, 2**31])
def test_a_position_outside_the_table_is_an_error(position):
    with pytest.raises(IndexError):
        reference_rope([position], np.ones((1, 1, 2)), np.ones((5, 2)))


@pytest.mark.parametrize(
    ("section", "interleaved", "rows"),
    [((4, 1, 1), True, [0, 1, 2, 0, 0, 0]), ((2, 2, 2), True, [0, 1, 2, 0, 1, 2]), ((2, 3, 1), False, [0, 0, 1, 1, 1, 2])],
)
def test_mrope_takes_each_frequency_from_its_axis(section, interleaved, rows):
    assert mrope_rows(section, is_interleaved=interleaved) == rows
    table = np.concatenate([np.broadcast_to(np.arange(9.0)[:, None] + 1, (9, 6)), np.zeros((9, 6))], axis=1)
    qkv = np.ones((1, 3 * 12))
    query, key, value = reference_qk_norm_rope(
        qkv, np.ones(12), np.ones(12), [[0], [3], [8]], table, num_heads=1, eps=0.0, mrope_section=section, is_interleaved=interleaved
    )
    expected = np.array([1, 4, 9])[rows]
    for rotated in (query, key):
        np.testing.assert_allclose(rotated[0, 0], np.tile(expected, 2), rtol=1e-14)
    np.testing.assert_array_equal(value[0, 0], np.ones(12))


def test_mrope_of_equal_rows_is_rope():
    rng = np.random.default_rng(3)
    arguments = (rng.standard_normal((5, 4 * 8)), rng.standard_normal(8), rng.standard_normal(8))
    plain = reference_qk_norm_rope(*arguments, np.arange(5), angles(8), num_heads=2)
    for where in (np.arange(5), np.tile(np.arange(5), (3, 1))):
        same = reference_qk_norm_rope(*arguments, where, angles(8), num_heads=2, mrope_section=(2, 1, 1), is_interleaved=True)
        assert all(np.array_equal(a, b) for a, b in zip(plain, same, strict=True))


@pytest.mark.parametrize(("eps", "expected"), [(1e-5, 0.301511), (1e-6, 0.707107)])
def test_eps_is_added_inside_the_root(eps, expected):
    qkv = np.full((1, 3 * 8), 1e-3)
    query, key, value = reference_qk_norm_rope(qkv, np.ones(8), np.full(8, 2.0), [0], angles(8), num_heads=1, eps=eps)
    np.testing.assert_allclose(query, expected, atol=5e-7)
    np.testing.assert_allclose(key, 2 * expected, atol=1e-6)
    np.testing.assert_array_equal(value, 1e-3)


def test_the_norm_is_per_head_and_rounds_before_it_turns():
    rng = np.random.default_rng(4)
    qkv = (rng.standard_normal((3, 4 * 8)) * np.repeat([1, 10, 100, 1], 8)).astype(bf16)
    weight = (1 + 0.3 * rng.standard_normal(8)).astype(bf16)
    query, _, value = reference_qk_norm_rope(qkv, weight, weight, [1, 2, 3], angles(4), num_heads=2)
    x = qkv.reshape(3, 4, 8)[:, :2].astype(np.float64)
    normed = (x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)).astype(np.float32).astype(bf16)
    np.testing.assert_array_equal(query, reference_rope([1, 2, 3], normed, angles(4)))
    np.testing.assert_array_equal(value, qkv.reshape(3, 4, 8)[:, 3:])


# --- addresses

CONTENTS = ("packed", "xpacked", "xpacked_interleaved_v", "shuffled", "flash")


@pytest.mark.parametrize("order", ["LBHNC", "LHBNC"])
@pytest.mark.parametrize("content", CONTENTS)
def test_addresses_cover_the_buffer_once(content, order):
    extents = {"num_blocks": 3, "num_kv_heads": 2, "block_size": 16, "head_size": 32, "itemsize": 2}
    index = np.ix_(range(2), range(3), range(2), range(16), range(32))
    names = ("layer", "block", "head", "token", "dim")
    sides = [reference_address(content, order, **extents, side=side, **dict(zip(names, index, strict=True))) for side in (0, 1)]
    assert sorted(np.concatenate([side.ravel() for side in sides])) == list(range(2 * 2 * 3 * 2 * 16 * 32))


@pytest.mark.parametrize(
    ("content", "order", "key", "value"),
    [
        # l=1 b=2 h=1 n=5 d=11 with B=3 H=2 N=16 D=32 x=8, worked by hand
        ("packed", "LBHNC", ((((1 * 3 + 2) * 2 + 1) * 16) + 5) * 64 + 11, ((((1 * 3 + 2) * 2 + 1) * 16) + 5) * 64 + 43),
        ("packed", "LHBNC", ((((1 * 2 + 1) * 3 + 2) * 16) + 5) * 64 + 11, ((((1 * 2 + 1) * 3 + 2) * 16) + 5) * 64 + 43),
        ("xpacked", "LBHNC", 10 * 1024 + ((4 + 1) * 16 + 5) * 8 + 3, 11 * 1024 + (32 + 11) * 16 + 5),
        ("xpacked", "LHBNC", 8 * 1024 + ((4 + 1) * 16 + 5) * 8 + 3, 11 * 1024 + (32 + 11) * 16 + 5),
        ("xpacked_interleaved_v", "LBHNC", 10 * 1024 + ((4 + 1) * 16 + 5) * 8 + 3, 11 * 1024 + 512 + 0 * 256 + 11 * 8 + 5),
        ("shuffled", "LHBNC", 8 * 1024 + ((4 + 1) * 16 + 5) * 8 + 3, 11 * 1024 + 512 + 0 * 256 + 11 * 8 + 5),
        ("flash", "LBHNC", 10 * 1024 + (5 * 2 + 1) * 32 + 11, 11 * 1024 + (5 * 2 + 1) * 32 + 11),
    ],
)
def test_addresses_worked_by_hand(content, order, key, value):
    extents = {"num_blocks": 3, "num_kv_heads": 2, "block_size": 16, "head_size": 32, "itemsize": 2}
    where = {"layer": 1, "block": 2, "head": 1, "token": 5, "dim": 11}
    assert [reference_address(content, order, **extents, side=side, **where) for side in (0, 1)] == [key, value]


def test_addresses_do_not_overflow():
    far = reference_address(
        "flash",
        "LBHNC",
        num_blocks=65537,
        num_kv_heads=16,
        block_size=16,
        head_size=128,
        itemsize=1,
        side=0,
        layer=0,
        block=65536,
        head=0,
        token=3,
        dim=0,
    )
    assert far == 2**32 + 3 * 16 * 128
