"""Checks and times the bridges on a GPU: capture in command buffers, updates in place, streams, equality of the two bridges, threads,
overhead.

    python -m benchmarks.bridge_gpu_check --json benchmarks/results/h200_bridges.json
    python -m benchmarks.bridge_gpu_check --small        # the same on a CPU through Triton's interpreter, to see that the script works

Each check stands alone: one that fails is reported with its error and the rest still run. Times are the median of repeated batches, in
microseconds a call, with the device idle before and waited for after; the exit status counts failed checks.
"""

import argparse
import dataclasses
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "bridges"))

import bridge_kernels as kernels

from benchmarks import summary
from purepage.bridges import callback, dlpack, jax_triton
from purepage.bridges.execute import run
from purepage.functional.target import current_target

ON_GPU = jax.default_backend() != "cpu"
ROWS, WIDTH = 64, 1024


class Report:
    """Rows of a table: what was checked, whether it holds, what was measured."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, ok: bool | None, value: Any = "", unit: str = "", note: str = "") -> None:
        self.rows.append({"check": name, "ok": ok, "value": value, "unit": unit, "note": note})
        mark = {True: "ok", False: "FAILED", None: "-"}[ok]
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{mark:7} {name:58} {shown!s:>12} {unit:4} {note}", flush=True)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as err:
            traceback.print_exc()
            self.add(name, False, note=f"{type(err).__name__}: {str(err)[-300:]}")


@contextmanager
def counted_bodies() -> Iterator[list[int]]:
    """Counts how often XLA calls into Python for a program."""
    original, count = callback._ProgramBody.__call__, [0]

    def counting(self: Any, *args: Any) -> None:
        count[0] += 1
        original(self, *args)

    callback._ProgramBody.__call__ = counting
    try:
        yield count
    finally:
        callback._ProgramBody.__call__ = original


def numbers(seed: int, shape: tuple[int, ...], dtype: str = "uint16") -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == "float32":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, np.iinfo(dtype).max, shape, dtype=dtype)


def microseconds(step: Callable[[], Any], *, calls: int, batches: int = 7) -> float:
    """Median over batches of the time of one call; `step` returns what must be waited for."""
    for _ in range(3):
        result = step()
    jax.block_until_ready(result)
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(calls):
            result = step()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def scatter(pool: jax.Array, rows: jax.Array, slots: jax.Array, layer: Any, *, bridge: str, capture: bool | None = None) -> jax.Array:
    program = kernels.scatter_program(*pool.shape, rows.shape[0], dtype=pool.dtype.name)
    arrays = {"pool": pool, "rows": rows, "slots": slots, "layer": jnp.reshape(jnp.asarray(layer, jnp.int32), (1,))}
    if bridge == "callback":
        return callback.run_program(program, arrays, command_buffer=capture)[0]
    return run(program, arrays, bridge)[0]


def unrolled(pool: jax.Array, rows: jax.Array, slots: jax.Array, **how: Any) -> jax.Array:
    for layer in range(pool.shape[0]):
        pool = scatter(pool, rows, slots, layer, **how)
    return pool


def scanned(pool: jax.Array, rows: jax.Array, slots: jax.Array, **how: Any) -> jax.Array:
    return jax.lax.scan(lambda pool, layer: (scatter(pool, rows, slots, layer, **how), None), pool, jnp.arange(pool.shape[0]))[0]


def while_looped(pool: jax.Array, rows: jax.Array, slots: jax.Array, **how: Any) -> jax.Array:
    state = (jnp.int32(0), pool)
    return jax.lax.while_loop(lambda s: s[0] < pool.shape[0], lambda s: (s[0] + 1, scatter(s[1], rows, slots, s[0], **how)), state)[1]


FORMS = {"unrolled": unrolled, "scan": scanned, "while_loop": while_looped}


@jax.jit
def expected_pool(pool: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    return pool.at[:, slots].set(rows[None])


@jax.jit
def same(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.all(a == b)


def check_big_pool(report: Report, layers: int, slots_count: int, runs: int) -> None:
    """Every form through every bridge on one donated pool: in place, exactly the right bytes, fresh inputs, Python calls, time."""
    nbytes = layers * slots_count * WIDTH * 2
    bridges = [("callback", True), ("callback", False)] + ([("jax_triton", None)] if jax_triton.unavailable() is None else [])
    for bridge, capture in bridges:
        for form, function in FORMS.items():
            name = f"{form}, {layers} layers, {bridge}{'' if capture is None else ', captured' if capture else ', not captured'}"
            with report.section(name), counted_bodies() as bodies:
                step = jax.jit(partial(function, bridge=bridge, capture=capture), donate_argnums=0)
                fill = jax.jit(
                    lambda seed: (jax.lax.broadcasted_iota(jnp.uint32, (layers, slots_count, WIDTH), 1) * 7 + seed).astype(jnp.uint16)
                )
                pool = fill(jnp.uint32(3))
                compiled = step.lower(
                    pool, *(jax.ShapeDtypeStruct(s, d) for s, d in (((ROWS, WIDTH), "uint16"), ((ROWS,), "int32")))
                ).compile()
                temporaries = compiled.memory_analysis().temp_size_in_bytes
                address, right, moved = pool.unsafe_buffer_pointer(), [], 0
                for seed in range(3):  # one compiled program, three contents
                    rows = jnp.asarray(numbers(seed, (ROWS, WIDTH)))
                    slots = jnp.asarray(np.random.default_rng(seed).permutation(slots_count)[:ROWS], jnp.int32)
                    wanted = expected_pool(pool, rows, slots)
                    pool = compiled(pool, rows, slots)
                    right.append(bool(same(pool, wanted)))
                    moved += pool.unsafe_buffer_pointer() != address
                    del wanted
                report.add(f"{name}: whole pool right for 3 contents", all(right), nbytes / 1e9, "GB")
                report.add(f"{name}: in place", moved == 0 and temporaries < nbytes // 16, temporaries, "B", "temporaries")
                bodies[0] = 0
                state = [pool]

                def once(compiled: Any = compiled, state: list[Any] = state, rows: Any = rows, slots: Any = slots) -> Any:
                    state[0] = compiled(state[0], rows, slots)
                    return state[0]

                took = microseconds(once, calls=runs)
                report.add(f"{name}: time of {layers} launches", None, took, "us")
                launches = layers * (3 + 7 * runs)
                expect_captured = ON_GPU and capture
                ok = None if bridge != "callback" else bodies[0] < launches // 4 if expect_captured else bodies[0] == launches
                report.add(f"{name}: Python calls", ok, bodies[0], "", f"of {launches} launches")
                del pool, state


def check_survival(report: Report) -> None:
    with report.section("old pool survives without donation"):
        before = numbers(1, (2, 256, WIDTH))
        rows, slots = jnp.asarray(numbers(2, (ROWS, WIDTH))), jnp.arange(ROWS, dtype=jnp.int32)
        for bridge in available_bridges():
            pool = jnp.asarray(before)
            after = jax.jit(partial(unrolled, bridge=bridge))(pool, rows, slots)
            ok = np.array_equal(pool, before) and bool(same(after, expected_pool(pool, rows, slots)))
            report.add(f"old pool survives without donation, {bridge}", ok)


def available_bridges() -> list[str]:
    return ["callback"] + (["jax_triton"] if jax_triton.unavailable() is None else [])


def check_streams(report: Report, size: int, rounds: int) -> None:
    """A kernel must wait for the work before it and hold up the work after it: long matmuls on both sides, in one program and between
    calls.
    """
    x = jnp.asarray(numbers(5, (size, size), "float32")) / size**0.5
    program = kernels.add_program(size * size, block=1024)
    long = lambda x: jax.lax.fori_loop(0, 10, lambda _, y: jnp.tanh(y @ x), x)  # noqa: E731
    plain = jax.jit(lambda x: long((long(x) + x).reshape(size, size)))
    wanted = plain(x)
    for bridge, capture in [("callback", True), ("callback", False)] + [("jax_triton", None)] * ("jax_triton" in available_bridges()):
        name = f"kernel between matmuls, {bridge}{'' if capture is None else ', captured' if capture else ', not captured'}"
        with report.section(name):

            def between(x: jax.Array, bridge: str = bridge, capture: bool | None = capture) -> jax.Array:
                arrays = {"x": long(x).reshape(-1), "y": x.reshape(-1)}
                out = (
                    callback.run_program(program, arrays, command_buffer=capture) if bridge == "callback" else run(program, arrays, bridge)
                )
                return long(out[0].reshape(size, size))

            step = jax.jit(between)
            worst = max(float(jnp.max(jnp.abs(step(x) - wanted))) for _ in range(rounds))
            report.add(f"{name}: {rounds} rounds", worst < 2e-2, worst, "", "largest difference")
    if ON_GPU:
        with report.section("export on a side stream"):
            import torch

            step, side = jax.jit(long), torch.cuda.Stream()
            total = float(dlpack.to_torch(step(x)).double().sum())
            wrong = 0
            for _ in range(rounds):
                with torch.cuda.stream(side):
                    wrong += float(dlpack.to_torch(step(x)).double().sum()) != total
            report.add(f"export on a side stream: {rounds} rounds", wrong == 0, wrong, "", "wrong sums")
            wrong = 0
            for i in range(rounds):
                with torch.cuda.stream(side):
                    tensor = torch.full((size, size), float(i), device="cuda")
                    for _ in range(10):
                        tensor = tensor @ torch.eye(size, device="cuda")
                    array = dlpack.to_jax(tensor)
                wrong += float(jnp.max(jnp.abs(array - i))) > 1e-2 * max(i, 1)
            report.add(f"import from a side stream: {rounds} rounds", wrong == 0, wrong, "", "wrong arrays")


def check_equality(report: Report) -> None:
    reason = jax_triton.unavailable()
    if reason:
        report.add("jax_triton equals callback bit for bit", None, note=f"not run: {reason}")
        return
    programs = {
        "add": kernels.add_program(100_000),
        "scatter": kernels.scatter_program(4, 512, 1000, 32),
        "total": kernels.total_program(512, 1000),
        "total with scale 1": kernels.total_program(512, 1000, scale=1.0),
        "fp8 bytes": kernels.flip_sign_program(4096, dtype="float8_e4m3fn"),
    }
    for name, program in programs.items():
        with report.section(f"jax_triton equals callback: {name}"):
            arrays = {}
            for i, (key, buffer) in enumerate(program.inputs):
                if buffer.dtype == "int32":
                    arrays[key] = jnp.asarray(np.random.default_rng(i).permutation(max(buffer.shape[0], 3))[: buffer.shape[0]], jnp.int32)
                elif buffer.dtype.startswith("float8"):
                    arrays[key] = jnp.asarray(numbers(i, buffer.shape, "uint8").view(jnp.dtype(buffer.dtype)))
                else:
                    arrays[key] = jnp.asarray(numbers(i, buffer.shape, buffer.dtype))
            results = [jax.jit(partial(run, program, bridge=bridge))(arrays) for bridge in available_bridges()]
            ok = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*results, strict=True))
            report.add(f"jax_triton equals callback: {name}", ok)


def check_overhead(report: Report, calls: int) -> None:
    """One launch a call is too little for XLA to record, so the callback's Python runs each time; of eight, it records."""
    x, y = jnp.ones(4096), jnp.ones(4096)
    program = kernels.add_program(4096)

    def chained(x: jax.Array, y: jax.Array, launches: int, bridge: str | None, capture: bool | None) -> jax.Array:
        for _ in range(launches):
            if bridge is None:
                x = jax.lax.optimization_barrier(x + y)
            elif bridge == "callback":
                (x,) = callback.run_program(program, {"x": x, "y": y}, command_buffer=capture)
            else:
                (x,) = run(program, {"x": x, "y": y}, bridge)
        return x

    ways = [("xla", None, None), ("callback, captured", "callback", True), ("callback, not captured", "callback", False)]
    ways += [("jax_triton", "jax_triton", None)] if "jax_triton" in available_bridges() else []
    for name, bridge, capture in ways:
        for launches in (1, 8):
            with report.section(f"overhead: {name}"):
                step = jax.jit(partial(chained, launches=launches, bridge=bridge, capture=capture))
                took = microseconds(lambda step=step: step(x, y), calls=calls)
                report.add(f"overhead: {name}, {launches} launches a call", None, took, "us", f"{took / launches:.1f} us a launch")
    with report.section("eager round trip"):
        took = microseconds(lambda: dlpack.to_jax(dlpack.to_torch(x)), calls=calls)
        report.add("eager round trip to torch and back", None, took, "us")


def check_threads(report: Report, rounds: int) -> None:
    for bridge in available_bridges():
        with report.section(f"8 threads, {bridge}"):
            step = jax.jit(partial(unrolled, bridge=bridge), donate_argnums=0)
            rows = [jnp.asarray(numbers(i, (ROWS, WIDTH))) for i in range(rounds)]
            slots = [jnp.asarray(np.random.default_rng(i).permutation(256)[:ROWS], jnp.int32) for i in range(rounds)]

            def serve(seed: int, step: Any = step, rows: Any = rows, slots: Any = slots) -> bool:
                pool = jnp.asarray(numbers(100 + seed, (8, 256, WIDTH)))
                wanted = pool + jnp.uint16(0)
                for row, slot in zip(rows, slots, strict=True):
                    pool, wanted = step(pool, row, slot), expected_pool(wanted, row, slot)
                return bool(same(pool, wanted))

            with ThreadPoolExecutor(8) as threads:
                right = list(threads.map(serve, range(8)))
            report.add(f"8 threads x {rounds} calls, {bridge}", all(right), sum(right), "", "threads right")


def check_devices(report: Report) -> None:
    """Each device updates its own shard."""
    count = len(jax.devices())
    if count == 1:
        report.add("shard_map", None, note="one device")
        return
    with report.section("shard_map"):
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = jax.make_mesh((count,), ("slots",))
        cut = PartitionSpec(None, None, "slots")
        before = numbers(1, (2, 64, count * 128))
        pool = jax.device_put(before, NamedSharding(mesh, cut))
        rows = jax.device_put(numbers(2, (8, count * 128)), NamedSharding(mesh, PartitionSpec(None, "slots")))
        slots = jax.device_put(np.arange(8, dtype=np.int32), NamedSharding(mesh, PartitionSpec()))
        for bridge in available_bridges():
            specs = (cut, PartitionSpec(None, "slots"), PartitionSpec())
            step = jax.shard_map(partial(unrolled, bridge=bridge), mesh=mesh, in_specs=specs, out_specs=cut, check_vma=False)
            after = np.asarray(jax.jit(step)(pool, rows, slots))
            wanted = before.copy()
            wanted[:, :8] = np.asarray(rows)
            report.add(f"shard_map over {count} devices, {bridge}", np.array_equal(after, wanted))


def versions() -> dict[str, str]:
    import torch
    import triton

    found = {"jax": jax.__version__, "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    if jax_triton.unavailable() is None:
        found["jax_triton"] = ".".join(map(str, jax_triton._load().__version_info__))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    report, target = Report(), current_target()
    print(target, versions(), f"jax_triton: {jax_triton.unavailable() or 'available'}", sep="\n", flush=True)
    layers, slots, runs, size, rounds, calls = (4, 256, 2, 64, 2, 3) if options.small else (32, 65536, 50, 4096, 50, 200)
    check_equality(report)
    check_survival(report)
    check_overhead(report, calls)
    check_threads(report, 3 if options.small else 50)
    check_streams(report, size, rounds)
    check_devices(report)
    check_big_pool(report, layers, slots, runs)
    failed = sum(row["ok"] is False for row in report.rows)
    print(f"{failed} of {len(report.rows)} rows failed")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"device": dataclasses.asdict(target), "kind": jax.devices()[0].device_kind, "versions": versions(), "rows": report.rows}
        options.json.write_text(summary.dumps(result))
    return failed


if __name__ == "__main__":
    sys.exit(main())
