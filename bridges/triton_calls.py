"""What the `triton` implementation serves of each operation, and how a call becomes a static shape, named arrays, and results again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ..functional.cache import KVCache
from ..functional.calls import (
    EncoderAttentionCall,
    MergeCall,
    PagedAttentionCall,
    QkNormRopeUpdateCall,
    RopeUpdateCall,
    RotaryCall,
    UpdateCacheCall,
)
from ..functional.features import Serves
from ..functional.intervals import hulls, visible_intervals
from ..functional.layout import LAYOUT_PROPERTIES
from ..kernels.archs import ARCHS
from ..kernels.launch import Program
from ..kernels.plans.attention import MAX_WINDOW, plan_paged_attention
from ..kernels.plans.encoder import EncoderShape, plan_encoder_attention
from ..kernels.plans.merge import MergeShape, plan_merge
from ..kernels.plans.shapes import PagedAttentionShape
from ..kernels.plans.writers import CacheShape, RopeShape, UpdateShape, plan_rope, plan_update_cache


@dataclass(frozen=True)
class Operation:
    """How one operation is served.

    Attributes:
      serves: the features, dtypes, layouts and architectures of its kernels.
      shape: everything static about a call, as the one value that is planned.
      plan: the program of a shape.
      arrays: the arrays of a call that the inputs of a program may name.
      results: of a call and the arrays that its program returns, what the operation returns.
    """

    serves: Serves
    shape: Callable[[Any], Any]
    plan: Callable[..., Program]
    arrays: Callable[[Any], Mapping[str, Array | None]]
    results: Callable[[Any, tuple[Array, ...]], Any]


def _cache_shape(cache: KVCache) -> CacheShape:
    return CacheShape(
        spec=cache.local_spec,
        dtype=_name(cache.data),
        k_scale_per_head=cache.k_scale.ndim == 2,
        v_scale_per_head=cache.v_scale.ndim == 2,
    )


def _cache_arrays(cache: KVCache, layer: Array) -> dict[str, Array]:
    return {"cache": cache.data, "k_scale": cache.k_scale, "v_scale": cache.v_scale, "layer": jnp.reshape(layer, (1,))}


def _name(array: Array) -> str:
    return jnp.dtype(array.dtype).name


def _vector(scalar: Array | None) -> Array | None:
    """A scalar as an array of one element: a kernel reads it from memory."""
    return None if scalar is None else jnp.reshape(scalar, (1,))


def _paged_attention_shape(call: PagedAttentionCall) -> PagedAttentionShape:
    metadata, cache = call.metadata, call.cache
    return PagedAttentionShape(
        num_tokens=call.query.shape[0],
        num_seqs=metadata.seq_lens.shape[0],
        num_heads=call.query.shape[1],
        table_width=metadata.block_table.shape[1],
        cache=cache.local_spec,
        cache_dtype=_name(cache.data),
        query_dtype=_name(call.query),
        output_dtype=jnp.dtype(call.output_dtype).name,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
        causal=metadata.causal,
        sliding_window=call.sliding_window,
        traced_window=call.traced_window is not None,
        ranged=call.key_range is not None,
        logits_soft_cap=call.logits_soft_cap,
        has_alibi=call.alibi_slopes is not None,
        has_sinks=call.sinks is not None,
        qq_bias=None if call.qq_bias is None else tuple(call.qq_bias.shape),
        has_score_scale=call.score_scale is not None,
        scale=call.scale,
        scales_per_head=cache.k_scale.ndim == 2 or cache.v_scale.ndim == 2,
        has_output_scale=call.output_scale is not None,
        return_lse=call.return_lse,
        context_only=call.context_only,
    )


def _masks(
    call: PagedAttentionCall | EncoderAttentionCall, starts: Array, contexts: Array, lengths: Array, *, causal: bool
) -> Array | None:
    """What `purepage.kernels.triton.masks` reads, i32: a window, or the interval of keys of each sequence and of each token."""
    if call.key_range is None:
        return None if call.traced_window is None else jnp.minimum(call.traced_window, MAX_WINDOW).reshape(1)
    window = call.sliding_window if call.traced_window is None else call.traced_window
    intervals = visible_intervals(starts, contexts, lengths, call.key_range, causal=causal, window=window)
    return jnp.concatenate([jnp.stack(pair, axis=1).reshape(-1) for pair in (hulls(intervals, starts), intervals)])


def _paged_attention_arrays(call: PagedAttentionCall) -> dict[str, Array | None]:
    metadata, arrays = call.metadata, _cache_arrays(call.cache, call.layer)
    starts, seq_lens = _int32(metadata.query_start_loc), _int32(metadata.seq_lens)
    contexts = seq_lens - (starts[1:] - starts[:-1])
    masks = _masks(call, starts, contexts, contexts if call.context_only else seq_lens, causal=metadata.causal)
    if masks is not None:
        arrays["layer"] = jnp.concatenate([arrays["layer"], masks])
    if call.cache.k_scale.ndim != call.cache.v_scale.ndim:  # the kernel reads both alike
        heads = call.cache.local_spec.num_kv_heads
        for name in ("k_scale", "v_scale"):
            scale = arrays[name]
            arrays[name] = scale if scale.ndim == 2 else jnp.broadcast_to(scale[:, None], (scale.shape[0], heads))
    return {
        **arrays,
        "query": call.query,
        "query_start_loc": starts,
        "seq_lens": seq_lens,
        "block_table": _int32(metadata.block_table),
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
        "qq_bias": call.qq_bias,
        "score_scale": _vector(call.score_scale),
        "output_scale": _vector(call.output_scale),
    }


def _int32(array: Array) -> Array:
    return array.astype(jnp.int32)


def _update_shape(call: UpdateCacheCall) -> UpdateShape:
    return UpdateShape(
        num_tokens=call.key.shape[0],
        cache=_cache_shape(call.cache),
        key_dtype=_name(call.key),
        value_dtype=_name(call.value),
    )


def _update_arrays(call: UpdateCacheCall) -> dict[str, Array]:
    return {
        **_cache_arrays(call.cache, call.layer),
        "key": call.key,
        "value": call.value,
        "slot_mapping": _int32(call.slot_mapping),
    }


def _table(cos_sin_cache: Array) -> Array:
    """float64 exists only where x64 is on; the maths is float32."""
    return cos_sin_cache.astype(jnp.float32) if cos_sin_cache.dtype == jnp.float64 else cos_sin_cache


def _rope_shape(call: RotaryCall | RopeUpdateCall) -> RopeShape:
    writes = isinstance(call, RopeUpdateCall)
    return RopeShape(
        num_tokens=call.query.shape[0],
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_size=call.query.shape[2],
        num_positions=call.cos_sin_cache.shape[0],
        rotary_dim=call.cos_sin_cache.shape[1],
        is_neox=call.is_neox,
        query_dtype=_name(call.query),
        key_dtype=_name(call.key),
        value_dtype=_name(call.value) if writes else _name(call.key),
        table_dtype=_name(_table(call.cos_sin_cache)),
        cache=_cache_shape(call.cache) if writes else None,
    )


def _rotary_arrays(call: RotaryCall | RopeUpdateCall) -> dict[str, Array]:
    return {
        "query": call.query,
        "key": call.key,
        "positions": _int32(call.positions),
        "cos_sin_cache": _table(call.cos_sin_cache),
    }


def _rope_update_arrays(call: RopeUpdateCall) -> dict[str, Array]:
    return {
        **_rotary_arrays(call),
        **_cache_arrays(call.cache, call.layer),
        "value": call.value,
        "slot_mapping": _int32(call.slot_mapping),
    }


def _qk_norm_shape(call: QkNormRopeUpdateCall) -> RopeShape:
    spec, dtype = call.cache.local_spec, _name(call.qkv)
    return RopeShape(
        num_tokens=call.qkv.shape[0],
        num_heads=call.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        num_positions=call.cos_sin_cache.shape[0],
        rotary_dim=call.cos_sin_cache.shape[1],
        is_neox=call.is_neox,
        query_dtype=dtype,
        key_dtype=dtype,
        value_dtype=dtype,
        table_dtype=_name(_table(call.cos_sin_cache)),
        cache=_cache_shape(call.cache),
        eps=call.eps,
        mrope_section=tuple(call.mrope_section or ()),
        is_interleaved=call.is_interleaved,
    )


def _qk_norm_arrays(call: QkNormRopeUpdateCall) -> dict[str, Array]:
    return {
        **_cache_arrays(call.cache, call.layer),
        "qkv": call.qkv,
        "q_weight": call.q_weight.astype(jnp.float32),
        "k_weight": call.k_weight.astype(jnp.float32),
        "positions": _int32(call.positions),
        "cos_sin_cache": _table(call.cos_sin_cache),
        "slot_mapping": _int32(call.slot_mapping),
    }


def _encoder_shape(call: EncoderAttentionCall) -> EncoderShape:
    return EncoderShape(
        num_tokens=call.query.shape[0],
        num_seqs=call.metadata.query_start_loc.shape[0] - 1,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_size=call.query.shape[2],
        value_size=call.value.shape[2],
        dtype=_name(call.query),
        max_query_len=call.metadata.max_query_len,
        scale=call.scale,
        causal=call.causal,
        sliding_window=call.sliding_window,
        traced_window=call.traced_window is not None,
        ranged=call.key_range is not None,
        logits_soft_cap=call.logits_soft_cap,
        has_alibi=call.alibi_slopes is not None,
        has_sinks=call.sinks is not None,
        has_score_scale=call.score_scale is not None,
        return_lse=call.return_lse,
    )


def _encoder_arrays(call: EncoderAttentionCall) -> dict[str, Array | None]:
    starts = _int32(call.metadata.query_start_loc)
    lengths = starts[1:] - starts[:-1]
    return {
        "query": call.query,
        "key": call.key,
        "value": call.value,
        "query_start_loc": starts,
        "masks": _masks(call, starts, jnp.zeros_like(lengths), lengths, causal=call.causal),
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
        "score_scale": _vector(call.score_scale),
    }


def _merge_shape(call: MergeCall) -> MergeShape:
    tokens, heads, size = call.out_a.shape
    return MergeShape(num_tokens=tokens, num_heads=heads, head_size=size, dtype_a=_name(call.out_a), dtype_b=_name(call.out_b))


def _merge_arrays(call: MergeCall) -> dict[str, Array]:
    return {"out_a": call.out_a, "lse_a": call.lse_a, "out_b": call.out_b, "lse_b": call.lse_b}


def _attention_results(call: PagedAttentionCall, arrays: tuple[Array, ...]) -> tuple[Array, Array | None]:
    """(out [T, Hq, D], lse f32[T, Hq]); the lse is None unless the call asks for it."""
    out, *lse = arrays
    return out, (lse[0] if lse else None)


def _encoder_results(call: EncoderAttentionCall, arrays: tuple[Array, ...]) -> Array | tuple[Array, ...]:
    return arrays if call.return_lse else arrays[0]


def _as_they_are(call: Any, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    return arrays


def _with_cache(call: Any, arrays: tuple[Array, ...]) -> Any:
    """The last array is the buffer of the cache."""
    cache = replace(call.cache, data=arrays[-1])
    return (*arrays[:-1], cache) if len(arrays) > 1 else cache


def _qk_norm_results(call: QkNormRopeUpdateCall, arrays: tuple[Array, ...]) -> tuple[Array, Array, Array, KVCache]:
    """(query, key, value, cache); the value is a slice of qkv, which XLA drops where it is not used."""
    query, key, data = arrays
    size = call.cache.spec.value_size
    value = call.qkv[:, -key.shape[1] * size :].reshape(*key.shape[:2], size)
    return query, key, value, replace(call.cache, data=data)


_MODEL = frozenset(("float32", "float16", "bfloat16"))
_FP8 = frozenset(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"))
_TABLE = _MODEL | {"float64"}
"""float64 exists only under x64; `_table` narrows it to float32, in which kernels compute."""
_CACHE = frozenset(("head_size_v", "quantized_cache", "scales_per_head", "mixed_scale_ranks", "mixed_dtypes"))
_ROTARY = frozenset(("partial_rotary", "gptj_rotary"))
_SCORES = frozenset(("score_scale", "sinks", "sliding_window", "traced_window", "key_range", "alibi_slopes", "logits_soft_cap"))


def _serves(features: frozenset[str], *, layouts: bool = True, **dtypes: frozenset[str]) -> Serves:
    return Serves(features=features, dtypes=dtypes, layouts=LAYOUT_PROPERTIES if layouts else frozenset(), archs=ARCHS.keys())


_QK_NORM = Operation(
    _serves(
        _CACHE | _ROTARY | {"mrope_section", "is_interleaved"},
        cache=_MODEL | _FP8,
        qkv=_MODEL,
        q_weight=_TABLE,
        k_weight=_TABLE,
        cos_sin_cache=_TABLE,
    ),
    _qk_norm_shape,
    plan_rope,
    _qk_norm_arrays,
    _qk_norm_results,
)

OPERATIONS: Mapping[str, Operation] = {
    "paged_attention": Operation(
        _serves(
            _SCORES
            | _CACHE
            | {
                "qq_bias",
                "qq_bias_per_sequence",
                "output_scale",
                "return_lse",
                "context_only",
                "non_causal",
                "quantized_query",
            },
            query=_MODEL | _FP8,
            cache=_MODEL | _FP8,
            output_dtype=_MODEL | _FP8,
        ),
        _paged_attention_shape,
        plan_paged_attention,
        _paged_attention_arrays,
        _attention_results,
    ),
    "encoder_attention": Operation(
        _serves(_SCORES | {"causal", "return_lse", "head_size_v"}, layouts=False, query=_MODEL),
        _encoder_shape,
        plan_encoder_attention,
        _encoder_arrays,
        _encoder_results,
    ),
    "update_cache": Operation(
        _serves(_CACHE, cache=_MODEL | _FP8, key=_MODEL, value=_MODEL), _update_shape, plan_update_cache, _update_arrays, _with_cache
    ),
    "rotary_embedding": Operation(
        _serves(_ROTARY, layouts=False, query=_MODEL, key=_MODEL, cos_sin_cache=_TABLE),
        _rope_shape,
        plan_rope,
        _rotary_arrays,
        _as_they_are,
    ),
    "rope_and_update_cache": Operation(
        _serves(_CACHE | _ROTARY, cache=_MODEL | _FP8, query=_MODEL, key=_MODEL, value=_MODEL, cos_sin_cache=_TABLE),
        _rope_shape,
        plan_rope,
        _rope_update_arrays,
        _with_cache,
    ),
    "qk_norm_rope_and_update_cache": _QK_NORM,
    "qk_norm_mrope_and_update_cache": _QK_NORM,
    "merge_attention_states": Operation(
        _serves(frozenset(), layouts=False, out_a=_MODEL, out_b=_MODEL), _merge_shape, plan_merge, _merge_arrays, _as_they_are
    ),
}
"""By the name of the public function."""

SERVES: Mapping[str, Serves] = {name: operation.serves for name, operation in OPERATIONS.items()}
"""What the kernels serve: strides and dtypes are arguments of a kernel, so every layout, and any mixture of dtypes."""
