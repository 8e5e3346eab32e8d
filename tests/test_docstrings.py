"""Docstrings of everything that is exported: what it is, each argument, what comes back, what is raised."""

import dataclasses
import inspect
import operator
import re

import pytest

import purepage as pp

FUNCTIONS = [name for name in pp.__all__ if inspect.isfunction(getattr(pp, name))]
RANGES = [f"key_ranges.{name}" for name in pp.key_ranges.__all__]
VALUES = [name for name in pp.__all__ if dataclasses.is_dataclass(getattr(pp, name))]


def section(text: str, title: str) -> str | None:
    """The text of one section, up to the next one."""
    found = re.search(rf"^{title}:\n(.*?)(?=^\S|\Z)", text, re.S | re.M)
    return found and found[1]


def documented(text: str) -> set[str]:
    """Names before a colon at the beginning of an entry or after another: `a: ...`, `a, b: ...`, `a: [T]; b: [T, H]; ...`."""
    entries = re.findall(r"(?:^  |; |\. )([\w`*]+(?:, [\w`*]+)*): ", text, re.M)
    return {name.strip("`*") for entry in entries for name in entry.split(", ")}


@pytest.mark.parametrize("name", [*FUNCTIONS, *RANGES])
def test_a_function_documents_arguments_results_and_errors(name):
    function = operator.attrgetter(name)(pp)
    text = inspect.getdoc(function) or ""
    assert re.match(r"\S.*\.", text), "a summary that is a sentence"
    missing = set(inspect.signature(function).parameters) - documented(section(text, "Args") or "")
    assert not missing
    assert section(text, "Raises") is not None
    returns = inspect.signature(function).return_annotation
    assert returns is None or section(text, "Returns") is not None


@pytest.mark.parametrize("name", VALUES)
def test_a_type_documents_its_fields(name):
    kind = getattr(pp, name)
    text = inspect.getdoc(kind) or ""
    listed = documented(section(text, "Args") or section(text, "Attributes") or "")
    source = inspect.getsource(kind)
    below = {f.name for f in dataclasses.fields(kind) if re.search(rf'^    {f.name}: .*\n    """', source, re.M)}
    assert {field.name for field in dataclasses.fields(kind)} <= listed | below


@pytest.mark.parametrize("name", [name for name in pp.__all__ if inspect.isclass(getattr(pp, name))])
def test_a_class_has_a_docstring_of_its_own(name):
    assert "__doc__" in vars(getattr(pp, name)) and getattr(pp, name).__doc__
