"""Laws of the sources of the kernels: short parameter lists, what each parameter of a kernel is, and imports without a circle."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from purepage.kernels.triton import spec, writer_spec

ROOT = Path(__file__).resolve().parents[2]
MOST_PARAMETERS = 20

SOURCES = sorted((ROOT / "kernels").rglob("*.py"))
KERNELS = sorted({found for path in SOURCES for found in re.findall(r'"purepage\.kernels\.triton\.(\w+:\w+)"', path.read_text())})


def functions(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def parameters(function):
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_takes_more_than_twenty_parameters(path):
    long = {function.name: len(parameters(function)) for function in functions(path) if len(parameters(function)) > MOST_PARAMETERS}
    assert not long


@pytest.mark.parametrize("kernel", KERNELS)
def test_beside_each_parameter_of_a_kernel_stands_what_it_is(kernel):
    module, name = kernel.split(":")
    path = ROOT / "kernels" / "triton" / f"{module}.py"
    lines = path.read_text().splitlines()
    (function,) = (function for function in functions(path) if function.name == name)
    silent = [argument.arg for argument in parameters(function) if "#" not in lines[argument.lineno - 1]]
    assert not silent


def test_every_kernel_that_a_plan_names_is_there():
    assert len(KERNELS) > 7
    for kernel in KERNELS:
        module, name = kernel.split(":")
        assert name in [function.name for function in functions(ROOT / "kernels" / "triton" / f"{module}.py")]


def static_values():
    """Names of the facts that are text or values of a class. All others are numbers, which every release of Triton takes as they are."""
    classes = {kind for module in (spec, writer_spec) for kind in vars(module).values() if dataclasses.is_dataclass(kind)}
    fields = [field for kind in classes for field in dataclasses.fields(kind)]
    return {field.name for field in fields if field.type is str or dataclasses.is_dataclass(field.type)}


@pytest.mark.parametrize("path", sorted((ROOT / "kernels" / "triton").glob("*.py")), ids=lambda path: path.stem)
def test_text_among_the_facts_reaches_a_device_function_through_a_local_constexpr(path):
    """Triton 3.6 takes an attribute in a call for a tensor, and text or a class has no type there; later releases take it as it is."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    direct = [
        f"line {argument.lineno}: {ast.unparse(argument)}"
        for call in calls
        for argument in call.args
        if isinstance(argument, ast.Attribute) and ast.unparse(argument).split(".")[0].isupper() and argument.attr in static_values()
    ]
    assert not direct


def imported(path):
    """Files of `kernels` that a file of it imports at any place, for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
            target = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
            names = [target / alias.name for alias in node.names] if target.is_dir() else []
            found |= {file for module in (target, *names) for file in (module.with_suffix(".py"), module / "__init__.py") if file.exists()}
    return found & set(SOURCES) - {path}


def reaches(start):
    """Every file that `start` imports, directly or not."""
    seen, waiting = set(), [start]
    while waiting:
        new = imported(waiting.pop()) - seen
        seen |= new
        waiting += new
    return seen


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_of_the_kernels_imports_itself_in_a_circle(path):
    assert path not in reaches(path)


def test_architectures_import_no_plan_and_no_kernel_and_kernels_no_plan():
    for folder, others in {"archs": ("plans", "triton"), "triton": ("plans", "archs")}.items():
        for path in (ROOT / "kernels" / folder).glob("*.py"):
            assert not {file.parent.name for file in reaches(path)} & set(others), path
