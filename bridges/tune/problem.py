"""The arrays of a case, and its calls in a chain. Every pool is the tuner's own, with NaN in each slot that no query may see."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...functional.attention import paged_attention_call
from ...functional.cache import KVCache, cache_from_logical, cache_to_logical, init_cache
from ...functional.calls import QkNormRopeUpdateCall, RopeUpdateCall, UpdateCacheCall
from ...functional.metadata_builders import make_metadata
from .cases import Case

COLD_BYTES = 1 << 30
"""Layers of a pool together are larger than the last level of any GPU's cache, so that no call finds what the one before has read."""
MOST_LAYERS = 64
WRITER_LAYERS = 4
SCALES = 0.5, 2.0
"""Of keys and values in an fp8 cache."""


@dataclass(frozen=True)
class Problem:
    """Calls of a case that can be chained.

    Attributes:
      call: (state, operands, i) -> the i-th call of a chain, where i is static.
      advance: (state, result) -> the next state, which needs the result.
      state, operands: pytrees of arrays.
      donated: the state is given away from call to call, as a cache is.
      results: a result as the arrays that are compared.
    """

    call: Callable[[Any, Any, int], Any]
    advance: Callable[[Any, Any], Any]
    state: Any
    operands: Any
    donated: bool
    results: Callable[[Any], list[Any]]


def problem_of(case: Case, *, finite: bool = False, cold_bytes: int = COLD_BYTES) -> Problem:
    """Random arrays of a case.

    Args:
      case: the shape.
      finite: slots that no query may see hold zeros and not NaN: for a user who has promised so.
      cold_bytes: see `COLD_BYTES`.
    """
    return _writer(case) if case.is_writer else _attention(case, finite, cold_bytes)


def _normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.float32).astype(dtype))(jax.random.key(seed))


def lengths_of(case: Case) -> tuple[list[int], list[int]]:
    """(new tokens, tokens) of each sequence: a little ragged, so that blocks end before their last slot."""
    tokens = [max(case.query if case.query < case.context else 1, case.context - i % min(8, case.block_size)) for i in range(case.batch)]
    return [min(case.query, n) for n in tokens], tokens


def _attention(case: Case, finite: bool, cold_bytes: int) -> Problem:
    query_lens, seq_lens = lengths_of(case)
    width = math.ceil(case.context / case.block_size)
    blocks = 1 + sum(math.ceil(n / case.block_size) for n in seq_lens)  # block 0 belongs to no sequence
    layers = max(1, min(MOST_LAYERS, math.ceil(cold_bytes / case.spec(blocks, 1).nbytes)))
    table, order, used = np.zeros((case.batch, width), np.int32), 1 + np.random.default_rng(0).permutation(blocks - 1), 0
    live = np.zeros((blocks, case.block_size), bool)
    for row, n in zip(table, seq_lens, strict=True):
        count = math.ceil(n / case.block_size)
        row[:count] = order[used : used + count]
        live[row[:count]] = (np.arange(count * case.block_size) < n).reshape(count, -1)
        used += count
    cache = _filled(case, blocks, layers, live, finite)
    metadata = make_metadata(
        query_lens, seq_lens, table, block_size=case.block_size, max_query_len=case.query, max_seq_len=case.context, num_seqs=case.batch
    )
    query = _normal(1, (sum(query_lens), case.heads, case.head_size), case.dtype)
    options: dict[str, Any] = {"scale": case.scale, "sliding_window": case.window, "logits_soft_cap": case.soft_cap}
    vectors = {}
    if case.sinks:
        vectors["sinks"] = _normal(2, (case.heads,), jnp.float32)
    if case.alibi:
        vectors["alibi_slopes"] = 2.0 ** -jnp.linspace(1, 8, case.heads)
    becomes_query = case.query == 1 and case.values == case.head_size and case.dtype != "float32"

    def call(state: Any, operands: Any, i: int) -> Any:
        query, seq_lens = state
        cache, metadata, vectors = operands
        metadata = replace(metadata, seq_lens=seq_lens)
        return paged_attention_call(query, cache, metadata, layer=jnp.int32(i % layers), **options, **vectors)

    def advance(state: Any, result: Any) -> Any:
        query, seq_lens = state
        out = result[0]
        if becomes_query:
            return out.astype(query.dtype), seq_lens
        return query, seq_lens + (out[0, 0, 0] > 1e30).astype(seq_lens.dtype)  # XLA would merge equal calls

    return Problem(call, advance, (query, metadata.seq_lens), (cache, metadata, vectors), False, lambda result: [result[0]])


def _filled(case: Case, blocks: int, layers: int, live: np.ndarray, finite: bool) -> KVCache:
    """A cache with random keys and values, the same in every layer, and NaN (or 0) where no token is."""
    spec = case.spec(blocks, layers)
    k_scale, v_scale = SCALES if spec.is_quantized else (1.0, 1.0)
    shape = (blocks, case.block_size, case.kv_heads)

    @jax.jit
    def fill(key: Any, live: Any) -> KVCache:
        sides = []
        for seed, size in zip(jax.random.split(key), (case.head_size, case.values), strict=True):
            side = jax.random.normal(seed, (*shape, size), jnp.bfloat16).astype(spec.dtype)
            side = jnp.where(live[..., None, None], side, jnp.asarray(0.0 if finite else jnp.nan, spec.dtype))
            sides.append(jnp.broadcast_to(side[None], (layers, *side.shape)))
        return cache_from_logical(spec, *sides, k_scale=k_scale, v_scale=v_scale)

    return fill(jax.random.key(3), jnp.asarray(live))


def _writer(case: Case) -> Problem:
    tokens, size = case.batch, case.head_size
    blocks = math.ceil(2 * tokens / case.block_size)
    cache = init_cache(case.spec(blocks, WRITER_LAYERS))
    rng = np.random.default_rng(4)
    angle = np.arange(4096)[:, None] * 10000.0 ** (-np.arange(size // 2) / max(1, size // 2))
    shared = {
        "slots": jnp.asarray(rng.permutation(blocks * case.block_size)[:tokens], jnp.int32),
        "positions": jnp.asarray(rng.integers(0, 4096, tokens), jnp.int32),
        "cos_sin": jnp.asarray(np.concatenate([np.cos(angle), np.sin(angle)], -1), case.dtype),
        "weight": _normal(5, (size,), case.dtype),
    }
    counts, sizes = (case.heads, case.kv_heads, case.kv_heads), (size, size, case.values)
    if case.kernel == "qk_norm":
        new: Any = [_normal(6 + i, (tokens, sum(counts) * size), case.dtype) for i in range(WRITER_LAYERS)]
    else:
        new = [
            [_normal(6 + 3 * i + j, (tokens, h, d), case.dtype) for j, (h, d) in enumerate(zip(counts, sizes, strict=True))]
            for i in range(WRITER_LAYERS)
        ]

    def call(cache: Any, operands: Any, i: int) -> Any:
        new, shared = operands
        layer, given = jnp.int32(i % WRITER_LAYERS), new[i % WRITER_LAYERS]
        where = {"cache": cache, "slot_mapping": shared["slots"], "layer": layer}
        if case.kernel == "update":
            return UpdateCacheCall(key=given[1], value=given[2], **where)
        rotary = {"positions": shared["positions"], "cos_sin_cache": shared["cos_sin"], "is_neox": True}
        if case.kernel == "rope":
            return RopeUpdateCall(query=given[0], key=given[1], value=given[2], **rotary, **where)
        return QkNormRopeUpdateCall(
            qkv=given,
            q_weight=shared["weight"],
            k_weight=shared["weight"],
            num_heads=case.heads,
            eps=1e-6,
            mrope_section=None,
            is_interleaved=False,
            **rotary,
            **where,
        )

    def advance(state: Any, result: Any) -> Any:
        return jax.lax.optimization_barrier(result)[-1] if isinstance(result, tuple) else result

    def results(result: Any) -> list[Any]:
        cache, rest = (result[-1], result[:-1]) if isinstance(result, tuple) else (result, ())
        return [*rest, *cache_to_logical(cache, 0)]

    return Problem(call, advance, cache, (new, shared), True, results)


def relative_error(actual: list[Any], expected: list[Any]) -> float:
    """The largest ||actual - expected|| / ||expected|| of pairs of arrays; NaN where anything is NaN."""

    @jax.jit
    def of(actual: Any, expected: Any) -> Any:
        a, b = actual.astype(jnp.float32), expected.astype(jnp.float32)
        return jnp.linalg.norm((a - b).reshape(-1)) / jnp.maximum(jnp.linalg.norm(b.reshape(-1)), 1e-30)

    return float(np.max([float(of(a, b)) for a, b in zip(actual, expected, strict=True)]))


def tolerance_of(case: Case) -> float:
    """Largest relative error of a result that counts as right: weights in bfloat16 alone give 2e-3."""
    by_dtype = {"float32": 1e-4, "float16": 3e-3, "bfloat16": 1e-2}
    return 2e-2 if case.cache_dtype.startswith("float8") else max(by_dtype[case.dtype], by_dtype.get(case.cache_dtype, 0.0))
