"""The GPU script of AITER inside jit, as far as a CPU goes: what it checks, what it says of a switch, when it fails."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
from benchmarks import aiter_in_jit as script
from benchmarks import inputs, peers
from purepage.bridges.aiter import package as aiter_package
from purepage.functional.target import current_settings, using_settings

pytestmark = [
    pytest.mark.skipif(aiter_package.root() is None, reason="amd-aiter is not installed"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU the command itself is run"),
]
TINY = script.TINY[0].case


@pytest.fixture(autouse=True)
def one_short_batch(monkeypatch):
    monkeypatch.setattr("benchmarks.timing.BATCHES", 1)
    monkeypatch.setitem(__import__("benchmarks.timing").timing.BATCH_S, "cpu", 1e-3)


@pytest.mark.slow
def test_a_run_leaves_a_row_for_each_way_and_names_no_folder(tmp_path):
    path = tmp_path / "rows.json"
    full = tmp_path / "full"
    assert script.main(["--cpu", "--budget-s", "inf", "--json", str(path), "--raw", str(full), "--only", TINY.name, "rope"]) == 0
    content = json.loads((full / path.name).read_text())
    assert len(json.loads(path.read_text())["rows"]) == len(content["rows"])
    assert {"command", "date", "machine", "seconds", "xla_flags"} <= set(content) and str(tmp_path) not in json.dumps(content)
    found = {(r["kind"], r["contender"], r["switches"]): r for r in content["rows"]}
    wanted = {("attention", "purepage triton", ""), ("writer", "purepage triton", "")}
    wanted |= {("attention", "purepage aiter", shown) for shown in ("none", "finite, command buffer", "paged decode")}
    wanted |= {("writer", "purepage aiter", shown) for shown in ("none", "command buffer")}
    assert wanted | {("attention", "AITER from torch", "")} == set(found)
    for key in wanted:
        row = found[key]
        assert row["status"] == "ok" and row["relative_error"] < 3e-3 and row["us"] > 0
        assert row["recordable"] == ("command buffer" in key[2] or key[1] == "purepage triton")
        assert row["python_calls"] >= row["calls"] and row["recorded"] == "no"  # a CPU has no command buffers


def test_what_it_checks_over_has_nan_exactly_in_the_unowned_slots():
    made = inputs.make_inputs(TINY)
    data = np.asarray(script.over_nan(made).cache.data)[0]  # B H N 2D
    for row, (_, length) in zip(made.table, TINY.lengths, strict=True):
        for position in range(-(-length // TINY.block_size) * TINY.block_size):
            block, offset = divmod(position, TINY.block_size)
            assert np.isnan(data[row[block], :, offset]).all() == (position >= length)
    assert not np.isnan(np.asarray(made.cache.data)).any()


def test_switches_are_on_inside_and_as_before_outside():
    before = current_settings()
    with using_settings(aiter_finite_cache=True), script.switched_on((script.RECORD,)):
        assert current_settings().aiter_command_buffer and not current_settings().aiter_finite_cache
    assert current_settings() == before


def test_a_wrong_result_is_not_timed_and_fails_the_run(monkeypatch, capsys):
    def wrong(implementation):
        def build(made):
            return peers.JaxCall(lambda query, lens, operands: jnp.full_like(query, jnp.nan if implementation == "aiter" else 0), ())

        return build

    monkeypatch.setattr(peers, "ours", wrong)
    assert script.main(["--cpu", "--budget-s", "inf", "--only", TINY.name]) == 1
    assert "'wrong': 4" in capsys.readouterr().out


def test_a_run_in_which_aiter_serves_nothing_fails(monkeypatch, capsys):
    def unserved(implementation):
        def build(made):
            raise peers.Unavailable("not for this call")

        return build

    monkeypatch.setattr(peers, "ours", unserved)
    assert script.main(["--cpu", "--budget-s", "inf", "--only", TINY.name]) == 1
    assert "'unavailable': 5" in capsys.readouterr().out
