"""What stays the same for every step of one attention layer."""

import enum
import math
import numbers
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .errors import bad_type, bad_value

SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
"""XLA and GPUs may flush smaller float32 values to zero."""


class AttentionType(enum.StrEnum):
    """Who attends to whom (vLLM's `AttentionType`); every argument of this type also takes the string."""

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


def check_attention_type(value: Any) -> AttentionType:
    """An `AttentionType` from itself or its string."""
    if not isinstance(value, str):
        bad_type("attn_type", value, "an AttentionType or its string")
    if value not in tuple(AttentionType):
        bad_value("attn_type", value, f"one of {', '.join(repr(kind.value) for kind in AttentionType)}")
    return AttentionType(value)


def is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionConfig:
    """Parameters of one attention layer, as the constructors of vLLM's attention backends take them.

    Two configs with the same values are equal and have the same hash, so that a function that is jitted with a config as a static argument
    is traced once for all of them. Vectors that are given as lists or NumPy arrays become read-only NumPy arrays; JAX arrays are kept. A
    traced vector equals itself only.

    Args:
      num_heads: query heads Hq, a multiple of `num_kv_heads`.
      num_kv_heads: KV heads H.
      head_size: channels D of a head.
      head_size_v: channels Dv of a value, where they differ from a key's; `None` means `head_size`.
      scale: factor on the scores; `None` means `head_size ** -0.5`.
      sliding_window: number of keys that a query sees, itself included; `None`, 0 and -1 are off. An int is static, an integer scalar array
        is data, so that layers of one `lax.scan` may differ.
      logits_soft_cap: `c` of `c * tanh(score / c)`; `None` and 0 are off.
      attn_type: an `AttentionType` or its string, such as "decoder".
      alibi_slopes: f32[Hq] or None.
      sinks: f32[Hq] or None, natural-log logits. Inside `shard_map` this vector and `alibi_slopes` may be the shard's or the whole model's
        (see `paged_attention`).
      kv_cache_dtype: vLLM's string: "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", or a dtype's own name.

    Raises:
      ValueError, TypeError: names the field, what it was and what it must be.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    scale: float | None = None
    sliding_window: Any = None
    logits_soft_cap: float | None = None
    attn_type: AttentionType | str = AttentionType.DECODER
    alibi_slopes: Any = None
    sinks: Any = None
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_size"):
            object.__setattr__(self, name, check_positive_int(name, getattr(self, name)))
        if self.head_size_v is not None:
            size = check_positive_int("head_size_v", self.head_size_v)
            object.__setattr__(self, "head_size_v", None if size == self.head_size else size)
        if self.num_heads % self.num_kv_heads:
            bad_value("num_heads", self.num_heads, f"a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.scale is not None and not isinstance(self.scale, jax.Array):
            object.__setattr__(self, "scale", check_float("scale", self.scale, zero=True, negative=True))
        object.__setattr__(self, "sliding_window", check_window(self.sliding_window))
        object.__setattr__(self, "logits_soft_cap", check_logits_soft_cap(self.logits_soft_cap))
        object.__setattr__(self, "attn_type", check_attention_type(self.attn_type))
        for name in ("alibi_slopes", "sinks"):
            object.__setattr__(self, name, _config_vector(name, getattr(self, name), self.num_heads))
        if not isinstance(self.kv_cache_dtype, str):
            bad_type("kv_cache_dtype", self.kv_cache_dtype, "a string such as 'auto' or 'fp8_e4m3'")

    @cached_property
    def _values(self) -> tuple[Any, ...]:
        return tuple(_by_value(getattr(self, field.name)) for field in fields(self))

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, AttentionConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values)

    @property
    def value_size(self) -> int:
        """Dv: channels of a value."""
        return self.head_size if self.head_size_v is None else self.head_size_v

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
    """`None`, 0 and -1 are off, as in vLLM, and so is a window that is wider than any int32 position."""
    if value is None:
        return None
    window = None if isinstance(value, bool | np.bool_) else int_or_none(value)
    if window is None:
        bad_type("sliding_window", value, "None or a static int")
    if window < -1:
        bad_value("sliding_window", value, "None, 0, -1 (all off) or a positive int")
    return window if 0 < window <= np.iinfo(np.int32).max else None


def check_window(value: Any) -> Any:
    """A window that may be data: a `jax.Array`, traced or not, of shape () or (1,), comes back as it is; anything else as a static one."""
    if not isinstance(value, jax.Array):
        return check_sliding_window(value)
    rule = "None, a static int or an integer scalar array"
    if value.shape not in ((), (1,)):
        bad_value("sliding_window", value, rule)
    if not np.issubdtype(value.dtype, np.integer):
        bad_type("sliding_window", value, rule)
    values = concrete(value)
    if values is not None and np.any(values.astype(np.int64) < -1):
        bad_value("sliding_window", values.reshape(()), "None, 0, -1 (all off) or a positive int")
    return value


def check_logits_soft_cap(value: Any) -> float | None:
    """`None` and 0 are off; otherwise a static positive float."""
    if value is None:
        return None
    return check_float("logits_soft_cap", value, zero=True, alternative="None or ") or None


def check_float(name: str, value: Any, *, zero: bool = False, negative: bool = False, alternative: str = "") -> float:
    """A static real number that kernels can use as float32: finite, and neither subnormal there nor out of range.

    Args:
      name: the argument, for the error.
      value: a Python or NumPy number, or a concrete array of shape ().
      zero: whether 0 is allowed.
      negative: whether numbers below 0 are allowed.
      alternative: what else the argument may be, for the error.

    Raises:
      TypeError: text, bools, complex and traced values.
      ValueError: a number outside the range.
    """
    number = real_number(value)
    if number is None:
        bad_type(name, value, f"{alternative}a static float")
    with np.errstate(over="ignore"):
        single = abs(float(np.float32(number)))
    sign_ok = negative or number >= 0
    if not (zero and number == 0) and not (sign_ok and math.isfinite(single) and single >= SMALLEST_NORMAL):
        kind = "finite and normal in float32" + ("" if negative else ", above 0") + (", or 0" if zero else "")
        bad_value(name, value, f"{alternative}{kind} (1.2e-38 to 3.4e38)")
    return number


def real_number(value: Any) -> float | None:
    """A Python or NumPy real number or a concrete array of shape () as a float; `None` for text, bools, complex and traced values."""
    if is_array(value):
        dtype = value.dtype
        if isinstance(value, Tracer) or value.shape != () or not (is_floating(dtype) or np.issubdtype(dtype, np.integer)):
            return None
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:  # a Python int past float64
        return math.inf


def is_floating(dtype: Any) -> bool:
    """Whether a dtype is a float, bfloat16 and fp8 included."""
    return jnp.issubdtype(dtype, jnp.floating)


def concrete(value: Any) -> np.ndarray | None:
    """The values of an array-like that can be read without a trace's help: `None` for traced arrays and those on other hosts."""
    leaves = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return None
    if isinstance(value, jax.Array):
        return np.asarray(jax.device_get(value)) if value.is_fully_addressable else None
    return np.asarray(value)


def check_vector(name: str, value: Any, lengths: tuple[int, ...], rule: str) -> Any:
    """A real vector of one of these lengths. Its values are checked where they are concrete: finite in float32, or -inf for `sinks`."""
    try:
        shape = tuple(np.shape(value))
        dtype = value.dtype if is_array(value) else np.asarray(value).dtype
    except Exception:  # a ragged list, or one that holds traced values of several kinds
        bad_value(name, value, rule)
    if len(shape) != 1 or shape[0] not in lengths:
        bad_value(name, value, rule)
    if not (is_floating(dtype) or np.issubdtype(dtype, np.integer)):
        bad_type(name, value, f"{rule}, of a float dtype")
    values = concrete(value)
    if values is not None:
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        allowed = np.isfinite(single)
        rule = "finite in float32"
        if name == "sinks":
            allowed |= np.isneginf(values.astype(np.float64))
            rule += ", or -inf"
        if not np.all(allowed):
            at = int(np.argmin(allowed))
            bad_value(f"{name}[{at}]", float(values[at]), rule)
    return value


def _config_vector(name: str, value: Any, num_heads: int) -> Any:
    if value is None:
        return None
    check_vector(name, value, (num_heads,), f"None or an array of shape [num_heads] = [{num_heads}]")
    values = concrete(value)
    if values is None or isinstance(value, jax.Array):
        return value
    owned = np.array(values, np.float32)
    owned.flags.writeable = False
    return owned


def _by_value(value: Any) -> Any:
    if not is_array(value):
        return value
    values = concrete(value)
    return id(value) if values is None else (values.shape, values.astype(np.float32).tobytes())
