"""The device record: what probes and the tuner found on one kind of device with these versions, a JSON file in the user's cache folder.

A process reads the file of a device once, when it first asks for the device's `Target`, which then holds it: so it is part of the key of
`jax.jit`. A file that is of other versions is left alone; one that can't be read is ignored with one warning. `python -m purepage.tune`
writes rows, `note_probe` the outcome of a probe. Deleting the file is always safe.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from .errors import bad_type, bad_value

if TYPE_CHECKING:
    from .target import Target

SCHEMA = 1
"""Version of the file's form."""
RECORDING = "recording"
"""Name of the probe that lets ROCm record launches: five of them captured, and replayed with new data."""

Key = tuple[tuple[str, Any], ...]
"""Named facts of a shape, sorted; or fields of a configuration. The values are hashable, and JSON has them."""

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton"),
    "torch": ("torch",),
    "aiter": ("amd-aiter", "aiter"),
}
"""Distributions that each package comes from, the usual one first."""
DRIVERS = (Path("/sys/module/amdgpu/version"), Path("/proc/driver/nvidia/version"))


@dataclass(frozen=True)
class Device:
    """What a record is for.

    Attributes:
      platform, arch, compute_units: as in `Target`.
      product: as JAX names it.
    """

    platform: str
    arch: str
    product: str
    compute_units: int


@dataclass(frozen=True)
class Probe:
    """Outcome of one probe: whether it passed, why not, and the day (ISO 8601)."""

    passed: bool
    why: str
    date: str


@dataclass(frozen=True)
class Row:
    """What the tuner found for one shape.

    Attributes:
      operation: name of the operation.
      key: facts of the shape, see `purepage.kernels.plans.tuned.shape_key`.
      configurations: by kind of kernel all fields of the configuration. Empty where the table's row is the fastest.
      us: microseconds of a call with them; `untuned_us` with the table's row, in the same run.
      roofline: part of the roofline that `us` reaches, 0 where none was measured.
      us_of: microseconds of each implementation that was right and was timed.
      date: the day (ISO 8601).
    """

    operation: str
    key: Key
    configurations: tuple[tuple[str, Key], ...]
    us: float
    untuned_us: float
    roofline: float
    us_of: tuple[tuple[str, float], ...]
    date: str

    @property
    def fastest(self) -> str | None:
        """The implementation with the shortest time; None where only one was timed."""
        return min(self.us_of, key=lambda each: each[1])[0] if len(self.us_of) > 1 else None


@dataclass(frozen=True)
class Record:
    """A record that was read. Two are equal where their digests are.

    Attributes:
      digest: hash of the contents.
      path: the file.
      date: the day of its last change (ISO 8601).
      probes: outcomes by name.
      rows: by operation and key.
    """

    digest: str
    path: Path = field(compare=False)
    date: str = field(compare=False)
    probes: Mapping[str, Probe] = field(compare=False)
    rows: Mapping[tuple[str, Key], Row] = field(compare=False)

    def passed(self, probe: str) -> bool:
        """Whether this probe was tried and passed."""
        found = self.probes.get(probe)
        return found is not None and found.passed


def sorted_key(facts: Mapping[str, Any]) -> Key:
    return tuple(sorted(facts.items()))


def versions_here(device: Any) -> tuple[tuple[str, str], ...]:
    """(name, version) of everything that a record depends on, sorted; of what is not installed or not known the version is empty.

    Args:
      device: a `jax.Device`, for the version of its runtime.
    """
    found = {"purepage": getattr(sys.modules["purepage"], "__version__", "")}
    found |= {name: next(filter(None, map(_version, distributions)), "") for name, distributions in DISTRIBUTIONS.items()}
    found["runtime"] = (str(getattr(getattr(device, "client", None), "platform_version", "")).splitlines() or [""])[0][:100]
    found["driver"] = "" if device.platform == "cpu" else next(filter(None, map(_driver, DRIVERS)), "")
    return tuple(sorted(found.items()))


@cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver(path: Path) -> str:
    try:
        return (re.findall(r"\d+(?:\.\d+)+", path.read_text()) or [""])[0]
    except OSError:
        return ""


def _stem(device: Device) -> str:
    product = re.sub(r"[^a-z0-9]+", "-", device.product.lower()).strip("-")
    return f"{device.arch}-{product}-{device.compute_units}cu"


def path_of(folder: Path, device: Device, versions: tuple[tuple[str, str], ...]) -> Path:
    """The file of a device and versions: architecture, product, compute units, and a hash of the versions."""
    return folder / f"{_stem(device)}-{hashlib.sha256(repr((SCHEMA, versions)).encode()).hexdigest()[:12]}.json"


def differences(contents: Mapping[str, Any], device: Device, versions: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Why a file's contents are not for this device, schema and versions; empty where they are."""
    if contents["schema"] != SCHEMA:
        return (f"schema {contents['schema']}, here {SCHEMA}",)
    said = [
        f"{name} {value}, here {asdict(device)[name]}" for name, value in contents["device"].items() if value != asdict(device).get(name)
    ]
    there, here = contents["versions"], dict(versions)
    names = sorted({*there, *here})
    said += [f"{n} {there.get(n) or 'absent'}, here {here.get(n) or 'absent'}" for n in names if there.get(n, "") != here.get(n, "")]
    return tuple(said)


def read(path: Path, device: Device, versions: tuple[tuple[str, str], ...]) -> Record | None:
    """The record in a file; None where there is none, where it is of other versions, and, with a warning, where it can't be read."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        return _ignored(path, error)
    try:
        contents = json.loads(text)
        if differences(contents, device, versions):
            return None
        return _record(path, contents, hashlib.sha256(text).hexdigest()[:16])
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        return _ignored(path, error)


def _ignored(path: Path, error: Exception) -> None:
    warnings.warn(f"the device record {path} can't be read and is ignored: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)


def _record(path: Path, contents: Mapping[str, Any], digest: str) -> Record:
    probes = {str(name): Probe(_is(bool, each["passed"]), str(each["why"]), str(each["date"])) for name, each in contents["probes"].items()}
    rows = [_row(each) for each in contents["rows"]]
    return Record(digest, path, str(contents["date"]), probes, {(row.operation, row.key): row for row in rows})


def _row(given: Mapping[str, Any]) -> Row:
    return Row(
        operation=_is(str, given["operation"]),
        key=sorted_key(given["key"]),
        configurations=tuple((str(kind), _values(values)) for kind, values in given["configurations"].items()),
        us=float(given["us"]),
        untuned_us=float(given["untuned_us"]),
        roofline=float(given["roofline"]),
        us_of=tuple((str(name), float(us)) for name, us in given["us_of"].items()),
        date=str(given["date"]),
    )


def _values(given: Mapping[str, Any]) -> Key:
    return tuple((str(name), _frozen(value)) for name, value in given.items())


def _is(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        bad_type("a value of the record", value, f"of type {kind.__name__}")
    return value


def _frozen(value: Any) -> Any:
    """Lists of JSON as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@cache
def read_once(folder: Path, device: Device, versions: tuple[tuple[str, str], ...]) -> Record | None:
    """`read` of the device's file, once in a process."""
    return read(path_of(folder, device, versions), device, versions)


def update(
    folder: Path, device: Device, versions: tuple[tuple[str, str], ...], change: Callable[[dict[str, Any]], None], *, today: str = ""
) -> Path:
    """Changes a record on disk. Several processes may do so at once: no change is lost, and a reader finds the old file or the new one.

    Args:
      folder, device, versions: see `path_of`. The folder is made where it is missing.
      change: changes the contents, a dict with "probes" by name and "rows", a list. A file that can't be read begins anew.
      today: the date that is written; default: today's.

    Returns:
      The file.

    Raises:
      OSError: the folder can't be written.
    """
    path = path_of(folder, device, versions)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        contents = _contents(path, device, versions)
        change(contents)
        contents["date"] = today or date.today().isoformat()
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(json.dumps(contents, indent=1) + "\n")
        os.replace(fresh, path)
    return path


def _contents(path: Path, device: Device, versions: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """What is on disk, where it is whole and of these versions, else an empty record."""
    if path.exists() and read(path, device, versions) is not None:
        return json.loads(path.read_bytes())
    return {"schema": SCHEMA, "device": asdict(device), "versions": dict(versions), "date": "", "probes": {}, "rows": []}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time, where the system has `flock`; elsewhere the last writer wins."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def add_row(contents: dict[str, Any], row: Row) -> None:
    """Puts a row into the contents, in place of one of the same operation and key."""
    given = {**asdict(row), "key": dict(row.key), "us_of": dict(row.us_of)}
    given["configurations"] = {kind: dict(values) for kind, values in row.configurations}
    others = (other for other in contents["rows"] if (other["operation"], sorted_key(other["key"])) != (row.operation, row.key))
    contents["rows"] = [*others, given]


def forget(folder: Path, device: Device) -> tuple[Path, ...]:
    """Deletes the records of a device, those of other versions too, and returns which."""
    found = tuple(sorted(folder.glob(f"{_stem(device)}-*.json")))
    for path in found:
        path.unlink(missing_ok=True)
        path.with_suffix(".lock").unlink(missing_ok=True)
    return found


def device_of(target: "Target", device: Any) -> Device:
    """What a record of `device`, a `jax.Device` whose target is `target`, is for."""
    return Device(target.platform, target.arch, str(getattr(device, "device_kind", "") or target.arch), target.compute_units)


def default_device() -> Any:
    """The `jax.Device` that JAX computes on by default."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]: made at run time
    return jax.local_devices(backend=device)[0] if device is None or isinstance(device, str) else device


def place(target: "Target") -> tuple[Path, Device, tuple[tuple[str, str], ...]]:
    """(Folder, device, versions) of the record of a target, which must be this machine's default device.

    Raises:
      ValueError: the target is of another device, or there is no folder for records.
    """
    from .target import cache_folder, target_of

    here = default_device()
    local = target_of(here, target.settings)
    if (local.platform, local.arch, local.compute_units) != (target.platform, target.arch, target.compute_units):
        bad_value("target", target.arch, f"this machine's device, {local.arch}: a record is of a device that is here")
    folder = cache_folder(target.settings)
    if folder is None:
        bad_value("cache folder", None, "PUREPAGE_CACHE_DIR or a home folder")
    return folder, device_of(local, here), versions_here(here)


def note_probe(target: "Target", name: str, passed: bool, why: str = "") -> Path:
    """Writes the outcome of a probe into the record of this machine's device. Processes that start later see it.

    Args:
      target: `current_target()`.
      name: of the probe. `RECORDING` decides whether launches may be recorded on ROCm.
      passed: whether it passed.
      why: why it failed.

    Returns:
      The file.

    Raises:
      ValueError: the target is not of a device that is here.
      OSError: the folder can't be written.
    """
    if not isinstance(passed, bool):
        bad_type("passed", passed, "a bool")
    outcome = {"passed": passed, "why": why, "date": date.today().isoformat()}
    return update(*place(target), lambda contents: contents["probes"].update({name: outcome}))


def described(target: "Target") -> str:
    """One line: the target's record, or why it has none."""
    if target.record is not None:
        found = target.record
        probes = [f"probe {name} {'passed' if probe.passed else f'failed: {probe.why}'}" for name, probe in found.probes.items()]
        return "; ".join([f"record {found.path} of {found.date}: {len(found.rows)} tuned shapes", *probes])
    try:
        folder, device, versions = place(target)
    except ValueError:
        return f"no record: {target.arch} is not this machine's device"
    path = path_of(folder, device, versions)
    for other in sorted(folder.glob(f"{_stem(device)}-*.json"), key=lambda each: each != path):
        try:
            said = differences(json.loads(other.read_bytes()), device, versions)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return f"no record: {other} can't be read"
        return f"no record: {other} is ignored: {'; '.join(said)}" if said else f"no record: {other} was written after this process began"
    return f"no record: there is no {path}; python -m purepage.tune writes it"
