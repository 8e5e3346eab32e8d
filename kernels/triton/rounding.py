"""Rounding float32 values to a stored dtype, on the device: to a model dtype, and through a division to fp8."""

import triton
import triton.language as tl

from .dtypes import cast
from .fp8 import float32_to_fp8


@triton.jit
def round_to(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 values as DTYPE, to nearest even. Triton's interpreter truncates to bfloat16, so there integers round."""
    if DTYPE == "bfloat16" and INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        code = tl.where(x != x, (bits >> 16) | 0x40, rounded)
        return code.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return cast(x, DTYPE)


@triton.jit
def quantized(x, DTYPE: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """float32 values as fp8 codes, to nearest even. NaN gives one code of each sign, the same on every target.

    With HARDWARE_FP8 the values must round into the dtype's range, as those of `divided` do, since targets differ in whether a conversion
    saturates.
    """
    if HARDWARE_FP8:
        if DTYPE == "float8_e4m3fn":
            code = x.to(tl.float8e4nv)
        elif DTYPE == "float8_e4m3fnuz":
            code = x.to(tl.float8e4b8)
        elif DTYPE == "float8_e5m2":
            code = x.to(tl.float8e5)
        else:
            code = x.to(tl.float8e5b16)
        code = code.to(tl.uint8, bitcast=True)
    else:
        code = float32_to_fp8(x, DTYPE)
    sign = ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
    if DTYPE == "float8_e4m3fn" and HARDWARE_FP8:
        return code | sign  # the code of a number has its sign, that of NaN does not
    elif DTYPE == "float8_e4m3fn" or DTYPE == "float8_e5m2":
        return tl.where(x != x, sign | (0x7F if DTYPE == "float8_e4m3fn" else 0x7E), code)
    else:
        return code


@triton.jit
def clamp(x, bound):
    """x in [-bound, bound]; NaN stays NaN."""
    return tl.clamp(x, -bound, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divided(x, scale, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """x / scale in float32, rounded as IEEE division rounds it and clamped to the range of DTYPE, in five instructions a value.

    The reciprocal is rounded once for all values, and one Newton step with an exact remainder rounds each quotient (Markstein, 1990).
    Quotients below float32's normal range may differ in their last bits, and those at the bound by one bit: rounding to fp8 drops both.
    """
    LARGEST: tl.constexpr = 448.0 if DTYPE == "float8_e4m3fn" else (240.0 if DTYPE == "float8_e4m3fnuz" else 57344.0)
    if INTERPRETED:  # the interpreter's fma rounds twice
        return clamp(tl.div_rn(x, scale), LARGEST)
    else:
        # Below 1e-25 the remainder of a quotient that fp8 keeps can have bits below the smallest subnormal.
        if (scale > 1e-25) & (scale < 1e30):
            inverse = tl.div_rn(1.0, scale)
            x = clamp(x, LARGEST * scale)  # an infinity has no remainder
            quotient = x * inverse
            # quotient * scale - x keeps the sign of a zero, x - quotient * scale does not. -x would be 0 - x, which has none either.
            excess = tl.fma(quotient, tl.zeros_like(x) + scale, x * -1.0)
            result = tl.fma(excess, tl.zeros_like(x) + inverse * -1.0, quotient)
        else:
            result = clamp(tl.div_rn(x, tl.zeros_like(x) + scale), LARGEST)
        return result


@triton.jit
def to_stored(x, scale, DTYPE: tl.constexpr, HARDWARE_FP8: tl.constexpr, INTERPRETED: tl.constexpr):
    """Values of a model dtype as the cache stores them.

    Values of DTYPE itself are stored as they are. fp8 takes a division by the scale: a product with 1 / scale differs by a code at ties.
    """
    if DTYPE == "float32" or DTYPE == "float16" or DTYPE == "bfloat16":
        if (
            (x.dtype == tl.float32 and DTYPE == "float32")
            or (x.dtype == tl.float16 and DTYPE == "float16")
            or (x.dtype == tl.bfloat16 and DTYPE == "bfloat16")
        ):
            return x
        else:
            return round_to(x.to(tl.float32), DTYPE, INTERPRETED)
    else:
        return quantized(divided(x.to(tl.float32), scale, DTYPE, INTERPRETED), DTYPE, HARDWARE_FP8)
