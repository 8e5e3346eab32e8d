"""Rotary embedding and the fused writers in Triton, interpreted inside `jax.jit`: against the oracle, and fused against unfused."""

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
from purepage.testing import assert_close, mrope_rows, reference_merge, reference_qk_norm_rope, reference_rope

pytest.importorskip("torch")
pytest.importorskip("triton")

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
E4M3, E4M3Z, E5M2, E5M2Z = (getattr(ml_dtypes, f"float8_{kind}") for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))
POSITIONS = 40


def table(rotary_dim, dtype=F32):
    """cos || sin with distinct entries, so that a wrong row, half or pair shows."""
    return np.random.default_rng(7).uniform(-1, 1, (POSITIONS, rotary_dim)).astype(dtype)


def slots_of(tokens, spec, seed=3):
    """Distinct slots. The first token has none, and the last one is past the end of the cache."""
    slots = np.random.default_rng(seed).permutation(spec.num_slots)[:tokens].astype(np.int32)
    slots[0], slots[-1] = -1, spec.num_slots
    return slots


def normal(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# Rotary sizes: whole heads, part of them, halves that are no power of two.
ROTARY_SIZES = ((64, 64), (64, 32), (48, 48), (80, 24), (33, 10))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "neox": (True, False),
            "sizes": ROTARY_SIZES,
            "dtype": (F32, F16, BF16),
            "key_dtype": (F32, BF16),
            "table": (F32, BF16),
            "heads": ((4, 2), (3, 1)),
        }
    ),
    ids=case_id,
)
def test_rotation_is_the_oracles_rounded_once(case):
    (head_size, rotary_dim), (num_heads, num_kv_heads), tokens = case["sizes"], case["heads"], 11
    query, key = normal((tokens, num_heads, head_size), case["dtype"], 0), normal((tokens, num_kv_heads, head_size), case["key_dtype"], 1)
    positions = np.random.default_rng(2).integers(0, POSITIONS, tokens).astype(np.int32)
    cos_sin = table(rotary_dim, case["table"])
    rotated = jax.jit(lambda *args: pp.rotary_embedding(*args, is_neox=case["neox"], implementation="triton"))(
        positions, query, key, cos_sin
    )
    for actual, x in zip(rotated, (query, key), strict=True):
        assert_close(actual, reference_rope(positions, x, cos_sin, is_neox=case["neox"]), dtype=x.dtype)
        np.testing.assert_array_equal(bits(actual)[..., rotary_dim:], bits(x)[..., rotary_dim:])


@pytest.mark.parametrize("neox", (True, False), ids=("neox", "gptj"))
def test_a_position_without_a_row_turns_its_rotated_channels_to_nan_and_no_others(neox):
    query, key = normal((4, 2, 24), F32, 0), normal((4, 1, 24), F32, 1)
    positions = jnp.array([POSITIONS, 3, -1, 2**31 - 1], jnp.int32)
    for out, x in zip(
        pp.rotary_embedding(positions, query, key, table(16), is_neox=neox, implementation="triton"), (query, key), strict=True
    ):
        out = np.asarray(out)
        assert np.isnan(out[[0, 2, 3], :, :16]).all() and np.isfinite(out[1]).all()
        np.testing.assert_array_equal(out[..., 16:], x[..., 16:])


def make_case(case, tokens=9):
    head_size, rotary_dim = case["sizes"]
    num_heads, num_kv_heads = case["heads"]
    spec = pp.CacheSpec(
        num_blocks=3,
        block_size=case["block_size"],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        num_layers=2,
        dtype=case["dtype"],
        content=case["content"],
        order=case["order"],
    )
    rng = np.random.default_rng(9)
    scales = {name: rng.uniform(0.01, 0.1, (2, num_kv_heads)) for name in ("k_scale", "v_scale")} if spec.is_quantized else {}
    return spec, random_cache(spec, **scales), slots_of(tokens, spec), table(rotary_dim, case["table"]), num_heads


FUSED = {
    "content": tuple(CONTENTS),
    "order": ORDERS,
    "dtype": (F32, BF16, F16, E4M3, E4M3Z, E5M2, E5M2Z),
    "model": (BF16, F32, F16),
    "neox": (True, False),
    "sizes": ((64, 64), (48, 16), (80, 24)),
    "block_size": (16, 48),
    "heads": ((2, 1), (2, 2)),
    "table": (F32, BF16),
}


def same_pool(actual, expected):
    np.testing.assert_array_equal(bits(actual.data), expected)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", pairwise(FUSED), ids=case_id)
def test_rope_with_a_write_is_rope_and_then_the_write_bit_for_bit(case):
    spec, cache, slots, cos_sin, num_heads = make_case(case)
    tokens, size = len(slots), spec.head_size
    query = normal((tokens, num_heads, size), case["model"], 0)
    key, value = (normal((tokens, spec.num_kv_heads, size), case["model"], seed) for seed in (1, 2))
    positions = np.random.default_rng(2).integers(0, POSITIONS, tokens).astype(np.int32)

    @jax.jit
    def fused(cache, layer):
        return pp.rope_and_update_cache(
            query, key, value, positions, cos_sin, cache, slots, is_neox=case["neox"], layer=layer, implementation="triton"
        )

    q_out, k_out, after = fused(cache, jnp.int32(1))
    wanted = pp.rotary_embedding(positions, query, key, cos_sin, is_neox=case["neox"], implementation="triton")
    for actual, expected in zip((q_out, k_out), wanted, strict=True):
        np.testing.assert_array_equal(bits(actual), bits(expected))
    same_pool(after, expected_pool(cache, k_out, value, slots, 1))


@pytest.mark.parametrize("neox", (True, False), ids=("neox", "gptj"))
def test_channels_past_the_rotary_ones_keep_the_bits_of_any_nan_fused_or_not(neox):
    spec = pp.CacheSpec(num_blocks=1, block_size=16, num_kv_heads=1, head_size=24, dtype=BF16)
    query, key = normal((2, 2, 24), BF16, 0), normal((2, 1, 24), BF16, 1)
    for x in (query, key):
        bits(x)[..., 18:22] = [0x7F81, 0xFF81, 0x7FC1, 0xFFFF]  # signalling, and quiet with a payload
    positions, slots = np.array([3, 5], np.int32), np.array([4, 9], np.int32)
    cache = random_cache(spec)
    q_out, k_out, after = pp.rope_and_update_cache(
        query, key, key, positions, table(16), cache, slots, is_neox=neox, implementation="triton"
    )
    apart = pp.rotary_embedding(positions, query, key, table(16), is_neox=neox, implementation="triton")
    for fused, separate, x in zip((q_out, k_out), apart, (query, key), strict=True):
        np.testing.assert_array_equal(bits(separate)[..., 16:], bits(x)[..., 16:])
        np.testing.assert_array_equal(bits(fused), bits(separate))
    same_pool(after, bits(pp.update_cache(cache, k_out, key, slots, implementation="triton").data))


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", pairwise({**FUSED, "mrope": ("no", "runs", "interleaved")}, seed=1), ids=case_id)
def test_norm_rope_and_write_are_the_oracles_and_the_pool_holds_the_key_that_comes_back(case):
    spec, cache, slots, cos_sin, num_heads = make_case(case)
    tokens, size, half = len(slots), spec.head_size, case["sizes"][1] // 2
    qkv = normal((tokens, (num_heads + 2 * spec.num_kv_heads) * size), case["model"], 0)
    weights = [np.random.default_rng(seed).uniform(0.5, 1.5, size).astype(F32) for seed in (4, 5)]
    options = {"num_heads": num_heads, "eps": 1e-3, "is_neox": case["neox"]}
    mrope = case["mrope"] != "no"
    if mrope:
        options |= {"mrope_section": (half - 2 * (half // 3), half // 3, half // 3), "is_interleaved": case["mrope"] == "interleaved"}
    positions = np.random.default_rng(2).integers(0, POSITIONS, (3, tokens) if mrope else tokens).astype(np.int32)
    write = pp.qk_norm_mrope_and_update_cache if mrope else pp.qk_norm_rope_and_update_cache

    @jax.jit
    def fused(cache, layer):
        return write(qkv, *weights, positions, cos_sin, cache, slots, layer=layer, implementation="triton", **options)

    q_out, k_out, v_out, after = fused(cache, jnp.int32(1))
    expected = reference_qk_norm_rope(qkv, *weights, positions, cos_sin, **options)
    # The normed value is rounded before it is rotated: near a tie, float32 and float64 may part by a place.
    for name, actual, wanted in zip("qkv", (q_out, k_out, v_out), expected, strict=True):
        assert_close(actual, wanted, dtype=qkv.dtype, what=name)
    np.testing.assert_array_equal(bits(v_out), bits(expected[2]))
    same_pool(after, expected_pool(cache, k_out, v_out, slots, 1))


def test_programs_of_several_heads_and_many_tokens_write_what_the_oracle_says():
    """40 tokens of 4 heads are more than a block of tokens, and a program has two heads."""
    case = {"sizes": (16, 16), "heads": (4, 4), "block_size": 16, "dtype": F32, "content": "flash", "order": "LBHNC", "table": F32}
    _, cache, slots, cos_sin, _ = make_case(case, tokens=40)
    query, key, value = (normal((40, 4, 16), F32, seed) for seed in range(3))
    positions = np.arange(40, dtype=np.int32)[::-1].copy()
    q_out, k_out, after = pp.rope_and_update_cache(query, key, value, positions, cos_sin, cache, slots, layer=1, implementation="triton")
    for actual, x in ((q_out, query), (k_out, key)):
        assert_close(actual, reference_rope(positions, x, cos_sin), dtype=F32)
    same_pool(after, expected_pool(cache, k_out, value, slots, 1))


@pytest.mark.parametrize("interleaved", (False, True), ids=("runs", "interleaved"))
def test_each_frequency_of_mrope_takes_the_position_row_of_its_section(interleaved):
    """cos is the position's number and sin is 0, so a rotated 1 equals the position that it took."""
    section, tokens = (2, 3, 3), 2
    spec = pp.CacheSpec(num_blocks=1, block_size=16, num_kv_heads=1, head_size=16, dtype=jnp.float32)
    cos_sin = np.zeros((30, 16), F32)
    cos_sin[:, :8] = np.arange(30)[:, None]
    positions = np.array([[1, 2], [11, 12], [21, 22]], np.int32)
    qkv = np.ones((tokens, 3 * 16), F32)
    query, _, _, _ = pp.qk_norm_mrope_and_update_cache(
        qkv,
        np.ones(16, F32),
        np.ones(16, F32),
        positions,
        cos_sin,
        pp.init_cache(spec),
        jnp.array([0, 1]),
        num_heads=1,
        mrope_section=section,
        is_interleaved=interleaved,
        eps=1e-12,
        implementation="triton",
    )
    rows = mrope_rows(section, is_interleaved=interleaved)
    np.testing.assert_allclose(np.asarray(query)[:, 0, :8], positions[rows].T, rtol=1e-6)


def test_a_donated_fused_write_comes_back_in_the_same_memory():
    spec = pp.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=2, head_size=32)
    cache = random_cache(spec)
    place = cache.data.unsafe_buffer_pointer()
    query, key = normal((3, 4, 32), BF16, 0), normal((3, 2, 32), BF16, 1)
    fused = jax.jit(
        lambda cache: pp.rope_and_update_cache(
            query, key, key, np.arange(3), table(32), cache, jnp.array([5, -1, 7]), implementation="triton"
        ),
        donate_argnums=0,
    )
    assert fused(cache)[2].data.unsafe_buffer_pointer() == place


@pytest.mark.parametrize(
    ("dtype_a", "dtype_b", "head_size"), ((F32, F32, 64), (BF16, F32, 80), (F16, F16, 33)), ids=("f32", "bf16-with-f32", "f16-odd")
)
def test_merged_states_are_the_oracles_and_a_side_without_keys_is_not_read(dtype_a, dtype_b, head_size):
    rng = np.random.default_rng(0)
    out_a, out_b = normal((5, 3, head_size), dtype_a, 1), normal((5, 3, head_size), dtype_b, 2)
    lse_a, lse_b = (rng.standard_normal((5, 3)) * 4).astype(F32), (rng.standard_normal((5, 3)) * 4).astype(F32)
    lse_a[0, 0], lse_b[1, 1], lse_a[2, 2], lse_b[2, 2], lse_b[3, 0] = -np.inf, -np.inf, -np.inf, -np.inf, 200.0
    wanted, wanted_lse = reference_merge(out_a, lse_a, out_b, lse_b)
    out_a[0, 0] = out_b[1, 1] = out_a[2, 2] = out_b[2, 2] = np.nan
    out, lse = jax.jit(lambda *states: pp.merge_attention_states(*states, implementation="triton"))(out_a, lse_a, out_b, lse_b)
    assert_close(out, wanted, dtype=dtype_a)
    assert_close(lse, wanted_lse, dtype="lse")
    assert not np.any(np.asarray(out)[2, 2].astype(F32)) and np.asarray(lse)[2, 2] == -np.inf


def test_a_log_sum_exp_of_plus_infinity_stands_for_no_keys():
    out_a, out_b = normal((4, 1, 16), F32, 1), normal((4, 1, 16), F32, 2)
    lse_a, lse_b = (np.array(values, F32)[:, None] for values in ([np.inf, 1, np.inf, np.inf], [2, np.inf, np.inf, -np.inf]))
    out_a[[0, 2, 3]] = out_b[[1, 2, 3]] = np.nan
    out, lse = (np.asarray(x) for x in pp.merge_attention_states(out_a, lse_a, out_b, lse_b, implementation="triton"))
    np.testing.assert_array_equal(out[:2], np.stack([out_b[0], out_a[1]]))
    np.testing.assert_array_equal(lse[:, 0], F32([2, 1, -np.inf, -np.inf]))
    assert not np.any(out[2:])


WIDE = np.array([2**32 + 3, 3, -1, POSITIONS, -(2**32) + 3, 2**31 + 3], np.int64)
"""Positions of which the second alone is inside; of most others the low 32 bits are inside."""


@pytest.mark.parametrize("implementation", ("triton", "xla"))
@pytest.mark.parametrize("writer", ("rope", "qk_norm", "mrope"))
def test_a_wide_position_or_slot_is_outside_even_where_its_low_bits_are_inside(writer, implementation):
    """Rotated channels of a position without a row are NaN, in the result and in the cache; a slot outside the cache is not written."""
    spec = pp.CacheSpec(num_blocks=2, block_size=16, num_kv_heads=1, head_size=24, dtype=F32)
    tokens, cache = len(WIDE), random_cache(spec)
    slots = np.array([2**32 + 7, 4, 2**31, -1, 9, -(2**32) + 8], np.int64)
    query, key, value = (normal((tokens, heads, 24), F32, seed) for seed, heads in enumerate((2, 1, 1)))
    options = {"is_neox": True, "implementation": implementation}
    if writer == "rope":

        def write(positions, slots):
            _, k_out, after = pp.rope_and_update_cache(query, key, value, positions, table(16), cache, slots, **options)
            return k_out, after

    else:
        qkv, weight = np.concatenate([x.reshape(tokens, -1) for x in (query, key, value)], 1), np.ones(24, F32)
        options |= {"num_heads": 2, "eps": 1e-6} | ({"mrope_section": (3, 3, 2)} if writer == "mrope" else {})
        call = pp.qk_norm_mrope_and_update_cache if writer == "mrope" else pp.qk_norm_rope_and_update_cache

        def write(positions, slots):
            _, k_out, _, after = call(qkv, weight, weight, positions, table(16), cache, slots, **options)
            return k_out, after

    with jax.enable_x64(True):
        k_out, after = jax.jit(write)(np.tile(WIDE, (3, 1)) if writer == "mrope" else WIDE, slots)
    k_out = np.asarray(k_out)
    assert np.isnan(k_out[[0, 2, 3, 4, 5], :, :16]).all() and np.isfinite(k_out[1]).all() and np.isfinite(k_out[..., 16:]).all()
    same_pool(after, expected_pool(cache, k_out, value, np.where((slots >= 0) & (slots < spec.num_slots), slots, -1).astype(np.int32), 0))
