"""Batches over meshes of fake devices, for the tests of sharding. Imported in processes that have eight CPU devices.

A case is checked against the same call on one device: values, where results lie, and that the compiled program moves nothing as large as a
device's part of the cache.
"""

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import purepage as pp
from purepage.sharding import Shardings, collectives, join_metadata

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS, SEQS, LAYERS = 8, 4, 32, 16, 64, 4, 2
MESHES = {
    "model": {"model": 4},
    "data": {"data": 2},
    "context": {"context": 8},
    "data x model": {"data": 2, "model": 4},
    "context x model": {"context": 4, "model": 2},
    "data x context x model": {"data": 2, "context": 2, "model": 2},
}


def shardings(name: str, kind: str) -> Shardings:
    axes = MESHES[name]
    count = int(np.prod(list(axes.values())))
    types = (getattr(AxisType, kind),) * len(axes)
    return Shardings(jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=jax.devices()[:count]))


@dataclass(frozen=True)
class Batch:
    """Arguments of a step, on one device. `metadata` and token arrays are those of `parts` parts, one after the other."""

    spec: pp.CacheSpec
    cache: pp.KVCache
    metadata: pp.AttentionMetadata
    arrays: dict


@cache
def batch(parts: int, mode: str, dtype: str) -> Batch:
    """A ragged batch in `parts` parts, each of which has its own part of the blocks. Three sequences and one of padding a part.

    Args:
      parts: devices of the `data` axis.
      mode: "decode" or "mixed", one chunk of a prompt among decoding sequences.
      dtype: of the cache; fp8 caches have scales per head.
    """
    rng = np.random.default_rng(parts)
    quantized = dtype.startswith("float8")
    spec = pp.CacheSpec(
        num_blocks=BLOCKS, block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, num_layers=LAYERS, dtype=jnp.dtype(dtype)
    )
    made = []
    own = BLOCKS // parts
    for _ in range(parts):
        queries = [1, 1, 1] if mode == "decode" else [1, 7, 1]
        lens = [int(rng.integers(33, 60)), int(rng.integers(20, 50)), int(rng.integers(1, 20))]
        table = rng.permutation(own)[:12].reshape(3, 4)
        tokens = SEQS if mode == "decode" else 12
        made.append(pp.make_metadata(queries, lens, table, block_size=BLOCK, num_tokens=tokens, num_seqs=SEQS))
    metadata = join_metadata(made, num_blocks=BLOCKS)
    tokens = metadata.slot_mapping.shape[0]
    scale = {side: 0.5 + rng.random((LAYERS, KV_HEADS)) for side in ("k_scale", "v_scale")} if quantized else {}
    codes = rng.standard_normal(spec.shape).astype(np.float32).astype(spec.dtype).view(spec.storage_dtype)
    starts, seq_lens = np.asarray(metadata.query_start_loc), np.asarray(metadata.seq_lens)
    positions = np.zeros(tokens, np.int32)
    for sequence in range(len(seq_lens)):
        begin, end = starts[sequence : sequence + 2]
        positions[begin:end] = np.maximum(seq_lens[sequence] - (end - begin) + np.arange(end - begin), 0)
    floats = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    arrays = {
        "query": floats(tokens, HEADS, SIZE),
        "key": floats(tokens, KV_HEADS, SIZE),
        "value": floats(tokens, KV_HEADS, SIZE),
        "qkv": floats(tokens, (HEADS + 2 * KV_HEADS) * SIZE),
        "positions": positions,
        "table": floats(64, SIZE),
        "weight": floats(SIZE),
        "sinks": floats(HEADS),
        "start": np.maximum(positions - 17, 0),
        "stop": np.maximum(positions - rng.integers(0, 5, tokens), 0).astype(np.int32) + 1,
    }
    empty = pp.init_cache(spec, **scale)
    return Batch(spec, jax.device_get(replace(empty, data=jnp.asarray(codes))), metadata, arrays)


def placed(batch: Batch, s: Shardings) -> tuple:
    """(cache, metadata, arrays) of a batch over a mesh."""
    of = {"query": s.tokens, "key": s.tokens, "value": s.tokens, "qkv": s.rows, "positions": s.rows, "sinks": s.heads}
    of |= {"start": s.rows, "stop": s.rows}
    arrays = {name: jax.device_put(array, of.get(name, s.replicated)) for name, array in batch.arrays.items()}
    cache = pp.init_cache(batch.spec, sharding=s)
    assert all(leaf.sharding.device_set == set(s.mesh.devices.flat) for leaf in jax.tree.leaves(cache))
    fresh = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), batch.cache)  # donated later: its buffers must be no one else's
    cache = jax.device_put(fresh, s.cache(batch.cache))
    return cache, jax.device_put(batch.metadata, s.metadata(batch.metadata)), arrays


def step(cache, metadata, arrays, *, implementation, write="rope", options=None):
    """One layer of a serving step: a writer, then attention; (cache, out, lse)."""
    slots, layer = metadata.slot_mapping, 1
    a, with_ = arrays, {"implementation": implementation, "layer": layer}
    query = a["query"]
    if write == "update":
        cache = pp.update_cache(cache, a["key"], a["value"], slots, **with_)
    elif write == "rope":
        query, _, cache = pp.rope_and_update_cache(query, a["key"], a["value"], a["positions"], a["table"], cache, slots, **with_)
    else:
        query, _, _, cache = pp.qk_norm_rope_and_update_cache(
            a["qkv"], a["weight"], a["weight"], a["positions"], a["table"], cache, slots, num_heads=HEADS, **with_
        )
    masks = dict(options or {})
    if masks.pop("ranges", False):
        masks["key_range"] = a["start"], a["stop"]
    if masks.pop("traced", False):
        masks["sliding_window"] = jnp.asarray(masks["sliding_window"])
    out, lse = pp.paged_attention(query, cache, metadata, sinks=a["sinks"], return_lse=True, **with_, **masks)
    return cache, out, lse


@cache
def _one_device(parts, mode, dtype, implementation, write, options):
    given = batch(parts, mode, dtype)
    run = partial(step, implementation=implementation, write=write, options=dict(options))
    return jax.device_get(jax.jit(run)(given.cache, given.metadata, given.arrays))


def check_step(mesh: str, kind: str, implementation: str, *, mode="decode", dtype="float32", write="rope", options=(), eager=False):
    """A step over a mesh: values of one device, everything where it was, nothing moved, the cache updated in place."""
    s = shardings(mesh, kind)
    parts = s.size("data")
    given = batch(parts, mode, dtype)
    arguments = placed(given, s)
    cache = arguments[0]
    run = partial(step, implementation=implementation, write=write, options=dict(options))
    expected = _one_device(parts, mode, dtype, implementation, write, options)
    if eager:
        check(run(*arguments), expected, dtype)
    compiled = jax.jit(run, donate_argnums=0).lower(*arguments).compile()
    part = cache.data.addressable_shards[0].data.nbytes
    moved = collectives(compiled.as_text())
    assert all(each.largest_operand < part and each.nbytes < part for each in moved), (mesh, kind, moved)
    if "context" not in mesh and write != "qk_norm":
        assert not moved, (mesh, kind, moved)
    assert compiled.memory_analysis().alias_size_in_bytes >= part
    pointers = [shard.data.unsafe_buffer_pointer() for shard in cache.data.addressable_shards]
    found = compiled(*arguments)
    assert [shard.data.unsafe_buffer_pointer() for shard in found[0].data.addressable_shards] == pointers, (mesh, kind)
    assert found[0].data.sharding.is_equivalent_to(s.cache(given.cache).data, found[0].data.ndim)
    assert found[1].sharding.is_equivalent_to(s.tokens, 3) and found[2].sharding.is_equivalent_to(s.tokens, 2)
    check(found, expected, dtype)
    return moved


def check(found, expected, dtype):
    (cache, out, lse), (wanted_cache, wanted_out, wanted_lse) = found, expected
    data, wanted = np.asarray(cache.data), np.asarray(wanted_cache.data)
    if dtype == "float32":
        np.testing.assert_allclose(data, wanted, rtol=1e-6, atol=1e-6)
    else:  # a rotation that is fused another way may round to the next code
        assert np.mean(data != wanted) < 1e-3
    np.testing.assert_allclose(np.asarray(out), wanted_out, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(np.asarray(lse), wanted_lse, rtol=2e-5, atol=2e-5)


def check_call(call, given, s, arguments, placed_arguments):
    """A jitted call over a mesh gives what one device gives, and moves nothing as large as a device's part of the cache."""
    expected = jax.device_get(jax.jit(call)(*arguments))
    compiled = jax.jit(call).lower(*placed_arguments).compile()
    part = given.spec.nbytes // s.mesh.size
    moved = collectives(compiled.as_text())
    assert all(each.largest_operand < part and each.nbytes < part for each in moved), moved
    for found, wanted in zip(jax.tree.leaves(compiled(*placed_arguments)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=2e-5, atol=2e-5)


def check_other_operations(mesh: str, kind: str):
    """Cascade and encoder attention, rotary embedding, merging, and moves of blocks."""
    s = shardings(mesh, kind)
    given = batch(s.size("data"), "mixed", "float32")
    cache, metadata, arrays = placed(given, s)
    xla = {"implementation": "xla"}
    lens = np.asarray(given.metadata.seq_lens)
    table = np.asarray(given.metadata.block_table)[:, :2]
    shared = replace(  # every sequence leads with two blocks of the first device
        given.metadata,
        seq_lens=np.where(lens > 0, 32 + np.minimum(lens, 30), 0).astype(np.int32),
        block_table=np.concatenate([np.tile(np.array([[3, 1]], np.int32), (len(table), 1)), table], axis=1),
    )
    shared_there = jax.device_put(shared, s.metadata(shared))
    host = given.cache, shared, given.arrays
    there = cache, shared_there, arrays
    check_call(lambda c, m, a: pp.cascade_attention(a["query"], c, m, common_prefix_len=32, **xla), given, s, host, there)
    host, there = (given.metadata, given.arrays), (metadata, arrays)
    check_call(lambda m, a: pp.encoder_attention(a["query"], a["key"], a["value"], m, sinks=a["sinks"], **xla), given, s, host, there)
    check_call(lambda _, a: pp.rotary_embedding(a["positions"], a["query"], a["key"], a["table"], **xla), given, s, host, there)
    half = lambda a: (a["query"], a["query"][..., 0], 2 * a["query"], a["query"][..., 1])  # noqa: E731
    check_call(lambda _, a: pp.merge_attention_states(*half(a), **xla), given, s, host, there)
    moves = lambda c: pp.copy_blocks(pp.scatter_blocks(c, [3, 60], pp.gather_blocks(c, [1, 50])), [0, 2], [7, 5]).data  # noqa: E731
    if kind == "Auto" or ("data" not in mesh and "context" not in mesh):  # of Explicit axes, XLA asks for the result's sharding
        check_call(moves, given, s, (given.cache,), (cache,))


def check_lost_and_refused(kind: str):
    """Over `context`: a block that no device has, and what can't be divided."""
    s = shardings("context x model", kind)
    given = batch(1, "mixed", "float32")
    cache, metadata, arrays = placed(given, s)
    table = np.array(given.metadata.block_table)
    table[0, 1] = BLOCKS + 3
    lost = jax.device_put(replace(given.metadata, block_table=table), s.metadata(given.metadata))
    attend = jax.jit(lambda c, m, a, **more: pp.paged_attention(a["query"], c, m, implementation="xla", **more))
    rows = np.isnan(np.asarray(attend(cache, lost, arrays))).any(axis=(1, 2))
    assert rows.tolist() == [True] + [False] * (len(rows) - 1), rows

    def refused(call, *parts):
        try:
            call()
        except Exception as error:  # over Auto axes XLA's error has the message
            assert all(part in str(error) for part in parts), error
        else:
            raise AssertionError(parts)

    refused(lambda: attend(cache, metadata, arrays, alibi_slopes=arrays["sinks"]), "alibi_slopes needs the distance", "context")
    bias = jnp.zeros((4, 4))
    refused(lambda: attend(cache, metadata, arrays, qq_bias=bias), "qq_bias needs the distance")
    config = pp.AttentionConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE)
    chunks = jax.jit(lambda c, m, a: pp.rocm_attn.forward(a["query"], a["key"], a["value"], c, m, config, layer=1, implementation="xla"))
    xpacked = pp.init_cache(replace(given.spec, content="xpacked"), sharding=s)
    refused(lambda: chunks(xpacked, metadata, arrays), "over the mesh axes context", "can't be attended at full precision")
    crossed = replace(cache, data=jax.device_put(np.asarray(cache.data), s.named(None, None, None, None, "model")))
    refused(
        lambda: attend(crossed, metadata, arrays),
        "cache.data is divided along 2D over the mesh axes model",
        "wrap the call in jax.shard_map",
    )


def check_shardings_of_jit_alone():
    """Arguments on one device and `in_shardings`: nothing is gathered either."""
    s = shardings("data x model", "Auto")
    given = batch(2, "decode", "float32")
    of = jax.tree.map(lambda leaf: leaf.sharding, placed(given, s))
    run = partial(step, implementation="xla")
    compiled = jax.jit(run, in_shardings=of).lower(given.cache, given.metadata, given.arrays).compile()
    assert not collectives(compiled.as_text())
    both = jax.jit(jax.vmap(run))(
        *jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * 2), (given.cache, given.metadata, given.arrays))
    )
    check(jax.tree.map(lambda leaf: leaf[1], both), _one_device(2, "decode", "float32", "xla", "rope", ()), "float32")
