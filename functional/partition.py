"""Calls over arrays that lie on several devices: each device serves its part of the call, and no cache moves.

A `Rule` says how an operation divides: heads (tensor parallel), sequences with their tokens and blocks (data parallel), and the blocks of
one sequence (context parallel, `context.py`). `run` finds out how the arguments lie and applies the rule:

- arrays whose shardings are known (concrete ones, and traced ones over Explicit axes): a `jax.shard_map` around the call;
- arrays that XLA shards by itself (Auto axes under `jit`): `custom_partitioning`, which asks the rule when XLA has decided. On one device
  it is lowered to the call itself.

Inside a caller's own `shard_map` there is nothing to divide.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from . import host_slots
from .partition_rules import RULES, Axes, Rule

Shapes = Mapping[str, int]


def divided(operation: str, call: Any, operands: tuple[Any, ...]) -> Callable[..., Any] | None:
    """How to serve a call whose arrays may lie on several devices; None where it is served as it is.

    Args:
      operation: name of the operation.
      call: one of `purepage.functional.calls`.
      operands: what the operation takes beside it.

    Returns:
      A function of `serve`, which serves a call or a part of one as a call of its own, and of `may_call_host`, whether it may call Python
      when the program runs. It returns what `serve` returns, and raises `UnsupportedError` where the call can't be divided as its arguments
      lie; the message says what to wrap.
    """
    if operation not in RULES or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    leaves, structure = jax.tree.flatten((call, operands))
    one_device = jax.device_count() == 1
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        mesh = _concrete_mesh(leaves)
        apply = None if mesh is None else partial(_under_shard_map, mesh)
    else:
        mesh = _traced_mesh(leaves)
        kinds = {kind for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True) if size > 1} or set(mesh.axis_types)
        if kinds == {AxisType.Explicit}:  # also of one device: every intermediate value has its sharding in its type
            apply = partial(_under_shard_map, mesh)
        else:  # axes of several kinds are left to XLA
            apply = _under_custom_partitioning if kinds <= {AxisType.Auto} and not one_device else None
    if apply is None:
        return None

    def run(serve: Callable[..., Any], *, may_call_host: bool) -> Any:
        return apply(_Parts(RULES[operation], serve, call, operands, structure, may_call_host), leaves)

    return run


def together(tree: Any) -> Any:
    """`tree` with arrays over Explicit axes whole on every device; what XLA shards by itself stays."""

    def whole(leaf: Any) -> Any:
        sharding = jax.typeof(leaf).sharding
        if not sharding.mesh.explicit_axes or sharding.is_fully_replicated:
            return leaf
        if isinstance(leaf, Tracer):
            return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, PartitionSpec()))
        return jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, PartitionSpec()))

    return jax.tree.map(whole, tree)


def _concrete_mesh(leaves: list[Any]) -> Mesh | None:
    """The mesh over which some array is divided, if only in its type; None where each is whole on every device that has it."""
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            in_type = bool(sharding.mesh.explicit_axes) and any(sharding.spec)  # over Explicit axes of one device
            if in_type or not sharding.is_fully_replicated:
                return sharding.mesh
    return None


def _traced_mesh(leaves: list[Any]) -> AbstractMesh:
    """The mesh of the arguments' types, else the one of the context; empty where neither is known."""
    for leaf in leaves:
        mesh = jax.typeof(leaf).sharding.mesh
        if not mesh.empty:
            return mesh
    return jax.sharding.get_abstract_mesh()


def _axes_of(spec: PartitionSpec, ndim: int) -> Axes:
    """The mesh axes of each dimension, as tuples."""
    names = [() if each is None or each is PartitionSpec.UNCONSTRAINED else each if isinstance(each, tuple) else (each,) for each in spec]
    return tuple(names) + ((),) * (ndim - len(names))


def _spec_of(axes: Axes) -> PartitionSpec:
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in axes))


@dataclass(frozen=True, eq=False)
class _Parts:
    """A call and its rule; arrays are passed flat."""

    rule: Rule
    serve: Callable[..., Any]
    call: Any
    operands: tuple[Any, ...]
    structure: Any
    may_call_host: bool

    def unflatten(self, leaves: Any) -> tuple[Any, tuple[Any, ...]]:
        return jax.tree.unflatten(self.structure, leaves)

    def whole(self, *leaves: Any) -> tuple[Any, ...]:
        call, operands = self.unflatten(leaves)
        return self.rule.arrays(call, self.serve(call, *operands))

    def results(self, arrays: Any) -> Any:
        return self.rule.results(self.call, tuple(arrays))

    def divide(self, axes: list[Axes], sizes: Shapes) -> tuple[list[Axes], list[Axes], Callable[..., tuple[Any, ...]]]:
        """(axes that each argument must have, axes of each result, the function of one device) for arguments that lie as `axes` say."""
        call = self.call
        at, _ = self.unflatten(axes)
        division = self.rule.divide(call, at, sizes)
        labels = self._labels()
        wanted = [
            given if of is None else tuple(division.axes.get(label, ()) for label in of) for given, of in zip(axes, labels, strict=True)
        ]
        results = [tuple(division.axes.get(label, ()) for label in of) for of in self.rule.result_labels(call)]

        def local(*leaves: Any) -> tuple[Any, ...]:
            part, parts = self.unflatten(leaves)
            return division.serve(self.serve, part, *parts)

        return wanted, results, local

    def _labels(self) -> list[tuple[str, ...] | None]:
        """The label of every dimension of every argument; None for an array that may lie as it likes."""
        labelled = self.rule.labels(self.call, self.operands)
        return self.structure.flatten_up_to(labelled)

    def sharding_rule(self) -> tuple[str, dict[str, int]]:
        """What XLA may conclude about the shardings of arguments and results from one another: a rule in Shardy's notation.

        Only heads, tokens, sequences and blocks are related. Slots and ranges of keys stay apart from the tokens: whether a caller divides
        them says whether sequences keep to their device.
        """
        sizes: dict[str, int] = {}
        count = iter(range(1 << 30))
        heads, group = self.rule.heads(self.call)

        def factor(label: str) -> str:
            if label == "Hq" and heads > 1:
                return "(h g)" if group > 1 else "h"
            linked = {"T": "t", "S": "s", "B": "b", "H": "h", "Hq": "q", "Hx": "x"}.get(label)
            return linked or f"u{next(count)}"

        if group > 1 and heads > 1:
            sizes["g"] = group
        given = [
            " ".join(factor(label) for label in (of or ("",) * leaf.ndim)) for of, leaf in zip(self._labels(), self._leaves(), strict=True)
        ]
        made = [" ".join(map(factor, of)) for of in self.rule.result_labels(self.call)]
        return f"{', '.join(given)} -> {', '.join(made)}", sizes

    def _leaves(self) -> Iterator[Any]:
        return iter(jax.tree.leaves((self.call, self.operands)))


def _under_shard_map(mesh: Any, parts: _Parts, leaves: list[Any]) -> Any:
    sizes = dict(mesh.shape)

    def lies(leaf: Any) -> Axes:
        sharding = jax.typeof(leaf).sharding if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        return _axes_of(sharding.spec, leaf.ndim) if isinstance(sharding, NamedSharding) else ((),) * leaf.ndim

    given = [lies(leaf) for leaf in leaves]
    wanted, results, local = parts.divide(given, sizes)
    placed = []
    for leaf, now, then in zip(leaves, given, wanted, strict=True):
        traced = isinstance(leaf, Tracer)
        there = traced and not jax.typeof(leaf).sharding.mesh.empty
        sharding = NamedSharding(mesh, _spec_of(then))
        if now == then and (there or (not traced and getattr(leaf, "sharding", None) == sharding)):
            placed.append(leaf)
        else:
            move = jax.sharding.reshard if isinstance(mesh, AbstractMesh) else jax.device_put
            placed.append(move(leaf, sharding))
    specs = tuple(map(_spec_of, wanted))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tuple(map(_spec_of, results)), check_vma=False)
    return parts.results(mapped(*placed) if isinstance(mesh, AbstractMesh) else jax.jit(mapped)(*placed))


def _under_custom_partitioning(parts: _Parts, leaves: list[Any]) -> Any:
    function = custom_partitioning(parts.whole)
    function.def_partition(None)  # `_lower` makes the one that is lowered
    whole = jax.make_jaxpr(function)(*leaves)
    return parts.results(_partitioned_p.bind(*leaves, whole=whole, parts=parts))


_partitioned_p = Primitive("purepage_partitioned")
"""A call that XLA divides. Its parameter `whole`, a jaxpr with a `custom_partitioning` in it, tells JAX that the lowering needs devices."""
_partitioned_p.multiple_results = True
_partitioned_p.is_high = lambda *avals, **params: False  # since jax 0.12 `whole` would decide, which is never lowered
_partitioned_p.def_abstract_eval(lambda *avals, whole, parts: whole.out_avals)
_partitioned_p.def_impl(lambda *leaves, whole, parts: parts.whole(*leaves))


def _lower(ctx: Any, *values: Any, whole: Any, parts: _Parts) -> Any:
    slots = host_slots.HostSlots(ctx.module_context) if parts.may_call_host else None
    function = custom_partitioning(parts.whole)

    def partition(mesh: Mesh, arguments: Any, results: Any) -> Any:
        given = [_axes_of(leaf.sharding.spec, len(leaf.shape)) for leaf in arguments]
        wanted, made, local = parts.divide(given, dict(mesh.shape))

        def of_one_device(*leaves: Any) -> tuple[Any, ...]:
            with host_slots.using(slots):
                return local(*leaves)

        def place(axes: Axes) -> NamedSharding:
            return NamedSharding(mesh, _spec_of(axes))

        return mesh, of_one_device, tuple(map(place, made)), tuple(map(place, wanted))

    rule, sizes = parts.sharding_rule()
    options: dict[str, Any] = {"sharding_rule": rule, **sizes}
    function.def_partition(partition, **options)
    return mlir.lower_fun(lambda *leaves: function(*leaves), multiple_results=True)(ctx, *values)


mlir.register_lowering(_partitioned_p, _lower)


def _batch(leaves: Any, axes: Any, *, whole: Any, parts: _Parts) -> tuple[Any, Any]:
    outs = jax.vmap(parts.whole, in_axes=tuple(axes))(*leaves)
    return outs, [0] * len(outs)


batching.primitive_batchers[_partitioned_p] = _batch
