"""Device helpers shared by the kernels: addresses in any cache layout, fp8 in integer arithmetic, dtypes by name.

Kinds are the names of JAX dtypes. fp8 travels as uint8: an architecture need not know the kind, and Triton's own fp8 loads
can't fill masked lanes with zeros.
"""

import triton
import triton.language as tl


@triton.jit
def typed(pointer, KIND: tl.constexpr):
    """A pointer to stored bits as a pointer to what they mean; fp8 stays uint8."""
    if KIND == "float32":
        return pointer.to(tl.pointer_type(tl.float32), bitcast=True)
    elif KIND == "float16":
        return pointer.to(tl.pointer_type(tl.float16), bitcast=True)
    elif KIND == "bfloat16":
        return pointer.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    else:
        return pointer.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def uniform(x, AMD: tl.constexpr):
    """An int32 that is the same in all lanes, said so: AMD's compiler takes the result of a reduction for one that lanes may differ in,
    and loads from an address made of it once for every value that the lanes have.
    """
    if AMD:
        return tl.inline_asm_elementwise("v_readfirstlane_b32 $0, $1", "=s,v", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return x


@triton.jit
def cast(x, KIND: tl.constexpr):
    if KIND == "float32":
        return x.to(tl.float32)
    elif KIND == "float16":
        return x.to(tl.float16)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def axis_offsets(index, OUTER: tl.constexpr, INNER: tl.constexpr, VECTOR: tl.constexpr):
    """Element offsets along one axis of a side (see `SideStrides`)."""
    if VECTOR == 1:
        return index * OUTER
    else:
        return (index // VECTOR) * OUTER + (index % VECTOR) * INNER


@triton.jit
def fp8_to_float16(bits, KIND: tl.constexpr, HARDWARE: tl.constexpr):
    """Every fp8 value is a float16 value: exact, NaN included, whichever way it is decoded."""
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
            # Bias 16, one more than float16's: the code one exponent lower; below 8 the value is a plain multiple of 2**-17.
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
    """Nearest even, saturating (infinities too); NaN stays NaN. The same bits on every architecture."""
    MANTISSA: tl.constexpr = 2 if (KIND == "float8_e5m2" or KIND == "float8_e5m2fnuz") else 3
    FNUZ: tl.constexpr = KIND == "float8_e4m3fnuz" or KIND == "float8_e5m2fnuz"
    BIAS: tl.constexpr = (16 if FNUZ else 15) if MANTISSA == 2 else (8 if FNUZ else 7)
    LARGEST: tl.constexpr = 57344.0 if MANTISSA == 2 else (240.0 if FNUZ else 448.0)
    DROPPED: tl.constexpr = 23 - MANTISSA
    # A float32 whose last place is the smallest fp8 step: adding it rounds a small value to that step.
    STEP: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23

    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.uint32, bitcast=True)
    rounded = bits + ((bits >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    step = tl.full([1], STEP, tl.uint32).to(tl.float32, bitcast=True)
    small = (magnitude + step).to(tl.uint32, bitcast=True) - STEP
    code = tl.where(bits < ((128 - BIAS) << 23), small, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    if FNUZ:  # no negative zero: its code is NaN
        code = tl.where(code == 0, code, code | sign)
        code = tl.where(x != x, 0x80, code)
    else:
        code = tl.where(x != x, 0x7F, code) | sign
    return code.to(tl.uint8)


@triton.jit
def to_compute(x, STORED: tl.constexpr, COMPUTE: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """Loaded values of kind STORED in the dtype of the matrix products."""
    if STORED == "float32" or STORED == "float16" or STORED == "bfloat16":
        return cast(x, COMPUTE)
    else:
        return cast(fp8_to_float16(x, STORED, HARDWARE_FP8), COMPUTE)
