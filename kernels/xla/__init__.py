"""The `xla` implementation: plain JAX, on any device. It serves every call."""

from typing import Any

from .attention import encoder_attention, paged_attention, paged_attention_with_new_tokens
from .fused import qk_norm_mrope_and_update_cache, qk_norm_rope_and_update_cache, rope_and_update_cache
from .merge import merge_attention_states
from .rotary import rotary_embedding
from .writers import update_cache

__all__ = [
    "encoder_attention",
    "merge_attention_states",
    "paged_attention",
    "paged_attention_with_new_tokens",
    "qk_norm_mrope_and_update_cache",
    "qk_norm_rope_and_update_cache",
    "refusals",
    "rope_and_update_cache",
    "rotary_embedding",
    "update_cache",
]


def refusals(operation: str, call: Any, explicit: bool) -> tuple[str, ...]:
    """Nothing is refused."""
    return ()
