"""The `triton` implementation: plans a call's launches from its shapes and the target, and runs them through a bridge."""

import importlib.util
from functools import cache, partial
from typing import Any

from ..functional.dispatch import Plan, Unsupported
from ..functional.errors import UnsupportedError
from ..functional.target import Target, variable_of
from ..kernels.launch import Program
from . import trial
from .execute import run
from .triton_calls import OPERATIONS, Operation
from .triton_calls import SERVES as SERVES

INTERPRETER_HINT = f"set {variable_of('interpret')}=1 in the environment before the first call"


@cache
def _missing_packages(bridge: str) -> tuple[str, ...]:
    """Packages that are not installed."""
    return tuple(package for package in _needed(bridge) if importlib.util.find_spec(package) is None)


def _needed(bridge: str) -> tuple[str, ...]:
    """The callback bridge hands Triton's launcher torch tensors; the others need no torch."""
    return ("triton", "torch") if bridge == "callback" else ("triton",)


def plan(operation: str, call: Any, target: Target, *, explicit: bool) -> Plan | Unsupported:
    """The launches that serve a call on `target`, or why there are none; see `purepage.functional.dispatch`."""
    if missing := _missing_packages(target.settings.bridge):
        return Unsupported((f"needs {' and '.join(missing)}, not installed here: pip install 'purepage[triton]'",))
    if target.platform == "cpu":
        if not explicit:
            return Unsupported(("runs on a CPU only through Triton's interpreter, which is for tests: ask for it by name",))
        if not target.settings.interpret:
            return Unsupported((f"runs on a CPU only through Triton's interpreter: {INTERPRETER_HINT}",))
    elif why := trial.broken(_needed(target.settings.bridge), target):
        return Unsupported((why,), broken=True)
    return plan_launches(operation, call, target)


def plan_launches(operation: str, call: Any, target: Target) -> Plan | Unsupported:
    """`plan` for a target that need not be this machine, without a look at what is installed here."""
    described = OPERATIONS[operation]
    units = target.compute_units if target.platform != "cpu" else None
    return _planned(operation, described.shape(call), target, units or None)


@cache
def _planned(operation: str, shape: Any, target: Target, num_cus: int | None) -> Plan | Unsupported:
    """The plan of a static shape. Calls of one shape share it, and so does every trace of them."""
    described = OPERATIONS[operation]
    try:
        program = described.plan(shape, target.arch, num_cus=num_cus)
    except UnsupportedError as error:
        return Unsupported((str(error).removeprefix("triton: "),))
    return Plan(partial(_run, described, program, target), program)


def _run(described: Operation, program: Program, target: Target, call: Any) -> Any:
    arrays = described.arrays(call)
    named = {name: array for name, _ in program.inputs if (array := arrays[name]) is not None}
    return described.results(call, run(program, named, target=target))
