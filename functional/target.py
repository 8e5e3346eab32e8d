"""The device that a program is traced for, and the settings that decide what is traced: `Target` and `Settings`, two frozen values.

`current_target()` is the only way to ask. What changes it is either constant in a process (the environment variables, read once), or a
context of `jax.make_user_context`, which is part of the key of every trace that JAX keeps: a jitted function that is called under another
target or other settings is traced again, and never finds what was traced for this one.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax

from . import record as records
from .errors import bad_type, bad_value

BRIDGES = ("callback", "jax_triton", "native")
"""Ways to run Triton launches inside a JAX program: see `purepage.bridges.execute`."""

_TRUE, _FALSE = ("1", "true", "yes", "on", "y"), ("", "0", "false", "no", "off", "n")


SWITCH, FOLDER = "switch", "folder"
"""Kinds of settings besides a choice of names."""


def _setting(variable: str, default: Any, meaning: str, kind: Any = SWITCH) -> Any:
    """A field of `Settings`; `kind` is `SWITCH`, `FOLDER` or a tuple of names. A default of None says that the variable is not set."""
    return field(default=default, metadata={"variable": variable, "meaning": meaning, "kind": kind})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that environment variables decide. `settings_table()` is the documentation of the fields.

    Raises:
      ValueError, TypeError: a field that is no member of its closed set.
    """

    bridge: str | None = _setting(
        "PUREPAGE_BRIDGE",
        None,
        "How Triton launches reach XLA: `callback` (DLPack and Triton's launcher), `jax_triton`, or `native` (a C++ handler); unset: "
        "`callback` where XLA records the launches and torch is healthy, else `native`.",
        BRIDGES,
    )
    interpret: bool = _setting(
        "TRITON_INTERPRET", False, "Triton kernels run in Triton's interpreter, on a CPU. Triton reads it itself, too."
    )
    command_buffer: bool | None = _setting(
        "PUREPAGE_COMMAND_BUFFER",
        None,
        "Launches may be recorded into XLA's command buffers. Unset: yes, but on ROCm only once the probe `recording` has passed in the "
        "device's record, since ROCm's have crashed inside while loops (openxla/xla#46952).",
    )
    prefer_aiter: bool = _setting(
        "PUREPAGE_PREFER_AITER",
        False,
        'Without a name, a call goes to AITER wherever AITER serves it, as with `implementation="aiter"`. Otherwise `triton` comes '
        "first, but where the device's record has a shorter time for AITER.",
    )
    pallas_hopper: bool = _setting(
        "PUREPAGE_PALLAS_HOPPER",
        False,
        'With `implementation="pallas"` on an H100 or H200 and jax 0.11, prompts go to the Mosaic GPU kernel. Experimental: right in the '
        "shapes that ran, and not yet faster than `triton` around the kernel.",
    )
    aiter_finite_cache: bool = _setting(
        "PUREPAGE_AITER_FINITE_CACHE",
        False,
        "Promises that slots outside every sequence hold neither NaN nor Inf: AITER's split kernel multiplies such values by 0.",
    )
    aiter_paged_decode: bool = _setting(
        "PUREPAGE_AITER_PAGED_DECODE", False, "Steps of one query per sequence go to AITER's `paged_attention_decode` where it serves them."
    )
    aiter_command_buffer: bool = _setting(
        "PUREPAGE_AITER_COMMAND_BUFFER",
        False,
        "AITER operators that allocate nothing may be recorded into command buffers. Each must have run before, unrecorded, with the same "
        "shapes, since AITER compiles a kernel when it is first called.",
    )
    cache_dir: str | None = _setting(
        "PUREPAGE_CACHE_DIR",
        None,
        "Folder of the device records, an absolute path; unset: `$XDG_CACHE_HOME/purepage`, or `~/.cache/purepage`.",
        FOLDER,
    )

    def __post_init__(self) -> None:
        if self.bridge is not None and self.bridge not in BRIDGES:
            bad_value("bridge", self.bridge, f"None or one of {', '.join(map(repr, BRIDGES))}")
        if self.cache_dir is not None and not (isinstance(self.cache_dir, str) and _is_folder(self.cache_dir)):
            bad_value("cache_dir", self.cache_dir, "None or an absolute path")
        for each in fields(self):
            if each.metadata["kind"] == SWITCH and not isinstance(getattr(self, each.name), bool | type(each.default)):
                bad_type(each.name, getattr(self, each.name), "a bool" if each.default is not None else "None or a bool")


def _is_folder(text: str) -> bool:
    """Whether a text names a folder wherever the process stands."""
    return text.startswith("~") or Path(text).is_absolute()


def variable_of(setting: str) -> str:
    """The environment variable of a field of `Settings`."""
    return Settings.__dataclass_fields__[setting].metadata["variable"]


def settings_of(environment: Mapping[str, str]) -> Settings:
    """The settings that environment variables ask for.

    Args:
      environment: variables by name. One that is absent or empty has its default.

    Raises:
      ValueError: a variable's text is not in its closed set; the message names the variable.
    """
    given = {}
    for each in fields(Settings):
        variable = each.metadata["variable"]
        text = environment.get(variable, "")
        if not text:
            continue
        kind = each.metadata["kind"]
        if kind == SWITCH:
            if text.lower() not in _TRUE + _FALSE:
                bad_value(variable, text, f"unset or one of {', '.join(map(repr, _TRUE + _FALSE))}")
            given[each.name] = text.lower() in _TRUE
        elif kind == FOLDER:
            if not _is_folder(text):
                bad_value(variable, text, "unset or an absolute path")
            given[each.name] = text
        else:
            if text not in kind:
                bad_value(variable, text, f"unset or one of {', '.join(map(repr, kind))}")
            given[each.name] = text
    return Settings(**given)


def settings_table() -> str:
    """The environment variables as a Markdown table, for the documentation."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for each in fields(Settings):
        default = f"`{int(each.default)}`" if isinstance(each.default, bool) else "unset"
        rows.append(f"| `{each.metadata['variable']}` | {default} | {each.metadata['meaning']} |")
    return "\n".join(rows)


def xla_flags() -> str:
    """XLA's own options, XLA_FLAGS. XLA reads them when JAX first computes, and keeps them."""
    return os.environ.get("XLA_FLAGS", "")


def environment() -> Mapping[str, str]:
    """The environment variables of this process, for a report of it and for its child processes."""
    return os.environ


def cache_folder(settings: Settings) -> Path | None:
    """The folder of the device records, which need not exist; None where there is no home folder to have it in."""
    try:
        if settings.cache_dir is not None:
            return Path(settings.cache_dir).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "purepage"
    except RuntimeError:
        return None


@cache
def environment_settings() -> Settings:
    """The settings of this process: its environment variables when this was first asked. A later change of a variable has no effect."""
    return settings_of(os.environ)


@dataclass(frozen=True)
class Target:
    """What a program is planned for.

    Attributes:
      platform: "cpu", "cuda", "rocm", or another of JAX's platforms.
      arch: the name of the architecture: "gfx942", "sm_90", "cpu"; the platform's name where there are no architectures.
      compute_units: streaming multiprocessors or compute units of the device; 1 on a CPU.
      wave_size: threads of a warp (AMD: wave); 1 on a CPU.
      settings: see `Settings`.
      record: what probes and the tuner found on this device, see `purepage.functional.record`; None where there is no record, and for a
        device that is not here.
    """

    platform: str
    arch: str
    compute_units: int
    wave_size: int
    settings: Settings = field(default_factory=Settings)
    record: records.Record | None = None

    @property
    def records_launches(self) -> bool:
        """Whether launches may be recorded into XLA's command buffers: as the settings say, else by platform and record."""
        if self.settings.command_buffer is not None:
            return self.settings.command_buffer
        return self.platform != "rocm" or (self.record is not None and self.record.passed(records.RECORDING))

    @property
    def recording_reason(self) -> str:
        """Why launches may be recorded, or may not."""
        if self.settings.command_buffer is not None:
            return f"{variable_of('command_buffer')} is {'on' if self.settings.command_buffer else 'off'}"
        if self.platform != "rocm":
            return "the default here"
        probe = self.record.probes.get(records.RECORDING) if self.record is not None else None
        if probe is None:
            return f"the probe `{records.RECORDING}` was not tried on this device: python -m purepage.tune --probe"
        return f"the probe `{records.RECORDING}` {'passed' if probe.passed else f'failed: {probe.why}'} ({probe.date})"

    @property
    def amd_arch(self) -> str | None:
        """`arch` on an AMD GPU, else None."""
        return self.arch if self.platform == "rocm" else None


_SETTINGS = jax.make_user_context(None)
_TARGET = jax.make_user_context(None)


def current_settings() -> Settings:
    """The settings of the innermost `using_settings`, else those of the environment."""
    found = _SETTINGS.value
    return environment_settings() if found is None else found


@contextmanager
def using_settings(**changes: Any) -> Iterator[None]:
    """Functions called inside have these settings changed; part of the key of `jax.jit`.

    Args:
      changes: fields of `Settings`.

    Raises:
      ValueError, TypeError: a value that the field does not take.
    """
    unknown = sorted(set(changes) - set(Settings.__dataclass_fields__))
    if unknown:
        bad_value("setting", unknown[0], f"one of {', '.join(map(repr, Settings.__dataclass_fields__))}")
    with _SETTINGS(replace(current_settings(), **changes)):
        yield


@contextmanager
def assuming_target(target: Target) -> Iterator[None]:
    """Inside, `current_target()` is `target`, whatever this machine has; part of the key of `jax.jit`. For planning, not for running."""
    with _TARGET(target):
        yield


def current_target() -> Target:
    """The target of the innermost `assuming_target`, else the device that JAX computes on by default, with the current settings."""
    assumed = _TARGET.value
    if assumed is not None:
        return assumed
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]: made at run time
    return _device_target(device, current_settings())


@cache
def _device_target(device: Any, settings: Settings) -> Target:
    """The target of a device, of the first one of a platform, or (None) of the default one."""
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return target_of(device, settings)


def target_of(device: Any, settings: Settings | None = None) -> Target:
    """The `Target` of a `jax.Device`.

    Everything is read off JAX's device; torch is asked on ROCm, where JAX's plugin does not give the name of the architecture. The device's
    record is read when it is first asked for, and then no more.

    Args:
      device: a `jax.Device`.
      settings: default: the current ones.
    """
    settings = current_settings() if settings is None else settings
    found, folder = _without_record(device, settings), cache_folder(settings)
    if folder is None or not os.path.isdir(folder):
        return found
    return replace(found, record=records.read_once(folder, records.device_of(found, device), records.versions_here(device)))


def _without_record(device: Any, settings: Settings) -> Target:
    platform = device.platform
    if platform not in ("gpu", "cuda", "rocm"):
        return Target(platform, platform, 1, 1, settings)
    units = int(getattr(device, "core_count", 0) or 0)
    capability = str(getattr(device, "compute_capability", "") or "")
    if _is_rocm(device):
        name = gfx_name(capability) or gfx_name(str(getattr(device, "device_kind", ""))) or _gfx_name_from_torch(device)
        return Target("rocm", name, units, wave_size(name), settings)
    return Target("cuda", "sm_" + capability.replace(".", ""), units, 32, settings)


def named_target(name: Any, settings: Settings | None = None) -> Target:
    """The target of an architecture or product: "gfx942", "MI300X", "sm_90", "cpu", with the compute units of the usual part.

    Args:
      name: see `purepage.kernels.archs.arch_names`.
      settings: default: the current ones.

    Raises:
      ValueError: there is no such architecture; the message lists the names.
    """
    from ..kernels.archs import resolve_arch

    facts = resolve_arch(name)
    platform = {"amd": "rocm", "nvidia": "cuda"}.get(facts.vendor, facts.vendor)
    units = 1 if platform == "cpu" else facts.num_cus
    return Target(platform, facts.name, units, facts.wave_size, current_settings() if settings is None else settings)


def wave_size(name: str) -> int:
    """Threads of a warp (AMD: wave) on an architecture; of one without facts, 64 on gfx9 (CDNA, GCN) and 32 elsewhere."""
    from ..kernels.archs import find_arch

    facts = find_arch(name)
    if facts is not None:
        return facts.wave_size
    return 64 if name.startswith("gfx9") else 32


def _is_rocm(device: Any) -> bool:
    """Whether a GPU is AMD's. JAX calls the platform of both vendors "gpu"; the version of the client differs."""
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
