"""`explain`: which implementation and which kernels serve a call, and why the others do not.

The function is traced under an assumed target and an interceptor, both of which are in the key of every trace that JAX keeps. So a jitted
function is traced anew for each explanation, whether it ran before or not, and runs afterwards as if it had not been explained.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..functional import dispatch, record
from ..functional.cache import CacheSpec, KVCache, format_bytes
from ..functional.config import is_array
from ..functional.errors import bad_type
from ..functional.html import table
from ..functional.literals import Implementation
from ..functional.target import Target, assuming_target, current_target, named_target
from ..kernels.launch import Buffer, Launch, Program
from .automatic import Counter, counted
from .choice import choose
from .steps import pallas_kernels, steps_of

SHOWN_FACTS = (
    *("block_m", "block_tokens", "block_heads", "block_n", "masked_block_n", "split_tokens", "num_splits", "parts_per_step", "page_size"),
    *("compute_dtype", "hardware_fp8", "slots.hardware_fp8"),
)
"""Facts of a launch that say how the work is divided; the others restate the call."""

WHAT_RUNS = {"aiter": "AITER's own operators", "pallas": "Pallas kernels", "xla": "plain JAX, compiled by XLA"}


@dataclass(frozen=True)
class Choice:
    """One operation that the function asks for.

    Attributes:
      operation: name of the operation.
      implementation: the one that serves it; None where none can.
      unsupported_reasons: for each implementation why it can't serve the call or is not chosen; empty where it can.
      program: launches of the `triton` implementation where that is chosen, else None.
      bridge: how they reach XLA.
      kernels: (name, grid) of each kernel of the `pallas` implementation where that is chosen.
      by_name: whether the implementation was asked for by name.
      bridge_reason: why through this bridge.
      configurations: where the configuration of each kernel of `program` comes from: the device's record, or the tables.
      order_reason: why `triton` or `aiter` comes first, where both can serve the call and neither is named.
      steps: for each implementation that can serve the call, asked for by name, what runs; empty unless `side_by_side` was asked for.
    """

    operation: str
    implementation: str | None
    unsupported_reasons: Mapping[str, tuple[str, ...]]
    program: Program | None
    bridge: str
    kernels: tuple[tuple[str, tuple[int, ...]], ...] = ()
    by_name: bool = False
    bridge_reason: str = ""
    steps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    configurations: tuple[str, ...] = ()
    order_reason: str = ""

    def _able(self) -> str:
        """What is said of an implementation that could serve the call and is not the one."""
        return f"can serve it, {self.implementation} {'is asked for by name' if self.by_name else 'comes first'}"

    def __str__(self) -> str:
        lines = [f"{self.operation}: {self.implementation or 'no implementation can serve it'}"]
        if self.program is not None:
            lines += [f"  {line}" for line in _program_lines(self.program, self.bridge, self.bridge_reason)]
            lines += [f"  {line}" for line in self.configurations]
        elif self.implementation is not None:
            lines.append(f"  {WHAT_RUNS[self.implementation]}")
            lines += [f"  {number}. {name}: grid {'x'.join(map(str, grid))}" for number, (name, grid) in enumerate(self.kernels, 1)]
        for name, reasons in self.unsupported_reasons.items():
            if name != self.implementation:
                lines.append(f"  not {name}: {'; '.join(reasons) if reasons else self._able()}")
        if self.order_reason:
            lines.append(f"  triton or aiter: {self.order_reason}")
        for name, steps in self.steps.items():
            lines += [f"  as {name}:", *(f"    {number}. {step}" for number, step in enumerate(steps, 1))]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; prints as text.

    Attributes:
      target: the device that was asked about.
      choices: the operations, in the order in which the function asks for them.
      record: the record of the target's device, or why it has none; empty on a CPU without one.
    """

    target: Target
    choices: tuple[Choice, ...]
    record: str = ""

    def __str__(self) -> str:
        units = f", {self.target.compute_units} compute units" if self.target.compute_units > 1 else ""
        lines = [f"on {self.target.arch}{units}"]
        if self.record:
            lines.append(f"  {self.record}")
        if self.target.platform != "cpu":
            recorded = "may be" if self.target.records_launches else "are not"
            lines.append(f"  launches {recorded} recorded into command buffers: {self.target.recording_reason}")
        return "\n".join([*lines, *map(str, self.choices)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts, where = [], str(self).splitlines()[0]
        for choice in self.choices:
            program = choice.program
            rows: list[tuple[Any, ...]] = []
            for name, reasons in choice.unsupported_reasons.items():
                found = "serves it" if name == choice.implementation else "; ".join(reasons) or choice._able()
                rows.append((name, found))
            rows += [("configuration", source) for source in choice.configurations]
            parts.append(table(f"{choice.operation} {where}: {choice.implementation or 'no implementation can serve it'}", rows))
            if program is not None:
                launches = [launch_row(number, launch) for number, launch in enumerate(program.launches, 1)]
                parts.append(table(f"launches, through the {choice.bridge} bridge: {choice.bridge_reason}", launches, head=LAUNCH_HEAD))
            if choice.steps:
                rows = [(name, number, step) for name, steps in choice.steps.items() for number, step in enumerate(steps, 1)]
                parts.append(table(f"{choice.operation}, side by side", rows, head=("", "", "step")))
        return "".join(parts)


LAUNCH_HEAD = ("", "kernel", "grid", "warps", "stages", "tiles")


def launch_row(number: int, launch: Launch) -> tuple[Any, ...]:
    """Cells of a launch under `LAUNCH_HEAD`."""
    tiles = ", ".join(f"{name} {launch.facts[name]}" for name in SHOWN_FACTS if launch.facts.get(name))
    return number, launch.name, " x ".join(map(str, launch.grid)), launch.num_warps, launch.num_stages, tiles


def _program_lines(program: Program, bridge: str, reason: str) -> list[str]:
    written = f"writes {', '.join(program.updates)} in place" if program.updates else "writes none of its inputs"
    lines = [f"through the {bridge} bridge ({reason}); {written}"]
    lines += [f"{number}. {_launch_text(launch)}" for number, launch in enumerate(program.launches, 1)]
    if program.scratch:
        lines.append(f"scratch {format_bytes(sum(_nbytes(buffer) for _, buffer in program.scratch))}")
    return lines


def _launch_text(launch: Launch) -> str:
    facts = launch.facts
    tiles = ", ".join(f"{name} {facts[name]}" for name in SHOWN_FACTS if facts.get(name))
    grid = "x".join(map(str, launch.grid))
    return f"{launch.name}: grid {grid}, {launch.num_warps} warps, {launch.num_stages} stages; {tiles}"


def _nbytes(buffer: Buffer) -> int:
    return prod(buffer.shape) * jnp.dtype(buffer.dtype).itemsize


def explain(
    function: Callable[..., Any],
    /,
    *args: Any,
    arch: str | None = None,
    implementation: Implementation | None = None,
    side_by_side: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Says which implementation and kernels would run for `function(*args, **kwargs)`, and why the others would not. Nothing is computed.

        print(pp.explain(pp.paged_attention, query, cache, metadata, sliding_window=128, arch="gfx942"))

    Args:
      function: a function of purepage, or one that calls some; jitted or not.
      args, kwargs: its arguments. An array may be a `jax.ShapeDtypeStruct`, a cache a `CacheSpec`.
      arch: an architecture or a product, "gfx942", "MI300X", "sm_90", "cpu", ...: what would run there, with the packages that are
        installed here; default: the device that JAX computes on.
      implementation: asks for this one, as the argument of that name of each function.
      side_by_side: also shows the steps of every implementation that can serve a call, asked for by name: the loops of `xla`, the kernels
        of `pallas`, the launches of `triton`, the operator of `aiter`. It takes a trace of each.

    Returns:
      An `Explanation`; printing it shows the text.

    Raises:
      ValueError: no such architecture or implementation; the message lists them.
      ValueError, TypeError: what the function itself raises for bad arguments.
    """
    if not callable(function):
        bad_type("function", function, "a function of purepage, such as pp.paged_attention")
    dispatch.check_implementation(implementation)
    target = current_target() if arch is None else named_target(arch)
    found: list[tuple[Choice, Counter]] = []

    def interceptor(operation: str, call: Any, asked: str | None) -> str:
        choice = _choice(operation, call, implementation or asked, target)
        if side_by_side:
            choice = replace(choice, steps=_steps(operation, call, target))
        found.append((choice, counted() if choice.program is not None else Counter()))
        return "xla"  # it serves every call, and the trace is only for its shapes

    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, CacheSpec))
    leaves, caches = _with_caches(leaves, tree)
    traced = [place for place, leaf in enumerate(leaves) if is_array(leaf) and not isinstance(leaf, np.generic)]

    def shapes_only(arrays: list[Any]) -> Any:
        filled = list(leaves)
        for place, array in zip(traced, arrays, strict=True):
            filled[place] = array
        positional, named = jax.tree.unflatten(caches, filled)
        function(*positional, **named)

    with assuming_target(target), dispatch.intercept(interceptor):
        jax.eval_shape(shapes_only, [leaves[place] for place in traced])
    recorded = record.described(target) if target.record is not None or target.platform != "cpu" else ""
    return Explanation(target, tuple(_with_bridge(choice, target, counter.calls) for choice, counter in found), recorded)


def _with_bridge(found: Choice, target: Target, calls: int) -> Choice:
    """What was found, and the bridge that the program takes among so many of its trace."""
    if found.program is None:
        return found
    taken = choose(target, calls)
    return replace(found, bridge=taken.bridge, bridge_reason=taken.why)


def _with_caches(leaves: list[Any], tree: Any) -> tuple[list[Any], Any]:
    """Leaves and tree with a shape-only cache for each `CacheSpec`."""
    whole = jax.tree.unflatten(tree, [_abstract_cache(leaf) if isinstance(leaf, CacheSpec) else leaf for leaf in leaves])
    return jax.tree.flatten(whole)


def _abstract_cache(spec: CacheSpec) -> KVCache:
    data: Any = jax.ShapeDtypeStruct(spec.shape, spec.storage_dtype)
    scale: Any = jax.ShapeDtypeStruct((spec.num_layers,), jnp.float32)
    return KVCache(data, scale, scale, spec)


def _choice(operation: str, call: Any, asked: str | None, target: Target) -> Choice:
    plans = {
        name: dispatch.plan_with(name, operation, call, target, explicit=dispatch.is_named(name, asked, target))
        for name in dispatch.IMPLEMENTATIONS
    }
    reasons = {name: planned.reasons if isinstance(planned, dispatch.Unsupported) else () for name, planned in plans.items()}
    order = dispatch.preferred(target, operation, call)
    candidates = [asked] if asked is not None else list(order.names)
    chosen = next((name for name in candidates if not reasons[name]), None)
    served = plans[chosen] if chosen is not None else None
    planned = served if isinstance(served, dispatch.Plan) else None
    return Choice(
        operation,
        chosen,
        reasons,
        planned.program if planned is not None else None,
        "",
        pallas_kernels(planned, call) if chosen == "pallas" and planned is not None else (),
        asked is not None,
        configurations=planned.configurations() if planned is not None else (),
        order_reason="" if asked is not None or reasons["triton"] or reasons["aiter"] else order.why,
    )


def _steps(operation: str, call: Any, target: Target) -> dict[str, tuple[str, ...]]:
    """What each implementation would run for the call, of those that can serve it by name."""
    plans = {name: dispatch.plan_with(name, operation, call, target, explicit=True) for name in dispatch.IMPLEMENTATIONS}
    return {name: steps_of(plan, call) for name, plan in plans.items() if isinstance(plan, dispatch.Plan)}
