"""What a call becomes: its launches, and how near a measurement is to the limits of a device."""

import textwrap
from collections.abc import Mapping
from typing import Any

from ..bridges.explain import LAUNCH_HEAD, Explanation, launch_row
from ..functional.errors import bad_type
from .axes import INK, blended, colors, new_axes


def plan(explanation: Explanation, *, ax: Any = None) -> Any:
    """Draws what `pp.explain` found as a table: the implementations with their reasons, then the launches of the one that serves the call.

    Args:
      explanation: the result of `explain`.
      ax: axes to draw into; None makes a figure.

    Returns:
      The axes.

    Raises:
      TypeError: no explanation.
    """
    if not isinstance(explanation, Explanation):
        bad_type("explanation", explanation, "the result of purepage.explain")
    rows: list[tuple[list[str], str]] = []
    for choice in explanation.choices:
        rows.append(([f"{choice.operation} {str(explanation).splitlines()[0]}", ""], "title"))
        for name, reasons in choice.unsupported_reasons.items():
            chosen = name == choice.implementation
            why = "serves it" if chosen else "; ".join(reasons) or "can serve it"
            rows.append(([name, textwrap.fill(why, 80)], "chosen" if chosen else "plain"))
        for number, launch in enumerate(choice.program.launches if choice.program else (), 1):
            cells = dict(zip(LAUNCH_HEAD, launch_row(number, launch), strict=True))
            text = f"grid {cells['grid']}, {cells['warps']} warps, {cells['stages']} stages\n{textwrap.fill(cells['tiles'], 80)}"
            rows.append(([f"launch {number}: {cells['kernel']}", text], "launch"))
    lines = [max(1, text.count("\n") + 1) for (_, text), _ in rows]
    ax = new_axes(ax, (10.0, 0.4 + 0.22 * sum(lines)))
    ax.axis("off")
    tones = {"title": "#d0d7de", "chosen": blended("#54a24b", 0.4), "plain": "white", "launch": blended("#4c78a8", 0.2)}
    shown = ax.table(
        cellText=[cells for cells, _ in rows],
        cellColours=[[tones[kind]] * 2 for _, kind in rows],
        cellLoc="left",
        colWidths=[0.34, 0.66],
        bbox=[0, 0, 1, 1],
    )
    shown.auto_set_font_size(False)
    shown.set_fontsize(8)
    for (line, _), cell in shown.get_celld().items():
        cell.set_height(lines[line] / sum(lines))
        cell.set_edgecolor("#aaaaaa")
        cell.PAD = 0.02
    return ax


def roofline(points: Mapping[str, tuple[float, float, float]], *, flops_per_s: float, bytes_per_s: float, ax: Any = None) -> Any:
    """Draws measurements under the two limits of a device: its products, and its memory.

    Args:
      points: for each name the floating point operations, the bytes that must move, and the seconds that it took.
      flops_per_s, bytes_per_s: the device's peaks.
      ax: axes to draw into; None makes a figure.

    Returns:
      The axes; the legend gives each point's share of its limit.
    """
    ax = new_axes(ax, (7.0, 4.5))
    intensities = [flops / moved for flops, moved, _ in points.values()]
    ridge = flops_per_s / bytes_per_s
    low, high = min([*intensities, ridge]) / 4, max([*intensities, ridge]) * 4
    ax.loglog([low, ridge, high], [low * bytes_per_s, flops_per_s, flops_per_s], color=INK, linewidth=1.2)
    for (name, (flops, moved, seconds)), tone in zip(points.items(), colors(len(points)), strict=True):
        bound = min(flops_per_s, flops / moved * bytes_per_s)
        ax.scatter(flops / moved, flops / seconds, color=[tone], zorder=3, label=f"{name}: {flops / seconds / bound:.0%}")
    ax.set(xlabel="operations per byte that must move", ylabel="operations per second")
    ax.grid(True, which="both", alpha=0.25)
    ax.legend(fontsize=8)
    return ax
