"""The checked, normalised form of each operation: what the public doors hand to an implementation.

A call is a pytree. Arrays are data; everything that decides which code is traced is static. Implementations trust it: shapes agree,
optional vectors are float32, integers are int32, a scale that a caller spelled as float, NumPy scalar, 0-d or [1] array has one form, so
that equal calls share a trace.
"""

from dataclasses import dataclass
from typing import dataclass_transform

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from .cache import KVCache
from .metadata import AttentionMetadata


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _call(*static: str):
    """A frozen dataclass that is a pytree, with these fields static."""

    def register(cls):
        cls = dataclass(frozen=True, kw_only=True)(cls)
        data = [name for name in cls.__dataclass_fields__ if name not in static]
        return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=list(static))

    return register


@_call("scale", "sliding_window", "logits_soft_cap", "output_dtype", "return_lse", "context_only")
class PagedAttentionCall:
    """Scores are `scale * score_scale * k_scale * <query, stored key>`."""

    query: Float[Array, "T Hq D"]
    cache: KVCache
    metadata: AttentionMetadata
    layer: Int[Array, ""]
    score_scale: Float[Array, ""] | None
    """Product of everything traced that multiplies the scores: `q_scale` and a traced `scale`."""
    alibi_slopes: Float[Array, " Hq"] | None
    sinks: Float[Array, " Hq"] | None
    qq_bias: Float[Array, "Lq Lk"] | None
    output_scale: Float[Array, ""] | None
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    output_dtype: np.dtype
    return_lse: bool
    context_only: bool = False
    """Only keys before this step's tokens are seen; positions stay those in the whole sequence. Causality and the far side of a window then
    hold by themselves. No public door sets it: `attention_with_new_tokens` does."""


@_call("scale", "sliding_window", "logits_soft_cap", "causal")
class EncoderAttentionCall:
    query: Float[Array, "T Hq D"]
    key: Float[Array, "T H D"]
    value: Float[Array, "T H D"]
    metadata: AttentionMetadata
    score_scale: Float[Array, ""] | None
    sinks: Float[Array, " Hq"] | None
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    causal: bool


@_call()
class UpdateCacheCall:
    """Rows of key and value at or past the end of `slot_mapping` have already been cut off."""

    cache: KVCache
    key: Float[Array, "T H D"]
    value: Float[Array, "T H D"]
    slot_mapping: Int[Array, " T"]
    layer: Int[Array, ""]


@_call("is_neox")
class RotaryCall:
    positions: Int[Array, " T"]
    query: Float[Array, "T Hq D"]
    key: Float[Array, "T H D"]
    cos_sin_cache: Float[Array, "P R"]
    is_neox: bool


@_call("is_neox")
class RopeUpdateCall:
    """`slot_mapping` is padded with -1 to T tokens: a token without a slot is rotated all the same."""

    query: Float[Array, "T Hq D"]
    key: Float[Array, "T H D"]
    value: Float[Array, "T H D"]
    positions: Int[Array, " T"]
    cos_sin_cache: Float[Array, "P R"]
    cache: KVCache
    slot_mapping: Int[Array, " T"]
    layer: Int[Array, ""]
    is_neox: bool


@_call("num_heads", "eps", "is_neox", "mrope_section", "is_interleaved")
class QkNormRopeUpdateCall:
    """`positions` is [T], or [3, T] where `mrope_section` is given."""

    qkv: Float[Array, "T C"]
    q_weight: Float[Array, " D"]
    k_weight: Float[Array, " D"]
    positions: Int[Array, "..."]
    cos_sin_cache: Float[Array, "P R"]
    cache: KVCache
    slot_mapping: Int[Array, " T"]
    layer: Int[Array, ""]
    num_heads: int
    eps: float
    is_neox: bool
    mrope_section: tuple[int, int, int] | None
    is_interleaved: bool


@_call()
class MergeCall:
    out_a: Float[Array, "T Hq D"]
    lse_a: Float[Array, "T Hq"]
    out_b: Float[Array, "T Hq D"]
    lse_b: Float[Array, "T Hq"]
