"""The soft cap of AITER's `unified_attention`, repaired.

Its own tanh is (e^t - e^-t) / (e^t + e^-t), which is inf / inf for scores above 88 caps: NaN, where tanh is 1.
"""

import triton
import triton.language as tl


@triton.jit
def apply_softcap(S, x):  # the name and the arguments that AITER's kernels call
    """x tanh(t ln 2), t = S / x: AITER's scores come multiplied by log2(e). tanh is 1 in float32 long before t is 40; NaN stays NaN."""
    t = S / x
    t = tl.where(t > 40.0, 40.0, tl.where(t < -40.0, -40.0, t))
    up, down = tl.math.exp2(t), tl.math.exp2(-t)
    return x * (up - down) / (up + down)
