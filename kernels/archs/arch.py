"""What the kernels need to know of each architecture, and the limits that a configuration must keep.

Sources: AMD's ISA manuals (CDNA2, CDNA3, CDNA4, RDNA3, RDNA4), LLVM's AMDGPU usage page for gfx1250, and the CUDA programming guide's
table of compute capabilities.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ...functional.errors import UnsupportedError

OCP = frozenset({"float8_e4m3fn", "float8_e5m2"})
FNUZ = frozenset({"float8_e4m3fnuz", "float8_e5m2fnuz"})


@dataclass(frozen=True)
class Arch:
    """One architecture.

    Attributes:
      name: as Triton's target spells it; compute capability as "sm_90"; "cpu" is Triton's interpreter.
      vendor: "amd", "nvidia" or "cpu".
      wave_size: threads of one warp (AMD: wave).
      shared_bytes: LDS or shared memory that one workgroup can have.
      max_threads: threads of one workgroup.
      num_cus: compute units (SMs) of the usual part, where nobody says how many the device at hand has.
      fp8: kinds that the hardware converts; the kernels decode the others with integer operations.
      matrix: the matrix unit's family; None where the tiles need not care.
      shared_padding: sixteenths that Triton's padded layouts add to tiles in shared memory, from above: read off what it compiles.
    """

    name: str
    vendor: str
    wave_size: int
    shared_bytes: int
    max_threads: int
    num_cus: int
    fp8: frozenset[str]
    matrix: str | None
    shared_padding: int = 0


KIB = 1024

ARCHS: Mapping[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("gfx90a", "amd", 64, 64 * KIB, 1024, 104, frozenset(), "mfma"),
        Arch("gfx942", "amd", 64, 64 * KIB, 1024, 304, FNUZ, "mfma"),
        Arch("gfx950", "amd", 64, 160 * KIB, 1024, 256, OCP, "mfma", 1),
        Arch("gfx1100", "amd", 32, 64 * KIB, 1024, 48, frozenset(), "wmma"),
        Arch("gfx1151", "amd", 32, 64 * KIB, 1024, 20, frozenset(), "wmma"),
        Arch("gfx1201", "amd", 32, 64 * KIB, 1024, 32, OCP, "wmma"),
        Arch("gfx1250", "amd", 32, 320 * KIB, 1024, 256, OCP, "wmma", 6),
        Arch("sm_80", "nvidia", 32, 163 * KIB, 1024, 108, frozenset(), "mma"),
        Arch("sm_90", "nvidia", 32, 227 * KIB, 1024, 132, OCP, "wgmma"),
        Arch("cpu", "cpu", 1, 1 << 30, 1024, 4, frozenset(), None),
    )
}
"""By name. RDNA's figures count workgroup processors, which is what a workgroup occupies there."""


def arch_facts(name: str) -> Arch:
    """Facts of an architecture by Triton's name of it.

    Raises:
      UnsupportedError: no kernel was tuned or checked for it.
    """
    arch = ARCHS.get(name)
    if arch is None:
        raise UnsupportedError(f"triton: no tuning for {name!r}; known: {', '.join(ARCHS)}")
    return arch


def over_limits(arch: Arch, *, shared_bytes: int, num_warps: int) -> str | None:
    """Why a workgroup of this size can't run on `arch`, or None. Asked before anything is compiled: no compiler checks it."""
    if shared_bytes > arch.shared_bytes:
        return f"{shared_bytes} bytes of shared memory, {arch.name} has {arch.shared_bytes}"
    if num_warps * arch.wave_size > arch.max_threads:
        return f"{num_warps} warps of {arch.wave_size} threads, {arch.name} takes {arch.max_threads} threads"
    return None
