"""The checked, normalised form of each operation: what the public functions hand to an implementation.

A call is a pytree. Arrays are data; everything that decides which code is traced is static. Implementations trust it: shapes agree,
optional vectors are float32, integers are int32, and a scale has one form whether the caller passed a float, a NumPy scalar or an array of
shape () or [1], so that equal calls share a trace. Each field says how it is accounted for, see `purepage.functional.features`.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Array, Float, Int

from .cache import FP8_DTYPES, KVCache
from .features import Call, array, call_type, constant, option
from .metadata import AttentionMetadata


def _cache_features(cache: KVCache, *dtypes: np.dtype) -> Iterator[str]:
    """Features of a cache that is read by, or written from, arrays of these dtypes."""
    if cache.spec.head_size_v is not None:
        yield "head_size_v"
    if cache.spec.is_quantized:
        yield "quantized_cache"
        if cache.k_scale.ndim == 2 or cache.v_scale.ndim == 2:
            yield "scales_per_head"
        if cache.k_scale.ndim != cache.v_scale.ndim:
            yield "mixed_scale_ranks"
    elif {dtype for dtype in dtypes if dtype.itemsize > 1} - {cache.spec.dtype}:
        yield "mixed_dtypes"


@call_type
class PagedAttentionCall(Call):
    """Scores are `scale * score_scale * k_scale * <query, stored key>`."""

    query: Float[Array, "T Hq D"] = array(dtype=True)
    cache: KVCache = array()
    metadata: AttentionMetadata = array()
    layer: Int[Array, ""] = array()
    score_scale: Float[Array, ""] | None = option()
    """Product of all traced factors of the scores: `q_scale` and a traced `scale`."""
    alibi_slopes: Float[Array, " Hq"] | None = option()
    sinks: Float[Array, " Hq"] | None = option()
    qq_bias: Float[Array, "*S Lq Lk"] | None = option()
    key_range: tuple[Int[Array, " T"], Int[Array, " T"]] | None = option(default=None)
    traced_window: Int[Array, ""] | None = option(default=None)
    """A window as data: W, or INT32_MAX where it is off. `sliding_window` is then None."""
    output_scale: Float[Array, ""] | None = option()
    scale: float = constant()
    sliding_window: int | None = option(static=True)
    logits_soft_cap: float | None = option(static=True, unused=0.0)
    output_dtype: np.dtype = constant(dtype=True)
    return_lse: bool = option(static=True)
    context_only: bool = option(static=True, default=False)
    """Only keys before this step's tokens are seen; positions stay those in the whole sequence. Causality and the far side of a window then
    hold by themselves. No public function sets it: `attention_with_new_tokens` does."""

    def nested_features(self) -> Iterator[str]:
        yield from _cache_features(self.cache, self.query.dtype)
        if self.query.dtype in FP8_DTYPES:
            yield "quantized_query"
        if not self.metadata.causal:
            yield "non_causal"
        if self.qq_bias is not None and self.qq_bias.ndim == 3:
            yield "qq_bias_per_sequence"


@call_type
class EncoderAttentionCall(Call):
    query: Float[Array, "T Hq D"] = array(dtype=True)
    key: Float[Array, "T H D"] = array()
    value: Float[Array, "T H Dv"] = array()
    metadata: AttentionMetadata = array()
    score_scale: Float[Array, ""] | None = option()
    alibi_slopes: Float[Array, " Hq"] | None = option(default=None)
    sinks: Float[Array, " Hq"] | None = option()
    key_range: tuple[Int[Array, " T"], Int[Array, " T"]] | None = option(default=None)
    traced_window: Int[Array, ""] | None = option(default=None)
    scale: float = constant()
    sliding_window: int | None = option(static=True)
    logits_soft_cap: float | None = option(static=True, unused=0.0)
    causal: bool = option(static=True)
    return_lse: bool = option(static=True, default=False)

    def nested_features(self) -> Iterator[str]:
        if self.value.shape[2] != self.key.shape[2]:
            yield "head_size_v"


@call_type
class UpdateCacheCall(Call):
    """Rows of key and value at or past the end of `slot_mapping` have already been cut off."""

    cache: KVCache = array()
    key: Float[Array, "T H D"] = array(dtype=True)
    value: Float[Array, "T H Dv"] = array(dtype=True)
    slot_mapping: Int[Array, " T"] = array()
    layer: Int[Array, ""] = array()

    def nested_features(self) -> Iterator[str]:
        yield from _cache_features(self.cache, self.key.dtype, self.value.dtype)


def _rotary_features(cos_sin_cache: Array, head_size: int, is_neox: bool) -> Iterator[str]:
    if cos_sin_cache.shape[1] != head_size:
        yield "partial_rotary"
    if not is_neox:
        yield "gptj_rotary"


@call_type
class RotaryCall(Call):
    positions: Int[Array, " T"] = array()
    query: Float[Array, "T Hq D"] = array(dtype=True)
    key: Float[Array, "T H D"] = array(dtype=True)
    cos_sin_cache: Float[Array, "P R"] = array(dtype=True)
    is_neox: bool = constant()

    def nested_features(self) -> Iterator[str]:
        yield from _rotary_features(self.cos_sin_cache, self.query.shape[2], self.is_neox)


@call_type
class RopeUpdateCall(Call):
    """`slot_mapping` is padded with -1 to T tokens: a token without a slot is rotated all the same."""

    query: Float[Array, "T Hq D"] = array(dtype=True)
    key: Float[Array, "T H D"] = array(dtype=True)
    value: Float[Array, "T H Dv"] = array(dtype=True)
    positions: Int[Array, " T"] = array()
    cos_sin_cache: Float[Array, "P R"] = array(dtype=True)
    cache: KVCache = array()
    slot_mapping: Int[Array, " T"] = array()
    layer: Int[Array, ""] = array()
    is_neox: bool = constant()

    def nested_features(self) -> Iterator[str]:
        yield from _cache_features(self.cache, self.key.dtype, self.value.dtype)
        yield from _rotary_features(self.cos_sin_cache, self.query.shape[2], self.is_neox)


@call_type
class QkNormRopeUpdateCall(Call):
    """`positions` is [T], or [3, T] where `mrope_section` is given."""

    qkv: Float[Array, "T C"] = array(dtype=True)
    q_weight: Float[Array, " D"] = array(dtype=True)
    k_weight: Float[Array, " D"] = array(dtype=True)
    positions: Int[Array, "..."] = array()
    cos_sin_cache: Float[Array, "P R"] = array(dtype=True)
    cache: KVCache = array()
    slot_mapping: Int[Array, " T"] = array()
    layer: Int[Array, ""] = array()
    num_heads: int = constant()
    eps: float = constant()
    is_neox: bool = constant()
    mrope_section: tuple[int, int, int] | None = option(static=True)
    is_interleaved: bool = option(static=True)

    def nested_features(self) -> Iterator[str]:
        yield from _cache_features(self.cache, self.qkv.dtype)
        yield from _rotary_features(self.cos_sin_cache, self.cache.spec.head_size, self.is_neox)


@call_type
class MergeCall(Call):
    out_a: Float[Array, "T Hq D"] = array(dtype=True)
    lse_a: Float[Array, "T Hq"] = array()
    out_b: Float[Array, "T Hq D"] = array(dtype=True)
    lse_b: Float[Array, "T Hq"] = array()
