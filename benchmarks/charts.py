"""Charts of a run: a roofline plot, and bars of the time of each contender, a panel a case. PNG with a palette, which is small."""

import io
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import Row, bound_us, rate

DPI, COLORS = 72, 32
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
    """Writes `<stem>_roofline.png` and `<stem>_bars.png`; nothing without matplotlib."""
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
        path = stem.with_name(f"{stem.name}_{name}.png")
        _save(figure, path)
        written.append(path)
    return written


def _save(figure: Any, path: Path) -> None:
    from PIL import Image  # matplotlib depends on it

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI, bbox_inches="tight")
    Image.open(drawn).convert("RGB").quantize(COLORS).save(path, optimize=True)


def _roofline(rows: list[Row], head: Row, peers: list[str]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6))
    axes = figure.subplots()
    peak = head.get("peak") or {}
    points = [row for row in rows if row["flops"]]
    if not points:
        return figure
    intensity = [row["flops"] / row["min_bytes"] for row in points]
    low, high = min(intensity) / 2, max(intensity) * 2
    if peak.get("read_bytes_per_s") and peak.get("flops_per_s"):
        ridge = peak["flops_per_s"] / peak["read_bytes_per_s"]
        xs = sorted({low, min(max(ridge, low), high), high})
        axes.plot(xs, [min(x * peak["read_bytes_per_s"], peak["flops_per_s"]) / 1e12 for x in xs], color="black", linewidth=1.2)
        label = f"read {rate(peak['read_bytes_per_s'], 'B/s')}, matmul {rate(peak['flops_per_s'], 'FLOP/s')}, measured"
        axes.set_title(f"{head['machine']['device']}\npeak: {label}", fontsize=10)
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
    """A panel a case: the time of each contender, and the roofline bound as a line."""
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
        bound = bound_us(mine[0], head.get("peak") or {})
        if bound:
            axes.axvline(bound * scale, color="black", linestyle="--", linewidth=1)
        axes.set_title(case, fontsize=9)
        axes.set_xlabel(f"{unit} (dashed: bound at the measured peak)", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.margins(x=0.15)
    figure.suptitle(f"{head['machine']['device']}: time of one call", fontsize=11)
    return figure
