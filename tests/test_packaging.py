"""What is built is what lies here: every folder is a package, wheel and sdist hold each file under its import name, versions agree."""

import json
import re
import shutil
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import jax
import pytest
from processes import ROOT, run, run_python

import purepage

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKED = ("bridges", "functional", "kernels")
"""Packages at the top of the checkout, which `src/purepage` links to."""
OWN = ("testing", "viz")
"""Packages of `src/purepage` itself."""


def sources() -> dict[str, Path]:
    """Name inside a wheel of each file that belongs there."""
    own = [path for folder in (".", *OWN) for path in (ROOT / "src/purepage" / folder).iterdir() if path.suffix in (".py", ".typed")]
    files = {path.relative_to(ROOT / "src").as_posix(): path for path in own}
    for package in LINKED:
        found = [path for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".cc")]
        files |= {f"purepage/{path.relative_to(ROOT).as_posix()}": path for path in found}
    return files


def test_src_links_to_every_package_at_the_top_by_a_relative_path():
    links = {path.name: path.readlink().as_posix() for path in (ROOT / "src/purepage").iterdir() if path.is_symlink()}
    assert links == {package: f"../../{package}" for package in LINKED}


def test_every_folder_with_sources_is_a_package():
    names = set(sources())
    for folder in {name.rpartition("/")[0] for name in names}:
        assert f"{folder}/__init__.py" in names


def test_version_is_the_same_in_project_module_and_changelog():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert PROJECT["project"]["version"] == purepage.__version__ == newest[1]


def build(folder: Path, kind: str) -> Path:
    """The distribution that setuptools builds offline from a folder; kind is "wheel" or "sdist"."""
    out = run_python(f"from setuptools import build_meta; print(build_meta.build_{kind}('.'))", cwd=folder)
    return folder / out.splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what is built, so that no build folder appears here. Links stay links."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", "tests", *LINKED):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return copy


@pytest.fixture(scope="module")
def wheel(checkout):
    with zipfile.ZipFile(build(checkout, "wheel")) as archive:
        yield archive


def modules_in(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_wheel_holds_every_source_under_its_import_name_and_nothing_else(wheel):
    assert modules_in(wheel) == set(sources())
    for name, path in sources().items():
        assert wheel.read(name) == path.read_bytes()


def test_a_wheel_built_from_the_sdist_holds_the_same(checkout, wheel, tmp_path):
    with tarfile.open(build(checkout, "sdist")) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()], "a link leads out of the archive"
        assert {name.split("/")[1] for name in archive.getnames() if "/" in name} == {
            *("LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "src")
        }
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    with zipfile.ZipFile(build(folder, "wheel")) as rebuilt:
        assert modules_in(rebuilt) == modules_in(wheel)
        for name in modules_in(wheel):
            assert rebuilt.read(name) == wheel.read(name)


def test_wheel_needs_only_jax_jaxtyping_and_numpy_and_offers_the_extras(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    needed = {re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert needed == {"jax", "jaxtyping", "numpy"}
    extras = {"aiter", "cuda", "demo", "integrations", "jax-triton", "notebooks", "rocm", "test", "testing", "torch", "triton", "viz"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_wheel_carries_the_licence_text(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
    assert "Apache License" in wheel.read(name).decode()


def test_an_editable_install_is_one_static_path_that_holds_every_module(checkout):
    """Type checkers and IDEs read a `.pth` file with a folder in it; they run no import hook."""
    with zipfile.ZipFile(build(checkout, "editable")) as archive:
        (pth,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert not [name for name in archive.namelist() if name.endswith(".py")], "an import hook stands in for the path"
        source = Path(archive.read(pth).decode().strip())
    assert source == checkout / "src"
    for name in sources():
        assert (source / name).is_file()


USER_PROGRAM = """
import purepage as pp
from purepage.functional.cache import CacheSpec
from purepage.functional.target import Target
from purepage.kernels.launch import Launch

spec: CacheSpec = pp.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_size=32)
reveal_type(pp.init_cache(spec))
reveal_type(Launch)
reveal_type(Target)
"""


def test_pyright_follows_an_editable_install_from_a_users_folder(checkout, tmp_path):
    pytest.importorskip("pyright", reason="`make lint` installs it")
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(build(checkout, "editable")) as archive:
        archive.extractall(site)
    (site / "zz_dependencies.pth").write_text(f"{Path(jax.__file__).parents[1]}\n")
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "program.py").write_text(USER_PROGRAM)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(environment / "bin/python"), "program.py"]
    report = json.loads(run(command, environment={"PYTHONPATH": None}, cwd=folder).stdout)
    assert report["summary"]["errorCount"] == 0, report
    revealed = [diagnostic["message"] for diagnostic in report["generalDiagnostics"] if diagnostic["severity"] == "information"]
    assert [text.partition(" is ")[2] for text in revealed] == ['"KVCache"', '"type[Launch]"', '"type[Target]"']
