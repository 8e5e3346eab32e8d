"""Result files: a summary that a person reads, kept in git, and the full rows of a run, which are not.

A run writes every field of every row to `.cache/benchmarks/NAME.json`, and to `results/NAME.json` the summary: what ran where, each case
once, and one line a row with the median of its time, the fastest and the slowest batch. `results/NAME.md` is the same as a table
(`report.markdown`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
RAW = ROOT / ".cache/benchmarks"
"""Folder of the full rows; git ignores it."""
SCHEMA = 2
CASE_FIELDS = ("kind", "flops", "min_bytes", "setup")
"""What all rows of a case share: it stands once, under `cases`."""
ROW_FIELDS = (
    *("case", "contender", "switches", "status", "us", "us_best", "us_worst", "cpu_us", "overhead_us", "calls", "timing", "launches"),
    *("relative_error", "error_to_ours", "compile_s", "python_calls", "recorded", "in_place", "temporaries_bytes", "note", "reason"),
)
REASON_LENGTH = 160
DIGITS = 6
"""Significant digits of a number. Batches of one run differ in the third."""


def summarise(content: Mapping[str, Any]) -> Row:
    """The summary of a run's full content: the same head, `cases` by name, and rows with `ROW_FIELDS` only."""
    cases, rows = {}, []
    for row in content["rows"]:
        if "setup" in row or "flops" in row:
            cases.setdefault(row["case"], {f: _short(row[f]) for f in CASE_FIELDS if f in row})
        kept = {field: _rounded(row[field]) for field in ROW_FIELDS if row.get(field) not in (None, "")}
        if "reason" in kept:
            kept["reason"] = kept["reason"].splitlines()[0][:REASON_LENGTH]
        rows.append(kept)
    head = {key: _rounded(value) for key, value in content.items() if key not in ("schema", "rows", "derived", "cases")}
    return {"schema": SCHEMA, **head, "cases": cases, "rows": rows}


def rows_of(content: Mapping[str, Any]) -> list[Row]:
    """The rows of a summary, or full rows, each with what its case shares and the rates that follow from its time."""
    cases, found = content.get("cases", {}), []
    for row in content["rows"]:
        row = {"kind": "none", "flops": 0, "min_bytes": 0, **cases.get(row["case"], {}), **row}
        for rate, work in (("bytes_per_s", "min_bytes"), ("flops_per_s", "flops")):
            if "us" in row and row[work]:
                row[rate] = row[work] / row["us"] * 1e6
        found.append(row)
    return found


def _short(value: Any) -> Any:
    """`value` with a long list of (new tokens, context) pairs as a sentence."""
    if not isinstance(value, Mapping):
        return value
    pairs = value.get("lengths")
    if isinstance(pairs, str) or not pairs or len(pairs) <= 4:
        return dict(value)
    contexts = [context for _, context in pairs]
    text = f"{len(pairs)} sequences, {sum(new for new, _ in pairs)} new tokens, contexts of {min(contexts)} to {max(contexts)}"
    return {**value, "lengths": f"{text}, {sum(contexts)} in all"}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def dumps(content: Mapping[str, Any]) -> str:
    """JSON with one line for each value of the head, each case and each row."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"  {json.dumps(item, default=str)}" for item in value) + "\n ]"
        elif key == "cases" and value:
            text = "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(item, default=str)}" for name, item in value.items()) + "\n }"
        else:
            text = json.dumps(value, default=str)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write(path: Path, content: Mapping[str, Any], *, raw: Path = RAW) -> None:
    """The full content to `raw`, its summary to `path`."""
    for folder in (raw, path.parent):
        folder.mkdir(parents=True, exist_ok=True)
    for target, text in (
        (raw / path.name, json.dumps(content, indent=1, default=str) + "\n"),
        (path, dumps(summarise(content))),
    ):
        partial = target.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(target)
