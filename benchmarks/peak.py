"""The device's measured peak: bandwidth of a large copy and of a large read, and the rate of a bfloat16 matrix product."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import on_gpu, time_jax, time_torch

BYTES = {"gpu": 1 << 32, "cpu": 1 << 28}
MATRIX = {"gpu": 8192, "cpu": 1536}


def has_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available() or not on_gpu()


def measure_peak() -> dict[str, Any]:
    """{"copy_bytes_per_s", "read_bytes_per_s", "flops_per_s", ...}: of each the best that some library gave, and all that were tried.

    A copy counts what it reads and what it writes. FLOP/s are of a bf16 product on a GPU and a float32 one on a CPU, of random values.
    """
    where = "gpu" if on_gpu() else "cpu"
    size, n = BYTES[where], MATRIX[where]
    tried: dict[str, dict[str, float]] = {"copy_bytes_per_s": {}, "read_bytes_per_s": {}, "flops_per_s": {}}
    errors: dict[str, str] = {}

    def attempt(quantity: str, name: str, work: float, measure: Callable[[], Any]) -> None:
        try:
            tried[quantity][name] = work / measure().median
        except Exception as error:
            errors[f"{quantity} {name}"] = f"{type(error).__name__}: {str(error)[:300]}"

    _xla_bandwidth(attempt, size)
    dtype = jnp.bfloat16 if on_gpu() else jnp.float32
    a, b = (jax.random.normal(jax.random.key(i), (n, n), dtype) for i in range(2))
    attempt("flops_per_s", "xla", 2 * n**3, lambda: time_jax(lambda x, y, i: (x @ y) if i % 2 else (y @ x), a, b * n**-0.5, chain=6))
    if has_torch():
        _torch_peak(attempt, size, n)
    best = {quantity: max(found.values()) for quantity, found in tried.items() if found}
    return {**best, "tried": tried, "errors": errors, "copied_bytes": size, "matrix": n}


def _xla_bandwidth(attempt: Callable[..., None], size: int) -> None:
    """One call a program: XLA would fold a chain of them into one."""
    values = jnp.ones((size // 4,), jnp.uint32)
    attempt("copy_bytes_per_s", "xla", 2 * size, lambda: time_jax(lambda x, _, i: x ^ 1, values, (), chain=1, donate=True))
    attempt(
        "read_bytes_per_s", "xla", size, lambda: time_jax(lambda s, x, i: jnp.sum(x ^ s, dtype=jnp.uint32), jnp.uint32(1), values, chain=1)
    )


def _torch_peak(attempt: Callable[..., None], size: int, n: int) -> None:
    import torch

    device, kind = ("cuda", torch.bfloat16) if on_gpu() else ("cpu", torch.float32)
    source = torch.randint(0, 127, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    attempt("copy_bytes_per_s", "torch", 2 * size, lambda: time_torch(lambda: target.copy_(source)))
    # A plain copy may go to the copy engines, which are slower than a kernel.
    attempt("copy_bytes_per_s", "torch add", 2 * size, lambda: time_torch(lambda: torch.add(source, 1, out=target)))
    attempt("read_bytes_per_s", "torch sum", size, lambda: time_torch(lambda: source.view(torch.float32).sum()))
    if on_gpu():
        attempt("read_bytes_per_s", "triton sum", size, lambda: _triton_read(source))
    x, y = (torch.randn((n, n), dtype=kind, device=device) for _ in range(2))
    attempt("flops_per_s", "torch", 2 * n**3, lambda: time_torch(lambda: x @ y))


def _triton_read(source: Any) -> Any:
    """A read that does nothing else: each program sums its stretch, 16 bytes a load."""
    import torch

    from benchmarks.read_kernel import sum_stretch

    block, stretch = 4096, 64
    programs = source.numel() // (block * stretch)
    sums = torch.empty((programs,), dtype=torch.int32, device=source.device)
    return time_torch(lambda: sum_stretch[(programs,)](source, sums, STRETCH=stretch, BLOCK=block, num_warps=8))
