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
):
    """Rows of the query in the compute dtype, and their factor: not below 0, one in all or (ROW_FACTOR) one per row."""
    d = tl.arange(0, HEAD_PAD)
    bits = tl.load(typed(query, KIND) + offsets[:, None] + d[None, :], mask=ok[:, None] & (d < HEAD_SIZE)[None, :], other=0)
    # The running peak is taken before scaling, so a negative scale goes into the query: exact.
    sign = tl.where(factor < 0, -1.0, 1.0)
    factor = tl.abs(factor)
    if ROW_FACTOR:
        # bfloat16 rows meet fp8 keys in float16, which holds every fp8 value: an exact power of two brings a row's largest entry to [1, 2).
        q = bits.to(tl.float32)
        power = tl.minimum(tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) & 0x7F800000, 253 << 23)
        inverse = ((254 << 23) - power).to(tl.float32, bitcast=True) * sign
        return cast(q * inverse[:, None], COMPUTE), factor * power.to(tl.float32, bitcast=True)
    else:
        return cast(to_compute(bits, KIND, "float32", HARDWARE_FP8) * sign, COMPUTE), factor


@triton.jit
def reload_query(
    source,
    tile,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    ROW_FACTOR: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """The rows once more, for one tile: `source` is (query, offsets, ok, factor) as `load_query` takes them.

    Where wide heads leave no registers to keep the rows in, they come from the cache with every tile.
    """
    # No tile's number has 30 bits, which the compiler can't know: it would load once, ahead of the loop, and spill. HEAD_PAD keeps the
    # pointer aligned.
    q, _ = load_query(
        source[0] + (tile >> 30) * HEAD_PAD, source[1], source[2], source[3], KIND, COMPUTE, HARDWARE_FP8, ROW_FACTOR, HEAD_SIZE, HEAD_PAD
    )  # fmt: skip
    return q
