"""`docs/coming-from-vllm.md`: it has every name that was recorded from vLLM's wheel, and every name that it gives for it exists here."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import purepage as pp
from purepage.functional.target import Settings, variable_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/coming-from-vllm.md").read_text()
RECORD = json.loads((ROOT / "tests/functional/data/vllm_0_33.json").read_text())
BACKENDS = (pp.rocm_attn, pp.rocm_aiter_unified_attn)
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\((\w+)\))?`")
WORDS = {"None", "False", "True", "query_start_loc", "ROCM_AITER_FA", "_k_scale", "_v_scale", "_q_scale"}
"""Names on the right that are vLLM's or values."""


def rows(section: str) -> dict[str, str]:
    """The right cell of each name of a section's left cells."""
    text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert text is not None, f"no section {section!r}"
    found = {}
    for line in text[1].splitlines():
        if line.startswith("| `"):
            left, right = line.strip("| ").split(" | ", 1)
            found |= {name: right for name, _ in NAME.findall(left)} | dict.fromkeys(re.findall(r"`([\w-]+)`", left), right)
    return found


def wanted() -> list[tuple[str, str]]:
    """(section, name) of everything that was recorded."""
    found = set()
    for facts in RECORD["backends"].values():
        backend, implementation, builder = facts["classes"].items()
        found |= {("Classes", kind) for kind, _ in (backend, implementation)} | {("Flags", name) for name in facts["attributes"]}
        found |= {("Flags", name) if name in facts["flags"] else ("Methods of the backend class", name) for name in backend[1]}
        found |= {("Flags" if name.endswith("_supported") else "Methods of the implementation class", name) for name in implementation[1]}
        found |= {
            ("Metadata and its builder", name) for name in (*builder[1], *facts["builder"]["fields"], *facts["builder"]["parameters"])
        }
        found |= {(f"Arguments of `{method}`", name) for method, names in facts["parameters"].items() for name in names}
        found |= {("Arguments of `validate_configuration`", name) for name in facts["validate_configuration"]}
    found |= {("Functions", name) for name in RECORD["without slots"]}
    return sorted(found | {("Environment variables", name) for name in RECORD["environment"]})


@pytest.mark.parametrize("section", sorted({section for section, _ in wanted()}))
def test_the_page_has_every_recorded_name(section):
    there = rows(section)
    assert not [name for where, name in wanted() if where == section and name not in there]


def owners(first: str) -> list[Any]:
    """What the first part of a dotted name means."""
    if first in ("backend", "rocm_attn", "rocm_aiter_unified_attn"):
        return [getattr(pp, first)] if first != "backend" else list(BACKENDS)
    if first in ("pp", "purepage"):
        return [pp]
    if first == "CAPABILITIES":
        return [backend.CAPABILITIES for backend in BACKENDS]
    if first == "dataclasses":
        return [dataclasses]
    if first == "RocmAttentionMetadata":
        return [pp.rocm_attn.RocmAttentionMetadata]
    if first in pp.__all__:
        return [getattr(pp, first)]
    return [getattr(one, first) for backend in BACKENDS for one in (backend, backend.CAPABILITIES) if hasattr(one, first)]


def missing(name: str, argument: str) -> bool:
    """Whether a name of the right column is nothing here."""
    first, *rest = name.split(".")
    found = owners(first)
    for part in rest:
        if any(not hasattr(one, part) and part not in getattr(one, "__dataclass_fields__", {}) for one in found):
            return True
        found = [getattr(one, part, None) for one in found]
    return not found or (bool(argument) and not any(callable(one) and argument in inspect.signature(one).parameters for one in found))


def test_every_name_that_the_page_gives_exists_here():
    unknown = []
    variables = {variable_of(field.name) for field in dataclasses.fields(Settings)}
    sections = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    for section in sections:
        for right in rows(section).values():
            for name, argument in NAME.findall(right.replace("dataclasses.replace(metadata, block_table=...)", "dataclasses.replace")):
                if name not in WORDS | variables and missing(name, argument):
                    unknown.append(f"{section}: {name} {argument}")
    assert not unknown


@pytest.mark.parametrize(
    ("name", "argument"), [("backend.nothing", ""), ("forward", "nothing"), ("AttentionConfig.nothing", ""), ("nothing", "")]
)
def test_a_name_that_does_not_exist_is_found(name, argument):
    assert missing(name, argument)


def test_the_fields_of_the_metadata_are_on_the_page():
    there = rows("Metadata and its builder")
    assert {field.name for field in dataclasses.fields(pp.AttentionMetadata)} - {"block_size"} <= set(there)
