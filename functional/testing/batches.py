"""Random ragged batches for tests: everything that one step of paged attention takes, with NaN wherever nobody may look."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ..cache import FP8_DTYPES, CacheSpec, KVCache, cache_from_logical
from ..metadata import AttentionMetadata
from .reference_attention import reference_attention, round_to
from .reference_cache import quantize


@dataclass(frozen=True, eq=False)
class Batch:
    """One step of a ragged batch: NumPy arrays, and the metadata of JAX arrays.

    Attributes:
      query: [T, Hq, D]; rows of padding tokens are NaN.
      new_keys, new_values: [L, T, H, D], this step's new tokens of each layer in the model's dtype; rows of padding tokens are NaN.
      positions: i32[T], position of each token in its sequence; 0 for padding.
      key_cache, value_cache: [L, B, N, H, D] logical caches *after* this step's write, in the cache's dtype; every unused slot is NaN.
      query_lens, seq_lens: [S] host ints, padded sequences included.
      metadata: query starts, lengths, table and slots as JAX arrays.
      k_scale, v_scale: f32[L] or f32[L, H]; 1 unless the cache is fp8.
      q_scale: factor of an fp8 query, None for any other.
    """

    query: Float[np.ndarray, "T Hq D"]
    new_keys: Float[np.ndarray, "L T H D"]
    new_values: Float[np.ndarray, "L T H D"]
    positions: Int[np.ndarray, " T"]
    key_cache: Float[np.ndarray, "L B N H D"]
    value_cache: Float[np.ndarray, "L B N H D"]
    query_lens: Int[np.ndarray, " S"]
    seq_lens: Int[np.ndarray, " S"]
    metadata: AttentionMetadata
    k_scale: np.ndarray
    v_scale: np.ndarray
    q_scale: float | None

    @property
    def key(self) -> Float[np.ndarray, "T H D"]:
        """This step's keys of layer 0."""
        return self.new_keys[0]

    @property
    def value(self) -> Float[np.ndarray, "T H D"]:
        """This step's values of layer 0."""
        return self.new_values[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens without padding."""
        return int(self.query_lens.sum())

    def spec(self, **changes: Any) -> CacheSpec:
        """The cache's spec; `content` and `order` may be given."""
        layers, blocks, size, heads, dim = self.key_cache.shape
        extents = {
            "num_layers": layers,
            "num_blocks": blocks,
            "block_size": size,
            "num_kv_heads": heads,
            "head_size": dim,
            "dtype": self.key_cache.dtype,
        }
        return CacheSpec(**{**extents, **changes})

    def cache(self, spec: CacheSpec | None = None, **changes: Any) -> KVCache:
        """The cache as attention reads it, in any layout: `batch.cache(content="flash", order="LHBNC")`."""
        return self._pack(spec or self.spec(**changes), self.key_cache, self.value_cache)

    def cache_before(self, spec: CacheSpec | None = None, **changes: Any) -> KVCache:
        """The cache as a writer finds it: this step's slots are NaN. Writing `new_keys[l]` and `new_values[l]` makes layer l `cache`'s."""
        slots = np.asarray(self.metadata.slot_mapping)
        slots = slots[slots >= 0]
        sides = []
        for cache in (self.key_cache, self.value_cache):
            before = cache.copy()
            before[:, slots // cache.shape[2], slots % cache.shape[2]] = np.nan
            sides.append(before)
        return self._pack(spec or self.spec(**changes), *sides)

    def _pack(self, spec: CacheSpec, key: np.ndarray, value: np.ndarray) -> KVCache:
        return cache_from_logical(spec, jnp.asarray(key), jnp.asarray(value), k_scale=self.k_scale, v_scale=self.v_scale)

    def reference(self, layer: int = 0, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """`reference_attention` of this batch: (out, lse) in float64. Options are that function's keywords, and go first."""
        metadata = self.metadata
        given = {"causal": metadata.causal, "q_scale": self.q_scale, "k_scale": self.k_scale[layer], "v_scale": self.v_scale[layer]}
        return reference_attention(
            self.query,
            self.key_cache[layer],
            self.value_cache[layer],
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            **{**given, **options},
        )


def _prefill(rng: np.random.Generator, most_new: int, most: int) -> tuple[int, int]:
    new = int(rng.integers(1, min(most_new, most) + 1))
    return new, new


def _chunk(rng: np.random.Generator, most_new: int, most: int) -> tuple[int, int]:
    new = int(rng.integers(min(2, most_new), min(most_new, most - 1) + 1))
    return new, int(rng.integers(new + 1, most + 1))


def _decode(rng: np.random.Generator, most_new: int, most: int) -> tuple[int, int]:
    return 1, int(rng.integers(2, most + 1))


def _idle(rng: np.random.Generator, most_new: int, most: int) -> tuple[int, int]:
    return 0, int(rng.integers(1, most + 1))


def _absent(rng: np.random.Generator, most_new: int, most: int) -> tuple[int, int]:
    return 0, 0


def _cross(rng: np.random.Generator, most_new: int, most: int) -> tuple[int, int]:
    return int(rng.integers(1, most_new + 1)), int(rng.integers(1, most + 1))


def _cross_empty(rng: np.random.Generator, most_new: int, most: int) -> tuple[int, int]:
    return int(rng.integers(1, most_new + 1)), 0


KINDS: Mapping[str, tuple[Callable[[np.random.Generator, int, int], tuple[int, int]], ...]] = {
    "mixed": (_chunk, _decode, _prefill, _absent, _idle),
    "decode": (_decode,),
    "prefill": (_prefill,),
    "chunked": (_chunk,),
    "cross": (_cross, _cross, _cross, _cross_empty),
}
"""Sequences of a batch, drawn in turn and then shuffled: each is (new tokens, tokens in the cache)."""


def random_batch(
    seed: int,
    *,
    kind: str = "mixed",
    num_seqs: int = 5,
    max_query_len: int = 12,
    max_seq_len: int = 60,
    block_size: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 32,
    num_layers: int = 1,
    dtype: Any = np.float32,
    query_dtype: Any = None,
    cache_dtype: Any = None,
    scales: str = "layer",
    causal: bool = True,
    sliding_window: int | None = None,
    padding_tokens: int = 3,
    padding_seqs: int = 1,
    spare_blocks: int = 3,
    share_prefixes: bool = True,
    common_prefix_blocks: int = 0,
) -> Batch:
    """A ragged batch whose every shape follows from the options alone, so that one trace serves all seeds.

    Blocks are shuffled over the pool, sequences share prefix blocks, table entries that nobody needs are -1, 2**31 - 1 or num_blocks, and
    every slot that no sequence owns is NaN, in keys and values. Values are N(0, 1).

    Args:
      seed: everything is a function of it and of the options.
      kind: "mixed" (a chunk, a decode, a prefill, an empty sequence, one without new tokens, and again), "decode", "prefill", "chunked", or
        "cross" (not causal, query lengths independent of the cached ones, one of four sequences empty, nothing to write).
      num_seqs: sequences before padding.
      max_query_len: most new tokens of one sequence; static in the metadata (1 for "decode").
      max_seq_len: most tokens of one sequence, at least 2; static in the metadata.
      block_size, num_heads, num_kv_heads, head_size, num_layers: N, Hq, H, D, L.
      dtype: the model's dtype, of the new keys and values.
      query_dtype: default `dtype`; an fp8 dtype gives codes and a `q_scale`.
      cache_dtype: default `dtype`.
      scales: of an fp8 cache: "one", "layer" ([L], distinct) or "head" ([L, H], distinct).
      causal: False sees the whole sequence; "cross" is never causal.
      sliding_window: also makes the keys NaN that lie before the window of every query that could see them, as freed blocks may be. Results
        without the window are then NaN.
      padding_tokens, padding_seqs: how many at least; T is rounded up to a multiple of 8 unless `padding_tokens` is 0.
      spare_blocks: blocks of the pool that nobody owns.
      share_prefixes: sequences with at least one whole block of context may share their first blocks with another.
      common_prefix_blocks: this many blocks lead every sequence (cascade attention); empty and new sequences are then left out.
    """
    rng = np.random.default_rng([seed, 20240229])
    N, L, D = block_size, num_layers, head_size
    dtype, cache_dtype = np.dtype(dtype), np.dtype(cache_dtype or dtype)
    query_dtype = np.dtype(query_dtype or dtype)
    common = common_prefix_blocks * N
    makers = tuple(m for m in KINDS[kind] if not common or m in (_chunk, _decode, _cross))
    drawn = [makers[i % len(makers)](rng, max_query_len, max_seq_len - common) for i in range(num_seqs)]
    drawn = [drawn[i] for i in rng.permutation(num_seqs)] + [(0, 0)] * padding_seqs
    query_lens = np.array([q for q, _ in drawn], np.int64).reshape(-1)
    seq_lens = np.array([n + (common if i < num_seqs else 0) for i, (_, n) in enumerate(drawn)], np.int64).reshape(-1)
    if kind == "cross":
        causal = False
    writes = kind != "cross"
    total, count = int(query_lens.sum()), len(drawn)
    most_total = num_seqs * (1 if kind == "decode" else max_query_len)
    T = most_total + padding_tokens
    T = -(-T // 8) * 8 if padding_tokens else total
    contexts = seq_lens - query_lens if writes else seq_lens

    width = -(-max_seq_len // N)
    num_blocks = num_seqs * width + spare_blocks
    free = list(map(int, rng.permutation(num_blocks)))
    table = rng.choice(np.array([-1, 2**31 - 1, num_blocks], np.int64), (count, width + 2))
    for s in range(num_seqs):
        needed = -(-int(seq_lens[s]) // N)
        shared = common_prefix_blocks if s else 0
        donor = 0
        if share_prefixes and s and not common and rng.random() < 0.5:
            donor = int(rng.integers(0, s))
            shared = int(min(contexts[donor], contexts[s]) // N)
        table[s, :shared] = table[donor, :shared]
        table[s, shared:needed] = [free.pop() for _ in range(needed - shared)]

    starts = np.concatenate([[0], np.cumsum(query_lens)])
    positions, slots = np.zeros(T, np.int64), np.full(T, -1, np.int64)
    used = np.zeros((num_blocks, N), bool)
    for s, (q, n) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first = max(n - q - sliding_window + 1, 0) if sliding_window and q else 0
        p = np.arange(first, n)
        used[table[s, p // N], p % N] = True
        new = np.arange(max(n - q, 0), n) if writes else np.arange(q)
        positions[starts[s] : starts[s + 1]] = new
        if writes:
            slots[starts[s] : starts[s + 1]] = table[s, new // N] * N + new % N

    def draw(*shape: int) -> np.ndarray:
        return round_to(rng.standard_normal(shape), dtype)

    live = slots >= 0
    news, caches, factors = [], [], []
    for _ in range(2):
        new = draw(L, T, num_kv_heads, D)
        new[:, total:] = np.nan
        stored = draw(L, num_blocks, N, num_kv_heads, D)
        stored[:, slots[live] // N, slots[live] % N] = new[:, live]
        scale = _scales(rng, scales if cache_dtype in FP8_DTYPES else "one", L, num_kv_heads)
        stored = quantize(stored, cache_dtype, scale.reshape(L, 1, 1, -1, 1))
        stored[:, ~used] = np.nan
        news.append(new)
        caches.append(stored)
        factors.append(scale)

    q_scale = None
    query = rng.standard_normal((T, num_heads, D))
    if query_dtype in FP8_DTYPES:
        q_scale = 0.05
        query = round_to(query / q_scale, query_dtype, saturate=True)
    else:
        query = round_to(query, query_dtype)
    query[total:] = np.nan
    metadata = AttentionMetadata(
        *(jnp.array(array, jnp.int32) for array in (starts, seq_lens, table, slots)),
        max_query_len=1 if kind == "decode" else max_query_len,
        max_seq_len=max_seq_len,
        causal=causal,
    )
    return Batch(
        query=query,
        new_keys=news[0],
        new_values=news[1],
        positions=positions.astype(np.int32),
        key_cache=caches[0],
        value_cache=caches[1],
        query_lens=query_lens,
        seq_lens=seq_lens,
        metadata=metadata,
        k_scale=factors[0],
        v_scale=factors[1],
        q_scale=q_scale,
    )


def _scales(rng: np.random.Generator, kind: str, layers: int, heads: int) -> np.ndarray:
    """Scales far from 1 and from each other: N(0, 1) fills an fp8 cache's range to about a hundred."""
    shape = {"one": (layers,), "layer": (layers,), "head": (layers, heads)}[kind]
    return np.ones(shape, np.float32) if kind == "one" else rng.uniform(0.03, 0.1, shape).astype(np.float32)
