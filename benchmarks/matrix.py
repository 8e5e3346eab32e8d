"""Times paged attention of published models beside its peers, one sampled slice of the matrix after another.

    python -m benchmarks.matrix --seed 0 --budget-s 150 --out slice.jsonl [--skip earlier.jsonl ...]
    python -m benchmarks.matrix --report h200_matrix.md slice.jsonl ...

A case is an attention layer of a model of docs/models.toml, a workload and a kind of cache. A slice is as many cases of the shuffled matrix
as the time allows. First several processes compile what the cases need, then one times them alone: kernels by themselves, in replays
of a CUDA graph (cuDNN through jax: in chained calls of one program). Needs a GPU, torch, triton and jax.
"""

import argparse
import json
import math
import os
import random
import re
import statistics
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODELS = {
    "Llama 3.1 8B": 1,
    "Llama 3.1 70B": 1,
    "Llama 3.1 70B, TP8": 8,
    "Llama 3.2 1B": 1,
    "Llama 2 7B": 1,
    "Llama 3.1 405B, TP8": 8,
    "Qwen2.5 0.5B": 1,
    "Qwen2.5 7B": 1,
    "Qwen3 30B-A3B": 1,
    "Gemma 2B": 1,
    "Gemma 2 2B": 1,
    "Gemma 2 27B": 1,
    "Gemma 3 4B": 1,
    "Gemma 3 27B": 1,
    "gpt-oss 20B": 1,
    "Mistral 7B v0.1": 1,
    "Phi-2": 1,
    "Phi-3 mini 4k": 1,
    "Phi-4 14B": 1,
    "Falcon 7B": 1,
    "Falcon 40B": 1,
    "MPT 7B": 1,
    "GPT-J 6B": 1,
    "GLM-4 9B": 1,
    "Whisper large v3, cross attention": 1,
    "Whisper large v3, encoder": 1,
    "BERT base": 1,
}
"""Models of docs/models.toml and over how many devices their heads are divided."""
CACHES = {
    "packed 64": {"block_size": 64},
    "xpacked 16": {"block_size": 16, "content": "xpacked"},
    "fp8 64": {"block_size": 64, "cache_dtype": "float8_e4m3fn"},
}
LARGEST_CACHE = 5 << 30
"""Bytes of a case's keys and values; larger ones are left out."""
LARGEST_FLOPS = 3e13
PAGED, DENSE = ("cuDNN paged", "AITER"), ("SDPA",)
TOLERANCE = 2e-2
BATCH_S, BATCHES, GRAPH_S = 0.008, 5, 0.001


def workloads() -> dict[str, tuple[tuple[int, int], ...]]:
    """(new tokens, tokens in the cache with them) of each sequence."""
    found = {f"decode {s} x {n}": ((1, n),) * s for s in (1, 4, 32, 256) for n in (512, 4096, 32768)}
    found["prefill 1 x 8192"] = ((8192, 8192),)
    found["prefill 4 x 2048"] = ((2048, 2048),) * 4
    found["prefill 64 x 128"] = ((128, 128),) * 64
    found["chunked 8 x (512 of 4096)"] = ((512, 4096),) * 8
    found["mixed 2048 + 31 x 4096"] = ((2048, 2048), *((1, 4096),) * 31)
    found["draft 32 x (8 of 4096)"] = ((8, 4096),) * 32
    return found


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; `kind` is "decoder", "cross" or "encoder"."""

    model: str
    workload: str
    cache: str
    lengths: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    kind: str = "decoder"
    block_size: int = 64
    content: str = "packed"
    cache_dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} | {self.workload} | {self.cache}"

    @property
    def is_uniform(self) -> bool:
        return len(set(self.lengths)) == 1

    @property
    def num_tokens(self) -> int:
        return sum(q for q, _ in self.lengths)

    @property
    def kv_bytes(self) -> int:
        size = 1 if self.cache_dtype.startswith("float8") else 2
        seen = sum(min(n, self.window + q - 1) if self.window else n for q, n in self.lengths)
        return 2 * seen * self.num_kv_heads * self.head_size * size

    @property
    def pool_bytes(self) -> int:
        size = 1 if self.cache_dtype.startswith("float8") else 2
        return 2 * sum(n for _, n in self.lengths) * self.num_kv_heads * self.head_size * size

    @property
    def min_bytes(self) -> int:
        return self.kv_bytes + 4 * self.num_tokens * self.num_heads * self.head_size

    @property
    def flops(self) -> float:
        pairs = 0
        for q, n in self.lengths:
            if self.kind != "decoder":
                pairs += q * n
            elif self.window:
                pairs += sum(min(n - q + i + 1, self.window) for i in range(q))
            else:
                pairs += q * (2 * n - q + 1) // 2
        return 4.0 * pairs * self.num_heads * self.head_size


def layers(name: str, shards: int, facts: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Fields of a `Case` for each kind of layer of a model."""
    heads, kv_heads = facts["heads"]
    common = {
        "num_heads": heads // shards,
        "num_kv_heads": max(1, kv_heads // shards),
        "head_size": facts["size"],
        "soft_cap": facts.get("cap"),
        "sinks": facts.get("sinks", False),
        "alibi": facts.get("alibi", False),
        "kind": {"encoder": "encoder", "encoder_only": "encoder", "encoder_decoder": "cross"}.get(facts.get("type", ""), "decoder"),
    }
    for kind in facts["kinds"]:
        if kind == "full":
            yield {"model": name, **common}
        elif kind.startswith("window"):
            yield {"model": f"{name}, {kind}", **common, "window": int(kind.split()[1])}


def matrix() -> list[Case]:
    """Every case that fits."""
    table = {row["name"]: row for row in tomllib.loads((ROOT / "docs/models.toml").read_text())["model"]}
    cases = []
    for name, shards in MODELS.items():
        for fields in layers(name, shards, table[name.removesuffix(f", TP{shards}")]):
            if fields["kind"] == "encoder":
                cases += [
                    Case(workload=f"encoder {s} x {n}", cache="none", lengths=((n, n),) * s, **fields) for s, n in ((1, 1500), (32, 256))
                ]
                continue
            works = workloads()
            if fields["kind"] == "cross":
                works = {f"cross {s} x ({q} of 1500)": ((q, 1500),) * s for s, q in ((1, 1), (8, 1), (64, 1), (8, 16))}
            for workload, lengths in works.items():
                for cache, store in CACHES.items():
                    case = Case(workload=workload, cache=cache, lengths=lengths, **fields, **store)
                    if case.pool_bytes <= LARGEST_CACHE and case.flops <= LARGEST_FLOPS:
                        cases.append(case)
    return cases


def sampled(seed: int, skip: set[str]) -> list[Case]:
    """The matrix in an order that the seed decides, without the cases in `skip`."""
    cases = [case for case in matrix() if case.name not in skip]
    random.Random(seed).shuffle(cases)
    return cases


# --- on the device ------------------------------------------------------------------------------------------------------------------------


class Inputs:
    """A case's arrays on the GPU: queries, pools of keys and values [B, N, H, D], the same in the cache's layout, tables and lengths."""

    def __init__(self, case: Case) -> None:
        import torch

        from purepage.functional.cache import CacheSpec

        self.case = case
        size, seqs = case.block_size, len(case.lengths)
        counts = [math.ceil(n / size) for _, n in case.lengths]
        self.width, blocks = max(counts), sum(counts)
        self.spec = CacheSpec(
            num_blocks=blocks,
            block_size=size,
            num_kv_heads=case.num_kv_heads,
            head_size=case.head_size,
            dtype=case.cache_dtype,
            content=case.content,
        )
        torch.manual_seed(0)
        self.dtype = getattr(torch, case.cache_dtype)
        self.data = torch.empty(math.prod(self.spec.shape), dtype=torch.bfloat16, device="cuda").normal_().to(self.dtype)
        order = torch.randperm(blocks, device="cuda", dtype=torch.int32)
        starts = torch.tensor([0, *counts[:-1]], device="cuda").cumsum(0)
        column = torch.arange(self.width, device="cuda")
        inside = column[None] < torch.tensor(counts, device="cuda")[:, None]
        self.table = torch.where(inside, order[(starts[:, None] + column[None]).clamp(max=blocks - 1)], 0).to(torch.int32).contiguous()
        self.query = torch.randn((case.num_tokens, case.num_heads, case.head_size), device="cuda").to(torch.bfloat16)
        self.starts = torch.tensor([0, *(q for q, _ in case.lengths)], device="cuda").cumsum(0).to(torch.int32)
        self.lens = torch.tensor([n for _, n in case.lengths], dtype=torch.int32, device="cuda")
        self.sinks = torch.randn(case.num_heads, device="cuda") if case.sinks else None
        self.slopes = torch.rand(case.num_heads, device="cuda") * 0.05 if case.alibi else None
        self.seqs = seqs
        self._pools = None

    @property
    def scale(self) -> float:
        return self.case.head_size**-0.5

    def pools(self) -> Any:
        """Keys and values [B, N, H, D], apart."""
        import torch

        if self._pools is None:
            spec, sides = self.spec, []
            flat = self.data
            for s in spec.side_strides:
                shape = (
                    spec.num_blocks,
                    spec.block_size // s.n_vector,
                    s.n_vector,
                    spec.num_kv_heads,
                    spec.head_size // s.d_vector,
                    s.d_vector,
                )
                stride = (s.block, s.token_outer, s.token, s.head, s.dim_outer, s.dim)
                view = torch.as_strided(flat, shape, stride, s.offset)
                sides.append(view.reshape(spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size).contiguous())
            self._pools = sides
        return self._pools

    def dense(self, repeat: bool = False) -> Any:
        """[S, H, L, D] keys and values of a uniform batch."""
        context = self.case.lengths[0][1]
        sides = []
        for pool in self.pools():
            gathered = pool[self.table.long()].reshape(self.seqs, -1, self.case.num_kv_heads, self.case.head_size)[:, :context]
            sides.append(gathered.transpose(1, 2).contiguous())
        return sides


class Unavailable(Exception):
    """Why a contender does not serve a case."""


def program_of(case: Case, spec: Any, width: int) -> Any:
    import torch

    from benchmarks.kernels_torch import arch_name
    from purepage.kernels.plans.attention import plan_paged_attention
    from purepage.kernels.plans.shapes import PagedAttentionShape

    shape = PagedAttentionShape(
        num_tokens=case.num_tokens,
        num_seqs=len(case.lengths),
        num_heads=case.num_heads,
        table_width=width,
        cache=spec,
        query_dtype="bfloat16",
        output_dtype="bfloat16",
        max_query_len=max(q for q, _ in case.lengths),
        max_seq_len=max(n for _, n in case.lengths),
        causal=case.kind == "decoder",
        sliding_window=case.window,
        logits_soft_cap=case.soft_cap,
        has_alibi=case.alibi,
        has_sinks=case.sinks,
        scale=case.head_size**-0.5,
    )
    return plan_paged_attention(shape, arch_name(), num_cus=torch.cuda.get_device_properties(0).multi_processor_count)


def ours(inputs: Inputs) -> Any:
    import torch

    from purepage.kernels.triton.run import empty_tensor, launch_torch

    case = inputs.case
    if case.kind == "encoder":
        return ours_encoder(inputs)
    program = program_of(case, inputs.spec, inputs.width)
    quantized = inputs.spec.is_quantized
    tensors = {
        "query": inputs.query,
        "cache": inputs.data.view(inputs.spec.shape),
        "k_scale": torch.full((1,), 0.5 if quantized else 1.0, device="cuda"),
        "v_scale": torch.full((1,), 2.0 if quantized else 1.0, device="cuda"),
        "query_start_loc": inputs.starts,
        "seq_lens": inputs.lens,
        "block_table": inputs.table,
        "layer": torch.zeros(1, dtype=torch.int32, device="cuda"),
        "alibi_slopes": inputs.slopes,
        "sinks": inputs.sinks,
    }
    tensors |= {n: empty_tensor(b.shape, b.dtype, "cuda") for n, b in (*program.outputs, *program.scratch)}

    def call() -> Any:
        for launch in program.launches:
            launch_torch(launch, tensors)
        return tensors["out"]

    return call


def ours_encoder(inputs: Inputs) -> Any:
    import torch

    from benchmarks.kernels_torch import arch_name
    from purepage.kernels.plans.encoder import EncoderShape, plan_encoder_attention
    from purepage.kernels.triton.run import empty_tensor, launch_torch

    case = inputs.case
    shape = EncoderShape(
        num_tokens=case.num_tokens,
        num_seqs=inputs.seqs,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        value_size=case.head_size,
        dtype="bfloat16",
        max_query_len=case.lengths[0][0],
        scale=inputs.scale,
        sliding_window=case.window,
    )
    program = plan_encoder_attention(shape, arch_name())
    key, value = (x.transpose(1, 2).reshape(-1, case.num_kv_heads, case.head_size).contiguous() for x in inputs.dense())
    given = {
        "query": inputs.query,
        "key": key,
        "value": value,
        "query_start_loc": inputs.starts,
        "seq_lens": inputs.lens,
        "masks": torch.zeros(1, dtype=torch.int32, device="cuda"),
        "layer": torch.zeros(1, dtype=torch.int32, device="cuda"),
    }
    tensors = given | {n: empty_tensor(b.shape, b.dtype, "cuda") for n, b in (*program.outputs, *program.scratch)}

    def call() -> Any:
        for launch in program.launches:
            launch_torch(launch, tensors)
        return tensors["out"]

    return call


def aiter(inputs: Inputs) -> Any:
    import torch

    from purepage.bridges.aiter import package

    case = inputs.case
    if case.kind != "decoder":
        raise Unavailable("causal attention only")
    attention = package.load("unified_attention")
    key, value = inputs.pools()
    out = torch.empty_like(inputs.query)
    scales = [None, None]
    if inputs.spec.is_quantized:
        scales = [torch.full((inputs.seqs, case.num_kv_heads), s, device="cuda") for s in (0.5, 2.0)]

    def call() -> Any:
        attention(
            q=inputs.query,
            k=key,
            v=value,
            out=out,
            cu_seqlens_q=inputs.starts,
            max_seqlen_q=max(q for q, _ in case.lengths),
            seqused_k=inputs.lens,
            max_seqlen_k=max(n for _, n in case.lengths),
            softmax_scale=inputs.scale,
            causal=True,
            window_size=(case.window - 1, 0) if case.window else (-1, -1),
            block_table=inputs.table,
            softcap=case.soft_cap or 0.0,
            q_descale=None,
            k_descale=scales[0],
            v_descale=scales[1],
            alibi_slopes=inputs.slopes,
            sinks=inputs.sinks,
        )
        return out

    return call


def sdpa(inputs: Inputs) -> Any:
    import torch
    from torch.nn.attention.bias import causal_lower_right

    case = inputs.case
    if not case.is_uniform or case.window or case.soft_cap or case.sinks or case.alibi or inputs.spec.is_quantized:
        raise Unavailable("equal lengths, plain scores")
    new, context = case.lengths[0]
    key, value = inputs.dense()
    query = inputs.query.view(inputs.seqs, new, case.num_heads, case.head_size).transpose(1, 2)
    mask: dict[str, Any] = {}
    if case.kind == "decoder" and new == context > 1:
        mask = {"is_causal": True}
    elif case.kind == "decoder" and new > 1:
        mask = {"attn_mask": causal_lower_right(new, context)}

    def call() -> Any:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **mask).transpose(1, 2)

    return call


def cudnn(inputs: Inputs, about: float) -> tuple[float, Any]:
    """(microseconds, output) of cuDNN's paged attention as jax wraps it, calls chained through the lengths."""
    import jax
    import jax.numpy as jnp
    import torch
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    case = inputs.case
    plain = not (case.window or case.soft_cap or case.sinks or case.alibi or inputs.spec.is_quantized)
    new, context = case.lengths[0]
    if not plain or not case.is_uniform or case.kind == "encoder" or (case.kind == "decoder" and new not in (1, context)):
        raise Unavailable("equal lengths, plain scores, causal only without a context, 16-bit caches")
    torch.cuda.synchronize()
    key, value, query, table, lens = (jnp.from_dlpack(x) for x in (*inputs.pools(), inputs.query, inputs.table, inputs.lens))
    table = table.reshape(inputs.seqs, 1, -1, 1)
    mask = MaskType.PADDING_CAUSAL if case.kind == "decoder" and new > 1 else MaskType.PADDING

    def one(query: Any, lens: Any, key: Any, value: Any, table: Any) -> Any:
        q = query.reshape(inputs.seqs, new, case.num_heads, case.head_size)
        q_lens = jnp.full((inputs.seqs,), new, jnp.int32)
        out = paged_attention(q, key, value, q_lens, lens, table, table, scale=inputs.scale, mask_type=mask)
        return (out[0] if isinstance(out, list | tuple) else out).reshape(query.shape)

    chain = max(6, min(24, round(GRAPH_S / max(about, 1e-6))))

    def program(query: Any, *rest: Any) -> Any:
        out = query
        for _ in range(chain):
            if new == 1:  # an output is the next query: nothing is added
                out = one(out, *rest)
            else:
                lens, query = jax.lax.optimization_barrier((rest[0], query))
                out = one(query, lens, *rest[1:])
                rest = (lens + (out[0, 0, 0] > 1e30).astype(lens.dtype), *rest[1:])
        return out

    args = (query, lens, key, value, table)
    out = torch.from_dlpack(jax.jit(one)(*args)).clone()
    compiled = jax.jit(program).lower(*args).compile()

    def run(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            result = None
            result = compiled(*args)
        jax.block_until_ready(result)
        return (time.perf_counter() - begin) / count

    for _ in range(3):
        once = run(1)
    count = max(1, round(BATCH_S / once))
    return statistics.median(run(count) for _ in range(BATCHES)) / chain * 1e6, out


def microseconds(call: Any) -> float:
    """Median of batches of replays of a CUDA graph."""
    import torch

    from benchmarks.timing import replays

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            call()
        stream.synchronize()
        about = (time.perf_counter() - begin) / 3
        chain = max(1, min(20, round(GRAPH_S / about)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(chain):
                call()

    def run(count: int) -> float:
        return replays(graph, count) / count

    run(1)
    count = max(1, min(200, round(BATCH_S / max(run(1), 1e-6))))
    return statistics.median(run(count) for _ in range(BATCHES)) / chain * 1e6


def contenders(case: Case) -> dict[str, Any]:
    return {"purepage": ours, "AITER": aiter, "SDPA": sdpa}


def compile_case(job: tuple[Case, float]) -> str:
    """Runs Triton's contenders once, in a process of its own: their binaries go to the disk cache."""
    import torch

    case, end = job
    if time.time() > end:
        return "late"
    problems = []
    try:
        inputs = Inputs(case)
        for build in (ours, aiter):
            try:
                build(inputs)()
                torch.cuda.synchronize()
            except Unavailable:
                pass
            except Exception as error:
                problems.append(f"{build.__name__}: {type(error).__name__}: {str(error)[:200]}")
        del inputs
        torch.cuda.empty_cache()
    except Exception as error:
        problems.append(f"{type(error).__name__}: {str(error)[:200]}")
    return "; ".join(problems) or "ok"


def time_case(case: Case) -> dict[str, Any]:
    """A row: microseconds by contender, the largest relative difference to ours, and reasons."""
    import torch

    inputs = Inputs(case)
    row: dict[str, Any] = {
        "case": case.name,
        **{k: v for k, v in asdict(case).items() if k != "lengths"},
        "us": {},
        "difference": {},
        "reason": {},
    }
    row |= {"flops": case.flops, "min_bytes": case.min_bytes}
    mine = None
    for name, build in contenders(case).items():
        try:
            call = build(inputs)
            out = call().float().reshape(inputs.query.shape)
            if name == "purepage":
                mine = out
            elif mine is not None:
                row["difference"][name] = float((out - mine).norm() / out.norm())
            row["us"][name] = microseconds(call)
        except Unavailable as error:
            row["reason"][name] = str(error)
        except Exception as error:
            row["reason"][name] = f"{type(error).__name__}: {str(error)[:200]}"
        torch.cuda.empty_cache()
    try:
        about = row["us"].get("SDPA") or row["us"].get("AITER") or row["us"].get("purepage", 100)
        row["us"]["cuDNN paged"], out = cudnn(inputs, about / 1e6)
        if mine is not None:
            row["difference"]["cuDNN paged"] = float((out.float().reshape(mine.shape) - mine).norm() / mine.norm())
    except Unavailable as error:
        row["reason"]["cuDNN paged"] = str(error)
    except Exception as error:
        row["reason"]["cuDNN paged"] = f"{type(error).__name__}: {str(error)[:200]}"
    return row


def line_of(row: Mapping[str, Any]) -> str:
    us = row["us"]
    peers = "  ".join(f"{name} {us[name]:.1f}" for name in (*PAGED, *DENSE) if name in us)
    paged, dense = ratio(row, PAGED), ratio(row, DENSE)
    shown = " ".join(f"{name} {value:.2f}" for name, value in (("paged", paged), ("dense", dense)) if value)
    wrong = "".join(f" DIFFERS from {n} by {d:.1e}" for n, d in row["difference"].items() if not d <= TOLERANCE)
    failed = "".join(f" [{n}: {r}]" for n, r in row["reason"].items() if ":" in r)
    rate = f"{row['min_bytes'] / us['purepage'] / 1e6:.2f} TB/s {row['flops'] / us['purepage'] / 1e6:.0f} TF/s" if "purepage" in us else ""
    return f"{row['case']:64} ours {us.get('purepage', 0):8.1f}  {peers}  | {shown} | {rate}{wrong}{failed}"


def ratio(row: Mapping[str, Any], peers: Iterable[str]) -> float | None:
    """Our time over the best peer's that gives the same result."""
    times = [row["us"][p] for p in peers if p in row["us"] and row["difference"].get(p, 0.0) <= TOLERANCE]
    return row["us"]["purepage"] / min(times) if times and "purepage" in row["us"] else None


def run(args: argparse.Namespace) -> None:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    begin = time.time()
    skip = {json.loads(line)["case"] for path in args.skip if path.exists() for line in path.read_text().splitlines()}
    cases = [c for c in sampled(args.seed, skip) if not args.only or re.search(args.only, c.name)]
    cases = cases[: args.count]
    compiled = []
    end = begin + args.compile_s
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for case, said in zip(cases, pool.map(compile_case, [(c, end) for c in cases]), strict=True):
            if said != "late":
                compiled.append(case)
            if said not in ("ok", "late"):
                print(f"compile: {case.name}: {said}", flush=True)
    print(f"{len(compiled)} of {len(cases)} cases compiled in {time.time() - begin:.0f} s", flush=True)
    with args.out.open("a") as out:
        for case in compiled:
            if time.time() - begin > args.budget_s:
                print("the time budget was spent")
                break
            try:
                row = time_case(case)
            except Exception as error:
                print(f"{case.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(line_of(row), flush=True)
    print(f"{time.time() - begin:.0f} s")


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def report(rows: Iterable[Mapping[str, Any]]) -> str:
    """The Markdown of timed rows: mean and worst ratio to the best peer of each workload and cache, then every case that a peer wins."""
    rows = [row for row in rows if "purepage" in row["us"]]
    groups: dict[str, list[Mapping[str, Any]]] = {"all": rows}
    for row in rows:
        groups.setdefault(row["workload"].split()[0], []).append(row)
    for row in rows:
        groups.setdefault(row["cache"], []).append(row)
    lines = [
        "# Published models beside their peers",
        "",
        "Our time over the best peer's of the same run, where the results agree: below 1 we are faster. Paged peers "
        f"({', '.join(PAGED)}) read a paged cache; dense ones ({', '.join(DENSE)}) get keys and values that were gathered beforehand. "
        "Kernels alone, without a bridge; a sample of the matrix, on an NVIDIA H200: `python -m benchmarks.matrix --seed 1`.",
        "",
        "| cases | beside paged | geometric mean | worst | beside dense | geometric mean | worst |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, members in groups.items():
        cells = [name]
        for peers in (PAGED, DENSE):
            found = [value for row in members if (value := ratio(row, peers))]
            cells += [str(len(found)), f"{geometric_mean(found):.2f}", f"{max(found):.2f}"] if found else ["0", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    lost = sorted(((value, row) for row in rows if (value := ratio(row, PAGED)) and value > 1), key=lambda pair: -pair[0])
    lines += ["", "## Cases that a paged peer wins", "", "| case | ours, µs | " + " | ".join((*PAGED, *DENSE)) + " | ratio |"]
    lines.append("|---|" + "---:|" * (len(PAGED) + len(DENSE) + 2))
    for value, row in lost:
        times = [f"{row['us'][name]:.1f}" if name in row["us"] else "" for name in ("purepage", *PAGED, *DENSE)]
        lines.append(f"| {row['case'].replace(' | ', ', ')} | {' | '.join(times)} | {value:.2f} |")
    return "\n".join(lines) + "\n"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the matrix of published models.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000, help="most cases of the slice")
    parser.add_argument("--only", help="regular expression of case names")
    parser.add_argument("--skip", type=Path, nargs="*", default=[], help="files of earlier slices, whose cases are left out")
    parser.add_argument("--out", type=Path, default=Path("matrix.jsonl"))
    parser.add_argument("--compile-s", type=float, default=80)
    parser.add_argument("--budget-s", type=float, default=160)
    parser.add_argument("--report", type=Path, metavar="FILE", help="only write the summary of slices to this file")
    parser.add_argument("slices", type=Path, nargs="*", help="of --report: what `--out` wrote")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report:
        args.report.write_text(report(json.loads(line) for path in args.slices for line in path.read_text().splitlines()))
        return 0
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
