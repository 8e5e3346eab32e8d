"""What one step attends to: where each sequence's queries, keys and new slots are."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from .cache import CacheSpec
from .config import check_positive_int, is_array
from .errors import bad_type, bad_value
from .integers import INT32_MAX, narrow, saturate


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["query_start_loc", "seq_lens", "block_table", "slot_mapping"],
    meta_fields=["max_query_len", "max_seq_len", "causal", "block_size"],
)
@dataclass(frozen=True)
class AttentionMetadata:
    """A ragged batch of S sequences over a flat axis of T tokens; a pytree whose last four fields are static.

    Attributes:
      query_start_loc: i32[S+1], prefix sums of the query lengths; tokens at or past its last entry are padding.
      seq_lens: i32[S], tokens of each sequence in the cache, this step's included.
      block_table: i32[S, M], physical block of each logical block; entries that no position below `seq_lens` needs may be anything.
      slot_mapping: i32[T] or i64[T], where each token's key and value go: block * block_size + offset; negative slots are skipped.
      max_query_len: an upper bound of the query lengths.
      max_seq_len: an upper bound of `seq_lens`; None is the table's width, which never retraces.
      causal: False is cross attention: every query sees the whole of its sequence.
      block_size: tokens a block of the table, or None where it is not stated. Every function that also takes a cache compares the two.
    """

    query_start_loc: Int[Array, " S+1"]
    seq_lens: Int[Array, " S"]
    block_table: Int[Array, "S M"]
    slot_mapping: Int[Array, " T"]
    max_query_len: int = field(kw_only=True)
    max_seq_len: int | None = field(default=None, kw_only=True)
    causal: bool = field(default=True, kw_only=True)
    block_size: int | None = field(default=None, kw_only=True)


def bucket(length: int, smallest: int = 16) -> int:
    """The power of two at or above `length`, at least `smallest`: shapes and static maxima that grow step by step share a trace."""
    return max(smallest, 1 << max(0, int(length) - 1).bit_length())


def _host_ints(name: str, values: Any, ndim: int) -> np.ndarray:
    try:
        array = np.asarray(values)
    except Exception:
        bad_type(name, values, "concrete integers: make_metadata runs on the host, outside jit")
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != ndim or array.dtype.kind not in "iu":
        bad_type(name, array, f"integers in {ndim} dimension{'s' if ndim > 1 else ''}")
    return array.astype(np.int64)


def make_metadata(
    query_lens: Any,
    seq_lens: Any,
    block_table: Any,
    *,
    block_size: int,
    num_tokens: int | None = None,
    num_seqs: int | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    causal: bool = True,
) -> AttentionMetadata:
    """Builds the metadata of one step on the host.

    Args:
      query_lens: [S] new tokens of each sequence in this step; 0 is allowed.
      seq_lens: [S] tokens of each sequence after this step. Where `causal`, at least `query_lens`.
      block_table: [S, M] physical block ids.
      block_size: tokens a block.
      num_tokens: pads the token axis to this many; default: no padding.
      num_seqs: pads the sequence axis to this many; default: no padding. Padded sequences are empty.
      max_query_len, max_seq_len: static upper bounds. Default: the largest value, rounded up to a power of two (a single-token step
        stays 1), so that a batch that grows step by step does not retrace; `max_seq_len` is at most the table's width.
      causal: False for cross attention.

    Returns:
      Metadata of fresh device arrays (later changes to the arguments do not reach it). A token whose position has no block in the table
      (past its width, or a negative entry) gets slot -1.

    Raises:
      ValueError, TypeError: names the argument and, where it is one sequence's, the sequence.
    """
    check_positive_int("block_size", block_size)
    queries, lengths = _host_ints("query_lens", query_lens, 1), _host_ints("seq_lens", seq_lens, 1)
    table = _host_ints("block_table", block_table, 2)
    count = len(queries)
    if len(lengths) != count:
        bad_value("seq_lens", lengths, f"one per query length ({count})")
    if len(table) != count:
        bad_value("block_table", table, f"one row per sequence ({count})")
    for name, values in (("query_lens", queries), ("seq_lens", lengths)):
        if np.any((values < 0) | (values > INT32_MAX)):
            where = int(np.argmax((values < 0) | (values > INT32_MAX)))
            bad_value(f"{name}[{where}]", int(values[where]), "in [0, 2**31)")
    if causal and np.any(lengths < queries):
        where = int(np.argmax(lengths < queries))
        bad_value(
            f"seq_lens[{where}]", int(lengths[where]), f"at least query_lens[{where}] = {int(queries[where])}: it counts this step's tokens"
        )
    total = int(queries.sum())
    tokens = total if num_tokens is None else num_tokens
    seqs = count if num_seqs is None else num_seqs
    if tokens < total:
        bad_value("num_tokens", tokens, f"at least the number of query tokens ({total})")
    if seqs < count:
        bad_value("num_seqs", seqs, f"at least the number of sequences ({count})")
    longest_query, longest = int(queries.max(initial=0)), int(lengths.max(initial=0))
    width = table.shape[1] * block_size
    if max_query_len is None:
        max_query_len = 1 if longest_query <= 1 else bucket(longest_query)
    elif max_query_len < longest_query:
        bad_value("max_query_len", max_query_len, f"at least the longest query ({longest_query})")
    if max_seq_len is None:
        max_seq_len = max(longest, min(bucket(longest, 128), width))
    elif max_seq_len < longest:
        bad_value("max_seq_len", max_seq_len, f"at least the longest sequence ({longest})")

    starts = np.zeros(seqs + 1, np.int32)
    starts[1 : count + 1] = np.cumsum(queries)
    starts[count + 1 :] = total
    padded_lens = np.zeros(seqs, np.int32)
    padded_lens[:count] = lengths
    padded_table = np.zeros((seqs, table.shape[1]), np.int32)
    padded_table[:count] = np.clip(table, -1, INT32_MAX)

    sequence = np.repeat(np.arange(count), queries)
    position = np.arange(total) - starts[sequence] + (lengths - queries)[sequence]
    logical = position // block_size
    inside = (position >= 0) & (logical < table.shape[1])
    block = np.where(inside, table[sequence, np.where(inside, logical, 0)] if table.shape[1] else -1, -1)
    slots = np.full(tokens, -1, np.int64)
    slots[:total] = np.where(block >= 0, block * block_size + position % block_size, -1)
    if np.any(slots > INT32_MAX):
        bad_value("block_table", int(slots.max()) // block_size, "a block whose slots lie below 2**31")
    return AttentionMetadata(
        *(jnp.array(array, jnp.int32) for array in (starts, padded_lens, padded_table, slots)),
        max_query_len=int(max_query_len),
        max_seq_len=int(max_seq_len),
        causal=bool(causal),
        block_size=int(block_size),
    )


def check_metadata(metadata: Any, spec: CacheSpec | None = None) -> AttentionMetadata:
    """Checks the static facts of `metadata` and brings its integers to int32.

    Args:
      metadata: what the caller gave.
      spec: the cache that the table points into; None where there is none.

    Returns:
      The same metadata as i32 JAX arrays; ids and slots that int32 can't hold stay outside the cache. With `spec` its `block_size` is the
      cache's, stated or not, so that equal calls share a trace.

    Raises:
      ValueError, TypeError: a rank, dtype or size that does not fit; a block size that is not the cache's.
    """
    if not isinstance(metadata, AttentionMetadata):
        bad_type("metadata", metadata, "AttentionMetadata (see make_metadata)")
    for name, ndim in (("query_start_loc", 1), ("seq_lens", 1), ("block_table", 2), ("slot_mapping", 1)):
        array = getattr(metadata, name)
        if not is_array(array) or len(array.shape) != ndim:
            bad_value(f"metadata.{name}", array, f"an array of {ndim} dimension{'s' if ndim > 1 else ''}")
        if not jnp.issubdtype(array.dtype, jnp.integer):
            bad_type(f"metadata.{name}", array, "of an integer dtype")
    seqs = metadata.seq_lens.shape[0]
    if metadata.query_start_loc.shape[0] != seqs + 1:
        bad_value("metadata.query_start_loc", metadata.query_start_loc, f"of shape [S+1] = [{seqs + 1}], as seq_lens has {seqs}")
    if metadata.block_table.shape[0] != seqs:
        bad_value("metadata.block_table", metadata.block_table, f"of shape [S, M] with S = {seqs}")
    for name in ("max_query_len", "max_seq_len"):
        value = getattr(metadata, name)
        if value is None and name == "max_seq_len":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
            bad_type(f"metadata.{name}", value, "a static int, at least 0")
    if not isinstance(metadata.causal, bool):
        bad_type("metadata.causal", metadata.causal, "a static bool")
    if metadata.block_size is not None:
        check_positive_int("metadata.block_size", metadata.block_size)
        if spec is not None and metadata.block_size != spec.block_size:
            bad_value(
                "metadata.block_size", metadata.block_size, f"the cache's {spec.block_size}: its slots and table count blocks of that size"
            )
    blocks, slots = (INT32_MAX, INT32_MAX) if spec is None else (spec.num_blocks, spec.num_slots)
    return replace(
        metadata,
        query_start_loc=saturate(metadata.query_start_loc),
        seq_lens=saturate(metadata.seq_lens),
        block_table=narrow(metadata.block_table, blocks),
        slot_mapping=narrow(metadata.slot_mapping, slots),
        block_size=metadata.block_size if spec is None else spec.block_size,
    )


def validate_metadata(metadata: AttentionMetadata, spec: CacheSpec) -> None:
    """Checks the values of `metadata` against a cache; eager, on the host (it waits for the arrays).

    Raises:
      ValueError: names the sequence or token, what was found and the rule: query starts that do not rise from 0, a sequence shorter than
        its queries, maxima below the data, a needed block outside [0, num_blocks) or twice in one sequence, a slot past the cache, two
        tokens for one slot.
      TypeError: under tracing, where there are no values to check.
    """
    check_metadata(metadata)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(metadata)):
        raise TypeError("validate_metadata reads values: call it outside jit, on concrete metadata")
    starts, lengths, table, slots = (
        np.asarray(getattr(metadata, name)).astype(np.int64) for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    )
    if starts[0] != 0:
        bad_value("query_start_loc[0]", int(starts[0]), "0")
    queries = np.diff(starts)
    for s, (q, n) in enumerate(zip(queries, lengths, strict=True)):
        if q < 0:
            bad_value(f"query_start_loc[{s + 1}]", int(starts[s + 1]), f"at least query_start_loc[{s}] = {int(starts[s])} (sequence {s})")
        if q > metadata.max_query_len:
            bad_value("max_query_len", metadata.max_query_len, f"at least the {q} queries of sequence {s}")
        if n < 0:
            bad_value(f"seq_lens[{s}]", int(n), "at least 0")
        if metadata.causal and n < q:
            bad_value(f"seq_lens[{s}]", int(n), f"at least the {q} queries of sequence {s}: it counts this step's tokens")
        if metadata.max_seq_len is not None and n > metadata.max_seq_len:
            bad_value("max_seq_len", metadata.max_seq_len, f"at least seq_lens[{s}] = {n}")
        needed = -(-int(n) // spec.block_size)
        if needed > table.shape[1]:
            bad_value(f"block_table[{s}]", f"{table.shape[1]} blocks wide", f"{needed} blocks wide for seq_lens[{s}] = {n}")
        used = table[s, :needed]
        outside = (used < 0) | (used >= spec.num_blocks)
        if np.any(outside):
            at = int(np.argmax(outside))
            bad_value(f"block_table[{s}, {at}]", int(used[at]), f"a block in [0, num_blocks = {spec.num_blocks}), which sequence {s} needs")
        if len(np.unique(used)) != needed:
            repeated = next(b for i, b in enumerate(used) if b in used[:i])
            bad_value(f"block_table[{s}]", used.tolist(), f"distinct blocks: sequence {s} has block {repeated} twice")
    if starts[-1] > len(slots):
        bad_value("query_start_loc[-1]", int(starts[-1]), f"at most the {len(slots)} tokens of slot_mapping")
    if np.any(slots >= spec.num_slots):
        at = int(np.argmax(slots >= spec.num_slots))
        bad_value(f"slot_mapping[{at}]", int(slots[at]), f"below num_blocks * block_size = {spec.num_slots}, or negative to skip the token")
    live = slots[slots >= 0]
    values, counts = np.unique(live, return_counts=True)
    if np.any(counts > 1):
        twice = int(values[np.argmax(counts > 1)])
        tokens = np.flatnonzero(slots == twice).tolist()
        bad_value("slot_mapping", f"{twice} for tokens {tokens}", "one slot per token: two sequences write one block")
