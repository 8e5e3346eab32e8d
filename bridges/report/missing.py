"""What an installation lacks to compute on a GPU, one line each, with the remedy."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...functional.errors import DOCUMENTATION
from ..native import library
from . import facts

OLDEST_ROCM = (7, 2, 1)
"""The oldest ROCm whose command buffers are not known to crash."""

COMMAND_BUFFERS_OFF = "XLA_FLAGS=--xla_gpu_enable_command_buffer="


def missing(
    machine: Mapping[str, Any],
    packages: Mapping[str, str],
    distributions: Mapping[str, Sequence[str]],
    platform: str | None,
    torch: Mapping[str, Any] | None = None,
    obstacle: str | None = None,
) -> list[str]:
    """Lines that begin with what is missing.

    Args:
      machine, packages, distributions: of the functions of these names in `facts`.
      platform: what JAX computes on: "cpu", "rocm", "cuda"; None where its devices can't be started.
      torch: of `facts.torch_build`, where it was asked.
      obstacle: why the native bridge's library can't be had.
    """
    rocm = next((f"{name} {version}" for name, version in packages.items() if re.match(r"jax.rocm\d*.plugin", name)), None)
    cuda = next((f"{name} {version}" for name, version in packages.items() if re.match(r"jax.cuda\d*.plugin", name)), None)
    on_amd = platform == "rocm" or rocm is not None
    lines = list(_gpu(machine, platform, rocm, cuda))
    if on_amd:
        lines += _rocm(machine, packages)
    if "torch" not in distributions:
        where = ", one that is built against the system's ROCm" if on_amd else ""
        lines.append(f"no torch: the callback bridge and AITER need it{where}; the native bridge does not")
    elif torch and on_amd and "version" in torch and not torch.get("hip"):
        built = f"CUDA {torch['cuda']}" if torch.get("cuda") else "the CPU"
        lines.append(f"no torch for ROCm: torch {torch['version']} is built for {built}; see {DOCUMENTATION}/rocm.html")
    origins = distributions.get("triton")
    if origins is None:
        hint = ": it comes with ROCm's torch" if on_amd else ": pip install 'purepage[triton]'"
        lines.append(f"no Triton: implementation='triton' and AITER need it{hint}; implementation='xla' does not")
    elif len(origins) > 1:
        lines.append(f"not one Triton: {' and '.join(origins)} are installed over each other: keep the one that torch was built with")
    if obstacle:
        lines.append(f"no native bridge: {obstacle}")
    return lines


def _gpu(machine: Mapping[str, Any], platform: str | None, rocm: str | None, cuda: str | None) -> Iterator[str]:
    plugins = " and ".join(filter(None, (rocm, cuda)))
    if platform is None:
        yield "no device: JAX can't start its devices"
    elif platform == "cpu" and plugins:
        yield f"no GPU: JAX computes on the CPU, {plugins} found none"
    elif platform == "cpu":
        yield "no GPU: JAX computes on the CPU, and no plugin for a GPU is installed: pip install 'purepage[rocm]' or 'purepage[cuda]'"
    if rocm or platform == "rocm":
        driver = machine["driver"]
        if not driver["kfd"]:
            loaded = "amdgpu is loaded" if driver["amdgpu"] else "amdgpu is not loaded"
            yield f"no driver: there is no /dev/kfd, {loaded}; a container needs --device=/dev/kfd --device=/dev/dri"
        elif not driver["kfd_opens"]:
            yield "no access to the driver: this user may not open /dev/kfd: join the groups render and video"


def _rocm(machine: Mapping[str, Any], packages: Mapping[str, str]) -> Iterator[str]:
    installed, wheels = machine["rocm"], [name for name in packages if re.match(r"(?i)(?:amd.)?rocm(?:.sdk)?", name)]
    if not installed and not wheels:
        yield "no ROCm: no version is under /opt/rocm; JAX's plugin needs the libraries of ROCm 7"
    for folder, text in installed.items():
        version = tuple(map(int, re.findall(r"\d+", text)[:3]))
        if version < OLDEST_ROCM:
            wanted = ".".join(map(str, OLDEST_ROCM))
            yield f"no ROCm {wanted}: {folder} is {text}, whose command buffers have crashed: set {COMMAND_BUFFERS_OFF}"


def of_this_process(platform: str | None) -> list[str]:
    """`missing` of this machine and installation; imports neither torch nor Triton."""
    return missing(facts.machine(), facts.packages(), facts.distributions(), platform, None, library.obstacle())
