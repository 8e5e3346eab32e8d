"""A Triton kernel that reads memory and does little else: it measures the peak read bandwidth."""

import triton
import triton.language as tl


@triton.jit
def sum_stretch(source, sums, STRETCH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * (STRETCH * BLOCK) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(STRETCH):
        total += tl.load(source + at + i * BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))
