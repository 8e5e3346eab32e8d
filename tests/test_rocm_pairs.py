"""Pairs of JAX, its ROCm plugin and ROCm: the page shows what was recorded, which is what the wheels say; and the extra `rocm`."""

import importlib.util
import json
import re
import tomllib
import zipfile

import pytest
from processes import ROOT

_SCRIPT = importlib.util.spec_from_file_location("rocm_pairs", ROOT / ".ci" / "rocm_pairs.py")
pairs = importlib.util.module_from_spec(_SCRIPT)
_SCRIPT.loader.exec_module(pairs)

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def recorded():
    return json.loads(pairs.DATA.read_text())


def test_the_page_shows_the_recorded_pairs():
    page = pairs.PAGE.read_text()
    assert page == pairs.with_table(page, recorded())
    for row in recorded()["plugins"]:
        assert f"| {', '.join(row['jax'])} | {row['plugin']} |" in page


def test_a_changed_record_changes_the_page():
    data = recorded()
    data["plugins"][0]["rocm"] = "7.99"
    assert pairs.with_table(pairs.PAGE.read_text(), data) != pairs.PAGE.read_text()


def test_every_recorded_plugin_names_its_jax_and_its_runtime():
    for row in recorded()["plugins"]:
        assert row["jax"] == [row["plugin"]] == [row["pjrt"]]
        assert "libamdhip64.so.7" in row["libraries"], "the plugin's HIP is the system's, of ROCm 7"


def wheel(folder, name, version, *lines):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        header = [f"Name: {name.replace('_', '-')}", f"Version: {version}", *lines]
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(["Metadata-Version: 2.4", *header]) + "\n")
    return path


def test_what_the_wheels_say_is_recorded_and_nothing_else(tmp_path, monkeypatch):
    wheel(tmp_path, "jax", "0.99.1", 'Requires-Dist: jax-rocm7-plugin==0.99.1.*; extra == "rocm7-local"')
    wheel(tmp_path, "jax", "0.99.10", 'Requires-Dist: jax-rocm7-plugin==0.99.10.*; extra == "rocm7-local"')
    wheel(
        tmp_path, "jax_rocm7_plugin", "0.99.10", "Summary: JAX Plugin for AMD GPUs (ROCm:unknown)", "Requires-Dist: jax-rocm7-pjrt==0.99.10"
    )
    summary = "Summary: JAX Plugin for AMD GPUs (ROCm:7.14.0)"
    wheel(tmp_path, "jax_rocm7_plugin", "0.99.1.post2", summary, "Requires-Python: >=3.12", "Requires-Dist: jax-rocm7-pjrt==0.99.1.post2")
    wheel(tmp_path, "jax_rocm7_pjrt", "0.99.10")
    (tmp_path / "torch-9.json").write_text(
        json.dumps(
            {
                "install": [
                    {"metadata": {"name": "torch", "version": "9", "requires_dist": ["sympy", 'triton==8.1; platform_system == "Linux"']}}
                ]
            }
        )
    )
    monkeypatch.setattr(pairs, "needed_libraries", lambda path: ["libamdhip64.so.7"])
    assert pairs.record(tmp_path) == {
        "plugins": [
            {"plugin": "0.99.1.post2", "pjrt": "0.99.1.post2", "jax": ["0.99.1"], "python": ">=3.12", "rocm": "7.14.0", "libraries": None},
            {"plugin": "0.99.10", "pjrt": "0.99.10", "jax": ["0.99.10"], "python": None, "rocm": None, "libraries": ["libamdhip64.so.7"]},
        ],
        "torch": [{"torch": "9", "triton": "8.1"}],
    }
    assert "| 0.99.10 | 0.99.10 | 0.99.10 | unknown | unknown | unknown | unknown |" in pairs.table(pairs.record(tmp_path))


def test_the_libraries_are_those_of_rocm_among_the_needed_ones():
    names = ("librccl.so.1", "libc.so.6", "libamdhip64.so.7")
    text = "".join(["Dynamic Section:\n", *(f"  NEEDED               {name}\n" for name in names), "  RUNPATH              /opt\n"])
    assert pairs.libraries_in(text) == ["libamdhip64.so.7", "librccl.so.1"]


def test_the_extra_for_rocm_asks_for_no_package_of_another_vendor():
    """torch and Triton of PyPI are CUDA's; an extra of purepage in it would bring them."""
    (requirement,) = EXTRAS["rocm"]
    assert re.match(r"jax\[rocm7-local\]", requirement)
    assert not [word for word in ("torch", "triton", "purepage", "cuda") if word in requirement]


@pytest.mark.parametrize("page", ["docs/rocm.md", "docs/install.md"])
def test_the_pages_name_the_oldest_rocm_and_the_switch_as_the_self_check_does(page):
    from purepage.bridges.report.missing import COMMAND_BUFFERS_OFF, OLDEST_ROCM

    text = (ROOT / page).read_text()
    assert ".".join(map(str, OLDEST_ROCM)) in text
    assert re.search(rf"{re.escape(COMMAND_BUFFERS_OFF)}(?![\w])", text)


def test_the_page_lists_the_variables_that_a_report_shows():
    from purepage.bridges.report.facts import ENVIRONMENT

    text = (ROOT / "docs/rocm.md").read_text()
    assert not [name for name in ENVIRONMENT if f"`{name}`" not in text]
