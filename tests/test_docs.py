"""Documentation: cited documents, headings and relative links exist, and the tables of docs/semantics.md agree with the code."""

import inspect
import itertools
import re
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.functional.layout import CONTENTS, Extents, side_strides

ROOT = Path(__file__).parents[1]
SEMANTICS = ROOT / "docs/semantics.md"
DOCUMENT = re.compile(r"[\w./-]*\w\.(?:md|ipynb)\b")
SECTION = re.compile(r"docs/semantics\.md, \"?([A-Z][^\n.;:)\"]*)")
UNNAMED = re.compile(r"\b(?:SEMANTICS|PITFALLS|FAULTS|DESIGN),? (?:Part )?[A-GI]+[.\d]|\bII\.\d")
"""Documents that were never part of the repository, and their section numbers."""
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
MADE_WHEN_RUN = {"results/NAME.md", "NAME.md", "run.md"}


def tracked() -> list[Path]:
    """Files that git tracks, or all that a source distribution holds."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    paths = map(ROOT.joinpath, listed.stdout.splitlines()) if listed.returncode == 0 else ROOT.rglob("*")
    return [path for path in paths if path.is_file() and not path.is_symlink()]


FILES = tracked()
TEXTS = {path: path.read_text() for path in FILES if path.suffix in (".py", ".md", ".toml", ".yml") or path.name in ("Makefile", "run")}
PAGES = [path for path in FILES if path.suffix == ".md"]


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_no_file_cites_a_document_that_is_not_in_the_repository():
    there = {path.relative_to(ROOT).as_posix() for path in FILES}
    missing = []
    for path, text in TEXTS.items():
        for cited in DOCUMENT.findall(text):
            name = cited.lstrip("./")
            if name not in MADE_WHEN_RUN and not any(f"/{one}".endswith(f"/{name}") for one in there):
                missing.append(f"{path.relative_to(ROOT)}: {cited}")
        missing += [f"{path.relative_to(ROOT)}: {found}" for found in UNNAMED.findall(text)]
    assert not missing


PRIVATE = ("has" + "te", "has" + "ty", "nobo" + "dy", "somebo" + "dy", "do" + "or", "do" + "ors", "ro" + "of", "hee" + "d")
"""Words that once stood for terms that the field has its own words for."""


def test_no_file_uses_a_private_word_where_the_field_has_one():
    words = re.compile(rf"\b(?:{'|'.join(PRIVATE)})\b", re.IGNORECASE)
    found = [f"{path.relative_to(ROOT)}: {word}" for path, text in TEXTS.items() for word in words.findall(text)]
    assert not found


def test_a_section_of_the_semantics_that_a_file_cites_is_there():
    known = headings(SEMANTICS)
    wrong = [
        f"{path.relative_to(ROOT)}: {cited}"
        for path, text in TEXTS.items()
        for cited in SECTION.findall(text)
        if path != Path(__file__) and not any(cited.startswith(heading) for heading in known)
    ]
    assert not wrong


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT / "benchmarks/results"], ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"`((?:functional|kernels|bridges|tests|benchmarks|docs|examples|src|notebooks)/[\w./]*)`", page.read_text())
    assert not [name for name in named if "NAME" not in name and not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_of_a_page_resolve(page):
    for target in LINK.findall(page.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, fragment = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        if fragment and there.suffix == ".md":
            assert fragment in {anchor(heading) for heading in headings(there)}, target


def cells(page: Path, first: str) -> list[str]:
    """The cells of the table row that begins with `first`."""
    lines = [line for line in page.read_text().splitlines() if line.startswith(f"| {first} |")]
    assert lines, f"{page.name}: no table has a row that begins with {first}"
    return [cell.strip() for cell in lines[0].strip("|").split("|")]


@pytest.mark.parametrize("content", CONTENTS)
def test_the_addresses_in_the_semantics_are_the_strides_of_every_layout(content):
    formulas = cells(SEMANTICS, f"`{content}`")[1:3]
    if formulas[0].startswith("as "):
        formulas[0] = cells(SEMANTICS, formulas[0].removeprefix("as "))[1]
    extents = Extents(num_layers=2, num_blocks=3, num_kv_heads=3, block_size=8, head_size=16, vector=4, value_size=16)
    for formula, strides in zip(formulas, side_strides(content, "LBHNC", extents), strict=True):
        for h, n, d in itertools.product(range(3), range(8), range(16)):
            names = {"h": h, "n": n, "d": d, "H": 3, "N": 8, "D": 16, "x": 4}
            at = h * strides.head + n // strides.n_vector * strides.token_outer + n % strides.n_vector * strides.token
            at += d // strides.d_vector * strides.dim_outer + d % strides.d_vector * strides.dim
            at += strides.offset if content == "packed" else 0
            assert eval(formula.strip("`"), {}, names) == at, (formula, names)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
def test_the_largest_fp8_values_in_the_semantics_are_those_of_the_dtypes(dtype):
    assert float(cells(SEMANTICS, f"`{dtype}`")[1]) == float(ml_dtypes.finfo(np.dtype(dtype)).max)


PUBLIC = [name for name in pp.__all__ if inspect.isfunction(getattr(pp, name))]
UNDEFINED = {"implementation", "layer", "cache", "metadata"}
"""Arguments that say where or how something is computed, and not what."""


@pytest.mark.parametrize("name", [name for name in PUBLIC if "attention" in name or "update" in name or "rotary" in name])
def test_the_semantics_mention_every_option_of_an_operation(name):
    parameters = inspect.signature(getattr(pp, name)).parameters.values()
    options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - UNDEFINED
    assert not [option for option in options if not re.search(rf"\b{option}\b", SEMANTICS.read_text())]


def test_what_pages_take_over_from_another_document_has_no_relative_link():
    sections = [
        (page.name, section)
        for page in PAGES
        for section in re.findall(r"<!-- --8<-- \[start:\w+\] -->\n(.*?)<!-- --8<-- \[end:", page.read_text(), re.DOTALL)
    ]
    assert sections
    linked = [(name, link) for name, section in sections for link in LINK.findall(section) if not re.match(r"\w+://", link)]
    assert not linked, "the site takes the text over as it is, into another folder"
