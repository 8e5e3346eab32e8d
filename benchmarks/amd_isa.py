"""Resources of every Triton kernel on every AMD architecture, compiled without a GPU: `python -m benchmarks.amd_isa`.

`--hashes FILE` writes a hash of each kernel's instructions instead, for one architecture of each family, and `--compare FILE` prints the
kernels whose instructions differ from those of such a file: a refactoring proves with it that it changed no machine code.
Writes the table `benchmarks/results/amd_isa.md`, and all fields to `.cache/benchmarks/amd_isa.json`, which git ignores. `VARIANTS` is
the grid; the tests take it from here.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from benchmarks import summary
from purepage.functional.cache import CacheSpec
from purepage.functional.errors import UnsupportedError
from purepage.kernels.archs import amd_archs, arch_facts
from purepage.kernels.compile_check import Job, ResourceUsage, compile_for, jobs_of
from purepage.kernels.launch import Program
from purepage.kernels.plans.attention import plan_paged_attention, shared_bytes
from purepage.kernels.plans.encoder import EncoderShape, plan_encoder_attention
from purepage.kernels.plans.merge import MergeShape, plan_merge
from purepage.kernels.plans.shapes import PagedAttentionShape
from purepage.kernels.plans.writers import CacheShape, RopeShape, UpdateShape, plan_rope, plan_update_cache

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "amd_isa"
RESULTS = ROOT / "benchmarks" / "results"
ARCHS = amd_archs()

OCP, FNUZ = "float8_e4m3fn", "float8_e4m3fnuz"


def native_fp8(arch: str) -> str:
    """The e4m3 kind that the architecture converts in hardware, or where it has none, the one that its caches usually hold."""
    return FNUZ if FNUZ in arch_facts(arch).hardware_fp8 else OCP


def foreign_fp8(arch: str) -> str:
    """An e4m3 kind that the architecture does not convert, so that the kernels decode it with integer operations."""
    return OCP if FNUZ in arch_facts(arch).hardware_fp8 else FNUZ


def _spec(arch: str, head_size: int, kv_heads: int, cache: str, block_size: int, content: str, num_blocks: int) -> CacheSpec:
    dtype = {"native": native_fp8(arch), "foreign": foreign_fp8(arch)}.get(cache, cache)
    return CacheSpec(
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=kv_heads,
        head_size=head_size,
        num_layers=4,
        dtype=dtype,
        content=content,
    )


ALL: Mapping[str, Any] = {
    "sliding_window": 1000,
    "logits_soft_cap": 30.0,
    "has_alibi": True,
    "has_sinks": True,
    "has_score_scale": True,
    "return_lse": True,
}

ENCODER_ALL: Mapping[str, Any] = {"causal": True, "sliding_window": 100, "logits_soft_cap": 30.0, "has_sinks": True}


def attention(
    head_size: int,
    *,
    query: str = "bfloat16",
    cache: str = "bfloat16",
    content: str = "packed",
    block_size: int = 64,
    heads: tuple[int, int] = (32, 8),
    num_blocks: int = 1000,
    max_query_len: int = 1024,
    head_size_v: int | None = None,
    **options: Any,
) -> Callable[[str], Program]:
    """Plan of paged attention by arch. A batch of prefill and decode runs all three kernels; `max_query_len=1` runs the last two."""

    def plan(arch: str) -> Program:
        spec = replace(_spec(arch, head_size, heads[1], cache, block_size, content, num_blocks), head_size_v=head_size_v)
        query_dtype = native_fp8(arch) if query == "native" else query
        shape = PagedAttentionShape(
            num_tokens=2048 if max_query_len > 1 else 32,
            num_seqs=32,
            num_heads=heads[0],
            table_width=64,
            cache=spec,
            query_dtype=query_dtype,
            output_dtype="bfloat16" if query == "native" else query_dtype,
            max_query_len=max_query_len,
            scale=head_size**-0.5,
            **options,
        )
        return plan_paged_attention(shape, arch)

    return plan


def encoder(head_size: int, dtype: str = "bfloat16", **options: Any) -> Callable[[str], Program]:
    shape = EncoderShape(
        num_tokens=4000,
        num_seqs=8,
        num_heads=16,
        num_kv_heads=8,
        head_size=head_size,
        value_size=head_size,
        dtype=dtype,
        max_query_len=1024,
        scale=head_size**-0.5,
        **options,
    )
    return lambda arch: plan_encoder_attention(shape, arch)


def _cache_shape(arch: str, head_size: int, cache: str, content: str) -> CacheShape:
    return CacheShape(spec=_spec(arch, head_size, 8, cache, 16, content, 4000), k_scale_per_head=True, v_scale_per_head=True)


def writer(head_size: int, cache: str = "bfloat16", content: str = "packed", *, tokens: int = 4096) -> Callable[[str], Program]:
    def plan(arch: str) -> Program:
        shape = UpdateShape(
            num_tokens=tokens, cache=_cache_shape(arch, head_size, cache, content), key_dtype="bfloat16", value_dtype="bfloat16"
        )
        return plan_update_cache(shape, arch)

    return plan


def rope(
    head_size: int, cache: str | None = "bfloat16", content: str = "packed", *, tokens: int = 4096, **options: Any
) -> Callable[[str], Program]:
    """Plan of rotary embedding (no cache), of rope and write, and with `eps` of the norm as well."""

    def plan(arch: str) -> Program:
        given = {"rotary_dim": head_size, "is_neox": True, **options}
        shape = RopeShape(
            num_tokens=tokens,
            num_heads=32,
            num_kv_heads=8,
            head_size=head_size,
            num_positions=8192,
            query_dtype="bfloat16",
            key_dtype="bfloat16",
            value_dtype="bfloat16",
            table_dtype="bfloat16",
            cache=None if cache is None else _cache_shape(arch, head_size, cache, content),
            **given,
        )
        return plan_rope(shape, arch)

    return plan


def merge(head_size: int) -> Callable[[str], Program]:
    shape = MergeShape(num_tokens=2048, num_heads=32, head_size=head_size, dtype_a="bfloat16", dtype_b="bfloat16")
    return lambda arch: plan_merge(shape, arch)


VARIANTS: Mapping[str, Callable[[str], Program]] = {
    "attention D64 bf16": attention(64),
    "attention D64 bf16 window": attention(64, sliding_window=1000),
    "attention D64 bf16 all features": attention(64, **ALL),
    "attention D64 bf16 xpacked": attention(64, content="xpacked", block_size=16),
    "attention D64 bf16 qq_bias, all features": attention(64, qq_bias=(64, 64), **ALL),
    "attention D64 native fp8": attention(64, cache="native"),
    "attention D128 bf16": attention(128),
    "attention D128 bf16 soft cap": attention(128, logits_soft_cap=30.0),
    "attention D128 bf16 all features": attention(128, **ALL),
    "attention D128 bf16 non-causal": attention(128, causal=False),
    "attention D128 bf16 block 16": attention(128, block_size=16),
    "attention D128 bf16 interleaved": attention(128, content="xpacked_interleaved_v", block_size=16),
    "attention D128 bf16 xpacked, all features": attention(128, content="xpacked", block_size=16, **ALL),
    "attention D128 bf16 qq_bias": attention(128, qq_bias=(64, 64)),
    "attention D128 bf16 qq_bias of each sequence": attention(128, qq_bias=(32, 64, 64)),
    "attention D128 bf16 traced window": attention(128, traced_window=True),
    "attention D128 bf16 key ranges": attention(128, ranged=True),
    "attention D128 native fp8 key ranges, all features": attention(128, cache="native", ranged=True, **ALL),
    "attention D128 bf16 MQA 64:1": attention(128, heads=(64, 1)),
    "attention D128 bf16 over 2^31 elements": attention(128, num_blocks=40000, block_size=16),
    "attention D128 f16": attention(128, query="float16", cache="float16"),
    "attention D128 f32": attention(128, query="float32", cache="float32"),
    "attention D128 native fp8": attention(128, cache="native"),
    "attention D128 native fp8 all features": attention(128, cache="native", **ALL),
    "attention D128 foreign fp8": attention(128, cache="foreign"),
    "attention D128 fp8 query": attention(128, query="native", cache="native", has_output_scale=False),
    "attention D80 bf16": attention(80, block_size=16),
    "attention D192 bf16 values D128": attention(192, head_size_v=128),
    "attention D256 bf16": attention(256),
    "attention D256 bf16 all features": attention(256, **ALL),
    "attention D256 bf16 xpacked": attention(256, content="xpacked", block_size=16),
    "attention D256 native fp8": attention(256, cache="native"),
    "attention D256 f32 all features": attention(256, query="float32", cache="float32", **ALL),
    "attention D256 foreign fp8 all features": attention(256, cache="foreign", **ALL),
    "attention D256 fp8 query": attention(256, query="native", cache="native", **ALL),
    "attention D256 bf16 qq_bias, all features": attention(256, qq_bias=(64, 64), **ALL),
    "attention D512 bf16": attention(512, heads=(16, 2)),
    "attention D512 bf16 qq_bias, all features": attention(512, heads=(16, 2), qq_bias=(64, 64), **ALL),
    "attention D512 f32 all features": attention(512, heads=(16, 2), query="float32", cache="float32", **ALL),
    "attention D512 native fp8 all features": attention(512, heads=(16, 2), cache="native", **ALL),
    "attention D512 foreign fp8 all features": attention(512, heads=(16, 2), cache="foreign", **ALL),
    "context D128 native fp8 window": attention(128, cache="native", context_only=True, sliding_window=1000, return_lse=True),
    "decode D64 bf16": attention(64, max_query_len=1),
    "decode D128 bf16 all features": attention(128, max_query_len=1, **ALL),
    "decode D128 native fp8": attention(128, max_query_len=1, cache="native"),
    "encoder D64 bf16": encoder(64),
    "encoder D128 bf16 all features": encoder(128, **ENCODER_ALL),
    "encoder D128 f32 all features": encoder(128, "float32", **ENCODER_ALL),
    "encoder D128 bf16 key ranges": encoder(128, ranged=True, has_alibi=True, return_lse=True),
    "encoder D256 f16": encoder(256, "float16"),
    "encoder D256 bf16 all features": encoder(256, **ENCODER_ALL),
    "encoder D256 f32 all features": encoder(256, "float32", **ENCODER_ALL),
    "encoder D512 bf16 all features": encoder(512, **ENCODER_ALL),
    "encoder D512 f32 all features": encoder(512, "float32", **ENCODER_ALL),
    "write D128 bf16": writer(128),
    "write D128 bf16 xpacked": writer(128, content="xpacked"),
    "write D128 native fp8": writer(128, "native"),
    "write D256 foreign fp8 interleaved": writer(256, "foreign", "xpacked_interleaved_v"),
    "rope D128": rope(128, None),
    "rope+write D128 bf16": rope(128),
    "rope+write D128 native fp8 xpacked": rope(128, "native", "xpacked"),
    "qk-norm+rope+write D128 bf16": rope(128, eps=1e-6),
    "qk-norm+rope+write D256 foreign fp8 gptj": rope(256, "foreign", eps=1e-6, is_neox=False, rotary_dim=64),
    "qk-norm+mrope+write D128 native fp8": rope(128, "native", eps=1e-6, mrope_section=(24, 20, 20)),
    "merge D128": merge(128),
}
"""Variants by their names in the table: the program that the configurations of an architecture give."""


@dataclass(frozen=True)
class Row:
    variant: str
    job: Job
    usage: ResourceUsage


def _planned(plan: Callable[[str], Program], arch: str) -> Program:
    """The program, or one without launches where the plan refuses the architecture."""
    try:
        return plan(arch)
    except UnsupportedError as error:
        return Program(str(error), (), (), (), (), ())


def rows_of(variants: Mapping[str, Callable[[str], Program]], archs: tuple[str, ...], processes: int) -> Iterator[Row]:
    """Compiles each kernel of each variant for each architecture. A kernel that several variants share has a row under each."""
    named = [(name, job) for arch in archs for name, plan in variants.items() for job in jobs_of(_planned(plan, arch), arch)]
    usage = compile_for([job for _, job in named], cache_dir=CACHE, processes=processes)
    return (Row(name, job, need) for (name, job), need in zip(named, usage, strict=True))


MATRIX_KERNELS = ("paged_attention_prefill", "paged_attention_decode", "encoder_attention")


def failed_thresholds(row: Row) -> list[str]:
    """The thresholds that a kernel fails: no spills, LDS within the limits, matrix instructions, loads of 128 bits."""
    usage, limits = row.usage, arch_facts(row.job.arch)
    if usage.error:
        return [f"does not compile: {usage.error}"]
    found = []
    if usage.scratch_bytes or usage.vgpr_spills:
        found.append(f"{usage.vgpr_spills} spilled VGPRs, {usage.scratch_bytes} bytes of scratch")
    if usage.lds_bytes > limits.shared_bytes:
        found.append(f"{usage.lds_bytes} bytes of LDS, the arch has {limits.shared_bytes}")
    if usage.kernel not in MATRIX_KERNELS:
        return found
    launch = row.job.launch
    spec = dict(launch.constants)["S"]
    stored, compute, query = spec.kv.dtype, spec.compute_dtype, spec.query_dtype
    sizes = SimpleNamespace(
        cache=SimpleNamespace(dtype=jnp.dtype(stored)),
        compute_dtype=compute,
        head_pad=spec.head_pad,
        value_pad=spec.value_pad,
        qq_bias=spec.bias_columns or None,
    )
    rows, tile, head, channels = spec.block_m, spec.block_n, spec.head_pad, spec.reload_query
    guard = shared_bytes(sizes, limits, rows=rows, tile=tile, num_stages=launch.num_stages, reload_query=channels)
    if usage.lds_bytes > guard:
        found.append(f"{usage.lds_bytes} bytes of LDS, the plan assumes {guard} at most")
    if not usage.matrix_ops and not (compute == "float32" and limits.matrix == "wmma"):
        found.append("no matrix instruction")
    edge = spec.masked_block_n
    held = min(rows, spec.block_heads * spec.block_tokens)
    # Loads of 16 bytes a thread: a tile of keys and one of values in each of two loops (with and without masks), and the query once, as far
    # as each has 16 bytes for every thread.
    threads = launch.num_warps * limits.wave_size
    wide = sum(
        times * (elements * jnp.dtype(kind).itemsize // (16 * threads))
        for times, elements, kind in (
            (1, tile * (channels or head), stored),
            (1, edge * (channels or head), stored),
            (1, tile * spec.value_pad, stored),
            (1, edge * spec.value_pad, stored),
            (1, held * (channels or head), query),
        )
    )
    if dict(usage.loads).get(128, 0) < wide:
        found.append(f"loads by bits {dict(usage.loads)}: fewer than {wide} of 128 bits")
    return found


COLUMNS = ("VGPRs", "AGPRs", "SGPRs", "spills V/S", "scratch", "LDS", "waves/SIMD", "MFMA/WMMA", "loads by bits")


def _tile(job: Job) -> str:
    facts, sizes = job.launch.facts, ("block_m", "block_tokens", "block_n")
    return "x".join(str(facts[name]) for name in sizes if name in facts) + f" w{job.launch.num_warps}"


def table(rows: list[Row]) -> str:
    """The report as Markdown, one table for each architecture."""
    text = [
        "# Resources of the Triton kernels on AMD GPUs",
        "",
        "Compiled without a GPU by `python -m benchmarks.amd_isa`, in the configurations that the tuning tables choose. Not timed.",
        "VGPRs include AGPRs. Spilled SGPRs go to lanes of a VGPR: where scratch is 0 bytes none reached memory. Loads are counted in",
        "the assembly, not as they run. The tile column gives block_m x block_tokens x block_n, as far as a kernel has them, and the waves",
        "of a workgroup.",
    ]
    for arch in dict.fromkeys(row.job.arch for row in rows):
        text += ["", f"## {arch}", "", f"| variant | kernel | tile | {' | '.join(COLUMNS)} |", "|---|---|---|" + "---:|" * len(COLUMNS)]
        refused = [f"{name}: {why}" for name, plan in VARIANTS.items() if (why := _planned(plan, arch).name).startswith("triton:")]
        if refused:
            text[-2:-2] = ["", "Refused by the plan, XLA serves them: " + "; ".join(refused) + "."]
        for row in rows:
            if row.job.arch != arch:
                continue
            n = row.usage
            cells = (
                [n.error, *[""] * (len(COLUMNS) - 1)]
                if n.error
                else [
                    *(n.vgprs, n.agprs, n.sgprs, f"{n.vgpr_spills}/{n.sgpr_spills}", n.scratch_bytes, n.lds_bytes, n.waves_per_simd),
                    *(n.matrix_ops, ", ".join(f"{bits}: {count}" for bits, count in n.loads)),
                ]
            )
            text.append("| " + " | ".join(map(str, (row.variant, n.kernel, _tile(row.job), *cells))) + " |")
    return "\n".join(text) + "\n"


HASHED_ARCHS = ("gfx942", "gfx950", "gfx1100", "sm_90")
"""An architecture of each family of instructions."""


def code_hashes(rows: Iterable[Row]) -> dict[str, str]:
    """Hashes of the launches of each variant on each architecture, in order; a kernel that does not compile has its error."""
    hashes: dict[str, list[str]] = {}
    for row in rows:
        hashes.setdefault(f"{row.job.arch}|{row.variant}", []).append(row.usage.error or row.usage.code_hash)
    return {name: " ".join(parts) for name, parts in hashes.items()}


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """One line for each variant and architecture of `after` whose instructions differ from those of `before`."""
    missing = "not in the file"
    return [f"{name}: {before.get(name, missing)} -> {found}" for name, found in after.items() if before.get(name) != found]


def write_or_compare_hashes(rows: Iterable[Row], write: Path | None, compare: Path | None) -> int:
    """The exit status: 1 where something differs. A file that exists keeps its other entries."""
    found = code_hashes(rows)
    if write is not None:
        kept = json.loads(write.read_text()) if write.exists() else {}
        write.write_text(json.dumps({**kept, **found}, indent=0) + "\n")
    changed = [] if compare is None else differences(json.loads(compare.read_text()), found)
    print("\n".join([*changed, f"{len(found)} variants, {len(changed)} differ"]))
    return 1 if changed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    choices = tuple(dict.fromkeys((*ARCHS, *HASHED_ARCHS)))
    parser.add_argument("--arch", action="append", choices=choices, help="only this architecture, no table is written (may be repeated)")
    parser.add_argument("--only", default="", help="only variants whose name contains this, no table is written")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hashes", type=Path, metavar="FILE", help="write hashes of the instructions to this file")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare the instructions with the hashes of this file")
    options = parser.parse_args()
    start = time.time()
    variants = {name: plan for name, plan in VARIANTS.items() if options.only in name}
    if options.hashes or options.compare:
        rows = rows_of(variants, tuple(options.arch or HASHED_ARCHS), options.processes)
        sys.exit(write_or_compare_hashes(rows, options.hashes, options.compare))
    rows = list(rows_of(variants, tuple(options.arch or ARCHS), options.processes))
    text = table(rows)
    if options.arch or options.only:
        print(text)
    else:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "amd_isa.md").write_text(text)
        records = [{"variant": r.variant, **asdict(r.usage), "loads": dict(r.usage.loads), "facts": r.job.launch.facts} for r in rows]
        summary.RAW.mkdir(parents=True, exist_ok=True)
        (summary.RAW / "amd_isa.json").write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
    failed = [(row, text) for row in rows for text in failed_thresholds(row)]
    print(f"{len(rows)} kernels in {time.time() - start:.0f} s; {len(failed)} fail a threshold")
    for row, text in failed:
        print(f"  {row.job.arch} {row.usage.kernel} [{_tile(row.job)}] {row.variant}: {text}")


if __name__ == "__main__":
    main()
