"""The `triton` implementation: plans a call's launches from its shapes and the target, and runs them through a bridge."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
from jax.core import Tracer

from ..functional.dispatch import Plan, Unsupported
from ..functional.errors import UnsupportedError
from ..functional.record import Key, Row
from ..functional.target import Target, variable_of
from ..kernels.launch import Program
from ..kernels.plans import tuned
from . import choice
from .execute import run
from .triton_calls import OPERATIONS, Operation
from .triton_calls import SERVES as SERVES

INTERPRETER_HINT = f"set {variable_of('interpret')}=1 in the environment before the first call"


def plan(operation: str, call: Any, target: Target, *, explicit: bool) -> Plan | Unsupported:
    """The launches that serve a call on `target`, or why there are none; see `purepage.functional.dispatch`."""
    refusal = choice.refusal(target)
    if refusal is not None and not refusal[1]:
        return Unsupported((refusal[0],))
    if target.platform == "cpu":
        if not explicit:
            return Unsupported(("runs on a CPU only through Triton's interpreter, which is for tests: ask for it by name",))
        if not target.settings.interpret:
            return Unsupported((f"runs on a CPU only through Triton's interpreter: {INTERPRETER_HINT}",))
    elif refusal is not None:
        return Unsupported((refusal[0],), broken=True)
    return plan_launches(operation, call, target)


def plan_launches(operation: str, call: Any, target: Target) -> Plan | Unsupported:
    """`plan` for a target that need not be this machine, without a look at what is installed here."""
    described = OPERATIONS[operation]
    units = target.compute_units if target.platform != "cpu" else None
    return _planned(operation, described.shape(call), target, units or None)


def shape_of(operation: str, call: Any) -> Any:
    """Everything static about a call, as the one value that is planned."""
    return OPERATIONS[operation].shape(call)


def shape_key_of(operation: str, call: Any) -> Key:
    """The key of a call's row in the device's record; empty of an operation that has none."""
    return tuned.shape_key(shape_of(operation, call)) if operation in OPERATIONS else ()


@cache
def _planned(operation: str, shape: Any, target: Target, num_cus: int | None) -> Plan | Unsupported:
    """The plan of a static shape. Calls of one shape share it, and so does every trace of them."""
    described = OPERATIONS[operation]
    row = target.record.rows.get((operation, tuned.shape_key(shape))) if target.record is not None else None
    try:
        program, refused = _program(described, shape, target.arch, num_cus, row)
    except UnsupportedError as error:
        return Unsupported((str(error).removeprefix("triton: "),))
    compute = partial(_run, described, program, target)
    sources = partial(_sources, shape, target.arch, num_cus, row, refused)
    return Plan(compute if target.platform == "cpu" else partial(_run_compiled, compute, jax.jit(compute)), program, sources)


def _program(described: Operation, shape: Any, arch: str, num_cus: int | None, row: Row | None) -> tuple[Program, str]:
    """The program of a shape with the configurations of the record's row, and why they are refused; empty where they are taken."""
    refused = ""
    if row is not None and row.configurations:
        try:
            return described.plan(shape, arch, num_cus=num_cus, **tuned.overrides(row)), ""
        except (ValueError, TypeError) as error:
            refused = str(error)
    return described.plan(shape, arch, num_cus=num_cus), refused


def _sources(shape: Any, arch: str, num_cus: int | None, row: Row | None, refused: str) -> tuple[str, ...]:
    """Where the configurations of a program come from: the device's record, else the tables."""
    if row is not None and row.configurations and not refused:
        return tuple(f"{kind}: configuration from the record of {row.date}" for kind, _ in row.configurations)
    tables = [tuned.source_of(kind, config) for kind, config in tuned.untuned(shape, arch, num_cus).items()]
    if row is None:
        return tuple(tables)
    if refused:
        return (f"the configuration in the record of {row.date} is refused: {refused}", *tables)
    return tuple(f"{source}; the fastest in the record of {row.date}" for source in tables)


def _run_compiled(compute: Callable[[Any], Any], compiled: Callable[[Any], Any], call: Any) -> Any:
    """Outside a trace a call is one program of XLA: preparing the arguments of kernels costs one launch, not one for each of them."""
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(call))
    return compute(call) if traced else compiled(call)


def _run(described: Operation, program: Program, target: Target, call: Any) -> Any:
    arrays = described.arrays(call)
    named = {name: array for name, _ in program.inputs if (array := arrays[name]) is not None}
    return described.results(call, run(program, named, target=target))
