"""The device record: read once, ignored where it is of other versions or broken, changed by several processes at once, seen by plans."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from processes import ROOT, run_python

import purepage as pp
from purepage.functional import dispatch, record, target
from purepage.functional.attention import paged_attention_call
from purepage.functional.record import Device, Probe, Record, Row
from purepage.functional.target import Settings, Target, cache_folder, current_target, settings_of, target_of, using_settings
from purepage.testing import random_batch

DEVICE = Device("rocm", "gfx942", "AMD Instinct MI300X", 304)
VERSIONS = (("jax", "0.10.2"), ("jaxlib", "0.10.2"), ("purepage", "0.2.0"), ("triton", ""))
ROW = Row(
    "paged_attention",
    record.sorted_key({"heads": 32, "content": "packed", "is_neox": True}),
    (("decode", (("block_n", 64), ("options", (("waves_per_eu", 2),)))),),
    10.0,
    12.5,
    0.8,
    (("triton", 10.0), ("aiter", 9.0)),
    "2026-12-01",
)


@pytest.fixture
def path(tmp_path):
    return record.path_of(tmp_path, DEVICE, VERSIONS)


def write(folder, *rows, **probes):
    def change(contents):
        for row in rows:
            record.add_row(contents, row)
        contents["probes"].update(probes)

    return record.update(folder, DEVICE, VERSIONS, change, today="2026-12-01")


def test_a_record_is_read_as_it_was_written(tmp_path, path):
    probe = {"passed": False, "why": "hangs in a scan", "date": "2026-11-30"}
    assert write(tmp_path, ROW, recording=probe) == path
    found = record.read(path, DEVICE, VERSIONS)
    assert found is not None and found.rows == {(ROW.operation, ROW.key): ROW} and found.date == "2026-12-01"
    assert found.probes == {"recording": Probe(False, "hangs in a scan", "2026-11-30")} and not found.passed("recording")
    assert "gfx942-amd-instinct-mi300x-304cu-" in path.name
    assert ROW.fastest == "aiter" and replace(ROW, us_of=(("triton", 10.0),)).fastest is None


def test_a_row_takes_the_place_of_one_with_its_key(tmp_path, path):
    write(tmp_path, ROW, replace(ROW, operation="update_cache"), replace(ROW, us=5.0))
    found = record.read(path, DEVICE, VERSIONS)
    assert found is not None and sorted(row.us for row in found.rows.values()) == [5.0, 10.0]


def test_records_are_values(tmp_path, path):
    write(tmp_path, ROW)
    first, again = (record.read(path, DEVICE, VERSIONS) for _ in range(2))
    write(tmp_path, replace(ROW, us=9.0))
    other = record.read(path, DEVICE, VERSIONS)
    assert first == again != other and hash(first) == hash(again)
    targets = {Target("rocm", "gfx942", 304, 64, Settings(), each) for each in (first, again, other, None)}
    assert len(targets) == 3


@pytest.mark.parametrize("name", ["jax", "triton", "purepage", "schema", "compute_units"])
def test_other_versions_another_schema_or_device_are_ignored_without_a_warning(tmp_path, path, name):
    write(tmp_path, ROW)
    contents = json.loads(path.read_text())
    place = contents if name == "schema" else contents["device"] if name == "compute_units" else contents["versions"]
    place[name] = 99 if name in ("schema", "compute_units") else "0.0.1"
    path.write_text(json.dumps(contents))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert record.read(path, DEVICE, VERSIONS) is None
    (said,) = record.differences(contents, DEVICE, VERSIONS)
    assert name in said and "here" in said


BROKEN = {
    "no JSON": b"{",
    "no text": b"\xff\xfe\x00",
    "empty": b"",
    "a list": b"[]",
    "no versions": b'{"schema": 1, "device": {}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_ignored_with_a_warning_that_names_it(path, text):
    path.write_bytes(text)
    with pytest.warns(RuntimeWarning, match=f"{path}.*ignored"):
        assert record.read(path, DEVICE, VERSIONS) is None


@pytest.mark.parametrize(
    "damage", [{"probes": 3}, {"rows": [{}]}, {"rows": "x"}, {"probes": {"recording": {"passed": "yes", "why": "", "date": ""}}}]
)
def test_a_part_of_another_form_is_a_broken_file(tmp_path, path, damage):
    write(tmp_path, ROW)
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.warns(RuntimeWarning, match="ignored"):
        assert record.read(path, DEVICE, VERSIONS) is None
    with pytest.warns(RuntimeWarning, match="ignored"):
        write(tmp_path, ROW)  # begins anew
    assert record.read(path, DEVICE, VERSIONS) is not None


def test_a_folder_in_the_place_of_the_file_is_ignored_with_a_warning(path):
    path.mkdir()
    with pytest.warns(RuntimeWarning, match=f"{path}.*IsADirectoryError"):
        assert record.read(path, DEVICE, VERSIONS) is None


def test_a_file_is_read_once_in_a_process_and_warned_of_once(path):
    path.write_text("{")
    with pytest.warns(RuntimeWarning, match="ignored") as told:
        assert record.read_once(path.parent, DEVICE, VERSIONS) is None and record.read_once(path.parent, DEVICE, VERSIONS) is None
    assert len(told) == 1


WRITER = """
import sys
from pathlib import Path
from dataclasses import replace
sys.path.insert(0, {tests!r})
from purepage.functional import record
from test_record import DEVICE, ROW, VERSIONS
for i in range(40):
    row = replace(ROW, key=record.sorted_key({{"writer": sys.argv[1], "row": i}}))
    record.update(Path(sys.argv[2]), DEVICE, VERSIONS, lambda contents: record.add_row(contents, row))
"""


def test_two_writers_lose_nothing_and_a_reader_never_finds_half_a_file(tmp_path, path):
    program = WRITER.format(tests=str(ROOT / "tests/functional"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src", ROOT / "tests")))}
    writers = [subprocess.Popen([sys.executable, "-c", program, str(i), str(tmp_path)], env=environment) for i in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(writer.poll() is None for writer in writers):
            record.read(path, DEVICE, VERSIONS)
        found = record.read(path, DEVICE, VERSIONS)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert found is not None and len(found.rows) == 80
    assert {each.suffix for each in tmp_path.iterdir()} == {".json", ".lock"}


def test_forgetting_deletes_the_device_of_any_version_and_no_other(tmp_path, path):
    write(tmp_path, ROW)
    others = [record.path_of(tmp_path, DEVICE, (("jax", "9"),)), record.path_of(tmp_path, replace(DEVICE, compute_units=38), VERSIONS)]
    for other in others:
        other.write_text("{}")
    assert set(record.forget(tmp_path, DEVICE)) == {path, others[0]}
    assert list(tmp_path.iterdir()) == [others[1]] and record.forget(tmp_path, DEVICE) == ()


@pytest.mark.parametrize(
    "environment, folder",
    [
        ({"PUREPAGE_CACHE_DIR": "/data/records", "XDG_CACHE_HOME": "/xdg"}, "/data/records"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/purepage"),
        ({"HOME": "/home/me"}, "/home/me/.cache/purepage"),
        ({"PUREPAGE_CACHE_DIR": "~/records", "HOME": "/home/me"}, "/home/me/records"),
    ],
)
def test_the_folder_follows_the_setting_then_xdg_then_the_home(monkeypatch, environment, folder):
    for name in ("PUREPAGE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder(settings_of(environment)) == Path(folder)


def test_versions_are_those_of_the_packages_that_a_record_depends_on():
    versions = dict(record.versions_here(jax.local_devices()[0]))
    assert set(versions) == {"purepage", "jax", "jaxlib", "triton", "torch", "aiter", "runtime", "driver"}
    assert versions["purepage"] == pp.__version__ and versions["jax"] == jax.__version__


def test_a_probe_is_part_of_the_target_of_the_next_process(tmp_path):
    program = """
        import sys
        from purepage.functional import record
        from purepage.functional.target import current_target
        found = current_target().record
        print(found and sorted(found.probes), found and found.passed("recording"))
        if len(sys.argv) > 1:
            print(record.described(current_target()))
            record.note_probe(current_target(), "recording", True)
            record.note_probe(current_target(), "ordinals", False, "two devices swap")
            print(current_target().record is found)
    """
    environment = {"PUREPAGE_CACHE_DIR": str(tmp_path / "records")}
    first = run_python(program, "note", environment=environment).splitlines()
    assert first[0] == "None None" and "no record: there is no" in first[1] and first[2] == "True"
    assert run_python(program, environment=environment) == "['ordinals', 'recording'] True\n"


def here(folder):
    """The current target with a record folder, read anew."""
    record.read_once.cache_clear()
    target._device_target.cache_clear()
    return target_of(jax.local_devices()[0], Settings(cache_dir=str(folder)))


def test_a_line_says_which_record_there_is_or_why_it_is_ignored(tmp_path):
    local = here(tmp_path)
    assert record.described(local).startswith("no record: there is no")
    path = record.note_probe(local, "recording", False, "hangs")
    assert "was written after this process began" in record.described(local)
    assert "1 tuned" not in record.described(here(tmp_path)) and "probe recording failed: hangs" in record.described(here(tmp_path))
    contents = json.loads(path.read_text())
    path.unlink()
    contents["versions"]["jax"] = "0.0.1"
    path.with_name(path.name.replace(path.stem[-12:], "0" * 12)).write_text(json.dumps(contents))
    assert f"is ignored: jax 0.0.1, here {jax.__version__}" in record.described(here(tmp_path))
    assert here(tmp_path).record is None
    with using_settings(cache_dir=str(tmp_path)):
        assert "no record" not in str(pp.explain(jnp.sin, 1.0)), "a CPU without a record is not told of one"
        assert "gfx942 is not this machine's device" in str(pp.explain(jnp.sin, 1.0, arch="gfx942"))


def test_a_probe_of_a_device_that_is_not_here_is_refused(tmp_path):
    with pytest.raises(ValueError, match="this machine's device"):
        record.note_probe(Target("rocm", "gfx942", 304, 64, Settings(cache_dir=str(tmp_path))), "recording", True)
    with pytest.raises(TypeError, match="passed is 1"):
        record.note_probe(current_target(), "recording", 1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "us_of, first", [({"triton": 10.0, "aiter": 9.0}, "aiter"), ({"triton": 8.0, "aiter": 9.0}, "triton"), ({"triton": 8.0}, "triton")]
)
def test_aiter_comes_first_where_the_record_measured_it_faster_and_only_for_such_calls(us_of, first):
    from purepage.bridges.triton import shape_key_of

    batch = random_batch(1, dtype=jnp.bfloat16)
    call = paged_attention_call(batch.query, batch.cache(), batch.metadata, layer=0)
    key = shape_key_of("paged_attention", call)
    row = replace(ROW, key=key, configurations=(), us_of=tuple(us_of.items()))
    found = Record("1", Path("r.json"), "2026-12-01", {}, {("paged_attention", key): row})
    measured = Target("rocm", "gfx942", 304, 64, record=found)
    order = dispatch.preferred(measured, "paged_attention", call)
    assert order.names[0] == first and set(order.names) == set(dispatch.IMPLEMENTATIONS)
    assert ("9.0 us" in order.why) is ("aiter" in us_of)
    windowed = paged_attention_call(batch.query, batch.cache(), batch.metadata, layer=0, sliding_window=5)
    assert dispatch.preferred(measured, "paged_attention", windowed).names[0] == "triton"
    assert dispatch.preferred(replace(measured, record=None), "paged_attention", call).names[0] == "triton"
