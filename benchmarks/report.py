"""What a run leaves: JSON, a table on the terminal, a roofline plot and bar charts (PNG and SVG)."""

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.cases import MIXED, WINDOWED

PACKAGES = ("jax", "jaxlib", "numpy", "torch", "triton", "jax-triton", "amd-aiter", "ejkernel", "matplotlib", "purepage")
Row = dict[str, Any]
SCHEMA = 1


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
    """Rows as they come, written to disk after each."""

    def __init__(self, path: Path, head: Row) -> None:
        self.path, self.head, self.rows = path, head, []
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(line(row, self.head.get("roof") or {}), flush=True)
        self.write()

    def write(self) -> None:
        content = {"schema": SCHEMA, **self.head, "rows": self.rows, "derived": derived(self.rows, self.head.get("roof") or {})}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1, default=str) + "\n")
        partial.replace(self.path)


def floor_us(row: Row, roof: Row) -> float | None:
    """Microseconds that the measured roof allows at best: the slower of memory (read rate for attention, copy rate for writers) and
    arithmetic.
    """
    rate = roof.get("read_bytes_per_s" if row["kind"] == "attention" else "copy_bytes_per_s")
    if not rate or row["kind"] == "step":
        return None
    by_flops = row["flops"] / roof["flops_per_s"] if roof.get("flops_per_s") else 0.0
    return max(row["min_bytes"] / rate, by_flops) * 1e6


def rate(per_second: float, unit: str) -> str:
    """ "4.18 TB/s", "48.2 GFLOP/s"."""
    prefix, scale = ("T", 1e12) if per_second >= 2e11 else ("G", 1e9)
    return f"{per_second / scale:.4g} {prefix}{unit}"


def line(row: Row, roof: Row) -> str:
    head = f"{row['case']:42} {row['contender']:36}"
    if row["status"] != "ok":
        return f"{head} {row['status']}: {row['reason'].splitlines()[0][:120] if row.get('reason') else ''}"
    text = f"{head} {row['us']:10.1f} us"
    if row.get("bytes_per_s"):
        text += f" {rate(row['bytes_per_s'], 'B/s'):>12}"
    if row.get("flops_per_s"):
        text += f" {rate(row['flops_per_s'], 'FLOP/s'):>15}"
    floor = floor_us(row, roof)
    if floor:
        text += f"  roof {floor:9.1f} us = {floor / row['us']:4.0%}"
    if row.get("cpu_us"):
        text += f"  {row['cpu_us']:.0f} us of cores"
    if "overhead_us" in row:
        text += f"  {row['overhead_us']:.0f} us beside the kernels, compiled in {row['compile_s']:.1f} s"
    if row.get("python_calls"):
        text += f"  ({row['python_calls']} Python calls in {row['calls']})"
    return text


def table(rows: list[Row], roof: Row) -> str:
    """All rows; a line of the roof first."""
    lines = []
    if roof:
        names = (("copy_bytes_per_s", "copy", "B/s"), ("read_bytes_per_s", "read", "B/s"), ("flops_per_s", "matmul", "FLOP/s"))
        lines.append("roof: " + ", ".join(f"{label} {rate(roof[key], unit)}" for key, label, unit in names if roof.get(key)))
    lines += [line(row, roof) for row in rows if row["status"] != "unavailable"]
    missing = {row["contender"]: row["reason"].splitlines()[0] for row in rows if row["status"] == "unavailable"}
    lines += [f"not timed everywhere: {name}: {reason[:150]}" for name, reason in missing.items()]
    return "\n".join(lines)


def _time(rows: list[Row], case: str, contender: str, field: str = "us") -> float | None:
    return next((row.get(field) for row in rows if row["case"] == case and row["contender"] == contender and row["status"] == "ok"), None)


def derived(rows: list[Row], roof: Row) -> list[Row]:
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


# --- charts -------------------------------------------------------------------------------------------------------------------------------

# One color a contender, in every chart; purepage dark, others light.
_COLORS = {
    "purepage triton": "#0b3c7d",
    "purepage pallas": "#2f7d32",
    "purepage xla": "#6a3d9a",
    "purepage triton, jax-triton bridge": "#4f83c4",
    "purepage aiter": "#00838f",
}
_OTHERS = ("#d95f02", "#e6ab02", "#a6761d", "#e7298a", "#999999", "#c9b18f", "#f4a582", "#b2abd2", "#80b1d3")


def _color(contender: str, peers: list[str]) -> str:
    return _COLORS.get(contender) or _OTHERS[peers.index(contender) % len(_OTHERS)]


def draw(rows: list[Row], head: Row, stem: Path) -> list[Path]:
    """`<stem>_roofline` and `<stem>_bars`, PNG and SVG each; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no charts", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    timed = [row for row in rows if row["status"] == "ok" and row["kind"] != "step"]
    if not timed:
        return []
    peers = sorted({row["contender"] for row in timed} - set(_COLORS))
    figures = {"roofline": _roofline(timed, head, peers), "bars": _bars(timed, head, peers)}
    written = []
    for name, figure in figures.items():
        for suffix in (".png", ".svg"):
            path = stem.with_name(f"{stem.name}_{name}{suffix}")
            figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Date": None} if suffix == ".svg" else None)
            written.append(path)
    return written


def _roofline(rows: list[Row], head: Row, peers: list[str]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6))
    axes = figure.subplots()
    roof = head.get("roof") or {}
    points = [row for row in rows if row["flops"]]
    if not points:
        return figure
    intensity = [row["flops"] / row["min_bytes"] for row in points]
    low, high = min(intensity) / 2, max(intensity) * 2
    if roof.get("read_bytes_per_s") and roof.get("flops_per_s"):
        ridge = roof["flops_per_s"] / roof["read_bytes_per_s"]
        xs = sorted({low, min(max(ridge, low), high), high})
        axes.plot(xs, [min(x * roof["read_bytes_per_s"], roof["flops_per_s"]) / 1e12 for x in xs], color="black", linewidth=1.2)
        label = f"read {rate(roof['read_bytes_per_s'], 'B/s')}, matmul {rate(roof['flops_per_s'], 'FLOP/s')}, measured"
        axes.set_title(f"{head['machine']['device']}\nroof: {label}", fontsize=10)
    seen = set()
    for row, x in zip(points, intensity, strict=True):
        name = row["contender"]
        label = None if name in seen else name
        seen.add(name)
        ours = name.startswith("purepage")
        style = {"s": 42, "marker": "o"} if ours else {"s": 24, "marker": "x"}
        axes.scatter(x, row["flops_per_s"] / 1e12, color=_color(name, peers), label=label, zorder=3, **style)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    return figure


def _bars(rows: list[Row], head: Row, peers: list[str]) -> Any:
    """A panel a case: time of each contender, the roof as a line."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in rows))
    columns = 3
    lines = -(-len(cases) // columns)
    longest = max(sum(row["case"] == case for row in rows) for case in cases)
    figure = Figure(figsize=(6 * columns, (0.6 + 0.28 * longest) * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    unit, scale = ("us", 1.0) if statistics.median(row["us"] for row in rows) < 20_000 else ("ms", 1e-3)
    for axes in grid.flat[len(cases) :]:
        axes.set_axis_off()
    for axes, case in zip(grid.flat, cases, strict=False):
        mine = sorted((row for row in rows if row["case"] == case), key=lambda row: -row["us"])
        axes.barh([r["contender"] for r in mine], [r["us"] * scale for r in mine], color=[_color(r["contender"], peers) for r in mine])
        for at, row in enumerate(mine):
            axes.text(row["us"] * scale, at, f" {row['us'] * scale:.4g}", va="center", fontsize=7)
        floor = floor_us(mine[0], head.get("roof") or {})
        if floor:
            axes.axvline(floor * scale, color="black", linestyle="--", linewidth=1)
        axes.set_title(case, fontsize=9)
        axes.set_xlabel(f"{unit} (dashed: measured roof)", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.margins(x=0.15)
    figure.suptitle(f"{head['machine']['device']}: time of one call", fontsize=11)
    return figure
