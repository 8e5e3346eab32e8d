"""Which of AITER's operators serves a call, and what they can't do right: a reason for each call that they would serve wrongly.

The semantics are those of docs/semantics.md; docs/rocm.md lists the limits that remain.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from ...functional.cache import CacheSpec
from ...functional.calls import PagedAttentionCall, QkNormRopeUpdateCall, RopeUpdateCall, UpdateCacheCall
from ...functional.features import Serves
from ...functional.layout import LAYOUT_PROPERTIES, layout_of
from ...functional.target import Target, variable_of
from ...kernels.archs import ARCHS, find_arch
from ..triton import INTERPRETER_HINT
from . import package as package
from .views import why_no_pages

FINITE_VARIABLE = variable_of("aiter_finite_cache")
DECODE_VARIABLE = variable_of("aiter_paged_decode")

SPLIT_KERNEL_FROM = 512
"""AITER's choice between its two kernels: never the split one for at most this many keys."""

_HALF = frozenset(("float16", "bfloat16"))
_E4M3 = frozenset(("float8_e4m3fn", "float8_e4m3fnuz"))
_MODEL = frozenset(("float32", "float16", "bfloat16"))
_TABLE = _MODEL | {"float64"}
_ROTARY = frozenset(("partial_rotary", "gptj_rotary"))
_ARCHS = ARCHS.keys()
_ROWS = frozenset(("tokens_are_rows", "heads_are_adjacent", "sides_are_adjacent", "sides_are_apart"))
_UNSCALED = "its fp8 store neither divides by the scale nor clamps: update_cache of another implementation does"
_ONE_SCALE = "reads one scale per layer, not one per KV head"

UNIFIED_ATTENTION = Serves(
    features=frozenset(
        ("score_scale", "alibi_slopes", "sinks", "sliding_window", "logits_soft_cap", "output_scale", "quantized_query", "quantized_cache")
    ),
    dtypes={"query": _HALF | _E4M3, "cache": _HALF | _E4M3, "output_dtype": _MODEL | _E4M3},
    layouts=_ROWS,
    archs=_ARCHS,
    because={
        "non_causal": "causal only (metadata.causal)",
        "context_only": "attends whole sequences, not the part before this step's tokens",
        "return_lse": "returns no log-sum-exp (return_lse)",
        "qq_bias": "reads a tree's bias as wide as its row stride, unmasked by rows (qq_bias)",
        "scales_per_head": _ONE_SCALE,
        "mixed_dtypes": "multiplies queries by keys of another dtype wrongly: one dtype, or an fp8 cache (query, cache.spec.dtype)",
    },
)
"""Of `unified_attention`."""

PAGED_DECODE = Serves(
    features=frozenset(("score_scale", "alibi_slopes", "quantized_cache", "scales_per_head", "mixed_scale_ranks", "non_causal")),
    dtypes={"query": _HALF, "cache": _HALF | _E4M3, "output_dtype": _MODEL},
    layouts=_ROWS,
    archs=_ARCHS,
    because={
        "sliding_window": "has no window (sliding_window)",
        "logits_soft_cap": "has no soft cap (logits_soft_cap)",
        "sinks": "has no sinks (sinks)",
        "return_lse": "returns no log-sum-exp (return_lse)",
        "qq_bias": "adds no bias (qq_bias)",
        "context_only": "sees the new token, too",
        "output_scale": "writes no fp8 (output_scale)",
        "mixed_dtypes": "multiplies queries by keys of another dtype wrongly: one dtype, or an fp8 cache (query, cache.spec.dtype)",
    },
)
"""Of `paged_attention_decode`. Causality does not matter to one query, which is the last of its sequence."""

_WRITER = {"quantized_cache": _UNSCALED, "scales_per_head": _ONE_SCALE, "mixed_dtypes": "needs keys and values of the cache's dtype"}
_QK_NORM = Serves(
    features=_ROTARY | {"mrope_section", "is_interleaved"},
    dtypes={"cache": _HALF, "qkv": _HALF, "q_weight": _HALF, "k_weight": _HALF, "cos_sin_cache": _HALF},
    layouts=_ROWS,
    archs=_ARCHS,
    because={**_WRITER, "mixed_dtypes": "needs qkv of the cache's dtype"},
)

SERVES: Mapping[str, Serves] = {
    "paged_attention": Serves(
        features=UNIFIED_ATTENTION.features | PAGED_DECODE.features,
        dtypes=UNIFIED_ATTENTION.dtypes,
        layouts=_ROWS,
        archs=_ARCHS,
        because=UNIFIED_ATTENTION.because,
    ),
    "update_cache": Serves(dtypes={"cache": _HALF, "key": _HALF, "value": _HALF}, layouts=LAYOUT_PROPERTIES, archs=_ARCHS, because=_WRITER),
    "rope_and_update_cache": Serves(
        features=frozenset(("gptj_rotary",)),
        dtypes={"cache": _HALF, "query": _HALF, "key": _HALF, "value": _HALF, "cos_sin_cache": _TABLE},
        layouts=_ROWS | {"key_has_vectors_of_channels", "value_has_tokens_innermost"},
        archs=_ARCHS,
        because={**_WRITER, "partial_rotary": "rotates whole heads only (cos_sin_cache narrower than head_size)"},
    ),
    "qk_norm_rope_and_update_cache": _QK_NORM,
    "qk_norm_mrope_and_update_cache": _QK_NORM,
}
"""What one of AITER's operators for an operation serves; the rules below say more about each operator."""


def unsupported_reasons(operation: str, call: Any, target: Target, *, explicit: bool) -> tuple[str, ...]:
    """What the operator itself can't do on a target, whatever is installed here; empty where it can serve the call."""
    operator = operator_of(operation, call, target)
    reasons = [*_reasons_of(operator, call, target)]
    hip_archs = [facts.name for facts in ARCHS.values() if facts.aiter_hip]
    if package.OPERATORS[operator].hip and target.arch not in hip_archs:
        reasons.insert(0, f"{operator} is HIP code for {' and '.join(hip_archs)}, not {target.arch}")
    if not explicit and operator == "paged_attention_decode" and not target.settings.aiter_paged_decode:
        hint = f"its paged decode can, asked for by name or with {DECODE_VARIABLE}=1"
        reasons = [*_reasons_of("unified_attention", call, target), hint]
    if not explicit and operator == "unified_attention" and not target.settings.aiter_finite_cache and splits_a_sequence(call, target):
        reasons.append(
            f"its split kernel lets NaN of unused slots through; {FINITE_VARIABLE}=1 promises that there is none, or ask for it by name"
        )
    return tuple(reasons)


def operator_of(operation: str, call: Any, target: Target) -> str:
    """The AITER operator that serves an operation."""
    if operation == "paged_attention":
        return "paged_attention_decode" if decodes(call, target) else "unified_attention"
    if operation == "update_cache":
        return "reshape_and_cache_flash" if layout_of(call.cache.spec.content).tokens_are_rows else "reshape_and_cache"
    return {
        "rope_and_update_cache": "fused_qk_rope_reshape_and_cache",
        "qk_norm_rope_and_update_cache": "fused_qk_norm_rope_cache_pts_quant_shuffle",
        "qk_norm_mrope_and_update_cache": "fused_qk_norm_mrope_3d_cache_pts_quant_shuffle",
    }[operation]


def not_here(target: Target, *, explicit: bool) -> str | None:
    """Why AITER does not run on this kind of device; None where it does."""
    if target.platform == "rocm":
        return None
    if target.platform not in ("cpu", "cuda"):
        return f"runs on rocm, not {target.platform}"
    if not explicit:
        return f"runs on rocm, not {target.platform}, unless asked for by name (for tests and benchmarks)"
    if target.platform == "cpu" and not target.settings.interpret:
        return f"runs on rocm; on a CPU only through Triton's interpreter: {INTERPRETER_HINT}"
    return None


def decodes(call: PagedAttentionCall, target: Target) -> bool:
    """Whether AITER's paged decode serves a call, and not `unified_attention`: it can, and is asked for or the other can't."""
    if package.source("paged_attention_decode") is None or _reasons_of("paged_attention_decode", call, target):
        return False
    return target.settings.aiter_paged_decode or bool(_reasons_of("unified_attention", call, target))


def takes_score_scale() -> bool:
    """Releases that know `q_scales` multiply the scores by `q_descale`; earlier ones assert that it is None."""
    return "q_scales" in package.parameters("unified_attention")


def platform_fp8(target: Target) -> str | None:
    """The fp8 kind that AITER means on a target; None where it has none that works."""
    facts = find_arch(package.FOREIGN_ARCH if target.platform != "rocm" else target.arch)
    return None if facts is None else facts.aiter_e4m3


def splits_every_decode(target: Target) -> bool:
    """Whether AITER splits each decode step on a target, however many programs there are."""
    facts = find_arch(target.arch)
    return facts is not None and facts.aiter_splits_decode


def splits_a_sequence(call: PagedAttentionCall, target: Target) -> bool:
    """Whether AITER, left to itself, would spread each sequence over several programs, which its masked kernel does not."""
    decode, sequences, spec = call.metadata.max_query_len == 1, call.metadata.seq_lens.shape[0], call.cache.local_spec
    rows = max(16 // (call.query.shape[1] // spec.num_kv_heads), 1)
    programs = ((sequences if decode else call.query.shape[0]) // rows + sequences) * spec.num_kv_heads
    few = programs <= 4 * target.compute_units or (decode and splits_every_decode(target))
    longest = call.metadata.max_seq_len or call.metadata.block_table.shape[1] * spec.block_size
    return call.sliding_window is None and longest > SPLIT_KERNEL_FROM and few


def _reasons_of(operator: str, call: Any, target: Target) -> list[str]:
    """Why an operator can't serve a call on a target."""
    declared, rules = _OPERATORS[operator]
    return [*declared.unsupported_reasons(call, target), *(reason for reason in rules(call, target) if reason)]


def _cache_dtype_reason(spec: CacheSpec, target: Target) -> str | None:
    """Of a cache whose dtype is one that AITER knows."""
    kind = platform_fp8(target)
    if not spec.is_quantized or spec.dtype.name == kind:
        return None
    return f"no {spec.dtype.name} cache on {target.arch}" + (f", only {kind}" if kind else "")


def _paged_decode(call: PagedAttentionCall, target: Target) -> tuple[str | None, ...]:
    spec = call.cache.local_spec
    queries_per_kv_head = call.query.shape[1] // spec.num_kv_heads
    return (
        None if call.metadata.max_query_len == 1 else "one query a sequence only (metadata.max_query_len)",
        _interpreter_reason(call.query.dtype, target),
        _cache_dtype_reason(spec, target),
        why_no_pages(spec, 1),
        f"blocks of {spec.block_size} tokens: multiples of 16 only" if spec.block_size % 16 else None,
        f"head_size {spec.head_size}: a power of two from 16" if spec.head_size & (spec.head_size - 1) or spec.head_size < 16 else None,
        "its kernel for one query head per KV head does not say what it reads past a sequence's end" if queries_per_kv_head == 1 else None,
    )


def _unified_attention(call: PagedAttentionCall, target: Target) -> tuple[str | None, ...]:
    spec, decode, out = call.cache.local_spec, call.metadata.max_query_len == 1, jnp.dtype(call.output_dtype)
    kind = platform_fp8(target)
    return (
        "this release's soft cap, NaN for scores above 88 caps, is not where it can be repaired (logits_soft_cap)"
        if call.logits_soft_cap and package.soft_cap_module() is None
        else None,
        _interpreter_reason(call.query.dtype, target),
        _fp8_query_reason(call, kind),
        _cache_dtype_reason(spec, target),
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
        f"fp8 outputs are {kind or 'none'} on {target.arch}, not {out.name}"
        if call.output_scale is not None and out.name != kind
        else None,
        "Triton's interpreter rounds wrongly to fp8: no output_scale on a CPU"
        if call.output_scale is not None and target.platform == "cpu"
        else None,
        f"no {out.name} outputs" if call.output_scale is None and out.itemsize == 1 else None,
    )


def _interpreter_reason(dtype: Any, target: Target) -> str | None:
    """Triton's interpreter keeps bfloat16 as bits, and negates and multiplies these where a kernel does not widen them first."""
    return (
        "Triton's interpreter computes wrongly with AITER's bfloat16: float16 on a CPU"
        if (target.platform, dtype) == ("cpu", jnp.bfloat16)
        else None
    )


def _fp8_query_reason(call: PagedAttentionCall, kind: str | None) -> str | None:
    name = jnp.dtype(call.query.dtype).name
    if name not in _E4M3:
        return None
    if not takes_score_scale():
        return "this release drops the scales of fp8 queries"
    return None if name == kind == call.cache.spec.dtype.name else f"fp8 queries need query and cache of {kind}"


def _update_cache(call: UpdateCacheCall, target: Target) -> tuple[str | None, ...]:
    layout = layout_of(call.cache.spec.content)
    return (
        f"its flash writer takes the heads of a token for neighbours, which they are not in a {layout.name!r} cache (cache.spec.content)"
        if layout.tokens_are_rows and not layout.heads_are_adjacent
        else None,
        why_no_pages(call.cache.local_spec, 1) if layout.tokens_are_rows else None,
        f"has no writer for the value axes of a {layout.name!r} cache (cache.spec.content)"
        if not layout.tokens_are_rows and not layout.sides_are_apart
        else None,
    )


def _rope_update(call: RopeUpdateCall, target: Target) -> tuple[str | None, ...]:
    spec = call.cache.local_spec
    rows, block_size, head_size = layout_of(spec.content).tokens_are_rows, spec.block_size, spec.head_size
    return (
        why_no_pages(spec, 1) if rows else None,
        f"x-packed blocks of {block_size} tokens: powers of two only" if not rows and block_size & (block_size - 1) else None,
        _interpreter_reason(call.query.dtype, target),
        f"head_size {head_size} is no power of two" if head_size & (head_size - 1) else None,
        "a release with upcast_operand takes bfloat16 caches only"
        if spec.dtype != jnp.bfloat16 and "upcast_operand" in package.parameters("fused_qk_rope_reshape_and_cache")
        else None,
    )


def _qk_norm(operator: str) -> Callable[[QkNormRopeUpdateCall, Target], tuple[str | None, ...]]:
    def rules(call: QkNormRopeUpdateCall, target: Target) -> tuple[str | None, ...]:
        spec, dtype = call.cache.local_spec, call.qkv.dtype
        rotary_dim, head_size = call.cos_sin_cache.shape[1], spec.head_size
        return (
            why_no_pages(spec, 1),
            "reads the norms' weights and the cosines in qkv's dtype: cast them first (q_weight, k_weight, cos_sin_cache)"
            if not call.q_weight.dtype == call.k_weight.dtype == call.cos_sin_cache.dtype == dtype
            else None,
            f"head_size {head_size}: 64, 128 or 256 only" if head_size not in (64, 128, 256) else None,
            f"rotary_dim {rotary_dim} is no multiple of head_size / 16" if rotary_dim % (head_size // 16) else None,
            "this release rotates whole heads only (rotary_dim)"
            if rotary_dim != head_size and "rotary_dim" not in package.parameters(operator)
            else None,
        )

    return rules


_OPERATORS: Mapping[str, tuple[Serves, Callable[[Any, Target], tuple[str | None, ...]]]] = {
    "unified_attention": (UNIFIED_ATTENTION, _unified_attention),
    "paged_attention_decode": (PAGED_DECODE, _paged_decode),
    "reshape_and_cache": (SERVES["update_cache"], _update_cache),
    "reshape_and_cache_flash": (SERVES["update_cache"], _update_cache),
    "fused_qk_rope_reshape_and_cache": (SERVES["rope_and_update_cache"], _rope_update),
    **{name: (SERVES["qk_norm_rope_and_update_cache"], _qk_norm(name)) for name in package.QK_NORM_OPERATORS},
}
"""What each operator serves, and the rules about what it can't do right."""
