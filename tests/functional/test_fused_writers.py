"""The fused writers: equal to their parts bit for bit, and their parts equal to the float64 oracle."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.testing import assert_close, mrope_rows, reference_qk_norm_rope, reference_rope

F32, F16, BF16 = np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
E4M3, E4M3Z, E5M2, E5M2Z = (np.dtype(getattr(ml_dtypes, f"float8_{kind}")) for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))


def same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bits = f"u{actual.dtype.itemsize}"
    np.testing.assert_array_equal(actual.view(bits), expected.view(bits))


def table_of(max_pos, rotary_dim, dtype=F32):
    angles = np.random.default_rng(9).uniform(-3, 3, (max_pos, rotary_dim // 2))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(dtype)


def normal(seed, *shape, dtype=F32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def weights(head_size, dtype=F32):
    return tuple((1 + 0.3 * normal(seed, head_size)).astype(dtype) for seed in (100, 101))


def nan_cache(dtype, heads, head_size, *, block_size=16, num_blocks=5, num_layers=2, content="packed", order="LBHNC"):
    """Every slot NaN; scales of an fp8 cache differ by side, layer and head."""
    spec = pp.CacheSpec(
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        num_layers=num_layers,
        dtype=dtype,
        content=content,
        order=order,
    )
    scales = 0.05 * (1 + np.arange(2.0 * num_layers * heads)).reshape(2, num_layers, heads) if spec.is_quantized else (1.0, 1.0)
    empty = pp.init_cache(spec, k_scale=scales[0], v_scale=scales[1])
    bits = np.full(spec.shape, np.nan, spec.dtype).view(spec.storage_dtype)
    return pp.KVCache(jnp.asarray(bits), empty.k_scale, empty.v_scale, spec)


ROPE = [
    # model, cache, content, order, query heads, KV heads, head size, rotary dim, block size, neox
    (BF16, BF16, "packed", "LBHNC", 8, 8, 64, 64, 16, True),
    (BF16, E4M3, "packed", "LHBNC", 4, 2, 64, 64, 16, False),
    (BF16, BF16, "xpacked", "LHBNC", 4, 1, 128, 32, 48, True),
    (F16, F16, "xpacked", "LBHNC", 2, 2, 80, 80, 16, False),
    (BF16, E4M3Z, "xpacked_interleaved_v", "LHBNC", 6, 2, 64, 16, 32, True),
    (F32, E5M2, "shuffled", "LBHNC", 3, 3, 96, 96, 544, False),
    (F32, BF16, "flash", "LBHNC", 4, 2, 64, 64, 16, True),
    (F16, E5M2Z, "flash", "LHBNC", 4, 4, 32, 8, 16, False),
    (F32, F32, "shuffled", "LHBNC", 2, 1, 256, 256, 16, True),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", ROPE, ids=["-".join(str(getattr(v, "name", v)) for v in row) for row in ROPE])
def test_rope_and_write_is_rope_then_write(row):
    model, dtype, content, order, query_heads, heads, head_size, rotary_dim, block_size, is_neox = row
    cache = nan_cache(dtype, heads, head_size, block_size=block_size, content=content, order=order)
    table = table_of(30, rotary_dim, model)
    query, key, value = normal(0, 7, query_heads, head_size), normal(1, 7, heads, head_size), normal(2, 7, heads, head_size)
    query, key, value = (x.astype(model) for x in (query, key, value))
    positions, slots = np.array([0, 29, 3, 3, 11, 5, 6]), np.array([17, -1, 4, 5 * block_size, 5 * block_size - 1])  # none for the last two
    before = np.array(cache.data)
    expected_q, expected_k = pp.rotary_embedding(positions, query, key, table, is_neox=is_neox, implementation="xla")
    expected = pp.update_cache(cache, expected_k, value, slots, layer=1, implementation="xla")
    jitted = jax.jit(pp.rope_and_update_cache, static_argnames=("is_neox", "implementation"))
    for run in (pp.rope_and_update_cache, jitted) if row in ROPE[::4] else (pp.rope_and_update_cache,):
        q, k, out = run(query, key, value, positions, table, cache, slots, is_neox=is_neox, layer=1, implementation="xla")
        same_bits(q, expected_q)
        same_bits(k, expected_k)
        same_bits(out.data, expected.data)
    same_bits(cache.data, before)
    assert_close(k, reference_rope(positions, key, table, is_neox=is_neox), dtype=model)


@pytest.mark.parametrize("name", ["rope", "qk_norm", "qk_norm_mrope"])
def test_tokens_without_a_slot_are_rotated_all_the_same(name):
    cache, table = nan_cache(F32, 2, 32), table_of(9, 32)
    positions, slots = np.array([4, 8, 2]), np.array([-1, 3])
    query, key, value = normal(0, 3, 4, 32), normal(1, 3, 2, 32), normal(2, 3, 2, 32)
    if name == "rope":
        q, k, out = pp.rope_and_update_cache(query, key, value, positions, table, cache, slots)
        wanted = tuple(reference_rope(positions, x, table) for x in (query, key))
    else:
        qkv = np.concatenate([x.reshape(3, -1) for x in (query, key, value)], axis=-1)
        w, mrope = weights(32), {} if name == "qk_norm" else {"mrope_section": (6, 5, 5)}
        call = pp.qk_norm_mrope_and_update_cache if mrope else pp.qk_norm_rope_and_update_cache
        q, k, v, out = call(qkv, *w, positions, table, cache, slots, num_heads=4, **mrope)
        wanted = reference_qk_norm_rope(qkv, *w, positions, table, num_heads=4)[:2]
        same_bits(v, value)
    assert_close(q, wanted[0], dtype=F32)
    assert_close(k, wanted[1], dtype=F32)
    key_cache, value_cache = pp.cache_to_logical(out)
    same_bits(key_cache[0, 3], k[1])
    same_bits(value_cache[0, 3], value[1])
    touched = np.ones((5, 16), bool)
    touched[0, 3] = False
    assert np.isnan(np.asarray(key_cache)[touched]).all() and np.isnan(np.asarray(value_cache)[touched]).all()


NORM = [
    # model, weights, cache, content, order, query heads, KV heads, head size, rotary dim, block size, neox, mrope section, interleaved
    (BF16, BF16, BF16, "packed", "LBHNC", 64, 8, 64, 64, 16, True, None, False),
    (BF16, F32, E4M3, "packed", "LHBNC", 16, 8, 64, 64, 32, False, None, False),
    (F16, F16, F16, "xpacked_interleaved_v", "LHBNC", 32, 8, 128, 64, 64, True, None, False),
    (BF16, BF16, E4M3Z, "shuffled", "LBHNC", 32, 2, 128, 64, 16, False, None, False),
    (F32, F32, F32, "flash", "LBHNC", 16, 2, 64, 32, 48, True, None, False),
    (F16, F32, E5M2, "xpacked", "LHBNC", 4, 1, 256, 256, 16, False, None, False),
    (BF16, BF16, BF16, "packed", "LBHNC", 8, 2, 128, 128, 16, True, (16, 24, 24), False),
    (BF16, BF16, E4M3, "packed", "LHBNC", 8, 2, 128, 128, 16, False, (16, 24, 24), True),
    (F32, F32, F32, "flash", "LHBNC", 8, 2, 128, 32, 16, True, (4, 6, 6), True),
    (F16, F16, F16, "packed", "LBHNC", 8, 2, 128, 32, 16, False, (4, 6, 6), False),
    (F32, BF16, BF16, "flash", "LBHNC", 32, 1, 64, 64, 16, True, (12, 10, 10), True),
    (F32, F32, E5M2Z, "xpacked", "LBHNC", 2, 1, 256, 64, 16, True, (8, 12, 12), True),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", NORM, ids=["-".join(str(getattr(v, "name", v)).replace(" ", "") for v in row) for row in NORM])
def test_norm_rope_and_write_is_the_oracle_then_a_write(row):
    model, weight_dtype, dtype, content, order, query_heads, heads, head_size, rotary_dim, block_size, is_neox, section, interleaved = row
    cache = nan_cache(dtype, heads, head_size, block_size=block_size, content=content, order=order)
    table, w = table_of(40, rotary_dim), weights(head_size, weight_dtype)
    qkv = normal(5, 5, (query_heads + 2 * heads) * head_size, dtype=model)
    slots = np.array([33, -1, 0, 5 * block_size, 7])
    positions = np.random.default_rng(6).integers(0, 40, 5 if section is None else (3, 5))
    mrope = {} if section is None else {"mrope_section": section, "is_interleaved": interleaved}
    call = pp.qk_norm_rope_and_update_cache if section is None else pp.qk_norm_mrope_and_update_cache

    def run(qkv, cache):
        return call(qkv, *w, positions, table, cache, slots, num_heads=query_heads, is_neox=is_neox, layer=1, implementation="xla", **mrope)

    eager = run(qkv, cache)
    if row in NORM[::4]:
        jax.tree.map(same_bits, jax.jit(run)(qkv, cache), eager)
    expected = reference_qk_norm_rope(qkv, *w, positions, table, num_heads=query_heads, is_neox=is_neox, **mrope)
    for actual, wanted, what in zip(eager, expected, ("query", "key", "value"), strict=False):
        assert_close(actual, wanted, dtype=model, what=what)
    same_bits(eager[2], expected[2])
    same_bits(eager[3].data, pp.update_cache(cache, eager[1], eager[2], slots, layer=1, implementation="xla").data)


@pytest.mark.parametrize(
    ("section", "interleaved"), [((4, 1, 1), True), ((2, 2, 2), True), ((2, 2, 2), False), ((1, 2, 3), False), ((6, 0, 0), True)]
)
def test_each_frequency_takes_the_row_of_its_section(section, interleaved):
    """cos = position + 1 and sin = 0 make a head of ones say which row each channel took; interleaving stops at three times a section."""
    table = np.concatenate([np.tile(np.arange(1.0, 33)[:, None], (1, 6)), np.zeros((32, 6))], axis=1).astype(np.float32)
    padded = np.zeros((3, 64), np.int32)
    padded[:, 0], padded[:, 1] = (0, 1, 2), (30, 20, 10)
    qkv = np.ones((2, 3 * 12), np.float32)
    cache, ones = nan_cache(F32, 1, 12), np.ones(12, np.float32)
    for positions in (padded[:, :2], jnp.asarray(padded)[:, :2]):  # rows as far apart as their buffer's, not as many tokens as there are
        q, *_ = pp.qk_norm_mrope_and_update_cache(
            qkv,
            ones,
            ones,
            positions,
            table,
            cache,
            np.arange(2),
            num_heads=1,
            mrope_section=section,
            is_interleaved=interleaved,
            eps=1e-12,
        )
        rows = mrope_rows(section, is_interleaved=interleaved)
        np.testing.assert_allclose(q[0, 0, :6], np.array([1, 2, 3])[rows], rtol=1e-6)
        np.testing.assert_allclose(q[1, 0, 6:], np.array([31, 21, 11])[rows], rtol=1e-6)


def test_interleaved_rows_stop_at_three_times_their_section():
    assert mrope_rows((4, 1, 1), is_interleaved=True) == [0, 1, 2, 0, 0, 0]


def test_one_row_of_positions_stands_for_three_equal_ones():
    qkv, w, table, cache = normal(1, 4, 8 * 32), weights(32), table_of(20, 32), nan_cache(F32, 2, 32)
    positions = np.array([3, 19, 0, 7])
    mrope = {"num_heads": 4, "mrope_section": (6, 5, 5)}
    one = pp.qk_norm_mrope_and_update_cache(qkv, *w, positions, table, cache, np.arange(4), **mrope)
    three = pp.qk_norm_mrope_and_update_cache(qkv, *w, np.stack([positions] * 3), table, cache, np.arange(4), **mrope)
    plain = pp.qk_norm_rope_and_update_cache(qkv, *w, positions, table, cache, np.arange(4), num_heads=4)
    jax.tree.map(same_bits, one, three)
    jax.tree.map(same_bits, one, plain)


def norm_alone(x, weight, eps=1e-6):
    """The norm of one head of each row: RoPE by a zero angle."""
    table = np.array([[1, 0]], np.float32)
    cache = nan_cache(x.dtype, 1, x.shape[-1])
    qkv = np.concatenate([x, x, x], axis=-1)
    positions = np.zeros(len(x), np.int32)
    query, *_ = pp.qk_norm_rope_and_update_cache(qkv, weight, weight, positions, table, cache, np.arange(len(x)), num_heads=1, eps=eps)
    return np.asarray(query)[:, 0]


def test_the_norm_is_rounded_once_after_the_weight():
    """Rounding x * r first, as an unfused norm does, gives another code for a quarter of the elements."""
    x = np.linspace(-2, 2, 128).astype(BF16)[None]
    weight = (1 + np.linspace(-0.3, 0.3, 128)).astype(BF16)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt(np.mean(exact**2) + 1e-6)
    once = (exact * weight.astype(np.float64)).astype(BF16)
    twice = (exact.astype(BF16).astype(np.float64) * weight.astype(np.float64)).astype(BF16)
    assert np.sum(once != twice) > 20
    same_bits(norm_alone(x, weight), once)


def test_float32_weights_are_used_in_float32_with_a_bfloat16_model():
    x, weight = normal(3, 4, 64, dtype=BF16), weights(64)[0]
    exact = x.astype(np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-6)
    cast = (exact * weight.astype(BF16).astype(np.float64)).astype(BF16)
    assert np.sum(cast != (exact * weight).astype(BF16)) > 10
    same_bits(norm_alone(x, weight), (exact * weight).astype(BF16))


@pytest.mark.parametrize(("eps", "expected"), [(1e-5, 0.301511), (1e-6, 0.707107)])
def test_eps_is_added_to_the_mean_square_inside_the_root(eps, expected):
    np.testing.assert_allclose(norm_alone(np.full((1, 8), 1e-3, np.float32), np.ones(8, np.float32), eps), expected, rtol=1e-5)


def test_the_norm_is_over_one_head_whole_and_before_rope():
    """Heads of very different sizes come out alike; with rotary width 4 of 8 the other half counts too."""
    query = np.ones((1, 2, 8), np.float32) * np.array([1.0, 1000.0])[:, None]
    query[..., 4:] *= 2
    qkv = np.concatenate([query.reshape(1, -1), np.ones((1, 16), np.float32)], axis=-1).astype(np.float32)
    ones = np.ones(8, np.float32)
    table = np.array([[0, 0, 1, 1]], np.float32)
    out, *_ = pp.qk_norm_rope_and_update_cache(qkv, ones, ones, np.array([0]), table, nan_cache(F32, 1, 8), np.array([0]), num_heads=2)
    unit = 1 / np.sqrt(2.5)
    np.testing.assert_allclose(out[0], np.tile([-unit, -unit, unit, unit, 2 * unit, 2 * unit, 2 * unit, 2 * unit], (2, 1)), rtol=1e-5)


def test_an_fp8_cache_stores_the_key_rounded_to_the_models_dtype_first():
    """1.0627 is 1.125 in e4m3, but 1.0 by way of bfloat16; the write takes the key that comes back."""
    table = np.array([[1.0627, 0]], np.float32)
    key = np.ones((1, 1, 16), BF16)
    cache = pp.init_cache(pp.CacheSpec(num_blocks=1, block_size=16, num_kv_heads=1, head_size=16, dtype=E4M3))
    for run in (pp.rope_and_update_cache, jax.jit(pp.rope_and_update_cache)):
        _, k, out = run(key, key, key, np.array([0]), table, cache, np.array([0]))
        assert k.dtype == BF16 and float(k[0, 0, 0]) == 1.0625
        assert float(pp.cache_to_logical(out)[0][0, 0, 0, 0]) == 1.0


def test_a_device_position_without_a_row_writes_nan_and_nothing_else_changes():
    qkv, w, table = normal(1, 3, 8 * 32), weights(32), table_of(20, 32)
    cache = pp.init_cache(pp.CacheSpec(num_blocks=2, block_size=16, num_kv_heads=2, head_size=32, dtype=E4M3))
    _, key, _, out = pp.qk_norm_rope_and_update_cache(qkv, *w, jnp.array([1, -1, 20]), table, cache, np.arange(3), num_heads=4)
    stored = np.asarray(pp.cache_to_logical(out)[0]).astype(np.float32)
    assert np.isnan(np.asarray(key)[1:]).all() and np.isnan(stored[0, 1:3]).all()
    assert np.isfinite(np.asarray(key)[0]).all() and np.isfinite(stored[0, 0]).all() and not stored[0, 3:].any() and not stored[1].any()


@pytest.mark.parametrize("content", ["packed", "xpacked", "shuffled"])
def test_a_scan_of_fused_writes_updates_one_donated_cache_in_place(content):
    cache = nan_cache(BF16, 1, 64, num_blocks=120, num_layers=4, content=content)
    qkv, w, table = normal(1, 4, 3, 4 * 64, dtype=BF16), weights(64), table_of(20, 64)
    positions, slots = jnp.array([1, 2, 19]), jnp.array([100, -1, 1919])

    def step(cache, qkv):
        def layer(cache, new):
            index, qkv = new
            *rest, cache = pp.qk_norm_rope_and_update_cache(qkv, *w, positions, table, cache, slots, num_heads=2, layer=index)
            return cache, rest[0]

        return jax.lax.scan(layer, cache, (jnp.arange(4), qkv))

    expected = cache
    for index in range(4):
        *_, expected = pp.qk_norm_rope_and_update_cache(qkv[index], *w, positions, table, expected, slots, num_heads=2, layer=index)
    compiled = jax.jit(step, donate_argnums=0).lower(cache, qkv).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.spec.nbytes and memory.temp_size_in_bytes < cache.spec.nbytes / 8
    same_bits(compiled(cache, qkv)[0].data, expected.data)


def test_eager_fused_writes_compile_once():
    from purepage.kernels.xla import fused as implementation

    cache, w, table = nan_cache(E4M3, 2, 48), weights(48), table_of(9, 24)
    counts = []
    for seed in range(3):
        qkv, slots, positions = normal(seed, 5, 8 * 48, dtype=BF16), np.arange(5) + seed, np.arange(5) + seed
        pp.qk_norm_rope_and_update_cache(qkv, *w, positions, table, cache, slots, num_heads=4, layer=seed % 2)
        q = qkv[:, : 4 * 48].reshape(5, 4, 48)
        pp.rope_and_update_cache(q, q[:, :2], q[:, 2:], positions, table, cache, slots, layer=seed % 2)
        counts.append((implementation.qk_norm_rope_and_update_cache._cache_size(), implementation.rope_and_update_cache._cache_size()))
    assert counts[0] == counts[2]


def test_no_tokens_write_nothing():
    cache, w, table = nan_cache(BF16, 2, 32), weights(32), table_of(9, 32)
    none = np.zeros(0, np.int32)
    *outs, out = pp.qk_norm_rope_and_update_cache(np.zeros((0, 8 * 32), BF16), *w, none, table, cache, none, num_heads=4)
    assert [x.shape for x in outs] == [(0, 4, 32), (0, 2, 32), (0, 2, 32)]
    same_bits(out.data, cache.data)
    empty = np.zeros((0, 2, 32), BF16)
    *_, out = pp.rope_and_update_cache(empty, empty, empty, none, table, cache, none)
    same_bits(out.data, cache.data)


ROPE_GOOD = {
    "query": np.ones((3, 4, 32), np.float32),
    "key": np.ones((3, 2, 32), np.float32),
    "value": np.ones((3, 2, 32), np.float32),
    "positions": np.arange(3),
    "cos_sin_cache": table_of(9, 32),
    "cache": nan_cache(F32, 2, 32),
    "slot_mapping": np.arange(3),
}
NORM_GOOD = {
    "qkv": np.ones((3, 8 * 32), np.float32),
    "q_weight": np.ones(32, np.float32),
    "k_weight": np.ones(32, np.float32),
    **{name: ROPE_GOOD[name] for name in ("positions", "cos_sin_cache", "cache", "slot_mapping")},
    "num_heads": 4,
}
MROPE_GOOD = {**NORM_GOOD, "positions": np.zeros((3, 3), np.int32), "mrope_section": (6, 5, 5)}
BAD = {
    "query heads that KV heads do not divide": (ROPE_GOOD, {"query": np.ones((3, 3, 32), np.float32)}, ValueError, "query heads is 3"),
    "query of another head size": (ROPE_GOOD, {"query": np.ones((3, 4, 64), np.float32)}, ValueError, "query is .* of head_size 32"),
    "key of other tokens": (
        ROPE_GOOD,
        {"key": np.ones((2, 2, 32), np.float32), "value": np.ones((2, 2, 32), np.float32)},
        ValueError,
        "key is",
    ),
    "value of other heads": (ROPE_GOOD, {"value": np.ones((3, 1, 32), np.float32)}, ValueError, "value is .* of 2 heads"),
    "three rows of positions to rope": (ROPE_GOOD, {"positions": np.zeros((3, 3), np.int32)}, ValueError, "positions is"),
    "a position past the table": (ROPE_GOOD, {"positions": np.array([0, 9, 1])}, ValueError, "positions is 9"),
    "a table too wide": (ROPE_GOOD, {"cos_sin_cache": table_of(9, 34)}, ValueError, "cos_sin_cache is"),
    "more slots than tokens": (ROPE_GOOD, {"slot_mapping": np.arange(4)}, ValueError, "slot_mapping is"),
    "a cache that is none": (ROPE_GOOD, {"cache": None}, TypeError, "cache is None"),
    "a layer too many": (ROPE_GOOD, {"layer": 2}, ValueError, "layer is 2"),
    "qkv of another width": (NORM_GOOD, {"qkv": np.ones((3, 7 * 32), np.float32)}, ValueError, r"qkv is float32\[3,224\]: .* = 256"),
    "qkv in three dimensions": (NORM_GOOD, {"qkv": np.ones((3, 8, 32), np.float32)}, ValueError, "qkv is"),
    "qkv in fp8": (NORM_GOOD, {"qkv": np.ones((3, 8 * 32), E4M3)}, TypeError, "qkv is float8_e4m3fn"),
    "heads that KV heads do not divide": (NORM_GOOD, {"num_heads": 3}, ValueError, "num_heads is 3"),
    "no heads": (NORM_GOOD, {"num_heads": 0}, ValueError, "num_heads is 0"),
    "heads as a float": (NORM_GOOD, {"num_heads": 4.0}, TypeError, r"num_heads is 4\.0"),
    "a weight of all heads": (NORM_GOOD, {"q_weight": np.ones(128, np.float32)}, ValueError, r"q_weight is float32\[128\]"),
    "an integer weight": (NORM_GOOD, {"k_weight": np.ones(32, np.int32)}, TypeError, "k_weight is int32"),
    "eps of 0": (NORM_GOOD, {"eps": 0.0}, ValueError, r"eps is 0\.0"),
    "eps below 0": (NORM_GOOD, {"eps": -1e-6}, ValueError, "eps is -1e-06"),
    "eps that is no number": (NORM_GOOD, {"eps": np.nan}, ValueError, "eps is nan"),
    "eps as text": (NORM_GOOD, {"eps": "small"}, TypeError, "eps is 'small'"),
    "three rows of positions to plain rope": (NORM_GOOD, {"positions": np.zeros((3, 3), np.int32)}, ValueError, "positions is"),
    "two rows of positions": (MROPE_GOOD, {"positions": np.zeros((2, 3), np.int32)}, ValueError, r"positions is int32\[2,3\]: .*\[3, 3\]"),
    "a section of another sum": (MROPE_GOOD, {"mrope_section": (6, 5, 4)}, ValueError, r"mrope_section is \(6, 5, 4\): .* = 16"),
    "a section of two": (MROPE_GOOD, {"mrope_section": (8, 8)}, ValueError, r"mrope_section is \(8, 8\)"),
    "a section below 0": (MROPE_GOOD, {"mrope_section": (18, -1, -1)}, ValueError, "mrope_section is"),
    "a section of floats": (MROPE_GOOD, {"mrope_section": (6.0, 5, 5)}, ValueError, "mrope_section is"),
    "is_interleaved as a number": (MROPE_GOOD, {"is_interleaved": 1}, TypeError, "is_interleaved is 1"),
    "is_neox as None": (MROPE_GOOD, {"is_neox": None}, TypeError, "is_neox is None"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_raises_with_its_name_and_value(case):
    good, change, error, message = BAD[case]
    call = {id(ROPE_GOOD): pp.rope_and_update_cache, id(NORM_GOOD): pp.qk_norm_rope_and_update_cache}.get(
        id(good), pp.qk_norm_mrope_and_update_cache
    )
    with pytest.raises(error, match=message):
        call(**{**good, **change})


def test_a_traced_eps_raises_instead_of_leaking_a_tracer():
    with pytest.raises(TypeError, match=r"eps is .* static float"):
        jax.jit(lambda eps: pp.qk_norm_rope_and_update_cache(**NORM_GOOD, eps=eps))(1e-6)
