"""A check of a step's metadata by value: what its slots must be follows from its table."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .cache import CacheSpec
from .config import check_sliding_window
from .errors import bad_type, bad_value
from .metadata import AttentionMetadata, check_metadata
from .metadata_builders import host_integers


def validate_metadata(metadata: AttentionMetadata, spec: CacheSpec, *, writes: bool = True, sliding_window: Any = None) -> None:
    """Checks the values of `metadata` against a cache; eager, on the host (it waits for the arrays).

    Args:
      metadata: the step's.
      spec: of the cache that the step reads and writes.
      writes: whether the step writes its slots. False (a layer that shares another's cache, a later step of cross attention) leaves out all
        rules of writing: slots, and blocks that more than one position shares.
      sliding_window: the layer's, in tokens. Entries of blocks wholly before the window of every query are then free, as vLLM's null block
        or -1. None, 0 and -1: no window, so every block below `seq_lens` is needed.

    Raises:
      ValueError: names the sequence or token, what was found and the rule: another block size than the cache's; query starts that do not
        rise from 0; maxima below the data; a needed block outside [0, num_blocks). With `writes` also: a slot that is not the one that the
        table gives its token's position; a slot of a padding token; a written block that another sequence needs, or that is twice in its
        own. A negative slot writes nothing and is always allowed. Where `causal` is False the slots may be the queries' or, sequence after
        sequence, those of all cached tokens (the encoder's).
      TypeError: an argument of another type; under tracing, where there are no values to check.
    """
    if not isinstance(spec, CacheSpec):
        bad_type("spec", spec, "a CacheSpec")
    if not isinstance(writes, bool):
        bad_type("writes", writes, "a static bool")
    check_metadata(metadata, spec)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(metadata)):
        raise TypeError("validate_metadata reads values: call it outside jit, on concrete metadata")
    check_values(metadata, spec, writes=writes, window=check_sliding_window(sliding_window))


def check_values(
    metadata: AttentionMetadata, spec: CacheSpec, *, writes: bool, window: int | None, begin: np.ndarray | None = None
) -> None:
    """The part of `validate_metadata` that looks at values. It runs no JAX operation, so a host callback may call it.

    `begin`: the first key that some row of each sequence may see, where there are key ranges.
    """
    check_query_starts(metadata)
    step = _Step(
        starts=host_integers("query_start_loc", metadata.query_start_loc, 1),
        lengths=host_integers("seq_lens", metadata.seq_lens, 1),
        table=host_integers("block_table", metadata.block_table, 2),
        slots=host_integers("slot_mapping", metadata.slot_mapping, 1),
        metadata=metadata,
        spec=spec,
    )
    step.check_lengths()
    needed = step.needed_blocks(window, begin)
    if writes:
        step.check_slots()
        step.check_written_blocks(needed)


def check_query_starts(metadata: AttentionMetadata) -> None:
    """Query starts that rise from 0 by at most `max_query_len`; runs no JAX operation."""
    starts = host_integers("query_start_loc", metadata.query_start_loc, 1)
    if starts[0] != 0:
        bad_value("query_start_loc[0]", int(starts[0]), "0")
    queries, longest = np.diff(starts), metadata.max_query_len
    if np.any(queries < 0):
        s = int(np.argmax(queries < 0))
        bad_value(f"query_start_loc[{s + 1}]", int(starts[s + 1]), f"at least query_start_loc[{s}] = {int(starts[s])} (sequence {s})")
    if np.any(queries > longest):
        s = int(np.argmax(queries > longest))
        bad_value("max_query_len", longest, f"at least the {queries[s]} queries of sequence {s}")


@dataclass(frozen=True, eq=False)
class _Step:
    """The values of one step, int64 on the host."""

    starts: np.ndarray
    lengths: np.ndarray
    table: np.ndarray
    slots: np.ndarray
    metadata: AttentionMetadata
    spec: CacheSpec

    @property
    def queries(self) -> np.ndarray:
        return np.diff(self.starts)

    def check_lengths(self) -> None:
        width, longest = self.table.shape[1], self.metadata.max_seq_len
        for s, n in enumerate(self.lengths.tolist()):
            if n < 0:
                bad_value(f"seq_lens[{s}]", n, "at least 0")
            if longest is not None and n > longest:
                bad_value("max_seq_len", longest, f"at least seq_lens[{s}] = {n}")
            blocks = -(-n // self.spec.block_size)
            if blocks > width:
                bad_value(f"block_table[{s}]", f"{width} blocks wide", f"{blocks} blocks wide for seq_lens[{s}] = {n}")

    def needed_blocks(self, window: int | None, begin: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """(sequence, block) of every table entry that a query of this step or of a later one sees, all inside the pool."""
        first = np.zeros_like(self.lengths)
        if window is not None:  # the first query sees the farthest back
            first = np.maximum(self.lengths - self.queries - window + 1, 0)
        if begin is not None:
            first = np.maximum(first, begin)
        first = first // self.spec.block_size
        column = np.arange(self.table.shape[1])
        is_needed = (column >= first[:, None]) & (column < -(-self.lengths // self.spec.block_size)[:, None])
        outside = is_needed & ((self.table < 0) | (self.table >= self.spec.num_blocks))
        if np.any(outside):
            s, at = (int(i) for i in np.argwhere(outside)[0])
            rule = f"a block in [0, num_blocks = {self.spec.num_blocks}), which sequence {s} needs"
            bad_value(f"block_table[{s}, {at}]", int(self.table[s, at]), rule)
        sequence = np.broadcast_to(np.arange(len(self.table))[:, None], self.table.shape)
        return sequence[is_needed], self.table[is_needed]

    def expected(self, counts: np.ndarray, begin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sequence, slot) of `counts` tokens of each sequence from position `begin` on; -1 at a negative position."""
        sequence = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence] + begin[sequence]
        if not self.table.shape[1]:
            return sequence, np.full_like(position, -1)
        size = self.spec.block_size
        block = self.table[sequence, np.maximum(position, 0) // size]
        return sequence, np.where(position >= 0, block * size + position % size, -1)

    def written(self) -> tuple[np.ndarray, np.ndarray, str]:
        """(sequence, slot, what they are) of the tokens that the slots belong to."""
        queries = *self.expected(self.queries, self.lengths - self.queries), "query"
        if self.metadata.causal:
            return queries
        encoder = *self.expected(self.lengths, np.zeros_like(self.lengths)), "encoder"
        return queries if self._first_wrong(queries[1]) is None else encoder

    def _first_wrong(self, expected: np.ndarray) -> int | None:
        count = min(len(expected), len(self.slots))
        wrong = self.slots >= 0
        wrong[:count] &= self.slots[:count] != expected[:count]
        return int(np.argmax(wrong)) if np.any(wrong) else None

    def check_slots(self) -> None:
        if self.metadata.causal and self.starts[-1] > len(self.slots):
            bad_value("query_start_loc[-1]", int(self.starts[-1]), f"at most the {len(self.slots)} tokens of slot_mapping")
        if np.any(self.slots >= self.spec.num_slots):
            at = int(np.argmax(self.slots >= self.spec.num_slots))
            rule = f"below num_blocks * block_size = {self.spec.num_slots}, or negative to skip the token"
            bad_value(f"slot_mapping[{at}]", int(self.slots[at]), rule)
        sequence, expected, what = self.written()
        at = self._first_wrong(expected)
        if at is None:
            return
        if at >= len(expected):
            bad_value(
                f"slot_mapping[{at}]", int(self.slots[at]), f"negative: only the first {len(expected)} are {what} tokens, this is padding"
            )
        rule = (
            "negative, as its position is" if expected[at] < 0 else f"{int(expected[at])}, where the table has it, or negative to skip it"
        )
        bad_value(f"slot_mapping[{at}] (of the {what} token of sequence {int(sequence[at])})", int(self.slots[at]), rule)

    def check_written_blocks(self, needed: tuple[np.ndarray, np.ndarray]) -> None:
        sequence, expected, _ = self.written()
        count = min(len(expected), len(self.slots))
        live = self.slots[:count] >= 0
        writer, target = sequence[:count][live], self.slots[:count][live] // self.spec.block_size
        order = np.argsort(needed[1], kind="stable")
        owner, block = needed[0][order], needed[1][order]
        begin, end = np.searchsorted(block, target, side="left"), np.searchsorted(block, target, side="right")
        if not np.any(end - begin > 1):
            return
        token = int(np.argmax(end - begin > 1))
        s, owners = int(writer[token]), owner[begin[token] : end[token]]
        others = owners[owners != s]
        if len(others):
            rule = f"of blocks of its own where it writes: sequence {int(others[0])} needs block {int(target[token])} too"
        else:
            rule = f"of distinct blocks where it writes: sequence {s} has block {int(target[token])} twice"
        bad_value(f"block_table[{s}]", self.table[s].tolist(), rule)
