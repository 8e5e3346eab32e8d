"""The `xla` implementation: plain JAX, on any device."""

from collections.abc import Mapping
from typing import Any

from ...functional.dispatch import Plan, Unsupported
from ...functional.features import Serves
from ...functional.layout import LAYOUT_PROPERTIES
from ...functional.target import Target
from .attention import encoder_attention, paged_attention, paged_attention_with_new_tokens
from .fused import qk_norm_mrope_and_update_cache, qk_norm_rope_and_update_cache, rope_and_update_cache
from .merge import merge_attention_states
from .rotary import rotary_embedding
from .writers import update_cache

__all__ = [
    "SERVES",
    "encoder_attention",
    "merge_attention_states",
    "paged_attention",
    "paged_attention_with_new_tokens",
    "plan",
    "qk_norm_mrope_and_update_cache",
    "qk_norm_rope_and_update_cache",
    "rope_and_update_cache",
    "rotary_embedding",
    "update_cache",
]

_MODEL = frozenset(("float32", "float16", "bfloat16"))
_FP8 = frozenset(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"))
_TABLE = _MODEL | {"float64"}
"""float64 tables and weights exist only under x64; the arithmetic is float32."""
_CACHE = frozenset(("head_size_v", "quantized_cache", "scales_per_head", "mixed_scale_ranks", "mixed_dtypes"))
_ROTARY = frozenset(("partial_rotary", "gptj_rotary"))
_SCORES = frozenset(("score_scale", "sinks", "sliding_window", "traced_window", "key_range", "logits_soft_cap"))

_PAGED_ATTENTION = Serves(
    features=_SCORES
    | _CACHE
    | {
        "alibi_slopes",
        "qq_bias",
        "qq_bias_per_sequence",
        "output_scale",
        "return_lse",
        "context_only",
        "non_causal",
        "quantized_query",
    },
    dtypes={"query": _MODEL | _FP8, "cache": _MODEL | _FP8, "output_dtype": _MODEL | _FP8},
    layouts=LAYOUT_PROPERTIES,
)
_ROPE_UPDATE = {"cache": _MODEL | _FP8, "key": _MODEL, "value": _MODEL, "query": _MODEL, "cos_sin_cache": _TABLE}
_QK_NORM = Serves(
    features=_CACHE | _ROTARY | {"mrope_section", "is_interleaved"},
    dtypes={"cache": _MODEL | _FP8, "qkv": _MODEL, "q_weight": _TABLE, "k_weight": _TABLE, "cos_sin_cache": _TABLE},
    layouts=LAYOUT_PROPERTIES,
)

SERVES: Mapping[str, Serves] = {
    "paged_attention": _PAGED_ATTENTION,
    "paged_attention_with_new_tokens": _PAGED_ATTENTION,
    "encoder_attention": Serves(features=_SCORES | {"causal", "alibi_slopes", "return_lse", "head_size_v"}, dtypes={"query": _MODEL}),
    "update_cache": Serves(features=_CACHE, dtypes={"cache": _MODEL | _FP8, "key": _MODEL, "value": _MODEL}, layouts=LAYOUT_PROPERTIES),
    "rotary_embedding": Serves(features=_ROTARY, dtypes={"query": _MODEL, "key": _MODEL, "cos_sin_cache": _TABLE}),
    "rope_and_update_cache": Serves(features=_CACHE | _ROTARY, dtypes=_ROPE_UPDATE, layouts=LAYOUT_PROPERTIES),
    "qk_norm_rope_and_update_cache": _QK_NORM,
    "qk_norm_mrope_and_update_cache": _QK_NORM,
    "merge_attention_states": Serves(dtypes={"out_a": _MODEL, "out_b": _MODEL}),
}
"""Every feature, dtype and layout there is today, on every device that JAX has: XLA compiles for it."""

_PLANS: Mapping[str, Plan] = {
    operation: Plan(run)
    for operation, run in {
        "paged_attention": paged_attention,
        "paged_attention_with_new_tokens": paged_attention_with_new_tokens,
        "encoder_attention": encoder_attention,
        "update_cache": update_cache,
        "rotary_embedding": rotary_embedding,
        "rope_and_update_cache": rope_and_update_cache,
        "qk_norm_rope_and_update_cache": qk_norm_rope_and_update_cache,
        "qk_norm_mrope_and_update_cache": qk_norm_mrope_and_update_cache,
        "merge_attention_states": merge_attention_states,
    }.items()
}


def plan(operation: str, call: Any, target: Target, *, explicit: bool) -> Plan | Unsupported:
    """The plan of a call: the JAX function of its operation, which reads everything off the call."""
    return _PLANS[operation]
