"""ROCM_ATTN as pure functions: vLLM's backend of HIP paged attention, Triton prefix prefill and an x-packed cache.

`forward` attends the new tokens of a sequence of more than one query token at full precision, from `key` and `value` where these are given;
a sequence of one query token reads everything from the cache. With an fp8 cache its results differ from `rocm_aiter_unified_attn`'s, which
reads everything from the cache.

`CAPABILITIES.extensions` lists what differs from the class. Cross attention is refused, as in the class: its prefill would take the
encoder's keys for new tokens.
"""

from typing import Any

import jax.numpy as jnp

from ..cache import CacheSpec
from ..config import AttentionType
from ..literals import Order
from .backend import Backend, process_weights_after_loading
from .capabilities import Capabilities
from .hip_gates import decode_path, has_native_kv_cache_layout, use_rocm_custom_paged_attention, writer_path
from .metadata_builder import RocmAttentionMetadata, build, build_for_drafting

__all__ = [
    "BACKEND",
    "CAPABILITIES",
    "RocmAttentionMetadata",
    "build",
    "build_for_cudagraph_capture",
    "build_for_drafting",
    "cache_spec",
    "decode_path",
    "forward",
    "get_kv_cache_shape",
    "get_kv_cache_stride_order",
    "has_native_kv_cache_layout",
    "init_cache",
    "kv_cache_update",
    "process_weights_after_loading",
    "qk_norm_rope_and_kv_cache_update",
    "rope_and_kv_cache_update",
    "supports",
    "use_rocm_custom_paged_attention",
    "writer_path",
]

CAPABILITIES = Capabilities(
    name="ROCM_ATTN",
    dtypes=tuple(jnp.dtype(name) for name in ("float16", "bfloat16", "float32")),
    head_sizes=(32, 64, 80, 96, 128, 160, 192, 224, 256),
    preferred_block_size=None,
    native_block_sizes=(16, 32),
    attn_types=(AttentionType.DECODER, AttentionType.ENCODER, AttentionType.ENCODER_ONLY),
    contents=("xpacked", "xpacked_interleaved_v"),
    layouts=("LHBNC", "LBHNC"),
    layouts_with_kv_connector=(),
    sinks=False,
    non_causal=True,
    kv_connector=False,
    logits_soft_cap=False,
    capture_zeroes_query_starts=True,
    full_precision_new_tokens=True,
    fused_qk_norm_mrope_kvcache=False,
    quant_query_input=False,
    extensions=(
        ("logits_soft_cap", "the class ignores it in prefill, decode and encoders; here all three apply it"),
        ("sinks", "declared unsupported, though the Triton kernels have them; served in decoders, beside alibi too, and in encoders"),
        ("per_head_quant_scales", "the class reads one scale per layer; here k_scale and v_scale may be per KV head"),
        (
            "kv_cache_dtypes",
            "fp8_e5m2 is advertised, but the class's Triton writers store e4m3 codes, which its readers take for e5m2; here it is "
            "float8_e5m2, written and read, and both fnuz kinds work by name",
        ),
        ("non_causal", "the class bounds a non-causal window on the left alone; here it is symmetric"),
        ("sliding_window", "the alibi prefill ignores the window and an encoder takes a window of 1 for none; here both honour it"),
        (
            "alibi",
            "prefill takes sinks, an fp8 output, non-causal batches, negative slopes and key = value = None beside alibi; "
            "encoders refuse alibi, which the class ignores there",
        ),
        ("fused_output_quant", "also beside alibi, and on gfx90a; encoders refuse output_scale, which the class ignores there"),
        (
            "q_scale",
            "an fp8 query with a q_scale other than 1 is refused beside any cache, by the class beside an fp8 cache alone",
        ),
        ("unused_slots", "empty sequences give 0 and NaN in slots that no sequence owns reaches no output"),
        ("fused_rope_kvcache", "any block size that is a multiple of 16, partial rotary, float16 caches"),
        (
            "fused_qk_norm_rope_kvcache",
            "any block size and head size; the key comes back as it was before it was quantized, where the class dequantizes the stored "
            "fp8 key; encoders write nothing",
        ),
        ("kv_cache_update_bypass", "forward takes key = value = None beside any writer, though the class declares no bypass"),
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
    interleaved_v: bool = False,
    kv_connector: bool = False,
    arch: str | None = None,
) -> CacheSpec:
    """The spec of this backend's cache. Ports `customize_spec`, `get_preferred_block_size` and `supported_kv_cache_layouts`.

    Args:
      num_blocks, num_kv_heads, head_size, num_layers: B, H, D and L.
      head_size_v: None or `head_size`.
      block_size: N, a multiple of 16, or 1 (vLLM's probe of the bytes of a token); None is the preferred one (16).
      dtype: the model's dtype, which "auto" stands for.
      kv_cache_dtype: vLLM's string, or a dtype's own name. "fp8" and "fp8_e4m3" mean float8_e4m3fnuz on gfx94x, float8_e4m3fn elsewhere.
      order: "LHBNC" (default: keys of all blocks, then values, as the HIP kernels take for granted) or "LBHNC".
      interleaved_v: the layout that the fused qk-norm writer of AITER takes: values `[H, N/x, D, x]` in a block.
      kv_connector: refused: no layout of this backend is block-first.
      arch: "gfx942", "MI300X", ...; None is the default device's.

    Returns:
      The spec.

    Raises:
      ValueError: names the field and the rule that it breaks.
      UnsupportedError: a spec that this backend does not serve.
    """
    return BACKEND.spec_of(
        "xpacked_interleaved_v" if interleaved_v else "xpacked",
        order,
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
    """Logical shape of one layer's cache as `customize_spec` has it, [block, key or value, token, content].

    Args:
      num_blocks, block_size, num_kv_heads, head_size: B, N, H and D.

    Returns:
      As many elements a layer as `CacheSpec.shape` has.

    Raises:
      ValueError: no kernel of the backend has the block size.
    """
    BACKEND.check_block_size(block_size)
    return (num_blocks, 2, block_size, num_kv_heads * head_size)
