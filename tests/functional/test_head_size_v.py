"""Values of another head size than keys (MiMo, DeepSeek without absorption, MiniCPM3), against the float64 oracle."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.testing import assert_close, random_batch, reference_encoder_attention, reference_qk_norm_rope, reference_rope

F32, BF16, E4M3, E5M2 = np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), *map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
SIZES = [(48, 32), (32, 48)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("size, value_size", SIZES)
@pytest.mark.parametrize("order", ["LBHNC", "LHBNC"])
@pytest.mark.parametrize("dtype, cache_dtype", [(F32, F32), (BF16, BF16), (BF16, E4M3), (F32, E5M2)], ids=str)
@pytest.mark.parametrize("kind", ["mixed", "decode", "prefill"])
def test_attention_over_what_was_written(kind, dtype, cache_dtype, order, size, value_size, implementation):
    batch = random_batch(
        1, kind=kind, dtype=dtype, cache_dtype=cache_dtype, head_size=size, head_size_v=value_size, num_layers=2, scales="head"
    )
    cache, query = batch.cache_before(order=order), jnp.asarray(batch.query)
    assert cache.spec.value_size == value_size
    for layer in range(2):
        new = batch.new_keys[layer], batch.new_values[layer], batch.metadata.slot_mapping
        cache = pp.update_cache(cache, *new, layer=layer, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(cache.data), np.asarray(batch.cache(order=order).data))
    options = {"sinks": [0.3, -1.0, 5.0, -np.inf], "sliding_window": 20}
    out, lse = pp.paged_attention(query, cache, batch.metadata, layer=1, return_lse=True, implementation=implementation, **options)
    expected, expected_lse = batch.reference(1, **options)
    assert out.shape == (*query.shape[:2], value_size)
    assert_close(out, expected, dtype=dtype)
    assert_close(lse, expected_lse, dtype="lse", compute_dtype=dtype)


def test_an_encoder_and_a_cascade():
    batch = random_batch(2, kind="chunked", dtype=F32, head_size=32, head_size_v=16, common_prefix_blocks=1)
    out = pp.cascade_attention(jnp.asarray(batch.query), batch.cache(), batch.metadata, common_prefix_len=16, implementation="xla")
    assert_close(out, batch.reference()[0], dtype=F32)
    batch = random_batch(3, kind="prefill", dtype=F32, head_size=32, head_size_v=48)
    expected, _ = reference_encoder_attention(batch.query, batch.key, batch.value, batch.metadata.query_start_loc)
    sides = map(jnp.asarray, (batch.query, batch.key, batch.value))
    assert_close(pp.encoder_attention(*sides, batch.metadata, implementation="xla"), expected, dtype=F32)


@pytest.mark.parametrize("implementation", ["triton"])
def test_kernels_of_an_encoder(implementation):
    batch = random_batch(3, kind="prefill", dtype=F32, num_seqs=3, head_size=32, head_size_v=48)
    expected, _ = reference_encoder_attention(batch.query, batch.key, batch.value, batch.metadata.query_start_loc)
    sides = map(jnp.asarray, (batch.query, batch.key, batch.value))
    assert_close(pp.encoder_attention(*sides, batch.metadata, implementation=implementation), expected, dtype=F32)


@pytest.mark.parametrize("order", ["LBHNC", "LHBNC"])
def test_blocks_and_logical_contents_keep_every_bit(order):
    batch = random_batch(4, dtype=F32, cache_dtype=E4M3, head_size=48, head_size_v=16, num_layers=2)
    cache = batch.cache(order=order)
    for layer in range(2):
        for found, expected in zip(pp.cache_to_logical(cache, layer), (batch.key_cache, batch.value_cache), strict=True):
            np.testing.assert_array_equal(np.asarray(found).view(np.uint8), expected[layer].view(np.uint8))
    other = pp.convert_cache(cache, batch.spec(order="LHBNC" if order == "LBHNC" else "LBHNC"))
    back = pp.convert_cache(other, cache.spec)
    np.testing.assert_array_equal(np.asarray(back.data), np.asarray(cache.data))
    ids = jnp.array([2, 0])
    moved = pp.scatter_blocks(pp.init_cache(cache.spec), ids, pp.gather_blocks(cache, ids))
    np.testing.assert_array_equal(*(np.asarray(pp.cache_to_logical(x)[1][ids]).view(np.uint8) for x in (moved, cache)))
    assert pp.CacheSpec.from_json(cache.spec.to_json()) == cache.spec


@pytest.mark.sampled(2)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("size, value_size", [(48, 16), (32, 48)])
@pytest.mark.parametrize("cache_dtype", [F32, E4M3], ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
def test_the_fused_writers(is_neox, cache_dtype, size, value_size, implementation):
    batch = random_batch(5, dtype=F32, cache_dtype=cache_dtype, head_size=size, head_size_v=value_size, scales="head")
    rng = np.random.default_rng(0)
    table = rng.uniform(-1, 1, (64, 16)).astype(np.float32)
    query, key, value = (np.nan_to_num(x) for x in (batch.query, batch.key, batch.value))
    cache, slots, positions = batch.cache_before(), batch.metadata.slot_mapping, batch.positions
    how = {"is_neox": is_neox, "implementation": implementation}
    _, rotated, written = pp.rope_and_update_cache(query, key, value, positions, table, cache, slots, **how)
    assert_close(rotated, reference_rope(positions, key, table, is_neox=is_neox), dtype=F32)
    np.testing.assert_array_equal(np.asarray(written.data), np.asarray(pp.update_cache(cache, rotated, value, slots).data))
    qkv = np.concatenate([x.reshape(len(x), -1) for x in (query, key, value)], axis=1)
    weights = rng.standard_normal((2, size)).astype(np.float32)
    wide = np.concatenate([qkv[:, : 6 * size], np.zeros((len(qkv), 2 * size), np.float32)], axis=1)
    expected = reference_qk_norm_rope(wide, *weights, positions, table, num_heads=4, is_neox=is_neox)
    made = pp.qk_norm_rope_and_update_cache(qkv, *weights, positions, table, cache, slots, num_heads=4, **how)
    for found, wanted in zip(made[:2], expected, strict=False):
        assert_close(found, wanted, dtype=F32)
    np.testing.assert_array_equal(np.asarray(made[2]), value)
    np.testing.assert_array_equal(np.asarray(made[3].data), np.asarray(pp.update_cache(cache, made[1], value, slots).data))


@pytest.mark.parametrize("content", ["xpacked", "xpacked_interleaved_v", "shuffled", "flash"])
def test_a_layout_whose_sides_are_apart_refuses_it_by_name(content):
    with pytest.raises(ValueError, match=r"head_size_v is 32: it must be head_size \(64\) with content '.*'; 'packed' takes any"):
        pp.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=1, head_size=64, head_size_v=32, content=content)


def test_one_head_size_is_one_spec_however_it_is_written():
    plain = {"num_blocks": 4, "block_size": 16, "num_kv_heads": 1, "head_size": 64}
    assert pp.CacheSpec(**plain, head_size_v=64) == pp.CacheSpec(**plain)
    assert pp.CacheSpec(**plain, head_size_v=32).nbytes == 4 * 16 * 96 * 2


def test_the_unified_backend_serves_it_and_rocm_attn_names_it():
    unified, sizes = pp.rocm_aiter_unified_attn, {"head_size": 96, "head_size_v": 64}
    batch = random_batch(6, dtype=F32, **sizes)
    spec = unified.cache_spec(num_blocks=5, num_kv_heads=2, block_size=16, dtype=F32, **sizes)
    assert spec.value_size == 64 and spec.content == "packed"
    config = pp.AttentionConfig(num_heads=4, num_kv_heads=2, **sizes)
    cache = batch.cache_before(order=spec.order)

    @jax.jit
    def step(query, key, value, cache, metadata):
        cache = unified.kv_cache_update(key, value, cache, metadata.slot_mapping, config)
        return unified.forward(query, key, value, cache, metadata, config)

    out = step(*map(jnp.asarray, (batch.query, batch.key, batch.value)), cache, batch.metadata)
    assert_close(out, batch.reference()[0], dtype=F32)
    assert unified.forward(jnp.asarray(batch.query), None, None, None, None, config).shape == (*batch.query.shape[:2], 64)
    with pytest.raises(pp.UnsupportedError, match=r"head_size_v is 64: ROCM_ATTN.*'xpacked'"):
        pp.rocm_attn.cache_spec(num_blocks=5, num_kv_heads=2, **sizes)
    assert pp.rocm_attn.supports(config, spec)
