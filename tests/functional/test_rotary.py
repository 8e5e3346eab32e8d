"""`rotary_embedding` against the float64 oracle, its one rounding, and positions that have no row."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.kernels.xla.rounding import round_to
from purepage.testing import assert_close, reference_rope

F32, F16, BF16 = np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)


def table_of(max_pos, rotary_dim, dtype=F32, seed=0):
    """cos || sin of random angles, so that no two entries agree."""
    angles = np.random.default_rng(seed).uniform(-3, 3, (max_pos, rotary_dim // 2))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(dtype)


def heads_of(seed, tokens, heads, head_size, dtype):
    return np.random.default_rng(seed).standard_normal((tokens, heads, head_size)).astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "table_dtype", "is_neox", "heads", "head_size", "rotary_dim"),
    [
        (F32, F32, True, (4, 2), 64, 64),
        (F32, BF16, False, (3, 1), 80, 32),
        (BF16, BF16, True, (8, 8), 128, 128),
        (BF16, F32, False, (2, 1), 64, 64),
        (BF16, F32, True, (4, 1), 96, 24),
        (F16, F16, True, (2, 2), 256, 64),
        (F16, F32, False, (6, 2), 32, 2),
        (F32, F32, True, (1, 1), 72, 70),
    ],
    ids=lambda v: getattr(v, "name", str(v)).replace(" ", ""),
)
def test_queries_and_keys_are_rotated_as_the_oracle_says(dtype, table_dtype, is_neox, heads, head_size, rotary_dim):
    table = table_of(50, rotary_dim, table_dtype)
    positions = np.array([0, 49, 7, 7, 31, 1, 2])
    query, key = (heads_of(i, 7, count, head_size, dtype) for i, count in enumerate(heads))
    for actual, x in zip(pp.rotary_embedding(positions, query, key, table, is_neox=is_neox), (query, key), strict=True):
        expected = reference_rope(positions, x, table, is_neox=is_neox)
        assert_close(actual, expected, dtype=dtype)
        np.testing.assert_array_equal(np.asarray(actual)[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=lambda d: d.name)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
def test_the_result_is_exact_but_for_one_rounding(dtype, is_neox):
    """With few bits in the inputs the sums are exact in float32, so there is one right answer; rounding each product would show."""
    rng = np.random.default_rng(3)
    x = (rng.integers(-128, 128, (40, 2, 64)) / 64).astype(dtype)
    table = (rng.integers(-64, 65, (40, 64)) / 64).astype(dtype)
    positions = np.arange(40)
    expected = reference_rope(positions, x, table, is_neox=is_neox)
    for run in (pp.rotary_embedding, jax.jit(pp.rotary_embedding, static_argnames="is_neox")):
        actual, _ = run(positions, x, x[:, :1], table, is_neox=is_neox)
        np.testing.assert_array_equal(np.asarray(actual).view(np.uint16), expected.view(np.uint16))
    cos, sin = (np.tile(half, 2)[:, None] for half in np.split(table, 2, axis=-1))
    swapped = np.concatenate([-x[..., 32:], x[..., :32]], axis=-1)
    assert not is_neox or not np.array_equal((x * cos + swapped * sin), expected)  # each product rounded: what this guards against


def test_the_pairs_are_half_the_rotary_width_apart_not_half_the_head():
    table = np.array([[0, 0, 1, 1]], np.float32)  # a quarter turn: (a, b) becomes (-b, a)
    x = np.arange(1, 9, dtype=np.float32).reshape(1, 1, 8)
    neox, _ = pp.rotary_embedding(np.array([0]), x, x, table)
    gptj, _ = pp.rotary_embedding(np.array([0]), x, x, table, is_neox=False)
    assert np.asarray(neox).ravel().tolist() == [-3, -4, 1, 2, 5, 6, 7, 8]
    assert np.asarray(gptj).ravel().tolist() == [-2, 1, -4, 3, 5, 6, 7, 8]


def test_each_token_takes_the_row_of_its_position():
    table = np.concatenate([np.tile(np.arange(1, 65)[:, None], (1, 4)), np.zeros((64, 4))], axis=1).astype(np.float32)
    positions = np.array([63, 0, 17, 17, 2])
    query, key = pp.rotary_embedding(positions, np.ones((5, 2, 8), np.float32), np.ones((5, 1, 8), np.float32), table)
    np.testing.assert_array_equal(query[:, 1, 3], positions + 1)
    np.testing.assert_array_equal(key[:, 0, 7], positions + 1)


def test_the_last_row_may_be_read_and_nothing_after_it():
    table = table_of(9, 4)
    table = np.concatenate([table, np.full((1, 4), np.nan, np.float32)])
    x = heads_of(1, 2, 1, 8, F32)
    for is_neox in (True, False):
        out, _ = pp.rotary_embedding(np.array([8, 8]), x, x, table, is_neox=is_neox)
        assert_close(out, reference_rope([8, 8], x, table, is_neox=is_neox), dtype=F32)


@pytest.mark.parametrize("position", [10, 11, -1, -10, 2**31 - 1, 2**40, -(2**40)])
def test_a_host_position_without_a_row_raises(position):
    x = heads_of(1, 2, 1, 8, F32)
    with pytest.raises(ValueError, match=rf"positions is {position}: .*\[0, 10\)"):
        pp.rotary_embedding(np.array([0, position]), x, x, table_of(10, 8))


@pytest.mark.parametrize("position", [10, 11, -1, -10, 2**31 - 1, -(2**31)])
def test_a_device_position_without_a_row_turns_its_token_to_nan(position):
    """Not to the last row, which a clamped or wrapped index would read."""
    x, table = heads_of(1, 3, 2, 8, F32), table_of(10, 4)
    positions = jnp.array([3, position, 9], jnp.int32)
    for run in (pp.rotary_embedding, jax.jit(pp.rotary_embedding)):
        for out in run(positions, x, x[:, :1], table):
            assert np.isnan(out[1, :, :4]).all()
            np.testing.assert_array_equal(np.asarray(out)[1, :, 4:], x[1, : out.shape[1], 4:])
            expected = reference_rope([3, 9], x[[0, 2], : out.shape[1]], table)
            assert_close(np.asarray(out)[[0, 2]], expected, dtype=F32)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_every_integer_dtype_of_the_positions_rotates_alike(dtype):
    table = table_of(300, 8)  # more rows than 8 bits hold
    positions = np.array([0, 127, 3])
    x = heads_of(2, 3, 2, 8, BF16)
    expected, _ = pp.rotary_embedding(positions.astype(np.int32), x, x, table)
    actual, _ = pp.rotary_embedding(positions.astype(dtype), x, x, table)
    np.testing.assert_array_equal(actual, expected)


def test_query_and_key_keep_their_own_dtypes():
    query, key = pp.rotary_embedding(np.arange(3), heads_of(0, 3, 4, 16, BF16), heads_of(1, 3, 2, 16, F32), table_of(3, 16))
    assert query.dtype == BF16 and key.dtype == F32


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=lambda d: d.name)
def test_eager_jitted_and_batched_rotations_give_the_same_bits(dtype):
    table, positions = table_of(20, 16), np.array([[3, 4, 19], [0, 7, 7]])
    query, key = heads_of(0, 6, 4, 24, dtype).reshape(2, 3, 4, 24), heads_of(1, 6, 2, 24, dtype).reshape(2, 3, 2, 24)
    batched = jax.vmap(pp.rotary_embedding, in_axes=(0, 0, 0, None))(positions, query, key, table)
    for i in range(2):
        eager = pp.rotary_embedding(positions[i], query[i], key[i], table)
        jitted = jax.jit(pp.rotary_embedding)(positions[i], query[i], key[i], table)
        for a, b, c in zip(eager, jitted, batched, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c[i])


def test_no_tokens_give_no_tokens():
    query, key = pp.rotary_embedding(np.zeros(0, np.int32), np.zeros((0, 4, 8), BF16), np.zeros((0, 2, 8), BF16), table_of(3, 8))
    assert query.shape == (0, 4, 8) and key.shape == (0, 2, 8)


def test_eager_rotations_compile_once():
    from purepage.kernels.xla.rotary import rotary_embedding as implementation

    before = implementation._cache_size()
    for seed in range(3):
        x = heads_of(seed, 5, 3, 40, BF16)
        pp.rotary_embedding(np.arange(5) + seed, x, x, table_of(9, 20, seed=seed))
    assert implementation._cache_size() == before + 1


@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda d: d.name)
def test_round_to_rounds_every_code_midpoint_and_neighbour_as_a_conversion_does(dtype):
    """float16's subnormal numbers too, and what overflows."""
    codes = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    if dtype == BF16:
        codes = codes[np.abs(codes) > 1e-37]  # CPUs flush float32's own subnormal numbers
    middle = ((codes[1:].astype(np.float64) + codes[:-1]) / 2).astype(np.float32)
    values = np.concatenate([codes, middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))])
    values = np.concatenate([values, np.array([0.0, -0.0, 65519.0, 65520.0, 3.39e38, np.inf, -np.inf, np.nan], np.float32)])
    actual = np.asarray(jax.jit(lambda x: round_to(x, dtype))(values))
    with np.errstate(over="ignore"):
        expected = values.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(actual, expected)
    assert np.array_equal(np.signbit(actual), np.signbit(expected))


GOOD = {
    "positions": np.arange(3),
    "query": np.ones((3, 4, 16), np.float32),
    "key": np.ones((3, 2, 16), np.float32),
    "cos_sin_cache": table_of(5, 8),
}
BAD = {
    "positions of three rows": ({"positions": np.zeros((3, 3), np.int32)}, ValueError, r"positions is int32\[3,3\]: .*\[3\]"),
    "fewer positions than tokens": ({"positions": np.arange(2)}, ValueError, r"positions is int64\[2\]"),
    "positions as floats": ({"positions": np.arange(3.0)}, TypeError, "positions is float64"),
    "positions as booleans": ({"positions": np.ones(3, bool)}, TypeError, "positions is bool"),
    "positions as a list": ({"positions": [0, 1, 2]}, ValueError, r"positions is \[0, 1, 2\]"),
    "query without heads": ({"query": np.ones((3, 64), np.float32)}, ValueError, "query is float32"),
    "query of integers": ({"query": np.ones((3, 4, 16), np.int32)}, TypeError, "query is int32"),
    "key of another head size": ({"key": np.ones((3, 2, 32), np.float32)}, ValueError, "key is .* of head_size 16"),
    "key of other tokens": ({"key": np.ones((2, 2, 16), np.float32)}, ValueError, "key is .* of the query's 3 tokens"),
    "table of one dimension": ({"cos_sin_cache": np.ones(8, np.float32)}, ValueError, "cos_sin_cache is"),
    "table without rows": ({"cos_sin_cache": np.ones((0, 8), np.float32)}, ValueError, "cos_sin_cache is"),
    "table of odd width": ({"cos_sin_cache": np.ones((5, 7), np.float32)}, ValueError, "cos_sin_cache is .* even width"),
    "table wider than a head": ({"cos_sin_cache": np.ones((5, 18), np.float32)}, ValueError, "cos_sin_cache is .* head_size = 16"),
    "table of no width": ({"cos_sin_cache": np.ones((5, 0), np.float32)}, ValueError, "cos_sin_cache is .* even width"),
    "table of integers": ({"cos_sin_cache": np.ones((5, 8), np.int32)}, TypeError, "cos_sin_cache is int32"),
    "is_neox as a number": ({"is_neox": 1}, TypeError, "is_neox is 1"),
    "unknown implementation": ({"implementation": "hip"}, ValueError, "implementation is 'hip'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_raises_with_its_name_and_value(case):
    change, error, message = BAD[case]
    with pytest.raises(error, match=message):
        pp.rotary_embedding(**{**GOOD, **change})
