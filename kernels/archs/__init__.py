"""Architectures: one file each, with its facts and its configurations. Nothing here imports Triton.

Everything that depends on the architecture is derived from these values: plans, bridges, tests, tools and the tables of the documentation.
A new architecture is a new file and its name in the tuple below.
"""

from collections.abc import Mapping
from dataclasses import replace

from ...functional.errors import UnsupportedError, bad_value
from . import cpu, gfx90a, gfx942, gfx950, gfx1100, gfx1151, gfx1201, gfx1250, sm_80, sm_90
from .facts import FNUZ, OCP, Arch

__all__ = ["ARCHS", "FNUZ", "OCP", "Arch", "amd_archs", "arch_facts", "arch_names", "find_arch", "resolve_arch"]

ARCHS: Mapping[str, Arch] = {
    module.ARCH.name: module.ARCH for module in (gfx90a, gfx942, gfx950, gfx1100, gfx1151, gfx1201, gfx1250, sm_80, sm_90, cpu)
}
"""Every architecture by its name."""


VENDOR_WORDS = ("", "AMD ", "Instinct ", "AMD Instinct ", "Radeon ", "AMD Radeon ", "NVIDIA ")
"""What may stand before a product's name."""


def arch_names() -> tuple[str, ...]:
    """Names of the architectures, then of their products: all that `resolve_arch` takes, except for early steppings."""
    return (*ARCHS, *(product for arch in ARCHS.values() for product in arch.products))


def find_arch(name: str | None) -> Arch | None:
    """The architecture of that name, of that product or of that stepping; None where there is none.

    Products are found in any case, with or without their vendor: "MI300X", "mi300x", "AMD Instinct MI300X". A product's `num_cus` are its
    own.
    """
    if name is None:
        return None
    if name in ARCHS:
        return ARCHS[name]
    spelled = name.lower()
    for arch in ARCHS.values():
        if name in arch.steppings:
            return arch
        for product, num_cus in arch.products.items():
            if spelled in {f"{vendor}{product}".lower() for vendor in VENDOR_WORDS}:
                return replace(arch, num_cus=num_cus)
    return None


def resolve_arch(name: str) -> Arch:
    """The architecture of that name or product; see `find_arch`.

    Raises:
      ValueError: neither an architecture nor a product is called so; the message lists the names.
    """
    arch = find_arch(name) if isinstance(name, str) else None
    if arch is None:
        bad_value("arch", name, f"one of {', '.join(arch_names())}")
    return arch


def arch_facts(name: str) -> Arch:
    """The architecture that Triton calls `name`.

    Raises:
      UnsupportedError: no kernel was configured or checked for it.
    """
    arch = ARCHS.get(name)
    if arch is None:
        raise UnsupportedError(f"triton: no tuning for {name!r}; known: {', '.join(ARCHS)}")
    return arch


def amd_archs(*, configured_alone: bool = False) -> tuple[str, ...]:
    """Names of AMD's architectures; with `configured_alone`, without those that follow another one."""
    return tuple(arch.name for arch in ARCHS.values() if arch.vendor == "amd" and not (configured_alone and arch.follows))
