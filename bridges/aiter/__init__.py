"""The `aiter` implementation: AITER's own operators on XLA's buffers, inside `jax.jit`.

`unified` and `decode` are attention, `writers` the cache writers; `rules` has what each operator serves, `views` shows it a cache in the
form that it reads, `package` loads it. AITER is imported when an operator is first used.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from ...functional.dispatch import Plan, Unsupported
from ...functional.target import Target
from .. import trial
from . import package as package
from .decode import paged_decode
from .rules import SERVES, not_here, operator_of, unsupported_reasons
from .unified import unified_attention
from .writers import qk_norm_rope_and_update_cache, rope_and_update_cache, update_cache

__all__ = ["SERVES", "plan"]

_WITH_TARGET: Mapping[str, Callable[..., Any]] = {
    "unified_attention": unified_attention,
    "fused_qk_rope_reshape_and_cache": rope_and_update_cache,
}
"""Adapters of operators that may be recorded into a command buffer, which the target's settings decide."""

_ADAPTERS: Mapping[str, Callable[..., Any]] = {
    "paged_attention_decode": paged_decode,
    "reshape_and_cache": update_cache,
    "reshape_and_cache_flash": update_cache,
    **dict.fromkeys(package.QK_NORM_OPERATORS, qk_norm_rope_and_update_cache),
}


def _broken(operator: str, target: Target) -> str | None:
    """Why the operator can't be used in this process, whose GPU is the target; None where it can."""
    if not trial.on_gpu():
        return None
    return trial.broken(("torch", "triton"), target) or _load_failure(operator)


@cache
def _load_failure(operator: str) -> str | None:
    """What loading the operator raises; None where it loads. Tried once: `package.load` keeps no failure."""
    try:
        package.load(operator)
    except Exception as error:
        cause = error.__cause__ or error
        return f"amd-aiter is installed and its {operator} does not import: {type(cause).__name__}: {cause}"
    return None


def plan(operation: str, call: Any, target: Target, *, explicit: bool) -> Plan | Unsupported:
    """The operator that serves a call on `target`, or why none does; see `purepage.functional.dispatch`."""
    if package.root() is None:
        return Unsupported((package.NOT_INSTALLED,))
    if why := not_here(target, explicit=explicit):
        return Unsupported((why,))
    operator = operator_of(operation, call, target)
    if why := package.unavailable(operator, target):
        return Unsupported((why,))
    if reasons := unsupported_reasons(operation, call, target, explicit=explicit):
        return Unsupported(reasons)
    if target.platform != "cpu" and (why := _broken(operator, target)):
        return Unsupported((why,), broken=True)
    return Plan(partial(_WITH_TARGET[operator], target) if operator in _WITH_TARGET else _ADAPTERS[operator])
