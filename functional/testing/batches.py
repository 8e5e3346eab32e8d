"""Random ragged batches for tests: everything that one step of paged attention takes, with NaN in every slot that no query sees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ..cache import FP8_DTYPES, CacheSpec, KVCache, cache_from_logical
from ..errors import bad_value
from ..literals import Content, Order
from ..metadata import AttentionMetadata
from .batch_options import BatchOptions, Bias, Dtypes, Lengths, Masks, Pool, Scales, Shape, grouped
from .reference_attention import reference_attention, round_to, to_float64
from .reference_cache import quantize
from .tolerances import assert_close


@dataclass(frozen=True, eq=False)
class Batch:
    """One step of a ragged batch: NumPy arrays, and the metadata of JAX arrays.

    Attributes:
      query: [T, Hq, D]; rows of padding tokens are NaN.
      new_keys, new_values: [L, T, H, D] and [L, T, H, Dv], this step's new tokens of each layer in the model's dtype; rows of padding
        tokens are NaN.
      positions: i32[T], position of each token in its sequence; 0 for padding.
      key_cache, value_cache: [L, B, N, H, D] and [L, B, N, H, Dv], logical caches *after* this step's write, in the cache's dtype; every
        unused slot is NaN.
      query_lens, seq_lens: [S] host ints, padded sequences included.
      metadata: query starts, lengths, table and slots as JAX arrays.
      k_scale, v_scale: f32[L] or f32[L, H]; 1 unless the cache is fp8.
      q_scale: factor of an fp8 query, None for any other.
      sliding_window: the window that the batch was made for, or None.
      key_range: i32[T] first and past the last key of each token, or None.
      qq_bias: f32[Lq, Lk] or f32[S, Lq, Lk], or None.
      scale, logits_soft_cap: on the scores, or None.
      alibi_slopes, sinks: f32[Hq], or None.
      content, order: the layout that `spec` and `cache` have unless told otherwise.

    NaN stands for zero where the batch was asked for with `unused="zero"`.
    """

    query: Float[np.ndarray, "T Hq D"]
    new_keys: Float[np.ndarray, "L T H D"]
    new_values: Float[np.ndarray, "L T H Dv"]
    positions: Int[np.ndarray, " T"]
    key_cache: Float[np.ndarray, "L B N H D"]
    value_cache: Float[np.ndarray, "L B N H Dv"]
    query_lens: Int[np.ndarray, " S"]
    seq_lens: Int[np.ndarray, " S"]
    metadata: AttentionMetadata
    k_scale: np.ndarray
    v_scale: np.ndarray
    q_scale: float | None
    sliding_window: int | None = None
    key_range: tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]] | None = None
    qq_bias: Float[np.ndarray, "*S Lq Lk"] | None = None
    scale: float | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Float[np.ndarray, " Hq"] | None = None
    sinks: Float[np.ndarray, " Hq"] | None = None
    content: Content = "packed"
    order: Order = "LBHNC"

    @property
    def key(self) -> Float[np.ndarray, "T H D"]:
        """This step's keys of layer 0."""
        return self.new_keys[0]

    @property
    def value(self) -> Float[np.ndarray, "T H Dv"]:
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

    @property
    def options(self) -> dict[str, Any]:
        """All that the batch was made for, masks and scores, as keyword arguments of attention and of `reference`."""
        given = {name: getattr(self, name) for name in ("scale", "logits_soft_cap", "alibi_slopes", "sinks", "q_scale")}
        return {**self.masks, **{name: value for name, value in given.items() if value is not None}}

    def pick(self, *names: str) -> dict[str, Any]:
        """`options`, for a kernel that takes these alone.

        Args:
          names: the options that the kernel takes.

        Returns:
          The options of those names; one that the batch does not have is left out.

        Raises:
          NotImplementedError: the batch has another option, which the kernel would leave out.
        """
        others = [name for name in self.options if name not in names]
        if others:
            raise NotImplementedError(f"the kernel takes no {', '.join(others)}")
        return self.options

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
            "content": self.content,
            "order": self.order,
        }
        if self.value_cache.shape[-1] != dim:
            extents["head_size_v"] = self.value_cache.shape[-1]
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

    def score_size(self, layer: int = 0) -> Float[np.ndarray, "T Hq"]:
        """A bound of the terms that a score of each row sums: |scale| * |q| * max |k| plus its biases. 0 for padding.

        The error of a score in float32 is in proportion to it, and is the relative error of its key's weight: see `assert_close`.
        """
        tokens, heads, dim = self.query.shape
        factor = abs((dim**-0.5 if self.scale is None else self.scale) * (1.0 if self.q_scale is None else self.q_scale))
        size = np.zeros((tokens, heads))
        group = heads // self.key_cache.shape[3]
        starts, table = (np.asarray(x) for x in (self.metadata.query_start_loc, self.metadata.block_table))
        N = self.key_cache.shape[2]
        for s, n in enumerate(map(int, self.seq_lens)):
            rows, k = slice(starts[s], starts[s + 1]), np.arange(n)
            keys = to_float64(self.key_cache[layer, table[s, k // N], k % N]) * self.k_scale[layer].reshape(1, -1, 1)
            norms = np.sqrt(np.sum(np.where(np.isfinite(keys), keys, 0.0) ** 2, axis=-1))
            longest = np.repeat(np.max(norms, axis=0, initial=0.0), group)
            size[rows] = factor * np.linalg.norm(to_float64(self.query[rows]), axis=-1) * longest
            if self.alibi_slopes is not None:
                size[rows] += np.abs(self.alibi_slopes) * n
            if self.qq_bias is not None:
                size[rows] += np.max(np.abs(self.qq_bias), where=np.isfinite(self.qq_bias), initial=0.0)
        return size

    def check(self, out: Any, lse: Any = None, *, layer: int = 0, compute_dtype: Any = None, padding: bool = True, what: str = "") -> None:
        """Asserts that a kernel's result for this batch and its `options` is right, within a tolerance that follows the size of the scores.

        Args:
          out: [T, Hq, Dv] in the dtype that the kernel chose.
          lse: f32[T, Hq], natural log; not compared where it is None.
          layer: the layer that was attended.
          compute_dtype: see `tolerance`; default the query's, or the model's if the output is wider.
          padding: False leaves the rows of padding tokens out.
          what: names the comparison in the message.

        Raises:
          AssertionError: a row is wrong; rows that must be NaN (a NaN key that the row sees) are not compared.
        """
        expected, expected_lse = self.reference(layer, **self.options)
        wanted = ~np.isnan(expected_lse).any(1) & (padding | (np.arange(len(expected)) < self.num_tokens))
        size = self.score_size(layer)[wanted]
        given = {"scores": size, "what": what}
        found = np.asarray(out)
        if found.shape != expected.shape:
            raise AssertionError(f"{what}{': ' if what else ''}shape is {found.shape}, not {expected.shape}")
        if compute_dtype is None and self.query.dtype.itemsize < found.dtype.itemsize:
            compute_dtype = self.query.dtype
        assert_close(found[wanted], expected[wanted], dtype=found.dtype, compute_dtype=compute_dtype, **given)
        if lse is not None:
            assert_close(np.asarray(lse)[wanted], expected_lse[wanted], dtype="lse", **given)


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


SCALES = get_args(Scales)
"""Scales of an fp8 cache: 1 in every layer, one a layer, one a layer and KV head."""

BIASES = (None, *get_args(Bias))
"""Biases between this step's tokens: none, one table for all sequences, one for each."""


def random_batch(seed: int, **options: Unpack[BatchOptions]) -> Batch:
    """A ragged batch whose every shape follows from the options alone, so that one trace serves all seeds.

    Blocks are shuffled over the pool, sequences share prefix blocks, table entries that no position needs are -1, 2**31 - 1 or num_blocks.
    Every slot that no query sees is NaN, in keys and values: past each length, outside the window, outside every key range, under a bias of
    -inf. Values are N(0, 1).

    Args:
      seed: everything is a function of it and of the options.
      options: those of six groups, which document them: `Lengths` (kind, exact or drawn lengths, padding), `Shape` (extents and layout),
        `Dtypes`, `Masks`, `Scores`, `Pool` (blocks, tables, what unused slots hold).

    Returns:
      The batch. `batch.options` holds the keyword arguments of its masks and scores: without the masks results are NaN.

    Raises:
      ValueError: an option is none of its closed set, or the exact lengths don't fit each other or the maxima.
      TypeError: there is no such option.
    """
    wanted, shape, dtypes, masks, scores, pool = grouped(options)
    rng = np.random.default_rng([seed, 20240229])
    writes = wanted.kind != "cross"
    causal = masks.causal and writes
    common = pool.common_prefix_blocks * shape.block_size
    pairs, most_query, most_seq, most_total = _lengths(rng, wanted, common)
    lens = np.array([*pairs, *[(0, 0)] * wanted.padding_seqs], np.int64).reshape(-1, 2)
    queries, lengths = lens[:, 0], lens[:, 1]
    starts = np.concatenate([[0], np.cumsum(queries)])
    total = int(starts[-1])
    T = -(-(most_total + wanted.padding_tokens) // 8) * 8 if wanted.padding_tokens else total

    contexts = np.maximum(lengths - queries, 0) if writes else lengths
    width = -(-most_seq // shape.block_size)
    num_blocks = len(pairs) * width + pool.spare_blocks
    table = _table(rng, lengths, contexts, len(pairs), width, num_blocks, shape.block_size, pool)

    ranges = _key_ranges(seed, starts, lengths, T) if masks.key_range else None
    bias = None if masks.qq_bias is None else _biases(seed, len(lens) if masks.qq_bias == "each" else None, most_query)
    positions, slots = _places(starts, lengths, table, T, shape.block_size, writes)
    used = _used(starts, lengths, table, (num_blocks, shape.block_size), causal, masks, ranges, bias)

    filler = np.nan if pool.unused == "nan" else 0.0
    sides = [
        _side(rng, size or shape.head_size, (T, total, num_blocks), slots, used, shape, dtypes, filler)
        for size in (shape.head_size, shape.head_size_v)
    ]
    if masks.poison_newest and filler == 0.0:
        _poison(sides, queries, lengths, table, slots, starts, shape.block_size)
    query, q_scale = _query(rng, (T, shape.num_heads, shape.head_size), dtypes.query_dtype)
    query[total:] = filler
    metadata = AttentionMetadata(
        *(jnp.array(array, jnp.int32) for array in (starts, lengths, table, slots)),
        max_query_len=most_query,
        max_seq_len=most_seq,
        causal=causal,
        block_size=shape.block_size,
    )
    extras = np.random.default_rng([seed, 3])
    slopes, sinks = (extras.standard_normal(shape.num_heads).astype(np.float32) for _ in range(2))
    return Batch(
        query=query,
        new_keys=sides[0].new,
        new_values=sides[1].new,
        positions=positions.astype(np.int32),
        key_cache=sides[0].stored,
        value_cache=sides[1].stored,
        query_lens=queries,
        seq_lens=lengths,
        metadata=metadata,
        k_scale=sides[0].scale,
        v_scale=sides[1].scale,
        q_scale=q_scale,
        sliding_window=masks.sliding_window,
        key_range=None if ranges is None else (ranges[0].astype(np.int32), ranges[1].astype(np.int32)),
        qq_bias=bias,
        scale=scores.scale,
        logits_soft_cap=scores.logits_soft_cap,
        alibi_slopes=0.3 * slopes if scores.alibi else None,
        sinks=sinks if scores.sinks else None,
        content=shape.content,
        order=shape.order,
    )


def _lengths(rng: np.random.Generator, wanted: Lengths, common: int) -> tuple[list[tuple[int, int]], int, int, int]:
    """(query and sequence length) of each sequence, the metadata's two maxima, and the most tokens that any seed may have."""
    if wanted.query_lens is not None or wanted.seq_lens is not None:
        pairs, most_query, most_seq = _exact_lengths(wanted, common)
        return pairs, most_query, most_seq, sum(q for q, _ in pairs)
    most_query = 12 if wanted.max_query_len is None else wanted.max_query_len
    most_seq = 60 if wanted.max_seq_len is None else wanted.max_seq_len
    makers = tuple(maker for maker in KINDS[wanted.kind] if not common or maker in (_chunk, _decode, _cross))
    if not makers:
        bad_value("common_prefix_blocks", common, f"0 with kind {wanted.kind!r}, whose sequences have no context")
    drawn = [makers[i % len(makers)](rng, most_query, most_seq - common) for i in range(wanted.num_seqs)]
    pairs = [(drawn[i][0], drawn[i][1] + common) for i in rng.permutation(wanted.num_seqs)]
    most_query = 1 if wanted.kind == "decode" else most_query
    return pairs, most_query, most_seq, wanted.num_seqs * most_query


def _exact_lengths(wanted: Lengths, common: int) -> tuple[list[tuple[int, int]], int, int]:
    """Pairs of lengths as they were given, and the maxima of the metadata."""
    query_lens, seq_lens, most_query, most_seq = wanted.query_lens, wanted.seq_lens, wanted.max_query_len, wanted.max_seq_len
    lengths = list(seq_lens if seq_lens is not None else query_lens or ())
    queries = list(query_lens) if query_lens is not None else [min(1, n) for n in lengths] if wanted.kind == "decode" else lengths
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


def _table(
    rng: np.random.Generator,
    lengths: np.ndarray,
    contexts: np.ndarray,
    num_seqs: int,
    width: int,
    num_blocks: int,
    block_size: int,
    pool: Pool,
) -> np.ndarray:
    """The block table, int64 [S, width + 2]: each sequence's blocks, some shared, and padding entries."""
    free = list(map(int, rng.permutation(num_blocks)))
    table = rng.choice(np.array([-1, 2**31 - 1, num_blocks], np.int64), (len(lengths), width + 2))
    if pool.table_padding == "zero":
        table[:] = 0
    for s in range(num_seqs):
        needed = -(-int(lengths[s]) // block_size)
        shared = pool.common_prefix_blocks if s else 0
        donor = 0
        if pool.share_prefixes and s and not pool.common_prefix_blocks and rng.random() < 0.5:
            donor = int(rng.integers(0, s))
            shared = int(min(contexts[donor], contexts[s]) // block_size)
        table[s, :shared] = table[donor, :shared]
        table[s, shared:needed] = [free.pop() for _ in range(needed - shared)]
    return table


def _places(
    starts: np.ndarray, lengths: np.ndarray, table: np.ndarray, tokens: int, block_size: int, writes: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Position and slot of each token, int64 [T]; 0 and -1 for padding."""
    positions, slots = np.zeros(tokens, np.int64), np.full(tokens, -1, np.int64)
    for s, n in enumerate(map(int, lengths)):
        rows, q = slice(starts[s], starts[s + 1]), int(starts[s + 1] - starts[s])
        new = np.arange(n - q, n) if writes else np.arange(q)
        positions[rows] = np.maximum(new, 0)
        if writes:
            slots[rows] = np.where(new < 0, -1, table[s, new // block_size] * block_size + new % block_size)
    return positions, slots


def _used(
    starts: np.ndarray,
    lengths: np.ndarray,
    table: np.ndarray,
    pool_shape: tuple[int, int],
    causal: bool,
    masks: Masks,
    ranges: np.ndarray | None,
    bias: np.ndarray | None,
) -> np.ndarray:
    """Which slots [B, N] a query sees. A sequence without queries is taken to be seen whole."""
    used, block_size = np.zeros(pool_shape, bool), pool_shape[1]
    for s, n in enumerate(map(int, lengths)):
        rows, q = slice(starts[s], starts[s + 1]), int(starts[s + 1] - starts[s])
        row_ranges = None if ranges is None else ranges[:, rows]
        table_bias = bias[s] if bias is not None and bias.ndim == 3 else bias
        seen = _seen(q, n, causal, masks.sliding_window, row_ranges, table_bias)
        k = np.flatnonzero(seen.any(0)) if q else np.arange(n)
        if masks.poison_newest and q > 1:
            k = k[k != n - 1]
        used[table[s, k // block_size], k % block_size] = True
    return used


@dataclass(frozen=True)
class _Side:
    """Keys or values: new [L, T, H, d], stored [L, B, N, H, d], scale [L] or [L, H]."""

    new: np.ndarray
    stored: np.ndarray
    scale: np.ndarray


def _side(
    rng: np.random.Generator,
    size: int,
    extents: tuple[int, int, int],
    slots: np.ndarray,
    used: np.ndarray,
    shape: Shape,
    dtypes: Dtypes,
    filler: float,
) -> _Side:
    """One side of the cache; `extents` are T, the tokens without padding, and B."""
    (T, total, num_blocks), N, H, L = extents, shape.block_size, shape.num_kv_heads, shape.num_layers
    live = slots >= 0
    written = slots[live]
    hidden = np.flatnonzero(live)[~used[written // N, written % N]]
    new = round_to(rng.standard_normal((L, T, H, size)), dtypes.dtype)
    new[:, total:] = filler
    stored = round_to(rng.standard_normal((L, num_blocks, N, H, size)), dtypes.dtype)
    stored[:, written // N, written % N] = new[:, live]
    scale = _scales(rng, dtypes.scales if dtypes.cache_dtype in FP8_DTYPES else "one", L, H)
    stored = quantize(stored, dtypes.cache_dtype, scale.reshape(L, 1, 1, -1, 1))
    stored[:, ~used] = filler
    new[:, hidden] = filler
    return _Side(new, stored, scale)


def _poison(
    sides: Sequence[_Side],
    queries: np.ndarray,
    lengths: np.ndarray,
    table: np.ndarray,
    slots: np.ndarray,
    starts: np.ndarray,
    block_size: int,
) -> None:
    """Makes the newest key and value of each sequence with several queries NaN, where unused slots are not."""
    for s, (q, n) in enumerate(zip(map(int, queries), map(int, lengths), strict=True)):
        if q > 1 and n:
            for side in sides:
                side.stored[:, table[s, (n - 1) // block_size], (n - 1) % block_size] = np.nan
                if slots[starts[s + 1] - 1] >= 0:
                    side.new[:, starts[s + 1] - 1] = np.nan


def _query(rng: np.random.Generator, shape: tuple[int, int, int], dtype: np.dtype) -> tuple[np.ndarray, float | None]:
    """The query, and the factor of an fp8 one."""
    query = rng.standard_normal(shape)
    if dtype in FP8_DTYPES:
        return round_to(query / _Q_SCALE, dtype, saturate=True), _Q_SCALE
    return round_to(query, dtype), None


_Q_SCALE = 0.05


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
