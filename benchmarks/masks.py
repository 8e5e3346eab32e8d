"""Masks as data beside the same work without them, on one device: `python -m benchmarks.masks`, or `--small` on a CPU.

1. windows: a step of 12 layers whose windows differ, as one scan with traced windows and with static ones.
2. reads: a traced window over contexts that grow; where no tile outside the window is read, the time stays.
3. trees: a decode step with draft tokens and `qq_bias` of each sequence, beside as many causal tokens.
4. ranges: `key_range` beside plain causality, and beside the static window that it equals.

Each output is compared with that of the variant beside it, or with `xla`, before it is timed. `--out` is the folder of `masks.jsonl` and
`h200_masks.md`.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import purepage as pp
from benchmarks.step import step_inputs
from benchmarks.timing import on_gpu, time_jax

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
LIMIT = {"windows": 1.03, "trees": 1.10}
"""Largest ratio to the variant beside it."""
TOLERANCE = 2e-2
"""Largest difference of two bfloat16 outputs, relative to the largest value."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    size: int
    block: int = 16


LLAMA = Shape(32, 8, 128)
MODELS = {"Gemma 3 4B": (Shape(8, 4, 256), (1024,) * 5 + (0,)), "gpt-oss 20B": (Shape(64, 8, 64), (128, 0))}


@dataclass(frozen=True)
class Inputs:
    query: Any
    cache: pp.KVCache
    metadata: pp.AttentionMetadata
    position: np.ndarray


def make(shape: Shape, query_len: int, context: int, seqs: int, layers: int = 1, causal: bool = True) -> Inputs:
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "size": shape.size, "block": shape.block}
    cache, rest = step_inputs(layers=layers, seqs=seqs, context=context, **sizes)
    table = np.asarray(rest["metadata"].block_table)
    metadata = pp.make_metadata(
        [query_len] * seqs, [context] * seqs, table, block_size=shape.block, max_query_len=query_len, max_seq_len=context, causal=causal
    )
    dtype = cache.spec.dtype
    query = jax.random.normal(jax.random.key(1), (seqs * query_len, shape.heads, shape.size)).astype(dtype)
    position = np.tile(np.arange(context - query_len, context, dtype=np.int32), seqs)
    return Inputs(query, cache, metadata, position)


def as_float(out: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(out).astype(jnp.float32))


def difference(out: Any, other: Any) -> float:
    a, b = as_float(out), as_float(other)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))


def timed(step: Callable[[Any, Any], Any], state: Any, operands: Any, chain: int | None = None) -> tuple[Row, Any]:
    """(times of a step, its output)."""
    out = jax.block_until_ready(jax.jit(step)(state, operands))
    begin = time.perf_counter()
    jax.block_until_ready([jax.jit(step)(state, operands) for _ in range(4)])
    about = (time.perf_counter() - begin) / 4
    found = time_jax(lambda state, operands, _: step(state, operands), state, operands, chain=chain, about=about)
    return {"us": found.median * 1e6, "us_best": found.best * 1e6, "us_worst": found.worst * 1e6, "timing": found.how}, out


def attend(query: Any, operands: Any, **options: Any) -> Any:
    """The next call's query is this one's output."""
    cache, metadata, more = operands
    return pp.paged_attention(query, cache, metadata, implementation=IMPLEMENTATION, **options, **more)


IMPLEMENTATION = "triton"


def windows(small: bool) -> Iterator[Row]:
    layers = 4 if small else 12
    for name, (shape, pattern) in MODELS.items():
        pattern = pattern[-2:] if small else pattern
        for query_len, context, seqs in ((1, 64, 2), (20, 64, 1)) if small else ((1, 8192, 32), (2048, 8192, 2)):
            given = make(shape, query_len, context, seqs, layers)
            kinds = np.array(pattern * (layers // len(pattern)), np.int32)

            def static(query: Any, operands: Any, pattern: Any = pattern) -> Any:
                """A scan over groups of layers, whose windows are static."""

                def group(query: Any, first: Any) -> Any:
                    for place, window in enumerate(pattern):
                        query = attend(query, operands, layer=first + place, sliding_window=window or None)
                    return query, None

                return jax.lax.scan(group, query, jnp.arange(0, layers, len(pattern), dtype=jnp.int32))[0]

            def traced(query: Any, operands: Any, together: int = 1, kinds: Any = kinds) -> Any:
                def one(query: Any, layer: Any) -> Any:
                    return attend(query, operands, layer=layer[0], sliding_window=layer[1]), None

                of = jnp.arange(layers, dtype=jnp.int32), jnp.asarray(kinds)
                return jax.lax.scan(one, query, of, unroll=together)[0]

            operands = given.cache, given.metadata, {}
            base = None
            forms = {
                "static, scan of groups": static,
                "traced, scan of groups": partial(traced, together=len(pattern)),
                "traced, scan": traced,
            }
            for form, step in forms.items():
                times, out = timed(step, given.query, operands, chain=1)
                row = {"section": "windows", "case": f"{name}, {seqs} x {query_len} of {context}", "variant": form, **times}
                base = base or (times["us"], out)
                yield {**row, "ratio": times["us"] / base[0], "difference": difference(out, base[1])}


def reads(small: bool) -> Iterator[Row]:
    window = 32 if small else 1024
    for query_len, seqs in ((1, 2), (8, 1)) if small else ((1, 32), (1024, 1)):
        first = None
        for context in (64, 128) if small else (4096, 16384, 65536):
            given = make(LLAMA, query_len, context, seqs)
            step = lambda query, operands: attend(query, operands)  # noqa: E731
            more = {"sliding_window": jnp.int32(window)}
            times, _ = timed(step, given.query, (given.cache, given.metadata, more))
            first = first or times["us"]
            yield {"section": "reads", "case": f"{seqs} x {query_len}, window {window}", "variant": f"context {context}", **times} | {
                "ratio": times["us"] / first
            }


def tree_bias(seqs: int, drafts: int) -> np.ndarray:
    """Each draft token sees its ancestors and itself; parents are drawn, another tree a sequence."""
    rng, bias = np.random.default_rng(drafts), np.full((seqs, drafts, drafts), -np.inf, np.float32)
    for tree in bias:
        for token in range(drafts):
            if token:
                tree[token] = tree[rng.integers(max(0, token - 8), token)]
            tree[token, token] = 0
    return bias


def trees(small: bool) -> Iterator[Row]:
    seqs, context = (2, 64) if small else (16, 4096)
    for drafts in (4,) if small else (8, 16, 32, 64):
        given = make(LLAMA, drafts, context, seqs)
        bias = jnp.asarray(tree_bias(seqs, drafts))
        base = None
        for variant, more in (("causal", {}), ("tree", {"qq_bias": bias})):
            times, out = timed(attend, given.query, (given.cache, given.metadata, more))
            wanted = pp.paged_attention(given.query, given.cache, given.metadata, implementation="xla", **more)
            base = base or times["us"]
            row = {"section": "trees", "case": f"{seqs} x {drafts} drafts of {context}", "variant": variant, **times}
            yield {**row, "ratio": times["us"] / base, "difference": difference(out, wanted)}


def ranges(small: bool) -> Iterator[Row]:
    for query_len, context, seqs in ((1, 64, 2), (64, 64, 1)) if small else ((1, 8192, 32), (8192, 8192, 1), (512, 8192, 4)):
        given = make(LLAMA, query_len, context, seqs)
        free = make(LLAMA, query_len, context, seqs, causal=False)
        position, width = jnp.asarray(given.position), context // 8
        spans = [context // 4, context // 2], [context // 4 + 256, context // 2 + 256]
        image = pp.key_ranges.spans(position, *(np.array(side) for side in spans))
        variants: dict[str, tuple[Inputs, Row, Row]] = {
            "causal": (given, {}, {}),
            "key_range causal": (given, {}, {"key_range": pp.key_ranges.causal(position)}),
            "window, static": (given, {"sliding_window": width}, {}),
            "window, traced": (given, {}, {"sliding_window": jnp.int32(width)}),
            "window, key_range": (given, {}, {"key_range": pp.key_ranges.window(position, width - 1, 0)}),
            "chunked": (given, {}, {"key_range": pp.key_ranges.chunked(position, width)}),
            "spans": (free, {}, {"key_range": image}),
        }
        seen: dict[str, float] = {}
        for variant, (inputs, static, more) in variants.items():
            operands = inputs.cache, inputs.metadata, more
            times, out = timed(partial(attend, **static), inputs.query, operands)
            base = "window, static" if variant.startswith("window") else "causal"
            seen[variant] = times["us"]
            wanted = pp.paged_attention(inputs.query, inputs.cache, inputs.metadata, implementation="xla", **static, **more)
            row = {"section": "ranges", "case": f"{seqs} x {query_len} of {context}", "variant": variant, **times}
            yield {**row, "ratio": times["us"] / seen[base], "difference": difference(out, wanted)}


SECTIONS = {"windows": windows, "trees": trees, "ranges": ranges, "reads": reads}
MEANING = {
    "windows": "a step of 12 layers; ratio to static windows (target 1.03)",
    "trees": "one call; ratio to as many causal tokens (target 1.10)",
    "ranges": "one call; ratio to plain causality, of windows to the static window",
    "reads": "one call; ratio to the shortest context: 1 where no tile outside the window is read",
}


def report(rows: list[Row], machine: str) -> str:
    """The Markdown of the rows."""
    lines = [
        "# Masks as data",
        "",
        f"{machine}. `python -m benchmarks.masks`: medians of batches of chained calls, the fastest and slowest.",
    ]
    for section, meaning in MEANING.items():
        own = [row for row in rows if row["section"] == section]
        if own:
            lines += [
                "",
                f"## {section}: {meaning}",
                "",
                "| case | variant | µs | range | ratio | difference |",
                "|---|---|---:|---|---:|---:|",
            ]
        for row in own:
            if "failed" in row:
                lines.append(f"| {row.get('case', '')} | failed: {row['failed'][:200]} | | | | |")
                continue
            span, error = f"{row['us_best']:.1f} to {row['us_worst']:.1f}", row.get("difference")
            shown = "" if error is None else f"{error:.1g}"
            lines.append(f"| {row['case']} | {row['variant']} | {row['us']:.1f} | {span} | {row['ratio']:.3f} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks", description=__doc__)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}; default all")
    parser.add_argument("--small", action="store_true", help="small shapes, to see that the script works")
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--from", dest="given", type=Path, nargs="*", help="only write the report of these files")
    options = parser.parse_args()
    global IMPLEMENTATION
    IMPLEMENTATION = options.implementation
    machine = jax.devices()[0].device_kind if on_gpu() else f"CPU {platform.machine()}"
    if options.given:
        rows = [json.loads(line) for path in options.given for line in path.read_text().splitlines()]
        (options.out / "h200_masks.md").write_text(report(rows, rows[0]["machine"]))
        return 0
    wrong = 0
    with (options.out / f"masks_{'_'.join(options.sections)}.jsonl").open("w") as file:
        for name in options.sections:
            made = SECTIONS[name](options.small)
            try:
                for row in made:
                    row["machine"] = f"{machine}, jax {jax.__version__}"
                    wrong += row.get("difference", 0) > TOLERANCE
                    print(
                        f"{row['section']:8} {row['case']:34} {row['variant']:24} {row['us']:10.1f} us  {row['ratio']:.3f}  "
                        f"{row.get('difference', 0):.1g}",
                        flush=True,
                    )
                    file.write(json.dumps(row) + "\n")
                    file.flush()
            except Exception as error:
                wrong += 1
                print(name, "FAILED", type(error).__name__, str(error)[-600:], flush=True)
                file.write(json.dumps({"section": name, "failed": f"{type(error).__name__}: {error}"[-300:], "machine": machine}) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
