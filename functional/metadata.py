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
from .html import table
from .integers import INT32_MAX, narrow, saturate
from .pytrees import equal_by_value, register_for_export

STATIC_FIELDS = ("max_query_len", "max_seq_len", "causal", "block_size")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["query_start_loc", "seq_lens", "block_table", "slot_mapping"],
    meta_fields=list(STATIC_FIELDS),
)
@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """A ragged batch of S sequences over a flat axis of T tokens; a pytree whose last four fields are static.

    Two are equal where their static fields and all arrays are equal, in dtype, shape and value; under tracing `==` raises TypeError. They
    have no hash.

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

    def __eq__(self, other: object) -> bool:
        return equal_by_value(self, other) if isinstance(other, AttentionMetadata) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal by value, and arrays have no hash

    def _repr_html_(self) -> str:
        arrays = {name: getattr(self, name) for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")}
        seqs, tokens = self.seq_lens.shape[0], self.slot_mapping.shape[0]
        static = ", ".join(f"{name} {getattr(self, name)}" for name in STATIC_FIELDS)
        title = f"AttentionMetadata: {seqs} sequences, {tokens} tokens; {static}"
        if any(isinstance(array, (Tracer, jax.ShapeDtypeStruct)) for array in arrays.values()):
            return table(title, [(name, f"{array.dtype} {list(array.shape)}") for name, array in arrays.items()])
        starts, lens, blocks, slots = (np.asarray(array).astype(np.int64) for array in arrays.values())
        rows = []
        for s in range(min(seqs, _SHOWN_SEQUENCES)):
            used = self.block_size and -(-int(lens[s]) // self.block_size)
            listed = _listed(blocks[s] if used is None else blocks[s, :used])
            rows.append((s, starts[s + 1] - starts[s], lens[s], listed, _listed(slots[starts[s] : starts[s + 1]])))
        if seqs > _SHOWN_SEQUENCES:
            rows.append((f"{seqs - _SHOWN_SEQUENCES} more", "", "", "", ""))
        padding = tokens - int(starts[-1])
        rows.append(("padding", padding, "", "", _listed(slots[starts[-1] :])) if padding > 0 else ())
        head = ("sequence", "new tokens", "tokens in the cache", "blocks", "slots of the new tokens")
        return table(title, [row for row in rows if row], head=head)


_SHOWN_SEQUENCES, _SHOWN_NUMBERS = 12, 10


def _listed(numbers: np.ndarray) -> str:
    """Numbers in a row, the middle of many left out."""
    texts = list(map(str, numbers.tolist()))
    return " ".join(texts if len(texts) <= _SHOWN_NUMBERS else [*texts[: _SHOWN_NUMBERS - 2], "...", texts[-1]])


register_for_export(AttentionMetadata, STATIC_FIELDS)


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
