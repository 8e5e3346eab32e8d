"""The fp8 dtypes: which one a name means on which arch, their ranges, and the quantization that every writer and output uses.

    stored = round_to_nearest_even(clamp(float32(value) / scale, -MAX, +MAX))        NaN stays NaN, +-Inf saturates

The division is a division: multiplying by 1 / scale differs by a code near ties (0.703125 at scale 0.9 is 0.75 in e4m3, not 0.8125).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .cache import CACHE_DTYPES, FP8_DTYPES
from .errors import bad_type, bad_value

FP8_MAX: Mapping[np.dtype, float] = {dtype: float(jnp.finfo(dtype).max) for dtype in FP8_DTYPES}
"""Largest finite value of each kind: e4m3fn 448, e4m3fnuz 240 (not the 224 that some quantizers stop at), e5m2 and e5m2fnuz 57344."""

_E4M3FN, _E4M3FNUZ = jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e4m3fnuz")

KV_CACHE_DTYPES: Mapping[str, np.dtype] = {
    **{dtype.name: dtype for dtype in CACHE_DTYPES},
    "half": jnp.dtype("float16"),
    "float": jnp.dtype("float32"),
    "fp8_e5m2": jnp.dtype("float8_e5m2"),
}
"""`kv_cache_dtype` strings that mean one dtype everywhere; "auto", "fp8" and "fp8_e4m3" depend on the model and the arch."""


def e4m3_dtype(arch: str | None) -> np.dtype:
    """The e4m3 kind that vLLM uses on an arch: e4m3fnuz on gfx942 and its steppings, e4m3fn elsewhere (None, "cpu" and "sm_90" too).

    AITER's Triton kernels choose e4m3fnuz on gfx11xx too, where vLLM and purepage choose e4m3fn.
    """
    from ..kernels.archs import find_arch  # values without dependencies

    facts = find_arch(arch)
    return _E4M3FN if facts is None else jnp.dtype(facts.vllm_e4m3)


def kv_cache_dtype(name: str, *, model_dtype: Any, arch: str | None = None) -> np.dtype:
    """The dtype that vLLM's `kv_cache_dtype` string asks for.

    Args:
      name: "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", or a dtype's own name, which always means that dtype.
      model_dtype: what "auto" is.
      arch: "gfx942", "sm_90", ...: decides which e4m3 "fp8" and "fp8_e4m3" are.

    Raises:
      ValueError: an unknown name; it lists the known ones.
    """
    if not isinstance(name, str):
        bad_type("kv_cache_dtype", name, "a string such as 'auto' or 'fp8_e4m3'")
    if name == "auto":
        dtype = jnp.dtype(model_dtype)
        if dtype not in CACHE_DTYPES:
            bad_value("model_dtype", dtype.name, f"one of {', '.join(d.name for d in CACHE_DTYPES)}")
        return dtype
    if name in ("fp8", "fp8_e4m3"):
        return e4m3_dtype(arch)
    if name not in KV_CACHE_DTYPES:
        bad_value("kv_cache_dtype", name, f"one of 'auto', 'fp8', 'fp8_e4m3', {', '.join(map(repr, KV_CACHE_DTYPES))}")
    return KV_CACHE_DTYPES[name]


def quantize(values: Float[Array, "..."], scale: Any, dtype: Any) -> Array:
    """Values of any float dtype as fp8 codes: clamp(float32(value) / scale) to the finite range, rounded to nearest even.

    Args:
      values: [...], any float dtype.
      scale: f32, broadcasts against `values`.
      dtype: one of the four fp8 dtypes.

    Returns:
      [...] of `dtype`, the same bits on every backend, under jit or not.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in FP8_DTYPES:
        bad_value("dtype", dtype.name, f"one of {', '.join(d.name for d in FP8_DTYPES)}")
    top = FP8_MAX[dtype]
    scale = jnp.asarray(scale, jnp.float32)
    scale = scale.reshape((1,) * (values.ndim - scale.ndim) + scale.shape)  # `jax_numpy_rank_promotion` may forbid implicit axes
    exact = _divide_within(values.astype(jnp.float32), scale, top)
    return jnp.clip(exact, -top, top).astype(dtype)


def _divide_within(x: Array, scale: Array, top: float) -> Array:
    """x / scale, correctly rounded wherever the quotient is within +-top.

    XLA turns a division by a constant into a product with its reciprocal, and divides approximately on some GPUs; a quotient that is off
    by a unit in the last place is off by a code at a tie. One Newton step on the exact residual repairs both: halves of 12 bits multiply
    exactly.
    """
    quotient = jnp.clip(x / scale, -top, top)
    q, s = _halves(quotient), _halves(scale)
    residual = (((x - q[0] * s[0]) - q[0] * s[1]) - q[1] * s[0]) - q[1] * s[1]
    # At +-top the product with a large scale overflows, and the quotient needs no correction; `+ 0` would lose the sign of -0.
    return jnp.where((residual != 0) & (jnp.abs(quotient) < top), quotient + residual / scale, quotient)


def _halves(x: Array) -> tuple[Array, Array]:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    high = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFF000), jnp.float32)
    return high, x - high


def e4m3fn_to_fnuz(codes: Float[Array, "..."], scale: Any) -> tuple[Array, Array]:
    """e4m3fn codes and their scale as e4m3fnuz ones of the same values, exactly.

    The same bits mean half as much in e4m3fnuz, so the scale doubles. Only -0 (whose bits are NaN there) and the NaNs change bits. For
    weights and caches that come from another machine.
    """
    if jnp.dtype(codes.dtype) != _E4M3FN:
        bad_type("codes", codes, f"of dtype {_E4M3FN.name}")
    bits = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    moved = jnp.where(bits & 0x7F == 0x7F, jnp.uint8(0x80), jnp.where(bits == 0x80, jnp.uint8(0), bits))
    return jax.lax.bitcast_convert_type(moved, _E4M3FNUZ), jnp.asarray(scale, jnp.float32) * 2
