"""`docs/features.md`: it is what `docs/features.toml` says, and each of our cells names a test that exists.

`PYTHONPATH=. python tests/test_features.py` rewrites the page.
"""

import ast
import tomllib
from pathlib import Path

import pytest

from purepage import Capabilities

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/features.md"
TABLE = tomllib.loads((ROOT / "docs/features.toml").read_text())
ROWS = [row for section in TABLE["section"] for row in section["rows"]]
UNPROVED = {"never tried"}
"""Cells of ours that claim nothing."""


def functions_of(file: str) -> set[str]:
    """Functions of a test file."""
    path = ROOT / "tests" / file
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)} if path.is_file() else set()


def is_proved(row: dict) -> bool:
    """Whether the test of our cell exists; a cell that claims nothing has none."""
    if row["ours"] in UNPROVED:
        return "test" not in row
    file, _, function = row.get("test", "").partition("::")
    return function.startswith("test_") and function in functions_of(file)


def page() -> str:
    """The Markdown of the table."""
    lines = [
        "# Features",
        "",
        "<!-- made by tests/test_features.py from docs/features.toml -->",
        "",
        "purepage beside other libraries that attend over paged caches. Each of our cells links to the test that proves it; a test refuses",
        "a cell whose test does not exist. A question mark was not looked up. *dense* and *dense bias* mean: for dense keys and values,",
        "without a block table. Corrections are welcome.",
        "",
    ]
    for section in TABLE["section"]:
        lines += [f"## {section['name']}", "", f"| | purepage | {' | '.join(TABLE['peers'])} |", "|---" * (2 + len(TABLE["peers"])) + "|"]
        for row in section["rows"]:
            file, _, function = row.get("test", "").partition("::")
            ours = f'[{row["ours"]}](../tests/{file} "{function}")' if file else row["ours"]
            lines.append(f"| {row['name']} | {ours} | {' | '.join(row['peers'])} |")
        lines.append("")
    lines += ["## Sources", "", "| library | what was read |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {source} |" for name, source in TABLE["sources"].items())]) + "\n"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_our_cell_names_a_test_that_exists(row):
    assert is_proved(row), row.get("test")


@pytest.mark.parametrize(
    "row", [{"ours": "yes"}, {"ours": "yes", "test": "test_features.py::test_nothing"}, {"ours": "yes", "test": "nothing.py::test_nothing"}]
)
def test_a_cell_without_a_test_is_refused(row):
    assert not is_proved(row)


def test_every_row_has_a_cell_for_every_peer_and_every_peer_a_source():
    assert list(TABLE["sources"]) == TABLE["peers"]
    assert not [row["name"] for row in ROWS if len(row["peers"]) != len(TABLE["peers"])]


def test_every_capability_of_the_classes_is_in_a_row():
    assert {field for row in ROWS for field in row.get("fields", ())} == set(Capabilities.__dataclass_fields__)


def test_the_page_is_the_table():
    assert PAGE.read_text() == page(), "PYTHONPATH=. python tests/test_features.py rewrites the page"


if __name__ == "__main__":
    PAGE.write_text(page())
