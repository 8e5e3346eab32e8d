"""Builders of `AttentionMetadata`: on the host for a batch of any kind, and traced for a decode step inside `jit`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .config import check_positive_int, int_or_none
from .errors import bad_type, bad_value
from .integers import INT32_MAX, as_integers, narrow, saturate
from .metadata import AttentionMetadata

FAR = 2**40
"""Past every slot and length: host integers are clipped to +-FAR, so that no product of two of them leaves int64."""


def bucket(length: int, smallest: int = 16) -> int:
    """The power of two at or above `length`, at least `smallest`: shapes and static maxima that grow step by step share a trace."""
    return max(smallest, 1 << max(0, int(length) - 1).bit_length())


def host_integers(name: str, values: Any, ndim: int) -> np.ndarray:
    """Concrete integers as int64, clipped to +-FAR."""
    array = as_integers(name, values, ndim)
    if isinstance(array, Tracer):
        bad_type(name, values, "concrete integers: this function runs on the host, outside jit")
    array = np.asarray(array)
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(FAR))
    return np.clip(array.astype(np.int64), -FAR, FAR)


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
      query_lens: [S] new tokens of each sequence in this step; 0 is allowed. Queries at positions below 0 (more queries than keys) have no
        slot and see no key.
      seq_lens: [S] tokens of each sequence after this step, at most its row of the table.
      block_table: [S, M] physical block ids. M = 0 is a batch without a cache (encoder attention): then nothing has a slot.
      block_size: tokens a block.
      num_tokens: pads the token axis to this many; default: no padding.
      num_seqs: pads the sequence axis to this many; default: no padding. Padded sequences are empty.
      max_query_len, max_seq_len: static upper bounds. Default: the largest value, rounded up to a power of two (a single-token step
        stays 1), so that a batch that grows step by step does not retrace; `max_seq_len` is at most the table's width.
      causal: False for cross attention: the queries have no slots in that cache, so all slots are -1 (see `cross_metadata`).

    Returns:
      Metadata of fresh device arrays (later changes to the arguments do not reach it). A token whose table entry is negative gets slot -1.

    Raises:
      ValueError: names the argument and, where it is one sequence's, the sequence: a negative length, a sequence that outgrows its row,
        sizes that do not agree, a bound below the data.
      TypeError: an argument that is not of integers, or traced.
    """
    batch = _Batch(query_lens, seq_lens, block_table, "seq_lens", block_size, causal)
    total = int(batch.query_lens.sum())
    tokens = _at_least("num_tokens", num_tokens, total, f"the number of query tokens ({total})")
    slots = np.full(tokens, -1, np.int64)
    if causal:
        sequence = np.repeat(np.arange(batch.count), batch.query_lens)
        first = np.cumsum(batch.query_lens) - batch.query_lens
        slots[:total] = batch.slots(sequence, np.arange(total) - first[sequence] + (batch.seq_lens - batch.query_lens)[sequence])
    return batch.metadata(slots, num_seqs, max_query_len, max_seq_len)


def cross_metadata(
    query_lens: Any,
    encoder_lens: Any,
    block_table: Any,
    *,
    block_size: int,
    write: bool,
    num_tokens: int | None = None,
    num_encoder_tokens: int | None = None,
    num_seqs: int | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
) -> AttentionMetadata:
    """Builds the metadata of a cross-attention step on the host: a decoder's queries over the encoder's cached tokens.

    Args:
      query_lens: [S] query tokens of each sequence in this step.
      encoder_lens: [S] tokens of each sequence's encoder, at most its row of the table.
      block_table: [S, M] physical block ids of the encoder's tokens.
      block_size: tokens a block.
      write: True in the first step, where the writer's key and value are the encoder's tokens, sequence after sequence. False later, when
        they are in the cache: the slots are then empty.
      num_tokens: rows of the query with its padding; only checked, as nothing here has that size.
      num_encoder_tokens: pads the slots to this many; default: no padding.
      num_seqs, max_query_len, max_seq_len: see `make_metadata`; `max_seq_len` bounds `encoder_lens`.

    Returns:
      Metadata with `causal=False`, `seq_lens` the encoder's lengths, and `slot_mapping` i32[sum of encoder_lens, padded] or i32[0].

    Raises:
      ValueError, TypeError: see `make_metadata`.
    """
    if not isinstance(write, bool):
        bad_type("write", write, "a static bool")
    batch = _Batch(query_lens, encoder_lens, block_table, "encoder_lens", block_size, False)
    total, written = int(batch.query_lens.sum()), int(batch.seq_lens.sum()) if write else 0
    _at_least("num_tokens", num_tokens, total, f"the number of query tokens ({total})")
    if not write and num_encoder_tokens is not None:
        bad_value("num_encoder_tokens", num_encoder_tokens, "None where nothing is written")
    slots = np.full(_at_least("num_encoder_tokens", num_encoder_tokens, written, f"the number of encoder tokens ({written})"), -1, np.int64)
    if write:
        sequence = np.repeat(np.arange(batch.count), batch.seq_lens)
        slots[:written] = batch.slots(sequence, np.arange(written) - (np.cumsum(batch.seq_lens) - batch.seq_lens)[sequence])
    return batch.metadata(slots, num_seqs, max_query_len, max_seq_len)


def decode_metadata(seq_lens: Any, block_table: Any, *, block_size: int, max_seq_len: int | None = None) -> AttentionMetadata:
    """The metadata of a decode step, one new token a sequence, from arrays that may be traced: a whole decode loop fits in one `jit`.

    Args:
      seq_lens: [S] tokens of each sequence, this step's one included; 0 is an empty sequence, whose row sees no key and has no slot.
      block_table: [S, M] physical block ids.
      block_size: tokens a block, static.
      max_seq_len: a static upper bound of `seq_lens`; None is the table's width, which serves every step of a loop.

    Returns:
      Metadata whose token s is sequence s's, at position `seq_lens[s] - 1`. A position past the row, or in a negative entry, has slot -1.

    Raises:
      ValueError, TypeError: names the argument: a rank, a dtype, or sizes that do not agree. Values are not looked at.
    """
    check_positive_int("block_size", block_size)
    lengths = saturate(as_integers("seq_lens", seq_lens, 1))
    table = narrow(as_integers("block_table", block_table, 2), INT32_MAX)
    count, width = table.shape
    if lengths.shape[0] != count:
        bad_value("block_table", table, f"one row per sequence ({lengths.shape[0]})")
    if max_seq_len is not None:
        max_seq_len = _static_length("max_seq_len", max_seq_len)
    position = lengths - 1
    logical = position // block_size
    if width:
        inside = (position >= 0) & (logical < width)
        block = jnp.take_along_axis(table, jnp.where(inside, logical, 0)[:, None], axis=1, mode="clip")[:, 0]
        has_slot = inside & (block >= 0) & (block <= (INT32_MAX - block_size + 1) // block_size)
        slots = jnp.where(has_slot, block * block_size + position % block_size, -1)
    else:
        slots = jnp.full_like(lengths, -1)
    return AttentionMetadata(
        jnp.arange(count + 1, dtype=jnp.int32),
        lengths,
        table,
        slots,
        max_query_len=1,
        max_seq_len=max_seq_len,
        block_size=int(block_size),
    )


class _Batch:
    """The checked arguments that host builders share. `keys` names the lengths in errors."""

    def __init__(self, query_lens: Any, seq_lens: Any, block_table: Any, keys: str, block_size: int, causal: bool) -> None:
        if not isinstance(causal, bool):
            bad_type("causal", causal, "a static bool")
        self.block_size, self.causal, self.keys = check_positive_int("block_size", block_size), causal, keys
        self.query_lens, self.seq_lens = host_integers("query_lens", query_lens, 1), host_integers(keys, seq_lens, 1)
        self.table = host_integers("block_table", block_table, 2)
        self.count = len(self.query_lens)
        if len(self.seq_lens) != self.count:
            bad_value(keys, self.seq_lens, f"one per query length ({self.count})")
        if len(self.table) != self.count:
            bad_value("block_table", self.table, f"one row per sequence ({self.count})")
        blocks = self.table.shape[1]
        self.width = blocks * self.block_size
        for name, values in (("query_lens", self.query_lens), (keys, self.seq_lens)):
            self._check(name, values, (values < 0) | (values > INT32_MAX), "in [0, 2**31)")
        if int(self.query_lens.sum()) > INT32_MAX:
            bad_value("query_lens", self.query_lens, "of a sum below 2**31")
        if blocks:
            rule = f"at most {self.width}, the {blocks} blocks of {self.block_size} tokens of its row"
            self._check(keys, self.seq_lens, self.seq_lens > self.width, rule)

    @staticmethod
    def _check(name: str, values: np.ndarray, bad: np.ndarray, rule: str) -> None:
        if np.any(bad):
            where = int(np.argmax(bad))
            bad_value(f"{name}[{where}]", int(values[where]), rule)

    def slots(self, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
        """The slot of each token, int64; -1 for a negative position, a negative table entry, and where there is no table."""
        if not self.width:
            return np.full(len(sequence), -1, np.int64)
        block = np.where(position >= 0, self.table[sequence, np.maximum(position, 0) // self.block_size], -1)
        slots = np.where(block >= 0, block * self.block_size + position % self.block_size, -1)
        if np.any(slots > INT32_MAX):
            worst = int(np.argmax(slots))
            bad_value(f"block_table[{sequence[worst]}]", int(block[worst]), "a block whose slots lie below 2**31")
        return slots

    def metadata(self, slots: np.ndarray, num_seqs: Any, max_query_len: Any, max_seq_len: Any) -> AttentionMetadata:
        count, longest_query, longest = self.count, int(self.query_lens.max(initial=0)), int(self.seq_lens.max(initial=0))
        seqs = _at_least("num_seqs", num_seqs, count, f"the number of sequences ({count})")
        default = 1 if longest_query <= 1 else bucket(longest_query)
        most_queries = _at_least("max_query_len", max_query_len, longest_query, f"the longest query ({longest_query})", default)
        default = max(longest, min(bucket(longest, 128), self.width))
        most_keys = _at_least("max_seq_len", max_seq_len, longest, f"the longest of {self.keys} ({longest})", default)
        starts = np.zeros(seqs + 1, np.int32)
        starts[1 : count + 1] = np.cumsum(self.query_lens)
        starts[count + 1 :] = starts[count]
        lengths = np.zeros(seqs, np.int32)
        lengths[:count] = self.seq_lens
        table = np.zeros((seqs, self.table.shape[1]), np.int32)
        table[:count] = np.where((self.table >= 0) & (self.table <= INT32_MAX), self.table, -1)
        arrays = [jnp.array(array, jnp.int32) for array in (starts, lengths, table, slots)]
        return AttentionMetadata(*arrays, max_query_len=most_queries, max_seq_len=most_keys, causal=self.causal, block_size=self.block_size)


def _at_least(name: str, value: Any, least: int, rule: str, default: int | None = None) -> int:
    """A static int that the caller gave, at least `least`; None is the default."""
    if value is None:
        return least if default is None else default
    number = _static_length(name, value)
    if number < least:
        bad_value(name, number, f"at least {rule}")
    return number


def _static_length(name: str, value: Any) -> int:
    number = int_or_none(value)
    if number is None or isinstance(value, (bool, np.bool_)):
        bad_type(name, value, "None or a static int")
    if not 0 <= number <= INT32_MAX:
        bad_value(name, number, "in [0, 2**31)")
    return number
