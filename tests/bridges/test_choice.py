"""Which bridge a program takes where none is named. It is seen in what JAX lowers for a GPU; nothing is compiled or launched."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import bridge_kernels as kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import purepage as pp
from purepage.bridges import automatic, callback, choice, execute, native, trial
from purepage.bridges.execute import using_bridge
from purepage.bridges.native import library
from purepage.functional.dispatch import Unsupported, plan_with
from purepage.functional.record import Probe, Record
from purepage.functional.target import Settings, Target, assuming_target, using_settings
from purepage.testing import random_batch

pytest.importorskip("torch")
pytest.importorskip("triton")

CPU = Target("cpu", "cpu", 1, 1)
CALLBACK, NATIVE, UNRECORDED = "xla_buffer_python_gpu_callback_cmd_buffer", library.TARGET, library.UNRECORDED


def mi300x(**settings):
    """An MI300X whose launches may be recorded, where nothing else is said."""
    return Target("rocm", "gfx942", 304, 64, Settings(**{"command_buffer": True, **settings}))


@pytest.fixture(autouse=True)
def healthy(monkeypatch):
    """A machine where every bridge works, as far as a choice can tell; lowering a program needs neither compiler nor GPU."""
    monkeypatch.setattr(library, "obstacle", lambda: None)
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(callback, "_prepare", lambda program, platform: None)
    attributes = {"program": "p", "arch": "gfx942", "symbols": "", "modules": "", "digest": np.int64(0), "launches": np.zeros(1, np.int64)}
    monkeypatch.setattr(native.program, "packed", lambda program, arch: attributes)


@pytest.fixture(scope="module")
def batch():
    return random_batch(1, dtype=jnp.bfloat16)


def attend(query, cache, metadata, times=1):
    for _ in range(times):
        query = pp.paged_attention(query, cache, metadata, implementation="triton")
    return query


def targets_in(function, batch, target=None):
    """Names of the custom calls that are lowered for ROCm."""
    with assuming_target(mi300x() if target is None else target):
        fresh = jax.jit(lambda *given: function(*given))  # what an earlier test lowered is kept by function
        text = fresh.trace(batch.query, batch.cache(), batch.metadata).lower(lowering_platforms=("rocm",)).as_text()
    return {name for name in (CALLBACK, NATIVE, UNRECORDED) if f"@{name}(" in text}


@pytest.mark.parametrize(
    "target, calls, more, bridge",
    [
        (CPU, 1, {}, "callback"),
        (mi300x(), 1, {}, "native"),
        (mi300x(), 4, {}, "native"),
        (mi300x(), 5, {}, "callback"),
        (mi300x(), 5, {"exported": True}, "native"),
        (mi300x(command_buffer=False), 50, {}, "native"),
        (mi300x(bridge="callback"), 1, {"exported": True}, "callback"),
        (mi300x(bridge="native"), 50, {}, "native"),
        (mi300x(bridge="jax_triton"), 50, {}, "jax_triton"),
    ],
)
def test_a_name_comes_first_then_whether_xla_records_the_launches(target, calls, more, bridge):
    chosen = choice.choose(target, calls, **more)
    assert chosen.bridge == bridge and chosen.why


@pytest.mark.parametrize(
    "flags, least",
    [
        ("", 5),
        ("--xla_gpu_graph_min_graph_size=1 --xla_dump_to=x", 1),
        ("--xla_gpu_graph_min_graph_size=1 --xla_gpu_graph_min_graph_size=9", 9),
        ("--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL", 5),
        ("--xla_gpu_enable_command_buffer= --xla_gpu_graph_min_graph_size=1", None),
        ("--xla_gpu_enable_command_buffer=", None),
    ],
)
def test_what_xla_records_follows_its_flags(monkeypatch, flags, least):
    assert choice.recorded_from(flags) == least
    monkeypatch.setenv("XLA_FLAGS", flags)
    for calls in (1, 5, 9):
        assert choice.choose(mi300x(), calls).bridge == ("native" if least is None or calls < least else "callback")


@pytest.mark.parametrize("why", ["torch is not installed", "torch is installed and does not import: OSError", "a HIP runtime each"])
def test_without_a_torch_that_works_every_program_is_native(monkeypatch, why):
    monkeypatch.setattr(choice, "torch_failure", lambda target: why)
    assert choice.choose(mi300x(), 50) == choice.Choice("native", why)


def test_without_the_library_every_program_goes_through_dlpack(monkeypatch, batch):
    monkeypatch.setattr(library, "obstacle", lambda: "no compiler here")
    chosen = choice.choose(mi300x(), 1)
    assert chosen.bridge == "callback" and "no compiler here" in chosen.why
    assert targets_in(attend, batch) == {CALLBACK}


def test_a_library_that_fails_to_load_leaves_dlpack(monkeypatch, batch):
    monkeypatch.setattr(library, "load", lambda: "g++ failed")
    assert targets_in(attend, batch) == {CALLBACK}
    monkeypatch.setattr(choice, "torch_failure", lambda target: "torch is not installed")
    with pytest.raises(pp.UnsupportedError, match=r"native bridge can't run: g\+\+ failed.*torch is not installed"):
        targets_in(attend, batch)


def test_a_broken_torch_and_no_library_are_both_told(monkeypatch, batch):
    from purepage.functional.attention import paged_attention_call

    call = paged_attention_call(batch.query, batch.cache(), batch.metadata, layer=0)
    monkeypatch.setattr(trial, "on_gpu", lambda: True)
    monkeypatch.setattr(trial, "import_failure", lambda package: "torch does not import" if package == "torch" else None)
    assert not isinstance(plan_with("triton", "paged_attention", call, mi300x(), explicit=False), Unsupported)
    monkeypatch.setattr(library, "obstacle", lambda: "no compiler here")
    planned = plan_with("triton", "paged_attention", call, mi300x(), explicit=False)
    assert isinstance(planned, Unsupported) and planned.broken
    assert planned.reasons == ("torch does not import; the native bridge needs no torch, but no compiler here",)


def test_programs_of_one_trace_are_counted_when_xlas_program_is_made(batch):
    assert targets_in(attend, batch) == {NATIVE}
    assert targets_in(lambda *given: attend(*given, times=choice.RECORDED_FROM - 1), batch) == {NATIVE}
    assert targets_in(lambda *given: attend(*given, times=choice.RECORDED_FROM), batch) == {CALLBACK}


def test_the_body_of_a_loop_counts_by_itself(batch):
    def scanned(query, cache, metadata, together=1):
        return jax.lax.scan(lambda x, _: (attend(x, cache, metadata), None), query, length=20, unroll=together)[0]

    assert targets_in(scanned, batch) == {NATIVE}
    both = targets_in(lambda *given: scanned(attend(*given, times=6), *given[1:]), batch)
    assert both == {NATIVE, CALLBACK}


def test_a_batch_is_one_entry_after_another(batch):
    queries = jnp.stack([jnp.asarray(batch.query)] * 3)
    with assuming_target(mi300x()):
        mapped = jax.vmap(attend, in_axes=(0, None, None))
        lowered = jax.jit(mapped).trace(queries, batch.cache(), batch.metadata).lower(lowering_platforms=("rocm",))
    assert lowered.out_info.shape == queries.shape and "stablehlo.while" in lowered.as_text() and NATIVE in lowered.as_text()


def test_an_exported_function_is_native_however_many_programs_it_has(batch):
    def exported(bridge):
        with assuming_target(mi300x(bridge=bridge)):
            checks = [export.DisabledSafetyCheck.custom_call(NATIVE)]
            function = jax.jit(lambda *given: attend(*given, times=6))
            return export.export(function, platforms=["rocm"], disabled_checks=checks)(batch.query, batch.cache(), batch.metadata)

    assert NATIVE in exported(None).mlir_module() and CALLBACK not in exported(None).mlir_module()
    with pytest.raises(NotImplementedError, match="host_callbacks"):
        exported("callback")


def test_an_export_without_the_library_says_why(monkeypatch, batch):
    monkeypatch.setattr(library, "obstacle", lambda: "no compiler here")
    with assuming_target(mi300x()), pytest.raises(pp.UnsupportedError, match=r"can't be exported.*no compiler here"):
        export.export(jax.jit(attend), platforms=["rocm"])(batch.query, batch.cache(), batch.metadata)


def test_launches_that_must_not_be_recorded_are_another_custom_call(batch):
    assert targets_in(attend, batch, mi300x(command_buffer=False)) == {UNRECORDED}
    assert targets_in(attend, batch, mi300x(command_buffer=False, bridge="native")) == {UNRECORDED}


def probed(passed):
    """A record with the outcome of the probe that lets ROCm record."""
    return Record(str(passed), Path("record.json"), "2026-12-01", {"recording": Probe(passed, "" if passed else "hangs", "2026-12-01")}, {})


@pytest.mark.parametrize(
    "platform, arch, record, setting, recorded",
    [
        ("rocm", "gfx942", None, None, False),
        ("rocm", "gfx942", probed(False), None, False),
        ("rocm", "gfx942", probed(True), None, True),
        ("rocm", "gfx942", None, True, True),
        ("rocm", "gfx942", probed(True), False, False),
        ("cuda", "sm_90", None, None, True),
        ("cuda", "sm_90", probed(False), None, True),
        ("cuda", "sm_90", None, False, False),
    ],
)
def test_rocm_records_launches_once_the_probe_has_passed(batch, platform, arch, record, setting, recorded):
    target = Target(platform, arch, 304, 64, Settings(command_buffer=setting), record)
    assert target.records_launches is recorded and target.recording_reason
    assert choice.choose(target, 50).bridge == ("callback" if recorded else "native")
    assert recorded or target.recording_reason in choice.choose(target, 50).why
    if platform == "rocm":
        named = replace(target, settings=Settings(command_buffer=setting, bridge="native"))
        assert targets_in(attend, batch, named) == {NATIVE if recorded else UNRECORDED}


def test_without_the_native_bridge_rocm_gets_the_callback_that_is_not_recorded(batch):
    target = Target("rocm", "gfx942", 304, 64, Settings(bridge="callback"))
    with assuming_target(target):
        traced = jax.jit(lambda *given: attend(*given)).trace(batch.query, batch.cache(), batch.metadata)
        lowered = traced.lower(lowering_platforms=("rocm",))
    assert "@xla_buffer_python_gpu_callback(" in lowered.as_text() and CALLBACK not in lowered.as_text()


def test_explain_says_why_nothing_is_recorded(batch):
    given = batch.query, batch.cache(), batch.metadata
    said = {arch: str(pp.explain(attend, *given, arch=arch)) for arch in ("MI300X", "H200")}
    assert "launches are not recorded into command buffers: the probe `recording` was not tried" in said["MI300X"]
    assert "launches may be recorded into command buffers: the default here" in said["H200"]


def test_arrays_outside_a_trace_go_through_the_native_bridge(monkeypatch):
    taken = []
    for module in (native, callback):
        monkeypatch.setattr(module, "run_program", lambda program, *_, name=module.__name__: taken.append(name) or [jnp.zeros(1)])
    program = kernels.add_program(16)
    execute.run(program, {"x": jnp.ones(16), "y": jnp.ones(16)}, target=mi300x())
    jax.eval_shape(lambda x, y: execute.run(program, {"x": x, "y": y}, target=mi300x()), jnp.ones(16), jnp.ones(16))
    assert taken == [native.__name__]


def test_a_call_outside_a_trace_is_one_compiled_program_and_its_checks_are_the_same(monkeypatch, batch):
    monkeypatch.setattr(native, "run_program", lambda program, arrays, target: [arrays["query"] + 1])
    with assuming_target(mi300x()):
        out = pp.paged_attention(batch.query, batch.cache(), batch.metadata, implementation="triton")
        with pytest.raises(ValueError, match="query"):
            pp.paged_attention(batch.query[0], batch.cache(), batch.metadata, implementation="triton")
    assert out.dtype == jnp.bfloat16 and jnp.array_equal(out, batch.query + 1, equal_nan=True)


def test_a_trace_that_was_forgotten_counts_anew(monkeypatch):
    seen = []
    monkeypatch.setattr(automatic, "_KEPT", 2)

    def nested(depth):
        seen.append(automatic.counted().calls)
        if depth:
            jax.eval_shape(lambda: nested(depth - 1))
        seen.append(automatic.counted().calls)
        return jnp.zeros(())

    jax.eval_shape(lambda: nested(1))
    assert seen == [1, 1, 2, 2]
    seen.clear()
    jax.eval_shape(lambda: nested(2))
    assert seen == [1, 1, 1, 2, 2, 1]


def test_explain_says_which_bridge_and_why(batch):
    given = batch.query, batch.cache(), batch.metadata
    with using_settings(command_buffer=True):
        one, many = (str(pp.explain(partial(attend, times=times), *given, arch="MI300X")) for times in (1, 6))
    assert "through the native bridge (XLA records no less than 5 commands in a row, and 1 of this library may be all)" in one
    assert many.count("through the callback bridge (6 programs in a row, which XLA records)") == 6
    with using_bridge("jax_triton"):
        named = pp.explain(attend, *given, arch="MI300X")
    assert "through the jax_triton bridge (asked for by PUREPAGE_BRIDGE or using_bridge)" in str(named)
    assert "jax_triton bridge: asked for" in named._repr_html_()
