"""What a cache slot holds, on the device: rounding values to the cache's dtype and storing rows of channels in any layout."""

import triton
import triton.language as tl

from .common import axis_offsets, cast, float32_to_fp8


@triton.jit
def round_to(x, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 values in a model dtype, to nearest even. Triton's interpreter cuts bfloat16 off instead of rounding: there in integers."""
    if KIND == "bfloat16" and INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        code = tl.where(x != x, (bits >> 16) | 0x40, rounded)
        return code.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return cast(x, KIND)


@triton.jit
def quantized(x, KIND: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """float32 values as fp8 codes, to nearest even; NaN gives one code of each sign, the same on every target.

    HARDWARE_FP8: values must round into the kind's range, as those of `divided` do: whether a conversion saturates differs by target.
    """
    if HARDWARE_FP8:
        if KIND == "float8_e4m3fn":
            code = x.to(tl.float8e4nv)
        elif KIND == "float8_e4m3fnuz":
            code = x.to(tl.float8e4b8)
        elif KIND == "float8_e5m2":
            code = x.to(tl.float8e5)
        else:
            code = x.to(tl.float8e5b16)
        code = code.to(tl.uint8, bitcast=True)
    else:
        code = float32_to_fp8(x, KIND)
    sign = ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
    if KIND == "float8_e4m3fn" and HARDWARE_FP8:
        return code | sign  # a number's code has it already
    elif KIND == "float8_e4m3fn" or KIND == "float8_e5m2":
        return tl.where(x != x, sign | (0x7F if KIND == "float8_e4m3fn" else 0x7E), code)
    else:
        return code


@triton.jit
def clamp(x, bound):
    """x in [-bound, bound]; NaN stays NaN."""
    return tl.clamp(x, -bound, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divided(x, scale, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """x / scale, float32, as an IEEE division rounds it and `clamp` bounds it, at five instructions a value; quotients below float32's
    normal range may differ in their last bits, which no fp8 kind keeps, and those at the bound by one bit, which rounding takes off.

    The reciprocal is rounded once for all values; one step of Newton's with an exact remainder rounds the quotient (Markstein, 1990).
    """
    LARGEST: tl.constexpr = 448.0 if KIND == "float8_e4m3fn" else (240.0 if KIND == "float8_e4m3fnuz" else 57344.0)
    if INTERPRETED:  # its fma rounds twice
        return clamp(tl.div_rn(x, scale), LARGEST)
    else:
        # Under a smaller scale the remainder of a quotient that is no zero in fp8 may have bits below the smallest subnormal.
        if (scale > 1e-25) & (scale < 1e30):
            inverse = tl.div_rn(1.0, scale)
            x = clamp(x, LARGEST * scale)  # there is no remainder of infinities
            quotient = x * inverse
            # Quotient times scale less x, not the other way round: so a zero keeps its sign. (A minus sign would be 0 - x, which has none.)
            excess = tl.fma(quotient, tl.zeros_like(x) + scale, x * -1.0)
            result = tl.fma(excess, tl.zeros_like(x) + inverse * -1.0, quotient)
        else:
            result = clamp(tl.div_rn(x, tl.zeros_like(x) + scale), LARGEST)
        return result


@triton.jit
def to_stored(x, scale, STORED: tl.constexpr, HARDWARE_FP8: tl.constexpr, INTERPRETED: tl.constexpr):
    """Values of a model dtype as the cache stores them.

    Values of the cache's own dtype go in as they are; fp8 after a division: a product with 1 / scale differs by a code at ties.
    """
    if STORED == "float32" or STORED == "float16" or STORED == "bfloat16":
        if (
            (x.dtype == tl.float32 and STORED == "float32")
            or (x.dtype == tl.float16 and STORED == "float16")
            or (x.dtype == tl.bfloat16 and STORED == "bfloat16")
        ):
            return x
        else:
            return round_to(x.to(tl.float32), STORED, INTERPRETED)
    else:
        return quantized(divided(x.to(tl.float32), scale, STORED, INTERPRETED), STORED, HARDWARE_FP8)


@triton.jit
def side_scale(scales, layer, head, STORED: tl.constexpr, SCALE_HEADS: tl.constexpr):
    """The scale of one head of one layer; SCALE_HEADS is 1 where a layer has one scale."""
    if STORED == "float32" or STORED == "float16" or STORED == "bfloat16":
        return 1.0
    else:
        return tl.load(scales + layer * SCALE_HEADS + (head if SCALE_HEADS > 1 else 0))


@triton.jit
def slot_offsets(slot, BLOCK_SIZE: tl.constexpr, SIDE: tl.constexpr):
    """Element offsets of slots within a layer and head, in 64 bits; SIDE is a `SideStrides` as a tuple."""
    BLOCK: tl.constexpr = SIDE[2]
    OUTER: tl.constexpr = SIDE[4]
    INNER: tl.constexpr = SIDE[5]
    VECTOR: tl.constexpr = SIDE[6]
    return (slot // BLOCK_SIZE).to(tl.int64) * BLOCK + axis_offsets(slot % BLOCK_SIZE, OUTER, INNER, VECTOR)


@triton.jit
def store_channels(head_base, slots, channel, values, slot_ok, channel_ok, SIDE: tl.constexpr):
    """Stores values [tokens, channels] at slot offsets [tokens] and channels [channels] of one head.

    Where the places of a block lie side by side, threads run along the tokens: neighbours then write neighbouring elements.
    """
    OUTER: tl.constexpr = SIDE[7]
    INNER: tl.constexpr = SIDE[8]
    VECTOR: tl.constexpr = SIDE[9]
    BY_TOKEN: tl.constexpr = SIDE[6] > 1 or SIDE[4] == 1
    channels = axis_offsets(channel, OUTER, INNER, VECTOR)
    if BY_TOKEN:
        pointers = head_base + (channels[:, None] + slots[None, :])
        tl.store(pointers, tl.trans(values), mask=channel_ok[:, None] & slot_ok[None, :])
    else:
        pointers = head_base + (slots[:, None] + channels[None, :])
        tl.store(pointers, values, mask=slot_ok[:, None] & channel_ok[None, :])
