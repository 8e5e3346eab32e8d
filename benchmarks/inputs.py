"""The arrays of a case, and its expected output: float32 attention over dense keys and values, without the library's code."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import purepage as pp
from benchmarks.cases import Case

CHECKED_TOKENS = 48
SCALES = (0.5, 2.0)
"""Of keys and values in an fp8 cache."""


@dataclass(frozen=True)
class Inputs:
    """`key` and `value` are the pool as dense [B, N, H, D] codes; `cache` holds the same bits in the case's layout."""

    case: Case
    query: jax.Array
    key: jax.Array
    value: jax.Array
    cache: pp.KVCache
    table: np.ndarray
    metadata: pp.AttentionMetadata

    @property
    def scales(self) -> tuple[float, float]:
        return SCALES if self.cache.spec.is_quantized else (1.0, 1.0)


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Standard normal queries, keys and values; blocks in random order; the pool is full: no block is unused."""
    spec = pp.CacheSpec(
        num_blocks=case.num_blocks,
        block_size=case.block_size,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        dtype=case.cache_dtype,
        content=case.content,
    )
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (case.num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    key, value = (_normal(k, shape, case.cache_dtype) for k in keys[:2])
    scales = SCALES if spec.is_quantized else (1.0, 1.0)
    cache = jax.jit(lambda k, v: pp.cache_from_logical(spec, k[None], v[None], k_scale=scales[0], v_scale=scales[1]))(key, value)
    order = np.random.default_rng(seed).permutation(case.num_blocks)
    table, used = np.zeros((len(case.lengths), case.width), np.int32), 0
    for row, (_, n) in zip(table, case.lengths, strict=True):
        count = -(-n // case.block_size)
        row[:count] = order[used : used + count]
        used += count
    metadata = pp.make_metadata(
        [q for q, _ in case.lengths],
        [n for _, n in case.lengths],
        table,
        block_size=case.block_size,
        max_query_len=max(q for q, _ in case.lengths),
        max_seq_len=max(n for _, n in case.lengths),
    )
    query = _normal(keys[2], (case.num_tokens, case.num_heads, case.head_size), case.dtype)
    return Inputs(case, query, key, value, cache, table, metadata)


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16 if dtype != "float32" else jnp.float32).astype(dtype)


def checked_tokens(case: Case) -> list[tuple[int, int, int]]:
    """(row, sequence, keys that it sees) of some tokens: first and last of the first and last sequences, and random ones."""
    rows, row = [], 0
    for s, (q, n) in enumerate(case.lengths):
        rows.extend((row + i, s, n - q + i + 1) for i in range(q))
        row += q
    if len(rows) <= CHECKED_TOKENS:
        return rows
    rng = np.random.default_rng(1)
    picked = {0, case.lengths[0][0] - 1, len(rows) - 1, *rng.choice(len(rows), CHECKED_TOKENS - 3, replace=False).tolist()}
    return [rows[i] for i in sorted(picked)]


@partial(jax.jit, static_argnames=("window",))
def _attend_one(query: Any, key: Any, value: Any, blocks: Any, seen: Any, scale: Any, v_scale: Any, window: int | None) -> jax.Array:
    heads, head_size = key.shape[2:]
    keys, values = (x[blocks].reshape(-1, heads, head_size).astype(jnp.float32) for x in (key, value))
    scores = jnp.einsum("hgd,khd->hgk", query.astype(jnp.float32).reshape(heads, -1, head_size), keys, precision="highest") * scale
    at = jnp.arange(keys.shape[0])
    keep = (at < seen) & (seen - 1 - at < (window or keys.shape[0]))
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf), axis=-1)
    return (jnp.einsum("hgk,khd->hgd", weights, values, precision="highest") * v_scale).reshape(-1, head_size)


def expected_rows(inputs: Inputs) -> tuple[list[int], np.ndarray]:
    """Rows of the batch, and what attention gives there: f32[rows, Hq, D]."""
    case, rows, outs = inputs.case, [], []
    k_scale, v_scale = inputs.scales
    for row, s, seen in checked_tokens(case):
        out = _attend_one(
            inputs.query[row],
            inputs.key,
            inputs.value,
            jnp.asarray(inputs.table[s]),
            jnp.int32(seen),
            jnp.float32(k_scale * case.head_size**-0.5),
            jnp.float32(v_scale),
            case.window,
        )
        rows.append(row)
        outs.append(np.asarray(out))
    return rows, np.stack(outs)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """||actual - expected|| / ||expected|| in float64; NaN where anything is NaN."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
