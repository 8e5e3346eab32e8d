"""The launches of AITER's own wrapper of unified attention for a case, compiled for an AMD GPU. The kernels are not run.

The wrapper itself chooses kernel, tiles and segments: it is called with tensors that have shapes and no memory, and with recorders in place
of its kernels. Nothing of this works with TRITON_INTERPRET set.
"""

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from purepage.bridges.aiter import package as aiter_package
from purepage.kernels.archs import arch_facts

from .cases import Case

POINTERS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "i32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e4m3fnuz": "fp8e4b8",
}
OPTIONS = ("num_warps", "num_stages", "waves_per_eu")


@dataclass(frozen=True)
class Recorded:
    """One launch: the `@triton.jit` function, its grid, and what it was given by name (tensors on torch's "meta" device)."""

    kernel: Any
    grid: tuple[int, ...]
    given: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def option(self, name: str) -> int | None:
        return self.given.get(name)


@contextmanager
def _recording(module: Any, num_cus: int) -> Iterator[list[Recorded]]:
    """The module's kernels record their launches; its device has `num_cus` compute units."""
    from triton.runtime.jit import JITFunction

    launches: list[Recorded] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **given: launches.append(Recorded(self.kernel, grid, given))

    kept = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction) or name == "get_num_sms"}
    for name, value in kept.items():
        setattr(module, name, (lambda: num_cus) if name == "get_num_sms" else Recorder(value))
    try:
        yield launches
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def launches_of(case: Case, arch: str, fp8: str) -> list[Recorded]:
    """The wrapper's launches for a case on the usual part of `arch`; keys and values apart, as AITER's users keep them.

    Args:
      fp8: e4m3 kind of an fp8 cache.
    """
    import torch

    operator = aiter_package.load("unified_attention")
    module = importlib.import_module(operator.__module__)

    def tensor(*shape: int, dtype: str) -> Any:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    seqs, heads, size = len(case.lengths), case.num_heads, case.head_size
    cached = fp8 if case.cache_dtype.startswith("float8") else case.cache_dtype
    pages = (case.num_blocks, case.block_size, case.num_kv_heads, size)
    scale = tensor(seqs, case.num_kv_heads, dtype="float32")
    with _recording(module, arch_facts(arch).num_cus) as launches:
        operator(
            q=tensor(case.num_tokens, heads, size, dtype=case.dtype),
            k=tensor(*pages, dtype=cached),
            v=tensor(*pages, dtype=cached),
            out=tensor(case.num_tokens, heads, size, dtype=case.dtype),
            cu_seqlens_q=tensor(seqs + 1, dtype="int32"),
            max_seqlen_q=max(new for new, _ in case.lengths),
            seqused_k=tensor(seqs, dtype="int32"),
            max_seqlen_k=max(length for _, length in case.lengths),
            softmax_scale=size**-0.5,
            causal=True,
            window_size=(-1, -1) if case.window is None else (case.window - 1, 0),
            block_table=tensor(seqs, case.width, dtype="int32"),
            softcap=0.0,
            q_descale=None,
            k_descale=scale,
            v_descale=scale,
        )
    return launches


def compile_recorded(launch: Recorded, arch: str) -> Any:
    """Triton's compiled kernel, typed and specialised as Triton's own launcher does with aligned tensors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attrs = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.given[parameter.name] if parameter.name in launch.given else parameter.default
        fixed = parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not parameter.annotation_type)
        if fixed:
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif hasattr(value, "data_ptr"):
            dtype = str(value.dtype).removeprefix("torch.")
            signature[parameter.name] = "*" + POINTERS[dtype]
            small = math.prod(value.shape) * value.dtype.itemsize < 2**31
            attrs[(place,)] = [["tt.divisibility", 16], *([["tt.pointer_range", 32]] if small else [])]
        else:
            kind = "fp32" if isinstance(value, float) else "i32"
            signature[parameter.name] = parameter.annotation_type or kind
            if isinstance(value, int) and value % 16 == 0:
                attrs[(place,)] = [["tt.divisibility", 16]]
    options = {name: launch.given[name] for name in OPTIONS if name in launch.given}
    return triton.compile(
        ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attrs),
        target=GPUTarget("hip", arch, arch_facts(arch).wave_size),
        options={"enable_fp_fusion": True, **options},
    )
