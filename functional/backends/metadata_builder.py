"""The metadata builders of the two backends, as functions from metadata to metadata.

vLLM's builders copy the runner's common metadata into a backend's own class, add the split of a cascade, and make the metadata that a graph
is captured with. Here the common metadata is `AttentionMetadata`, and what `forward` takes is either of the two.
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


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "query_start_loc",
        "seq_lens",
        "block_table",
        "slot_mapping",
        "cu_prefix_query_lens",
        "prefix_kv_lens",
        "suffix_kv_lens",
    ],
    meta_fields=[*STATIC_FIELDS, "common_prefix_len"],
)
@dataclass(frozen=True, eq=False)
class RocmAttentionMetadata(AttentionMetadata):
    """`AttentionMetadata` with the cascade's split, which both backends compute and neither uses.

    Attributes:
      common_prefix_len: tokens that all sequences share, static.
      cu_prefix_query_lens: i32[2], the prefix attended by all tokens as one sequence; None without a prefix, as the next two.
      prefix_kv_lens: i32[1].
      suffix_kv_lens: i32[S], tokens of each sequence after the prefix.
    """

    common_prefix_len: int = field(default=0, kw_only=True)
    cu_prefix_query_lens: Int[Array, " 2"] | None = field(default=None, kw_only=True)
    prefix_kv_lens: Int[Array, " 1"] | None = field(default=None, kw_only=True)
    suffix_kv_lens: Int[Array, " S"] | None = field(default=None, kw_only=True)

    @property
    def use_cascade(self) -> bool:
        return self.common_prefix_len > 0

    @property
    def num_actual_tokens(self) -> Int[Array, ""]:
        """Query tokens without padding."""
        return self.query_start_loc[-1]


register_for_export(RocmAttentionMetadata, (*STATIC_FIELDS, "common_prefix_len"))


_COMMON = tuple(f.name for f in fields(AttentionMetadata))


def plain_metadata(metadata: AttentionMetadata) -> AttentionMetadata:
    """The common part of either kind: what an implementation gets, so that both share a trace."""
    if type(metadata) is AttentionMetadata:
        return metadata
    return AttentionMetadata(**{name: getattr(metadata, name) for name in _COMMON})


def build(common_prefix_len: int, metadata: AttentionMetadata, *, fast_build: bool = False) -> RocmAttentionMetadata:
    """Port of `RocmAttentionMetadataBuilder.build`.

    Args:
      common_prefix_len: tokens of a prefix that all sequences share, static; 0 where there is no cascade, which is what `forward` takes.
      metadata: the step's common metadata (see `make_metadata`).
      fast_build: accepted as in vLLM, where it changes nothing for these backends.
    """
    check_metadata(metadata)
    length = int_or_none(common_prefix_len)
    if length is None or isinstance(common_prefix_len, bool):
        bad_type("common_prefix_len", common_prefix_len, "a static int")
    if length < 0:
        bad_value("common_prefix_len", length, "at least 0")
    cascade: dict[str, Any] = {}
    if length:
        total = jnp.asarray(metadata.query_start_loc[-1], jnp.int32)
        cascade = {
            "cu_prefix_query_lens": jnp.stack([jnp.zeros_like(total), total]),
            "prefix_kv_lens": jnp.array([length], jnp.int32),
            "suffix_kv_lens": jnp.asarray(metadata.seq_lens, jnp.int32) - length,
        }
    return RocmAttentionMetadata(**{name: getattr(metadata, name) for name in _COMMON}, common_prefix_len=length, **cascade)


def build_for_drafting(metadata: AttentionMetadata, draft_index: int) -> RocmAttentionMetadata:
    """Port of the builders' `build_for_drafting`: the same for every draft."""
    return build(0, metadata, fast_build=True)


def capture_metadata(metadata: AttentionMetadata, *, zero_query_starts: bool) -> RocmAttentionMetadata:
    """Metadata of the same shapes to warm up or record a step with: sequences of one token, so that recording costs little.

    With `zero_query_starts` no sequence has queries (ROCM_ATTN, whose prefill kernel would read past the lengths set here); without it
    query starts are kept (ROCM_AITER_UNIFIED_ATTN, whose replay needs them).
    """
    built = build(0, metadata)
    starts = jnp.zeros_like(built.query_start_loc) if zero_query_starts else built.query_start_loc
    return replace(built, seq_lens=jnp.ones_like(built.seq_lens), query_start_loc=starts)
