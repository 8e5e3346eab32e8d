"""ROCM_AITER_UNIFIED_ATTN as pure functions: vLLM's backend of AITER's unified attention and a packed cache.

`forward` reads everything from the cache, this step's tokens too: with an fp8 cache these have been rounded, and the results differ from
`rocm_attn`'s.

`CAPABILITIES.extensions` lists what differs from the class.
"""

from typing import Any

import jax.numpy as jnp

from ..cache import CacheSpec
from ..config import AttentionType
from ..errors import UnsupportedError
from ..literals import Order
from .backend import Backend, process_weights_after_loading
from .capabilities import Capabilities
from .metadata_builder import RocmAttentionMetadata, build, build_for_drafting

__all__ = [
    "BACKEND",
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
            "declared unsupported; the class's fallback kernel drops an fp8 cache's scales and some values in a window, which count here",
        ),
        ("logits_soft_cap", "a tanh that does not overflow; encoders apply it too, where the class ignores it"),
        ("per_head_quant_scales", "the class reads one scale per layer; here k_scale and v_scale may be per KV head"),
        (
            "kv_cache_dtypes",
            "fp8_e5m2 is advertised, but the class views the cache as e4m3 wherever it reads it; here it is float8_e5m2, written and read, "
            "and both fnuz kinds work by name",
        ),
        ("sliding_window", "an encoder's window of 1 is the token itself, where the class takes it for none"),
        (
            "alibi",
            "relative to the query's own position, as in ROCM_ATTN: beside sinks the class's bias is relative to the context; encoders "
            "refuse alibi, which the class ignores there",
        ),
        ("fused_output_quant", "encoders refuse output_scale, which the class ignores there"),
        ("q_scale", "counts beside an fp8 query of every kind, in the class beside the platform's e4m3 alone"),
        ("unused_slots", "empty sequences give 0 and NaN in slots that no sequence owns reaches no output"),
        ("kernel_block_size_multiple", "every multiple of 16; the class's kernels assert on some, such as 48"),
        ("fused_rope_kvcache", "any block size that is a multiple of 16, partial rotary, float16 caches"),
        (
            "fused_qk_norm_rope_kvcache",
            "any block size and head size; the key comes back in the model's dtype, where the class returns none; encoders write nothing",
        ),
        (
            "fused_qk_norm_mrope_kvcache",
            "any block size and head size; the key comes back in the model's dtype, where the class returns none; encoders write nothing",
        ),
        ("contents", "the shuffled cache is written with its scales, on any arch; the class's writer ignores the layer's scales"),
        ("kv_cache_update_bypass", "forward never reads key and value of a decoder, though the class declares no bypass"),
    ),
)

BACKEND = Backend(CAPABILITIES)

supports = BACKEND.supports
init_cache = BACKEND.init_cache
get_kv_cache_stride_order = BACKEND.get_kv_cache_stride_order
build_for_cudagraph_capture = BACKEND.build_for_cudagraph_capture
forward = BACKEND.forward
kv_cache_update = BACKEND.kv_cache_update
rope_and_kv_cache_update = BACKEND.rope_and_kv_cache_update
qk_norm_rope_and_kv_cache_update = BACKEND.qk_norm_rope_and_kv_cache_update
qk_norm_mrope_and_kv_cache_update = BACKEND.qk_norm_mrope_and_kv_cache_update


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
    order: Order | None = None,
    shuffled: bool = False,
    kv_connector: bool = False,
    arch: str | None = None,
) -> CacheSpec:
    """The spec of this backend's cache. Ports `customize_spec`, `get_preferred_block_size` and `supported_kv_cache_layouts`.

    Args:
      num_blocks, num_kv_heads, head_size, num_layers: B, H, D and L.
      head_size_v: channels of a value, where they differ; with `shuffled` None or `head_size`.
      block_size: N, a multiple of 16, or 1 (vLLM's probe of the bytes of a token); None is the preferred one (64).
      dtype: the model's dtype, which "auto" stands for.
      kv_cache_dtype: vLLM's string, or a dtype's own name. "fp8" and "fp8_e4m3" mean float8_e4m3fnuz on gfx94x, float8_e4m3fn elsewhere.
      order: "LBHNC" (default) or "LHBNC".
      shuffled: the layout of gfx1250's kernels (there VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT asks for it): keys `[H, D/x, N, x]`,
        values `[H, N/x, D, x]`. Its preferred order is "LHBNC", and no KV connector takes it.
      kv_connector: leaves "LBHNC" alone.
      arch: "gfx942", "MI300X", ...; None is the default device's.

    Returns:
      The spec.

    Raises:
      ValueError: names the field and the rule that it breaks.
      UnsupportedError: a spec that this backend does not serve.
    """
    if shuffled and kv_connector:
        raise UnsupportedError("shuffled: no KV connector takes the shuffled layout")
    return BACKEND.spec_of(
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


def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
    """Logical shape of one layer's cache as `customize_spec` has it, [block, head, token, key and value].

    Args:
      num_blocks, block_size, num_kv_heads, head_size: B, N, H and D.

    Returns:
      As many elements a layer as `CacheSpec.shape` has.

    Raises:
      ValueError: no kernel of the backend has the block size.
    """
    BACKEND.check_block_size(block_size)
    return (num_blocks, num_kv_heads, block_size, 2 * head_size)
