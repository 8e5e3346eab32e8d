"""Checks and times the paged-attention kernels by themselves, on torch tensors, one tuning row after another.

    python -m benchmarks.kernels_torch [--only prefill decode check] [--quick] [--json FILE]

Needs a GPU, torch, triton and jax (on the CPU, for the cache's types only). Every figure is the median of CUDA-graph replays.
"""

import argparse
import math
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch

from benchmarks import summary
from benchmarks.timing import replays
from purepage.functional.cache import CacheSpec
from purepage.kernels.archs.configs import DecodeConfig, PrefillConfig
from purepage.kernels.launch import Descriptor
from purepage.kernels.plans.attention import plan_paged_attention
from purepage.kernels.plans.shapes import PagedAttentionShape
from purepage.kernels.triton.run import compile_options, empty_tensor, kernel_of, launch_torch, tensor_descriptor


@dataclass(frozen=True)
class Case:
    """One workload: (new tokens, tokens in the cache) of each sequence."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 64
    query: str = "bfloat16"
    cache: str = "bfloat16"
    content: str = "packed"
    order: str = "LBHNC"
    window: int | None = None
    options: tuple[tuple[str, object], ...] = field(default=())

    @property
    def num_tokens(self) -> int:
        return sum(q for q, _ in self.lengths)

    @property
    def width(self) -> int:
        return max(math.ceil(n / self.block_size) for _, n in self.lengths)

    @property
    def spec(self) -> CacheSpec:
        return CacheSpec(
            num_blocks=sum(math.ceil(n / self.block_size) for _, n in self.lengths) + 2,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.cache,
            content=self.content,
            order=self.order,
        )

    def shape(self) -> PagedAttentionShape:
        return PagedAttentionShape(
            num_tokens=self.num_tokens,
            num_seqs=len(self.lengths),
            num_heads=self.num_heads,
            table_width=self.width,
            cache=self.spec,
            query_dtype=self.query,
            output_dtype="bfloat16" if self.query.startswith("float8") else self.query,
            max_query_len=max(q for q, _ in self.lengths),
            max_seq_len=max(n for _, n in self.lengths),
            sliding_window=self.window,
            scale=self.head_size**-0.5,
            **dict(self.options),
        )

    def flops(self) -> float:
        """Of the visible scores and values; a window or a causal mask is not charged for what it hides."""
        total = 0
        for q, n in self.lengths:
            ctx = n - q
            total += sum(min(ctx + i + 1, self.window or n) for i in range(q))
        return 4.0 * total * self.num_heads * self.head_size

    def kv_bytes(self) -> float:
        size = 2 * self.num_kv_heads * self.head_size * self.spec.dtype.itemsize
        return float(sum(min(n, self.window + q if self.window else n) for q, n in self.lengths) * size)


def side_index(spec: CacheSpec, side: int, blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, N, H, D] element indices of layer 0, from the documented stride formula."""
    s = spec.side_strides[side]
    n = torch.arange(spec.block_size, device=blocks.device)
    d = torch.arange(spec.head_size, device=blocks.device)
    h = torch.arange(spec.num_kv_heads, device=blocks.device)
    n = (n // s.n_vector) * s.token_outer + (n % s.n_vector) * s.token
    d = (d // s.d_vector) * s.dim_outer + (d % s.d_vector) * s.dim
    return s.offset + (blocks * s.block).view(-1, 1, 1, 1) + n.view(1, -1, 1, 1) + (h * s.head).view(1, 1, -1, 1) + d.view(1, 1, 1, -1)


def make_tensors(case: Case, *, poison: bool) -> dict[str, torch.Tensor]:
    """Inputs of the case's program; with `poison` every slot that no sequence owns is NaN."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    spec, device = case.spec, "cuda"
    store = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}.get(case.cache, getattr(torch, case.cache))
    numel = math.prod(spec.shape)
    if poison:
        cache = torch.full((numel,), float("nan"), dtype=torch.float32, device=device).to(store)
    else:
        cache = torch.randn(numel, dtype=torch.bfloat16, device=device, generator=generator).to(store)
    order = torch.randperm(spec.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    table = torch.full((len(case.lengths), case.width), -1, dtype=torch.int32)
    for s, (_, n) in enumerate(case.lengths):
        for b in range(math.ceil(n / case.block_size)):
            table[s, b] = order.pop()
    if poison:
        flat = cache.view(torch.uint8) if store.itemsize == 1 else cache
        for s, (_, n) in enumerate(case.lengths):
            blocks = table[s, : math.ceil(n / case.block_size)].long().to(device)
            for side in (0, 1):
                index = side_index(spec, side, blocks).flatten(0, 1)[:n]
                values = torch.randn(index.shape, device=device, generator=generator).to(store)
                flat[index] = values.view(torch.uint8) if store.itemsize == 1 else values
    starts = torch.tensor([0, *(q for q, _ in case.lengths)]).cumsum(0).to(torch.int32)
    query = torch.randn((case.num_tokens, case.num_heads, case.head_size), device=device, generator=generator)
    return {
        "query": query.to(getattr(torch, case.query)),
        "cache": cache.view(spec.shape),
        "k_scale": torch.full((1,), 0.5 if spec.is_quantized else 1.0, device=device),
        "v_scale": torch.full((1,), 2.0 if spec.is_quantized else 1.0, device=device),
        "query_start_loc": starts.to(device),
        "seq_lens": torch.tensor([n for _, n in case.lengths], dtype=torch.int32, device=device),
        "block_table": table.to(device),
        "layer": torch.zeros(1, dtype=torch.int32, device=device),
    }


def reference(case: Case, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Plain float32 attention, sequence by sequence."""
    spec = case.spec
    group = case.num_heads // case.num_kv_heads
    out = torch.zeros((case.num_tokens, case.num_heads, case.head_size), device="cuda")
    flat, row = tensors["cache"].view(-1), 0
    for s, (q, n) in enumerate(case.lengths):
        blocks = tensors["block_table"][s, : math.ceil(n / case.block_size)].long()
        sides = []
        for side, scale in ((0, tensors["k_scale"]), (1, tensors["v_scale"])):
            index = side_index(spec, side, blocks).flatten(0, 1)[:n]
            bits = flat.view(torch.uint8)[index].view(flat.dtype) if flat.dtype.itemsize == 1 else flat[index]
            sides.append((bits.float() * scale).repeat_interleave(group, 1))
        key, value = sides
        queries = tensors["query"][row : row + q].float()
        scores = torch.einsum("qhd,khd->hqk", queries, key) * case.head_size**-0.5
        position = (n - q + torch.arange(q, device="cuda"))[:, None]
        keys = torch.arange(n, device="cuda")[None]
        keep = keys <= position
        if case.window:
            keep &= position - keys < case.window
        weights = scores.masked_fill(~keep, float("-inf")).softmax(-1)
        out[row : row + q] = torch.einsum("hqk,khd->qhd", weights, value)
        row += q
    return out


class Prepared:
    """A program with its buffers, captured into a CUDA graph."""

    def __init__(self, case: Case, tensors: dict[str, torch.Tensor], **rows) -> None:
        cus = torch.cuda.get_device_properties(0).multi_processor_count
        self.program = plan_paged_attention(case.shape(), arch_name(), num_cus=cus, **rows)
        fresh = {n: empty_tensor(b.shape, b.dtype, "cuda") for n, b in (*self.program.outputs, *self.program.scratch)}
        self.tensors = {**tensors, **fresh}
        self.out = self.tensors["out"]
        self.graph = None

    def run(self) -> None:
        for launch in self.program.launches:
            launch_torch(launch, self.tensors)

    def microseconds(self, *, budget_ms: float = 60.0) -> float:
        self.run()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.run()
        once = replays(graph, 1) * 1e6
        count = max(1, min(20, int(2000 / max(once, 1))))
        return statistics.median(
            replays(graph, count) * 1e6 / count for _ in range(max(3, min(20, int(budget_ms * 1000 / (once * count + 1)))))
        )


def arch_name() -> str:
    if torch.version.hip:
        return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


# --- what is run -------------------------------------------------------------------------------------------------------------------------

RAGGED = tuple((1, n) for n in (60, 16000, 300, 8000, 1, 4000, 129, 31000) * 8)

CHECKS = [
    Case("mixed", ((1, 300), (77, 500), (1, 64), (200, 200), (5, 900), (1, 1), (64, 65))),
    Case("mixed, xpacked", ((1, 300), (77, 500), (200, 200), (1, 65)), content="xpacked"),
    Case("mixed, interleaved, LHBNC", ((1, 300), (77, 500), (200, 200), (1, 65)), content="xpacked_interleaved_v", order="LHBNC"),
    Case("mixed, flash", ((1, 300), (77, 500), (200, 200), (1, 65)), content="flash"),
    Case("mixed, block 16", ((1, 300), (77, 500), (200, 200), (1, 65)), block_size=16),
    Case("mixed, block 48, xpacked", ((1, 300), (77, 500), (200, 200), (1, 65)), block_size=48, content="xpacked"),
    Case("mixed, fp8", ((1, 300), (77, 500), (200, 200), (1, 65)), cache="float8_e4m3fn"),
    Case("mixed, fp8 e5m2, xpacked", ((1, 300), (77, 500), (200, 200), (1, 65)), cache="float8_e5m2", content="xpacked"),
    Case("mixed, float16, D 80", ((1, 300), (77, 500), (200, 200), (1, 65)), query="float16", cache="float16", head_size=80),
    Case("mixed, float32, D 64", ((1, 300), (77, 500), (1, 65)), query="float32", cache="float32", head_size=64),
    Case("mixed, D 256, 71:1", ((1, 300), (77, 500), (1, 65)), num_heads=71, num_kv_heads=1, head_size=256),
    Case("mixed, D 512", ((1, 300), (77, 500), (1, 65)), head_size=512),
    Case("mixed, window 100", ((1, 300), (77, 500), (200, 200), (1, 65)), window=100),
    *(
        Case(f"long, {name}", ((1, 300), (400, 900), (300, 300), (9, 70), (1, 65)), **changes)
        for name, changes in {
            "packed": {},
            "flash": {"content": "flash", "order": "LHBNC"},
            "window 100": {"window": 100},
            "D 256": {"head_size": 256},
            "float16, block 16": {"query": "float16", "cache": "float16", "block_size": 16},
            "xpacked": {"content": "xpacked"},
            "fp8": {"cache": "float8_e4m3fn"},
            "fp8 e5m2, window 100, xpacked": {"cache": "float8_e5m2", "window": 100, "content": "xpacked"},
            "fp8, D 64": {"cache": "float8_e4m3fn", "head_size": 64},
        }.items()
    ),
    Case("decode, ragged", RAGGED),
    Case("decode, 5 queries", tuple((5, n) for n in (700, 20, 5, 3000))),
]

DECODE = [
    Case("decode 1x32768", ((1, 32768),)),
    Case("decode 8x4096", ((1, 4096),) * 8),
    Case("decode 64x8192", ((1, 8192),) * 64),
    Case("decode 256x2048", ((1, 2048),) * 256),
    Case("decode 64x8192 block 16", ((1, 8192),) * 64, block_size=16),
    Case("decode 64x8192 fp8", ((1, 8192),) * 64, cache="float8_e4m3fn"),
    Case("decode 64x8192 xpacked", ((1, 8192),) * 64, content="xpacked"),
    Case("decode ragged", RAGGED),
    Case("decode 16x32768 window 4096", ((1, 32768),) * 16, window=4096),
    Case("decode 16x4096", ((1, 4096),) * 16),
]

PREFILL = [
    Case("prefill 1x8192", ((8192, 8192),)),
    Case("prefill 4x4096", ((4096, 4096),) * 4),
    Case("chunked 16x512of2048", ((512, 2048),) * 16),
    Case("prefill 1x8192 fp8", ((8192, 8192),), cache="float8_e4m3fn"),
    Case("prefill 1x8192 xpacked", ((8192, 8192),), content="xpacked"),
    Case("prefill 1x8192 block 16", ((8192, 8192),), block_size=16),
    Case("chunked 16x512of2048 fp8", ((512, 2048),) * 16, cache="float8_e4m3fn"),
    Case("prefill 4x4096 xpacked, block 16", ((4096, 4096),) * 4, content="xpacked", block_size=16),
    Case("mixed 2048 + 63x4096", ((2048, 2048), *((1, 4096),) * 63)),
    Case("prefill 1x2048", ((2048, 2048),)),
    Case("decode 63x4096", ((1, 4096),) * 63),
]

TILED_VARIANTS = [
    PrefillConfig(128, 64, 4, 2),
    PrefillConfig(128, 64, 4, 3),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 128, 8, 2),
    PrefillConfig(128, 128, 4, 2),
    PrefillConfig(64, 64, 4, 2),
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(64, 128, 4, 2),
    PrefillConfig(256, 64, 8, 2),
]

SPLIT_VARIANTS = [
    DecodeConfig(64, 4, 3, 2, 128),
    DecodeConfig(64, 4, 2, 2, 128),
    DecodeConfig(64, 4, 3, 3, 128),
    DecodeConfig(64, 4, 2, 4, 128),
    DecodeConfig(128, 4, 2, 2, 128),
    DecodeConfig(128, 4, 3, 1, 128),
    DecodeConfig(128, 8, 2, 1, 128),
    DecodeConfig(32, 4, 4, 4, 128),
    DecodeConfig(64, 2, 3, 3, 128),
    DecodeConfig(64, 4, 3, 6, 128),
]


def variants(case: Case, quick: bool):
    """(label, overrides) of each run of a case: the tables' rows first."""
    yield "table", {}
    if quick:
        return
    if case in PREFILL[:4]:
        for row in TILED_VARIANTS:
            yield f"{row.block_m}x{row.block_n} w{row.num_warps} s{row.num_stages}", {"tiled": row}
    elif case in DECODE[:6]:
        for row in SPLIT_VARIANTS:
            yield f"{row.block_n} w{row.num_warps} s{row.num_stages} p{row.splits_per_cu}", {"split": row}


def compile_only(job: tuple[Case, dict, str, int]) -> str | None:
    """Fills Triton's disk cache, in a process of its own."""
    from triton.runtime import driver

    case, rows, arch, cus = job
    try:
        program = plan_paged_attention(case.shape(), arch, num_cus=cus, **rows)
        buffers = dict((*program.inputs, *program.outputs, *program.scratch))
        for launch in program.launches:
            args = []
            for arg in launch.args:
                if isinstance(arg, Descriptor):
                    arg = tensor_descriptor(torch.empty(16, dtype=getattr(torch, arg.dtype), device="cuda"), arg)
                elif isinstance(arg, str):
                    kind = getattr(torch, buffers[arg].dtype) if arg != "cache" else cache_dtype(case)
                    arg = torch.empty(16, dtype=torch.uint8 if kind.itemsize == 1 else kind, device="cuda")
                args.append(arg)
            kernel = kernel_of(launch)
            names = dict(zip(kernel.arg_names, args, strict=False))
            options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
            options |= compile_options(launch, driver.active.get_current_target())
            kernel.warmup(grid=launch.grid, **names, **dict(launch.constants), **options)
    except Exception as error:  # reported, and met again where it is run
        return f"{case.name} {rows}: {type(error).__name__}: {str(error)[:200]}"
    return None


def cache_dtype(case: Case) -> torch.dtype:
    return torch.uint8 if case.spec.is_quantized else getattr(torch, case.cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=["check", "decode", "prefill"], choices=["check", "decode", "prefill"])
    parser.add_argument("--quick", action="store_true", help="the tables' rows only")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--json", help="writes the figures to this file")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    args = parser.parse_args()
    begun = time.time()
    arch, cus = arch_name(), torch.cuda.get_device_properties(0).multi_processor_count
    import triton

    print(f"{torch.cuda.get_device_name()}, {arch}, {cus} CUs, torch {torch.__version__}, triton {triton.__version__}", flush=True)

    timed = [c for group, cases in (("decode", DECODE), ("prefill", PREFILL)) if group in args.only for c in cases if args.match in c.name]
    checks = [c for c in CHECKS if "check" in args.only and args.match in c.name]
    jobs = [(c, {}, arch, cus) for c in checks] + [(c, rows, arch, cus) for c in timed for _, rows in variants(c, args.quick)]
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for message in pool.map(compile_only, jobs):
            if message:
                print("compile:", message, flush=True)
    print(f"compiled {len(jobs)} programs in {time.time() - begun:.0f} s", flush=True)

    failures = 0
    for case in checks:
        failures += not verify(case, poison=True)

    print(f"copy {copy_bandwidth():.2f} TB/s")

    rows_out = []
    for case in timed:
        tensors = make_tensors(case, poison=False)
        expected = reference(case, tensors) if case.num_tokens * case.width * case.block_size <= 1 << 23 else None
        for label, overrides in variants(case, args.quick):
            try:
                prepared = Prepared(case, tensors, **overrides)
                us = prepared.microseconds()
            except Exception as error:
                print(f"{case.name:28s} {label:18s} {type(error).__name__}: {str(error)[:150]}", flush=True)
                continue
            error = None if expected is None else relative_error(prepared.out, expected)
            tflops, tbs = case.flops() / us / 1e6, case.kv_bytes() / us / 1e6
            grid = [launch.grid[0] for launch in prepared.program.launches]
            note = "" if error is None else f"err {error:.1e}"
            print(f"{case.name:28s} {label:18s} {us:9.1f} us {tbs:6.2f} TB/s {tflops:7.1f} TFLOP/s grid {grid} {note}", flush=True)
            rows_out.append({"case": case.name, "variant": label, "us": us, "TB/s": tbs, "TFLOP/s": tflops, "error": error})
        del tensors, expected
        torch.cuda.empty_cache()
    if args.json:
        content = {"device": torch.cuda.get_device_name(), "triton": triton.__version__, "rows": rows_out}
        Path(args.json).write_text(summary.dumps(content))
    print(f"{failures} checks failed; {time.time() - begun:.0f} s in all")
    sys.exit(1 if failures else 0)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def copy_bandwidth() -> float:
    """TB/s, bytes read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(bench_call(lambda: target.copy_(source)) for _ in range(3)) / 1e6


def bench_call(call) -> float:
    """Microseconds of one call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(5):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / 5


def verify(case: Case, *, poison: bool) -> bool:
    try:
        tensors = make_tensors(case, poison=poison)
        expected = reference(case, tensors)
        prepared = Prepared(case, tensors)
        prepared.run()
        error = relative_error(prepared.out, expected)
    except Exception as failure:
        print(f"CHECK {case.name}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
        return False
    bound = 2e-5 if case.query == "float32" else 1e-2
    good = error < bound  # NaN is not
    print(f"{'ok   ' if good else 'WRONG'} {case.name}: relative error {error:.2e}", flush=True)
    return good


if __name__ == "__main__":
    main()
