"""Laws of the sources of the kernels: short parameter lists, and what each parameter of a kernel is."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_PARAMETERS = 20

SOURCES = sorted((ROOT / "kernels").rglob("*.py"))
KERNELS = sorted({found for path in SOURCES for found in re.findall(r'"purepage\.kernels\.triton\.(\w+:\w+)"', path.read_text())})


def functions(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def parameters(function):
    """Its parameters, without the one value that holds a kernel's static facts."""
    arguments = function.args
    return [argument for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if argument.arg != "S"]


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
