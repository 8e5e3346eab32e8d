"""The pages of the documentation site: every program runs as written, every public name has an entry and an example, drawings are there."""

import importlib.util
import inspect
import re
import tomllib
from pathlib import Path

import pytest
from processes import run_python

import purepage as pp
from purepage.functional.errors import DOCUMENTATION

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
PROGRAM = re.compile(r"^```python[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SLOW = {
    "api/attention",
    "api/batches",
    "api/caches",
    "api/key-ranges",
    "api/sharding",
    "api/viz",
    "api/writers",
    "coming-from-others",
    "integrate/equinox",
    "integrate/flax",
    "integrate/llama",
    "serving",
    "sharding",
}
"""Pages whose programs `make docs` runs, and `make test` does not."""
OPTIONAL = ("einops", "equinox", "flax", "matplotlib", "mistral", "orbax", "torch", "transformers", "triton")
API = "\n".join(path.read_text() for name, path in PAGES.items() if name.startswith("api/"))


def programs(page: Path) -> list[tuple[int, str]]:
    """Line and text of each program of a page."""
    text = page.read_text()
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in PROGRAM.finditer(text)]


def run_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the programs of a page one after the other in one namespace; what a `print` shows contains the comment behind it."""
    names = {"__name__": page.stem}
    for line, program in programs(page):
        exec(compile("\n" * line + program, str(page), "exec"), names)
        shown = capsys.readouterr().out
        for expected in re.findall(r"^ *print\(.*\)  # (.*)$", program, re.MULTILINE):
            assert expected in shown, f"{page.name}, line {line}: {expected!r} is not in {shown!r}"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name, page in PAGES.items() if programs(page) and name != "faq"],
)
def test_the_programs_of_a_page_run_and_print_what_their_comments_say(name, capsys):
    text = PAGES[name].read_text()
    for package in OPTIONAL:
        if re.search(rf"^(?:import|from) {package}\b", text, re.MULTILINE) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if devices := re.search(r"<!-- devices: (\d+) -->", text):
        whole = "\n".join(program for _, program in programs(PAGES[name]))
        shown = run_python(whole, devices=int(devices[1]))
        assert not [line for line in re.findall(r"^ *print\(.*\)  # (.*)$", whole, re.MULTILINE) if line not in shown]
    else:
        run_page(PAGES[name], capsys)


def test_a_comment_that_a_program_does_not_print_fails(tmp_path, capsys):
    page = tmp_path / "index.md"
    page.write_text("```python\nprint(1 + 1)  # 3\n```\n")
    with pytest.raises(AssertionError, match="'3' is not in"):
        run_page(page, capsys)


def test_slow_pages_exist():
    assert set(PAGES) >= SLOW


@pytest.mark.parametrize("name", [name for name in pp.__all__ if name != "__version__"])
def test_every_public_name_has_an_entry_and_an_example_in_the_reference(name):
    kind = getattr(pp, name)
    if inspect.ismodule(kind):
        entries = set(re.findall(r"^::: purepage\.functional\.\w+\.(\w+)\n", API, re.MULTILINE))
        listed = {part.strip() for members in re.findall(r"members: \[(.*?)\]", API) for part in members.split(",")}
        constants = {"BACKEND", "CAPABILITIES", "RocmAttentionMetadata"}
        assert set(kind.__all__) <= entries | listed | constants, f"docs/api lacks functions of pp.{name}"
        return
    entry = re.search(rf"^::: purepage(?:\.[\w.]+)?\.{name}\n(.*?)(?=^:::|\Z)", API, re.DOTALL | re.MULTILINE)
    assert entry is not None, f"docs/api has no line `::: purepage.{name}`"
    following = PROGRAM.findall(entry[1])
    assert following, f"no program follows `::: purepage.{name}`"
    assert inspect.isclass(kind) or any(re.search(rf"\b{name}\b", program) for program in following), f"no program there calls {name}"


def test_the_drawings_are_those_that_the_program_makes():
    made = set(re.findall(r"^@drawing\ndef (\w+)", (DOCS / "_site/drawings.py").read_text(), re.MULTILINE))
    made.add("sharding_bytes")  # of tests/functional/test_sharding_bytes.py
    assert {path.stem for path in (DOCS / "assets").glob("*.svg")} == made
    shown = "".join(path.read_text() for path in PAGES.values())
    assert not [name for name in made if f"assets/{name}.svg" not in shown]


def test_the_quoted_error_messages_are_printed_by_their_programs_or_are_in_the_code(capfd):
    page = DOCS / "faq.md"
    names = {"__name__": "faq"}
    for line, program in programs(page):
        exec(compile("\n" * line + program, str(page), "exec"), names)
    shown = capfd.readouterr().out
    sources = "".join(path.read_text() for folder in ("functional", "bridges", "kernels") for path in (ROOT / folder).rglob("*.py"))
    quoted = re.findall(r"^### `(.+)`$", page.read_text(), re.MULTILINE)
    assert len(quoted) > 15
    assert not [message for message in quoted if message not in shown and message not in sources]


def test_messages_and_metadata_lead_to_one_address():
    addresses = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"].values()
    assert all(address.startswith(f"{DOCUMENTATION}/") for address in addresses)
    assert f"site_url: {DOCUMENTATION}/" in (ROOT / "mkdocs.yml").read_text()
    sources = "".join(path.read_text() for folder in ("functional", "bridges", "kernels") for path in (ROOT / folder).rglob("*.py"))
    linked = set(re.findall(r"\{DOCUMENTATION\}/([\w/]+)\.html", sources)) | {
        page.removeprefix(f"{DOCUMENTATION}/").removesuffix(".html") for page in addresses
    } - {""}
    assert not [page for page in linked if page not in PAGES and not (ROOT / page.removeprefix("repository/")).with_suffix(".md").exists()]


def test_the_badges_of_the_readme_say_what_the_project_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (jax,) = (need.removeprefix("jax>=") for need in project["dependencies"] if need.startswith("jax>="))
    facts = {"python": project["requires-python"].replace(">=", "≥ "), "jax": f"≥ {jax}", "license": project["license"], "typed": "checked"}
    shown = re.findall(r"docs/assets/badges/(\w+)\.svg", (ROOT / "README.md").read_text())
    assert shown == list(facts)
    for name, fact in facts.items():
        assert f">{fact}</text>" in (DOCS / f"assets/badges/{name}.svg").read_text()


def test_versions_in_other_files_are_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"\nversion: {project['project']['version']}\n" in (ROOT / "CITATION.cff").read_text()
    (ruff,) = (need for need in project["dependency-groups"]["lint"] if need.startswith("ruff"))
    assert set(re.findall(r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text())) == {ruff}
