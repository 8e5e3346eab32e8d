"""Conversion from and to fp8 on the device, by integer arithmetic where the architecture has no instruction for the dtype.

fp8 values are uint8 here: an architecture need not know the dtype, and Triton's own fp8 loads can't fill masked lanes with zeros.
"""

import triton
import triton.language as tl


@triton.jit
def fp8_to_float16(bits, KIND: tl.constexpr, HARDWARE: tl.constexpr):
    """Exact, NaN included: every fp8 value is a float16 value."""
    if KIND == "float8_e5m2":
        return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif HARDWARE:
        if KIND == "float8_e4m3fn":
            return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        elif KIND == "float8_e4m3fnuz":
            return bits.to(tl.float8e4b8, bitcast=True).to(tl.float16)
        else:
            return bits.to(tl.float8e5b16, bitcast=True).to(tl.float16)
    else:
        wide = bits.to(tl.uint16)
        sign = (wide & 0x80) << 8
        magnitude = wide & 0x7F
        if KIND == "float8_e5m2fnuz":
            # The bias is 16, one more than float16's, so the exponent is lowered by one. Magnitudes below 8 are multiples of 2**-17.
            small = (magnitude.to(tl.float16) * 7.62939453125e-06).to(tl.uint16, bitcast=True)
            code = tl.where(magnitude < 8, small, (magnitude << 8) - 0x400)
            code = tl.where(wide == 0x80, 0x7E00, code | sign)
            return code.to(tl.uint16).to(tl.float16, bitcast=True)
        else:
            scaled = (sign | (magnitude << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
            if KIND == "float8_e4m3fn":
                return tl.where(magnitude == 0x7F, float("nan"), scaled * 256.0).to(tl.float16)
            else:
                return tl.where(wide == 0x80, float("nan"), scaled * 128.0).to(tl.float16)


@triton.jit
def float32_to_fp8(x, KIND: tl.constexpr):
    """Rounds to nearest even and saturates, infinities included; NaN stays NaN. The bits are the same on every architecture."""
    MANTISSA: tl.constexpr = 2 if (KIND == "float8_e5m2" or KIND == "float8_e5m2fnuz") else 3
    FNUZ: tl.constexpr = KIND == "float8_e4m3fnuz" or KIND == "float8_e5m2fnuz"
    BIAS: tl.constexpr = (16 if FNUZ else 15) if MANTISSA == 2 else (8 if FNUZ else 7)
    LARGEST: tl.constexpr = 57344.0 if MANTISSA == 2 else (240.0 if FNUZ else 448.0)
    DROPPED: tl.constexpr = 23 - MANTISSA
    # STEP is a float32 whose last place is the smallest fp8 step: adding it rounds a small value to that step.
    STEP: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23

    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.uint32, bitcast=True)
    rounded = bits + ((bits >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    step = tl.full([1], STEP, tl.uint32).to(tl.float32, bitcast=True)
    small = (magnitude + step).to(tl.uint32, bitcast=True) - STEP
    code = tl.where(bits < ((128 - BIAS) << 23), small, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    if FNUZ:  # the code of negative zero is NaN
        code = tl.where(code == 0, code, code | sign)
        code = tl.where(x != x, 0x80, code)
    else:
        code = tl.where(x != x, 0x7F, code) | sign
    return code.to(tl.uint8)
