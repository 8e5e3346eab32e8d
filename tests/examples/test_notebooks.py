"""Every notebook runs from top to bottom and prints its stored outputs."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
for package in ("nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(package)

from nbclient import NotebookClient  # noqa: E402

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def printed(notebook) -> list[str]:
    """Text of each cell's outputs; a picture counts as one, whatever its bytes."""
    kept = []
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        text = "".join(output.get("text", "") for output in outputs)
        values = [output.data for output in outputs if "data" in output]
        kept.append(text + "".join("picture" if "image/png" in data else data["text/plain"] for data in values))
    return kept


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path):
    shown = nbformat.read(path, as_version=4)
    nbformat.validate(shown)
    assert any("picture" in text for text in printed(shown))
    ran = nbformat.read(path, as_version=4)
    NotebookClient(ran, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    assert printed(ran) == printed(shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_executed_in_order(path):
    assert path.stat().st_size < 300_000
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
