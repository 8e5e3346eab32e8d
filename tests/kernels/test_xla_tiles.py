"""The CPU's prefill in plain JAX, past one tile of queries and one chunk of keys: chunks that need masks apart from those that need none,
results written where they belong, each chunk read once.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.kernels.xla import attention, passes
from purepage.testing import assert_close, random_batch, reference_encoder_attention

CHUNK = attention.chunk_tokens("cpu")
TILE = passes.query_tile(2, "cpu")
"""Every batch here has two query heads to a KV head."""
F32, BF16 = np.dtype("float32"), np.dtype(ml_dtypes.bfloat16)

MASKS = {
    "causal": ("mixed", F32, {}),
    "causal, bfloat16": ("mixed", BF16, {}),
    "a window within a chunk": ("mixed", F32, {"sliding_window": 37}),
    "a window of a chunk": ("mixed", F32, {"sliding_window": CHUNK}),
    "a window over whole chunks": ("mixed", F32, {"sliding_window": TILE + CHUNK + 1}),
    "every key": ("cross", F32, {}),
    "a window on both sides": ("cross", F32, {"sliding_window": TILE + CHUNK + 5}),
    "soft cap and sinks": ("mixed", F32, {"logits_soft_cap": 3.0, "sinks": np.array([0.5, -1.0, 3.0, -np.inf], np.float32)}),
    "ALiBi, prefill only": ("prefill", F32, {"alibi_slopes": np.array([0.3, 0.1, 0.02, 0.004], np.float32)}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MASKS)
def test_long_prompts_meet_every_mask(name):
    kind, dtype, options = MASKS[name]
    window = options.get("sliding_window") if kind == "mixed" else None
    batch = random_batch(7, kind=kind, dtype=dtype, max_query_len=3 * TILE, max_seq_len=3 * CHUNK + 40, num_seqs=6, sliding_window=window)
    out, lse = pp.paged_attention(jnp.asarray(batch.query), batch.cache(), batch.metadata, implementation="xla", return_lse=True, **options)
    expected, expected_lse = batch.reference(**options)
    assert_close(out, expected, dtype=dtype, what="out")
    assert_close(lse, expected_lse, dtype="lse", what="lse")
    padding = slice(batch.num_tokens, None)
    assert np.all(np.asarray(out[padding], np.float32) == 0) and np.all(np.isneginf(np.asarray(lse[padding])))


def one_prompt(length, new, *, seed=0):
    """(query, dense key and value, a function from value to the cache, metadata) of one sequence; slots past its end are NaN."""
    rng = np.random.default_rng(seed)
    blocks = -(-length // 16)
    spec = pp.CacheSpec(num_blocks=blocks, block_size=16, num_kv_heads=1, head_size=32, dtype=F32)
    table = rng.permutation(blocks)[None]
    key, value = (rng.standard_normal((length, 1, 32)).astype(np.float32) for _ in range(2))

    def cache_of(value):
        sides = np.full((2, 1, blocks, 16, 1, 32), np.nan, np.float32)
        at = np.arange(length)
        for side, dense in zip(sides, (key, value), strict=True):
            side[0, table[0, at // 16], at % 16] = dense
        return pp.cache_from_logical(spec, *map(jnp.asarray, sides))

    query = rng.standard_normal((new, 2, 32)).astype(np.float32)
    return query, value, cache_of, pp.make_metadata([new], [length], table, block_size=16)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("position", [CHUNK - 1, CHUNK + 3, 2 * CHUNK + TILE])
def test_a_value_that_is_not_finite_reaches_the_queries_that_see_it_and_no_other(position, bad):
    length = 2 * CHUNK + 2 * TILE
    query, value, cache_of, metadata = one_prompt(length, length)
    clean = np.asarray(pp.paged_attention(query, cache_of(value), metadata, implementation="xla"))
    spoilt = value.copy()
    spoilt[position, 0, 5] = bad
    out = np.asarray(pp.paged_attention(query, cache_of(spoilt), metadata, implementation="xla"))
    np.testing.assert_allclose(out[:position], clean[:position], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out[position:, :, 5], np.broadcast_to(np.float32(bad), out[position:, :, 5].shape))
    others = np.arange(32) != 5
    np.testing.assert_allclose(out[position:][..., others], clean[position:][..., others], rtol=1e-5, atol=1e-6)


def as_it_is(window, positions):
    return {"sliding_window": window}


def as_data(window, positions):
    return {"sliding_window": jnp.int32(window or 0)}


def as_a_range(window, positions):
    return {"key_range": (positions - (window or len(positions) * 9) + 1, positions + 1)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("given", [as_it_is, as_data, as_a_range])
@pytest.mark.parametrize("window", [None, 1, CHUNK + 9, CHUNK + TILE + 1])
def test_each_tile_reads_each_chunk_that_it_sees_once(window, given, monkeypatch):
    context, new = CHUNK + 45, 2 * TILE + 30
    reads, load = [], attention.PagedSource.load

    def counting(self, items, index, dtype):
        jax.debug.callback(lambda first, i: reads.append((int(first), int(i))), items.first_position[0], index)
        return load(self, items, index, dtype)

    monkeypatch.setattr(attention.PagedSource, "load", counting)
    jax.clear_caches()  # windows as data share a trace
    query, value, cache_of, metadata = one_prompt(context + new, new, seed=1)
    options = given(window, np.arange(context, context + new))
    jax.block_until_ready(pp.paged_attention(query, cache_of(value), metadata, implementation="xla", **options))
    jax.effects_barrier()
    expected = []
    for first in range(context, context + new, TILE):
        last = min(first + TILE, context + new) - 1
        oldest = 0 if window is None else max(0, first - window + 1)
        expected += [(first, i) for i in range(oldest // CHUNK, last // CHUNK + 1)]
    assert sorted(reads) == expected


def test_a_long_encoder_batch_that_ends_within_a_tile():
    lengths = [TILE + 1, 3, 2 * CHUNK + 5]
    rng = np.random.default_rng(3)
    query, key, value = (rng.standard_normal((sum(lengths), heads, 32)).astype(np.float32) for heads in (4, 2, 2))
    metadata = pp.make_metadata(lengths, lengths, np.zeros((3, 0), np.int64), block_size=16, causal=False)
    out = pp.encoder_attention(*map(jnp.asarray, (query, key, value)), metadata, implementation="xla")
    expected, _ = reference_encoder_attention(query, key, value, metadata.query_start_loc)
    assert_close(out, expected, dtype=np.float32)


def test_temporaries_of_a_prefill_do_not_grow_with_its_tokens():
    def temporaries(tokens):
        spec = pp.CacheSpec(num_blocks=256, block_size=16, num_kv_heads=8, head_size=128, dtype=F32)
        cache = jax.eval_shape(lambda: pp.init_cache(spec))
        i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        metadata = pp.AttentionMetadata(i32(2), i32(1), i32(1, 256), i32(tokens), max_query_len=tokens)
        query = jax.ShapeDtypeStruct((tokens, 32, 128), jnp.float32)
        run = jax.jit(lambda q, c, m: pp.paged_attention(q, c, m, implementation="xla"))
        return run.lower(query, cache, metadata).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4096) - temporaries(1024) < 1 << 20
