"""Bytes that each device sends in a decode step, computed: `python -m benchmarks.sharded_bytes` writes the table and the chart of the docs.

Collectives are rings: an all-reduce of b bytes over n devices sends 2 (n - 1) / n * b from each, whatever the hardware does with it.
"""

import math
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
CHART = DOCS / "assets/sharding_bytes.svg"
PAGE = DOCS / "sharding.md"
BEGIN, END = "<!-- bytes -->", "<!-- end of bytes -->"
DEVICES = (8, 64, 512)


@dataclass(frozen=True)
class Model:
    """What decides over the traffic of a decoder: layers, width, query heads, KV heads, channels of a head, bytes of an activation."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    itemsize: int = 2


LLAMA_70B = Model(80, 8192, 64, 8, 128)


def all_reduce(nbytes: float, devices: int) -> float:
    return 2 * (devices - 1) / devices * nbytes


def attention_bytes(model: Model, tokens: int, *, context: int = 1, model_axis: int = 1) -> float:
    """Bytes that a device sends in the attention of all layers: per layer, a float32 lse, and a float32 output with its weight.

    Args:
      model: see `Model`.
      tokens: new tokens of one device of the axis data.
      context, model_axis: devices of these axes.
    """
    heads = max(1, model.heads // model_axis)
    return model.layers * all_reduce(tokens * heads * (model.head_size + 2) * 4, context)


def projection_bytes(model: Model, tokens: int, *, model_axis: int = 1) -> float:
    """Bytes that a device sends after the output projections of attention and feed-forward, of all layers."""
    return 2 * model.layers * all_reduce(tokens * model.width * model.itemsize, model_axis)


def break_even_length(model: Model, *, read_bytes_per_s: float, send_bytes_per_s: float) -> float:
    """Tokens of a sequence from which reading 1/n of it and merging takes less time than reading it all, latency aside."""
    return (
        2
        * model.heads
        / model.kv_heads
        * (model.head_size + 2)
        / model.head_size
        * (4 / 2 / model.itemsize)
        * read_bytes_per_s
        / send_bytes_per_s
    )


PLANS = {
    "model = n": lambda n: {"model_axis": n},
    "model = 8, data = n / 8": lambda n: {"model_axis": 8},
    "model = 8, context = n / 8": lambda n: {"model_axis": 8, "context": n // 8},
    "context = n": lambda n: {"context": n},
    "data = n": lambda n: {},
}


def sent(plan: str, devices: int, *, model: Model = LLAMA_70B, tokens: int = 64) -> tuple[float, float]:
    """(bytes in attention, bytes after projections) that a device sends in a step."""
    axes = PLANS[plan](devices)
    return attention_bytes(model, tokens, **axes), projection_bytes(model, tokens, model_axis=axes.get("model_axis", 1))


def table() -> str:
    """The numbers as Markdown, in MB."""
    rows = ["| mesh of n devices | " + " | ".join(f"n = {n}" for n in DEVICES) + " |", "|---|" + "---|" * len(DEVICES)]
    for plan in PLANS:
        cells = [" + ".join(f"{part / 1e6:.1f}" for part in sent(plan, n)) for n in DEVICES]
        rows.append(f"| {plan} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def chart() -> str:
    """The numbers as an SVG: a bar for each mesh and number of devices, attention's part first."""
    largest = max(sum(sent(plan, n)) for plan in PLANS for n in DEVICES)
    width, height, left = 720, 22, 230
    step = math.ceil(largest / 1e6 / 4 / 50) * 50
    lines, y = [], 34
    for plan in PLANS:
        lines.append(f'<text x="8" y="{y + 38}" font-weight="bold">{plan}</text>')
        for n in DEVICES:
            first, second = (part / largest * (width - left - 130) for part in sent(plan, n))
            total = sum(sent(plan, n)) / 1e6
            lines.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{n}</text>')
            lines.append(f'<rect x="{left}" y="{y}" width="{first:.1f}" height="{height - 4}" fill="#2a78b8"/>')
            lines.append(f'<rect x="{left + first:.1f}" y="{y}" width="{second:.1f}" height="{height - 4}" fill="#d98c3f"/>')
            lines.append(f'<text x="{left + first + second + 6:.1f}" y="{y + 14}">{total:.0f} MB</text>')
            y += height
        y += 12
    for at in range(0, int(largest / 1e6) + 1, step):
        x = left + at * 1e6 / largest * (width - left - 130)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="26" y2="{y - 8}" stroke="#888" stroke-width="0.5"/>')
        lines.append(f'<text x="{x:.1f}" y="20" text-anchor="middle">{at}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 26}" font-family="sans-serif" font-size="13">'
    legend = (
        f'<rect x="{left}" y="{y}" width="14" height="14" fill="#2a78b8"/><text x="{left + 20}" y="{y + 12}">attention</text>'
        f'<rect x="{left + 110}" y="{y}" width="14" height="14" fill="#d98c3f"/><text x="{left + 130}" y="{y + 12}">projections</text>'
    )
    return "\n".join([head, f'<rect width="{width}" height="{y + 26}" fill="#fff"/>', *lines, legend, "</svg>", ""])


def page() -> str:
    """The page with the table of today."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
    CHART.write_text(chart())
