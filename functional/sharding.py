"""How the types of the package lie over a mesh of devices: `Shardings`, and what a host does to keep a batch where its blocks are.

    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "model"))
    s = pp.sharding.Shardings(mesh)
    spec = s.cache_spec(spec)
    cache = pp.init_cache(spec, sharding=s)
    metadata = jax.device_put(metadata, s.metadata(metadata))

KV heads lie over `model` (tensor parallel), sequences with their tokens and blocks over `data` (data parallel), and the blocks of one
sequence over `context` (context parallel). Every function of the package, under `jit` or not, then computes where the cache is: see
docs/sharding.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from .block_ops import Blocks
from .cache import CacheSpec, KVCache
from .collectives import Collective, collectives
from .config import check_positive_int
from .errors import bad_type, bad_value
from .metadata import AttentionMetadata, check_metadata

__all__ = ["Collective", "Shardings", "collectives", "join_metadata", "validate_metadata"]


@dataclass(frozen=True)
class Shardings:
    """The sharding of every type over one mesh.

    Args:
      mesh: a `jax.sharding.Mesh` (or AbstractMesh) with any of the three axes, of Auto or of Explicit type. An axis that it lacks counts as
        one device.
      model: name of the axis of the heads.
      data: name of the axis of the sequences.
      context: name of the axis of the blocks of one sequence.

    Raises:
      TypeError, ValueError: not a mesh, or two axes of one name.
    """

    mesh: Mesh | AbstractMesh
    model: str = field(default="model", kw_only=True)
    data: str = field(default="data", kw_only=True)
    context: str = field(default="context", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            bad_type("mesh", self.mesh, "a jax.sharding.Mesh")
        names = (self.model, self.data, self.context)
        for name, value in zip(("model", "data", "context"), names, strict=True):
            if not isinstance(value, str):
                bad_type(name, value, "the name of a mesh axis")
        if len(set(names)) < 3:
            bad_value("context", self.context, f"another name than model ({self.model!r}) and data ({self.data!r}), which differ too")

    def size(self, axis: str) -> int:
        """Devices of an axis; 1 where the mesh lacks it."""
        return dict(self.mesh.shape).get(axis, 1)

    def named(self, *axes: Any) -> NamedSharding:
        """The sharding of an array with these axes, one for each dimension: None, a name or a tuple of names; those that the mesh lacks are
        left out.
        """
        there = [tuple(name for name in (axis if isinstance(axis, tuple) else (axis,)) if name in self.mesh.axis_names) for axis in axes]
        return NamedSharding(self.mesh, PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in there)))

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device: layers, scalars, rotary tables, `query_start_loc`."""
        return self.named()

    @property
    def rows(self) -> NamedSharding:
        """[T] or [T, ...]: tokens over `data` (positions, slots, `qkv`)."""
        return self.named(self.data)

    @property
    def tokens(self) -> NamedSharding:
        """[T, heads, D] and [T, heads]: tokens over `data`, heads over `model` (query, key, value, out, lse)."""
        return self.named(self.data, self.model)

    @property
    def heads(self) -> NamedSharding:
        """[Hq]: `sinks` and `alibi_slopes`, with their heads over `model`."""
        return self.named(self.model)

    def num_kv_heads(self, num_kv_heads: int) -> int:
        """KV heads that the cache holds: the least common multiple of the model's and the devices of `model`.

        Each KV head is held that many times the model's number fewer, one copy after the other; where it divides, once.
        """
        return math.lcm(check_positive_int("num_kv_heads", num_kv_heads), self.size(self.model))

    def num_heads(self, num_heads: int, num_kv_heads: int) -> int:
        """Query heads that are computed: the query heads of each KV head, padded to a multiple of its copies.

        Raises:
          ValueError: `num_heads` is no multiple of `num_kv_heads`.
        """
        copies = self.num_kv_heads(num_kv_heads) // num_kv_heads
        if check_positive_int("num_heads", num_heads) % num_kv_heads:
            bad_value("num_heads", num_heads, f"a multiple of num_kv_heads ({num_kv_heads})")
        group = num_heads // num_kv_heads
        return num_kv_heads * copies * -(-group // copies)

    def repeat_kv_heads(self, array: Any, *, axis: int) -> Array:
        """An array of KV heads (keys, values, their weights, scales) with each head as often as the cache holds it.

        Args:
          array: any array with KV heads along `axis`.
          axis: the axis of the heads.
        """
        array = jnp.asarray(array)
        copies = self.num_kv_heads(array.shape[axis]) // array.shape[axis]
        return array if copies == 1 else jnp.repeat(array, copies, axis=axis)

    def pad_heads(self, array: Any, num_kv_heads: int, *, axis: int) -> Array:
        """An array of query heads (queries, their weights, sinks, slopes) with zeros for the heads that `num_heads` adds.

        Args:
          array: any array with query heads along `axis`.
          num_kv_heads: KV heads of the model.
          axis: the axis of the heads.
        """
        array = jnp.asarray(array)
        axis %= array.ndim
        heads = array.shape[axis]
        padded = self.num_heads(heads, num_kv_heads)
        if padded == heads:
            return array
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        grouped = array.reshape(*before, num_kv_heads, heads // num_kv_heads, *after)
        widths = [(0, 0)] * grouped.ndim
        widths[axis + 1] = (0, (padded - heads) // num_kv_heads)
        return jnp.pad(grouped, widths).reshape(*before, padded, *after)

    def cache_spec(self, spec: CacheSpec) -> CacheSpec:
        """The spec of a model's cache on this mesh: KV heads as often as `num_kv_heads` says, blocks rounded up to divide evenly.

        Args:
          spec: the spec on one device; its blocks are those of all devices together.
        """
        if not isinstance(spec, CacheSpec):
            bad_type("spec", spec, "a CacheSpec")
        parts = self.size(self.data) * self.size(self.context)
        return replace(spec, num_kv_heads=self.num_kv_heads(spec.num_kv_heads), num_blocks=-(-spec.num_blocks // parts) * parts)

    def cache(self, cache: CacheSpec | KVCache, *, scales_per_head: bool = False) -> KVCache:
        """The shardings of a cache's arrays, as a `KVCache` of shardings for `jax.device_put`, `in_shardings` and `init_cache`.

        Args:
          cache: a spec, or a cache, whose own scales then decide over `scales_per_head`.
          scales_per_head: whether the scales are [L, H], which lie with their heads.

        Raises:
          ValueError: the KV heads or blocks do not divide evenly: `cache_spec` makes a spec that does.
        """
        spec = cache.spec if isinstance(cache, KVCache) else cache
        if not isinstance(spec, CacheSpec):
            bad_type("cache", cache, "a CacheSpec or a KVCache")
        parts = self.size(self.data) * self.size(self.context)
        if spec.num_kv_heads % self.size(self.model):
            rule = f"a multiple of the {self.size(self.model)} devices of axis {self.model!r} (see cache_spec, which repeats heads)"
            bad_value("spec.num_kv_heads", spec.num_kv_heads, rule)
        if spec.num_blocks % parts:
            bad_value("spec.num_blocks", spec.num_blocks, f"a multiple of the {parts} devices of axes {self.data!r} and {self.context!r}")
        places = {"B": (self.data, self.context), "H": self.model}

        def scale(given: Any) -> NamedSharding:
            per_head = given.ndim == 2 if isinstance(cache, KVCache) else scales_per_head
            return self.named(None, self.model) if per_head else self.replicated

        k_scale, v_scale = (cache.k_scale, cache.v_scale) if isinstance(cache, KVCache) else (None, None)
        data: Any = self.named(*(places.get(axis) for axis in spec.axes))
        scales: list[Any] = [scale(k_scale), scale(v_scale)]
        return KVCache(data, scales[0], scales[1], spec)

    def blocks(self, blocks: Blocks) -> Blocks:
        """The sharding of blocks that `gather_blocks` returns, as `Blocks` of a sharding: KV heads over `model`."""
        made: Any = self.named(*(self.model if axis == "H" else None for axis in blocks.spec.axes))
        return Blocks(made, blocks.spec)

    def metadata(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The shardings of the metadata's arrays, as `AttentionMetadata` of shardings: sequences and slots over `data`.

        With metadata that lies so, a caller says that the tokens of a device are those of its sequences and that these keep to its blocks
        (see `join_metadata`). Metadata that is whole on every device says nothing: attention then asks every device for every sequence.

        Raises:
          ValueError: sequences or tokens do not divide evenly over `data`.
        """
        if not isinstance(metadata, AttentionMetadata):
            bad_type("metadata", metadata, "AttentionMetadata")
        for name in ("seq_lens", "slot_mapping"):
            array = getattr(metadata, name)
            if array.shape[0] % self.size(self.data):
                bad_value(f"metadata.{name}", array, f"of a length that the {self.size(self.data)} devices of axis {self.data!r} divide")
        made: Any = (self.replicated, self.rows, self.named(self.data, None), self.rows)
        static = {name: getattr(metadata, name) for name in ("max_query_len", "max_seq_len", "causal", "block_size")}
        return AttentionMetadata(*made, **static)


def join_metadata(parts: Sequence[AttentionMetadata], *, num_blocks: int) -> AttentionMetadata:
    """The metadata of a batch over a `data` axis, from the metadata that each of its devices would have alone. Host-side.

    Each part's tokens are T / n rows of the whole, its padding among them. Padding rows become rows of the part's padding sequences, which
    have no keys: a sequence of the whole that ends within a part would otherwise take them. So a part with padding tokens needs padding
    sequences (`num_seqs` above the number of its sequences), and `max_query_len` covers the rows that they take.

    Args:
      parts: metadata of each device in the order of the axis, with concrete values, of one shape, `causal` and `block_size`. Block ids and
        slots count from 0 in each.
      num_blocks: blocks of the whole cache.

    Returns:
      One `AttentionMetadata` of all sequences. Block ids and slots count over the whole cache.

    Raises:
      ValueError, TypeError: no parts, parts of different shapes, a number of blocks that they do not divide, or padding tokens in a part
        without a padding sequence; names the part.
    """
    parts = [*parts]
    if not parts or not all(isinstance(part, AttentionMetadata) for part in parts):
        bad_type("parts", parts, "a sequence of at least one AttentionMetadata")
    blocks, rest = divmod(check_positive_int("num_blocks", num_blocks), len(parts))
    if rest:
        bad_value("num_blocks", num_blocks, f"a multiple of the {len(parts)} parts")
    first = parts[0]
    if first.block_size is None:
        bad_value("parts[0].block_size", None, "stated: slots are counted in blocks")
    starts, lens, tables, slots = [np.zeros(1, np.int64)], [], [], []
    for number, part in enumerate(parts):
        for name in ("seq_lens", "block_table", "slot_mapping"):
            if getattr(part, name).shape != getattr(first, name).shape:
                shape = list(getattr(first, name).shape)
                bad_value(f"parts[{number}].{name}", getattr(part, name), f"of the shape in the first part {shape}")
        for name in ("causal", "block_size"):
            if getattr(part, name) != getattr(first, name):
                bad_value(f"parts[{number}].{name}", getattr(part, name), f"that of the first part ({getattr(first, name)})")
        tokens = part.slot_mapping.shape[0]
        queries = _rows_of_padding(number, part)
        starts.append(number * tokens + np.cumsum(queries))
        lens.append(np.asarray(part.seq_lens))
        for found, array, offset, limit in (
            (tables, part.block_table, number * blocks, blocks),
            (slots, part.slot_mapping, number * blocks * first.block_size, blocks * first.block_size),
        ):
            own = np.asarray(array, np.int64)
            found.append(np.where((own >= 0) & (own < limit), own + offset, -1))
    limits = [part.max_seq_len for part in parts]
    joined = np.concatenate(starts)
    longest = int(np.max(np.diff(joined), initial=0))
    arrays: list[Any] = [each.astype(np.int32) for each in (joined, *map(np.concatenate, (lens, tables, slots)))]
    whole = AttentionMetadata(
        *arrays,
        max_query_len=max(*(int(part.max_query_len) for part in parts), _bucket(longest)),
        max_seq_len=None if any(limit is None for limit in limits) else max(int(limit) for limit in limits if limit is not None),
        causal=first.causal,
        block_size=first.block_size,
    )
    return check_metadata(whole)


def _bucket(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _rows_of_padding(number: int, part: AttentionMetadata) -> np.ndarray:
    """Query rows of each sequence of a part, its padding rows given evenly to the sequences at its end that have none."""
    queries = np.diff(np.asarray(part.query_start_loc, np.int64))
    tokens = part.slot_mapping.shape[0]
    spare = tokens - int(queries.sum())
    if not spare:
        return queries
    free = 0
    while free < len(queries) and queries[-1 - free] == 0 and int(part.seq_lens[-1 - free]) == 0:
        free += 1
    if not free:
        rule = "at the end to take them: make it with a larger num_seqs"
        bad_value(f"parts[{number}]", f"{spare} padding tokens", f"metadata with a padding sequence {rule}")
    share, more = divmod(spare, free)
    queries[len(queries) - free :] = share
    queries[len(queries) - free : len(queries) - free + more] += 1
    return queries


def validate_metadata(metadata: AttentionMetadata, spec: CacheSpec, shardings: Shardings) -> None:
    """Checks that every sequence has its tokens and blocks on one device of the `data` axis. Eager and host-side.

    Args:
      metadata: of the whole batch, with concrete values.
      spec: of the whole cache.
      shardings: see `Shardings`.

    Raises:
      ValueError: names the sequence, and the block, slot or row that lies elsewhere.
    """
    metadata = jax.device_get(check_metadata(metadata, spec))
    parts = shardings.size(shardings.data)
    shardings.metadata(metadata)
    shardings.cache(spec)
    seqs, rows = metadata.seq_lens.shape[0] // parts, metadata.slot_mapping.shape[0] // parts
    blocks = spec.num_blocks // parts
    starts = metadata.query_start_loc
    for sequence in range(metadata.seq_lens.shape[0]):
        part = sequence // seqs
        begin, end, length = int(starts[sequence]), int(starts[sequence + 1]), int(metadata.seq_lens[sequence])
        if end > begin and not part * rows <= begin < end <= (part + 1) * rows:
            rule = f"the rows {part * rows} to {(part + 1) * rows} of its device {part} of axis {shardings.data!r}"
            bad_value(f"metadata: sequence {sequence}", f"rows {begin} to {end}", rule)
        needed = metadata.block_table[sequence, : -(-length // spec.block_size)] if end > begin else np.zeros(0, np.int32)
        slots = metadata.slot_mapping[begin:end]
        for what, ids in (("block", needed), ("slot's block", slots[slots >= 0] // spec.block_size)):
            outside = ids[(ids < part * blocks) | (ids >= (part + 1) * blocks)]
            if outside.size:
                rule = f"among the blocks {part * blocks} to {(part + 1) * blocks} of its device {part} of axis {shardings.data!r}"
                bad_value(f"metadata: sequence {sequence}", f"{what} {int(outside[0])}", rule)
