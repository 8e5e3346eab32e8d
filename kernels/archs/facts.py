"""What an architecture is: the facts that kernels, plans and bridges ask for, beside its configurations.

Sources: AMD's ISA manuals (CDNA2, CDNA3, CDNA4, RDNA3, RDNA4), LLVM's AMDGPU usage page for gfx1250, and the CUDA programming guide's
table of compute capabilities.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .configs import ConfigTable, DecodeConfig, PrefillConfig

OCP = frozenset({"float8_e4m3fn", "float8_e5m2"})
FNUZ = frozenset({"float8_e4m3fnuz", "float8_e5m2fnuz"})

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One architecture. `name` decides equality: there is one value of each.

    Attributes:
      name: as Triton's target spells it; an NVIDIA compute capability is "sm_90"; "cpu" is Triton's interpreter.
      vendor: "amd", "nvidia" or "cpu".
      products: compute units of each product, by its name. RDNA's are workgroup processors, which a workgroup occupies there.
      steppings: names of earlier steppings, which have the same facts.
      follows: name of the architecture whose facts and configurations this one takes over, since nothing was chosen for it alone.
      num_cus: compute units (SMs) of the usual product, where the device is not known.
      wave_size: threads of a warp (AMD: wave).
      max_threads: threads of one workgroup.
      shared_bytes: LDS or shared memory that one workgroup can have.
      shared_padding: sixteenths that Triton's padded layouts add to tiles in shared memory, at most; read off compiled kernels.
      matrix: family of the matrix unit; None where block sizes don't depend on it.
      hardware_fp8: fp8 kinds that the hardware converts; the kernels decode the others with integer operations.
      vllm_e4m3: the kind that vLLM means by "fp8" here.
      aiter_e4m3: the e4m3 kind where vLLM, AITER's Triton kernels and its HIP code agree and the hardware converts it, else None. On gfx12
        they disagree from release to release.
      aiter_hip: AITER's HIP operators are written for this architecture.
      aiter_splits_decode: AITER's `unified_attention` splits every decode step here, however many programs there are.
      prefill, decode: configurations.
    """

    name: str
    vendor: Literal["amd", "nvidia", "cpu"] = field(compare=False)
    products: Mapping[str, int] = field(default_factory=dict, compare=False)
    steppings: tuple[str, ...] = field(default=(), compare=False)
    follows: str | None = field(default=None, compare=False)
    num_cus: int = field(compare=False)
    wave_size: int = field(compare=False)
    max_threads: int = field(default=1024, compare=False)
    shared_bytes: int = field(compare=False)
    shared_padding: int = field(default=0, compare=False)
    matrix: Literal["mfma", "wmma", "mma", "wgmma"] | None = field(compare=False)
    hardware_fp8: frozenset[str] = field(default=frozenset(), compare=False)
    vllm_e4m3: str = field(default="float8_e4m3fn", compare=False)
    aiter_e4m3: str | None = field(default=None, compare=False)
    aiter_hip: bool = field(default=False, compare=False)
    aiter_splits_decode: bool = field(default=False, compare=False)
    prefill: ConfigTable[PrefillConfig] = field(compare=False)
    decode: ConfigTable[DecodeConfig] = field(compare=False)
