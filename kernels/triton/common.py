"""Old names of device helpers, for the writers' kernels."""

import triton
import triton.language as tl

from .address import axis_offsets, uniform
from .dtypes import cast, to_compute, typed
from .fp8 import float32_to_fp8, fp8_to_float16

__all__ = ["axis_offsets", "cast", "float32_to_fp8", "fp8_to_float16", "side_base", "to_compute", "typed", "uniform"]


@triton.jit
def side_base(cache, layer, kv_head, SIDE: tl.constexpr, STORED: tl.constexpr):
    """`address.side_base` for strides in a tuple."""
    return typed(cache, STORED) + (SIDE[0] + layer.to(tl.int64) * SIDE[1] + tl.cast(kv_head, tl.int64) * SIDE[3])
