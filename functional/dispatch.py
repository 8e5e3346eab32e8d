"""Which implementation serves a call.

An implementation is a module with one function per operation that it has, and `refusals(operation, call, explicit)`, which says why it can't
serve a call (an empty tuple: it can). Modules are imported when first considered, so the functional core needs neither torch nor triton.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from .errors import UnsupportedError, bad_value

IMPLEMENTATIONS: Mapping[str, str] = {
    "aiter": "purepage.bridges.aiter",
    "triton": "purepage.bridges.triton",
    "pallas": "purepage.kernels.pallas",
    "xla": "purepage.kernels.xla",
}
"""Module of each implementation, best first."""


Watcher = Callable[[str, Any, str | None], str]
_WATCHER: ContextVar[Watcher | None] = ContextVar("purepage_watcher", default=None)


@contextmanager
def intercept(watcher: Watcher) -> Iterator[None]:
    """Inside, every `run` first calls `watcher(operation, call, implementation)`, and runs the implementation that it returns."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def _module(name: str) -> ModuleType | None:
    path = IMPLEMENTATIONS[name]
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:  # the module is there, but something that it needs is not: that must be heard
            raise
        return None


def refusals(operation: str, call: Any, implementation: str, *, explicit: bool) -> tuple[str, ...]:
    """Why `implementation` can't serve `call`, one reason an entry; empty where it can.

    `explicit` is False when the caller left the choice to us: then an implementation also declines what it can do but should not be picked
    for, such as kernels through an interpreter.
    """
    module = _module(implementation)
    if module is None:
        return ("not part of this installation",)
    if not hasattr(module, operation):
        return (f"has no kernel for {operation}",)
    return tuple(module.refusals(operation, call, explicit))


def choose(operation: str, call: Any, implementation: str | None = None) -> str:
    """The implementation that serves `call`.

    Raises:
      ValueError: `implementation` is not one of the names.
      UnsupportedError: the named one, or every one, can't serve the call; the message has each reason.
    """
    if implementation is None:
        reasons = {}
        for name in IMPLEMENTATIONS:
            reasons[name] = refusals(operation, call, name, explicit=False)
            if not reasons[name]:
                return name
        raise UnsupportedError(
            f"no implementation can serve this {operation}: " + "; ".join(f"{n}: {', '.join(r)}" for n, r in reasons.items())
        )
    if implementation not in IMPLEMENTATIONS:
        bad_value("implementation", implementation, f"None or one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    why = refusals(operation, call, implementation, explicit=True)
    if not why:
        return implementation
    others = [name for name in IMPLEMENTATIONS if name != implementation and not refusals(operation, call, name, explicit=True)]
    able = f"{', '.join(others)} can" if others else "no other can either"
    raise UnsupportedError(f"{implementation} can't serve this {operation}: {', '.join(why)}; {able}")


def run(operation: str, call: Any, implementation: str | None, *operands: Any) -> Any:
    """Runs `call` (and what the operation takes beside it) with the implementation of that name, or the best that can serve it."""
    watcher = _WATCHER.get()
    if watcher is not None:
        implementation = watcher(operation, call, implementation)
    module = _module(choose(operation, call, implementation))
    return getattr(module, operation)(call, *operands)
