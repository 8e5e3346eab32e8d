"""How each operation divides over the devices of a mesh, read off how its arguments lie.

Dimensions have labels: T tokens, S sequences, H KV heads, Hq query heads, Hx heads of a key without a cache, B blocks; t stands for T in
arrays whose division says whether sequences keep to their device. A `Division` gives each label its mesh axes. The cache decides for
heads and blocks, since it must not move; everything else is small and is brought to where the cache is. Tokens are divided where the
sequences (attention) or the slots (writers) are divided over the same axes: with that a caller says that the tokens of a device belong
to the sequences of that device, and these to its blocks.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .cache import KVCache
from .calls import EncoderAttentionCall, MergeCall, PagedAttentionCall, QkNormRopeUpdateCall, RopeUpdateCall, RotaryCall, UpdateCacheCall
from .context import attend_own_blocks
from .errors import UnsupportedError
from .metadata import AttentionMetadata

Axes = tuple[tuple[Any, ...], ...]
"""The mesh axes of each dimension of an array."""
Names = tuple[Any, ...]
Sizes = Mapping[Any, int]
Serve = Callable[..., Any]


@dataclass(frozen=True)
class Division:
    """Mesh axes by label, and `serve(serve_call, part, *operands)`: the arrays of one device's part of the results."""

    axes: Mapping[str, Names]
    serve: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Rule:
    """How one operation divides.

    Attributes:
      named: labels of the arrays of a call, by their path; None leaves an array where it is, and an array without an entry is whole on
        every device. Caches have labels of their own.
      operands: labels of what the operation takes beside the call.
      made: labels of the results, of a call.
      heads: of a call, its KV heads and the query heads of each.
      divide: of a call, the axes that its arrays have, and the sizes of the mesh axes.
      arrays: of a call and what the operation returns, the arrays in the order of `made`.
      results: of a call and these arrays, what the operation returns.
    """

    named: Mapping[str, tuple[str, ...] | None]
    made: Callable[[Any], list[tuple[str, ...]]]
    heads: Callable[[Any], tuple[int, int]]
    divide: Callable[[Any, Any, Sizes], Division]
    arrays: Callable[[Any, Any], tuple[Any, ...]] = lambda call, results: tuple(results)
    results: Callable[[Any, tuple[Any, ...]], Any] = lambda call, arrays: arrays
    operands: tuple[tuple[str, ...], ...] = ()

    def labels(self, call: Any, operands: tuple[Any, ...]) -> tuple[Any, Any]:
        """The label of every dimension of every array, as a tree like `(call, operands)` with label tuples for leaves."""

        def of(path: Any, leaf: Any) -> tuple[str, ...] | None:
            name = ".".join(str(getattr(key, "name", getattr(key, "idx", ""))) for key in path)
            if name == "cache.data":
                return cache_labels(call.cache)
            if name in ("cache.k_scale", "cache.v_scale"):
                return ("", "H")[: leaf.ndim]
            found = ("S", "", "") if name == "qq_bias" and leaf.ndim == 3 else self.named.get(name, ())
            return None if found is None else ("",) * (leaf.ndim - len(found)) + found

        return jax.tree_util.tree_map_with_path(of, call), self.operands[: len(operands)]

    def result_labels(self, call: Any) -> list[tuple[str, ...]]:
        return self.made(call)


def cache_labels(cache: KVCache) -> tuple[str, ...]:
    return tuple(axis if axis in ("B", "H") else "" for axis in cache.spec.axes)


def _size(names: Names, sizes: Sizes) -> int:
    return math.prod(sizes[name] for name in names)


def _cache_axes(at: Any, call: Any) -> tuple[Names, Names]:
    """(axes of the KV heads, axes of the blocks) of a cache.

    Raises:
      UnsupportedError: another of its dimensions is divided: a kernel needs the whole of it.
    """
    found: dict[str, Names] = {}
    for name, names in zip(call.cache.spec.axes, at.cache.data, strict=True):
        if names and name not in ("B", "H"):
            raise UnsupportedError(
                f"cache.data is divided along {name} over the mesh axes {', '.join(map(str, names))}: it must be whole but for blocks (B) "
                "and KV heads (H), see purepage.sharding; to divide it otherwise, wrap the call in jax.shard_map"
            )
        found[name] = names
    return found["H"], found["B"]


def _divided_tokens(tokens: Names, partners: Names, count: int, others: int, taken: Names, sizes: Sizes) -> Names:
    """The axes of the tokens, where the sequences or slots are divided alike and both evenly; else none: they are brought together."""
    number = _size(tokens, sizes)
    fits = tokens == partners and not set(tokens) & set(taken) and not count % number and not others % number
    return tokens if fits else ()


def _query_heads(heads: Names, wanted: Names, call_heads: int, kv_heads: int, sizes: Sizes) -> Names:
    """The axes of the query heads: the KV heads', and more where a device has one KV head, or all devices have the only one."""
    more = wanted[len(heads) :]
    if wanted[: len(heads)] != heads or not more or kv_heads != _size(heads, sizes):
        return heads
    return wanted if not call_heads % _size(wanted, sizes) else heads


def _own_metadata(metadata: AttentionMetadata, tokens: Names, num_tokens: int, num_seqs: int) -> AttentionMetadata:
    """The metadata of a device's sequences: `query_start_loc` is whole, the rest is the device's part."""
    if not tokens:
        return metadata
    index = lax.axis_index(tokens)
    starts = lax.dynamic_slice_in_dim(metadata.query_start_loc, index * num_seqs, num_seqs + 1) - index * num_tokens
    return replace(metadata, query_start_loc=jnp.clip(starts, 0, num_tokens))


def _attention(call: PagedAttentionCall, at: Any, sizes: Sizes) -> Division:
    heads, blocks = _cache_axes(at, call)
    spec = call.cache.local_spec
    num_tokens, num_heads = call.query.shape[:2]
    num_seqs = call.metadata.seq_lens.shape[0]
    sequences = at.metadata.block_table[0]
    tokens = _divided_tokens(at.query[0], sequences, num_tokens, num_seqs, heads, sizes)
    context = tuple(name for name in blocks if name not in tokens and sizes[name] > 1)
    query_heads = _query_heads(heads, at.query[1], num_heads, spec.num_kv_heads, sizes)
    if set(query_heads[len(heads) :]) & {*tokens, *blocks}:
        query_heads = heads

    def serve(serve_call: Serve, part: PagedAttentionCall, *operands: Any) -> tuple[Any, ...]:
        own = _own_metadata(part.metadata, tokens, part.query.shape[0], part.metadata.seq_lens.shape[0])
        part = replace(part, metadata=own)
        if context:
            if operands:
                raise UnsupportedError(
                    f"the blocks of a sequence lie over the mesh axes {', '.join(map(str, context))}: the new tokens of a step can't be "
                    "attended at full precision beside them; paged_attention reads them from the cache"
                )
            out, lse = attend_own_blocks(serve_call, part, blocks, context, sizes)
        else:
            if blocks:
                part = replace(part, metadata=replace(part.metadata, block_table=_own_ids(part.metadata.block_table, part.cache, blocks)))
            out, lse = serve_call(part, *operands)
        return (out, lse) if call.return_lse else (out,)

    axes = {"H": heads, "B": blocks, "Hq": query_heads, "T": tokens, "t": tokens, "S": tokens}
    return Division(axes, serve)


def _own_ids(ids: Array, cache: KVCache, blocks: Names) -> Array:
    """Block ids among a device's own; a block of another device is none."""
    count = cache.local_spec.num_blocks
    own = ids - lax.axis_index(blocks) * count
    return jnp.where((own >= 0) & (own < count), own, -1)


def _own_slots(slots: Array, cache: KVCache, blocks: Names) -> Array:
    """Slots among a device's own; every writer skips -1."""
    if not blocks:
        return slots
    count = cache.local_spec.num_slots
    own = slots - lax.axis_index(blocks) * count
    return jnp.where((own >= 0) & (own < count), own, -1)


def _encoder(call: EncoderAttentionCall, at: Any, sizes: Sizes) -> Division:
    heads = at.key[1]
    num_tokens, num_heads = call.query.shape[:2]
    num_seqs = call.metadata.seq_lens.shape[0]
    tokens = _divided_tokens(at.query[0], at.metadata.seq_lens[0], num_tokens, num_seqs, heads, sizes)

    def serve(serve_call: Serve, part: EncoderAttentionCall) -> tuple[Any, ...]:
        own = _own_metadata(part.metadata, tokens, part.query.shape[0], num_seqs // _size(tokens, sizes))
        found = serve_call(replace(part, metadata=own))
        return found if call.return_lse else (found,)

    more = _query_heads(heads, at.query[1], num_heads, call.key.shape[1], sizes)
    query_heads = heads if set(more[len(heads) :]) & set(tokens) else more
    return Division({"H": heads, "Hq": query_heads, "T": tokens, "t": tokens, "S": tokens}, serve)


def _writer(call: Any, tokens: Any, at: Any, sizes: Sizes) -> tuple[Names, Names, Names]:
    """(axes of the KV heads, of the blocks, of the tokens) of a writer; `tokens` is the array that says how the tokens lie."""
    heads, blocks = _cache_axes(at, call)
    count = call.slot_mapping.shape[0]
    divided = _divided_tokens(tokens[0], at.slot_mapping[0], count, count, heads, sizes)
    return heads, blocks, divided if set(divided) <= set(blocks) else ()


def _update(call: UpdateCacheCall, at: Any, sizes: Sizes) -> Division:
    heads, blocks, tokens = _writer(call, at.key, at, sizes)

    def serve(serve_call: Serve, part: UpdateCacheCall) -> tuple[Any, ...]:
        return (serve_call(replace(part, slot_mapping=_own_slots(part.slot_mapping, part.cache, blocks))).data,)

    return Division({"H": heads, "B": blocks, "T": tokens, "t": tokens}, serve)


def _rope_update(call: RopeUpdateCall, at: Any, sizes: Sizes) -> Division:
    heads, blocks, tokens = _writer(call, at.key, at, sizes)
    query_heads = _query_heads(heads, at.query[1], call.query.shape[1], call.key.shape[1], sizes)
    if set(query_heads[len(heads) :]) & {*tokens, *blocks}:
        query_heads = heads

    def serve(serve_call: Serve, part: RopeUpdateCall) -> tuple[Any, ...]:
        query, key, cache = serve_call(replace(part, slot_mapping=_own_slots(part.slot_mapping, part.cache, blocks)))
        return query, key, cache.data

    return Division({"H": heads, "B": blocks, "Hq": query_heads, "T": tokens, "t": tokens}, serve)


def _qk_norm_update(call: QkNormRopeUpdateCall, at: Any, sizes: Sizes) -> Division:
    """Queries, keys and values are packed in one axis, which is brought together; each device takes its heads of each."""
    heads, blocks, tokens = _writer(call, at.qkv, at, sizes)
    number = _size(heads, sizes)
    spec = call.cache.local_spec
    counts = (call.num_heads, spec.num_kv_heads, spec.num_kv_heads)

    def serve(serve_call: Serve, part: QkNormRopeUpdateCall) -> tuple[Any, ...]:
        if heads:
            index = lax.axis_index(heads)
            sides, start = [], 0
            for count in counts:
                width = count // number * spec.head_size
                sides.append(lax.dynamic_slice_in_dim(part.qkv, start + index * width, width, axis=1))
                start += count * spec.head_size
            part = replace(part, qkv=jnp.concatenate(sides, axis=1), num_heads=call.num_heads // number)
        query, key, value, cache = serve_call(replace(part, slot_mapping=_own_slots(part.slot_mapping, part.cache, blocks)))
        return query, key, value, cache.data

    return Division({"H": heads, "B": blocks, "Hq": heads, "T": tokens, "t": tokens}, serve)


def _rotary(call: RotaryCall, at: Any, sizes: Sizes) -> Division:
    tokens = at.query[0]
    of_query, of_key = (tuple(name for name in side[1] if name not in tokens) for side in (at.query, at.key))
    tokens = tokens if not call.query.shape[0] % _size(tokens, sizes) else ()
    return Division({"T": tokens, "t": tokens, "Hq": of_query, "Hx": of_key}, lambda serve_call, part: tuple(serve_call(part)))


def _merge(call: MergeCall, at: Any, sizes: Sizes) -> Division:
    tokens, heads = (one or other for one, other in zip(at.out_a[:2], at.out_b[:2], strict=True))
    heads = tuple(name for name in heads if name not in tokens)
    return Division({"T": tokens, "Hq": heads}, lambda serve_call, part: tuple(serve_call(part)))


def _with_cache(call: Any, arrays: tuple[Any, ...]) -> Any:
    cache = replace(call.cache, data=arrays[-1])
    return (*arrays[:-1], cache) if len(arrays) > 1 else cache


def _attention_arrays(call: Any, results: Any) -> tuple[Any, ...]:
    out, lse = results
    return (out, lse) if call.return_lse else (out,)


def _cached_heads(call: Any) -> tuple[int, int]:
    kv_heads = call.cache.local_spec.num_kv_heads
    query_heads = getattr(call, "num_heads", None) or (call.query.shape[1] if hasattr(call, "query") else kv_heads)
    return kv_heads, query_heads // kv_heads


_QUERY, _KEY, _LSE = ("T", "Hq", ""), ("T", "H", ""), ("T", "Hq")
_BATCH = {
    "metadata.query_start_loc": ("",),
    "metadata.seq_lens": ("S",),
    "metadata.block_table": ("S", ""),
    "metadata.slot_mapping": None,
    "key_range.0": ("t",),
    "key_range.1": ("t",),
    "alibi_slopes": ("Hq",),
    "sinks": ("Hq",),
}
_SLOTS = {"slot_mapping": ("t",)}


def _paged(operands: tuple[tuple[str, ...], ...] = ()) -> Rule:
    return Rule(
        named={"query": _QUERY, **_BATCH},
        operands=operands,
        made=lambda call: [_QUERY, _LSE] if call.return_lse else [_QUERY],
        heads=_cached_heads,
        divide=_attention,
        arrays=_attention_arrays,
        results=lambda call, arrays: arrays if call.return_lse else (*arrays, None),
    )


_QK_NORM = Rule(
    named={"qkv": ("T", ""), "positions": ("t",), **_SLOTS},
    made=lambda call: [_QUERY, _KEY, _KEY, cache_labels(call.cache)],
    heads=_cached_heads,
    divide=_qk_norm_update,
    arrays=lambda call, results: (*results[:-1], results[-1].data),
    results=_with_cache,
)

RULES: Mapping[str, Rule] = {
    "paged_attention": _paged(),
    "paged_attention_with_new_tokens": _paged((_KEY, _KEY)),
    "encoder_attention": Rule(
        named={"query": _QUERY, "key": _KEY, "value": _KEY, **_BATCH, "metadata.block_table": None},
        made=lambda call: [_QUERY, _LSE] if call.return_lse else [_QUERY],
        heads=lambda call: (call.key.shape[1], call.query.shape[1] // call.key.shape[1]),
        divide=_encoder,
        arrays=lambda call, results: tuple(results) if call.return_lse else (results,),
        results=lambda call, arrays: arrays if call.return_lse else arrays[0],
    ),
    "update_cache": Rule(
        named={"key": _KEY, "value": _KEY, **_SLOTS},
        made=lambda call: [cache_labels(call.cache)],
        heads=_cached_heads,
        divide=_update,
        arrays=lambda call, results: (results.data,),
        results=_with_cache,
    ),
    "rope_and_update_cache": Rule(
        named={"query": _QUERY, "key": _KEY, "value": _KEY, "positions": ("t",), **_SLOTS},
        made=lambda call: [_QUERY, _KEY, cache_labels(call.cache)],
        heads=_cached_heads,
        divide=_rope_update,
        arrays=lambda call, results: (*results[:-1], results[-1].data),
        results=_with_cache,
    ),
    "qk_norm_rope_and_update_cache": _QK_NORM,
    "qk_norm_mrope_and_update_cache": _QK_NORM,
    "rotary_embedding": Rule(
        named={"query": _QUERY, "key": ("T", "Hx", ""), "positions": ("t",)},
        made=lambda call: [_QUERY, ("T", "Hx", "")],
        heads=lambda call: (1, 1),
        divide=_rotary,
    ),
    "merge_attention_states": Rule(
        named={"out_a": _QUERY, "lse_a": _LSE, "out_b": _QUERY, "lse_b": _LSE},
        made=lambda call: [_QUERY, _LSE],
        heads=lambda call: (1, 1),
        divide=_merge,
    ),
}
"""By the name of the operation."""
