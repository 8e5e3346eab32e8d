"""The `xla` implementation: plain JAX, on any device. It serves every call."""

from typing import Any

from .attention import encoder_attention, paged_attention, paged_attention_with_new_tokens

__all__ = ["encoder_attention", "paged_attention", "paged_attention_with_new_tokens", "refusals"]


def refusals(operation: str, call: Any, by_name: bool) -> tuple[str, ...]:
    """Nothing is refused."""
    return ()
