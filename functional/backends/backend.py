"""What the two backends share: each is its `Capabilities` value and these functions. See `rocm_attn` and `rocm_aiter_unified_attn`."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from ..attention import encoder_attention, output_dtype_of, paged_attention
from ..cache import FP8_DTYPES, CacheSpec, KVCache, check_cache
from ..cache import init_cache as init_plain_cache
from ..cache_writers import update_cache
from ..checks import check_tokens, optional_scalar
from ..config import AttentionConfig, AttentionType, is_array
from ..errors import UnsupportedError, bad_type, bad_value
from ..fp8 import e4m3_dtype, kv_cache_dtype
from ..fused_writers import qk_norm_mrope_and_update_cache, qk_norm_rope_and_update_cache, rope_and_update_cache
from ..metadata import check_metadata
from ..new_tokens import attention_with_new_tokens
from ..target import current_target
from .capabilities import ENCODERS, Capabilities
from .metadata_builder import RocmAttentionMetadata, plain_metadata


def device_arch() -> str | None:
    """The architecture of the target, "gfx942", ...; None where that is no AMD GPU."""
    return current_target().amd_arch


def cache_spec(
    capabilities: Capabilities,
    content: str,
    order: str | None,
    *,
    num_blocks: int,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int | None,
    block_size: int | None,
    num_layers: int,
    dtype: Any,
    kv_cache_dtype_name: str,
    kv_connector: bool,
    arch: str | None,
) -> CacheSpec:
    """The spec of a backend's cache: its port of `customize_spec`."""
    name = capabilities.name
    if head_size_v not in (None, head_size):
        raise UnsupportedError(f"head_size_v is {head_size_v}: {name} keeps keys and values of one head_size ({head_size})")
    orders = capabilities.supported_kv_cache_layouts(kv_connector=kv_connector)
    if not orders:
        raise UnsupportedError(f"kv_connector: {name} has no layout for a KV connector")
    if order is None:
        order = orders[0]
    if order not in orders:
        able = ", ".join(map(repr, orders)) + (" with a KV connector" if kv_connector else "")
        raise UnsupportedError(f"order is {order!r}: {name} serves {able}")
    spec = CacheSpec(
        num_blocks=num_blocks,
        block_size=capabilities.get_preferred_block_size() if block_size is None else block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        num_layers=num_layers,
        dtype=kv_cache_dtype(kv_cache_dtype_name, model_dtype=dtype, arch=device_arch() if arch is None else arch),
        content=content,
        order=order,
    )
    config = AttentionConfig(num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_size=head_size, kv_cache_dtype=kv_cache_dtype_name)
    _refuse(name, capabilities.supports(config, spec))
    return spec


def init_cache(capabilities: Capabilities, spec: CacheSpec, k_scale: Any, v_scale: Any, sharding: Any) -> KVCache:
    if isinstance(spec, CacheSpec):
        config = AttentionConfig(num_heads=spec.num_kv_heads, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size)
        _refuse(capabilities.name, capabilities.supports(config, spec))
    return init_plain_cache(spec, k_scale=k_scale, v_scale=v_scale, sharding=sharding)


def _refuse(name: str, reasons: tuple[str, ...]) -> None:
    if reasons:
        raise UnsupportedError(f"{name} can't serve this layer: {'; '.join(reasons)}")


def _check_layer(capabilities: Capabilities, config: AttentionConfig, cache: Any) -> tuple[int, int]:
    """Refuses what the backend does not serve; returns the (query heads, KV heads) of this shard."""
    if not isinstance(config, AttentionConfig):
        bad_type("config", config, "an AttentionConfig")
    if config.attn_type in ENCODERS:
        _refuse(capabilities.name, capabilities.supports(config, None))
        return config.num_heads, config.num_kv_heads
    local = check_cache(cache)
    spec = local if local.num_kv_heads == config.num_kv_heads else cache.spec
    for name in ("num_kv_heads", "head_size"):
        if getattr(spec, name) != getattr(config, name):
            bad_value(f"cache.spec.{name}", getattr(spec, name), f"the config's {getattr(config, name)}")
    _refuse(capabilities.name, capabilities.supports(config, spec))
    return config.num_heads * local.num_kv_heads // config.num_kv_heads, local.num_kv_heads


def forward(
    capabilities: Capabilities,
    query: Array,
    key: Array | None,
    value: Array | None,
    cache: KVCache | None,
    metadata: Any,
    config: AttentionConfig,
    *,
    layer: Any,
    q_scale: Any,
    output_scale: Any,
    output_dtype: Any,
    output_block_scale: Any,
    implementation: str | None,
) -> Array:
    name = capabilities.name
    num_heads, num_kv_heads = _check_layer(capabilities, config, cache)
    query = check_tokens("query", query, num_heads, config.head_size, fp8=True)
    if output_block_scale is not None:
        raise UnsupportedError(f"{name} can't serve output_block_scale: only one static scale per tensor, output_scale")
    if (key is None) != (value is None):
        bad_value("value" if value is None else "key", None, "given, or both None")
    if key is not None:
        key, value = (check_tokens(n, a, num_kv_heads, config.head_size) for n, a in (("key", key), ("value", value)))
        if value.shape[0] != key.shape[0]:
            bad_value("value", value, f"of the key's {key.shape[0]} tokens")
    _check_query_dtype(capabilities, query, q_scale)
    if output_scale is not None and output_dtype is None:
        output_dtype = e4m3_dtype(device_arch())
    dtype = output_dtype_of(query.dtype, output_dtype, optional_scalar("output_scale", output_scale) is not None)
    if config.attn_type in ENCODERS:
        return _encode(name, query, key, value, metadata, config, q_scale, output_scale, dtype, implementation)
    if metadata is None:
        return jnp.zeros(query.shape, dtype)
    metadata = check_metadata(metadata, None if cache is None else cache.local_spec)
    if isinstance(metadata, RocmAttentionMetadata) and metadata.use_cascade:
        raise UnsupportedError(f"common_prefix_len is {metadata.common_prefix_len}: {name} has no cascade attention; cascade_attention has")
    metadata = plain_metadata(metadata)
    assert cache is not None  # _check_layer refused that
    options: dict[str, Any] = {
        "layer": layer,
        "q_scale": q_scale,
        "output_scale": output_scale,
        "output_dtype": dtype,
        "implementation": implementation,
        **_options(config),
        "alibi_slopes": config.alibi_slopes,
    }
    if config.attn_type is AttentionType.ENCODER_DECODER:
        return paged_attention(query, cache, replace(metadata, causal=False), **options)
    if key is not None and key.shape[0] != query.shape[0]:
        bad_value("key", key, f"of the query's {query.shape[0]} tokens where attn_type is {config.attn_type.name}")
    if (
        capabilities.full_precision_new_tokens
        and key is not None
        and value is not None
        and not (key.dtype == value.dtype == cache.spec.dtype)
    ):
        return attention_with_new_tokens(query, key, value, cache, metadata, **options)
    return paged_attention(query, cache, metadata, **options)


def _options(config: AttentionConfig) -> dict[str, Any]:
    names = ("sliding_window", "logits_soft_cap", "sinks")
    return {"scale": config.softmax_scale, **{name: getattr(config, name) for name in names}}


def _check_query_dtype(capabilities: Capabilities, query: Array, q_scale: Any) -> None:
    name = capabilities.name
    if query.dtype in FP8_DTYPES and not capabilities.quant_query_input:
        raise UnsupportedError(f"query is {query.dtype.name}: {name} takes no quantized query")
    if q_scale is None:
        return
    if query.dtype not in FP8_DTYPES:
        is_one = not isinstance(q_scale, Tracer) and np.all(np.asarray(q_scale, np.float32) == 1)
        if not is_one:
            raise UnsupportedError(f"q_scale: {name} scales an fp8 query alone, and this one is {query.dtype.name}")


def _encode(name, query, key, value, metadata, config, q_scale, output_scale, dtype, implementation) -> Array:
    if key is None:
        bad_value("key", key, f"given where attn_type is {config.attn_type.name}: an encoder has no cache")
    if query.dtype in FP8_DTYPES:
        raise UnsupportedError(f"query is {query.dtype.name}: {name}'s encoder attention is not quantized")
    if output_scale is not None:
        raise UnsupportedError(
            f"{name} can't serve output_scale where attn_type is {config.attn_type.name}: encoder attention is not quantized"
        )
    if dtype != query.dtype:
        raise UnsupportedError(f"output_dtype is {dtype.name}: {name}'s encoder attention returns the query's {query.dtype.name}")
    if metadata is None:
        return jnp.zeros(query.shape, dtype)
    metadata = plain_metadata(check_metadata(metadata))
    return encoder_attention(query, key, value, metadata, causal=False, implementation=implementation, **_options(config))


def kv_cache_update(capabilities, key, value, cache, slot_mapping, config, *, layer, implementation):
    _check_layer(capabilities, config, cache)
    if config.attn_type in ENCODERS or slot_mapping is None:
        return cache
    return update_cache(cache, key, value, slot_mapping, layer=layer, implementation=implementation)


def rope_and_kv_cache_update(
    capabilities, query, key, value, positions, cos_sin_cache, cache, slot_mapping, config, *, is_neox, layer, implementation
):
    num_heads, _ = _check_layer(capabilities, config, cache)
    if config.attn_type in ENCODERS or slot_mapping is None:
        return query, key, cache
    query = check_tokens("query", query, num_heads, config.head_size)
    return rope_and_update_cache(
        query, key, value, positions, cos_sin_cache, cache, slot_mapping, is_neox=is_neox, layer=layer, implementation=implementation
    )


def qk_norm_update(capabilities, qkv, q_weight, k_weight, positions, cos_sin_cache, cache, slot_mapping, config, *, mrope, **options):
    """The fused qk-norm writers; `mrope` holds `mrope_section` and `is_interleaved`, or is None."""
    num_heads, num_kv_heads = _check_layer(capabilities, config, cache)
    if config.attn_type in ENCODERS or slot_mapping is None:
        parts = _split_qkv(qkv, num_heads, num_kv_heads, config.head_size)
        if slot_mapping is None and config.attn_type not in ENCODERS:  # profiling: zeros, as the class leaves in its output buffers
            parts = (jnp.zeros_like(parts[0]), jnp.zeros_like(parts[1]), parts[2])
        return (*parts, cache)
    arguments = (qkv, q_weight, k_weight, positions, cos_sin_cache, cache, slot_mapping)
    if mrope is None:
        return qk_norm_rope_and_update_cache(*arguments, num_heads=num_heads, **options)
    return qk_norm_mrope_and_update_cache(*arguments, num_heads=num_heads, **mrope, **options)


def _split_qkv(qkv: Any, num_heads: int, num_kv_heads: int, head_size: int) -> tuple[Array, Array, Array]:
    width = (num_heads + 2 * num_kv_heads) * head_size
    if not is_array(qkv) or len(qkv.shape) != 2 or qkv.shape[1] != width:
        bad_value("qkv", qkv, f"an array of shape [T, (Hq + 2 H) * D] = [T, {width}]")
    heads = jnp.asarray(qkv).reshape(qkv.shape[0], -1, head_size)
    return heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]


def process_weights_after_loading(config: AttentionConfig) -> AttentionConfig:
    """The layer with `sinks` and `alibi_slopes` as float32 device arrays, once, after a checkpoint is read in any dtype."""
    arrays = {name: getattr(config, name) for name in ("sinks", "alibi_slopes")}
    return replace(config, **{name: jnp.asarray(array, jnp.float32) for name, array in arrays.items() if array is not None})


def kv_cache_stride_order(capabilities: Capabilities, order: str | None, include_num_layers_dimension: bool) -> tuple[int, ...]:
    """Physical order of the axes of `get_kv_cache_shape` (block, head slot, token, content), the layer outermost where it is included."""
    order = capabilities.layouts[0] if order is None else order
    if order not in capabilities.layouts:
        bad_value("order", order, f"one of {', '.join(map(repr, capabilities.layouts))}")
    logical = "LBHNC" if include_num_layers_dimension else "BHNC"
    return tuple(logical.index(axis) for axis in order if axis in logical)


def check_block_size(capabilities: Capabilities, block_size: int) -> None:
    if not capabilities.supports_block_size(block_size):
        bad_value("block_size", block_size, f"a multiple of {capabilities.kernel_block_size_multiple}")
