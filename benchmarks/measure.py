"""Checks and times contenders, case by case. Each result is one flat row of a table; a contender that fails leaves a row that says why."""

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import purepage as pp
from benchmarks.cases import Case, WriterCase
from benchmarks.inputs import Inputs, expected_rows, make_inputs, relative_error
from benchmarks.peers import JaxCall, TorchCall, Unavailable
from benchmarks.timing import Timed, on_gpu, rough_seconds, time_jax, time_torch

TOLERANCE = {"float32": 1e-4, "float16": 3e-3, "bfloat16": 1e-2}
"""Largest relative error of a contender that is timed; bfloat16 weights alone give 2e-3."""
CHECKED_WRITES = 256
Row = dict[str, Any]


def timed_row(timed: Timed, *, flops: float = 0, nbytes: float = 0) -> Row:
    row = {"us": timed.median * 1e6, "us_best": timed.best * 1e6, "us_worst": timed.worst * 1e6, "calls": timed.calls, "timing": timed.how}
    row |= {"compile_s": timed.compile_s, "python_calls": timed.python_calls}
    if not on_gpu():
        row["cpu_us"] = timed.cpu * 1e6
    if nbytes:
        row["bytes_per_s"] = nbytes / timed.median
    if flops:
        row["flops_per_s"] = flops / timed.median
    return row


def guarded(row: Row, measure: Callable[[], Row], *, verbose: bool = False) -> Row:
    """`row` with the measurement, or with the reason why there is none."""
    begin = time.perf_counter()
    try:
        row = {**row, **measure()}
    except Unavailable as error:
        row = {**row, "status": "unavailable", "reason": str(error)}
    except Exception as error:
        if verbose:
            traceback.print_exc()
        row = {**row, "status": "failed", "reason": f"{type(error).__name__}: {str(error)[:600]}"}
    return {**row, "spent_s": time.perf_counter() - begin}


def attention_rows(
    case: Case, contenders: Mapping[str, Callable[[Inputs], JaxCall | TorchCall]], *, verbose: bool = False
) -> Iterator[Row]:
    """One row a contender, as they come."""
    inputs = make_inputs(case)
    expected = expected_rows(inputs)
    base = {"case": case.name, "kind": "attention", "flops": case.flops, "min_bytes": case.min_bytes, "setup": describe(case)}
    for name, build in contenders.items():
        yield guarded({**base, "contender": name}, lambda build=build: _one_attention(inputs, expected, build), verbose=verbose)
        release_memory()


def release_memory() -> None:
    """torch's allocator keeps what XLA's may need next."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe(case: Case | WriterCase) -> Row:
    """The case for the report; the lengths of a ragged batch in full."""
    fields = asdict(case)
    if isinstance(case, Case) and case.is_uniform:
        fields["lengths"] = f"{len(case.lengths)} x ({case.lengths[0][0]} of {case.lengths[0][1]})"
    return fields


def _one_attention(inputs: Inputs, expected: tuple[list[int], np.ndarray], build: Callable[[Inputs], JaxCall | TorchCall]) -> Row:
    case, prepared = inputs.case, build(inputs)
    rows, wanted = expected
    if isinstance(prepared, JaxCall):
        once = jax.jit(prepared.call)
        out = once(inputs.query, inputs.metadata.seq_lens, prepared.operands)
        got = np.asarray(out[np.asarray(rows)].astype(jnp.float32))
        if out.shape != inputs.query.shape:
            raise ValueError(f"gave shape {out.shape}")
    else:
        got = prepared.call().float().cpu().numpy().reshape(inputs.query.shape)[rows]
    error = relative_error(got, wanted)
    del got
    row: Row = {"relative_error": error, "checked_rows": len(rows), "note": prepared.note}
    if not error <= TOLERANCE[case.dtype]:
        return {**row, "status": "wrong", "reason": f"relative error {error:.1e} > {TOLERANCE[case.dtype]:.0e}: not timed"}
    if isinstance(prepared, JaxCall):
        about = rough_seconds(lambda: once(inputs.query, inputs.metadata.seq_lens, prepared.operands))
        timed = time_jax(*_chained(prepared, inputs), about=about)
    else:
        timed = time_torch(prepared.call)
    return {**row, "status": "ok", **timed_row(timed, flops=case.flops, nbytes=case.min_bytes)}


def _chained(prepared: JaxCall, inputs: Inputs) -> tuple[Callable[..., Any], Any, Any]:
    """(step, state, operands) in which each call waits for the one before.

    In decode an output is the next query: nothing is added to the kernel. A prefill keeps its queries, whose scores decide how much a
    matrix unit has to switch, and its sequence lengths wait for an element of the output: one tiny kernel of some microseconds a call.
    """
    lens = inputs.metadata.seq_lens
    if inputs.case.is_decode and inputs.case.dtype != "float32":

        def decode_step(query: Any, operands: Any, i: int) -> Any:
            lens, operands = operands
            return prepared.call(query, lens, operands)

        return decode_step, inputs.query, (lens, prepared.operands)

    def step(state: Any, operands: Any, i: int) -> Any:
        query, operands = operands
        # A contender that ignores the lengths must be called again as well: XLA would merge equal calls.
        lens, query = jax.lax.optimization_barrier((state[0], query))
        out = prepared.call(query, lens, operands)
        return lens + (out[0, 0, 0] > 1e30).astype(lens.dtype), out

    return step, (lens, jnp.zeros_like(inputs.query)), (inputs.query, prepared.operands)


# --- writers ------------------------------------------------------------------------------------------------------------------------------


def writer_rows(case: WriterCase, implementations: tuple[str, ...], *, verbose: bool = False) -> Iterator[Row]:
    base = {"case": case.name, "kind": "writer", "flops": 0, "min_bytes": case.min_bytes, "setup": describe(case)}
    for implementation in implementations:
        row = {**base, "contender": f"purepage {implementation}"}
        yield guarded(row, lambda implementation=implementation: _one_writer(case, implementation), verbose=verbose)
        release_memory()


def writer_call(case: WriterCase, implementation: str) -> Callable[[Any, Any, Any, Any], tuple[pp.KVCache, Any]]:
    """`call(cache, new, shared, layer) -> (cache, what else it returns)`."""
    heads = case.num_heads

    def update(cache: Any, new: Any, shared: Any, layer: Any) -> Any:
        _, key, value = new
        return pp.update_cache(cache, key, value, shared["slots"], layer=layer, implementation=implementation), ()

    def rope(cache: Any, new: Any, shared: Any, layer: Any) -> Any:
        query, key, cache = pp.rope_and_update_cache(
            *new, shared["positions"], shared["cos_sin"], cache, shared["slots"], layer=layer, implementation=implementation
        )
        return cache, (query, key)

    def qk_norm(cache: Any, new: Any, shared: Any, layer: Any) -> Any:
        query, key, _, cache = pp.qk_norm_rope_and_update_cache(
            new,
            shared["weight"],
            shared["weight"],
            shared["positions"],
            shared["cos_sin"],
            cache,
            shared["slots"],
            num_heads=heads,
            layer=layer,
            implementation=implementation,
        )
        return cache, (query, key)

    return {"update": update, "rope": rope, "qk_norm": qk_norm}[case.kind]


def writer_inputs(case: WriterCase, sets: int) -> tuple[pp.KVCache, list[Any], Row]:
    """(cache, `sets` different inputs, what they share). Slots are a random choice of all."""
    layers = 4
    spec = pp.CacheSpec(
        num_blocks=case.num_blocks,
        block_size=case.block_size,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        num_layers=layers,
        dtype=case.cache_dtype,
    )
    rng, tokens, size = np.random.default_rng(0), case.num_tokens, case.head_size

    def normal(seed: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(case.dtype)

    def new(seed: int) -> Any:
        if case.kind == "qk_norm":
            return normal(seed, tokens, (case.num_heads + 2 * case.num_kv_heads) * size)
        return tuple(normal(3 * seed + i, tokens, h, size) for i, h in enumerate((case.num_heads, case.num_kv_heads, case.num_kv_heads)))

    angle = np.arange(tokens)[:, None] * 10000.0 ** (-np.arange(size // 2) / (size // 2))
    shared = {
        "slots": jnp.asarray(rng.permutation(spec.num_slots)[:tokens], jnp.int32),
        "positions": jnp.asarray(rng.integers(0, tokens, tokens), jnp.int32),
        "cos_sin": jnp.asarray(np.concatenate([np.cos(angle), np.sin(angle)], -1), case.dtype),
        "weight": normal(99, size),
    }
    return pp.init_cache(spec), [new(i) for i in range(sets)], shared


def _one_writer(case: WriterCase, implementation: str) -> Row:
    """Checked against float64 first. Inputs and layers rotate from call to call: one set of them would fit into the device's L2."""
    layers = 4
    cache, new, shared = writer_inputs(case, layers)
    call = writer_call(case, implementation)
    try:
        jax.eval_shape(call, cache, new[0], shared, 0)
    except NotImplementedError as error:
        raise Unavailable(str(error)) from error
    error, memory = _check_writer(case, call, cache, new[1], shared)
    if not error <= TOLERANCE[case.dtype]:
        return {"status": "wrong", "relative_error": error, "reason": f"relative error {error:.1e}: not timed"}

    def step(cache: Any, operands: Any, i: int) -> Any:
        new, shared = operands
        cache, rest = call(cache, new[i % layers], shared, i % layers)
        return jax.lax.optimization_barrier((cache, rest))[0]

    timed = time_jax(step, cache, (new, shared), donate=True)
    return {"status": "ok", "relative_error": error, **memory, **timed_row(timed, nbytes=case.min_bytes)}


def _check_writer(case: WriterCase, call: Any, cache: pp.KVCache, new: Any, shared: Row) -> tuple[float, Row]:
    """Relative error of the written rows against float64, and the temporaries of the compiled call."""
    picked = np.sort(np.random.default_rng(2).permutation(case.num_tokens)[:CHECKED_WRITES])
    compiled = jax.jit(lambda cache, new, shared: call(cache, new, shared, 1), donate_argnums=0).lower(cache, new, shared).compile()
    after, rest = compiled(jax.tree.map(jnp.copy, cache), new, shared)
    slots = shared["slots"][picked]
    new = jax.tree.map(lambda x: x[picked], new)
    key, value = jax.jit(lambda c: tuple(x.reshape(-1, *x.shape[2:])[slots] for x in pp.cache_to_logical(c, 1)))(after)
    tokens, size = len(picked), case.head_size
    if case.kind == "qk_norm":
        packed = np.asarray(new, np.float64).reshape(tokens, -1, size)
        query_in, key_in, value_in = np.split(packed, [case.num_heads, case.num_heads + case.num_kv_heads], axis=1)
        weight = np.asarray(shared["weight"], np.float64)
        query_in, key_in = (x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight for x in (query_in, key_in))
    else:
        query_in, key_in, value_in = (np.asarray(x, np.float64) for x in new)
    wanted = [value_in, key_in]
    if case.kind != "update":
        half = size // 2
        table = np.asarray(shared["cos_sin"], np.float64)[np.asarray(shared["positions"])[picked]][:, None]
        cos, sin = table[..., :half], table[..., half:]

        def turned(x: np.ndarray) -> np.ndarray:
            a, b = x[..., :half], x[..., half:]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        wanted = [value_in, turned(key_in), turned(query_in)]
    got = [np.asarray(x.astype(jnp.float32)) for x in (value, key, *(x[picked] for x in rest[:1]))]
    loose = 0.1 if case.cache_dtype.startswith("float8") else 1.0  # three mantissa bits
    error = max(relative_error(g, w) for g, w in zip(got, wanted, strict=True)) * loose
    analysis = compiled.memory_analysis()
    return error, {"temporaries_bytes": int(analysis.temp_size_in_bytes), "cache_bytes": cache.nbytes}
