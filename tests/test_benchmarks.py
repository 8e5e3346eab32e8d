"""The benchmark's bookkeeping: what a case costs at least, what a run leaves, and that a wrong contender is not timed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import cases, inputs, matrix, measure, report, summary
from benchmarks.cases import Case, WriterCase
from benchmarks.peers import JaxCall, Unavailable

SMALL = Case("small", ((1, 20), (3, 5)), 4, 2, 32, 16, dtype="float32", cache_dtype="float32")
PEAK = {"copy_bytes_per_s": 2e9, "read_bytes_per_s": 1e9, "flops_per_s": 1e9}


def test_a_case_costs_what_a_hand_count_says():
    # One query over 20 keys; three over 3, 4 and 5. Two products of 32 channels, 2 FLOP each, 4 heads.
    assert SMALL.flops == (20 + 3 + 4 + 5) * 2 * 2 * 32 * 4
    # 25 keys and values of 2 heads of 32 float32; 4 queries and 4 outputs of 4 heads.
    assert SMALL.kv_bytes == 25 * 2 * 2 * 32 * 4
    assert SMALL.min_bytes == SMALL.kv_bytes + 2 * 4 * 4 * 32 * 4


def test_a_window_is_charged_for_what_it_shows():
    case = Case("windowed", ((3, 10),), 1, 1, 32, 16, window=4, cache_dtype="float8_e4m3fn")
    assert case.flops == 3 * 4 * 4 * 32
    assert case.kv_bytes == 2 * 32 * (4 + 2)  # positions 4 to 9


@pytest.mark.parametrize(
    ("kind", "cache_dtype", "expected"),
    [
        ("update", "bfloat16", 2 * 10 * 2 * 32 * (2 + 2)),
        ("update", "float8_e4m3fn", 2 * 10 * 2 * 32 * (2 + 1)),
        # beside that: 4 query heads in and out, 2 key heads out
        ("rope", "bfloat16", 2 * 10 * 2 * 32 * (2 + 2) + 10 * 32 * (2 * 4 + 2) * 2),
    ],
)
def test_a_writer_costs_what_a_hand_count_says(kind, cache_dtype, expected):
    assert WriterCase("w", kind, 10, 4, 2, 32, 16, 8, cache_dtype=cache_dtype).min_bytes == expected


def test_expected_rows_are_float64_attention_by_hand():
    made = inputs.make_inputs(SMALL)
    rows, outs = inputs.expected_rows(made)
    assert rows == [0, 1, 2, 3]
    row, sequence, seen = 2, 1, 4  # the second of three queries of the sequence of 5
    key, value = (np.asarray(x, np.float64)[made.table[sequence]].reshape(-1, 2, 32)[:seen] for x in (made.key, made.value))
    for head in range(4):
        scores = key[:, head // 2] @ np.asarray(made.query, np.float64)[row, head] / np.sqrt(32)
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(outs[row][head], weights @ value[:, head // 2] / weights.sum(), rtol=1e-4, atol=1e-6)


def test_trace_lengths_are_the_first_contexts(tmp_path):
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,7,1\ny,300,2\nz,9,1\n")
    (tmp_path / "b.jsonl").write_text('{"input_length": 40, "output_length": 1}\n{"input_length": 2, "output_length": 1}\n')
    traces = cases.trace_lengths(tmp_path, count=2)
    assert traces == {"a": [7, 300], "b": [40, 2]}
    ragged, uniform, *_ = cases.ragged_cases(traces)
    assert [n for _, n in ragged.lengths] == [7, 300]
    assert abs(ragged.kv_bytes - uniform.kv_bytes) <= uniform.kv_bytes // 100


def test_no_traces_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \.csv or \.jsonl"):
        cases.trace_lengths(tmp_path)


def test_names_of_cases_are_unique():
    names = [case.name for case in (*cases.GPU_CASES, *cases.WRITERS)]
    assert len(set(names)) == len(names)


def _broken(inputs):
    def call(query, seq_lens, operands):
        raise RuntimeError("no such kernel")

    return JaxCall(call, ())


def _missing(inputs):
    raise Unavailable("not installed")


CONTENDERS = {
    "wrong": lambda inputs: JaxCall(lambda query, seq_lens, operands: query, ()),
    "not a number": lambda inputs: JaxCall(lambda query, seq_lens, operands: jnp.full_like(query, jnp.nan), ()),
    "broken": _broken,
    "missing": _missing,
}


def test_a_contender_that_is_wrong_or_fails_is_a_row_without_a_time():
    rows = {row["contender"]: row for row in measure.attention_rows(SMALL, CONTENDERS)}
    assert {name: row["status"] for name, row in rows.items()} == {
        "wrong": "wrong",
        "not a number": "wrong",
        "broken": "failed",
        "missing": "unavailable",
    }
    assert all("us" not in row and row["reason"] for row in rows.values())
    assert rows["broken"]["reason"] == "RuntimeError: no such kernel"


def test_the_bound_is_the_slower_of_memory_and_arithmetic():
    row = {"kind": "attention", "flops": 4000, "min_bytes": 1000}
    assert report.bound_us(row, PEAK) == pytest.approx(4.0)
    assert report.bound_us({**row, "flops": 10}, PEAK) == pytest.approx(1.0)
    assert report.bound_us({**row, "flops": 0, "kind": "writer"}, PEAK) == pytest.approx(0.5)


def test_derived_ratios_compare_the_cases_that_they_name():
    times = {**dict(zip(cases.MIXED, (9.0, 4.0, 5.0), strict=True)), "decode ragged, t": 3.0, "decode uniform, t": 2.0}
    rows = [{"case": c, "contender": "purepage x", "kind": "attention", "status": "ok", "us": us} for c, us in times.items()]
    found = {row["name"]: row["ratio"] for row in report.derived(rows)}
    assert found == {"mixed batch / its parts apart": 1.0, "decode ragged, t / uniform of the same bytes": 1.5}


def test_a_summary_keeps_every_row_with_its_median_and_spread_and_each_case_once():
    lengths = [[1, 100 + i] for i in range(9)]
    base = {"case": "c", "kind": "attention", "flops": 4000, "min_bytes": 1000, "setup": {"lengths": lengths}}
    timed = {**base, "contender": "a", "status": "ok", "us": 2.0000001, "us_best": 1.5, "us_worst": 3.0, "spent_s": 9.0}
    failed = {**base, "contender": "b", "status": "failed", "reason": "first line\nsecond line"}
    content = {"command": "x", "rows": [timed, failed], "derived": [{"name": "n"}]}
    summarised = summary.summarise(content)
    assert list(summarised["cases"]) == ["c"]
    assert summarised["cases"]["c"]["setup"]["lengths"] == "9 sequences, 9 new tokens, contexts of 100 to 108, 936 in all"
    assert summarised["rows"] == [
        {"case": "c", "contender": "a", "status": "ok", "us": 2.0, "us_best": 1.5, "us_worst": 3.0},
        {"case": "c", "contender": "b", "status": "failed", "reason": "first line"},
    ]
    read = json.loads(summary.dumps(summarised))
    assert read == summarised
    assert len([line for line in summary.dumps(summarised).splitlines() if '"contender"' in line]) == 2
    row = summary.rows_of(read)[0]
    assert (row["bytes_per_s"], row["flops_per_s"]) == (pytest.approx(5e8), pytest.approx(2e9))
    assert report.bound_us(row, PEAK) == report.bound_us(timed, PEAK)


def test_result_files_are_summaries_and_small():
    files = [path for path in summary.RESULTS.iterdir() if path.is_file()]
    contents = [path.read_bytes() for path in files]
    assert files and sum(len(content) for content in contents) < 1_000_000
    assert sum(content.count(b"\n") for content in contents) < 5_000
    assert {path.suffix for path in files} <= {".json", ".md", ".png", ".txt"}


TABLES = [path for path in sorted(summary.RESULTS.glob("*.md")) if path.with_suffix(".json").is_file()]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_of_results_is_made_from_its_summary(path):
    assert path.read_text() == report.markdown(json.loads(path.with_suffix(".json").read_text()))


@pytest.mark.slow
def test_a_run_writes_a_summary_a_table_and_charts_and_names_no_folder(tmp_path, monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("on a GPU the command itself is run")
    monkeypatch.setattr("benchmarks.timing.BATCHES", 1)
    monkeypatch.setitem(__import__("benchmarks.timing").timing.BATCH_S, "cpu", 1e-3)
    arguments = ["--tiny", "--out", str(tmp_path), "--raw", str(tmp_path / "raw"), "--name", "run", "--contenders", "xla"]
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
    assert command.main(arguments) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    full = json.loads((tmp_path / "raw/run.json").read_text())
    assert content["schema"] == summary.SCHEMA
    assert {"command", "mode", "date", "machine", "peak", "cases", "rows", "seconds"} <= set(content)
    assert {"rows", "derived"} <= set(full) and len(full["rows"]) == len(content["rows"])
    for text in (json.dumps(content), json.dumps(full), (tmp_path / "run.md").read_text()):
        assert str(tmp_path) not in text
    assert content["machine"]["versions"]["jax"] == jax.__version__
    done = [row for row in summary.rows_of(content) if row["status"] == "ok"]
    assert {row["kind"] for row in done} == {"attention", "writer", "step"}
    assert all(row["us"] > 0 and row["calls"] >= 1 for row in done)
    assert all(row["relative_error"] < 1e-4 for row in done if row["kind"] != "step")
    pytest.importorskip("matplotlib")
    for chart in ("roofline", "bars"):
        assert (tmp_path / f"run_{chart}.png").read_bytes().startswith(b"\x89PNG")


def test_a_spent_budget_leaves_rows_that_say_so(tmp_path):
    arguments = ["--tiny", "--out", str(tmp_path), "--raw", str(tmp_path), "--name", "run", "--budget-s", "0"]
    assert command.main(arguments) == 0
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert rows and {row["status"] for row in rows} == {"skipped"}


def test_the_matrix_reports_mean_and_worst_ratios_by_hand(tmp_path):
    """A peer whose result differs is no peer: 10 us over 20 and 40 over 10, not over the wrong 1."""
    rows = [
        {"us": {"purepage": 10.0, "AITER": 20.0, "cuDNN paged": 1.0}, "difference": {"cuDNN paged": 0.5}},
        {"us": {"purepage": 40.0, "AITER": 10.0, "SDPA": 80.0}, "difference": {}},
        {"us": {"AITER": 3.0}, "difference": {}},
    ]
    for index, row in enumerate(rows):
        row |= {"case": f"Model | decode {index} x 8 | packed 64", "workload": f"decode {index} x 8", "cache": "packed 64"}
    slices, out = tmp_path / "slice.jsonl", tmp_path / "summary"
    slices.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert matrix.main(["--report", str(out), str(slices)]) == 0
    text = out.read_text()
    assert "| all | 2 | 1.41 | 4.00 | 1 | 0.50 | 0.50 |" in text and "| Model, decode 1 x 8, packed 64 | 40.0 |" in text
    assert "decode 0 x 8" not in text
