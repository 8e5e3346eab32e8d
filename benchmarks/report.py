"""What a run reports: the machine, its rows on the terminal and on disk, and ratios between cases."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import summary
from benchmarks.cases import MIXED, WINDOWED

PACKAGES = ("jax", "jaxlib", "numpy", "torch", "triton", "jax-triton", "amd-aiter", "ejkernel", "matplotlib", "purepage")
Row = dict[str, Any]


def machine() -> Row:
    """What a reader must know of where this ran. No host names, no paths."""
    import jax

    device = jax.local_devices()[0]
    info: Row = {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.local_device_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {},
    }
    for package in PACKAGES:
        try:
            info["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device.platform != "cpu":
        try:
            import torch

            properties = torch.cuda.get_device_properties(0)
            info |= {"compute_units": properties.multi_processor_count, "memory_bytes": properties.total_memory}
            info["cuda_or_hip"] = torch.version.hip or torch.version.cuda
        except (ImportError, RuntimeError) as error:
            info["torch_cuda"] = f"not available: {error}"
    return info


def _processor() -> str:
    try:
        names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


class Report:
    """Rows of a run, written to disk after each: the summary to `path`, everything to the folder `raw`."""

    def __init__(self, path: Path, head: Row, *, raw: Path = summary.RAW) -> None:
        self.path, self.head, self.raw, self.rows = path, head, raw, []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(line(row, self.head.get("peak") or {}), flush=True)
        self.write()

    def write(self) -> None:
        summary.write(self.path, {**self.head, "rows": self.rows, "derived": derived(self.rows)}, raw=self.raw)


def bound_us(row: Row, peak: Row) -> float | None:
    """The roofline bound in microseconds: the slower of memory (read rate for attention, copy rate for writers) and arithmetic, at the
    rates that this run measured.
    """
    rate = peak.get("read_bytes_per_s" if row["kind"] == "attention" else "copy_bytes_per_s")
    if not rate or row["kind"] == "step":
        return None
    by_flops = row["flops"] / peak["flops_per_s"] if peak.get("flops_per_s") else 0.0
    return max(row["min_bytes"] / rate, by_flops) * 1e6


def rate(per_second: float, unit: str) -> str:
    """ "4.18 TB/s", "48.2 GFLOP/s"."""
    prefix, scale = ("T", 1e12) if per_second >= 2e11 else ("G", 1e9)
    return f"{per_second / scale:.4g} {prefix}{unit}"


def line(row: Row, peak: Row) -> str:
    head = f"{row['case']:42} {row['contender']:36}"
    if row["status"] != "ok":
        return f"{head} {row['status']}: {row['reason'].splitlines()[0][:120] if row.get('reason') else ''}"
    text = f"{head} {row['us']:10.1f} us"
    if row.get("bytes_per_s"):
        text += f" {rate(row['bytes_per_s'], 'B/s'):>12}"
    if row.get("flops_per_s"):
        text += f" {rate(row['flops_per_s'], 'FLOP/s'):>15}"
    bound = bound_us(row, peak)
    if bound:
        text += f"  bound {bound:9.1f} us = {bound / row['us']:4.0%}"
    if row.get("cpu_us"):
        text += f"  {row['cpu_us']:.0f} us of cores"
    if "overhead_us" in row:
        text += f"  {row['overhead_us']:.0f} us beside the kernels, compiled in {row['compile_s']:.1f} s"
    if row.get("python_calls"):
        text += f"  ({row['python_calls']} Python calls in {row['calls']})"
    return text


def table(rows: list[Row], peak: Row) -> str:
    """All rows, after a line with the measured peak."""
    lines = []
    if peak:
        names = (("copy_bytes_per_s", "copy", "B/s"), ("read_bytes_per_s", "read", "B/s"), ("flops_per_s", "matmul", "FLOP/s"))
        lines.append("peak: " + ", ".join(f"{label} {rate(peak[key], unit)}" for key, label, unit in names if peak.get(key)))
    lines += [line(row, peak) for row in rows if row["status"] != "unavailable"]
    missing = {row["contender"]: row["reason"].splitlines()[0] for row in rows if row["status"] == "unavailable"}
    lines += [f"not timed everywhere: {name}: {reason[:150]}" for name, reason in missing.items()]
    return "\n".join(lines)


def markdown(content: Mapping[str, Any]) -> str:
    """A summary as a table: a row a case, a column a contender, in microseconds: median (fastest to slowest batch)."""
    peak, machine, rows = content.get("peak") or {}, content["machine"], summary.rows_of(content)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = f"{machine['device']}, {machine['cores']} cores of {machine['processor']}, Python {machine['python']}, {versions}"
    text = [f"`{content['command'].strip()}`, {content['date']}", "", f"{where}.", ""]
    names = (("copy_bytes_per_s", "copy", "B/s"), ("read_bytes_per_s", "read", "B/s"), ("flops_per_s", "matmul", "FLOP/s"))
    if peak:
        text += ["Measured peak: " + ", ".join(f"{label} {rate(peak[key], unit)}" for key, label, unit in names if key in peak) + ".", ""]
    text += ["Microseconds of a call: median (fastest to slowest batch). `bound` is what the measured peak allows.", ""]
    timed = [row for row in rows if row["status"] == "ok"]
    for kind in dict.fromkeys(row["kind"] for row in timed):
        mine = [row for row in timed if row["kind"] == kind]
        contenders = list(dict.fromkeys(row["contender"] for row in mine))
        text += [f"| {kind} | bound | " + " | ".join(contenders) + " |", "|---" * (len(contenders) + 2) + "|"]
        for case in dict.fromkeys(row["case"] for row in mine):
            cells = {row["contender"]: _cell(row) for row in mine if row["case"] == case}
            bound = bound_us(next(row for row in mine if row["case"] == case), peak)
            text.append(f"| {case} | {f'{bound:.4g}' if bound else ''} | " + " | ".join(cells.get(c, "") for c in contenders) + " |")
        text.append("")
    failed = [row for row in rows if row["status"] not in ("ok", "unavailable")]
    text += [f"- {row['case']}, {row['contender']}: {row['status']}: {row.get('reason', '')}" for row in failed]
    return "\n".join(text).rstrip("\n") + "\n"


def _cell(row: Row) -> str:
    cell = f"{row['us']:.4g} ({row['us_best']:.4g} to {row['us_worst']:.4g})"
    return f"{cell}, {row['overhead_us']:.3g} beside the kernels" if "overhead_us" in row else cell


def _time(rows: list[Row], case: str, contender: str, field: str = "us") -> float | None:
    return next((row.get(field) for row in rows if row["case"] == case and row["contender"] == contender and row["status"] == "ok"), None)


def derived(rows: list[Row]) -> list[Row]:
    """Figures that compare cases: ratios without units, of each of purepage's contenders."""
    found = []
    for contender in dict.fromkeys(row["contender"] for row in rows if row["contender"].startswith("purepage")):

        def ratio(name: str, top: str, *bottom: str, contender: str = contender) -> None:
            over, under = _time(rows, top, contender), [_time(rows, case, contender) for case in bottom]
            if over and all(under):
                found.append({"name": name, "contender": contender, "ratio": over / sum(under)})  # pyright: ignore

        ratio("mixed batch / its parts apart", MIXED[0], *MIXED[1:])
        ratio("window 4096 of 32768 / context 4096", *WINDOWED)
        for case in dict.fromkeys(row["case"] for row in rows):
            if case.startswith("decode ragged, "):
                ratio(f"{case} / uniform of the same bytes", case, case.replace("ragged", "uniform"))
            if case.endswith(", fp8 cache"):
                ratio(f"{case} / unquantized", case, case.removesuffix(", fp8 cache"))
            if case.endswith(", cache x 16"):
                ratio(f"{case} / small cache", case, case.removesuffix(", cache x 16"))
        for case in dict.fromkeys(row["case"] for row in rows if row["kind"] == "attention"):
            mine = _time(rows, case, contender)
            peers = [row["contender"] for row in rows if row["case"] == case and not row["contender"].startswith("purepage")]
            for peer in dict.fromkeys(peers):
                theirs = _time(rows, case, peer)
                if mine and theirs:
                    found.append({"name": f"{case}: time / {peer}'s", "contender": contender, "ratio": mine / theirs})
                mine_cpu, theirs_cpu = (_time(rows, case, name, "cpu_us") for name in (contender, peer))
                if mine_cpu and theirs_cpu:
                    found.append({"name": f"{case}: core time / {peer}'s", "contender": contender, "ratio": mine_cpu / theirs_cpu})
    return found
