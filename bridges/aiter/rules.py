"""What AITER's operators can't do right, as rules: a reason for each call that they would serve wrongly.

`SEMANTICS.md` Part I holds for what passes; docs/rocm.md lists the limits that remain.
"""

import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...functional.cache import CacheSpec, KVCache
from ...functional.calls import PagedAttentionCall, QkNormRopeUpdateCall, RopeUpdateCall, UpdateCacheCall
from ...kernels.archs import ARCHS, find_arch
from ..arch import Arch, default_arch
from ..triton import INTERPRETER_HINT, INTERPRETER_VARIABLE
from . import package as package
from .views import why_no_pages

FINITE_VARIABLE = "PUREPAGE_AITER_FINITE_CACHE"
"""Environment variable: 1 promises that slots which nobody sees hold no NaN or Inf. AITER's split and decode kernels read whole pages and
weigh what they should not see by 0, so without the promise its masked kernel serves every call."""

DECODE_VARIABLE = "PUREPAGE_AITER_PAGED_DECODE"
"""Environment variable: 1 sends steps of one query a sequence to AITER's paged decode, where it can serve them."""

SPLIT_KERNEL_FROM = 512
"""AITER's choice between its two kernels: never the split one for at most this many keys."""

_FULL = tuple(jnp.dtype(name) for name in ("float16", "bfloat16"))

RECORD_VARIABLE = "PUREPAGE_AITER_COMMAND_BUFFER"
"""Environment variable: 1 lets XLA record operators that allocate nothing into its command buffers. They must have run once in the process
with the same shapes, unrecorded: AITER's kernels compile when first called, which a recording does not survive."""


def recording_allowed() -> bool:
    return os.environ.get(RECORD_VARIABLE) == "1"


def finite_cache_promised() -> bool:
    return os.environ.get(FINITE_VARIABLE) == "1"


def paged_decode_wanted() -> bool:
    return os.environ.get(DECODE_VARIABLE) == "1"


def decodes(call: PagedAttentionCall, arch: Arch) -> bool:
    """Whether AITER's paged decode serves a call, and not `unified_attention`: it can, and is asked for or the other can't."""
    if package.source("paged_attention_decode") is None or any(_paged_decode(call, arch)):
        return False
    return paged_decode_wanted() or any(_unified_attention(call, arch))


def takes_score_scale() -> bool:
    """Releases that know `q_scales` multiply the scores by `q_descale`; earlier ones assert that it is None."""
    return "q_scales" in package.parameters("unified_attention")


def platform_fp8(arch: Arch) -> str | None:
    """The fp8 kind that AITER means on an architecture; None where it has none that works."""
    facts = find_arch(package.FOREIGN_ARCH if arch.platform != "rocm" else arch.name)
    return None if facts is None else facts.aiter_e4m3


def splits_every_decode(arch: Arch) -> bool:
    """Whether AITER splits each decode step on an architecture, however many programs there are."""
    facts = find_arch(arch.name)
    return facts is not None and facts.aiter_splits_decode


def splits_a_sequence(call: PagedAttentionCall) -> bool:
    """Whether AITER, left to itself, would spread each sequence over several programs, which its masked kernel does not."""
    arch, decode, sequences = default_arch(), call.metadata.max_query_len == 1, call.metadata.seq_lens.shape[0]
    heads, kv_heads = call.query.shape[1], call.cache.local_spec.num_kv_heads
    rows = max(16 // (heads // kv_heads), 1)
    programs = ((sequences if decode else call.query.shape[0]) // rows + sequences) * kv_heads
    few = programs <= 4 * arch.compute_units or (decode and splits_every_decode(arch))
    return call.sliding_window is None and (call.metadata.max_seq_len or _width(call)) > SPLIT_KERNEL_FROM and few


def _width(call: PagedAttentionCall) -> int:
    return call.metadata.block_table.shape[1] * call.cache.local_spec.block_size


def refusals(operation: str, call: Any, explicit: bool) -> tuple[str, ...]:
    """Why AITER can't serve this call here; see `purepage.functional.dispatch`."""
    arch = default_arch()
    why = package.why_not(operator_of(operation, call, arch), arch) or _why_not_here(arch, explicit)
    if why:
        return (why,)
    return rule_refusals(operation, call, explicit, arch)


def rule_refusals(operation: str, call: Any, explicit: bool, arch: Arch) -> tuple[str, ...]:
    """What the operator itself can't do on an architecture, wherever it is asked."""
    reasons = _RULES[operation](call, arch)
    name = operator_of(operation, call, arch)
    hip_archs = [facts.name for facts in ARCHS.values() if facts.aiter_hip]
    if package.OPERATORS[name].hip and arch.name not in hip_archs:
        reasons = (f"{name} is HIP code for {' and '.join(hip_archs)}, not {arch.name}", *reasons)
    if not explicit and name == "paged_attention_decode" and not paged_decode_wanted():
        hint = f"its paged decode can, asked for by name or with {DECODE_VARIABLE}=1"
        reasons = (*_unified_attention(call, arch), hint)
    if not explicit and name == "unified_attention":
        reasons = (*reasons, *_declined(call))
    return tuple(reason for reason in reasons if reason)


def operator_of(operation: str, call: Any, arch: Arch) -> str:
    """The AITER operator that serves an operation."""
    flash = operation == "update_cache" and call.cache.local_spec.content == "flash"
    decode = operation == "paged_attention" and decodes(call, arch)
    return {
        "paged_attention": "paged_attention_decode" if decode else "unified_attention",
        "update_cache": "reshape_and_cache_flash" if flash else "reshape_and_cache",
        "rope_and_update_cache": "fused_qk_rope_reshape_and_cache",
        "qk_norm_rope_and_update_cache": "fused_qk_norm_rope_cache_pts_quant_shuffle",
        "qk_norm_mrope_and_update_cache": "fused_qk_norm_mrope_3d_cache_pts_quant_shuffle",
    }[operation]


def _why_not_here(arch: Arch, explicit: bool) -> str | None:
    if arch.platform == "rocm":
        return None
    if arch.platform not in ("cpu", "cuda"):
        return f"runs on rocm, not {arch.platform}"
    if not explicit:
        return f"runs on rocm, not {arch.platform}, unless asked for by name (for tests and benchmarks)"
    if arch.platform == "cpu" and os.environ.get(INTERPRETER_VARIABLE) != "1":
        return f"runs on rocm; on a CPU only through Triton's interpreter: {INTERPRETER_HINT}"
    return None


def _cache_reasons(cache: KVCache, arch: Arch, *, fp8: bool) -> tuple[str | None, ...]:
    spec = cache.local_spec
    per_head = cache.k_scale.ndim == 2 or cache.v_scale.ndim == 2
    return (
        "reads one scale per layer, not one per KV head" if spec.is_quantized and per_head else None,
        _dtype_reason(spec, arch, fp8),
    )


def _dtype_reason(spec: CacheSpec, arch: Arch, fp8: bool) -> str | None:
    if spec.dtype in _FULL:
        return None
    if not spec.is_quantized:
        return f"no {spec.dtype.name} cache"
    if not fp8:
        return "its fp8 store neither divides by the scale nor clamps: update_cache of another implementation does"
    kind = platform_fp8(arch)
    return None if spec.dtype.name == kind else f"no {spec.dtype.name} cache on {arch.name}" + (f", only {kind}" if kind else "")


def _paged_attention(call: PagedAttentionCall, arch: Arch) -> tuple[str | None, ...]:
    return () if decodes(call, arch) else _unified_attention(call, arch)


def _paged_decode(call: PagedAttentionCall, arch: Arch) -> tuple[str | None, ...]:
    """Of `paged_attention_decode`. Causality is no matter for one query, which is the last of its sequence."""
    spec, dtype = call.cache.local_spec, call.query.dtype
    group = call.query.shape[1] // spec.num_kv_heads
    return (
        None if call.metadata.max_query_len == 1 else "one query a sequence only (metadata.max_query_len)",
        "has no window (sliding_window)" if call.sliding_window is not None else None,
        "has no soft cap (logits_soft_cap)" if call.logits_soft_cap else None,
        "has no sinks (sinks)" if call.sinks is not None else None,
        "returns no log-sum-exp (return_lse)" if call.return_lse else None,
        "adds no bias (qq_bias)" if call.qq_bias is not None else None,
        "sees the new token too" if call.context_only else None,
        "writes no fp8 (output_scale)" if call.output_scale is not None or jnp.dtype(call.output_dtype).itemsize == 1 else None,
        f"no {dtype} queries" if dtype not in _FULL else None,
        _interpreter_reason(dtype, arch),
        f"multiplies {dtype} queries by {spec.dtype} keys" if not spec.is_quantized and spec.dtype != dtype else None,
        _dtype_reason(spec, arch, True),
        why_no_pages(spec, 1),
        f"blocks of {spec.block_size} tokens: multiples of 16 only" if spec.block_size % 16 else None,
        f"head_size {spec.head_size}: a power of two from 16" if spec.head_size & (spec.head_size - 1) or spec.head_size < 16 else None,
        "its kernel for one query head per KV head does not say what it reads past a sequence's end" if group == 1 else None,
    )


def _unified_attention(call: PagedAttentionCall, arch: Arch) -> tuple[str | None, ...]:
    spec, dtype = call.cache.local_spec, call.query.dtype
    fp8_query = dtype not in _FULL and jnp.dtype(dtype).itemsize == 1
    decode = call.metadata.max_query_len == 1
    out = jnp.dtype(call.output_dtype)
    kind = platform_fp8(arch)
    return (
        None if call.metadata.causal else "causal only (metadata.causal)",
        "attends whole sequences, not the part before this step's tokens" if call.context_only else None,
        "returns no log-sum-exp (return_lse)" if call.return_lse else None,
        "this release's soft cap, NaN for scores above 88 caps, is not where it can be repaired (logits_soft_cap)"
        if call.logits_soft_cap and package.soft_cap_module() is None
        else None,
        "reads a tree's bias as wide as its row stride, unmasked by rows (qq_bias)" if call.qq_bias is not None else None,
        f"no {dtype} queries" if dtype not in _FULL and not fp8_query else None,
        _interpreter_reason(dtype, arch),
        _fp8_query_reason(call, kind) if fp8_query else None,
        f"multiplies {dtype} queries by {spec.dtype} keys: one dtype, or an fp8 cache"
        if not fp8_query and not spec.is_quantized and spec.dtype != dtype
        else None,
        *_cache_reasons(call.cache, arch, fp8=True),
        why_no_pages(spec, 1),
        f"blocks of {spec.block_size} tokens: multiples of 8 only" if spec.block_size % 8 else None,
        "a traced scale needs an fp8 cache or a newer release (scale, q_scale)"
        if call.score_scale is not None and not takes_score_scale() and not spec.is_quantized
        else None,
        "adds ALiBi relative to the context, which sinks make visible (alibi_slopes with sinks, more than one query a sequence)"
        if call.alibi_slopes is not None and call.sinks is not None and not decode
        else None,
        "a row whose first keys are all outside the window underflows with ALiBi (alibi_slopes with sliding_window, more than one query a "
        "sequence)"
        if call.alibi_slopes is not None and call.sliding_window is not None and not decode
        else None,
        f"fp8 outputs are {kind or 'none'} on {arch.name}, not {out.name}" if call.output_scale is not None and out.name != kind else None,
        "Triton's interpreter rounds wrongly to fp8: no output_scale on a CPU"
        if call.output_scale is not None and arch.platform == "cpu"
        else None,
        f"no {out.name} outputs" if call.output_scale is None and out.itemsize == 1 else None,
    )


def _interpreter_reason(dtype: Any, arch: Arch) -> str | None:
    """Triton's interpreter keeps bfloat16 as bits, and negates and multiplies these where a kernel does not widen them first."""
    return (
        "Triton's interpreter computes wrongly with AITER's bfloat16: float16 on a CPU"
        if (arch.platform, dtype) == ("cpu", jnp.bfloat16)
        else None
    )


def _fp8_query_reason(call: PagedAttentionCall, kind: str | None) -> str | None:
    if not takes_score_scale():
        return "this release drops the scales of fp8 queries"
    name = jnp.dtype(call.query.dtype).name
    return None if name == kind == call.cache.local_spec.dtype.name else f"fp8 queries need query and cache of {kind}"


def _declined(call: PagedAttentionCall) -> tuple[str | None, ...]:
    """What it can do, but is not picked for."""
    return (
        f"its split kernel lets NaN of unused slots through; {FINITE_VARIABLE}=1 promises that there is none, or ask for it by name"
        if not finite_cache_promised() and splits_a_sequence(call)
        else None,
    )


def _update_cache(call: UpdateCacheCall, arch: Arch) -> tuple[str | None, ...]:
    spec = call.cache.local_spec
    return (
        *_cache_reasons(call.cache, arch, fp8=False),
        "needs keys and values of the cache's dtype" if not call.key.dtype == call.value.dtype == spec.dtype else None,
        "its flash writer takes the heads of a token for neighbours, which they are not in a 'packed' cache"
        if spec.content == "packed"
        else None,
    )


def _rope_update(call: RopeUpdateCall, arch: Arch) -> tuple[str | None, ...]:
    spec, rotary_dim = call.cache.local_spec, call.cos_sin_cache.shape[1]
    head_size = spec.head_size
    return (
        *_cache_reasons(call.cache, arch, fp8=False),
        None if spec.content == "xpacked" else why_no_pages(spec, 1),
        f"x-packed blocks of {spec.block_size} tokens: powers of two only"
        if spec.content == "xpacked" and spec.block_size & (spec.block_size - 1)
        else None,
        f"no {call.query.dtype} queries" if call.query.dtype not in _FULL else None,
        _interpreter_reason(call.query.dtype, arch),
        f"needs key and value of the cache's dtype {spec.dtype}" if not call.key.dtype == call.value.dtype == spec.dtype else None,
        f"no partial rotary: {rotary_dim} of {head_size} channels" if rotary_dim != head_size else None,
        f"head_size {head_size} is no power of two" if head_size & (head_size - 1) else None,
        "a release with upcast_operand takes bfloat16 caches only"
        if spec.dtype != jnp.bfloat16 and "upcast_operand" in package.parameters("fused_qk_rope_reshape_and_cache")
        else None,
    )


def _qk_norm(call: QkNormRopeUpdateCall, arch: Arch) -> tuple[str | None, ...]:
    spec, dtype = call.cache.local_spec, call.qkv.dtype
    rotary_dim, head_size = call.cos_sin_cache.shape[1], spec.head_size
    return (
        *_cache_reasons(call.cache, arch, fp8=False),
        why_no_pages(spec, 1),
        f"needs qkv of the cache's dtype {spec.dtype}" if dtype != spec.dtype else None,
        "reads the norms' weights and the cosines in qkv's dtype: cast them first (q_weight, k_weight, cos_sin_cache)"
        if not call.q_weight.dtype == call.k_weight.dtype == call.cos_sin_cache.dtype == dtype
        else None,
        f"head_size {head_size}: 64, 128 or 256 only" if head_size not in (64, 128, 256) else None,
        f"rotary_dim {rotary_dim} is no multiple of head_size / 16" if rotary_dim % (head_size // 16) else None,
        "this release rotates whole heads only (rotary_dim)"
        if rotary_dim != head_size and "rotary_dim" not in package.parameters(operator_of(_qk_norm_name(call), call, arch))
        else None,
    )


def _qk_norm_name(call: QkNormRopeUpdateCall) -> str:
    return "qk_norm_mrope_and_update_cache" if call.mrope_section else "qk_norm_rope_and_update_cache"


_RULES: dict[str, Callable[[Any, Arch], tuple[str | None, ...]]] = {
    "paged_attention": _paged_attention,
    "update_cache": _update_cache,
    "rope_and_update_cache": _rope_update,
    "qk_norm_rope_and_update_cache": _qk_norm,
    "qk_norm_mrope_and_update_cache": _qk_norm,
}
