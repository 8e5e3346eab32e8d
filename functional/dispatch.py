"""Which implementation serves a call, and the plan that it makes of it.

    call → implementation.plan(operation, call, target, explicit) → Plan or Unsupported → Plan.run(call)

An implementation is a module with a table `SERVES` and a function `plan`; see `Implementation`. Asking whether it can serve a call is
planning the call: there is no second answer that could differ. Modules are imported when they are first considered, so the functional core
needs neither torch nor Triton.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import jax

from . import partition
from .errors import UnsupportedError, bad_value
from .features import Serves
from .record import Row
from .target import Target, current_target, variable_of

IMPLEMENTATIONS: Mapping[str, str] = {
    "triton": "purepage.bridges.triton",
    "aiter": "purepage.bridges.aiter",
    "pallas": "purepage.kernels.pallas",
    "xla": "purepage.kernels.xla",
}
"""Module of each implementation, in the order in which they are tried."""


@dataclass(frozen=True)
class Plan:
    """What an implementation does for calls like the one that was planned.

    Attributes:
      run: takes the call and what the operation takes beside it, returns the operation's results.
      program: the Triton launches, a `purepage.kernels.launch.Program`; None where there are none.
      configurations: says where the configuration of each of its kernels comes from, one sentence each.
    """

    run: Callable[..., Any]
    program: Any = None
    configurations: Callable[[], tuple[str, ...]] = tuple


@dataclass(frozen=True)
class Unsupported:
    """Why an implementation does not serve a call.

    Attributes:
      reasons: one sentence each, with the argument that it can't serve.
      broken: an installed package does not work. Where nothing is asked for by name, the call goes on to the next implementation, with one
        warning.
    """

    reasons: tuple[str, ...]
    broken: bool = False


class Implementation(Protocol):
    """What the module of an implementation has."""

    SERVES: Mapping[str, Serves]
    """What it serves of each operation. Anything else is refused before `plan` is called."""

    def plan(self, operation: str, call: Any, target: Target, *, explicit: bool) -> Plan | Unsupported:
        """The plan of a call that `SERVES` admits.

        `explicit` is False where the caller named no implementation: then one also declines what it can do but should not be picked for,
        such as kernels in an interpreter.
        """
        ...


Interceptor = Callable[[str, Any, str | None], str]
_INTERCEPTOR = jax.make_user_context(None)


@contextmanager
def intercept(interceptor: Interceptor) -> Iterator[None]:
    """Inside, every `run` first calls `interceptor(operation, call, implementation)` and runs the implementation that it returns.

    The interceptor is part of the key of `jax.jit`: functions that were jitted and called before are traced again inside, and what is
    traced inside is not used outside.
    """
    with _INTERCEPTOR(interceptor):
        yield


def _module(name: str) -> Any:
    """The module of an implementation; None where it is not part of the installation."""
    path = IMPLEMENTATIONS[name]
    return sys.modules.get(path) or _imported(path)


@cache
def _imported(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:  # the module exists and one of its imports is missing: that is an error, not an absence
            raise
        return None


def check_implementation(implementation: Any) -> str | None:
    """`implementation`, checked.

    Raises:
      ValueError: it is neither None nor one of the names; the message lists them.
    """
    if implementation is not None and not (isinstance(implementation, str) and implementation in IMPLEMENTATIONS):
        bad_value("implementation", implementation, f"None or one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    return implementation


def plan_with(implementation: str, operation: str, call: Any, target: Target, *, explicit: bool) -> Plan | Unsupported:
    """The plan of one implementation, or why it has none."""
    module = _module(implementation)
    if module is None:
        return Unsupported(("not part of this installation",))
    serves = module.SERVES.get(operation)
    if serves is None:
        return Unsupported((f"has no kernel for {operation}",))
    reasons = serves.unsupported_reasons(call, target)
    if reasons:
        return Unsupported(reasons)
    return module.plan(operation, call, target, explicit=explicit)


def unsupported_reasons(operation: str, call: Any, implementation: str, target: Target, *, explicit: bool) -> tuple[str, ...]:
    """Why `implementation` does not serve `call` on `target`; empty where it does."""
    planned = plan_with(implementation, operation, call, target, explicit=explicit)
    return planned.reasons if isinstance(planned, Unsupported) else ()


@dataclass(frozen=True)
class Order:
    """The implementations in the order in which they are tried, and why AITER stands where it does."""

    names: tuple[str, ...]
    why: str


AITER_FIRST = ("aiter", *(name for name in IMPLEMENTATIONS if name != "aiter"))


def preferred(target: Target, operation: str, call: Any) -> Order:
    """The order in which implementations are tried for a call that names none.

    `triton` comes before `aiter`, unless a setting or the device's record says otherwise: the record where the tuner timed both for calls
    of the same key, and AITER was faster.
    """
    names, variable = tuple(IMPLEMENTATIONS), variable_of("prefer_aiter")
    if target.settings.prefer_aiter:
        return Order(AITER_FIRST, f"{variable} is on")
    default = f"purepage's kernels come first; {variable}=1, or implementation='aiter', sends calls to AITER"
    row = _measured(target, operation, call)
    if row is None:
        return Order(names, f"{default}; the device's record has no comparison for such calls")
    times = dict(row.us_of)
    said = f"the record of {row.date} has aiter {times['aiter']:.1f} us, triton {times['triton']:.1f} us"
    return Order(AITER_FIRST, said) if times["aiter"] < times["triton"] else Order(names, f"{default}; {said}")


def _measured(target: Target, operation: str, call: Any) -> Row | None:
    """The record's row of such calls, where it compares AITER with Triton."""
    if target.record is None or not any({"aiter", "triton"} <= dict(row.us_of).keys() for row in target.record.rows.values()):
        return None
    module = _module("triton")
    row = target.record.rows.get((operation, module.shape_key_of(operation, call))) if module is not None else None
    return row if row is not None and {"aiter", "triton"} <= dict(row.us_of).keys() else None


def is_named(name: str, asked: str | None, target: Target) -> bool:
    """Whether a name, or a setting that stands for it, asks for an implementation: then it serves what it otherwise leaves to others."""
    return name == asked or (asked is None and name == "aiter" and target.settings.prefer_aiter)


@cache
def _warn_once(name: str, reasons: tuple[str, ...], served: str) -> None:
    warnings.warn(f"{name} is passed over, {served} serves its calls: {', '.join(reasons)}", RuntimeWarning, stacklevel=2)


def choose(operation: str, call: Any, implementation: str | None = None) -> tuple[str, Plan]:
    """The implementation that serves `call`, and its plan.

    Args:
      operation: name of the operation.
      call: one of `purepage.functional.calls`.
      implementation: the one to take; None: the first that serves the call.

    Raises:
      ValueError: `implementation` is not one of the names.
      UnsupportedError: the named one, or every one, can't serve the call; the message has each reason.
    """
    target, asked = current_target(), check_implementation(implementation)
    refused, failed = {}, {}
    for name in preferred(target, operation, call).names if asked is None else (asked,):
        planned = plan_with(name, operation, call, target, explicit=is_named(name, asked, target))
        if isinstance(planned, Plan):
            for other, reasons in failed.items():
                _warn_once(other, reasons, name)
            return name, planned
        refused[name] = planned.reasons
        if planned.broken:
            failed[name] = planned.reasons
    if asked is None:
        raise UnsupportedError(
            f"no implementation can serve this {operation}: " + "; ".join(f"{name}: {', '.join(why)}" for name, why in refused.items())
        )
    others = [n for n in IMPLEMENTATIONS if n != asked and not unsupported_reasons(operation, call, n, target, explicit=True)]
    able = f"{', '.join(others)} can" if others else "no other can either"
    raise UnsupportedError(f"{asked} can't serve this {operation}: {', '.join(refused[asked])}; {able}")


def run(operation: str, call: Any, implementation: str | None, *operands: Any) -> Any:
    """Runs `call` (and what the operation takes beside it) with the implementation of that name, or the first that can serve it.

    Where the arrays lie on several devices, each device serves its part: see `partition`.
    """
    interceptor = _INTERCEPTOR.value
    if interceptor is not None:
        implementation = interceptor(operation, call, check_implementation(implementation))
    name, planned = choose(operation, call, implementation)
    divided = partition.divided(operation, call, operands)
    if divided is None:
        return planned.run(call, *operands)

    def serve(part: Any, *operands: Any) -> Any:
        return choose(operation, part, implementation)[1].run(part, *operands)

    return divided(serve, may_call_host=name != "xla")
