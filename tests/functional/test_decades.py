"""Every scale, cap, sink, slope and eps over at least twelve decades of its argument, against float64: the relative error is stated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purepage as pp
from purepage.testing import random_batch, reference_qk_norm_rope

IMPLEMENTATIONS = ["xla", pytest.param("triton", marks=pytest.mark.slow)]
DECADES = tuple(range(-8, 7))
RELATIVE = 4e-6
"""Allowed relative error of a log-sum-exp, and of an output for each unit of its largest score."""


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def batch():
    return random_batch(3, kind="chunked", num_seqs=2, max_query_len=3, max_seq_len=12, num_heads=2, num_kv_heads=1)


def attention(implementation, name, **static):
    """One trace of attention whose argument `name` is data."""
    made = batch()
    cache = made.cache()

    @jax.jit
    def attend(value):
        return pp.paged_attention(
            made.query, cache, made.metadata, return_lse=True, implementation=implementation, **{name: value}, **static
        )

    return made, attend


def assert_right(found, expected, what):
    (out, lse), (want, want_lse) = ([np.asarray(x, np.float64) for x in pair] for pair in (found, expected))
    assert not np.isnan(out).any() and not np.isnan(lse).any(), what
    live = np.isfinite(want_lse)
    np.testing.assert_array_equal(lse[~live], want_lse[~live], err_msg=what)
    size = np.where(live, np.abs(want_lse), 0.0)
    assert np.all(np.abs(lse - want_lse)[live] <= RELATIVE * (1 + size[live])), what
    bound = RELATIVE * (4 + size[..., None]) * np.max(np.abs(want), axis=-1, keepdims=True) + 1e-37
    assert np.all(np.abs(out - want) <= bound), what


@pytest.mark.parametrize("sign", [1, -1])
def test_a_scale_of_the_scores(implementation, sign):
    made, attend = attention(implementation, "scale")
    for decade in DECADES:
        scale = np.float32(sign * 10.0**decade)
        assert_right(attend(scale), made.reference(scale=float(scale)), f"scale {scale}")


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sink(implementation, sign):
    made, attend = attention(implementation, "sinks")
    for decade in DECADES:
        sinks = np.array([sign * 10.0**decade, 0.5], np.float32)
        assert_right(attend(sinks), made.reference(sinks=sinks), f"sinks {sinks}")


@pytest.mark.parametrize("sign", [1, -1])
def test_a_slope(implementation, sign):
    made, attend = attention(implementation, "alibi_slopes")
    for decade in DECADES:
        slopes = np.array([sign * 10.0**decade, 0.5], np.float32)
        assert_right(attend(slopes), made.reference(alibi_slopes=slopes), f"slopes {slopes}")


@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize(("name", "sign"), [("scale", -1), ("sinks", 1), ("alibi_slopes", 1)])
def test_the_ends_of_the_decades_through_kernels(implementation, name, sign):
    """The whole runs with the slow tests."""
    made, attend = attention(implementation, name)
    for decade in (DECADES[0], DECADES[-1]):
        value = np.float32(sign * 10.0**decade) if name == "scale" else np.array([sign * 10.0**decade, 0.5], np.float32)
        assert_right(attend(value), made.reference(**{name: float(value) if name == "scale" else value}), f"{name} {value}")


@pytest.mark.parametrize(
    "decade", [decade if decade in (-3, 1, 8) else pytest.param(decade, marks=pytest.mark.slow) for decade in range(-6, 10)]
)
def test_a_soft_cap_over_scores_of_every_size(implementation, decade):
    cap = float(np.float32(10.0**decade))
    made, attend = attention(implementation, "scale", logits_soft_cap=cap)
    for size in DECADES:
        scale = np.float32(10.0**size)
        assert_right(attend(scale), made.reference(scale=float(scale), logits_soft_cap=cap), f"cap {cap}, scale {scale}")


@pytest.mark.parametrize(
    "decade", [decade if decade in (-6, 0) else pytest.param(decade, marks=pytest.mark.slow) for decade in range(-30, 7, 3)]
)
def test_an_eps_beside_rows_of_every_size(implementation, decade):
    eps, sizes = float(np.float32(10.0**decade)), 10.0 ** np.arange(-16.0, 9.0, 2.0)
    rng = np.random.default_rng(0)
    qkv = (rng.standard_normal((len(sizes) + 1, 3 * 64)) * np.append(sizes, 0.0)[:, None]).astype(np.float32)
    weights = [rng.uniform(0.5, 1.5, 64).astype(np.float32) for _ in range(2)]
    table = np.concatenate([np.ones((4, 32)), np.zeros((4, 32))], axis=1).astype(np.float32)  # no rotation
    cache = pp.init_cache(pp.CacheSpec(num_blocks=2, block_size=16, num_kv_heads=1, head_size=64, dtype=jnp.float32))
    arrays = (qkv, *weights, np.zeros(len(qkv), np.int32), table)
    write = jax.jit(lambda *given: pp.qk_norm_rope_and_update_cache(*given, num_heads=1, eps=eps, implementation=implementation))
    query, key, *_ = write(*arrays, cache, np.arange(len(qkv), dtype=np.int32))
    exact = [np.asarray(array, np.float64) for array in arrays[:3]]
    expected = reference_qk_norm_rope(*exact, arrays[3], table, num_heads=1, eps=eps)
    for found, wanted in zip((query, key), expected, strict=False):
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=RELATIVE, atol=1e-37)
