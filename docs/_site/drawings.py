"""The drawings of the documentation: `PYTHONPATH=.:src python docs/_site/drawings.py` writes `docs/assets`.

What they show is computed: addresses from a cache's own strides, masks from attention itself, speeds from `benchmarks/results/h200.json`.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyBboxPatch

import purepage as pp
from benchmarks import summary
from purepage import viz

ASSETS = Path(__file__).resolve().parents[1] / "assets"
COLORS = ("#0b3c7d", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#a6761d")
DRAWINGS: dict[str, Callable[[], plt.Figure]] = {}


def drawing(function: Callable[[], plt.Figure]) -> Callable[[], plt.Figure]:
    DRAWINGS[function.__name__] = function
    return function


def _bare(width: float, height: float, limits: tuple[float, float, float, float]) -> tuple[plt.Figure, plt.Axes]:
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set_xlim(limits[0], limits[1])
    axes.set_ylim(limits[2], limits[3])
    axes.axis("off")
    return figure, axes


@drawing
def paged_cache() -> plt.Figure:
    """Two sequences in a pool of eight blocks: the batch of the README."""
    spec = pp.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
    metadata = pp.make_metadata([3, 1], [3, 21], [[5, -1], [2, 7]], block_size=16)
    return viz.block_table(metadata, spec, columns=8).figure


@drawing
def layouts() -> plt.Figure:
    """Where the channels of one token's key and value lie in a block, in every content, counted from the strides of a small cache."""
    contents = ("packed", "flash", "xpacked", "xpacked_interleaved_v", "shuffled")
    heads, size, channels = 2, 8, 8
    figure, rows = plt.subplots(len(contents), 1, figsize=(9, 5.2))
    for axes, content in zip(rows, contents, strict=True):
        spec = pp.CacheSpec(num_blocks=1, block_size=size, num_kv_heads=heads, head_size=channels, dtype=jnp.float32, content=content)
        logical = np.zeros((1, 1, size, heads, channels), np.float32)
        key, value = logical.copy(), logical.copy()
        key[0, 0, 3, 1], value[0, 0, 3, 1] = 1, 2
        flat = np.asarray(pp.cache_from_logical(spec, key, value).data).reshape(-1)
        strip = np.ones((1, flat.size, 3))
        for code, color in ((1, COLORS[0]), (2, COLORS[1])):
            strip[0, flat == code] = matplotlib.colors.to_rgb(color)
        axes.imshow(strip, aspect="auto", interpolation="nearest", extent=(0, flat.size, 0, 1))
        axes.set_yticks([])
        axes.set_xlim(0, flat.size)
        axes.set_xticks(range(0, flat.size + 1, 32), minor=False)
        axes.tick_params(labelsize=7)
        axes.set_title(content, fontsize=9, loc="left", pad=2)
    rows[-1].set_xlabel("element of the block", fontsize=8)
    figure.text(0.99, 0.965, "key", color=COLORS[0], ha="right", fontsize=9, weight="bold")
    figure.text(0.93, 0.965, "value", color=COLORS[1], ha="right", fontsize=9, weight="bold")
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    return figure


@drawing
def masks() -> plt.Figure:
    """The softmax weights of eight masks, with scores of 0."""
    length = 16
    spec = pp.CacheSpec(num_blocks=1, block_size=length, num_kv_heads=1, head_size=16, dtype=jnp.float32)
    cache = pp.init_cache(spec)
    position = jnp.arange(length)
    cases: dict[str, tuple[dict, bool]] = {
        "causal": ({}, True),
        "sliding_window=5": ({"sliding_window": 5}, True),
        "window 5, causal=False": ({"sliding_window": 5}, False),
        "chunks of 6": ({"key_range": pp.key_ranges.chunked(position, 6)}, True),
        "image at 4 to 8": ({"key_range": pp.key_ranges.spans(position, jnp.array([4]), jnp.array([9]))}, False),
        "prefix of 6": ({"key_range": pp.key_ranges.prefix(position, 6)}, False),
        "ALiBi, slope 0.3": ({"alibi_slopes": jnp.array([0.3])}, True),
        "sink of 1": ({"sinks": jnp.array([1.0])}, True),
    }
    figure, rows = plt.subplots(2, 4, figsize=(8, 4.4))
    for axes, (name, (options, causal)) in zip(rows.flat, cases.items(), strict=True):
        metadata = pp.make_metadata([length], [length], [[0]], block_size=length, causal=causal)
        weights = viz.attention_weights(jnp.ones((length, 1, 16)), cache, metadata, **options)[:, 0]
        axes.imshow(np.where(weights > 0, weights, np.nan), cmap="viridis", vmin=0, vmax=0.5)
        axes.set_title(name, fontsize=8.5)
        axes.set_xticks([])
        axes.set_yticks([])
    rows[0, 0].set_ylabel("query", fontsize=8)
    rows[0, 0].set_xlabel("key", fontsize=8)
    figure.tight_layout()
    return figure


@drawing
def call_to_launches() -> plt.Figure:
    """What becomes of one call: checks, dispatch, a plan, launches inside the jitted program."""
    figure, axes = _bare(9, 3.3, (-0.2, 18.1, -0.2, 6.6))

    def box(x: float, y: float, width: float, text: str, color: str) -> None:
        axes.add_patch(FancyBboxPatch((x, y), width, 1.2, boxstyle="round,pad=0.08", facecolor=color, edgecolor="#333", linewidth=0.8))
        dark = color in COLORS
        axes.text(x + width / 2, y + 0.6, text, ha="center", va="center", fontsize=7.5, color="white" if dark else "black")

    def arrow(x0: float, y0: float, x1: float, y1: float) -> None:
        axes.annotate("", (x1, y1), (x0, y0), arrowprops={"arrowstyle": "->", "color": "#333"})

    box(0.0, 2.6, 3.4, "pp.paged_attention\nchecks every argument", COLORS[0])
    box(4.3, 2.6, 3.6, "dispatch: the first that\nis installed and serves it", "#dddddd")
    arrow(3.5, 3.2, 4.2, 3.2)
    for i, (name, what, how) in enumerate(
        (
            ("aiter", "AITER's operator", "on XLA's buffers, by DLPack"),
            ("triton", "a Program: launches as data", "a bridge: callback, native\nor jax_triton"),
            ("xla", "loops over chunks of keys", "compiled by XLA"),
        )
    ):
        y = 5.0 - 2.4 * i
        box(9.0, y, 4.1, f"{name}\n{what}", COLORS[1 + i])
        arrow(8.0, 3.2, 8.9, y + 0.6)
        box(13.9, y, 4.0, how, "#eeeeee")
        arrow(13.2, y + 0.6, 13.8, y + 0.6)
    return figure


@drawing
def speed() -> plt.Figure:
    """Time of other libraries as a multiple of ours, from the recorded run on an H200."""
    rows = summary.rows_of(json.loads((summary.RESULTS / "h200.json").read_text()))
    times = {(row["case"], row["contender"]): row["us"] for row in rows if row["status"] == "ok"}
    peers = {"AITER Triton": "AITER Triton", "cuDNN paged (jax)": "cuDNN paged", "torch SDPA": "torch SDPA, dense"}
    cases = {
        "decode 64 x 8192": "decode, 64 x 8192",
        "decode 64 x 8192, fp8 cache": "decode, fp8 cache",
        "decode ragged, mooncake_conversation": "decode, ragged",
        "chunked 16 x (512 of 2048)": "chunked prefill",
        "prefill 1 x 8192": "prefill, 1 x 8192",
    }
    figure, axes = plt.subplots(figsize=(8, 3))
    height = 0.26
    for j, (peer, label) in enumerate(peers.items()):
        for i, case in enumerate(cases):
            if (case, peer) in times:
                ratio = times[case, peer] / times[case, "purepage triton"]
                axes.barh(i + (j - 1) * height, ratio, height * 0.9, color=COLORS[1 + j], label=label)
                axes.text(ratio + 0.03 if ratio > 1.005 else 1.03, i + (j - 1) * height, f"{ratio:.2f}x", va="center", fontsize=7.5)
    handles = {label: bar for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(handles.values(), handles.keys(), fontsize=8, loc="lower right", frameon=False)
    axes.axvline(1, color=COLORS[0], linewidth=2)
    axes.text(1.02, -0.62, "purepage", color=COLORS[0], fontsize=8, weight="bold", va="center")
    axes.set_yticks(range(len(cases)), list(cases.values()), fontsize=8)
    axes.invert_yaxis()
    axes.set_ylim(len(cases) - 0.5, -0.8)
    axes.set_xlabel("time of one call on an H200, as a multiple of purepage's (more is slower)", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def badges() -> dict[str, str]:
    """Facts of `pyproject.toml` as small pictures: SVG text by name."""
    project = tomllib.loads((ASSETS.parents[1] / "pyproject.toml").read_text())["project"]
    (jax,) = (need.removeprefix("jax>=") for need in project["dependencies"] if need.startswith("jax>="))
    assert "Typing :: Typed" in project["classifiers"]
    facts = {
        "python": ("Python", project["requires-python"].replace(">=", "≥ ")),
        "jax": ("jax", f"≥ {jax}"),
        "license": ("license", project["license"]),
        "typed": ("types", "checked"),
    }
    return {name: _badge(*texts) for name, texts in facts.items()}


def _badge(label: str, fact: str) -> str:
    left, right = (7 * len(text) + 12 for text in (label, fact))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{label}: {fact}">'
        f'<rect width="{left}" height="20" fill="#555"/><rect x="{left}" width="{right}" height="20" fill="{COLORS[0]}"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{left / 2}" y="14">{label}</text><text x="{left + right / 2}" y="14">{fact}</text></g></svg>\n'
    )


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "purepage", "svg.fonttype": "path", "font.family": "DejaVu Sans"})
    for name, draw in DRAWINGS.items():
        figure = draw()
        figure.savefig(ASSETS / f"{name}.svg", facecolor="white", bbox_inches="tight", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    for name, text in badges().items():
        (ASSETS / "badges" / f"{name}.svg").write_text(text)


if __name__ == "__main__":
    main()
