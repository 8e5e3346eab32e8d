"""A decode step of Llama-8B's shape in one jitted program, attention and fused write only: the time beside the kernels."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import purepage as pp
from benchmarks.measure import Row, guarded, release_memory
from benchmarks.peers import Unavailable, to_torch
from benchmarks.timing import on_gpu, time_torch
from purepage.bridges.callback import counted_python
from purepage.bridges.execute import using_bridge

LAYERS, SEQS, CONTEXT, HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 4096, 32, 8, 128, 64
TINY = {"layers": 2, "seqs": 2, "context": 40, "heads": 4, "kv_heads": 2, "size": 32, "block": 16}


def step_inputs(
    *,
    layers: int = LAYERS,
    seqs: int = SEQS,
    context: int = CONTEXT,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    size: int = SIZE,
    block: int = BLOCK,
) -> tuple[pp.KVCache, Row]:
    """(cache of random values, the rest)."""
    width = -(-context // block)
    dtype = "bfloat16" if on_gpu() else "float32"
    spec = pp.CacheSpec(num_blocks=seqs * width, block_size=block, num_kv_heads=kv_heads, head_size=size, num_layers=layers, dtype=dtype)

    @jax.jit
    def fill() -> jax.Array:
        """Values in +-[0.5, 2) as their bits; hashed from the index, because a random generator would want twice the pool beside it."""
        bits = jnp.uint32(1)
        for axis in range(len(spec.shape)):
            bits = (bits + jax.lax.broadcasted_iota(jnp.uint32, spec.shape, axis)) * jnp.uint32(2654435761)
            bits ^= bits >> 15
        if dtype == "bfloat16":
            return ((bits & 0x80FF) | 0x3F00).astype(jnp.uint16)
        return bits.astype(jnp.float32) / 2.0**31 - 1

    cache = pp.KVCache(fill(), *(jnp.ones((layers,), jnp.float32) for _ in range(2)), spec)
    table = np.random.default_rng(0).permutation(spec.num_blocks).reshape(seqs, width)
    metadata = pp.make_metadata([1] * seqs, [context] * seqs, table, block_size=block, max_query_len=1, max_seq_len=context)
    angle = np.arange(context)[:, None] * 10000.0 ** (-np.arange(size // 2) / (size // 2))
    return cache, {
        "query": jax.random.normal(jax.random.key(1), (seqs, heads, size)).astype(dtype),
        "key": jax.random.normal(jax.random.key(2), (seqs, kv_heads, size)).astype(dtype),
        "value": jax.random.normal(jax.random.key(3), (seqs, kv_heads, size)).astype(dtype),
        "positions": jnp.full((seqs,), context - 1, jnp.int32),
        "cos_sin": jnp.asarray(np.concatenate([np.cos(angle), np.sin(angle)], -1), dtype),
        "metadata": metadata,
    }


def one_layer(query: Any, cache: pp.KVCache, rest: Row, layer: Any, implementation: str) -> tuple[Any, pp.KVCache]:
    """Rotates and writes the step's tokens, attends, and gives the output to the next layer as its query."""
    metadata = rest["metadata"]
    query, _, cache = pp.rope_and_update_cache(
        query,
        rest["key"],
        rest["value"],
        rest["positions"],
        rest["cos_sin"],
        cache,
        metadata.slot_mapping,
        layer=layer,
        implementation=implementation,
    )
    return pp.paged_attention(query, cache, metadata, layer=layer, implementation=implementation), cache


def unrolled(query: Any, cache: pp.KVCache, rest: Row, implementation: str) -> tuple[Any, pp.KVCache]:
    for layer in range(cache.spec.num_layers):
        query, cache = one_layer(query, cache, rest, layer, implementation)
    return query, cache


def scanned(query: Any, cache: pp.KVCache, rest: Row, implementation: str, *, together: int = 1) -> tuple[Any, pp.KVCache]:
    """`together` layers an iteration of the loop."""

    def body(state: Any, layer: Any) -> Any:
        return one_layer(*state, rest, layer, implementation), None

    layers = jnp.arange(cache.spec.num_layers, dtype=jnp.int32)
    return jax.lax.scan(body, (query, cache), layers, unroll=together)[0]


FORMS = {"unrolled": unrolled, "scan": scanned, "scan of 4 layers": partial(scanned, together=4)}
"""XLA records a loop's body that has five commands (`--xla_gpu_graph_min_graph_size`): one layer has fewer, four have more."""


def step_rows(
    *, implementation: str, bridges: tuple[str | None, ...], sizes: dict[str, int] | None = None, verbose: bool = False
) -> Iterator[Row]:
    """First the kernels alone, then each form through each bridge."""
    cache, rest = step_inputs(**(sizes or {}))
    spec = cache.spec
    name = f"decode step, {spec.num_layers} layers, {rest['query'].shape[0]} x {rest['metadata'].max_seq_len}"
    base: Row = {"case": name, "kind": "step", "flops": 0, "min_bytes": 0}
    alone = None
    if implementation == "triton" and on_gpu():
        row = guarded({**base, "contender": "kernels alone"}, lambda: _kernels_alone(cache, rest), verbose=verbose)
        alone = row.get("us")
        yield row
    wanted = None
    for bridge in bridges:
        for form, function in FORMS.items():
            row = {**base, "contender": f"{form}, {bridge or 'automatic'}" if implementation == "triton" else f"{form}, {implementation}"}

            def measure(function: Callable[..., Any] = function, bridge: str | None = bridge, wanted: Any = wanted) -> Row:
                return _one_step(function, cache, rest, implementation, bridge, wanted)

            row = guarded(row, measure, verbose=verbose)
            out = row.pop("out", None)
            wanted = out if wanted is None else wanted
            if alone and "us" in row:
                row["overhead_us"] = row["us"] - alone
            yield row
            release_memory()


def _one_step(function: Callable[..., Any], cache: Any, rest: Row, implementation: str, bridge: str | None, wanted: Any) -> Row:
    def program(query: Any, cache: Any, rest: Row) -> Any:
        with using_bridge(bridge):
            return function(query, cache, rest, implementation)

    try:
        begin = time.perf_counter()
        lowered = jax.jit(program, donate_argnums=1).lower(rest["query"], cache, rest)
        compiled = lowered.compile()
        compile_s = time.perf_counter() - begin
    except NotImplementedError as error:
        raise Unavailable(str(error)) from error
    held = [jax.tree.map(jnp.copy, cache)]

    def run(count: int) -> float:
        jax.block_until_ready(held[0])
        start, out = time.perf_counter(), None
        for _ in range(count):
            out = None
            out, held[0] = compiled(rest["query"], held[0], rest)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / count

    address = _address(held[0])
    out, held[0] = compiled(rest["query"], held[0], rest)
    out = np.asarray(out.astype(jnp.float32))
    if not np.all(np.isfinite(out)):
        raise ValueError("the step gave non-finite values")
    error = 0.0 if wanted is None else float(np.abs(out - wanted).max())
    in_place = _address(held[0]) == address
    for _ in range(3):
        run(2)
    count = 20 if on_gpu() else 2
    with counted_python() as python_calls:
        took = [run(count) for _ in range(7 if on_gpu() else 3)]
    return {
        "status": "ok" if error < 1e-2 else "wrong",
        "out": out,
        "us": statistics.median(took) * 1e6,
        "us_best": min(took) * 1e6,
        "us_worst": max(took) * 1e6,
        "timing": f"{count} steps in a row, donated cache",
        "compile_s": compile_s,
        "python_calls": python_calls[0],
        "calls": count * len(took),
        "in_place": in_place,
        "difference_to_first": error,
        "temporaries_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
    }


def _address(cache: pp.KVCache) -> int:
    return cache.data.unsafe_buffer_pointer()


def _kernels_alone(cache: pp.KVCache, rest: Row) -> Row:
    """The same launches, layer by layer, replayed from one CUDA graph without JAX. They write the step's tokens into the cache again."""
    from purepage.bridges.triton import plan_launches
    from purepage.bridges.triton_calls import OPERATIONS
    from purepage.functional.attention import paged_attention_call
    from purepage.functional.calls import RopeUpdateCall
    from purepage.functional.target import current_target
    from purepage.kernels.triton.run import empty_tensor, launch_torch

    device = "cuda" if on_gpu() else "cpu"
    kept, launches = [], []
    for layer in range(cache.spec.num_layers):
        metadata = rest["metadata"]
        write = RopeUpdateCall(
            query=rest["query"],
            key=rest["key"],
            value=rest["value"],
            positions=rest["positions"],
            cos_sin_cache=rest["cos_sin"],
            cache=cache,
            slot_mapping=metadata.slot_mapping,
            layer=jnp.int32(layer),
            is_neox=True,
        )
        attend = paged_attention_call(rest["query"], cache, metadata, layer=layer)
        for operation, call in (("rope_and_update_cache", write), ("paged_attention", attend)):
            program = plan_launches(operation, call, current_target()).program
            arrays = OPERATIONS[operation].arrays(call)
            arrays = {name: arrays[name] for name, _ in program.inputs}
            jax.block_until_ready(arrays)
            tensors = {name: to_torch(array) for name, array in arrays.items()}
            tensors |= {n: empty_tensor(b.shape, b.dtype, device) for n, b in (*program.outputs, *program.scratch)}
            kept.append(arrays)
            launches.extend((launch, tensors) for launch in program.launches)

    def call() -> None:
        for launch, tensors in launches:
            launch_torch(launch, tensors, interpreted=device == "cpu")

    timed = time_torch(call)
    return {
        "status": "ok",
        "us": timed.median * 1e6,
        "us_best": timed.best * 1e6,
        "us_worst": timed.worst * 1e6,
        "timing": timed.how,
        "launches": len(launches),
    }
