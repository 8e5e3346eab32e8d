"""ROCM_AITER_UNIFIED_ATTN as pure functions: vLLM's backend of AITER's unified attention and a packed cache.

`forward` reads everything from the cache, the step's new tokens too: with an fp8 cache these have been rounded, and the results differ from
`rocm_attn`'s.

Deliberately better than the class: see `CAPABILITIES.extensions`.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..cache import CacheSpec, KVCache
from ..config import AttentionConfig, AttentionType
from ..errors import UnsupportedError
from ..metadata import AttentionMetadata
from . import backend
from .backend import process_weights_after_loading
from .capabilities import Capabilities
from .metadata_builder import RocmAttentionMetadata, build, build_for_drafting, capture_metadata

__all__ = [
    "CAPABILITIES",
    "RocmAttentionMetadata",
    "build",
    "build_for_cudagraph_capture",
    "build_for_drafting",
    "cache_spec",
    "forward",
    "get_kv_cache_shape",
    "get_kv_cache_stride_order",
    "init_cache",
    "kv_cache_update",
    "process_weights_after_loading",
    "qk_norm_mrope_and_kv_cache_update",
    "qk_norm_rope_and_kv_cache_update",
    "rope_and_kv_cache_update",
    "supports",
    "use_cascade_attention",
]

CAPABILITIES = Capabilities(
    name="ROCM_AITER_UNIFIED_ATTN",
    dtypes=tuple(jnp.dtype(name) for name in ("float16", "bfloat16")),
    head_sizes=None,
    preferred_block_size=64,
    native_block_sizes=(),
    attn_types=tuple(AttentionType),
    contents=("packed", "flash", "shuffled"),
    layouts=("LBHNC", "LHBNC"),
    layouts_with_kv_connector=("LBHNC",),
    sinks=True,
    non_causal=False,
    kv_connector=True,
    logits_soft_cap=True,
    capture_zeroes_query_starts=False,
    full_precision_new_tokens=False,
    fused_qk_norm_mrope_kvcache=True,
    quant_query_input=True,
    extensions=(
        ("dtypes", "float32 models and caches, which AITER's kernels refuse"),
        (
            "non_causal",
            "declared unsupported; its fallback kernel drops the scales of an fp8 cache and some values in a window, here both count",
        ),
        ("logits_soft_cap", "a tanh that does not overflow, and encoders have it too"),
        ("per_head_quant_scales", "the class reads one scale per layer; here k_scale and v_scale may be per KV head"),
        ("kv_cache_dtypes", "fp8_e5m2 is advertised but stored and read as e4m3; here it is float8_e5m2, and both fnuz kinds work by name"),
        ("sliding_window", "an encoder's window of 1 is the token itself, where the class takes it for none"),
        ("alibi", "relative to the query's own position, as in ROCM_ATTN: beside sinks the class's bias is relative to the context"),
        ("unused_slots", "empty sequences give 0 and NaN in slots that nobody owns reaches no output"),
        ("kernel_block_size_multiple", "every multiple of 16; the class's kernels assert on some, such as 48"),
        ("fused_rope_kvcache", "any block size that is a multiple of 16, partial rotary, float16 caches"),
        ("fused_qk_norm_rope_kvcache", "any block size and head size; the key comes back in the model's dtype"),
        ("fused_qk_norm_mrope_kvcache", "any block size and head size; the key comes back too"),
        ("contents", "the shuffled cache is written with its scales, on any arch; the class's writer uses 1"),
    ),
)


def supports(config: AttentionConfig, spec: CacheSpec | None) -> tuple[str, ...]:
    """Why this backend refuses a layer over a cache; empty where it serves it. Each reason starts with the argument's name.

    Args:
      config: the layer.
      spec: its cache; None for encoder attention types, which have none.
    """
    return CAPABILITIES.supports(config, spec)


def cache_spec(
    *,
    num_blocks: int,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int | None = None,
    block_size: int | None = None,
    num_layers: int = 1,
    dtype: Any = jnp.bfloat16,
    kv_cache_dtype: str = "auto",
    order: str | None = None,
    shuffled: bool = False,
    kv_connector: bool = False,
    arch: str | None = None,
) -> CacheSpec:
    """The spec of this backend's cache. Ports `customize_spec`, `get_preferred_block_size` and `supported_kv_cache_layouts`.

    Args:
      num_blocks, num_kv_heads, head_size, num_layers: B, H, D and L.
      head_size_v: None or `head_size`.
      block_size: N, a multiple of 16; None is the preferred one (64).
      dtype: the model's dtype, which "auto" stands for.
      kv_cache_dtype: vLLM's string, or a dtype's own name. "fp8" and "fp8_e4m3" mean float8_e4m3fnuz on gfx94x, float8_e4m3fn elsewhere.
      order: "LBHNC" (default) or "LHBNC".
      shuffled: the layout of gfx1250's kernels (there VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT asks for it): keys `[H, D/x, N, x]`,
        values `[H, N/x, D, x]`. Its preferred order is "LHBNC", and no KV connector takes it.
      kv_connector: leaves "LBHNC" alone.
      arch: "gfx942", ...; None is the default device's.

    Raises:
      ValueError: names the field and the rule that it breaks.
      UnsupportedError: a spec that this backend does not serve.
    """
    if shuffled and kv_connector:
        raise UnsupportedError("shuffled: no KV connector takes the shuffled layout")
    return backend.cache_spec(
        CAPABILITIES,
        "shuffled" if shuffled else "packed",
        "LHBNC" if shuffled and order is None else order,
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=head_size_v,
        block_size=block_size,
        num_layers=num_layers,
        dtype=dtype,
        kv_cache_dtype_name=kv_cache_dtype,
        kv_connector=kv_connector,
        arch=arch,
    )


def init_cache(spec: CacheSpec, *, k_scale: Any = 1.0, v_scale: Any = 1.0, sharding: Any = None) -> KVCache:
    """An empty cache of a spec that this backend serves; see `purepage.init_cache`.

    Raises:
      UnsupportedError: the spec is another backend's.
    """
    return backend.init_cache(CAPABILITIES, spec, k_scale, v_scale, sharding)


def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
    """vLLM's logical shape of one layer's cache, [block, head, token, key and value]; `CacheSpec.shape` has as many elements."""
    backend.check_block_size(CAPABILITIES, block_size)
    return (num_blocks, num_kv_heads, block_size, 2 * head_size)


def get_kv_cache_stride_order(order: str | None = None, *, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
    """Physical order of the axes of `get_kv_cache_shape`, outermost first, the layer before all; `order` None is the preferred one."""
    return backend.kv_cache_stride_order(CAPABILITIES, order, include_num_layers_dimension)


def use_cascade_attention(*_: Any, **__: Any) -> bool:
    """Never, as in vLLM, whatever the batch is. `purepage.cascade_attention` is there for those who want it."""
    return CAPABILITIES.cascade


def build_for_cudagraph_capture(metadata: AttentionMetadata) -> RocmAttentionMetadata:
    """Metadata of the same shapes to warm up or record a step with; see `purepage.functional.builder.capture_metadata`."""
    return capture_metadata(metadata, zero_query_starts=CAPABILITIES.capture_zeroes_query_starts)


def forward(
    query: Float[Array, "T Hq D"],
    key: Float[Array, "T H D"] | None,
    value: Float[Array, "T H D"] | None,
    cache: KVCache | None,
    metadata: AttentionMetadata | None,
    config: AttentionConfig,
    *,
    layer: Any = 0,
    q_scale: Any = None,
    output_scale: Any = None,
    output_dtype: Any = None,
    output_block_scale: Any = None,
    implementation: str | None = None,
) -> Float[Array, "T Hq D"]:
    """One layer's attention. Ports the class's `forward`.

    Args:
      query: [T, Hq, D], float32, float16, bfloat16, or fp8 codes.
      key, value: [T, H, D], this step's, or both None: only encoder types read them, the others read the cache.
      cache: a cache of `cache_spec`'s layouts. It must hold this step's tokens already (see `kv_cache_update`); never changed.
        None where the attention type has none.
      metadata: `AttentionMetadata` or `build`'s; None is a profiling run, which gives zeros.
      config: the layer. Encoder types attend `key` and `value`, not causal; ENCODER_DECODER attends the whole of each cached sequence.
      layer: layer of the cache, an int or a traced i32 scalar. A layer that shares another's cache passes that layer's index.
      q_scale: f32 scalar that an fp8 query was divided by.
      output_scale: f32 scalar: out / output_scale comes back as fp8.
      output_dtype: default: the query's, bfloat16 for an fp8 query; with `output_scale` the arch's e4m3.
      output_block_scale: refused, as in vLLM.
      implementation: None (best), "xla", "pallas", "triton" or "aiter".

    Returns:
      [T, Hq, D]; rows of padding tokens are 0.

    Raises:
      ValueError, TypeError: a bad argument: its name, what it was, what it must be.
      UnsupportedError: what `supports` says, or an argument that this backend or the named implementation can't serve.
    """
    return backend.forward(
        CAPABILITIES,
        query,
        key,
        value,
        cache,
        metadata,
        config,
        layer=layer,
        q_scale=q_scale,
        output_scale=output_scale,
        output_dtype=output_dtype,
        output_block_scale=output_block_scale,
        implementation=implementation,
    )


def kv_cache_update(
    key: Float[Array, "T H D"],
    value: Float[Array, "T H D"],
    cache: KVCache,
    slot_mapping: Int[Array, " T"] | None,
    config: AttentionConfig,
    *,
    layer: Any = 0,
    implementation: str | None = None,
) -> KVCache:
    """Port of `do_kv_cache_update`; see `purepage.update_cache`. The cache as it is for encoder types, and without slots (profiling)."""
    return backend.kv_cache_update(CAPABILITIES, key, value, cache, slot_mapping, config, layer=layer, implementation=implementation)


def rope_and_kv_cache_update(
    query: Float[Array, "T Hq D"],
    key: Float[Array, "T H D"],
    value: Float[Array, "T H D"],
    positions: Int[Array, " T"],
    cos_sin_cache: Float[Array, "P R"],
    cache: KVCache,
    slot_mapping: Int[Array, " T"] | None,
    config: AttentionConfig,
    *,
    is_neox: bool = True,
    layer: Any = 0,
    implementation: str | None = None,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T H D"], KVCache]:
    """Port of `do_rope_and_kv_cache_update`: (query, key, cache). See `purepage.rope_and_update_cache`.

    For encoder types, and without slots (profiling), the arguments come back as they are: nothing is rotated, as in the class.
    """
    arguments = (query, key, value, positions, cos_sin_cache, cache, slot_mapping, config)
    return backend.rope_and_kv_cache_update(CAPABILITIES, *arguments, is_neox=is_neox, layer=layer, implementation=implementation)


def qk_norm_rope_and_kv_cache_update(
    qkv: Float[Array, "T C"],
    q_weight: Float[Array, " D"],
    k_weight: Float[Array, " D"],
    positions: Int[Array, " T"],
    cos_sin_cache: Float[Array, "P R"],
    cache: KVCache,
    slot_mapping: Int[Array, " T"] | None,
    config: AttentionConfig,
    *,
    eps: float = 1e-6,
    is_neox: bool = True,
    layer: Any = 0,
    implementation: str | None = None,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T H D"], Float[Array, "T H D"], KVCache]:
    """Port of `do_qk_norm_rope_kvcache_update`: (query, key, value, cache). See `purepage.qk_norm_rope_and_update_cache`.

    For encoder types the parts of `qkv` come back as they are; without slots (profiling) query and key are zeros.
    """
    arguments = (qkv, q_weight, k_weight, positions, cos_sin_cache, cache, slot_mapping, config)
    options = {"eps": eps, "is_neox": is_neox, "layer": layer, "implementation": implementation}
    return backend.qk_norm_update(CAPABILITIES, *arguments, mrope=None, **options)


def qk_norm_mrope_and_kv_cache_update(
    qkv: Float[Array, "T C"],
    q_weight: Float[Array, " D"],
    k_weight: Float[Array, " D"],
    positions: Int[Array, "3 T"],
    cos_sin_cache: Float[Array, "P R"],
    cache: KVCache,
    slot_mapping: Int[Array, " T"] | None,
    config: AttentionConfig,
    *,
    mrope_section: tuple[int, int, int],
    is_interleaved: bool = False,
    eps: float = 1e-6,
    is_neox: bool = True,
    layer: Any = 0,
    implementation: str | None = None,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T H D"], Float[Array, "T H D"], KVCache]:
    """Port of `do_qk_norm_mrope_kvcache_update`: (query, key, value, cache). See `purepage.qk_norm_mrope_and_update_cache`.

    As `qk_norm_rope_and_kv_cache_update`, with the temporal, height and width position of each token.
    """
    arguments = (qkv, q_weight, k_weight, positions, cos_sin_cache, cache, slot_mapping, config)
    mrope = {"mrope_section": mrope_section, "is_interleaved": is_interleaved}
    options = {"eps": eps, "is_neox": is_neox, "layer": layer, "implementation": implementation}
    return backend.qk_norm_update(CAPABILITIES, *arguments, mrope=mrope, **options)
