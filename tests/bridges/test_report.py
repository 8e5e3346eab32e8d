"""The report: every way in which a child can end is a row, the file is valid whenever the process ends, and nothing private is in it."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import IMPORTABLE, run, run_python

from purepage.bridges import choice, measure, report
from purepage.bridges.report import children, facts, measurements, probes
from purepage.bridges.report.children import CRASHED, ENDED, OUT_OF_TIME, QUIET, RAISED, Ending, Limits, run_child
from purepage.bridges.report.missing import missing
from purepage.functional.target import current_settings, named_target, using_settings

SHORT = Limits(total_s=20, quiet_s=20)


def child(program, limits=SHORT, **more):
    """How a child that runs a program's text ends."""
    return run_child("a task", {}, limits, command=[sys.executable, "-c", textwrap.dedent(program)], **more)


# --- children -----------------------------------------------------------------------------------------------------------------------------


def test_a_child_that_crashes_leaves_its_rows_the_signal_and_its_last_words():
    ended = child(
        """
        import os, signal, sys
        print('{"case": 1}', flush=True)
        print('{"begin": "the second"}', flush=True)
        print("HSA_STATUS_ERROR: out of luck", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
        """
    )
    assert (ended.status, ended.detail, ended.unfinished) == (CRASHED, "SIGSEGV", "the second")
    assert ended.rows == [{"case": 1}] and ended.why == "SIGSEGV: HSA_STATUS_ERROR: out of luck"


def test_a_crash_says_at_which_line_of_python_it_was(tmp_path):
    program = textwrap.dedent(
        """
        import ctypes, sys
        from purepage.bridges.report import __main__ as entry
        def read_null(stream, options):
            stream.begin("address 0")
            ctypes.string_at(0)
        entry.TASKS = {"crash": read_null}
        entry.main(["crash", "{}", sys.argv[1]])
        """
    )
    script = tmp_path / "crash.py"
    script.write_text(program)
    trace = tmp_path / "trace"
    done = run([sys.executable, str(script), str(trace)])
    assert done.returncode == -signal.SIGSEGV and '{"begin": "address 0"}' in done.stdout
    frames = children._frames(trace)
    assert any(f"{script}:6 in read_null" in frame for frame in frames), frames


def test_the_stack_of_a_child_that_crashes_is_in_its_row(tmp_path):
    """The real command of a child, in a process where enabling the fault handler is followed by a crash."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import ctypes, faulthandler
            enable = faulthandler.enable
            def enable_and_crash(file):
                enable(file)
                ctypes.string_at(0)
            faulthandler.enable = enable_and_crash
            """
        )
    )
    path = os.pathsep.join([str(tmp_path), *map(str, IMPORTABLE)])
    ended = run_child("facts", {}, SHORT, environment={**os.environ, "PYTHONPATH": path})
    assert (ended.status, ended.detail) == (CRASHED, "SIGSEGV"), ended
    assert any("sitecustomize.py:6 in enable_and_crash" in frame for frame in ended.where), ended.where


def test_a_task_that_there_is_not_is_an_error_of_the_child():
    ended = run_child("no such task", {}, SHORT, environment={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, IMPORTABLE))})
    assert (ended.status, ended.said) == (RAISED, "KeyError: 'no such task'")


def test_a_child_is_killed_at_its_limit_however_much_it_says():
    program = """
        import time
        while True:
            print('{"still": "here"}', flush=True)
            time.sleep(0.05)
    """
    ended = child(program, Limits(total_s=1.0, quiet_s=20))
    assert (ended.status, ended.detail) == (OUT_OF_TIME, "killed after 1 s")
    assert ended.rows and ended.seconds < 10


@pytest.mark.parametrize("how", ["import time; time.sleep(60)", "import os, time; os.close(1); time.sleep(60)"], ids=["open", "closed"])
def test_a_child_that_hangs_quietly_is_killed(how):
    ended = child(how, Limits(total_s=30, quiet_s=0.7))
    assert (ended.status, ended.detail) == (QUIET, "killed after 0.7 s without a line")
    assert ended.seconds < 10


def test_a_child_that_raises_is_told_from_one_that_crashes():
    ended = child("print('{\"case\": 1}'); raise ValueError('no such device')")
    assert (ended.status, ended.said) == (RAISED, "ValueError: no such device")
    assert ended.rows == [{"case": 1}]


@pytest.mark.parametrize("rubbish", ["b'no json'", "b'[1, 2]'", "b'3'", "b'{'", "b'\\xff\\xfe'", "b'x' * 3_000_000"])
def test_rubbish_between_the_rows_is_counted_and_nothing_else(rubbish):
    ended = child(f"""import sys; sys.stdout.buffer.write({rubbish} + b'\\n{{"case": 2}}\\n')""")
    assert ended.status == ENDED and ended.rows == [{"case": 2}] and ended.rubbish >= 1


def test_a_child_whose_own_child_holds_the_pipe_is_not_waited_for():
    ended = child(
        """
        import subprocess, sys
        print('{"case": 1}', flush=True)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        """
    )
    assert ended.status == ENDED and ended.rows == [{"case": 1}] and ended.seconds < 10


def test_a_child_that_can_not_be_started_is_a_row():
    ended = run_child("a task", {}, SHORT, command=["/no/such/program"])
    assert ended.status == RAISED and "FileNotFoundError" in ended.detail


def test_what_interrupts_the_caller_kills_the_child():
    seen = []

    def interrupt(row):
        seen.append(row["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child("import os, time; print('{\"pid\": %d}' % os.getpid(), flush=True); time.sleep(60)", on_row=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def test_what_a_library_prints_in_a_child_is_no_row():
    out = run_python(
        """
        import os
        from purepage.bridges.report.children import Stream
        stream = Stream()
        print("from Python")
        os.system("echo from a program")
        stream.row({"case": float})
        """
    )
    assert json.loads(out) == {"case": "<class 'float'>"}


# --- facts --------------------------------------------------------------------------------------------------------------------------------


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def node(number, **properties):
    folder = f"sys/class/kfd/kfd/topology/nodes/{number}"
    banks = properties.pop("banks", {})
    files = {f"{folder}/properties": "\n".join(f"{name} {value}" for name, value in properties.items()) + "\n"}
    files[f"{folder}/name"] = properties.get("marketing", "") + "\n"
    for i, (heap, size) in enumerate(banks.items()):
        files[f"{folder}/mem_banks/{i}/properties"] = f"heap_type {heap}\nsize_in_bytes {size}\nflags 0\n"
    return files


CPU_NODE = node(0, cpu_cores_count=96, simd_count=0, gfx_target_version=0, banks={0: 1 << 40})


def mi300x(root):
    gpu = node(
        1,
        simd_count=1216,
        simd_per_cu=4,
        max_waves_per_simd=8,
        wave_front_size=64,
        lds_size_in_kb=64,
        num_xcc=8,
        gfx_target_version=90402,
        vendor_id=4098,
        device_id=29857,
        domain=0,
        location_id=0x0500,
        max_engine_clk_fcompute=2100,
        capability=0x80000 | 0x280,
        unique_id=1234567890123,
        fw_version=163,
        banks={1: 192 << 30},
    )
    card = "sys/class/drm/card1/device"
    drm = {
        f"{card}/uevent": "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:05:00.0\n",
        f"{card}/current_compute_partition": "SPX\n",
        f"{card}/current_memory_partition": "NPS1\n",
        f"{card}/mem_info_vram_total": str(192 << 30),
        f"{card}/product_name": "AMD Instinct MI300X OAM\n",
        f"{card}/unique_id": "serial-0001\n",
        "sys/class/drm/card1-DP-1/device/uevent": "PCI_SLOT_NAME=0000:05:00.0\n",
        "sys/module/amdgpu/version": "6.16.6\n",
        "dev/kfd": "",
        "opt/rocm/.info/version": "7.2.1-81\n",
        "opt/rocm-7.2.1/.info/version": "7.2.1-81\n",
        "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
        "proc/meminfo": "MemTotal:       2113566720 kB\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654\n\nprocessor\t: 1\nmodel name\t: AMD EPYC 9654\n",
    }
    return tree(root, {**CPU_NODE, **gpu, **drm})


def test_the_facts_of_an_mi300x(tmp_path):
    found = facts.machine(mi300x(tmp_path))
    (gpu,) = found["gpus"]
    expected = {
        "gfx": "gfx942",
        "compute_units": 304,
        "wave_size": 64,
        "lds_bytes": 65536,
        "xccs": 8,
        "memory_bytes": 192 << 30,
        "vram_bytes": 192 << 30,
        "compute_partition": "SPX",
        "memory_partition": "NPS1",
        "product": "AMD Instinct MI300X OAM",
        "pci": "0000:05:00.0",
        "features": ["SRAM ECC"],
    }
    assert {name: gpu[name] for name in expected} == expected
    assert found["driver"]["amdgpu_version"] == "6.16.6" and found["driver"]["kfd"] and found["driver"]["kfd_opens"]
    assert found["rocm"] == {"/opt/rocm": "7.2.1-81", "/opt/rocm-7.2.1": "7.2.1-81"}
    assert (found["system"]["os"], found["system"]["cores"], found["system"]["cpu"]) == ("Ubuntu 24.04.3 LTS", 2, "AMD EPYC 9654")
    assert "serial-0001" not in json.dumps(found) and "1234567890123" not in json.dumps(found), "serial numbers stay where they are"


def test_the_facts_of_an_rx_7900_and_of_its_partitionless_card(tmp_path):
    gpu = node(
        1,
        simd_count=192,
        simd_per_cu=2,
        wave_front_size=32,
        lds_size_in_kb=64,
        gfx_target_version=110000,
        location_id=0x0300,
        banks={2: 24 << 30},
    )
    found = facts.machine(tree(tmp_path, {**CPU_NODE, **gpu}))
    (card,) = found["gpus"]
    assert (card["gfx"], card["compute_units"], card["wave_size"], card["memory_bytes"]) == ("gfx1100", 96, 32, 24 << 30)
    assert "compute_partition" not in card and found["driver"]["kfd"] is False and found["rocm"] == {}


@pytest.mark.parametrize(
    ("version", "name"),
    [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110001, "gfx1101"), (120001, "gfx1201"), (110501, "gfx1151")],
)
def test_a_target_version_of_the_driver_is_an_architecture(version, name):
    assert facts.gfx_of_target_version(version) == name


@pytest.mark.parametrize("damage", ["", "simd_count\n", "simd_count many\nsimd_count 8 9\n", "simd_count 0x10\n"])
def test_properties_that_can_not_be_read_are_left_out(tmp_path, damage):
    root = tree(tmp_path, {"sys/class/kfd/kfd/topology/nodes/0/properties": damage})
    assert list(facts.gpus(root)) == []


def test_the_libraries_of_a_process_are_those_of_gpus_one_for_each_inode():
    def line(path, inode):
        return f"7f00-7f01 r-xp 00000000 08:01 {inode} {path}\n"

    maps = [
        line("/opt/rocm/lib/libamdhip64.so.7.2.1", 11),
        line("/opt/rocm/lib/libamdhip64.so.7.2.1", 11),
        line("/venv/torch/lib/libamdhip64.so", 12),
        line("/opt/rocm/lib/libhsa-runtime64.so.1", 13),
        line("/opt/rocm/lib/librocprofiler-sdk.so.1", 14),
        line("/usr/lib/x86_64-linux-gnu/libcuda.so.1", 15),
        line("/usr/lib/libc.so.6", 16),
        line("/data/librocket.txt", 17),
        "7f00-7f01 rw-p 00000000 00:00 0 \n",
    ]
    found = facts.libraries(maps)
    assert [entry["inode"] for entry in found] == [11, 13, 14, 15, 12]
    assert found[0] == {"name": "libamdhip64.so.7.2.1", "path": "/opt/rocm/lib/libamdhip64.so.7.2.1", "inode": 11}


def test_home_folders_are_a_tilde_and_neither_user_nor_host_has_a_name():
    value = {
        "/srv/ann/x": ["/srv/ann", "a:/srv/ann/lib:/srv/anna/lib", 3, 2.5, None, True],
        "b": {"c": "File /home/bob/v/x.py", "e": "/data/ann/v/lib.so: not found on node-17, nor node-170"},
        "d": float("nan"),
        "f": ["/opt/annex/ann.so", "/scratch/ann"],
    }
    assert facts.scrubbed(value, facts.hidden(["/srv/ann/"], "node-17")) == {
        "~/x": ["~", "a:~/lib:/srv/anna/lib", 3, 2.5, None, True],
        "b": {"c": "File ~/v/x.py", "e": "/data/(user)/v/lib.so: not found on (host), nor node-170"},
        "d": "nan",
        "f": ["/opt/annex/ann.so", "/scratch/(user)"],
    }


def test_root_and_localhost_are_no_names():
    text = "/root/x /usr/root/y localhost"
    assert facts.without(text, facts.hidden(["/root"], "localhost")) == "~/x /usr/root/y localhost"


@pytest.mark.parametrize(("status", "address"), [(0, "0000:c3:00.0"), (101, None)])
def test_the_pci_address_is_asked_of_the_runtime_that_is_mapped(status, address, monkeypatch):
    def ask(text, size, ordinal):
        text.value = f"0000:C{ordinal}:00.0".encode()
        return status

    opened = []
    monkeypatch.setattr(facts.ctypes, "CDLL", lambda path: opened.append(path) or SimpleNamespace(hipDeviceGetPCIBusId=ask))
    mapped = [{"name": "libhsa-runtime64.so.1", "path": "/r/hsa"}, {"name": "libamdhip64.so.7", "path": "/r/hip"}]
    assert facts.pci_of_runtime(3, mapped) == address
    assert opened == ["/r/hip"] and facts.pci_of_runtime(3, mapped[:1]) is None


def test_only_the_variables_of_the_list_are_shown():
    given = {
        "JAX_PLATFORMS": "rocm",
        "HSA_XNACK": "1",
        "LD_LIBRARY_PATH": "/x",
        "AWS_SECRET_ACCESS_KEY": "s",
        "USER": "ann",
        "MY_JAX_KEY": "s",
    }
    assert facts.shown_environment(given) == {"HSA_XNACK": "1", "JAX_PLATFORMS": "rocm", "LD_LIBRARY_PATH": "/x"}


def test_the_distributions_of_this_process_are_those_that_are_installed():
    found = facts.distributions()
    assert found["jax"] == [f"jax {jax.__version__}"]
    assert facts.packages()["jax"] == jax.__version__


# --- what is missing ----------------------------------------------------------------------------------------------------------------------

ROCM_WHEELS = {"jax": "0.10.2", "jax-rocm7-plugin": "0.10.2", "jax-rocm7-pjrt": "0.10.2"}
HEALTHY = {"driver": {"amdgpu": True, "kfd": True, "kfd_opens": True}, "rocm": {"/opt/rocm": "7.2.1-81"}}
BOTH = {"torch": ["torch 2.9.0"], "triton": ["pytorch-triton-rocm 3.5.0"]}


def bare(**driver):
    return {"driver": {"amdgpu": False, "kfd": False, "kfd_opens": False, **driver}, "rocm": {}}


def test_a_machine_with_only_the_rocm_wheels_lacks_each_thing_by_name():
    lines = missing(bare(), ROCM_WHEELS, {"jax": ["jax 0.10.2"]}, "cpu")
    assert [line.partition(":")[0] for line in lines] == ["no GPU", "no driver", "no ROCm", "no torch", "no Triton"]
    assert "jax-rocm7-plugin 0.10.2 found none" in lines[0] and "/dev/kfd" in lines[1] and "--device=/dev/kfd" in lines[1]
    assert "built against the system's ROCm" in lines[3] and "purepage[triton]" not in lines[4], "that extra would bring CUDA's torch"


def test_nothing_is_missing_where_everything_is_there():
    assert missing(HEALTHY, ROCM_WHEELS, BOTH, "rocm", {"version": "2.9.0+rocm7.2", "hip": "7.2.1", "cuda": None}) == []


@pytest.mark.parametrize(
    ("changes", "first", "said"),
    [
        (
            {"machine": {**HEALTHY, "driver": {"amdgpu": True, "kfd": True, "kfd_opens": False}}},
            "no access to the driver",
            "render and video",
        ),
        ({"machine": {**HEALTHY, "rocm": {"/opt/rocm": "7.2.0-43"}}}, "no ROCm 7.2.1", "XLA_FLAGS=--xla_gpu_enable_command_buffer="),
        ({"machine": {**HEALTHY, "rocm": {"/opt/rocm": "7.10.0"}}}, None, ""),
        ({"torch": {"version": "2.13.0", "hip": None, "cuda": "13.0"}}, "no torch for ROCm", "built for CUDA 13.0"),
        ({"torch": {"version": "2.13.0+cpu", "hip": None, "cuda": None}}, "no torch for ROCm", "built for the CPU"),
        ({"distributions": {**BOTH, "triton": ["pytorch-triton-rocm 3.5.0", "triton 3.9.0"]}}, "not one Triton", "triton 3.9.0"),
        ({"obstacle": "needs a C++ compiler"}, "no native bridge", "C++ compiler"),
        ({"platform": None}, "no device", "can't start"),
        ({"packages": {"jax": "0.10.2"}, "platform": "cpu", "machine": bare()}, "no GPU", "purepage[rocm]"),
    ],
)
def test_one_thing_that_is_wrong_is_one_line_with_its_remedy(changes, first, said):
    given = {"machine": HEALTHY, "packages": ROCM_WHEELS, "distributions": BOTH, "platform": "rocm", **changes}
    lines = missing(**given)
    assert [line.partition(":")[0] for line in lines] == ([first] if first else [])
    assert said in "".join(lines)


# --- the document -------------------------------------------------------------------------------------------------------------------------

KEYS = {
    *(
        "schema",
        "purepage",
        "finished",
        "interrupted",
        "seconds",
        "machine",
        "packages",
        "distributions",
        "environment",
        "devices",
        "missing",
    ),
    *("children", "probes", "cases", "refusals", "kernels", "speeds", "summary"),
}


def test_the_keys_of_schema_1_are_these_and_documented(tmp_path):
    document, _, _ = reported(tmp_path, lambda *given, **more: Ending(given[0]), parts=())
    assert report.SCHEMA == document["schema"] == 1
    assert set(document) == KEYS
    assert set(re.findall(r"\b\w+\b", report.__doc__)) >= KEYS


def reported(tmp_path, run, **more):
    """(The report that stand-ins for children make, the exit status, the printed lines)."""
    lines, path = [], tmp_path / "report.json"
    status = report.write_report(path, run=run, write=lines.append, **more)
    assert [name.name for name in tmp_path.iterdir()] == ["report.json"], "no partial file is left"
    return json.loads(path.read_text()), status, lines


GPU_FACTS = [
    {"jax": {"id": 0, "ordinal": 0, "platform": "gpu", "kind": "AMD Instinct MI300X", "compute_units": 304}},
    {"libraries": {"before_torch": []}},
    {"torch": {"version": "2.9.0+rocm7.2", "hip": "7.2.1", "cuda": None, "sees_gpu": True}},
    {"libraries": {"after_torch": []}},
    {"target": {"platform": "rocm", "arch": "gfx942", "implementations": ["triton", "xla"]}},
]


def case(name, implementation, verdict="passed", detail=""):
    return {"case": name, "implementation": implementation, "verdict": verdict, "detail": detail, "error": 0.0, "seconds": 0.1}


class Machine:
    """Stands in for the children of a machine with a GPU; records what was asked of them."""

    def __init__(self, **changes):
        self.asked, self.changes = [], changes

    def __call__(self, task, options, limits, **more):
        self.asked.append((task, dict(options), more))
        if task in self.changes:
            return self.changes[task](options)
        rows = {
            "facts": GPU_FACTS,
            "probe": [{"found": {"bridge": "native"}}, {"verdict": "passed", "detail": ""}],
            "cases": [case(name, options.get("implementation")) for name in "abc" if name not in options.get("after", ())],
            "kernels": [{"shape": "decode", "kernel": "decode", "vgprs": 100, "vgpr_spills": 0, "error": None, "same": True}],
            "speeds": [
                {"shape": "copy", "us": 100.0, "bytes_per_s": 4e12},
                {"shape": "decode", "implementation": "triton", "us": 50.0, "bytes_per_s": 3e12, "of_copy": 0.75},
            ],
        }
        return Ending(task, rows=list(rows[task]))


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(facts, "distributions", lambda: BOTH)


def test_a_healthy_gpu_gets_every_part_and_exit_status_0(tmp_path, with_triton):
    machine = Machine()
    document, status, lines = reported(tmp_path, machine)
    assert status == 0 and document["finished"]
    assert [task for task, _, _ in machine.asked] == ["facts", *["probe"] * len(probes.PROBES), "cases", "cases", "kernels", "speeds"]
    assert {row["verdict"] for row in document["probes"]} == {"passed"}
    assert len(document["cases"]) == 6 and document["kernels"] and len(document["speeds"]) == 2
    assert document["summary"] == lines[-len(document["summary"]) - 1 : -1]
    assert (
        "speed: decode, triton: 50 us, 3000.0 GB/s, 75% of the copy" in lines and "machine: AMD Instinct MI300X, 304 compute units" in lines
    )


def test_a_probe_that_crashes_is_a_row_and_the_others_go_on(tmp_path):
    def crash(options):
        if options["name"] != "five launches recorded":
            return Ending("probe", rows=[{"verdict": "passed", "detail": ""}])
        return Ending("probe", CRASHED, "SIGSEGV", "Memory access fault by GPU node-1", rows=[{"found": {"bridge": "callback"}}])

    document, status, lines = reported(tmp_path, Machine(probe=crash), parts=("facts", "probes"))
    (bad,) = (row for row in document["probes"] if row["verdict"] != "passed")
    assert (bad["name"], bad["verdict"], bad["found"]) == ("five launches recorded", CRASHED, [{"bridge": "callback"}])
    assert status == 1 and "  crashed five launches recorded: SIGSEGV: Memory access fault by GPU node-1" in lines


@pytest.mark.parametrize("rows", [[], [{"found": 1}]], ids=["nothing", "no verdict"])
def test_a_probe_without_a_verdict_has_failed(tmp_path, rows):
    document, status, _ = reported(tmp_path, Machine(probe=lambda options: Ending("probe", rows=rows)), parts=("facts", "probes"))
    assert {row["verdict"] for row in document["probes"]} == {"failed"} and status == 1


def test_a_case_that_crashes_is_blamed_and_the_next_child_begins_after_it(tmp_path):
    def crash(options):
        name, after = options["implementation"], options["after"]
        if name == "xla" or "b" in after:
            return Ending("cases", rows=[case(each, name) for each in "abc" if each not in after])
        return Ending("cases", CRASHED, "SIGABRT", unfinished="b", rows=[case("a", name)])

    machine = Machine(cases=crash)
    document, status, _ = reported(tmp_path, machine, parts=("facts", "cases"))
    triton = [(row["case"], row["verdict"]) for row in document["cases"] if row["implementation"] == "triton"]
    assert triton == [("a", "passed"), ("b", CRASHED), ("c", "passed")] and status == 1
    assert [options["after"] for task, options, _ in machine.asked if task == "cases"] == [[], ["a", "b"], []]


def test_children_that_always_crash_are_given_up(tmp_path):
    def crash(options):
        return Ending("cases", CRASHED, "SIGSEGV", unfinished=f"case {len(options['after'])}")

    document, _, _ = reported(tmp_path, Machine(cases=crash), parts=("facts", "cases"), implementations=["triton"])
    assert [row["case"] for row in document["cases"]] == [f"case {i}" for i in range(report._RESTARTS)]


def test_where_jax_can_not_start_its_devices_plain_jax_is_checked_on_the_cpu(tmp_path):
    machine = Machine(facts=lambda options: Ending("facts", QUIET, "killed after 240 s without a line", unfinished="JAX's devices"))
    document, status, lines = reported(tmp_path, machine)
    assert [(task, more.get("environment", {}).get("JAX_PLATFORMS")) for task, _, more in machine.asked] == [
        ("facts", None),
        ("cases", "cpu"),
    ]
    assert {row["detail"] for row in document["probes"]} == {"JAX can't start its devices: killed after 240 s without a line"}
    assert (
        status == 1
        and any("no device" in line for line in document["missing"])
        and any(line.startswith("child facts quiet") for line in lines)
    )


def test_refusals_fold_into_one_entry_for_each_reason(tmp_path):
    def refuse(options):
        name = options["implementation"]
        rows = [
            case("a", name),
            case("b", name, "refused", "no Triton"),
            case("c", name, "refused", "no Triton"),
            case("d", name, "refused", "fp8"),
        ]
        return Ending("cases", rows=rows)

    document, status, _ = reported(tmp_path, Machine(cases=refuse), parts=("facts", "cases"), implementations=["triton"])
    assert [row["case"] for row in document["cases"]] == ["a"] and status == 0
    assert document["refusals"] == [
        {"implementation": "triton", "reason": "no Triton", "count": 2, "first": "b"},
        {"implementation": "triton", "reason": "fp8", "count": 1, "first": "d"},
    ]


def test_an_interrupt_leaves_what_was_found_and_a_summary(tmp_path):
    def interrupt(options):
        raise KeyboardInterrupt

    document, status, lines = reported(tmp_path, Machine(cases=interrupt))
    assert status == 130 and document["interrupted"] and not document["finished"]
    assert (
        document["probes"] and document["devices"]["target"]["arch"] == "gfx942" and "interrupted" in lines[-len(document["summary"]) - 1]
    )


def test_a_part_that_fails_in_the_report_itself_is_a_row(tmp_path):
    def fail(options):
        raise OSError("no space left on device")

    document, status, _ = reported(tmp_path, Machine(speeds=fail))
    assert document["finished"] and status == 1 and document["cases"]
    assert document["children"][-1]["detail"] == "OSError: no space left on device"


def test_what_a_child_says_has_no_home_folder(tmp_path):
    ended = Ending("speeds", RAISED, "exit status 1", f"{os.path.expanduser('~')}/x.so: not found", rows=[{"shape": "/home/ann/y"}])
    document, _, lines = reported(tmp_path, Machine(speeds=lambda options: ended))
    assert document["children"][-1]["said"] == "~/x.so: not found" and document["speeds"] == [{"shape": "~/y"}]
    assert any("~/x.so" in line for line in lines)


def test_a_file_that_can_not_be_written_is_said_at_once(tmp_path):
    done = run([sys.executable, "-m", "purepage.selfcheck", "--report", str(tmp_path / "no" / "folder.json")])
    assert done.returncode == 2 and "the report can't be written" in done.stderr


def test_a_report_that_is_terminated_is_a_valid_file(tmp_path):
    path = tmp_path / "r.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, IMPORTABLE))}
    command = [sys.executable, "-m", "purepage.selfcheck", "--report", str(path), "xla"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or not json.loads(path.read_text())["machine"]:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.terminate()
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    document = json.loads(path.read_text())
    assert process.returncode == 130 and document["interrupted"] and "written to" in out


def test_the_whole_report_runs_to_its_end_on_a_cpu(tmp_path):
    path = tmp_path / "r.json"
    done = run(
        [sys.executable, "-m", "purepage.selfcheck", "--report", str(path), "xla", "--cases", "write, packed", "--quiet-s", "100"],
        environment={"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "LD_LIBRARY_PATH": os.path.expanduser("~/lib")},
    )
    document = json.loads(path.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert document["finished"] and [child["status"] for child in document["children"]] == [ENDED] * 3
    assert [(row["case"], row["verdict"], row["error"]) for row in document["cases"]] == [("write, packed", "passed", 0.0)]
    assert {(row["verdict"], row["detail"]) for row in document["probes"]} == {("skipped", "no GPU: JAX computes on the CPU")}
    assert [row["shape"] for row in document["speeds"]] == ["copy", *(shape.name for shape in measurements.CPU_SHAPES)]
    assert all(row["us"] > 0 for row in document["speeds"]) and document["devices"]["jax"][0]["platform"] == "cpu"
    assert document["environment"]["LD_LIBRARY_PATH"] == "~/lib" and os.path.expanduser("~") not in path.read_text()
    assert any(line.startswith("no GPU") for line in document["missing"])


# --- probes and measurements --------------------------------------------------------------------------------------------------------------


def test_probes_are_skipped_on_a_cpu():
    for probe in probes.PROBES:
        with pytest.raises(probes.Skipped, match="no GPU"):
            list(probes.run(probe))


def test_a_probe_whose_package_is_absent_is_skipped():
    with pytest.raises(probes.Skipped, match="no no_such_package and no other_absent_one"):
        probes.need_packages(("no_such_package", "jax", "other_absent_one"))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(
        probes, "STEP", {"kind": "decode", "num_seqs": 2, "max_seq_len": 40, "head_size": 32, "num_heads": 2, "num_kv_heads": 1}
    )


@pytest.mark.parametrize("in_scan", [False, True], ids=["unrolled", "scan"])
def test_the_steps_that_a_probe_takes_are_right_with_plain_jax(in_scan, small):
    assert probes.steps(2, in_scan, None, "xla")["largest_difference"] == 0


@pytest.mark.parametrize("kept", ["cache", "attention"])
def test_a_launch_that_is_replayed_with_old_data_is_found(kept, small, monkeypatch):
    honest, first = probes._writes, []

    def stale(*given):
        step = honest(*given)

        def call(*arrays):
            cache, outs = step(*arrays)
            first.append((jax.tree.map(jnp.copy, cache), outs))
            return (jax.tree.map(jnp.copy, first[0][0]), outs) if kept == "cache" else (cache, first[0][1])

        return call

    monkeypatch.setattr(probes, "_writes", stale)
    with pytest.raises((RuntimeError, AssertionError), match="step 1"):
        probes.steps(1, False, None, "xla")


def test_a_step_is_timed_in_steady_state_and_leaves_the_callers_arrays():
    state = jnp.arange(4.0)
    calls = []

    def step(x, y):
        calls.append(1)
        return x * y

    timed = measure.time_steps(step, state, jnp.float32(1.5), chain=3, calls=5)
    assert len(calls) == 3, "traced once"
    assert 0 < timed.best <= timed.median <= timed.worst and timed.compile_s > 0
    np.testing.assert_array_equal(state, np.arange(4.0))


def test_steps_of_a_chain_are_not_fused():
    jaxpr = []

    def step(x, y):
        jaxpr.append(1)
        return x + 1

    text = jax.jit(lambda x: measure.chained(step, 4)(x, ())).lower(jnp.zeros(8)).as_text()
    assert text.count("optimization_barrier") == 4


def test_the_kernels_of_a_shape_have_resources_and_a_hash(monkeypatch):
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    shape = measurements.Shape("rope and write", "rope", 1, 64)
    monkeypatch.setattr(measurements, "GPU_SHAPES", (shape,))
    begun = []
    (row,) = measurements.kernels(named_target("gfx942"), begun.append)
    assert (row["shape"], row["kernel"], row["arch"], row["error"]) == ("rope and write", "rope_update_kernel", "gfx942", None)
    assert (
        begun == ["rope and write"]
        and row["vgprs"] > 0
        and row["vgpr_spills"] == 0
        and len(row["code_hash"]) == 16
        and "launched" not in row
    )


def test_the_hash_of_what_was_launched_is_read_off_the_launchers_own_kernels(monkeypatch):
    pytest.importorskip("torch")
    target = named_target("sm_90")
    launches = (SimpleNamespace(grid=(1, 1, 1), kernel="m:k", num_warps=4), SimpleNamespace(grid=(0, 1, 1), kernel="m:empty", num_warps=4))
    program = SimpleNamespace(launches=launches, inputs=(), outputs=(), scratch=())
    ptx = "//\n.version 8.0\n.visible .entry k(\n)\n{\nret;\n}\n"
    binary = SimpleNamespace(asm={"ptx": ptx}, metadata=SimpleNamespace(shared=0))
    monkeypatch.setattr(measurements.launcher, "compiled", lambda *given: (SimpleNamespace(binary=binary),))
    (found,) = measurements._launched(program, target)
    assert found == measurements.compile_check.hash_of_code(measurements.compile_check._ptx_code(ptx))


def test_torchs_kernels_in_a_jitted_chain_are_checked(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(probes, "_SIZE", 1 << 10)
    assert list(probes._torch_on_stream()) == [{"elements": 1 << 10, "runs": 3}]


def too_early(inputs, outputs):
    outputs[0].copy_(inputs[0])


def test_a_torch_kernel_that_does_not_wait_is_found(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(probes, "_SIZE", 1 << 10)
    monkeypatch.setattr(probes, "_double", too_early)
    with pytest.raises(RuntimeError, match="did not wait"):
        list(probes._torch_on_stream())


def test_each_device_is_asked_for_its_own_result():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    out = run_python(
        """
        from purepage.bridges.report import probes
        print(*probes._each_gpu())
        probes.assert_close = lambda *given, **more: 1 / 0
        try:
            print(*probes._each_gpu())
        except RuntimeError as error:
            print(error)
        """,
        devices=2,
        environment={"TRITON_INTERPRET": "1"},
    )
    first, second = out.splitlines()
    assert first == "{'device': 0} {'device': 1}"
    assert second.count("ZeroDivisionError") == 2


def test_launches_are_recorded_for_the_probe_whatever_the_default_is(monkeypatch):
    seen = []
    monkeypatch.setattr(probes, "bridges", lambda: (("callback", None), ("native", "no compiler")))
    monkeypatch.setattr(probes, "steps", lambda *given: seen.append((given, current_settings().command_buffer)) or {"bridge": given[2]})
    with using_settings(command_buffer=False):
        found = list(probes._recorded(in_scan=True))
    assert seen == [((5, True, "callback"), True)]
    assert found[1:] == [{"bridge": "callback"}, {"bridge": "native", "skipped": "no compiler"}] and found[0]["recorded_from"] >= 1


def test_a_probe_of_command_buffers_is_skipped_where_xla_has_none(monkeypatch):
    monkeypatch.setattr(probes, "xla_flags", lambda: "--xla_gpu_enable_command_buffer=")
    with pytest.raises(probes.Skipped, match="XLA_FLAGS"):
        list(probes._recorded(in_scan=False))


@pytest.mark.parametrize(
    ("name", "plugin", "advised"), [("gfx942", False, False), ("sm_90", False, True), ("cpu", False, True), ("cpu", True, False)]
)
def test_the_extra_that_brings_cudas_torch_is_not_advised_on_rocm(name, plugin, advised, monkeypatch):
    there = {"jax_rocm7_plugin"} if plugin else set()
    monkeypatch.setattr(choice, "missing_packages", lambda packages: tuple(each for each in packages if each not in there))
    why, broken = choice.refusal(named_target(name))
    assert ("pip install 'purepage[triton]'" in why) == advised and ("rocm.html" in why) != advised and not broken
