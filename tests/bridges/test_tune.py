"""The tuner: what it chooses and writes, with a worker that is a table of times; the same with real processes and Triton's interpreter."""

import dataclasses
import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import ROOT, run_python

import purepage as pp
from purepage import tune as command
from purepage.functional import record
from purepage.functional.dispatch import Plan
from purepage.functional.record import Device, Record, Row
from purepage.functional.target import Settings, Target, assuming_target, current_target

pytest.importorskip("torch")
pytest.importorskip("triton")

from purepage.bridges.triton import plan_launches, shape_key_of
from purepage.bridges.tune import jobs as jobs_module
from purepage.bridges.tune import problem as problems
from purepage.bridges.tune import runner, timing
from purepage.bridges.tune.candidates import EFFORTS, around, within_limits
from purepage.bridges.tune.cases import KERNELS, Case, Steps, cases_of, layers_of_models
from purepage.bridges.tune.jobs import Jobs, with_rows
from purepage.bridges.tune.progress import Progress
from purepage.bridges.tune.roofline import Peak, part_of, work
from purepage.bridges.tune.worker import Child
from purepage.kernels.archs import ARCHS
from purepage.kernels.launch import Program
from purepage.kernels.plans import tuned

SMALL = Case(kernel="decode", heads=4, kv_heads=2, head_size=32, dtype="float32", cache_dtype="float32", batch=2, context=40)
DEVICE = Device("rocm", "gfx942", "AMD Instinct MI300X", 304)
VERSIONS = {"jax": "0.10.2", "purepage": "0.2.0"}
NO_PEAK = runner.Options(peak=None)


def case(batch, **more):
    return replace(SMALL, batch=batch, **more)


class Device300X:
    """A worker whose times are a table: microseconds of each configuration by its `block_n`; 100 of the table's own."""

    def __init__(self, folder, us, *, verdicts=None, aiter=120.0, interrupt_at=None):
        self.folder, self.us, self.verdicts, self.aiter = folder, us, verdicts or {}, aiter
        self.interrupt_at, self.asked, self.restarts = interrupt_at, [], 0

    def restart(self):
        self.restarts += 1

    def count(self, job):
        return sum(each["job"] == job for each in self.asked)

    def ask(self, job):
        self.asked.append(job)
        if self.interrupt_at is not None and len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        return getattr(self, job["job"])(**{name: value for name, value in job.items() if name != "job"})

    def device(self):
        return {"folder": str(self.folder), "device": dataclasses.asdict(DEVICE), "versions": VERSIONS}

    def peak(self):
        return {"copy": 4e12, "read": 4.5e12, "matmul": 7e14}

    def key(self, case):
        return Jobs().answer({"job": "key", "case": case})

    def plan(self, case, effort, budget, cold_bytes):
        config = dict(tuned.values_of(ARCHS["gfx942"].decode["any"][128]))
        return {**self.key(case), "kind": "decode", "incumbent": config, "candidates": [{**config, "block_n": n} for n in self.us]}

    def candidate(self, config, rounds=None):
        verdict = self.verdicts.get(config["block_n"], "ok")
        if verdict != "ok":
            return {"verdict": verdict, "why": f"it is {verdict}", "died": verdict == "failed"}
        return {"verdict": "ok", "us": self.us[config["block_n"]], "beside_us": 100.0}

    def implementation(self, name, config, rounds=None):
        beside = self.us[config["block_n"]] if config else 100.0
        us = {"triton": 100.0, "aiter": self.aiter, "xla": 900.0}[name]
        return {"verdict": "ok", "us": us, "beside_us": beside} if us else {"verdict": "wrong", "why": f"{name} is wrong"}


def tune(worker, cases, **options):
    said = []
    status = runner.tune(cases, worker, options=replace(NO_PEAK, **options), write=said.append, progress=quiet)
    return status, "\n".join(said)


def quiet(total):
    return Progress(total, stream=io.StringIO())


def rows_in(folder):
    path = record.path_of(folder, DEVICE, tuple(sorted(VERSIONS.items())))
    found = record.read(path, DEVICE, tuple(sorted(VERSIONS.items())))
    return [] if found is None else list(found.rows.values())


def chosen(row):
    """`block_n` of a row's configuration; None where it is the table's."""
    return dict(row.configurations[0][1])["block_n"] if row.configurations else None


def test_the_fastest_candidate_is_chosen_and_written_with_its_times(tmp_path):
    status, said = tune(Device300X(tmp_path, {16: 90.0, 64: 50.0, 128: 70.0}), [SMALL], peak={})
    (row,) = rows_in(tmp_path)
    assert status == 0 and chosen(row) == 64 and row.configurations[0][0] == "decode"
    assert (row.us, row.untuned_us, dict(row.us_of)) == (50.0, 100.0, {"triton": 50.0, "aiter": 120.0, "xla": 900.0})
    assert row.fastest == "triton" and row.roofline == pytest.approx(part_of(Peak(4e12, 4.5e12, 7e14), SMALL, 50.0))
    for text in ("measured: copy 4.00 TB/s, read 4.50 TB/s", "decode 2 x 40", "100 %", "1 shapes tuned, 1 faster", "3 ok"):
        assert text in said


@pytest.mark.parametrize("verdict", ["wrong", "failed", "refused"])
def test_a_candidate_that_is_wrong_or_crashes_is_a_line_and_is_never_chosen(tmp_path, verdict):
    worker = Device300X(tmp_path, {16: 90.0, 64: 1.0}, verdicts={64: verdict})
    status, said = tune(worker, [SMALL])
    (row,) = rows_in(tmp_path)
    assert status == 0 and chosen(row) == 16 and f"{verdict}: as the table has it: it is {verdict}" in said
    assert worker.count("plan") == (2 if verdict == "failed" else 1), "a new process has the arrays made again"


def test_a_gain_within_the_noise_leaves_the_tables_configuration(tmp_path):
    _, said = tune(Device300X(tmp_path, {16: 99.0, 128: 100.5}), [SMALL])
    (row,) = rows_in(tmp_path)
    assert chosen(row) is None and row.us == row.untuned_us == 100.0 and "as the table has it" in said and "0 faster" in said


@pytest.mark.parametrize("aiter, fastest", [(30.0, "aiter"), (0.0, "triton"), (80.0, "triton")])
def test_aiter_is_the_fastest_only_where_it_was_right_and_faster_than_the_tuned_kernel(tmp_path, aiter, fastest):
    _, said = tune(Device300X(tmp_path, {64: 50.0}, aiter=aiter), [SMALL])
    assert rows_in(tmp_path)[0].fastest == fastest and ("aiter wrong: aiter is wrong" in said) is (aiter == 0.0)


def test_a_second_start_tunes_only_what_the_record_lacks(tmp_path):
    tune(Device300X(tmp_path, {64: 50.0}), [SMALL])
    again = Device300X(tmp_path, {64: 40.0})
    status, said = tune(again, [SMALL, case(9), case(16)])
    assert status == 0 and again.count("plan") == 1 and "1 shapes tuned" in said and "2 were in the record" in said, "16 stands for 9"
    assert sorted(row.us for row in rows_in(tmp_path)) == [40.0, 50.0]
    anew = Device300X(tmp_path, {64: 30.0})
    tune(anew, [SMALL, SMALL], again=True)
    assert anew.count("plan") == 1 and sorted(row.us for row in rows_in(tmp_path)) == [30.0, 40.0]


@pytest.mark.parametrize("at", range(1, 16))
def test_an_interrupt_keeps_what_is_finished_and_prints_the_summary(tmp_path, at):
    cases = [SMALL, case(16), case(64)]
    worker = Device300X(tmp_path, {16: 90.0, 64: 50.0}, interrupt_at=at)
    status, said = tune(worker, cases)
    finished = rows_in(tmp_path)
    assert status == runner.INTERRUPTED and worker.restarts and "stopped" in said
    assert at == 1 or f"{len(finished)} shapes tuned" in said
    status, said = tune(Device300X(tmp_path, {16: 90.0, 64: 50.0}), cases)
    assert status == 0 and f"{3 - len(finished)} shapes tuned" in said and len(rows_in(tmp_path)) == 3


def test_a_shape_whose_own_configuration_fails_is_reported_and_not_written(tmp_path, monkeypatch):
    worker = Device300X(tmp_path, {64: 50.0})
    monkeypatch.setattr(worker, "implementation", lambda **_: {"verdict": "wrong", "why": "relative error 1"})
    status, said = tune(worker, [SMALL])
    assert status == 1 and not rows_in(tmp_path) and "failed: decode 2 x 40: the table's configuration: wrong: relative error 1" in said
    monkeypatch.setattr(worker, "plan", lambda **_: {"verdict": "failed", "why": "out of memory"})
    assert "out of memory" in tune(worker, [SMALL])[1]


def test_a_machine_without_a_gpu_has_nothing_to_tune_and_one_that_cannot_be_asked_says_so(tmp_path, monkeypatch):
    worker = Device300X(tmp_path, {})
    monkeypatch.setattr(worker, "device", lambda: Jobs().answer({"job": "device"}))
    status, said = tune(worker, [SMALL])
    assert status == 0 and said.startswith("nothing to tune: JAX computes on cpu here") and not list(tmp_path.iterdir())
    monkeypatch.setattr(worker, "device", lambda: {"verdict": "failed", "why": "the process died with status 1"})
    assert tune(worker, [SMALL]) == (1, "the device can't be asked: the process died with status 1")


# --- timing -------------------------------------------------------------------------------------------------------------------------------


class FakeRuns:
    """Programs on a device whose clock slows down by a fifth with every batch."""

    def __init__(self, *seconds):
        self.seconds, self.order = seconds, []
        self.runs = [lambda count, place=place: self.run(place, count) for place in range(len(seconds))]

    def run(self, place, count):
        self.order.append(place)
        return count * self.seconds[place] * 1.2 ** ((len(self.order) - 1) // len(self.seconds))


def test_contenders_are_timed_in_turn_so_that_a_clock_that_drifts_changes_no_ratio():
    device = FakeRuns(1e-3, 0.9e-3)
    first, second = timing.interleaved(device.runs, timing.Budget(batch_s=0.01, rounds=5))
    assert second / first == pytest.approx(0.9, rel=0.01) and device.order == [0, 1] * 6


def test_a_hopeless_contender_gets_one_batch():
    device = FakeRuns(1e-3, 5e-3)
    timing.interleaved(device.runs, timing.Budget(rounds=5))
    assert device.order.count(1) == 2


def test_a_chain_is_timed_by_the_clock_that_is_given_and_keeps_the_callers_state():
    ticks = itertools.count()
    state = jnp.arange(4.0)
    run = timing.chained(lambda x, y, i: x + y * (i + 1), state, jnp.float32(2), chain=3, donated=True, clock=lambda: float(next(ticks)))
    assert run(5) == 1.0 and state.tolist() == [0, 1, 2, 3]
    assert timing.rough_seconds(lambda: state, clock=lambda: float(next(ticks)), calls=4) == 0.25
    assert timing.Budget().chain(1e-6) == 64 and timing.Budget().chain(1.0) == 6


def test_the_work_of_a_case_is_that_of_a_count_of_visible_pairs():
    for window, query in itertools.product((None, 5, 100), (1, 7, 40)):
        shape = replace(SMALL, kernel="prefill", query=query, window=window, batch=3)
        pairs = keys = 0
        for q, n in zip(*problems.lengths_of(shape), strict=True):
            seen = [[k for k in range(n) if p - (window or n) < k <= p] for p in range(n - q, n)]
            pairs += sum(map(len, seen))
            keys += len(set().union(*seen))
        nbytes, flops = work(shape)
        tokens = sum(problems.lengths_of(shape)[0])
        assert flops == 2 * pairs * 4 * 64 and nbytes == keys * 2 * 64 * 4 + tokens * 4 * 64 * 4


def test_the_bar_shows_what_is_done_on_a_terminal_and_a_line_elsewhere():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    seconds = itertools.count(0, 10)
    for stream in (Terminal(), io.StringIO()):
        bar = Progress(2, stream=stream, clock=lambda: float(next(seconds)))
        bar.grow(2)
        for _ in range(4):
            bar.step("decode")
        assert "4/4" in stream.getvalue() and "#" * 28 in stream.getvalue()
        assert ("\r" in stream.getvalue()) is stream.isatty() and stream.getvalue().count("\n") == (0 if stream.isatty() else 2)


# --- shapes and candidates ----------------------------------------------------------------------------------------------------------------


def test_steps_give_a_case_for_each_kernel_batch_and_prompt_and_writers_once():
    layers = [SMALL, replace(SMALL, window=8)]
    steps = Steps(batches=(1, 8), contexts=(64,), prompts=(16,), chunk_contexts=(64, 8))
    names = [each.name for each in cases_of(layers, steps)]
    assert names == [
        *("decode 1 x 64", "decode 8 x 64", "prefill 1 x 16", "prefill 1 x (16 of 64)"),
        *("decode 1 x 64, window 8", "decode 8 x 64, window 8", "prefill 1 x 16, window 8", "prefill 1 x (16 of 64), window 8"),
        *(f"{name}, {count} tokens" for name in ("write", "rope + write", "qk-norm + rope + write") for count in (1, 8, 16)),
    ]
    with pytest.raises(ValueError, match="kernels is 'encode'"):
        Steps(kernels=("encode",))


def test_facts_of_models_are_read_as_the_table_of_models_has_them(tmp_path):
    layers, left_out = layers_of_models(ROOT / "docs/models.toml", SMALL)
    assert len(layers) > 20 and all(each.block_size == SMALL.block_size for each in layers)
    assert any("chunk" in text for text in left_out) and any(each.value_size for each in layers) and any(each.sinks for each in layers)
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"heads": [64, 8], "size": 64, "kinds": ["window 128", "full"], "sinks": True}))
    assert [each.window for each in layers_of_models(path, SMALL)[0]] == [128, None]
    path.write_text("[{}]")
    with pytest.raises(ValueError, match=r"facts.json: model 0 is \{\}: it must be an object with 'heads'"):
        layers_of_models(path, SMALL)


@pytest.mark.parametrize(
    "field, value", [("kernel", "encode"), ("heads", 3), ("query", 50), ("dtype", "int8"), ("batch", 0), ("content", "x")]
)
def test_a_bad_case_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        replace(SMALL, **{field: value})


def call_of(shape):
    def make():
        problem = problems.problem_of(shape)
        return problem.call(problem.state, problem.operands, 0)

    return jax.eval_shape(make)


BIG = Case(kernel="decode", heads=32, kv_heads=8, head_size=128, block_size=64, batch=8, context=1024)
SHAPES = {
    "decode": BIG,
    "prefill": replace(BIG, kernel="prefill", query=1024, batch=2),
    "update": replace(BIG, kernel="update"),
    "rope": replace(BIG, kernel="rope"),
}


def device_of(arch, **more):
    facts = ARCHS[arch]
    return Target("rocm" if facts.vendor == "amd" else "cuda", arch, facts.num_cus, facts.wave_size, **more)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100", "sm_90"])
@pytest.mark.parametrize("kernel", SHAPES)
def test_candidates_differ_from_the_table_and_each_other_and_keep_the_limits(kernel, arch):
    shape = SHAPES[kernel]
    call = call_of(shape)
    static, facts = jobs_module.shape_of(shape.operation, call), ARCHS[arch]
    (kind, config), *_ = tuned.untuned(static, arch, None).items()
    served = plan_launches(shape.operation, call, device_of(arch))
    assert isinstance(served, Plan)
    sizes = []
    for effort in EFFORTS:
        tried = around(kind, config, facts, effort)
        assert len(set(tried)) == len(tried) and replace(config, measured=None) not in tried
        programs = [program_with(shape, call, static, kind, each, arch) for each in tried]
        kept, refused = within_limits(tried, served.program, lambda each: program_with(shape, call, static, kind, each, arch, check=True))
        assert len({program for program in programs if program} - {served.program}) == len(kept) and refused == programs.count(None)
        sizes.append(len(kept))
    assert 3 <= sizes[0] <= sizes[1] <= sizes[2] and sizes[0] < sizes[1]


def program_with(shape, call, static, kind, config, arch, check=False):
    from purepage.bridges.triton_calls import OPERATIONS

    try:
        return OPERATIONS[shape.operation].plan(static, arch, **{tuned.KINDS[kind][0]: config})
    except ValueError:
        if check:
            raise
        return None


# --- rows in plans ------------------------------------------------------------------------------------------------------------------------


def row_for(shape, call, kind, config):
    key = shape_key_of(shape.operation, call)
    return Row(shape.operation, key, ((kind, tuned.values_of(config)),), 40.0, 50.0, 0.5, (("triton", 40.0),), "2026-12-01")


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_90"])
@pytest.mark.parametrize("kernel", SHAPES)
def test_a_row_of_the_record_comes_before_the_tables(kernel, arch):
    shape = SHAPES[kernel]
    call = call_of(shape)
    static = jobs_module.shape_of(shape.operation, call)
    (kind, config), *_ = tuned.untuned(static, arch, None).items()
    other = around(kind, config, ARCHS[arch], "quick")
    wanted = next(each for each in other if each.num_warps != config.num_warps)
    target = with_rows(device_of(arch), row_for(shape, call, kind, wanted))
    before, after = (plan_launches(shape.operation, call, each) for each in (device_of(arch), target))
    assert isinstance(before, Plan) and isinstance(after, Plan) and isinstance(after.program, Program)
    assert after.program.launches[0].num_warps == wanted.num_warps != before.program.launches[0].num_warps
    assert after.configurations() == (f"{kind}: configuration from the record of 2026-12-01",)
    assert "record" not in " ".join(before.configurations())


def test_a_row_serves_calls_of_its_key_only():
    call = call_of(BIG)
    target = with_rows(device_of("gfx942"), row_for(BIG, call, "decode", replace(ARCHS["gfx942"].decode["any"][128], num_warps=4)))

    def is_tuned(**changes):
        planned = plan_launches("paged_attention", call_of(replace(BIG, **changes)), target)
        assert isinstance(planned, Plan)
        return "record" in " ".join(planned.configurations())

    assert is_tuned() and is_tuned(batch=5) and is_tuned(context=700)
    assert not any((is_tuned(batch=9), is_tuned(batch=4), is_tuned(context=1025), is_tuned(window=100), is_tuned(sinks=True)))
    assert not any((is_tuned(block_size=16), is_tuned(heads=64), is_tuned(order="LHBNC"), is_tuned(content="flash"), is_tuned(alibi=True)))


OVER = [
    ({"block_n": 512, "num_stages": 4}, "bytes of shared memory"),
    ({"num_warps": 32}, "32 warps of 64 threads"),
    ({"block_n": 24}, "block_n is 24: it must be a power of two"),
    ({"num_stages": 0}, "num_stages is 0"),
    ({"values_first": 1}, "values_first is 1: it must be a bool"),
    ({"options": "waves"}, "options is 'waves'"),
]


@pytest.mark.parametrize("damage, why", OVER, ids=str)
def test_a_row_over_the_limits_is_refused_and_the_table_serves(damage, why):
    call, config = call_of(BIG), ARCHS["gfx942"].decode["any"][128]
    row = row_for(BIG, call, "decode", config)
    values = tuple({**dict(tuned.values_of(config)), **damage}.items())
    target = with_rows(device_of("gfx942"), replace(row, configurations=(("decode", values),)))
    before, after = (plan_launches("paged_attention", call, each) for each in (device_of("gfx942"), target))
    assert isinstance(before, Plan) and isinstance(after, Plan) and after.program == before.program
    assert "the configuration in the record of 2026-12-01 is refused" in after.configurations()[0] and why in after.configurations()[0]
    assert after.configurations()[1:] == before.configurations()
    with assuming_target(target):
        spec, metadata = call.cache.spec, call.metadata
        assert "is refused" in str(pp.explain(pp.paged_attention, call.query, spec, metadata, implementation="triton"))


def test_values_of_a_configuration_come_back_through_a_file(tmp_path):
    for arch in ARCHS.values():
        for kind, configs in (("prefill", arch.prefill), ("decode", arch.decode)):
            for config in (config for sizes in configs.values() for config in sizes.values()):
                row = Row("paged_attention", (("heads", 1),), ((kind, tuned.values_of(config)),), 1.0, 1.0, 0.0, (), "")
                path = record.update(tmp_path, DEVICE, (), lambda contents, row=row: record.add_row(contents, row))
                found = record.read(path, DEVICE, ())
                assert found is not None
                (argument, read), *_ = tuned.overrides(next(iter(found.rows.values()))).items()
                assert read == replace(config, measured=None) and argument == tuned.KINDS[kind][0]
    for kind, values in (("encode", ()), ("decode", (("block_n", 16),))):
        with pytest.raises(ValueError, match=r"kind is|configuration is"):
            tuned.config_of(kind, values)


def test_the_record_is_in_the_key_of_jit():
    traced = []

    @jax.jit
    def function(x):
        found = current_target().record
        traced.append(found and found.digest)
        return x

    plain = current_target()
    records = [Record(digest, Path("r.json"), "", {}, {}) for digest in "ab"]
    for target in (plain, *(replace(plain, record=each) for each in records), plain, replace(plain, record=records[0])):
        with assuming_target(target):
            function(1.0)
    assert traced == [None, "a", "b"]


# --- problems, and real processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_problem_is_right_by_xla_beside_the_oracle_of_its_own_and_never_reads_an_unused_slot(kernel):
    shape = replace(SMALL, kernel=kernel, query=8 if kernel == "prefill" else 1, sinks=kernel == "decode", cache_dtype="float32")
    problem = problems.problem_of(shape, cold_bytes=1 << 16)
    run = jax.jit(lambda state, i: problem.call(state, problem.operands, i), static_argnums=1)
    from purepage.functional.dispatch import plan_with

    target = current_target()
    results = []
    for layer in (0, 1):
        call = run(problem.state, layer)
        planned = plan_with("xla", shape.operation, call, target, explicit=True)
        assert isinstance(planned, Plan)
        results.append(problem.results(planned.run(call)))
    assert all(np.isfinite(np.asarray(each)).all() for each in results[0])
    assert problems.relative_error(results[0], results[0]) == 0 and problem.donated is shape.is_writer
    if not shape.is_writer:
        assert np.isnan(np.asarray(problem.operands[0].data)).any() and problem.operands[0].spec.num_layers > 1
        assert np.isfinite(np.asarray(problems.problem_of(shape, finite=True, cold_bytes=1).operands[0].data)).all()
        assert problems.relative_error(results[1], results[0]) == 0, "every layer has the same keys"
    wrong = [each + 1 for each in results[0]]
    assert problems.relative_error(wrong, results[0]) > problems.tolerance_of(shape)
    assert math.isnan(problems.relative_error([results[0][0] * np.nan, *results[0][1:]], results[0]))


QUICK = {"batch_s": 0.0, "rounds": 1, "shortest": 1, "longest": 1}


def test_a_wrong_kernel_is_found_by_a_job_and_a_right_one_is_timed(monkeypatch):
    writer = replace(SMALL, kernel="update", batch=4)
    jobs = Jobs()
    plan = jobs.answer({"job": "plan", "case": writer.to_json(), "effort": "quick", "budget": QUICK})
    config = plan["candidates"][-1]
    assert plan["kind"] == "write" and jobs.answer({"job": "candidate", "config": config})["verdict"] == "ok"
    assert jobs.answer({"job": "candidate", "config": {**config, "num_warps": 3}})["verdict"] == "refused"
    honest = jobs._once
    monkeypatch.setattr(jobs, "_once", lambda planned: replace(honest(planned), data=honest(planned).data + 1))
    answer = jobs.answer({"job": "candidate", "config": config})
    assert answer["verdict"] == "wrong" and "relative error" in answer["why"]


def test_shapes_are_tuned_in_child_processes_and_the_row_serves_the_next_process(tmp_path):
    writer = replace(SMALL, kernel="update", batch=4)
    environment = {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PUREPAGE_CACHE_DIR": str(tmp_path)}
    child = Child(environment)
    tmp_path.mkdir(exist_ok=True)
    budget = timing.Budget(**QUICK)
    said = []
    options = replace(NO_PEAK, interpreted=True, most=1, budget=budget, effort="quick", cold_bytes=1)
    assert runner.tune([writer], child, options=options, write=said.append, progress=quiet) == 0, said
    (path,) = tmp_path.glob("*.json")
    contents = json.loads(path.read_text())
    (row,) = contents["rows"]
    assert row["operation"] == "update_cache" and set(row["us_of"]) == {"triton", "xla"} and row["us"] > 0
    config = Jobs().answer({"job": "plan", "case": writer.to_json(), "effort": "quick", "budget": QUICK})["candidates"][0]
    contents["rows"] = [{**row, "configurations": {"write": config}}]  # whichever was the faster one
    path.write_text(json.dumps(contents))
    out = run_python(
        f"""
        import jax.numpy as jnp, purepage as pp
        spec = pp.CacheSpec(num_blocks=1, block_size=16, num_kv_heads=2, head_size=32, dtype="float32")
        given = pp.init_cache(spec), jnp.ones((4, 2, 32)), jnp.ones((4, 2, 32)), jnp.arange(4)
        said = str(pp.explain(lambda *given: pp.update_cache(*given, implementation="triton"), *given))
        print("write: configuration from the record of" in said, {str(path)!r} in said)
        print("block_tokens {config["block_tokens"]}" in said, float(pp.update_cache(*given, implementation="triton").data.sum()))
        """,
        environment=environment,
    )
    assert out == "True True\nTrue 512.0\n"


def test_a_child_that_dies_or_raises_is_a_verdict_and_the_next_job_is_answered(tmp_path):
    child = Child({"JAX_PLATFORMS": "cpu", "PUREPAGE_CACHE_DIR": str(tmp_path)})
    try:
        assert "KeyError" in child.ask({"job": "no such"})["why"]
        process = child._process
        assert process is not None
        process.kill()
        process.wait()
        answer = child.ask({"job": "device"})
        assert answer["verdict"] == "failed" and answer["died"] and "died with status -9" in answer["why"]
        assert child.ask({"job": "record"})["said"].startswith("no record: there is no")
        child.restart()  # the next one has to start first
        child._longest_s = 0.0
        assert "no answer in 0 s" in child.ask({"job": "device"})["why"]
    finally:
        child.restart()


# --- the command --------------------------------------------------------------------------------------------------------------------------


def run_command(monkeypatch, *arguments):
    """(Cases, options) that the command would tune."""
    given = []
    monkeypatch.setattr(runner, "tune", lambda cases, worker, options: given.append((cases, options)) or 0)
    assert command.main(arguments) == 0
    return given[0]


def test_flags_become_cases(monkeypatch):
    flags = (
        "--heads 64/8 --head-size 192/128 --dtype float16 --cache-dtype float8_e4m3fn --layout packed/LHBNC --block-size 32 --window 128"
    )
    steps = "--batch 4,16 --context 512 --prompt 256 --chunk-context 1024 --kernels decode,prefill --effort full --again --most 9"
    cases, options = run_command(monkeypatch, *flags.split(), *steps.split())
    assert [each.name.partition(",")[0] for each in cases] == [
        "decode 4 x 512",
        "decode 16 x 512",
        "prefill 1 x 256",
        "prefill 1 x (256 of 1024)",
    ]
    assert {(each.heads, each.kv_heads, each.head_size, each.value_size, each.window) for each in cases} == {(64, 8, 192, 128, 128)}
    assert {(each.order, each.cache_dtype, each.dtype, each.block_size) for each in cases} == {("LHBNC", "float8_e4m3fn", "float16", 32)}
    assert (options.effort, options.again, options.most) == ("full", True, 9)


@pytest.mark.parametrize(
    "flags", ["--heads 3/2", "--heads x", "--kernels encode", "--layout x", "--batch 0", "--model /none.json", "--dtype int8"]
)
def test_bad_flags_are_an_error_of_the_command(flags, capsys):
    with pytest.raises(SystemExit) as error:
        command.main(flags.split())
    assert error.value.code == 2 and "error: " in capsys.readouterr().err


def test_the_command_shows_and_forgets_the_record(monkeypatch, tmp_path, capsys):
    jobs = Jobs(replace(current_target(), settings=Settings(cache_dir=str(tmp_path))))
    from purepage.bridges.tune import worker

    monkeypatch.setattr(worker, "answer_once", jobs.answer)
    assert command.main(["--show"]) == 0 and "no record: there is no" in capsys.readouterr().out
    assert command.main(["--probe"]) == 1 and "not tried" in capsys.readouterr().out
    path = record.note_probe(jobs.target, "recording", True)
    assert command.main(["--forget"]) == 0 and f"deleted {path}" in capsys.readouterr().out and not path.exists()
    assert command.main(["--forget"]) == 0 and "there is no record" in capsys.readouterr().out


@pytest.mark.parametrize("outcome", [(True, ""), (False, "status -11: no output")])
def test_the_probe_is_noted_whatever_came_of_it(monkeypatch, tmp_path, outcome):
    here = tmp_path, DEVICE, tuple(sorted(VERSIONS.items()))
    monkeypatch.setattr(record, "place", lambda target: here)
    monkeypatch.setattr(jobs_module, "probe", lambda: outcome)
    answer = Jobs(device_of("gfx942")).answer({"job": "probe"})
    found = record.read(record.path_of(*here), *here[1:])
    assert found is not None and (found.passed("recording"), found.probes["recording"].why) == outcome
    assert (answer["verdict"] == "ok") is outcome[0] and outcome[1] in answer["why"]


def test_the_probes_programs_are_right_and_a_wrong_replay_is_told(monkeypatch):
    from purepage.bridges.tune import probe

    monkeypatch.setattr(probe, "LAUNCHES", 2)
    monkeypatch.setattr(probe, "RUNS", 1)
    monkeypatch.setattr(probe, "bridges_of", lambda target: ("callback",))
    probe.check()
    honest = probe.run
    monkeypatch.setattr(probe, "run", lambda name, **how: [x + (name == "triton") for x in honest("xla", **how)])
    with pytest.raises(AssertionError, match="callback bridge, unrolled, run 1: 1 beside plain JAX"):
        probe.check()


def test_a_probe_that_crashes_has_failed(monkeypatch):
    from purepage.bridges.tune import probe

    assert probe.probe({"JAX_PLATFORMS": "no_such_platform"})[0] is False
    monkeypatch.setattr(probe, "LONGEST_S", 0.05)
    assert probe.probe() == (False, "no end after 0 s")
