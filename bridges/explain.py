"""What would run for a call, and why nothing else: `explain`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..functional import dispatch
from ..functional.cache import CacheSpec, KVCache, format_bytes
from ..functional.config import is_array
from ..functional.errors import bad_type, bad_value
from ..kernels.launch import Buffer, Launch, Program
from .arch import Arch, assuming_arch, default_arch, named_arch
from .execute import chosen_bridge

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
      implementation: the one that would serve it; None where none can.
      refusals: for each implementation why it can't or would not be picked; empty where it can.
      program: launches of the `triton` implementation where that is chosen, else None.
    """

    operation: str
    implementation: str | None
    refusals: Mapping[str, tuple[str, ...]]
    program: Program | None

    def __str__(self) -> str:
        lines = [f"{self.operation}: {self.implementation or 'nothing can serve it'}"]
        if self.program is not None:
            lines += [f"  {line}" for line in _program_lines(self.program)]
        elif self.implementation is not None:
            lines.append(f"  {WHAT_RUNS[self.implementation]}")
        for name, reasons in self.refusals.items():
            if name != self.implementation:
                lines.append(f"  not {name}: {'; '.join(reasons) if reasons else f'could serve it, {self.implementation} goes first'}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; prints as text.

    Attributes:
      arch: the architecture that was asked about.
      choices: the operations, in the order in which the function asks for them.
    """

    arch: Arch
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        units = f", {self.arch.compute_units} compute units" if self.arch.compute_units > 1 else ""
        return "\n".join([f"on {self.arch.name}{units}", *map(str, self.choices)])

    __repr__ = __str__


def _program_lines(program: Program) -> list[str]:
    written = f"writes {', '.join(program.updates)} in place" if program.updates else "writes none of its inputs"
    lines = [f"through the {chosen_bridge()} bridge; {written}"]
    lines += [f"{number}. {_launch_text(launch)}" for number, launch in enumerate(program.launches, 1)]
    if program.scratch:
        lines.append(f"scratch {format_bytes(sum(_nbytes(buffer) for _, buffer in program.scratch))}")
    return lines


def _launch_text(launch: Launch) -> str:
    facts = launch.facts
    tiles = ", ".join(f"{name} {facts[name]}" for name in SHOWN_FACTS if facts.get(name))
    grid = "x".join(map(str, launch.grid))
    return f"{launch.kernel.partition(':')[2]}: grid {grid}, {launch.num_warps} warps, {launch.num_stages} stages; {tiles}"


def _nbytes(buffer: Buffer) -> int:
    return prod(buffer.shape) * jnp.dtype(buffer.dtype).itemsize


def explain(
    function: Callable[..., Any], /, *args: Any, arch: str | None = None, implementation: str | None = None, **kwargs: Any
) -> Explanation:
    """Says which implementation and kernels would run for `function(*args, **kwargs)`, and why the others would not. Nothing is computed.

        print(pp.explain(pp.paged_attention, query, cache, metadata, sliding_window=128, arch="gfx942"))

    Args:
      function: a function of purepage, or of yours that calls some.
      args, kwargs: its arguments. An array may be a `jax.ShapeDtypeStruct`, a cache a `CacheSpec`.
      arch: "gfx942", "sm_90", "cpu", ...: what would run there, with the packages that are installed here; default: the device that JAX
        computes on.
      implementation: asks for this one, as the argument of that name of each function.

    Returns:
      An `Explanation`; printing it shows the text.

    Raises:
      ValueError, TypeError: what the function itself raises for bad arguments.
    """
    if not callable(function):
        bad_type("function", function, "a function of purepage, such as pp.paged_attention")
    if implementation is not None and implementation not in dispatch.IMPLEMENTATIONS:
        bad_value("implementation", implementation, f"None or one of {', '.join(map(repr, dispatch.IMPLEMENTATIONS))}")
    where = default_arch() if arch is None else named_arch(arch)
    found: list[Choice] = []

    def watch(operation: str, call: Any, asked: str | None) -> str:
        found.append(_choice(operation, call, implementation or asked, where))
        return "xla"  # serves every call; only shapes come of it

    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, CacheSpec))
    leaves, caches = _with_caches(leaves, tree)
    traced = [place for place, leaf in enumerate(leaves) if is_array(leaf) and not isinstance(leaf, np.generic)]

    def shapes_only(arrays: list[Any]) -> Any:
        filled = list(leaves)
        for place, array in zip(traced, arrays, strict=True):
            filled[place] = array
        positional, named = jax.tree.unflatten(caches, filled)
        function(*positional, **named)

    with assuming_arch(where), dispatch.intercept(watch):
        jax.eval_shape(shapes_only, [leaves[place] for place in traced])
    return Explanation(where, tuple(found))


def _with_caches(leaves: list[Any], tree: Any) -> tuple[list[Any], Any]:
    """Leaves and tree with a shape-only cache for each `CacheSpec`."""
    whole = jax.tree.unflatten(tree, [_abstract_cache(leaf) if isinstance(leaf, CacheSpec) else leaf for leaf in leaves])
    return jax.tree.flatten(whole)


def _abstract_cache(spec: CacheSpec) -> KVCache:
    data: Any = jax.ShapeDtypeStruct(spec.shape, spec.storage_dtype)
    scale: Any = jax.ShapeDtypeStruct((spec.num_layers,), jnp.float32)
    return KVCache(data, scale, scale, spec)


def _choice(operation: str, call: Any, asked: str | None, arch: Arch) -> Choice:
    refusals = {name: dispatch.refusals(operation, call, name, explicit=name == asked) for name in dispatch.IMPLEMENTATIONS}
    candidates = [asked] if asked is not None else list(dispatch.IMPLEMENTATIONS)
    chosen = next((name for name in candidates if not refusals[name]), None)
    program = None
    if chosen == "triton":
        from .triton import program_of

        program = program_of(operation, call, arch)
    return Choice(operation, chosen, refusals, program)
