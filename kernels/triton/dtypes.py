"""Dtypes by their JAX names, on the device."""

import triton
import triton.language as tl

from .fp8 import fp8_to_float16


@triton.jit
def typed(pointer, DTYPE: tl.constexpr):
    """A pointer to stored bits as a pointer to elements of DTYPE; fp8 stays uint8."""
    if DTYPE == "float32":
        return pointer.to(tl.pointer_type(tl.float32), bitcast=True)
    elif DTYPE == "float16":
        return pointer.to(tl.pointer_type(tl.float16), bitcast=True)
    elif DTYPE == "bfloat16":
        return pointer.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    else:
        return pointer.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """`x` as float32, float16 or bfloat16."""
    if DTYPE == "float32":
        return x.to(tl.float32)
    elif DTYPE == "float16":
        return x.to(tl.float16)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def to_compute(x, STORED: tl.constexpr, COMPUTE: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """Loaded elements of dtype STORED as COMPUTE, the dtype of the matrix products."""
    if STORED == "float32" or STORED == "float16" or STORED == "bfloat16":
        return cast(x, COMPUTE)
    else:
        return cast(fp8_to_float16(x, STORED, HARDWARE_FP8), COMPUTE)
