"""What stays the same for every step of one attention layer."""

import enum
import math
from dataclasses import dataclass
from typing import Any

from .errors import bad_type, bad_value


class AttentionType(enum.Enum):
    """Who attends to whom (vLLM's `AttentionType`)."""

    DECODER = "decoder"
    """Causal self attention over the paged cache."""
    ENCODER = "encoder"
    """Bidirectional self attention of an encoder-decoder model's encoder; no cache."""
    ENCODER_ONLY = "encoder_only"
    """Bidirectional self attention of an encoder model; no cache."""
    ENCODER_DECODER = "encoder_decoder"
    """Cross attention of a decoder to the cached encoder tokens; not causal."""

    @property
    def uses_cache(self) -> bool:
        return self in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)


def is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionConfig:
    """Parameters of one attention layer, as the constructors of vLLM's attention backends take them.

    Args:
      num_heads: query heads Hq, a multiple of `num_kv_heads`.
      num_kv_heads: KV heads H.
      head_size: channels D of a head.
      scale: factor on the scores; `None` means `head_size ** -0.5`.
      sliding_window: keys that a query sees, itself included; `None` is off.
      logits_soft_cap: `c` of `c * tanh(score / c)`; `None` and 0 are off.
      attn_type: see `AttentionType`.
      alibi_slopes: f32[Hq] or None.
      sinks: f32[Hq] or None, natural-log logits.
      kv_cache_dtype: vLLM's string: "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", or a dtype's own name.

    Raises:
      ValueError, TypeError: names the field, what it was and what it must be.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    attn_type: AttentionType = AttentionType.DECODER
    alibi_slopes: Any = None
    sinks: Any = None
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_size"):
            check_positive_int(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            bad_value("num_heads", self.num_heads, f"a multiple of num_kv_heads ({self.num_kv_heads})")
        check_sliding_window(self.sliding_window)
        check_logits_soft_cap(self.logits_soft_cap)
        if not isinstance(self.attn_type, AttentionType):
            bad_type("attn_type", self.attn_type, "an AttentionType")
        for name in ("alibi_slopes", "sinks"):
            value = getattr(self, name)
            if is_array(value) and tuple(value.shape) != (self.num_heads,):
                bad_value(name, value, f"None or an array of shape [num_heads] = [{self.num_heads}]")
        if not isinstance(self.kv_cache_dtype, str):
            bad_type("kv_cache_dtype", self.kv_cache_dtype, "a string such as 'auto' or 'fp8_e4m3'")

    @property
    def softmax_scale(self) -> Any:
        return self.head_size**-0.5 if self.scale is None else self.scale


def check_positive_int(name: str, value: Any) -> int:
    """An int above 0; `numpy` integers count, bools and traced values do not."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not isinstance(int_or_none(value), int):
        bad_type(name, value, "a positive static int")
    if int(value) < 1:
        bad_value(name, value, "a positive int")
    return int(value)


def int_or_none(value: Any) -> int | None:
    try:
        return value.__index__()
    except Exception:  # a traced value raises one of several jax errors; the caller names the argument
        return None


def check_sliding_window(value: Any) -> int | None:
    if value is None:
        return None
    return check_positive_int("sliding_window", value)


def check_logits_soft_cap(value: Any) -> float | None:
    """`None` and 0 are off; otherwise finite and positive, and static."""
    if value is None:
        return None
    try:
        number = float(value)
    except Exception:
        bad_type("logits_soft_cap", value, "None or a static float")
    if not math.isfinite(number) or number < 0:
        bad_value("logits_soft_cap", value, "None, 0 (both off) or a finite positive float")
    return number or None
