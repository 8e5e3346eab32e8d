"""What a report says of the machine and the installation. Nothing here starts a device, but for `jax_devices` and `torch_devices`.

No user, host or serial number is recorded; `scrubbed` takes home folders and the names of user and host out of what others say.
"""

import ctypes
import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

ENVIRONMENT = (
    *("JAX_", "XLA_", "HIP_", "HSA_", "ROCR_", "ROCM_", "TRITON_", "AITER_", "AMD_", "PUREPAGE_"),
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "LD_LIBRARY_PATH", "LD_PRELOAD"),
)
"""How the names of environment variables begin that a report shows. All others stay out of it."""

LIBRARIES = re.compile(
    r"lib(?:amdhip|hiprtc|hsa-runtime|hsakmt|amd_comgr|roc|rccl|hip|MIOpen|amd_smi|amdsmi|hsa-amd|cuda|cupti|nccl|cudnn|nvrtc|cublas|nvidia-ml)"
    r"|xla_(?:rocm|cuda)_plugin|_rocm_|rocm7?_plugin|pjrt"
)
"""Names of files that are a GPU's runtime, compiler, profiler or one of its libraries."""

PACKAGES = re.compile(
    r"(?i)(?:jax|ml.dtypes$|numpy$|purepage|(?:pytorch.)?triton|torch$|amd.?aiter|aiter|rocm|nvidia.cuda|flash.attn|vllm$)"
)
"""Names of distributions whose version a report has."""

MODULES = ("triton", "torch", "aiter", "jax", "jaxlib", "jax_triton", "jax_plugins", "jax_rocm7_plugin", "jax_cuda12_plugin")
"""Modules of which a report says the distribution that they came from: several distributions install a `triton`."""

_FEATURES = {19: "SRAM ECC", 31: "coherent host access"}
"""Bits of the `capability` of a node of KFD."""


Hidden = tuple[tuple[re.Pattern[str], str], ...]
"""Patterns, and what a report has in their place."""

_ANY_HOME = (re.compile(r"/(?:home|Users)/[^/\s:'\",;]+"), "~")


def hidden(homes: Iterable[str], host: str = "") -> Hidden:
    """What a report must not show: home folders are ~, a folder elsewhere of the user's name is (user), and the host's name (host).

    Args:
      homes: home folders of this user, whose last part is taken for the user's name.
      host: the machine's name.
    """
    found: list[tuple[re.Pattern[str], str]] = []
    folders = sorted({home.rstrip("/") for home in homes} - {""}, key=len, reverse=True)
    found += [(re.compile(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])"), "~") for home in folders]
    found.append(_ANY_HOME)
    users = sorted({home.rpartition("/")[2] for home in folders} - {"root"})
    found += [(re.compile(rf"(?<=/){re.escape(user)}(?=[/:\s'\"]|$)"), "(user)") for user in users]
    if len(host) > 3 and host != "localhost":
        found.append((re.compile(rf"(?<![\w-]){re.escape(host)}(?![\w-])"), "(host)"))
    return tuple(found)


def hidden_here(environment: Mapping[str, str]) -> Hidden:
    """`hidden` of this user and machine."""
    homes = {environment.get("HOME", "")}
    try:
        homes.add(str(Path.home()))
    except RuntimeError:  # a container without an entry for its user
        pass
    return hidden((home for home in homes if len(home) > 1), platform.node())


def without(text: str, patterns: Hidden) -> str:
    """The text with what stands for each pattern in its place."""
    for pattern, instead in patterns:
        text = pattern.sub(instead, text)
    return text


def scrubbed(value: Any, patterns: Hidden) -> Any:
    """A JSON value with `without` of each text, and what JSON has no word for as text."""
    if isinstance(value, dict):
        return {without(str(key), patterns): scrubbed(each, patterns) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(each, patterns) for each in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # JSON has neither NaN nor Inf
    return without(str(value), patterns)


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names begin as `ENVIRONMENT` says."""
    return {name: text for name, text in sorted(environment.items()) if name.startswith(ENVIRONMENT)}


# --- the machine --------------------------------------------------------------------------------------------------------------------------


def machine(root: Path = Path("/")) -> Facts:
    """The system, its driver, its ROCm and its GPUs, as files say it.

    Args:
      root: what stands for `/`.

    Returns:
      `system`, `driver`, `rocm`, and `gpus`, a list: one entry for each AMD GPU of KFD's topology, joined with its entry of DRM by the PCI
      address.
    """
    return {"system": _system(root), "driver": _driver(root), "rocm": _rocm(root), "gpus": list(gpus(root))}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _first(pattern: str, text: str | None) -> str | None:
    found = re.search(pattern, text or "", re.MULTILINE)
    return found and found[1].strip().strip('"')


def _system(root: Path) -> Facts:
    memory = _first(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo"))
    return {
        "os": _first(r"^PRETTY_NAME=(.*)$", _read(root / "etc/os-release")),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpu": _first(r"^model name\s*:\s*(.*)$", _read(root / "proc/cpuinfo")),
        "cores": len(re.findall(r"^processor\s*:", _read(root / "proc/cpuinfo") or "", re.MULTILINE)) or None,
        "memory_bytes": int(memory) * 1024 if memory else None,
    }


def _driver(root: Path) -> Facts:
    kfd = root / "dev/kfd"
    return {
        "amdgpu": (root / "sys/module/amdgpu").exists(),
        "amdgpu_version": _read(root / "sys/module/amdgpu/version") or _read(root / "sys/module/amdgpu/srcversion"),
        "noretry": _read(root / "sys/module/amdgpu/parameters/noretry"),
        "kfd": kfd.exists(),
        "kfd_opens": _opens(kfd),
        "nvidia": _first(r"(?:Kernel Module\s+(?:for \S+\s+)?)(\S+)", _read(root / "proc/driver/nvidia/version")),
    }


def _opens(path: Path) -> bool:
    """Whether this user may read and write a file of /dev."""
    try:
        with path.open("r+b", buffering=0):
            return True
    except OSError:
        return False


def _rocm(root: Path) -> Facts:
    """Every ROCm under /opt: which one is used is not known from files."""
    found = {}
    for folder in sorted([*(root / "opt").glob("rocm"), *(root / "opt").glob("rocm-*")]):
        version = _read(folder / ".info/version") or _read(folder / ".info/version-dev")
        if version:
            found["/" + folder.relative_to(root).as_posix()] = version
    return found


def gfx_of_target_version(version: int) -> str:
    """The architecture of KFD's `gfx_target_version`: 90402 is gfx942, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _properties(path: Path) -> dict[str, int]:
    words = (line.split() for line in (_read(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and re.fullmatch(r"-?\d+", pair[1])}


def gpus(root: Path) -> Iterator[Facts]:
    """The GPUs of KFD's topology. A node without SIMDs is a CPU."""
    cards = dict(_cards(root))
    nodes = sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*"), key=lambda path: (len(path.name), path.name))
    for node in nodes:
        has = _properties(node / "properties")
        simds = has.get("simd_count", 0)
        if not simds:
            continue
        location, version = has.get("location_id", 0), has.get("gfx_target_version", 0)
        address = f"{has.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
        banks = [_properties(bank) for bank in sorted((node / "mem_banks").glob("*/properties"))]
        capability = has.get("capability", 0)
        card = cards.get(address) or cards.get(address[:-1] + "0") or {}  # partitions of one GPU differ in the function only
        yield {
            "node": node.name,
            "gfx": gfx_of_target_version(version) if version else None,
            "name": _read(node / "name"),
            "compute_units": simds // max(1, has.get("simd_per_cu", 1)),
            "simds_per_cu": has.get("simd_per_cu"),
            "wave_size": has.get("wave_front_size"),
            "max_waves_per_simd": has.get("max_waves_per_simd"),
            "lds_bytes": has.get("lds_size_in_kb", 0) * 1024 or None,
            "xccs": has.get("num_xcc"),
            "clock_mhz": has.get("max_engine_clk_fcompute"),
            "memory_bytes": sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in (1, 2)) or None,
            "capability": capability,
            "features": [name for bit, name in _FEATURES.items() if capability >> bit & 1],
            "firmware": has.get("fw_version"),
            "pci": address,
            **card,
        }


def _cards(root: Path) -> Iterator[tuple[str, Facts]]:
    """(PCI address, facts) of each card of DRM."""
    for card in sorted((root / "sys/class/drm").glob("card*")):
        address = _first(r"^PCI_SLOT_NAME=(.*)$", _read(card / "device/uevent"))
        if re.fullmatch(r"card\d+", card.name) and address:
            vram = _read(card / "device/mem_info_vram_total")
            yield (
                address.lower(),
                {
                    "product": _read(card / "device/product_name"),
                    "device": _read(card / "device/device"),
                    "compute_partition": _read(card / "device/current_compute_partition"),
                    "memory_partition": _read(card / "device/current_memory_partition"),
                    "vram_bytes": int(vram) if vram and vram.isdigit() else None,
                    "vbios": _read(card / "device/vbios_version"),
                },
            )


# --- the installation ---------------------------------------------------------------------------------------------------------------------


def libraries(maps: Iterable[str]) -> list[Facts]:
    """Every runtime, compiler and profiler of a GPU that a process has mapped, one entry for each inode.

    Args:
      maps: lines of /proc/PID/maps.

    Returns:
      `name`, `path` and `inode` of each, sorted by path.
    """
    found: dict[tuple[str, str], Facts] = {}
    for line in maps:
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            path = fields[5].strip()
            name = path.rpartition("/")[2]
            if ".so" in name and LIBRARIES.search(name):
                found.setdefault((fields[3], fields[4]), {"name": name, "path": path, "inode": int(fields[4])})
    return sorted(found.values(), key=lambda entry: entry["path"])


def own_libraries() -> list[Facts]:
    """`libraries` of this process; none where there is no /proc."""
    return libraries((_read(Path("/proc/self/maps")) or "").splitlines())


def packages() -> dict[str, str]:
    """Version of each installed distribution that matters, by name."""
    found = ((each.metadata["Name"], each.version) for each in importlib.metadata.distributions())
    return {name: version for name, version in sorted(set(found)) if name and PACKAGES.match(name)}


def distributions() -> dict[str, list[str]]:
    """For each of `MODULES` that is there, the distributions that installed it. Of several the last one won; none is a checkout."""
    by_module = importlib.metadata.packages_distributions()
    return {
        module: [f"{name} {importlib.metadata.version(name)}" for name in sorted(set(by_module.get(module, ())))]
        for module in MODULES
        if module in by_module or _is_there(module)
    }


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# --- devices, each as its framework sees it: for a child process --------------------------------------------------------------------------


def jax_devices() -> Iterator[Facts]:
    """What JAX says of each device of this process. It starts them."""
    import jax

    for device in jax.local_devices():
        memory = device.memory_stats() or {}
        yield {
            "id": device.id,
            "ordinal": device.local_hardware_id,
            "platform": device.platform,
            "kind": device.device_kind,
            "capability": str(getattr(device, "compute_capability", "") or "") or None,
            "compute_units": getattr(device, "core_count", None),
            "client": str(device.client.platform_version).splitlines()[0],
            "memory_bytes": memory.get("bytes_limit"),
        }


def torch_devices() -> Iterator[Facts]:
    """What torch says of each GPU. It imports torch and starts them."""
    import torch

    for ordinal in range(torch.cuda.device_count()):
        has = torch.cuda.get_device_properties(ordinal)
        yield {
            "ordinal": ordinal,
            "kind": has.name,
            "gfx": getattr(has, "gcnArchName", None),
            "compute_units": has.multi_processor_count,
            "wave_size": getattr(has, "warp_size", None),
            "memory_bytes": has.total_memory,
            "lds_bytes": getattr(has, "shared_memory_per_block", None),
            "l2_bytes": getattr(has, "L2_cache_size", None),
            "pci": pci_address(has),
        }


def pci_address(properties: Any) -> str | None:
    """The PCI address of a torch device, from its properties."""
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{getattr(properties, 'pci_domain_id', 0):04x}:{properties.pci_bus_id:02x}:{getattr(properties, 'pci_device_id', 0):02x}"


_PCI_QUESTIONS = (("libamdhip64", "hipDeviceGetPCIBusId"), ("libcuda.so", "cuDeviceGetPCIBusId"))


def pci_of_runtime(ordinal: int, mapped: Iterable[Facts]) -> str | None:
    """The PCI address of a GPU by its ordinal in the runtime that is mapped, which is JAX's before torch is imported; None where it is not
    told.

    Args:
      ordinal: as JAX counts.
      mapped: of `own_libraries`.
    """
    for entry in mapped:
        for prefix, function in _PCI_QUESTIONS:
            if entry["name"].startswith(prefix):
                text = ctypes.create_string_buffer(64)
                failed = getattr(ctypes.CDLL(entry["path"]), function)(text, len(text), ordinal)
                return None if failed else text.value.decode().lower()
    return None


def torch_build() -> Facts:
    """Which runtime the installed torch was built for."""
    import torch

    return {
        "version": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "sees_gpu": torch.cuda.is_available(),
    }
