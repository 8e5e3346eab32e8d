"""The metadata builders of the two backends, as functions from metadata to metadata.

vLLM's builders copy the runner's common metadata into a backend's own class, and make the metadata that a graph is captured with. Here the
common metadata is `AttentionMetadata`, and what `forward` takes is either of the two.
"""

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..config import int_or_none
from ..errors import bad_type, bad_value
from ..metadata import STATIC_FIELDS, AttentionMetadata, check_metadata
from ..pytrees import register_for_export

_COMMON = tuple(f.name for f in fields(AttentionMetadata))
_ARRAYS = tuple(name for name in _COMMON if name not in STATIC_FIELDS)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[*_ARRAYS, "num_actual_tokens", "scheduler_metadata"],
    meta_fields=list(STATIC_FIELDS),
)
@dataclass(frozen=True, eq=False)
class RocmAttentionMetadata(AttentionMetadata):
    """`AttentionMetadata` with the fields that vLLM's builder adds.

    Attributes:
      num_actual_tokens: i32 scalar, query tokens without padding.
      scheduler_metadata: None; no kernel of the two backends reads it.
    """

    num_actual_tokens: Int[Array, ""] = field(kw_only=True)
    scheduler_metadata: Any = field(default=None, kw_only=True)


register_for_export(RocmAttentionMetadata, STATIC_FIELDS)


def plain_metadata(metadata: AttentionMetadata) -> AttentionMetadata:
    """The common part of either kind: what an implementation gets, so that both share a trace."""
    if type(metadata) is AttentionMetadata:
        return metadata
    return AttentionMetadata(**{name: getattr(metadata, name) for name in _COMMON})


def build(common_prefix_len: int, metadata: AttentionMetadata, *, fast_build: bool = False) -> RocmAttentionMetadata:
    """Port of `RocmAttentionMetadataBuilder.build`.

    Args:
      common_prefix_len: a static int that changes nothing, as in vLLM 0.33: these backends have no cascade attention
        (`purepage.cascade_attention` has).
      metadata: the step's common metadata (see `make_metadata`).
      fast_build: accepted as in vLLM, where it changes nothing for these backends.

    Returns:
      The same step as `RocmAttentionMetadata`.

    Raises:
      ValueError, TypeError: `metadata` is none, or `common_prefix_len` is no static int of at least 0.
    """
    metadata = check_metadata(metadata)
    length = int_or_none(common_prefix_len)
    if length is None or isinstance(common_prefix_len, bool):
        bad_type("common_prefix_len", common_prefix_len, "a static int")
    if length < 0:
        bad_value("common_prefix_len", length, "at least 0")
    tokens = metadata.num_actual_tokens if isinstance(metadata, RocmAttentionMetadata) else metadata.query_start_loc[-1]
    common = {name: getattr(metadata, name) for name in _COMMON}
    return RocmAttentionMetadata(**common, num_actual_tokens=jnp.asarray(tokens, jnp.int32))


def build_for_drafting(metadata: AttentionMetadata, draft_index: int) -> RocmAttentionMetadata:
    """Port of the builders' `build_for_drafting`: the same for every draft.

    Args:
      metadata: the draft step's common metadata.
      draft_index: which draft of the step; changes nothing for these backends.

    Returns:
      As `build`.
    """
    return build(0, metadata, fast_build=True)


def capture_metadata(metadata: AttentionMetadata, *, zero_query_starts: bool) -> RocmAttentionMetadata:
    """Metadata of the same shapes to warm up or record a step with: sequences of one token, so that recording costs little.

    With `zero_query_starts` no sequence has queries (ROCM_ATTN, whose prefill kernel would read past the lengths set here); without it
    query starts are kept (ROCM_AITER_UNIFIED_ATTN, whose replay needs them). All slots are -1, so that a warm-up step writes nothing.
    `num_actual_tokens` stays the step's.
    """
    built = build(0, metadata)
    starts = jnp.zeros_like(built.query_start_loc) if zero_query_starts else built.query_start_loc
    slots = jnp.full_like(built.slot_mapping, -1)
    return replace(built, seq_lens=jnp.ones_like(built.seq_lens), query_start_loc=starts, slot_mapping=slots)
