"""One JSON file that says all of a machine that a bug report needs: `python -m purepage.selfcheck --report FILE`.

Whatever touches a device runs in a child process with a time limit, so that a crash, a hang or an exception of a driver is a row of the
report. The file is written again after each part: it is valid JSON whenever the process ends.

The document is an object:

    schema       int, `SCHEMA`. It grows when a key changes its meaning or goes; a new key does not change it.
    purepage     the package's version.
    finished     whether every part was done; `interrupted` whether Ctrl-C or SIGTERM ended it; `seconds` how long it took.
    machine      system (os, kernel, python, cpu, cores, memory_bytes), driver (amdgpu, kfd, kfd_opens, nvidia, ...), rocm (version by
                 folder), gpus (of KFD and DRM: gfx, compute_units, wave_size, lds_bytes, memory_bytes, compute_partition,
                 memory_partition, features, pci, ...).
    packages     version by distribution; `distributions` those that torch, triton, jax's plugins and aiter came from, by module.
    environment  variables of `facts.ENVIRONMENT` only. Here and everywhere home folders are ~, and the names of user and host are left out.
    devices      as JAX and torch see them, in a child: jax [{id, ordinal, kind, ...}], torch {version, hip, cuda}, torch_devices,
                 libraries {before_torch, after_torch: [{name, path, inode}]}, target {platform, arch, compute_units, settings, ...}.
    missing      lines: what the installation lacks for a GPU.
    children     [{task, status, detail, said, where, unfinished, rubbish, seconds}]: how each child ended, see `children.Ending`.
    probes       [{name, shows, verdict, detail, found, seconds}]; a verdict is one of `VERDICTS`.
    cases        [{case, implementation, verdict, detail, error, seconds}] of the self-check, but those refused.
    refusals     [{implementation, reason, count, first}]: the cases that were refused, folded.
    kernels      [{shape, kernel, arch, vgprs, sgprs, vgpr_spills, lds_bytes, code_hash, launched, same, ...}]; or {shape, arch, refused}.
    speeds       [{shape, implementation, us, bytes_per_s, of_copy, ...}], the first of them a copy; or {..., refused} or {..., failed}.
    summary      the lines that were printed at the end.
"""

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...functional import dispatch, target
from ..native import library
from . import facts
from .children import CRASHED, ENDED, OUT_OF_TIME, QUIET, RAISED, Ending, Limits, run_child
from .missing import missing

__all__ = ["SCHEMA", "VERDICTS", "Limits", "write_report"]

SCHEMA = 1
PASSED, FAILED, SKIPPED, REFUSED = "passed", "failed", "skipped", "refused"
VERDICTS = (PASSED, FAILED, SKIPPED, REFUSED, CRASHED, OUT_OF_TIME, QUIET)
BAD = (FAILED, CRASHED, OUT_OF_TIME, QUIET)
PARTS = ("facts", "probes", "cases", "kernels", "speeds")

_RESTARTS = 4
"""Children of one implementation's cases that may die before the rest is left out."""

_INTERRUPTED = 130

Document = dict[str, Any]
Run = Callable[..., Ending]


def write_report(
    path: str | os.PathLike[str],
    *,
    implementations: Sequence[str] | None = None,
    only: str = "",
    limits: Limits | None = None,
    parts: Sequence[str] = PARTS,
    write: Callable[[str], Any] = print,
    run: Run = run_child,
) -> int:
    """Writes the report of this machine to a file, and prints a summary. It takes minutes.

    Args:
      path: the file. It is written first and after each part, each time as a whole.
      implementations: those whose cases run and whose speeds are measured; default: all but Pallas' interpreter.
      only: leaves out cases without this text in their name.
      limits: of each child process.
      parts: those of `PARTS` that are made.
      write: prints one line.
      run: runs a child, as `children.run_child` does.

    Returns:
      The exit status: 0; 1 where a probe or a case failed, crashed or hung, or no case passed; 130 where it was interrupted.

    Raises:
      OSError: the file can't be written; raised before anything else is done.
    """
    return _Report(Path(path), implementations, only, limits or Limits(), write, run).make(parts)


class _Report:
    def __init__(
        self, path: Path, implementations: Sequence[str] | None, only: str, limits: Limits, write: Callable[[str], Any], run: Run
    ) -> None:
        self.path, self.asked, self.only, self.limits, self.write, self.run = path, implementations, only, limits, write, run
        self.begin, self.hidden = time.monotonic(), facts.hidden_here(target.environment())
        self.document: Document = {
            "schema": SCHEMA,
            "purepage": _version(),
            "finished": False,
            "interrupted": False,
            "seconds": 0.0,
            "machine": {},
            "packages": {},
            "distributions": {},
            "environment": facts.shown_environment(target.environment()),
            "devices": {"jax": [], "torch": None, "torch_devices": [], "libraries": {}, "target": None},
            "missing": [],
            "children": [],
            "probes": [],
            "cases": [],
            "refusals": [],
            "kernels": [],
            "speeds": [],
            "summary": [],
        }

    def save(self) -> None:
        """The file as a whole: whoever reads it while it is made sees the state after the last part."""
        self.document["seconds"] = round(time.monotonic() - self.begin, 3)
        text = json.dumps(facts.scrubbed(self.document, self.hidden), indent=1, allow_nan=False)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            partial.write_text(text + "\n")
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)

    def make(self, parts: Sequence[str]) -> int:
        self.save()
        self.write("purepage writes a report, which takes minutes; Ctrl-C ends it with what was found so far")
        try:
            with _terminated_as_interrupted():
                for part in PARTS:
                    if part in parts:
                        self._guarded(part)
                        self.save()
                self.document["finished"] = True
        except KeyboardInterrupt:
            self.document["interrupted"] = True
        lines = [facts.without(line, self.hidden) for line in summary(self.document)]
        self.document["summary"] = lines
        self.save()
        for line in [*lines, f"written to {self.path}"]:
            self.write(line)
        return _INTERRUPTED if self.document["interrupted"] else int(is_bad(self.document))

    def _guarded(self, part: str) -> None:
        """One part; what this process itself fails in is a row, too."""
        try:
            getattr(self, f"_{part}")()
        except Exception as error:
            self.document["children"].append(_ending_row(Ending(part, RAISED, f"{type(error).__name__}: {error}")))

    def _child(self, task: str, options: Mapping[str, Any], **more: Any) -> Ending:
        ending = self.run(task, options, self.limits, **more)
        self.document["children"].append(_ending_row(ending))
        return ending

    def _facts(self) -> None:
        document = self.document
        document["machine"] = facts.machine()
        document["packages"], document["distributions"] = facts.packages(), facts.distributions()
        self.save()
        devices = document["devices"]
        ending = self._child("facts", {})
        for row in ending.rows:
            for key, value in row.items():
                if key == "jax":
                    devices["jax"].append(value)
                elif key == "libraries":
                    devices["libraries"].update(value)
                else:
                    devices[key] = value
        platform = _platform(devices)
        document["missing"] = missing(
            document["machine"], document["packages"], document["distributions"], platform, devices["torch"], library.obstacle()
        )

    def _no_device(self) -> str | None:
        """Why no child can start JAX's devices, where the first one could not."""
        first = next((child for child in self.document["children"] if child["task"] == "facts"), None)
        if first is None or self.document["devices"]["jax"] or first["status"] == ENDED:
            return None
        return f"JAX can't start its devices: {first['why']}"

    def _probes(self) -> None:
        from .probes import PROBES

        lost = self._no_device()
        on_cpu = _platform(self.document["devices"]) == "cpu"
        for probe in PROBES:
            row = {"name": probe.name, "shows": probe.shows, "verdict": SKIPPED, "detail": lost or "", "found": [], "seconds": 0.0}
            if on_cpu:
                row["detail"] = "no GPU: JAX computes on the CPU"
            elif lost is None:
                row |= _probe_row(self._child("probe", {"name": probe.name}))
                self.write(f"probe {probe.name}: {row['verdict']}{': ' if row['detail'] else ''}{row['detail'][:200]}")
            self.document["probes"].append(row)
            self.save()

    def _implementations(self) -> Sequence[str]:
        if self.asked:
            return self.asked
        found = self.document["devices"]["target"]
        return (found or {}).get("implementations") or [name for name in dispatch.IMPLEMENTATIONS if name != "pallas"]

    def _cases(self) -> None:
        """Where JAX can't start the GPU, plain JAX is checked on the CPU."""
        lost = self._no_device()
        for implementation in ["xla"] if lost else self._implementations():
            more = {"environment": {**target.environment(), "JAX_PLATFORMS": "cpu"}} if lost else {}
            rows = self._cases_of(implementation, **more)
            self.write(f"cases, {implementation}: {_counts(row['verdict'] for row in rows) or 'none'}")
            kept, refusals = folded(rows)
            self.document["cases"] += kept
            self.document["refusals"] += refusals
            self.save()

    def _cases_of(self, implementation: str, **more: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for _ in range(_RESTARTS):
            after = [row["case"] for row in rows]
            ending = self._child("cases", {"implementation": implementation, "only": self.only, "after": after}, **more)
            rows += ending.rows
            if ending.status == ENDED:
                return rows
            verdict = FAILED if ending.status == RAISED else ending.status
            name = ending.unfinished or "(before the first case)"
            rows.append(
                {"case": name, "implementation": implementation, "verdict": verdict, "detail": ending.why, "error": None, "seconds": None}
            )
            if ending.unfinished is None:
                break
        return rows

    def _kernels(self) -> None:
        if "triton" in self.document["distributions"] and not self._no_device() and _platform(self.document["devices"]) != "cpu":
            self.document["kernels"] = self._child("kernels", {}).rows

    def _speeds(self) -> None:
        if not self._no_device():
            names = [name for name in self._implementations() if name != "pallas"]
            if _platform(self.document["devices"]) == "cpu":
                names = [name for name in names if name == "xla"]  # an interpreter's time says nothing
            self.document["speeds"] = self._child("speeds", {"implementations": names}).rows


def _version() -> str:
    from ... import __version__

    return __version__


def _platform(devices: Mapping[str, Any]) -> str | None:
    """ "cpu", "cuda" or "rocm"; "gpu" where the target is not known; None where JAX started no device."""
    found = devices["target"]
    if found and "platform" in found:
        return found["platform"]
    return devices["jax"][0]["platform"] if devices["jax"] else None


def _ending_row(ending: Ending) -> dict[str, Any]:
    row = asdict(ending)
    del row["rows"]
    return {**row, "why": ending.why}


def _probe_row(ending: Ending) -> dict[str, Any]:
    """What a probe's child found, and its verdict, or how it ended without one."""
    found = [row["found"] for row in ending.rows if "found" in row]
    said = next((row for row in ending.rows if "verdict" in row), None)
    if ending.status == ENDED and said is not None:
        verdict, detail = said["verdict"], said["detail"]
    elif ending.status in (ENDED, RAISED):
        verdict, detail = FAILED, ending.why or "ended without a verdict"
    else:
        verdict, detail = ending.status, ending.why
    return {"verdict": verdict, "detail": detail, "found": found, "seconds": ending.seconds}


def folded(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
    """(The rows that were not refused, one entry for each implementation and reason of those that were)."""
    refused: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["verdict"] == REFUSED:
            refused.setdefault((row["implementation"], row["detail"]), []).append(row["case"])
    refusals = [
        {"implementation": name, "reason": reason, "count": len(names), "first": names[0]} for (name, reason), names in refused.items()
    ]
    return [row for row in rows if row["verdict"] != REFUSED], refusals


def is_bad(document: Document) -> bool:
    """Whether a probe or a case failed, crashed or hung, a child was lost, or no case passed where some ran."""
    verdicts = [row["verdict"] for row in (*document["probes"], *document["cases"])]
    lost = any(child["status"] != ENDED for child in document["children"])
    ran = document["cases"] or document["refusals"]
    return lost or any(verdict in BAD for verdict in verdicts) or bool(ran and PASSED not in [row["verdict"] for row in document["cases"]])


def _counts(verdicts: Iterator[str] | Sequence[str]) -> str:
    counted = Counter(verdicts)
    return ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS if counted[verdict])


def summary(document: Document) -> list[str]:
    """The lines that a report ends with."""
    lines = [f"purepage {document['purepage']} report{', interrupted' if document['interrupted'] else ''}: {document['seconds']:.0f} s"]
    lines += [f"machine: {text}" for text in _machine_lines(document)]
    names = ("jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt", "jax-cuda12-plugin", "torch", "amd-aiter")
    found = [f"{name} {document['packages'][name]}" for name in names if name in document["packages"]]
    triton = document["distributions"].get("triton")
    if triton is not None:
        found.append(f"Triton from {' and '.join(triton) or 'no distribution'}")
    lines.append(f"packages: {', '.join(found)}")
    lines += [f"missing: {line}" for line in document["missing"]]
    if document["probes"]:
        lines.append(f"probes: {_counts([row['verdict'] for row in document['probes']])}")
        reasons = Counter(row["detail"] for row in document["probes"] if row["verdict"] == SKIPPED)
        lines += [f"  skipped {count}: {reason}" for reason, count in reasons.items()]
        lines += [f"  {row['verdict']} {row['name']}: {row['detail'][:300]}" for row in document["probes"] if row["verdict"] in BAD]
    for name in dict.fromkeys(row["implementation"] for row in (*document["cases"], *document["refusals"])):
        cases = [row for row in document["cases"] if row["implementation"] == name]
        lines.append(f"cases, {name}: {_counts([row['verdict'] for row in cases]) or 'all refused'}")
        lines += [f"  {row['verdict']} {row['case']}: {str(row['detail'])[:300]}" for row in cases if row["verdict"] in BAD]
        lines += [f"  refused {row['count']}: {row['reason'][:300]}" for row in document["refusals"] if row["implementation"] == name]
    lines += _kernel_lines(document["kernels"])
    lines += [f"speed: {_speed_line(row)}" for row in document["speeds"] if "us" in row or "failed" in row]
    lines += [
        f"child {child['task']} {child['status']}: {child['why'][:300]}"
        for child in document["children"]
        if child["status"] != ENDED and child["task"] not in ("probe", "cases")
    ]
    return lines


def _machine_lines(document: Document) -> Iterator[str]:
    devices = document["devices"]
    for device in devices["jax"] or [{"kind": "no device"}]:
        units = f", {device['compute_units']} compute units" if device.get("compute_units") else ""
        yield f"{device['kind']}{units}"
    for gpu in document["machine"].get("gpus", []):
        parts = (gpu["gfx"], gpu.get("product"), f"{gpu['compute_units']} CUs", gpu.get("compute_partition"), gpu.get("memory_partition"))
        yield ", ".join(filter(None, parts))
    for folder, version in document["machine"].get("rocm", {}).items():
        yield f"ROCm {version} in {folder}"


def _kernel_lines(kernels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if kernels:
        compiled = [row for row in kernels if "kernel" in row]
        bad = [row for row in compiled if row.get("error")]
        spilled = [row for row in compiled if row.get("vgpr_spills")]
        other = [row for row in compiled if row.get("same") is False]
        yield f"kernels: {len(compiled)} compiled, {len(bad)} failed, {len(spilled)} spill, {len(other)} differ from what is launched"
        for row in bad:
            yield f"  failed {row['kernel']}, {row['shape']}: {str(row['error'])[:200]}"


def _speed_line(row: Mapping[str, Any]) -> str:
    what = ", ".join(filter(None, (row["shape"], row.get("implementation"))))
    if "failed" in row:
        return f"{what}: failed: {row['failed'][:200]}"
    share = f", {row['of_copy']:.0%} of the copy" if "of_copy" in row else ""
    if "flops_per_s" in row:
        return f"{what}: {row['us']:.0f} us, {row['flops_per_s'] / 1e12:.3g} TFLOP/s"
    return f"{what}: {row['us']:.0f} us, {row['bytes_per_s'] / 1e9:.1f} GB/s{share}"


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt inside, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
