"""`amd_paper.md`: the rows of `amd_paper.json` to read, ours and AITER's in neighbouring columns, and what the ISA report adds."""

import textwrap
from collections.abc import Iterator
from typing import Any

OURS, THEIRS = "purepage", "AITER"

ASSUMPTIONS = (
    "Parts: HBM bandwidth, dense 16-bit FLOP/s, compute units and peak clock as AMD publishes them. Below its peak clock a part is "
    "slower throughout.",
    "Matrix cycles: AMD's matrix instruction calculator and its table for CDNA 3 and 4: 16 cycles for M = N = 16, 32 for 32, of "
    "operands of 8 or 16 bits. An instruction takes 4 cycles of the vector ALU's issue too.",
    "Vector ALU: 4 cycles an instruction of 64 lanes, packed ones too; transcendental ones 16 on CDNA 3 and 8 on CDNA 4, said to have "
    "doubled their rate. Conversions and 64-bit integers count as plain ones.",
    "Shared memory: 128 bytes a cycle of a compute unit, reads on CDNA 4 256; no bank conflicts. Vector cache: 64 bytes a cycle.",
    "Latency: 800 ns for keys and values in decode (HBM under load); 300 ns for those of prefill, which other programs read as well, "
    "and for block ids. Shared memory and scalar loads: 64 cycles.",
    "*Unit cycles*: each unit by itself, the others hidden behind it whole. *Bytes in flight*: Little's law, resident waves times the "
    "most bytes that the loop's own waits leave on their way. *Waves alone*: no wave is faster than with its SIMD to itself: in "
    "order, 4 cycles an instruction, waiting where the assembly waits for memory and where a vector instruction needs a matrix "
    "result.",
    "A pass through the main loop is one tile. Conditional blocks and waterfall loops (one load, repeated for each value that its "
    "address takes) count once. Beginnings, ends, masked tiles, merging of parts and tails of the grid are not counted: all of it "
    "bounds from above.",
    "Decode counts bytes of keys and values, prefill FLOPs of whole tiles: triangles cut by the causal mask are not taken off.",
    "fp8 is the e4m3 kind that the arch converts. AITER keeps keys and values apart, as its users do; ours are in one packed cache.",
)


def document(
    rows: list[dict[str, Any]], elsewhere: list[dict[str, Any]], isa: list[dict[str, Any]], versions: dict[str, str], parts: dict[str, Any]
) -> str:
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    text = [
        "# AMD on paper",
        "",
        "**Every number here is a bound on paper: no AMD GPU ran anything, nothing was timed.** `python -m benchmarks.amd_paper` compiled",
        f"the kernels ({installed}) and derived the rest from the assembly's main loops and from what AMD publishes of its",
        "parts.",
        "",
        "Assumed:",
        "",
        *(textwrap.fill(f"- {line}", 140, subsequent_indent="  ") for line in ASSUMPTIONS),
    ]
    for arch, part in parts.items():
        own = [row for row in rows if row["arch"] == arch]
        if own:
            text += ["", f"## {part['name']} ({arch})", "", *_summary(own), *_details(own)]
    text += _elsewhere(elsewhere) + _streams(isa, parts) + _report(isa)
    return "\n".join(text) + "\n"


def _pairs(rows: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any] | None]]:
    """(case, our kernel with the main loop, AITER's)."""
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {row["contender"]: row for row in reversed(rows) if row["case"] == case and "loop" in row}
        if OURS in found:
            yield case, found[OURS], found.get(THEIRS)


def _rate(row: dict[str, Any], value: float) -> str:
    return f"{value / 1e12:.2f} TB/s" if row["case"].startswith("decode") else f"{value / 1e12:.0f} TFLOP/s"


def _bound(row: dict[str, Any] | None) -> list[str]:
    """Cells: lowest bound, what sets it, and the lowest but for the part's own figure (what is in reserve)."""
    if row is None:
        return ["", "", ""]
    derived = row["bound on paper"]
    bounds = derived["bounds"]
    own = min((value, name) for name, value in bounds.items() if name not in ("memory", "matrix peak"))
    return [_rate(row, min(bounds.values())), derived["limit"], f"{_rate(row, own[0])} ({own[1]})"]


def _summary(rows: list[dict[str, Any]]) -> list[str]:
    text = [
        "| bound on paper | purepage | set by | lowest of the kernel's own | AITER | set by | lowest of the kernel's own |",
        "|---|---:|---|---:|---:|---|---:|",
    ]
    for case, own, other in _pairs(rows):
        text.append(f"| {case} | " + " | ".join([*_bound(own), *_bound(other)]) + " |")
    return text


def _cycles(row: dict[str, Any]) -> str:
    return ", ".join(f"{unit} {spent:.0f}" for unit, spent in row["bound on paper"]["cycles"].items())


def _times(part: int, whole: int) -> str:
    return f"{part / whole:.2f}"


METRICS = {
    "kernel": lambda r: r["kernel"],
    "rows x keys of a tile, waves, stages": lambda r: f"{r['rows']} x {r['tile']}, {r['num_warps']}, {r['stages']}",
    "VGPRs (AGPRs of them), LDS bytes": lambda r: f"{r['vgprs']} ({r['agprs']}), {r['lds_bytes']}",
    "spilled VGPRs, scratch bytes": lambda r: f"{r['vgpr_spills']}, {r['scratch_bytes']}",
    "workgroups a CU: by resources, by the grid": lambda r: f"{r['fitting']}, {r['resident']}",
    "waves a SIMD": lambda r: f"{r['waves_per_simd']:g}",
    "global loads of a wave and tile, bits: number": lambda r: _widths(r["loop"]["loads"]),
    "bytes a lane and load instruction": lambda r: f"{r['loop']['bytes_per_load']:.1f}",
    "bytes loaded per byte of the tile": lambda r: _times(r["bound on paper"]["loaded_bytes"], r["bound on paper"]["kv_bytes"]),
    "waterfall loops, v_readfirstlane": lambda r: f"{r['loop']['inner_loops']}, {r['loop']['lane_moves']}",
    "matrix instructions of a wave and tile": lambda r: ", ".join(f"{n} {name[7:]}" for name, n in r["loop"]["matrix"].items()),
    "matrix FLOPs per FLOP of the tile": lambda r: _times(r["bound on paper"]["matrix_flops"], r["bound on paper"]["flops"]),
    "vector instructions: all, transcendental, selects": lambda r: "{vector}, {transcendental}, {selects}".format(**r["loop"]),
    "LDS bytes a lane: read, written; instructions": lambda r: "{lds_read}, {lds_write}; {lds_ops}".format(**r["loop"]),
    "barriers; scratch accesses": lambda r: "{barriers}; {scratch}".format(**r["loop"]),
    "bytes of keys and values, FLOPs of a tile": lambda r: "{kv_bytes}, {flops}".format(**r["bound on paper"]),
    "cycles of a CU and tile": _cycles,
    "a wave alone: cycles of a tile, waiting for memory": lambda r: "{cycles}, {stalled}".format(**r["bound on paper"]["alone"]),
    "most bytes a lane has in flight": lambda r: str(r["bound on paper"]["alone"]["in_flight"]),
}


def _widths(loads: dict[int, int]) -> str:
    return ", ".join(f"{bits}: {number}" for bits, number in loads.items())


def _details(rows: list[dict[str, Any]]) -> list[str]:
    text = []
    for case, own, other in _pairs(rows):
        both = [row for row in (own, other) if row]
        text += ["", f"### {case}", "", "| | " + " | ".join(row["contender"] for row in both) + " |", "|---|" + "---|" * len(both)]
        text += [f"| {name} | " + " | ".join(value(row) for row in both) + " |" for name, value in METRICS.items()]
        names = dict.fromkeys(name for row in both for name in row["bound on paper"]["bounds"])
        for name in names:
            cells = [_rate(row, row["bound on paper"]["bounds"][name]) if name in row["bound on paper"]["bounds"] else "" for row in both]
            text.append(f"| bound on paper: {name} | " + " | ".join(cells) + " |")
        rest = [row for row in rows if row["case"] == case and "loop" not in row]
        if rest:
            text += [
                "",
                "Then: " + "; ".join(f"{r['contender']} `{r['kernel']}`, {r['vgprs']} VGPRs, {r['num_warps']} waves" for r in rest),
            ]
    return text


def _elsewhere(rows: list[dict[str, Any]]) -> list[str]:
    """Counts of our main loops on architectures that no part is named for."""
    if not rows:
        return []
    text = [
        "",
        "## Our main loops elsewhere",
        "",
        "Counted as above, for one wave and one tile; no part is named, so no bound is derived. Waves a SIMD: what registers and LDS",
        "allow.",
        "",
        "| arch | case | rows x keys, waves | VGPRs | waves a SIMD | loads | matrix instructions | vector, transcendental | waterfalls |",
        "|---|---|---|---:|---:|---|---|---|---:|",
    ]
    for row in rows:
        loop = row["loop"]
        text.append(
            f"| {row['arch']} | {row['case']} | {row['rows']} x {row['tile']}, {row['num_warps']} | {row['vgprs']} | "
            f"{row['waves_per_simd']:g} | {_widths(loop['loads'])} | "
            f"{', '.join(f'{number} {name[2:]}' for name, number in loop['matrix'].items())} | "
            f"{loop['vector']}, {loop['transcendental']} | {loop['inner_loops']} |"
        )
    return text


LATENCY = 800e-9


def _mean(loads: dict[str, int]) -> float:
    """Bytes of a lane and load instruction in the text, block ids and other single words left out."""
    wide = {int(bits): number for bits, number in loads.items() if int(bits) > 32} or {int(bits): n for bits, n in loads.items()}
    return sum(bits * number for bits, number in wide.items()) / 8 / max(1, sum(wide.values()))


def _streams(isa: list[dict[str, Any]], parts: dict[str, Any]) -> list[str]:
    """Kernels without matrix instructions, which only move bytes."""
    text = [
        "",
        "## Kernels that only move bytes",
        "",
        "From the ISA report (`python -m benchmarks.amd_isa`). Bound on paper: Little's law with every load of the text on its way at once",
        "in as many waves as registers and LDS allow, 800 ns; where that is above HBM, HBM is the bound.",
        "",
        "| variant | kernel | "
        + " | ".join(f"{part['name']}: bytes a load, waves a SIMD, bound on paper" for part in parts.values())
        + " |",
        "|---|---|" + "---|" * len(parts),
    ]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in isa:
        part = parts.get(row["arch"])
        if part is None or row["matrix_ops"] or row["error"] or not row["loads"]:
            continue
        lane = sum(int(bits) * number for bits, number in row["loads"].items()) / 8
        rate = lane * 64 * row["waves_per_simd"] * 4 * part["compute_units"] / LATENCY
        bound = "HBM" if rate >= part["bytes_per_s"] else f"{rate / 1e12:.1f} TB/s"
        cells.setdefault((row["variant"], row["kernel"]), {})[row["arch"]] = f"{_mean(row['loads']):.1f}, {row['waves_per_simd']}, {bound}"
    # A kernel that several variants share is listed once.
    seen = set()
    for (variant, kernel), found in cells.items():
        values = tuple(found.get(arch, "") for arch in parts)
        if (kernel, values) not in seen:
            seen.add((kernel, values))
            text.append(f"| {variant} | {kernel} | " + " | ".join(values) + " |")
    return text


def _report(isa: list[dict[str, Any]]) -> list[str]:
    """The ISA report's matrix kernels, one cell an architecture."""
    archs = list(dict.fromkeys(row["arch"] for row in isa))
    text = [
        "",
        "## Every tuned kernel with matrix instructions",
        "",
        "From the ISA report: bytes of a lane and load instruction, matrix instructions in the whole text (full and masked tiles), and",
        "waves a SIMD that registers and LDS allow. `amd_isa.md` has the rest.",
        "",
        "| variant | kernel | " + " | ".join(archs) + " |",
        "|---|---|" + "---|" * len(archs),
    ]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in isa:
        if row["matrix_ops"]:
            value = f"{_mean(row['loads']):.1f}, {row['matrix_ops']}, {row['waves_per_simd']}"
            cells.setdefault((row["variant"], row["kernel"]), {})[row["arch"]] = value
    text += [
        f"| {variant} | {kernel} | " + " | ".join(found.get(a, "") for a in archs) + " |" for (variant, kernel), found in cells.items()
    ]
    return text
