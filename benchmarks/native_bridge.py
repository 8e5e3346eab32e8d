"""The native bridge on a GPU, beside the callback bridge: `python -m benchmarks.native_bridge [SECTION ...]`.

Sections: `single` (one call alone), `step` (32 layers), `soak` (a million launches), `threads`, `export` (another process, without torch
and Triton), `cache` (XLA's persistent compilation cache), `memcheck` (what compute-sanitizer runs), `profile`. Each section is a process of
its own where none is named, so a failure ends one.
"""

import cProfile
import os
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import purepage as pp
from purepage.bridges.execute import using_bridge

BRIDGES = ("callback", "native", None)
"""None: the one that is chosen automatically."""
LLAMA_8B = {"seqs": 8, "context": 4096, "heads": 32, "kv_heads": 8, "size": 128, "block": 64}
SMALL = {"seqs": 1, "context": 64, "heads": 8, "kv_heads": 1, "size": 128, "block": 16}


def inputs(*, seqs: int, context: int, heads: int, kv_heads: int, size: int, block: int, seed: int = 0) -> tuple[Any, ...]:
    """(query, cache, metadata) of a decode step of random values."""
    width = -(-context // block)
    spec = pp.CacheSpec(num_blocks=seqs * width, block_size=block, num_kv_heads=kv_heads, head_size=size, dtype="bfloat16")
    keys = jax.random.split(jax.random.key(seed), 3)
    sides = [jax.random.normal(key, (seqs * width * block, kv_heads, size), jnp.bfloat16) for key in keys[:2]]
    cache = pp.update_cache(pp.init_cache(spec), *sides, jnp.arange(seqs * width * block), implementation="xla")
    table = np.random.default_rng(seed).permutation(seqs * width).reshape(seqs, width)
    metadata = pp.make_metadata([1] * seqs, [context] * seqs, table, block_size=block, max_query_len=1, max_seq_len=context)
    return jax.random.normal(keys[2], (seqs, heads, size), jnp.bfloat16), cache, metadata


def attend(query: Any, cache: Any, metadata: Any) -> Any:
    return pp.paged_attention(query, cache, metadata, implementation="triton")


def microseconds(call: Callable[[], Any], calls: int, batches: int = 7) -> tuple[float, float]:
    """(back to back, one at a time and waited for): medians of the time of a call."""
    jax.block_until_ready(call())
    back_to_back, alone = [], []
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        back_to_back.append((time.perf_counter() - begin) / calls * 1e6)
    for _ in range(calls):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        alone.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(back_to_back), statistics.median(alone)


def ways(given: tuple[Any, ...]) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """(name, a call, how often to time it)."""
    nothing = jax.jit(lambda query, cache, metadata: query + query)
    yield "jitted, `query + query` of the same arguments", lambda: nothing(*given), 400
    for bridge in BRIDGES:
        with using_bridge(bridge):
            jitted = jax.jit(attend)
            compiled = jitted.lower(*given).compile()
            yield f"compiled, {bridge or 'automatic'}", partial(compiled, *given), 400
            yield f"jitted, {bridge or 'automatic'}", partial(jitted, *given), 400
            yield f"eager, {bridge or 'automatic'}", partial(attend, *given), 40


def single() -> None:
    print("| call of `paged_attention`, in us | back to back | one at a time |\n|---|---|---|")
    for name, shape in (("1 sequence of 64 keys", SMALL), ("8 sequences of 4096 keys", LLAMA_8B)):
        for way, call, calls in ways(inputs(**shape)):
            first, second = microseconds(call, calls)
            print(f"| {name}: {way} | {first:.1f} | {second:.1f} |", flush=True)


def profile() -> None:
    """Where an eager call spends the host's time."""
    given = inputs(**SMALL)
    with using_bridge("native"):
        for _ in range(10):
            jax.block_until_ready(attend(*given))
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(100):
            attend(*given)
        profiler.disable()
    for order in ("cumulative", "tottime"):
        pstats.Stats(profiler).sort_stats(order).print_stats(40)


def step() -> None:
    from benchmarks.step import step_rows

    print("| 32 layers, in us | a step | beside the kernels | calls of Python |\n|---|---|---|---|")
    for row in step_rows(implementation="triton", bridges=BRIDGES, verbose=True):
        print(
            f"| {row['contender']} | {row.get('us', float('nan')):.0f} | {row.get('overhead_us', 0):.0f} | {row.get('python_calls', '')} "
            f"of {row.get('calls', '')} steps | {row['status']}",
            flush=True,
        )


def used_bytes() -> tuple[int, int, int]:
    """(the device's memory in use by JAX, in use by all, the process's peak resident size)."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return jax.local_devices()[0].memory_stats()["bytes_in_use"], total - free, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def soak() -> None:
    """Two launches a call of `paged_attention`: 500 calls a program of `fori_loop`, 1000 programs; then 100000 calls from Python."""
    query, cache, metadata = inputs(**SMALL)
    with using_bridge("native"):
        many = jax.jit(lambda query, cache, metadata: jax.lax.fori_loop(0, 500, lambda _, x: attend(x, cache, metadata), query))
        once = jax.jit(attend)
        wanted = jax.block_until_ready(many(query, cache, metadata))
        alone = jax.block_until_ready(once(query, cache, metadata))
        for name, call, calls, launches, right in (("fori_loop", many, 1000, 1000, wanted), ("jitted calls", once, 100_000, 2, alone)):
            jax.block_until_ready(call(query, cache, metadata))
            before, begin = used_bytes(), time.perf_counter()
            for done in range(calls):
                out = call(query, cache, metadata)
                if done % (calls // 10) == 0:
                    jax.block_until_ready(out)
            same = bool(jnp.array_equal(out.view(jnp.uint16), right.view(jnp.uint16)))
            seconds, after = time.perf_counter() - begin, used_bytes()
            grown = [b - a for a, b in zip(before, after, strict=True)]
            print(
                f"{name}: {calls * launches} launches in {seconds:.1f} s ({seconds / calls / launches * 1e6:.2f} us each), last result "
                f"{'the same bits' if same else 'DIFFERENT'}; JAX's device memory grew by {grown[0]} B, the device's by {grown[1]} B, the "
                f"process's peak by {grown[2] / 2**20:.1f} MiB",
                flush=True,
            )


def threads() -> None:
    """Eight Python threads call one jitted function with inputs of their own."""
    with using_bridge("native"):
        given = [inputs(**LLAMA_8B, seed=seed) for seed in range(8)]
        wanted = [np.asarray(jax.jit(attend)(*each)).view(np.uint16) for each in given]
        fresh, wrong, barrier = jax.jit(lambda *each: attend(*each)), [0] * 8, threading.Barrier(8)

        def serve(index: int) -> None:
            with using_bridge("native"):
                barrier.wait()
                for _ in range(200):
                    wrong[index] += not np.array_equal(np.asarray(fresh(*given[index])).view(np.uint16), wanted[index])

        serving = [threading.Thread(target=serve, args=(index,)) for index in range(8)]
        for each in serving:
            each.start()
        for each in serving:
            each.join()
        print(f"threads: 8 x 200 calls of one jitted function, {sum(wrong)} results of other bits than alone", flush=True)


LOAD = """
    import sys, time
    sys.modules["torch"] = sys.modules["triton"] = None  # an import of either raises
    import jax, numpy as np
    from jax import export
    import purepage as pp
    from purepage.bridges.native import library
    from benchmarks.native_bridge import inputs, LLAMA_8B
    print("library:", library.load() or "loaded")
    reloaded = export.deserialize(open(sys.argv[1], "rb").read())
    given = inputs(**LLAMA_8B)
    out = np.asarray(jax.jit(reloaded.call)(*given)).view(np.uint16)
    print("bits equal:", np.array_equal(out, np.load(sys.argv[2])), "torch imported:", sys.modules["torch"] is not None)
"""

CACHED = """
    import jax, sys, time
    from jax import monitoring
    seen = {}
    monitoring.register_event_listener(lambda event, **more: seen.__setitem__(event, seen.get(event, 0) + 1))
    from purepage.bridges.execute import using_bridge
    from benchmarks.native_bridge import attend, inputs, LLAMA_8B
    given = inputs(**LLAMA_8B)
    seen.clear()
    begin = time.perf_counter()
    with using_bridge("native"):
        jax.block_until_ready(jax.jit(attend)(*given))
    print(f"first call after {time.perf_counter() - begin:.2f} s;",
          {event.rpartition("/")[2]: count for event, count in seen.items() if "cache_hits" in event or "cache_misses" in event})
"""


def python(program: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    print((done.stdout + (done.stderr[-1500:] if done.returncode else "")).strip(), flush=True)


def export() -> None:
    from jax import export

    from purepage.bridges.native import library

    given = inputs(**LLAMA_8B)
    check = export.DisabledSafetyCheck.custom_call(library.TARGET)
    with using_bridge("native"), tempfile.TemporaryDirectory() as folder:
        exported = export.export(jax.jit(attend), disabled_checks=[check])(*given)
        (Path(folder) / "step").write_bytes(exported.serialize())
        np.save(Path(folder) / "out.npy", np.asarray(jax.jit(attend)(*given)).view(np.uint16))
        print(f"exported: {(Path(folder) / 'step').stat().st_size} B", flush=True)
        python(LOAD, f"{folder}/step", f"{folder}/out.npy")


def cache() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        for name in ("first process", "second process"):
            print(name, end=": ", flush=True)
            python(CACHED, environment=kept)


def memcheck() -> None:
    given = inputs(**SMALL)
    query, pool, metadata = given
    with using_bridge("native"):
        jax.block_until_ready(jax.jit(attend)(*given))
        layers = jax.jit(lambda x: [x := attend(x, pool, metadata) for _ in range(8)][-1])
        jax.block_until_ready(layers(query))
        key = jnp.ones((1, 1, 128), jnp.bfloat16)
        write = jax.jit(lambda c: pp.update_cache(c, key, key, metadata.slot_mapping, implementation="triton"), donate_argnums=0)
        jax.block_until_ready(write(pool).data)
    print("memcheck: ran", flush=True)


SECTIONS = {each.__name__: each for each in (single, step, export, cache, threads, soak, memcheck, profile)}


def main() -> int:
    chosen = sys.argv[1:]
    if chosen:
        for name in chosen:
            SECTIONS[name]()
        return 0
    status = 0
    for name in SECTIONS:
        print(f"== {name}", flush=True)
        status |= subprocess.run([sys.executable, "-m", "benchmarks.native_bridge", name], check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
