"""What a backend declares and what it serves: one frozen value per backend, with a field for every class method and flag of vLLM's class.

The fields hold the answers of the classes of vLLM 0.33.0; the tests compare them with answers recorded from its wheel. `extensions` lists
every deliberate difference: where the port serves more than the class declares, repairs what the class's kernels get wrong, or refuses what
the class drops in silence.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache import CacheSpec
from ..config import AttentionConfig, AttentionType, check_attention_type
from ..errors import bad_type
from ..fp8 import KV_CACHE_DTYPES
from ..literals import Content, Order
from .hip_gates import arch_name

KV_CACHE_DTYPE_NAMES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""What both vLLM classes advertise. The port also takes any cache dtype by its own name, such as "float8_e4m3fnuz"."""

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

STATIC_FP8 = "kFp8StaticTensorSym"
"""vLLM's name for one static scale per tensor, fp8: what `output_scale` asks for."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of one backend; hashable.

    Attributes:
      name: `get_name`.
      dtypes: `supported_dtypes`, dtypes of the model.
      kv_cache_dtypes: `supported_kv_cache_dtypes`, as vLLM's strings.
      head_sizes: `get_supported_head_sizes`; None is any from `min_head_size` on.
      min_head_size: the smallest head size.
      kernel_block_size_multiple: `get_supported_kernel_block_sizes`, a `MultipleOf`.
      preferred_block_size: `get_preferred_block_size`; None takes the default where that is supported, else the multiple.
      native_block_sizes: block sizes of the HIP kernels; other sizes are Triton's.
      attn_types: `supports_attn_type`.
      contents: cache contents that the backend reads and writes (see `CacheSpec`); the first is `customize_spec`'s.
      layouts: `supported_kv_cache_layouts`, orders, preferred first.
      layouts_with_kv_connector: the same where a KV connector is configured; empty: none works.
      sinks: `supports_sink`. sliding_window: `supports_sliding_window`. non_causal: `supports_non_causal`, of decoders.
      mm_prefix: `supports_mm_prefix`. kv_connector: `supports_kv_connector`. rswa: `supports_rswa`.
      pcp, dcp, non_causal_dcp: `supports_pcp`, `supports_dcp`, `supports_non_causal_dcp` (context parallelism).
      device_cpu_query_lens_mismatch: `supports_device_cpu_query_lens_mismatch`.
      compute_capability: `supports_compute_capability`; True: any device.
      combination: `supports_combination`; None: no combination is refused.
      logits_soft_cap, alibi: whether the class's kernels apply them.
      alibi_sqrt: `supports_alibi_sqrt`. per_head_quant_scales: `supports_per_head_quant_scales`.
      mla: `is_mla`. sparse: `is_sparse`. ssm: `is_ssm`.
      batch_invariance: `supports_batch_invariance`.
      cudagraph: the builder's `_cudagraph_support`.
      capture_zeroes_query_starts: what `build_for_cudagraph_capture` does to `query_start_loc`.
      forward_includes_kv_cache_update: whether `forward` writes the cache; where not, write before it.
      kv_cache_update_bypass: `supports_kv_cache_update_bypass`.
      full_precision_new_tokens: whether `forward` attends the step's tokens from `key` and `value`, in sequences of more than one query
        token; where not, everything is read from the cache.
      fused_output_quant: `fused_output_quant_supported`, quantization keys.
      fused_rope_kvcache, fused_qk_norm_rope_kvcache, fused_qk_norm_mrope_kvcache: the three fused writers. vLLM has them where AITER is on;
        the port always.
      quant_query_input: `supports_quant_query_input` on an arch that has fp8.
      no_quant_query_archs: prefixes of archs that keep the query in 16 bits all the same.
      extensions: pairs of a field (or "q_scale", "unused_slots") and what differs from the class there.
    """

    name: str
    dtypes: tuple[np.dtype, ...]
    kv_cache_dtypes: tuple[str, ...] = KV_CACHE_DTYPE_NAMES
    head_sizes: tuple[int, ...] | None
    min_head_size: int = 32
    kernel_block_size_multiple: int = 16
    preferred_block_size: int | None
    native_block_sizes: tuple[int, ...]
    attn_types: tuple[AttentionType, ...]
    contents: tuple[Content, ...]
    layouts: tuple[Order, ...]
    layouts_with_kv_connector: tuple[Order, ...]
    sinks: bool
    sliding_window: bool = True
    non_causal: bool
    mm_prefix: bool = False
    kv_connector: bool
    rswa: bool = False
    pcp: bool = False
    dcp: bool = False
    non_causal_dcp: bool = False
    device_cpu_query_lens_mismatch: bool = True
    compute_capability: bool = True
    combination: str | None = None
    logits_soft_cap: bool
    alibi: bool = True
    alibi_sqrt: bool = False
    per_head_quant_scales: bool = False
    mla: bool = False
    sparse: bool = False
    ssm: bool = False
    batch_invariance: bool = False
    cudagraph: str = "ALWAYS"
    capture_zeroes_query_starts: bool
    forward_includes_kv_cache_update: bool = False
    kv_cache_update_bypass: bool = False
    full_precision_new_tokens: bool
    fused_output_quant: tuple[str, ...] = (STATIC_FP8,)
    fused_rope_kvcache: bool = True
    fused_qk_norm_rope_kvcache: bool = True
    fused_qk_norm_mrope_kvcache: bool
    quant_query_input: bool
    no_quant_query_archs: tuple[str, ...] = ("gfx11",)
    extensions: tuple[tuple[str, str], ...] = ()

    @property
    def beyond(self) -> dict[str, str]:
        """`extensions` as a dict."""
        return dict(self.extensions)

    def serves(self, field: str) -> bool:
        """Whether the port serves a yes-or-no capability, declared or not."""
        return bool(getattr(self, field)) or field in self.beyond

    def supports_dtype(self, dtype: Any) -> bool:
        return np.dtype(dtype) in self.dtypes

    def supports_head_size(self, head_size: int) -> bool:
        return head_size >= self.min_head_size and (self.head_sizes is None or head_size in self.head_sizes)

    def supports_block_size(self, block_size: int | None) -> bool:
        """`None` is a block size yet to be chosen."""
        return block_size is None or (block_size > 0 and block_size % self.kernel_block_size_multiple == 0)

    def supports_kv_cache_dtype(self, name: str | None) -> bool:
        return name is None or name in self.kv_cache_dtypes

    def supports_attn_type(self, attn_type: AttentionType | str) -> bool:
        """`attn_type` is an `AttentionType` or its string; False for any other string, as in the class."""
        return attn_type in self.attn_types

    def supports_compute_capability(self, device_capability: Any) -> bool:
        """Whether the backend runs on a device of this (major, minor); the class looks at none."""
        return self.compute_capability

    def get_preferred_block_size(self, default: int = 16) -> int:
        if self.preferred_block_size is not None:
            return self.preferred_block_size
        return default if self.supports_block_size(default) else self.kernel_block_size_multiple

    def supported_kv_cache_layouts(self, *, kv_connector: bool = False) -> tuple[Order, ...]:
        """Orders, preferred first."""
        return self.layouts_with_kv_connector if kv_connector else self.layouts

    def fused_output_quant_supported(self, quant_key: str) -> bool:
        """`quant_key` is the name of vLLM's `QuantKey` constant, such as "kFp8StaticTensorSym"."""
        return quant_key in self.fused_output_quant

    def supports_quant_query_input(self, arch: str | None) -> bool:
        """Whether vLLM hands this backend fp8 queries where the cache is fp8, on "gfx942", "MI300X", ...; None is no AMD GPU."""
        return self.quant_query_input and (arch is None or not arch_name(arch).startswith(self.no_quant_query_archs))

    def validate_configuration(
        self,
        *,
        head_size: int,
        dtype: Any,
        kv_cache_dtype: str | None = None,
        block_size: int | None = None,
        use_mla: bool = False,
        has_sink: bool = False,
        use_sparse: bool = False,
        use_mm_prefix: bool = False,
        use_per_head_quant_scales: bool = False,
        device_capability: Any = None,
        attn_type: AttentionType | str = AttentionType.DECODER,
        has_sliding_window: bool = False,
        use_non_causal: bool = False,
        use_batch_invariant: bool = False,
        use_kv_connector: bool = False,
        use_pcp: bool = False,
        use_adaptive_verification: bool = False,
        use_dcp: bool = False,
        use_rswa: bool = False,
    ) -> tuple[str, ...]:
        """Why vLLM's selector would pass this backend over, by what the class declares; empty: it would take it.

        `supports` says what the port serves, which is more (`extensions`).

        Args:
          head_size, block_size: D and N; a `block_size` of None is yet to be chosen.
          dtype: the model's dtype.
          kv_cache_dtype: vLLM's string, or None.
          device_capability: (major, minor) of the device; no answer depends on it.
          attn_type: an `AttentionType` or its string.
          use_mla, use_sparse: must be what the backend is (`mla`, `sparse`).
          has_sink, use_mm_prefix, use_per_head_quant_scales, has_sliding_window, use_non_causal, use_batch_invariant, use_kv_connector,
            use_pcp, use_adaptive_verification, use_dcp, use_rswa: features that the layer or the engine uses.

        Returns:
          One reason for each argument that the class does not support.
        """
        sizes = {
            "head_size": (self.supports_head_size(head_size), head_size),
            "dtype": (self.supports_dtype(dtype), np.dtype(dtype).name),
            "kv_cache_dtype": (self.supports_kv_cache_dtype(kv_cache_dtype), kv_cache_dtype),
            "block_size": (self.supports_block_size(block_size), block_size),
            "attn_type": (self.supports_attn_type(attn_type), str(attn_type)),
            "device_capability": (self.supports_compute_capability(device_capability), device_capability),
        }
        asked = {
            "mm_prefix": use_mm_prefix,
            "sinks": has_sink,
            "per_head_quant_scales": use_per_head_quant_scales,
            "sliding_window": has_sliding_window,
            "rswa": use_rswa,
            "non_causal": use_non_causal,
            "non_causal_dcp": use_mla and use_non_causal and use_dcp,
            "batch_invariance": use_batch_invariant,
            "kv_connector": use_kv_connector,
            "pcp": use_pcp,
            "dcp": use_dcp,
            "device_cpu_query_lens_mismatch": use_adaptive_verification,
        }
        reasons = [f"{name} {value} not supported by {self.name}" for name, (fine, value) in sizes.items() if not fine]
        for name, wanted in (("mla", use_mla), ("sparse", use_sparse)):
            if bool(wanted) != getattr(self, name):
                reasons.append(f"{name if wanted else f'non-{name}'} not supported by {self.name}")
        reasons += [f"{name} not supported by {self.name}" for name, used in asked.items() if used and not getattr(self, name)]
        return tuple(reasons) if self.combination is None else (*reasons, self.combination)

    def supports(self, config: AttentionConfig, spec: CacheSpec | None) -> tuple[str, ...]:
        """Why `forward` and the writers refuse a layer of this backend; empty where they serve it.

        Args:
          config: the layer.
          spec: its cache; None, and not looked at, for encoder attention types.
        """
        if not isinstance(config, AttentionConfig):
            bad_type("config", config, "an AttentionConfig")
        attn_type = check_attention_type(config.attn_type)
        reasons = []
        if not self.supports_attn_type(attn_type):
            able = ", ".join(kind.name for kind in self.attn_types)
            reasons.append(f"attn_type is {attn_type.name}: {self.name} serves {able}")
        if not self.supports_head_size(config.head_size):
            able = f"one of {list(self.head_sizes)}" if self.head_sizes else f"at least {self.min_head_size}"
            reasons.append(f"head_size is {config.head_size}: {self.name} needs {able}")
        if not _known(config.kv_cache_dtype):
            reasons.append(
                f"kv_cache_dtype is {config.kv_cache_dtype!r}: {self.name} serves {', '.join(self.kv_cache_dtypes)}, or a dtype's name"
            )
        for field in ("alibi", "logits_soft_cap", "sinks", "sliding_window"):
            used = config.alibi_slopes is not None if field == "alibi" else bool(getattr(config, field) is not None)
            if used and not self.serves(field):
                reasons.append(f"{field} is not served by {self.name}")
        if attn_type in ENCODERS:
            return (*reasons, *_encoder_reasons(config))
        if not isinstance(spec, CacheSpec):
            bad_type("spec", spec, f"a CacheSpec where attn_type is {attn_type.name}")
        return (*reasons, *self._cache_reasons(config, spec))

    def _cache_reasons(self, config: AttentionConfig, spec: CacheSpec) -> list[str]:
        reasons = []
        for name in ("num_kv_heads", "head_size", "head_size_v"):
            if getattr(spec, name) != getattr(config, name):
                reasons.append(f"{name} is {getattr(spec, name)} in the cache and {getattr(config, name)} in the config")
        if spec.content not in self.contents:
            reasons.append(f"content is {spec.content!r}: {self.name} serves {', '.join(map(repr, self.contents))}")
        if spec.order not in self.layouts:
            reasons.append(f"order is {spec.order!r}: {self.name} serves {', '.join(map(repr, self.layouts))}")
        if not self.supports_block_size(spec.block_size):
            reasons.append(f"block_size is {spec.block_size}: {self.name} needs a multiple of {self.kernel_block_size_multiple}")
        if not spec.is_quantized and not self.supports_dtype(spec.dtype) and "dtypes" not in self.beyond:
            reasons.append(f"dtype is {spec.dtype.name}: {self.name} serves {', '.join(d.name for d in self.dtypes)}")
        wanted = _meanings(config.kv_cache_dtype)
        if wanted and spec.dtype.name not in wanted:
            reasons.append(
                f"kv_cache_dtype is {config.kv_cache_dtype!r}, which is {' or '.join(wanted)}, and the cache holds {spec.dtype.name}"
            )
        return reasons


def _known(kv_cache_dtype: str) -> bool:
    return kv_cache_dtype in (*KV_CACHE_DTYPE_NAMES, *KV_CACHE_DTYPES)


def _meanings(kv_cache_dtype: str) -> tuple[str, ...]:
    """Dtypes that a cache of this `kv_cache_dtype` may hold; empty: any ("auto": a cache knows its dtype)."""
    if kv_cache_dtype in ("fp8", "fp8_e4m3"):
        return ("float8_e4m3fn", "float8_e4m3fnuz")  # which of them is the arch's choice, made in `cache_spec`
    return (KV_CACHE_DTYPES[kv_cache_dtype].name,) if kv_cache_dtype in KV_CACHE_DTYPES else ()


def _encoder_reasons(config: AttentionConfig) -> list[str]:
    reasons = []
    if config.kv_cache_dtype.startswith(("fp8", "float8")):
        reasons.append(f"kv_cache_dtype is {config.kv_cache_dtype!r}: encoder attention has no cache and is not quantized")
    if config.alibi_slopes is not None:
        reasons.append("alibi_slopes: encoder attention has no ALiBi")
    return reasons
