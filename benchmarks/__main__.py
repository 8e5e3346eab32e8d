"""`python -m benchmarks`: see README.md here."""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

# Both libraries hold memory of one GPU: XLA must not take three quarters of it first.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from benchmarks import cases, summary
from benchmarks.cases import Case, WriterCase

TRACES_VARIABLE = "PUREPAGE_TRACES"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Times purepage beside the peers that are installed.")
    parser.add_argument("--quick", action="store_true", help="leave out contenders that compile long; about 3 minutes on an H200")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU even where a GPU is")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases with one of these words in their name")
    parser.add_argument("--contenders", nargs="+", default=[], metavar="WORD", help="contenders with one of these words in their name")
    parser.add_argument("--parts", nargs="+", default=["attention", "writers", "step"], choices=["attention", "writers", "step"])
    parser.add_argument("--budget-s", type=float, default=None, help="start no case after this many seconds")
    parser.add_argument("--traces", type=Path, default=os.environ.get(TRACES_VARIABLE), help="folder of request traces, for ragged batches")
    parser.add_argument("--lengths", type=Path, help="JSON {trace: [context lengths]} instead of --traces")
    parser.add_argument("--write-lengths", type=Path, help="write that JSON from --traces and stop")
    parser.add_argument("--out", type=Path, default=summary.RESULTS, help="folder of the summary, its table and charts")
    parser.add_argument("--raw", type=Path, default=summary.RAW, help="folder of the full rows, which git ignores")
    parser.add_argument("--name", help="file name without suffix; default: device and mode")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only print the table and draw the charts of an earlier run")
    parser.add_argument("--verbose", action="store_true", help="tracebacks of what failed")
    return parser.parse_args(argv)


def ragged(args: argparse.Namespace) -> tuple[Case, ...]:
    if args.lengths:
        return cases.ragged_cases(json.loads(args.lengths.read_text()))
    return cases.ragged_cases(cases.trace_lengths(Path(args.traces))) if args.traces else ()


def chosen(args: argparse.Namespace, gpu: bool) -> tuple[list[Case], list[WriterCase]]:
    if args.tiny:
        attention, writers = [*cases.TINY_CASES], [*cases.TINY_WRITERS]
    elif gpu:
        attention, writers = [*cases.GPU_CASES, *ragged(args)], [*cases.WRITERS]
    else:
        attention, writers = [*cases.CPU_CASES], []

    def wanted(name: str) -> bool:
        return not args.only or any(word in name for word in args.only)

    return [c for c in attention if wanted(c.name)], [c for c in writers if wanted(c.name)]


def run(args: argparse.Namespace) -> Path:
    import jax

    if args.cpu:
        jax.config.update("jax_platforms", "cpu")
    from benchmarks import measure, report
    from benchmarks.peak import measure_peak
    from benchmarks.peers import CONTENDERS, QUICK_ON_GPU
    from benchmarks.step import TINY, step_rows
    from benchmarks.timing import on_gpu

    begin = time.monotonic()
    gpu = on_gpu()
    machine = report.machine()
    mode = "tiny" if args.tiny else "quick" if args.quick else "full"
    device = re.sub(r"[^a-z0-9]+", "_", machine["device"].lower()).strip("_")
    path = args.out / f"{args.name or f'{device}_{mode}'}.json"
    head: dict[str, Any] = {
        "command": "python -m benchmarks " + " ".join(_shown(sys.argv[1:])),
        "mode": mode,
        "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "machine": machine,
        "peak": None,
    }
    out = report.Report(path, head, raw=args.raw)
    head["peak"] = measure_peak() if not args.tiny else {}
    print(report.table([], head["peak"]), flush=True)
    out.write()

    contenders = {
        name: build
        for name, build in CONTENDERS.items()
        if (not args.contenders or any(word in name for word in args.contenders))
        and not (gpu and args.quick and not args.contenders and name not in QUICK_ON_GPU)
    }
    attention, writers = chosen(args, gpu)

    def over_budget(name: str) -> bool:
        if args.budget_s is None or time.monotonic() - begin < args.budget_s:
            return False
        out.add({"case": name, "contender": "all", "kind": "none", "status": "skipped", "reason": "the time budget was spent"})
        return True

    def add_all(name: str, rows: Any) -> None:
        """A case that can't even be set up is a row too."""
        if over_budget(name):
            return
        try:
            for row in rows():
                out.add(row)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:600]}"
            out.add({"case": name, "contender": "all", "kind": "none", "status": "failed", "reason": reason})

    def attend(batch: list[Case]) -> None:
        for case in batch:
            add_all(case.name, lambda case=case: measure.attention_rows(case, contenders, verbose=args.verbose))

    # What matters most comes first: a spent budget cuts the end off.
    if "attention" in args.parts:
        attend([case for case in attention if not case.is_trace])
    if "writers" in args.parts:
        names = ("triton",) if gpu and args.quick else ("triton", "xla") if gpu else ("xla",)
        for case in writers:
            add_all(case.name, lambda case=case: measure.writer_rows(case, names, verbose=args.verbose))
    if "step" in args.parts and (args.tiny or gpu):
        implementation = "triton" if gpu else "xla"
        bridges = ("callback", "jax_triton") if gpu else ("callback",)
        sizes = TINY if args.tiny else None
        add_all("decode step", lambda: step_rows(implementation=implementation, bridges=bridges, sizes=sizes, verbose=args.verbose))
    if "attention" in args.parts:
        attend([case for case in attention if case.is_trace])

    head["seconds"] = time.monotonic() - begin
    out.write()
    finish(path)
    return path


def _shown(argv: list[str]) -> list[str]:
    """Arguments without folders, which are this machine's business."""
    return [Path(a).name if "/" in a else a for a in argv]


def finish(path: Path) -> None:
    """Prints the table of a summary, or of full rows, and writes its Markdown table and charts beside it."""
    from benchmarks import charts, report

    content = json.loads(path.read_text())
    rows = summary.rows_of(content)
    print("\n" + report.table(rows, content["peak"] or {}))
    for row in report.derived(rows):
        if "time / " not in row["name"] or "core time" in row["name"]:
            print(f"{row['contender']:36} {row['name']:60} {row['ratio']:.3f}")
    path.with_suffix(".md").write_text(report.markdown(content))
    for chart in charts.draw(rows, content, path.with_suffix("")):
        print(chart.name)
    print(f"{path.name}: {len(rows)} rows, {content.get('seconds', 0):.0f} s")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.write_lengths:
        if not args.traces:
            raise SystemExit(f"--write-lengths needs --traces or {TRACES_VARIABLE}")
        args.write_lengths.write_text(json.dumps(cases.trace_lengths(Path(args.traces))) + "\n")
    elif args.draw:
        finish(args.draw)
    else:
        run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
