"""Loading the rows of the query on the device."""

import triton
import triton.language as tl

from .common import cast, to_compute, typed


@triton.jit
def load_query(
    query,
    offsets,
    ok,
    factor,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    ROW_FACTOR: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SIGNED: tl.constexpr = True,
):
    """Rows of the query in the compute dtype, their factor (not below 0, one in all or, with ROW_FACTOR, one per row), and what they were
    multiplied by, likewise. Not SIGNED: the keys have the factor's sign already.
    """
    d = tl.arange(0, HEAD_PAD)
    bits = tl.load(typed(query, KIND) + offsets[:, None] + d[None, :], mask=ok[:, None] & (d < HEAD_SIZE)[None, :], other=0)
    # The running row_max is taken before scaling, so a negative scale goes into the query: exact. On NVIDIA a query that was computed with
    # comes from registers to the product, one that was only loaded from shared memory, which is faster.
    if SIGNED:
        multiplier = tl.where(factor < 0, -1.0, 1.0)
    else:
        multiplier = 1.0
    factor = tl.abs(factor)
    if ROW_FACTOR:
        # bfloat16 rows meet fp8 keys in float16, which holds every fp8 value: an exact power of two brings a row's largest entry to [1, 2).
        power = tl.minimum(tl.max(tl.abs(bits.to(tl.float32)), 1).to(tl.int32, bitcast=True) & 0x7F800000, 253 << 23)
        multiplier = ((254 << 23) - power).to(tl.float32, bitcast=True) * multiplier
        factor = factor * power.to(tl.float32, bitcast=True)
    return multiplied(bits, multiplier, KIND, COMPUTE, HARDWARE_FP8, ROW_FACTOR), factor, multiplier


@triton.jit
def multiplied(bits, multiplier, KIND: tl.constexpr, COMPUTE: tl.constexpr, HARDWARE_FP8: tl.constexpr, ROW_FACTOR: tl.constexpr):
    if ROW_FACTOR:
        return cast(bits.to(tl.float32) * multiplier[:, None], COMPUTE)
    else:
        return cast(to_compute(bits, KIND, "float32", HARDWARE_FP8) * multiplier, COMPUTE)


@triton.jit
def reload_query(
    source,
    tile,
    d,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    ROW_FACTOR: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Channels `d` of the rows once more, for one tile: `source` is (query, offsets, ok, multiplier), see `load_query`.

    Where wide heads leave no registers to keep the rows in, they come from the cache with every tile.
    """
    # No tile's number has 30 bits, which the compiler can't know: it would load once, ahead of the loop, and spill. HEAD_PAD keeps the
    # pointer aligned.
    pointers = typed(source[0], KIND) + (tile >> 30) * HEAD_PAD + source[1][:, None] + d[None, :]
    bits = tl.load(pointers, mask=source[2][:, None] & (d < HEAD_SIZE)[None, :], other=0)
    return multiplied(bits, source[3], KIND, COMPUTE, HARDWARE_FP8, ROW_FACTOR)
