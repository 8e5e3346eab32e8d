"""Attention configs are values: equal ones are one key of jit, and what float32 does not hold is refused by name."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
SINKS = [0.5, -1.0, 2.0, -np.inf]


@pytest.mark.parametrize(
    "spelling",
    [list, tuple, np.float64, np.float32, jnp.asarray, lambda v: np.asarray(v, ml_dtypes.bfloat16)],
    ids=["list", "tuple", "float64", "float32", "jax", "bfloat16"],
)
def test_configs_with_the_same_values_are_equal_and_share_a_hash(spelling):
    reference = pp.AttentionConfig(**SHAPE, sinks=SINKS)
    other = pp.AttentionConfig(**SHAPE, sinks=spelling(SINKS) if spelling is not np.float64 else np.array(SINKS, np.float64))
    assert other == reference and hash(other) == hash(reference)


@pytest.mark.parametrize(
    "change", [{"sinks": [0.5, -1.0, 2.0, 0.0]}, {"sinks": None}, {"scale": 0.5}, {"sliding_window": 4}, {"attn_type": "ENCODER"}], ids=str
)
def test_configs_with_other_values_differ(change):
    if "attn_type" in change:
        change = {"attn_type": pp.AttentionType[change["attn_type"]]}
    assert pp.AttentionConfig(**{**SHAPE, "sinks": SINKS, **change}) != pp.AttentionConfig(**SHAPE, sinks=SINKS)


def test_spellings_of_what_is_off_are_one_config():
    off = pp.AttentionConfig(**SHAPE)
    for window, cap in ((0, 0), (-1, 0.0), (None, None), (2**40, 0)):
        assert pp.AttentionConfig(**SHAPE, sliding_window=window, logits_soft_cap=cap) == off


def test_a_config_keeps_its_values_when_the_callers_array_changes():
    sinks = np.zeros(4, np.float32)
    config = pp.AttentionConfig(**SHAPE, sinks=sinks)
    sinks[:] = 7.0
    assert np.all(config.sinks == 0)
    with pytest.raises(ValueError, match="read-only"):
        config.sinks[0] = 1.0


def test_equal_configs_share_a_trace():
    traces = []

    @partial(jax.jit, static_argnums=0)
    def step(config, x):
        traces.append(1)
        return x * config.softmax_scale

    for _ in range(4):
        step(pp.AttentionConfig(**SHAPE, sinks=SINKS, alibi_slopes=np.ones(4)), jnp.ones(2))
    assert len(traces) == 1


def test_a_traced_vector_equals_itself_only():
    @jax.jit
    def step(sinks):
        config, other = pp.AttentionConfig(**SHAPE, sinks=sinks), pp.AttentionConfig(**SHAPE, sinks=sinks + 1)
        assert config == pp.AttentionConfig(**SHAPE, sinks=sinks) and config != other
        return config.sinks

    np.testing.assert_array_equal(step(jnp.ones(4)), np.ones(4))


BAD = [
    ("num_heads", 7.5),
    ("num_heads", True),
    ("num_heads", 3),
    ("num_kv_heads", 0),
    ("head_size", "32"),
    ("scale", "0.5"),
    ("scale", 1j),
    ("scale", 1e39),
    ("scale", 1e-40),
    ("sliding_window", -2),
    ("sliding_window", 1.5),
    ("logits_soft_cap", "5"),
    ("logits_soft_cap", -1.0),
    ("logits_soft_cap", 1e39),
    ("attn_type", "decoding"),
    ("alibi_slopes", [[1], [1, 2]]),
    ("alibi_slopes", [np.nan] * 4),
    ("alibi_slopes", [1e39] * 4),
    ("sinks", [1j] * 4),
    ("sinks", ["a"] * 4),
    ("sinks", [np.inf] * 4),
    ("sinks", np.ones(3)),
    ("kv_cache_dtype", 8),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BAD)])
def test_a_bad_field_is_named(name, value):
    with pytest.raises((ValueError, TypeError), match=re.escape(name)):
        pp.AttentionConfig(**{**SHAPE, name: value})


def test_the_whole_models_vectors_are_divided_like_the_heads(run_with_devices):
    """On two axes, one of sequences and one of heads, and with `check_vma=False`. A vector that two axes fit is refused by name."""
    run_with_devices(
        4,
        """
        from jax.sharding import PartitionSpec as P
        batch = random_batch(7, num_heads=8, num_kv_heads=4)
        sinks, slopes = np.linspace(-1, 1, 8), np.linspace(0.1, 0.4, 8)
        expected = batch.reference(0, sinks=sinks, alibi_slopes=slopes)[0]
        cache = batch.cache()
        data = P(*("heads" if axis == "H" else None for axis in cache.spec.axes))
        shards = pp.KVCache(data, P(), P(), cache.spec)
        call = lambda q, c, m: pp.paged_attention(q, c, m, sinks=sinks, alibi_slopes=slopes, implementation="xla")
        one, two = ("heads",), ("data", "heads")
        for shape, names, checked in (((4,), one, True), ((1, 4), two, True), ((2, 2), two, True), ((4,), one, False)):
            mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
            step = jax.jit(
                jax.shard_map(call, mesh=mesh, in_specs=(P(None, "heads"), shards, P()), out_specs=P(None, "heads"), check_vma=checked)
            )
            assert_close(step(jnp.asarray(batch.query), cache, batch.metadata), expected, dtype=np.float32)
        mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        try:
            jax.shard_map(call, mesh=mesh, in_specs=(P(None, "heads"), shards, P()), out_specs=P(None, "heads"), check_vma=False)(
                jnp.asarray(batch.query), cache, batch.metadata
            )
        except ValueError as error:
            assert "alibi_slopes" in str(error) and "data" in str(error)
        else:
            raise AssertionError("two axes fit")
        """,
    )
