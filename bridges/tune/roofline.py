"""The device's measured peak, and the part of it that a time reaches."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .cases import Case
from .problem import lengths_of
from .timing import DEFAULT, Budget, chained, interleaved


@dataclass(frozen=True)
class Peak:
    """Bytes a second of a copy (read and written) and of a read, FLOP a second of a bfloat16 product."""

    copy: float
    read: float
    matmul: float

    @property
    def bandwidth(self) -> float:
        return max(self.copy, self.read)

    def __str__(self) -> str:
        return f"copy {self.copy / 1e12:.2f} TB/s, read {self.read / 1e12:.2f} TB/s, bfloat16 product {self.matmul / 1e12:.0f} TFLOP/s"


def measure(*, nbytes: int = 1 << 31, size: int = 8192, budget: Budget = DEFAULT) -> Peak:
    """The peak of this device, by XLA's own kernels.

    Args:
      nbytes: of the copied and read array.
      size: rows and columns of the product.
      budget: see `Budget`.
    """
    values = jnp.ones((nbytes // 4,), jnp.uint32)

    def seconds(step: Any, state: Any, operands: Any, chain: int, donated: bool = False) -> float:
        return interleaved([chained(step, state, operands, chain=chain, donated=donated)], budget)[0] / chain

    copy = 2 * nbytes / seconds(lambda x, _, i: x ^ 1, values, (), 1, donated=True)
    read = nbytes / seconds(lambda s, x, i: jnp.sum(x ^ s, dtype=jnp.uint32), jnp.uint32(1), values, 1)
    del values
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    matmul = 2 * size**3 / seconds(lambda x, y, i: (x @ y) if i % 2 else (y @ x), a, b * size**-0.5, 6)
    return Peak(copy, read, matmul)


def work(case: Case) -> tuple[int, int]:
    """(fewest bytes, operations) of a call of a case: every array moved once; two products a visible pair of query and key."""
    item, stored = jnp.dtype(case.dtype).itemsize, jnp.dtype(case.cache_dtype).itemsize
    if case.is_writer:
        moved = case.batch * case.kv_heads * (case.head_size + case.values) * (item + stored)
        if case.kernel != "update":
            moved += case.batch * (2 * case.heads + case.kv_heads) * case.head_size * item
        return moved, 0
    seen = pairs = tokens = 0
    for q, n in zip(*lengths_of(case), strict=True):
        window = case.window or n
        tokens += q
        seen += min(n, window + q - 1)
        first = n - q + 1
        short = max(0, min(q, window - first))  # queries that see fewer keys than the window
        pairs += short * first + short * (short - 1) // 2 + (q - short) * min(window, n)
    both = case.head_size + case.values
    return seen * case.kv_heads * both * stored + tokens * case.heads * both * item, 2 * pairs * case.heads * both


def part_of(peak: Peak, case: Case, us: float) -> float:
    """The part of the roofline that a call of so many microseconds reaches."""
    nbytes, flops = work(case)
    return max(nbytes / peak.bandwidth, flops / peak.matmul) * 1e6 / us
