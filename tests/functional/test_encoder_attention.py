"""`encoder_attention` in plain JAX against the oracle, and its faults elsewhere."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.testing import assert_close, reference_encoder_attention

LENGTHS = [2, 3, 0, 40, 17]


def packed(dtype=np.float32, heads=4, kv_heads=2, head_size=32, padding=5, seed=0):
    rng = np.random.default_rng(seed)
    tokens = sum(LENGTHS) + padding
    query, key, value = (rng.standard_normal((tokens, h, head_size)).astype(dtype) for h in (heads, kv_heads, kv_heads))
    for array in (query, key, value):
        array[sum(LENGTHS) :] = np.nan
    metadata = pp.make_metadata(LENGTHS, LENGTHS, np.zeros((5, 0), np.int64), block_size=16, num_tokens=tokens, causal=False)
    return query, key, value, metadata


def run(query, key, value, metadata, **options):
    return pp.encoder_attention(*map(jnp.asarray, (query, key, value)), metadata, implementation="xla", **options)


FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"sliding_window": 5},
    "window of one": {"sliding_window": 1},
    "causal window": {"causal": True, "sliding_window": 4},
    "soft cap and sinks": {"logits_soft_cap": 2.0, "sinks": np.array([0.5, -1.0, 3.0, -np.inf], np.float32)},
    "scale": {"scale": 1 / 32},
    "ALiBi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.01], np.float32)},
    "causal ALiBi in a window with sinks": {
        "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.01], np.float32),
        "sinks": np.array([0.5, -1.0, 3.0, -np.inf], np.float32),
        "causal": True,
        "sliding_window": 6,
    },
}


DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
ROWS = [(name, DTYPES[i % 3]) for i, name in enumerate(FEATURES)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "dtype"), ROWS, ids=[f"{name}-{np.dtype(dtype).name}" for name, dtype in ROWS])
def test_every_feature_and_every_dtype(name, dtype):
    query, key, value, metadata = packed(dtype)
    out, lse = run(query, key, value, metadata, return_lse=True, **FEATURES[name])
    expected, expected_lse = reference_encoder_attention(query, key, value, metadata.query_start_loc, **FEATURES[name])
    assert_close(out, expected, dtype=dtype)
    assert_close(lse, expected_lse, dtype="lse")
    assert np.all(np.asarray(out[sum(LENGTHS) :], np.float32) == 0) and np.all(np.isneginf(lse[sum(LENGTHS) :]))


@pytest.mark.parametrize("implementation", ["triton"])
def test_kernels_give_the_lse_of_an_alibi_encoder(implementation):
    query, key, value, metadata = packed()
    options = FEATURES["causal ALiBi in a window with sinks"]
    out, lse = pp.encoder_attention(
        *map(jnp.asarray, (query, key, value)), metadata, implementation=implementation, return_lse=True, **options
    )
    expected, expected_lse = reference_encoder_attention(query, key, value, metadata.query_start_loc, **options)
    assert_close(out, expected, dtype=np.float32)
    assert_close(lse, expected_lse, dtype="lse")


@pytest.mark.parametrize("window", [0, -1, 2**31, 2**40])
def test_a_window_that_is_off_is_no_window(window):
    query, key, value, metadata = packed()
    np.testing.assert_array_equal(run(query, key, value, metadata, sliding_window=window), run(query, key, value, metadata))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(7, 1, 80), (10, 2, 96), (3, 3, 256), (71, 1, 32)])
def test_any_ratio_and_head_size(heads, kv_heads, head_size):
    query, key, value, metadata = packed(heads=heads, kv_heads=kv_heads, head_size=head_size)
    expected, _ = reference_encoder_attention(query, key, value, metadata.query_start_loc)
    assert_close(run(query, key, value, metadata), expected, dtype=np.float32)


def test_windows_are_symmetric_and_never_ignored():
    """sglang#33603: L=10, W=3 is |i - j| <= 2; rows 0 and 9 tell it from full and from causal attention."""
    value = np.broadcast_to(np.arange(10.0, dtype=np.float32)[:, None, None], (10, 1, 32))
    metadata = pp.make_metadata([10], [10], np.zeros((1, 0), np.int64), block_size=16, causal=False)
    out = run(np.zeros((10, 1, 32), np.float32), value, value, metadata, sliding_window=3)
    np.testing.assert_allclose(np.asarray(out)[[0, 5, 9], 0, 0], [1.0, 5.0, 8.0], rtol=1e-6)


def test_sequences_longer_than_a_chunk():
    rng = np.random.default_rng(1)
    query, key, value = (rng.standard_normal((1100, h, 32)).astype(np.float32) for h in (2, 1, 1))
    metadata = pp.make_metadata([1100], [1100], np.zeros((1, 0), np.int64), block_size=16, causal=False)
    expected, _ = reference_encoder_attention(query, key, value, metadata.query_start_loc, sliding_window=300)
    out = run(query, key, value, metadata, sliding_window=300)
    assert_close(out, expected, dtype=np.float32)


def test_jit_equals_eager():
    query, key, value, metadata = packed()
    jitted = jax.jit(lambda *arrays: run(*arrays))(*map(jnp.asarray, (query, key, value)), metadata)
    np.testing.assert_array_equal(np.asarray(jitted), np.asarray(run(query, key, value, metadata)))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda q, k, v, m: (q, k[:5], v, m), ValueError, "value|key"),
        (lambda q, k, v, m: (q, k.astype(np.float16), v, m), TypeError, "key"),
        (lambda q, k, v, m: (q, k, v[:, :1], m), ValueError, "value"),
        (lambda q, k, v, m: (q[:, :3], k, v, m), ValueError, "multiple"),
        (lambda q, k, v, m: (q, k, v, None), TypeError, "metadata"),
        (lambda q, k, v, m: (q.astype(ml_dtypes.float8_e4m3fn), k, v, m), TypeError, "query"),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    with pytest.raises(error, match=words):
        run(*change(*packed()))
