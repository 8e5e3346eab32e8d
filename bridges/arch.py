"""Which kind of device JAX runs on by default, in the words of the tuning tables: "cpu", "sm_90", "gfx942"."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from ..kernels.archs import ARCHS, find_arch


@dataclass(frozen=True)
class Arch:
    """One device.

    Attributes:
      platform: "cpu", "cuda", "rocm", or another of JAX's platforms.
      name: the key of tuning tables: "cpu" (Triton's interpreter), "sm_90", "gfx942".
      compute_units: streaming multiprocessors or CUs; 1 on a CPU.
      wave: threads in a warp or wavefront; 1 on a CPU.
    """

    platform: str
    name: str
    compute_units: int
    wave: int


def wave_size(name: str) -> int:
    """Threads of a warp (AMD: wave) on an architecture; of one without facts, 64 on gfx9 (CDNA, GCN) and 32 elsewhere."""
    facts = find_arch(name)
    if facts is not None:
        return facts.wave_size
    return 64 if name.startswith("gfx9") else 32


def arch_of(device: Any) -> Arch:
    """The `Arch` of a `jax.Device`.

    Read off what JAX knows of the device; torch is asked on ROCm only, and only where JAX's plugin does not give the gfx name.
    """
    platform = device.platform
    if platform == "cpu":
        return Arch("cpu", "cpu", 1, 1)
    if platform not in ("gpu", "cuda", "rocm"):
        return Arch(platform, platform, 1, 1)
    cores = int(getattr(device, "core_count", 0) or 0)
    capability = str(getattr(device, "compute_capability", "") or "")
    if is_rocm(device):
        name = gfx_name(capability) or gfx_name(str(getattr(device, "device_kind", ""))) or _gfx_name_from_torch(device)
        return Arch("rocm", name, cores, wave_size(name))
    return Arch("cuda", "sm_" + capability.replace(".", ""), cores, 32)


_ASSUMED: ContextVar[Arch | None] = ContextVar("purepage_assumed_arch", default=None)


def named_arch(name: str) -> Arch:
    """The usual part of an architecture: "cpu", "sm_90", "gfx942"; compute units are those of its tuning tables, 0 where there are none."""
    if name == "cpu":
        return Arch("cpu", "cpu", 1, 1)
    platform = "rocm" if name.startswith("gfx") else "cuda" if name.startswith("sm_") else name
    return Arch(platform, name, ARCHS[name].num_cus if name in ARCHS else 0, wave_size(name))


@contextmanager
def assuming_arch(arch: Arch) -> Iterator[None]:
    """Inside, `default_arch()` is `arch`, whatever this machine has: to ask what would run there. Nothing can be run."""
    token = _ASSUMED.set(arch)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def default_arch() -> Arch:
    """The `Arch` of the device that JAX computes on when nobody says otherwise."""
    assumed = _ASSUMED.get()
    if assumed is not None:
        return assumed
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]: made at run time
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return arch_of(device)


def is_rocm(device: Any) -> bool:
    """Whether a GPU device is AMD's: JAX calls both vendors' platform "gpu", the client's version tells them apart."""
    version = str(getattr(getattr(device, "client", None), "platform_version", "")).lower()
    return device.platform == "rocm" or "rocm" in version or str(getattr(device, "compute_capability", "")).startswith("gfx")


def gfx_name(text: str) -> str:
    """The bare architecture in a text such as "gfx942:sramecc+:xnack-"; empty where there is none."""
    start = text.find("gfx")
    if start < 0:
        return ""
    end = start + 3
    while end < len(text) and text[end] in "0123456789abcdef":
        end += 1
    return text[start:end]


def _gfx_name_from_torch(device: Any) -> str:
    import torch

    return gfx_name(torch.cuda.get_device_properties(device.local_hardware_id).gcnArchName)
