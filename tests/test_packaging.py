"""What is built is what lies here: every folder is listed, the wheel holds each file under its import name, versions agree."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import purepage

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("bridges", "functional", "kernels")


def sources() -> dict[str, Path]:
    """Name inside a wheel of each file that belongs there."""
    files = {f"purepage/{path.name}": path for path in (ROOT / "src/purepage").iterdir() if path.suffix in (".py", ".typed")}
    for room in ROOMS:
        files |= {f"purepage/{path.relative_to(ROOT).as_posix()}": path for path in (ROOT / room).rglob("*.py")}
    return files


def test_every_folder_with_sources_is_listed_as_a_package_and_no_other():
    folders = {name.rpartition("/")[0].replace("/", ".") for name in sources()}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders


def test_every_package_has_an_init():
    names = set(sources())
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        assert f"{package.replace('.', '/')}/__init__.py" in names


def test_version_is_the_same_in_project_module_and_changelog():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert PROJECT["project"]["version"] == purepage.__version__ == newest[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built offline from a copy, so that no build folder appears here."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", *ROOMS):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    program = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(copy / done.stdout.splitlines()[-1]) as archive:
        yield archive


def test_wheel_holds_every_source_under_its_import_name_and_nothing_else(wheel):
    packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packaged == set(sources())
    for name, path in sources().items():
        assert wheel.read(name) == path.read_bytes()


def test_wheel_needs_only_jax_jaxtyping_and_numpy_and_offers_the_extras(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    needed = {re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert needed == {"jax", "jaxtyping", "numpy"}
    extras = {"aiter", "cuda", "demo", "jax-triton", "notebooks", "rocm", "test", "torch", "triton"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_wheel_carries_the_licence_text(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
    assert "Apache License" in wheel.read(name).decode()
