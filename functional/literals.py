"""Closed sets of names, as types, so that a type checker finds a misspelt name; and the options of the attention functions."""

from typing import Any, Literal, TypedDict

Implementation = Literal["xla", "pallas", "triton", "aiter"]
Content = Literal["packed", "xpacked", "xpacked_interleaved_v", "shuffled", "flash"]
Order = Literal["LBHNC", "LHBNC"]


class AttentionOptions(TypedDict, total=False):
    """Options of `paged_attention` that do not change what is returned, for its overloads and those of `cascade_attention`."""

    layer: Any
    scale: Any
    sliding_window: Any
    key_range: Any
    logits_soft_cap: float | None
    alibi_slopes: Any
    sinks: Any
    q_scale: Any
    output_scale: Any
    output_dtype: Any
    qq_bias: Any
    implementation: Implementation | None


class CascadeOptions(AttentionOptions):
    """Those of `cascade_attention`."""

    common_prefix_len: int


class EncoderOptions(TypedDict, total=False):
    """Options of `encoder_attention` that do not change what is returned."""

    scale: Any
    sliding_window: Any
    key_range: Any
    logits_soft_cap: float | None
    alibi_slopes: Any
    sinks: Any
    causal: bool
    implementation: Implementation | None
