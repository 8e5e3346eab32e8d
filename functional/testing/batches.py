"""Random ragged batches for tests: everything that one step of paged attention takes, with NaN in every slot that no query sees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ..cache import FP8_DTYPES, CacheSpec, KVCache, cache_from_logical
from ..errors import bad_value
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
      sliding_window: the window that the batch was made for, or None.
      key_range: i32[T] first and past the last key of each token, or None.
      qq_bias: f32[Lq, Lk] or f32[S, Lq, Lk], or None.
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
    sliding_window: int | None = None
    key_range: tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]] | None = None
    qq_bias: Float[np.ndarray, "*S Lq Lk"] | None = None

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

    @property
    def masks(self) -> dict[str, Any]:
        """The masks that the batch was made for, as keyword arguments of attention and of `reference`."""
        given = {"sliding_window": self.sliding_window, "key_range": self.key_range, "qq_bias": self.qq_bias}
        return {name: value for name, value in given.items() if value is not None}

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
    new = int(rng.integers(min(2, most_new, most - 1), min(most_new, most - 1) + 1))
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


SCALES = ("one", "layer", "head")
"""Scales of an fp8 cache: 1 in every layer, one a layer, one a layer and KV head."""

BIASES = (None, "shared", "each")
"""Biases between this step's tokens: none, one table for all sequences, one for each."""


def random_batch(
    seed: int,
    *,
    kind: str = "mixed",
    num_seqs: int = 5,
    query_lens: Sequence[int] | None = None,
    seq_lens: Sequence[int] | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
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
    key_range: bool = False,
    qq_bias: str | None = None,
    poison_newest: bool = False,
    padding_tokens: int = 3,
    padding_seqs: int = 1,
    spare_blocks: int = 3,
    share_prefixes: bool = True,
    common_prefix_blocks: int = 0,
) -> Batch:
    """A ragged batch whose every shape follows from the options alone, so that one trace serves all seeds.

    Blocks are shuffled over the pool, sequences share prefix blocks, table entries that no position needs are -1, 2**31 - 1 or num_blocks.
    Every slot that no query sees is NaN, in keys and values: past each length, outside the window, outside every key range, under a bias of
    -inf. Values are N(0, 1).

    Args:
      seed: everything is a function of it and of the options.
      kind: one of `KINDS`: "mixed" (a chunk, a decode, a prefill, an empty sequence, one without new tokens, and again), "decode",
        "prefill", "chunked", or "cross" (not causal, query lengths independent of the cached ones, one of four sequences empty, nothing to
        write).
      num_seqs: sequences before padding.
      query_lens, seq_lens: exact lengths, in order, in place of drawn ones; `kind` then says only whether the batch is "cross". Either may
        be given alone: queries are then the whole sequence (1 for "decode").
      max_query_len: most new tokens of one sequence; static in the metadata (1 for "decode"). Default 12, or the longest given.
      max_seq_len: most tokens of one sequence, at least 2; static in the metadata. Default 60, or the longest given.
      block_size, num_heads, num_kv_heads, head_size, num_layers: N, Hq, H, D, L.
      dtype: the model's dtype, of the new keys and values.
      query_dtype: default `dtype`; an fp8 dtype gives codes and a `q_scale`.
      cache_dtype: default `dtype`.
      scales: one of `SCALES`.
      causal: False sees the whole sequence; "cross" is never causal.
      sliding_window: the window that the batch is for: keys before the window of every query are NaN, as freed blocks may be.
      key_range: draws a range of keys for each token, some empty: `batch.key_range`.
      qq_bias: one of `BIASES`: draws `batch.qq_bias` with -inf in a quarter of it and in one whole column.
      poison_newest: the last key and value of each sequence with several queries are NaN: under causality its last row alone is NaN.
      padding_tokens, padding_seqs: how many at least; T is rounded up to a multiple of 8 unless `padding_tokens` is 0.
      spare_blocks: blocks of the pool that no sequence owns.
      share_prefixes: sequences with at least one whole block of context may share their first blocks with another.
      common_prefix_blocks: this many blocks lead every sequence (cascade attention); empty and new sequences are then left out.

    Returns:
      The batch. `batch.masks` holds the keyword arguments of its masks: without them results are NaN.

    Raises:
      ValueError: an option is none of its closed set, or the exact lengths don't fit each other or the maxima.
    """
    for name, value, known in (("kind", kind, tuple(KINDS)), ("scales", scales, SCALES), ("qq_bias", qq_bias, BIASES)):
        if value not in known:
            bad_value(name, value, f"one of {', '.join(map(repr, known))}")
    rng = np.random.default_rng([seed, 20240229])
    N, L, D = block_size, num_layers, head_size
    dtype, cache_dtype = np.dtype(dtype), np.dtype(cache_dtype or dtype)
    query_dtype = np.dtype(query_dtype or dtype)
    common = common_prefix_blocks * N
    writes = kind != "cross"
    causal = causal and writes
    if query_lens is None and seq_lens is None:
        most_query, most_seq = 12 if max_query_len is None else max_query_len, 60 if max_seq_len is None else max_seq_len
        makers = tuple(m for m in KINDS[kind] if not common or m in (_chunk, _decode, _cross))
        drawn = [makers[i % len(makers)](rng, most_query, most_seq - common) for i in range(num_seqs)]
        pairs = [(drawn[i][0], drawn[i][1] + common) for i in rng.permutation(num_seqs)]
        most_query = 1 if kind == "decode" else most_query
        most_total = num_seqs * most_query
    else:
        pairs, most_query, most_seq = _exact_lengths(kind, query_lens, seq_lens, max_query_len, max_seq_len, common)
        num_seqs, most_total = len(pairs), sum(q for q, _ in pairs)
    lens = np.array([*pairs, *[(0, 0)] * padding_seqs], np.int64).reshape(-1, 2)
    queries, lengths = lens[:, 0], lens[:, 1]
    total, count = int(queries.sum()), len(lens)
    T = -(-(most_total + padding_tokens) // 8) * 8 if padding_tokens else total
    contexts = np.maximum(lengths - queries, 0) if writes else lengths

    width = -(-most_seq // N)
    num_blocks = num_seqs * width + spare_blocks
    free = list(map(int, rng.permutation(num_blocks)))
    table = rng.choice(np.array([-1, 2**31 - 1, num_blocks], np.int64), (count, width + 2))
    for s in range(num_seqs):
        needed = -(-int(lengths[s]) // N)
        shared = common_prefix_blocks if s else 0
        donor = 0
        if share_prefixes and s and not common and rng.random() < 0.5:
            donor = int(rng.integers(0, s))
            shared = int(min(contexts[donor], contexts[s]) // N)
        table[s, :shared] = table[donor, :shared]
        table[s, shared:needed] = [free.pop() for _ in range(needed - shared)]

    starts = np.concatenate([[0], np.cumsum(queries)])
    ranges = _key_ranges(seed, starts, lengths, T) if key_range else None
    bias = None if qq_bias is None else _biases(seed, count if qq_bias == "each" else None, most_query)
    positions, slots = np.zeros(T, np.int64), np.full(T, -1, np.int64)
    used = np.zeros((num_blocks, N), bool)
    for s, (q, n) in enumerate(zip(queries, lengths, strict=True)):
        rows = slice(starts[s], starts[s + 1])
        row_ranges = None if ranges is None else ranges[:, rows]
        table_bias = bias[s] if bias is not None and bias.ndim == 3 else bias
        seen = _seen(int(q), int(n), causal, sliding_window, row_ranges, table_bias)
        k = np.flatnonzero(seen.any(0)) if q else np.arange(n)
        if poison_newest and q > 1:
            k = k[k != n - 1]
        used[table[s, k // N], k % N] = True
        new = np.arange(n - q, n) if writes else np.arange(q)
        positions[rows] = np.maximum(new, 0)
        if writes:
            slots[rows] = np.where(new < 0, -1, table[s, new // N] * N + new % N)

    def draw(*shape: int) -> np.ndarray:
        return round_to(rng.standard_normal(shape), dtype)

    live = slots >= 0
    written = slots[live]
    hidden = np.flatnonzero(live)[~used[written // N, written % N]]
    news, caches, factors = [], [], []
    for _ in range(2):
        new = draw(L, T, num_kv_heads, D)
        new[:, total:] = np.nan
        stored = draw(L, num_blocks, N, num_kv_heads, D)
        stored[:, written // N, written % N] = new[:, live]
        scale = _scales(rng, scales if cache_dtype in FP8_DTYPES else "one", L, num_kv_heads)
        stored = quantize(stored, cache_dtype, scale.reshape(L, 1, 1, -1, 1))
        stored[:, ~used] = np.nan
        new[:, hidden] = np.nan
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
        *(jnp.array(array, jnp.int32) for array in (starts, lengths, table, slots)),
        max_query_len=most_query,
        max_seq_len=most_seq,
        causal=causal,
        block_size=N,
    )
    return Batch(
        query=query,
        new_keys=news[0],
        new_values=news[1],
        positions=positions.astype(np.int32),
        key_cache=caches[0],
        value_cache=caches[1],
        query_lens=queries,
        seq_lens=lengths,
        metadata=metadata,
        k_scale=factors[0],
        v_scale=factors[1],
        q_scale=q_scale,
        sliding_window=sliding_window,
        key_range=None if ranges is None else (ranges[0].astype(np.int32), ranges[1].astype(np.int32)),
        qq_bias=bias,
    )


def _exact_lengths(
    kind: str, query_lens: Sequence[int] | None, seq_lens: Sequence[int] | None, most_query: int | None, most_seq: int | None, common: int
) -> tuple[list[tuple[int, int]], int, int]:
    """Pairs of lengths as they were given, and the maxima of the metadata."""
    lengths = list(seq_lens if seq_lens is not None else query_lens or ())
    queries = list(query_lens) if query_lens is not None else [min(1, n) for n in lengths] if kind == "decode" else lengths
    if len(queries) != len(lengths):
        bad_value("query_lens", queries, f"as long as seq_lens, which has {len(lengths)}")
    for name, lens, most, least in (("seq_lens", lengths, most_seq, common), ("query_lens", queries, most_query, 0)):
        if any(n < least for n in lens):
            bad_value(name, lens, f"at least {least} each")
        if most is not None and max(lens, default=0) > most:
            bad_value(name, lens, f"at most {most} each, the maximum that is given")
    pairs = [(int(q), int(n)) for q, n in zip(queries, lengths, strict=True)]
    longest_query, longest = (max(lens, default=1) for lens in (queries, lengths))
    return pairs, max(1, longest_query) if most_query is None else most_query, max(1, longest) if most_seq is None else most_seq


def _seen(
    q: int, n: int, causal: bool, window: int | None, ranges: Int[np.ndarray, "2 q"] | None, bias: Float[np.ndarray, "Lq Lk"] | None
) -> np.ndarray:
    """Which keys [n] each of a sequence's queries [q] sees."""
    position, k = n - q + np.arange(q)[:, None], np.arange(n)[None]
    keep = (k <= position) if causal else np.ones((q, n), bool)
    if window is not None and window > 0:
        keep &= (position - k < window) & (causal | (k - position < window))
    if ranges is not None:
        keep &= (ranges[0][:, None] <= k) & (k < ranges[1][:, None])
    if bias is not None:
        rows, fresh = min(q, bias.shape[0]), min(q, bias.shape[1])
        first, left = max(n - q, 0), max(q - n, 0)
        keep[:rows, first : first + fresh - left] &= bias[:rows, left:fresh] != -np.inf
    return keep


def _key_ranges(seed: int, starts: np.ndarray, lengths: np.ndarray, tokens: int) -> np.ndarray:
    """A range of keys for each token, int64 [2, T]: inside the middle of its sequence, one of eight empty; padding tokens get nonsense."""
    rng = np.random.default_rng([seed, 1])
    ranges = np.repeat(np.array([[2**31 - 1], [-(2**31)]], np.int64), tokens, axis=1)
    for s, n in enumerate(map(int, lengths)):
        low, high = int(rng.integers(0, n // 3 + 1)), n - int(rng.integers(0, n // 3 + 1))
        for row in range(starts[s], starts[s + 1]):
            ranges[:, row] = np.sort(rng.integers(low, high + 1, 2))
            if rng.random() < 0.125:
                ranges[1, row] = ranges[0, row]
    return ranges


def _biases(seed: int, tables: int | None, length: int) -> np.ndarray:
    """Biases f32 [length, length], or [tables, length, length]: N(0, 1), -inf in a quarter and in one column of each."""
    rng = np.random.default_rng([seed, 2])
    bias = rng.standard_normal((tables or 1, length, length)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.25] = -np.inf
    bias[np.arange(len(bias)), :, rng.integers(0, length, len(bias))] = -np.inf
    return bias[0] if tables is None else bias


def _scales(rng: np.random.Generator, kind: str, layers: int, heads: int) -> np.ndarray:
    """Scales far from 1 and from each other: N(0, 1) fills an fp8 cache's range to about a hundred."""
    shape = (layers, heads) if kind == "head" else (layers,)
    return np.ones(shape, np.float32) if kind == "one" else rng.uniform(0.03, 0.1, shape).astype(np.float32)
