"""Which kernel vLLM's ROCM_ATTN would take: its gates as pure functions of static facts.

All paths compute the same; these functions tell what runs on an AMD machine under vLLM 0.33, for tables, tests and comparisons. Sources:
`use_rocm_custom_paged_attention` (vllm/platforms/rocm.py), `has_native_kv_cache_layout` and `do_kv_cache_update` of vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..cache import CacheSpec

HALVES = tuple(jnp.dtype(name) for name in ("float16", "bfloat16"))


@cache
def arch_name(arch: str) -> str:
    """The name of an architecture, from its own name or a product's ("MI300X").

    vLLM's rules look at a prefix of the name, so that any other "gfx..." stands for itself.

    Raises:
      ValueError: neither an architecture nor a product is called so; the message lists the names.
    """
    from ...kernels.archs import find_arch, resolve_arch  # values without dependencies

    if isinstance(arch, str) and arch.startswith("gfx") and find_arch(arch) is None:
        return arch
    return resolve_arch(arch).name


@dataclass(frozen=True)
class HipDecodeGate:
    """What the HIP decode kernel takes on a family of archs. `kv_cache_dtypes`: None is any (the kernel itself rejects fp8_e5m2)."""

    archs: tuple[str, ...]
    head_sizes: tuple[int, ...]
    block_sizes: tuple[int, ...]
    fewest_queries_per_kv: int
    most_queries_per_kv: int
    alibi: bool
    kv_cache_dtypes: tuple[str, ...] | None
    max_seq_len: int = 128 * 1024


HIP_DECODE_GATES: Mapping[str, HipDecodeGate] = {
    "CDNA": HipDecodeGate(("gfx9", "gfx1250"), (64, 128), (16, 32), 1, 16, True, None),
    "RDNA": HipDecodeGate(("gfx11", "gfx12"), (128,), (16,), 3, 16, False, ("auto",)),
}
"""The first family whose prefix an arch has decides: gfx1250 counts as CDNA."""

HIP_WRITER_BLOCK_SIZES = (16, 32)


def use_rocm_custom_paged_attention(
    query_dtype: Any,
    head_size: int,
    block_size: int,
    gqa_ratio: int,
    max_seq_len: int,
    sliding_window: int | tuple[int, int] | None,
    kv_cache_dtype: str,
    alibi_slopes: Any = None,
    sinks: Any = None,
    *,
    arch: str,
) -> bool:
    """Whether vLLM decodes with its HIP kernel `paged_attention_rocm`.

    Args:
      query_dtype: dtype of the queries.
      head_size, block_size: D and N.
      gqa_ratio: query heads per KV head.
      max_seq_len: the batch's longest sequence.
      sliding_window: None, 0 and (-1, -1) are off (vLLM turns None into 0 before it asks).
      kv_cache_dtype: vLLM's string.
      alibi_slopes, sinks: None or anything.
      arch: "gfx942", "MI300X", ...; others than AMD's never use it.

    Returns:
      True where the kernel is taken, if the cache's layout allows it too (see `decode_path`).

    Raises:
      ValueError: no architecture or product is called `arch`.
    """
    name = arch_name(arch)
    gate = next((g for g in HIP_DECODE_GATES.values() if name.startswith(g.archs)), None)
    return (
        gate is not None
        and sliding_window in (None, 0, (-1, -1))
        and np.dtype(query_dtype) in HALVES
        and head_size in gate.head_sizes
        and block_size in gate.block_sizes
        and gate.fewest_queries_per_kv <= gqa_ratio <= gate.most_queries_per_kv
        and max_seq_len <= gate.max_seq_len
        and (gate.alibi or alibi_slopes is None)
        and (gate.kv_cache_dtypes is None or kv_cache_dtype in gate.kv_cache_dtypes)
        and sinks is None
    )


def has_native_kv_cache_layout(spec: CacheSpec) -> bool:
    """Whether the blocks of each side are contiguous, which the HIP kernels take for granted."""
    return spec.content in ("xpacked", "xpacked_interleaved_v") and spec.order == "LHBNC"


def decode_path(spec: CacheSpec, *, use_custom: bool) -> str:
    """ "paged_attention_rocm" (HIP) or "kernel_paged_attention_2d" (Triton); `use_custom` is `use_rocm_custom_paged_attention`'s answer."""
    power_of_two = spec.block_size & (spec.block_size - 1) == 0
    return "paged_attention_rocm" if use_custom and power_of_two and has_native_kv_cache_layout(spec) else "kernel_paged_attention_2d"


def writer_path(spec: CacheSpec) -> str:
    """ "reshape_and_cache" (HIP) or "triton_reshape_and_cache_flash"."""
    native = spec.block_size in HIP_WRITER_BLOCK_SIZES and has_native_kv_cache_layout(spec)
    return "reshape_and_cache" if native else "triton_reshape_and_cache_flash"
