"""Bounds on paper of our kernels and of AITER's on AMD parts: `python -m benchmarks.amd_paper`. Nothing runs and nothing is measured.

It compiles both for MI300X and MI355X without a GPU, in the configurations that our tables and AITER's own wrapper choose, reads the main
loops off the assembly, and derives bounds. It writes `benchmarks/results/amd_paper.md`, and the rows to
`.cache/benchmarks/amd_paper.json`. It reads the rows that `python -m benchmarks.amd_isa` writes, so run that first.
"""

import argparse
import importlib.metadata
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from purepage.bridges.aiter import package as aiter_package
from purepage.functional.cache import CacheSpec
from purepage.kernels.archs import amd_archs, arch_facts
from purepage.kernels.compile_check import SIMDS, ResourceUsage, compile_job, jobs_of, read_usage
from purepage.kernels.plans.attention import plan_paged_attention
from purepage.kernels.plans.shapes import PagedAttentionShape

from . import amd_paper_text, summary
from .aiter_launches import compile_recorded, launches_of
from .amd_isa import RESULTS, native_fp8
from .amd_loop import Alone, Counts, Instruction, alone, count, is_matrix, main_loop, matrix_cycles, matrix_flops
from .cases import GPU_CASES, Case

NS = 1e-9
CASES = tuple(
    case
    for case in GPU_CASES
    if case.name
    in (
        "decode 64 x 8192",
        "decode 256 x 2048",
        "decode 8 x 4096",
        "decode 64 x 8192, block 16",
        "decode 64 x 8192, fp8 cache",
        "prefill 1 x 8192",
        "chunked 16 x (512 of 2048)",
        "prefill 1 x 8192, fp8 cache",
    )
)


@dataclass(frozen=True)
class Part:
    """A part by AMD's data sheets and white papers of CDNA 3 and 4, with our assumptions.

    Attributes:
      name: product.
      bytes_per_s: bandwidth of HBM.
      flops_per_s: dense products of 16-bit operands.
      compute_units: compute units.
      hertz: peak clock.
      lds_read, lds_write: bytes that one compute unit reads from and writes to shared memory in a cycle.
      cache: bytes that one compute unit loads from its vector cache in a cycle.
      transcendental: cycles of a transcendental instruction of 64 lanes.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    compute_units: int
    hertz: float
    lds_read: int
    lds_write: int
    cache: int
    transcendental: int


PARTS = {
    "gfx942": Part("MI300X", 5.3e12, 1307e12, 304, 2.1e9, 128, 128, 64, 16),
    "gfx950": Part("MI355X", 8.0e12, 2500e12, 256, 2.4e9, 256, 128, 64, 8),
}
ELSEWHERE = tuple(arch for arch in amd_archs(configured_alone=True) if arch not in PARTS)
ELSEWHERE_CASES = ("decode 64 x 8192", "prefill 1 x 8192")
MEMORY_LATENCY, CACHE_LATENCY = 800 * NS, 300 * NS
"""Assumed latencies: of a load from HBM under load (keys and values in decode), and of a load of what other programs brought into a cache
before (keys and values in prefill, block ids always)."""
VGPRS, GRANULE, MAX_WAVES = 512, 8, 8
"""Limits of one SIMD of CDNA 3 and 4: registers of a lane, the steps in which they are allocated, and waves."""


@dataclass(frozen=True)
class Kernel:
    """One compiled launch.

    Attributes:
      contender: "purepage" or "AITER".
      case: what is computed.
      usage: resources of the kernel.
      rows, tile: query rows and keys of one iteration of the main loop.
      stages: stages of its pipeline.
      busy: programs that have work.
      body: labels and instructions of the main loop.
    """

    contender: str
    case: Case
    usage: ResourceUsage
    rows: int
    tile: int
    stages: int
    busy: int
    body: tuple[Instruction, ...]


def _queries(case: Case) -> int:
    return max(new for new, _ in case.lengths)


def ours(case: Case, arch: str) -> Iterator[Kernel]:
    """The launches of our plan, over a packed cache."""
    spec = CacheSpec(
        num_blocks=case.num_blocks,
        block_size=case.block_size,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        num_layers=1,
        dtype=native_fp8(arch) if case.cache_dtype.startswith("float8") else case.cache_dtype,
        content=case.content,
    )
    shape = PagedAttentionShape(
        num_tokens=case.num_tokens,
        num_seqs=len(case.lengths),
        num_heads=case.num_heads,
        table_width=case.width,
        cache=spec,
        query_dtype=case.dtype,
        output_dtype=case.dtype,
        max_query_len=_queries(case),
        scale=case.head_size**-0.5,
    )
    for job in jobs_of(plan_paged_attention(shape, arch), arch):
        compiled, launch, facts = compile_job(job), job.launch, job.launch.facts
        name = launch.name
        if not case.is_decode and name != "paged_attention_prefill":
            continue  # prefill has no sequence that the decode kernel serves
        usage = read_usage(compiled, kernel=name, arch=arch, num_warps=launch.num_warps)
        whole_tile = 2 * facts["block_n"] * spec.head_size * spec.dtype.itemsize
        body = tuple(main_loop(compiled.asm["amdgcn"], whole_tile // (launch.num_warps * arch_facts(arch).wave_size)))
        yield Kernel("purepage", case, usage, facts["block_m"], facts["block_n"], launch.num_stages, math.prod(launch.grid), body)


def aiter(case: Case, arch: str) -> Iterator[Kernel]:
    """The launches of AITER's own wrapper, or none where the package is not installed."""
    if aiter_package.root() is None:
        return
    for launch in launches_of(case, arch, native_fp8(arch)):
        compiled, given = compile_recorded(launch, arch), launch.given
        usage = read_usage(compiled, kernel=launch.name, arch=arch, num_warps=given["num_warps"])
        busy = math.prod(launch.grid)
        if case.is_decode and "BLOCK_M" in given:  # the grid is for any lengths, and most of its programs have no query
            busy = len(case.lengths) * case.num_kv_heads * given.get("NUM_SEGMENTS_PER_SEQ", 1)
        body = tuple(main_loop(compiled.asm["amdgcn"]))
        yield Kernel("AITER", case, usage, given.get("BLOCK_M", 0), given["TILE_SIZE"], given["num_stages"], busy, body)


@dataclass(frozen=True)
class Residency:
    """Workgroups of one compute unit.

    Attributes:
      fitting: workgroups that fit by registers, shared memory and wave slots.
      resident: workgroups that the grid provides, at most `fitting`.
      waves_per_simd: waves of the resident workgroups on one SIMD.
    """

    fitting: int
    resident: int
    waves_per_simd: float


def residency(usage: ResourceUsage, part: Part, busy: int) -> Residency:
    waves = min(MAX_WAVES, VGPRS // (-(-usage.vgprs // GRANULE) * GRANULE)) * SIMDS
    fitting = waves // usage.num_warps
    if usage.lds_bytes:
        fitting = min(fitting, arch_facts(usage.arch).shared_bytes // usage.lds_bytes)
    resident = max(1, min(fitting, -(-busy // part.compute_units)))
    return Residency(fitting, resident, resident * usage.num_warps / SIMDS)


@dataclass(frozen=True)
class Paper:
    """Bounds on paper of one kernel on one part.

    Attributes:
      kv_bytes, flops: bytes and FLOPs that one tile requires.
      loaded_bytes, matrix_flops: bytes and FLOPs that the waves' instructions load and compute for one tile.
      cycles: cycles of each unit of a compute unit for one tile: matrix, vector, lds, cache.
      alone: time of one wave.
      bounds: bytes/s (decode) or FLOP/s (prefill) of the whole part under each limit.
      limit: name of the lowest bound.
    """

    kv_bytes: int
    flops: int
    loaded_bytes: int
    matrix_flops: int
    cycles: dict[str, float]
    alone: Alone
    bounds: dict[str, float]
    limit: str


def paper(kernel: Kernel, counts: Counts, part: Part, waves: Residency) -> Paper:
    """Derives the bounds of a kernel that has a main loop."""
    usage, case = kernel.usage, kernel.case
    itemsize = 1 if case.cache_dtype.startswith("float8") else 2
    kv_bytes = 2 * kernel.tile * case.head_size * itemsize
    flops = 4 * kernel.rows * kernel.tile * case.head_size
    lanes = usage.num_warps * arch_facts(usage.arch).wave_size
    matrix = [line for line in kernel.body if is_matrix(line)]
    each_simd = usage.num_warps / SIMDS  # waves of a workgroup that share one SIMD
    vector = 4 * (counts.vector - counts.transcendental) + part.transcendental * counts.transcendental
    cycles = {
        "matrix": each_simd * sum(map(matrix_cycles, matrix)),
        "vector": each_simd * (vector + 4 * len(matrix)),
        "lds": lanes * (counts.lds_read / part.lds_read + counts.lds_write / part.lds_write),
        "cache": lanes * counts.load_bytes / part.cache,
    }
    wide = MEMORY_LATENCY if case.is_decode else CACHE_LATENCY
    one = alone(
        kernel.body,
        wide_latency=round(wide * part.hertz),
        narrow_latency=round(CACHE_LATENCY * part.hertz),
        transcendental=part.transcendental,
    )
    work, per_tile = (kv_bytes, part.bytes_per_s) if case.is_decode else (flops, part.flops_per_s)
    whole = work * part.compute_units * part.hertz
    bounds = {"memory" if case.is_decode else "matrix peak": per_tile}
    bounds |= {f"{unit} cycles": whole / spent for unit, spent in cycles.items() if spent}
    if case.is_decode:
        bounds["bytes in flight"] = waves.resident * lanes * one.in_flight * part.compute_units / MEMORY_LATENCY
    bounds["waves alone"] = whole * waves.resident / one.cycles
    return Paper(
        kv_bytes=kv_bytes,
        flops=flops,
        loaded_bytes=lanes * counts.load_bytes,
        matrix_flops=usage.num_warps * sum(map(matrix_flops, matrix)),
        cycles=cycles,
        alone=one,
        bounds=bounds,
        limit=min(bounds, key=lambda name: bounds[name]),
    )


def record(kernel: Kernel, arch: str) -> dict[str, Any]:
    """One row of the JSON."""
    part = PARTS[arch]
    waves = residency(kernel.usage, part, kernel.busy)
    row = {
        "case": kernel.case.name,
        "part": part.name,
        "contender": kernel.contender,
        **{name: value for name, value in asdict(kernel.usage).items() if name not in ("loads", "error", "waves_per_simd", "matrix_ops")},
        **{name: getattr(kernel, name) for name in ("rows", "tile", "stages", "busy")},
        **asdict(waves),
    }
    if kernel.body:
        counts = count(kernel.body)
        derived = paper(kernel, counts, part, waves)
        row |= {"loop": {**asdict(counts), "bytes_per_load": counts.bytes_per_load}, "bound on paper": asdict(derived)}
        row["loop"] |= {"matrix": dict(counts.matrix), "loads": dict(counts.loads)}
    return row


def counted(case: Case, arch: str) -> Iterator[dict[str, Any]]:
    """Rows of our kernels with a main loop on an architecture without a `Part`: counts without bounds."""
    for kernel in ours(case, arch):
        if kernel.body:
            usage, counts = kernel.usage, count(kernel.body)
            loop = {**asdict(counts), "matrix": dict(counts.matrix), "loads": dict(counts.loads)}
            named = {"case": case.name, "contender": kernel.contender, "arch": arch, "kernel": usage.kernel, "loop": loop}
            yield (
                named
                | {name: getattr(kernel, name) for name in ("rows", "tile", "stages")}
                | {name: getattr(usage, name) for name in ("num_warps", "vgprs", "agprs", "lds_bytes", "waves_per_simd")}
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=PARTS, action="append", help="only this one, nothing is written")
    parser.add_argument("--only", default="", help="only cases whose name contains this, nothing is written")
    options = parser.parse_args()
    rows = [
        record(kernel, arch)
        for arch in options.arch or PARTS
        for case in CASES
        if options.only in case.name
        for compiled in (ours, aiter)
        for kernel in compiled(case, arch)
    ]
    versions = {name: importlib.metadata.version(name) for name in ("triton", "amd-aiter") if name == "triton" or aiter_package.root()}
    if options.arch or options.only:
        print(amd_paper_text.document(rows, [], [], versions, {arch: asdict(part) for arch, part in PARTS.items()}))
        return
    isa = json.loads((summary.RAW / "amd_isa.json").read_text())
    others = [row for arch in ELSEWHERE for case in CASES if case.name in ELSEWHERE_CASES for row in counted(case, arch)]
    text = amd_paper_text.document(rows, others, isa, versions, {arch: asdict(part) for arch, part in PARTS.items()})
    document = {
        "what": "bounds on paper: nothing was run, nothing measured",
        "versions": versions,
        "parts": {arch: asdict(part) for arch, part in PARTS.items()},
        "assumed": {"memory_latency_s": MEMORY_LATENCY, "cache_latency_s": CACHE_LATENCY, "more": list(amd_paper_text.ASSUMPTIONS)},
    }
    lines = ",\n".join("  " + json.dumps(row) for row in (*rows, *others))
    (summary.RAW / "amd_paper.json").write_text(json.dumps(document, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n')
    (RESULTS / "amd_paper.md").write_text(text)


if __name__ == "__main__":
    main()
