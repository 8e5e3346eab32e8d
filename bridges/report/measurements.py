"""What a report measures: the self-check's cases, the resources of the kernels as this machine's Triton compiles them, and speeds.

Each function yields flat rows, for a child process to stream.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...functional import dispatch
from ...functional.attention import paged_attention
from ...functional.cache import CacheSpec, init_cache
from ...functional.cache_writers import update_cache
from ...functional.errors import UnsupportedError
from ...functional.fp8 import e4m3_dtype
from ...functional.fused_writers import rope_and_update_cache
from ...functional.metadata_builders import make_metadata
from ...functional.target import Target, assuming_target, current_target
from ...kernels import compile_check
from .. import launcher, selfcheck
from ..measure import time_steps

Row = dict[str, Any]


# --- cases --------------------------------------------------------------------------------------------------------------------------------


def case_names(only: str = "") -> list[str]:
    """Names of the self-check's cases with this text in them."""
    return [case.name for case in selfcheck.cases(current_target()) if only in case.name]


def cases(implementation: str, only: str, after: Sequence[str], begin: Callable[[str], None]) -> Iterator[Row]:
    """The self-check's cases through one implementation.

    Args:
      implementation: its name.
      only: cases without this text in their name are left out.
      after: cases that are left out too.
      begin: called with the name of each before it runs.
    """
    for case in selfcheck.cases(current_target()):
        if only in case.name and case.name not in after:
            begin(case.name)
            start = time.perf_counter()
            result = selfcheck.outcome(case, implementation)
            yield {**asdict(result), "seconds": round(time.perf_counter() - start, 4)}


# --- shapes -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One call that is timed and whose kernels are compiled: 32 query heads, 8 KV heads of 128, bfloat16 queries.

    Attributes:
      name: names it in the report.
      kind: "decode", "prefill", "write" or "rope".
      num_seqs: sequences.
      length: keys of each, new ones included; of a writer the new tokens.
      fp8: whether the cache is in the target's e4m3.
    """

    name: str
    kind: str
    num_seqs: int
    length: int
    fp8: bool = False


GPU_SHAPES = (
    Shape("decode 64 x 8192", "decode", 64, 8192),
    Shape("decode 8 x 4096", "decode", 8, 4096),
    Shape("decode 64 x 8192, fp8 cache", "decode", 64, 8192, fp8=True),
    Shape("prefill 2 x 4096", "prefill", 2, 4096),
    Shape("write 4096 tokens", "write", 1, 4096),
    Shape("rope and write 4096 tokens", "rope", 1, 4096),
)
CPU_SHAPES = (
    Shape("decode 4 x 256", "decode", 4, 256),
    Shape("prefill 1 x 128", "prefill", 1, 128),
    Shape("write 256 tokens", "write", 1, 256),
)
HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 16


def shapes(target: Target) -> tuple[Shape, ...]:
    return CPU_SHAPES if target.platform == "cpu" else GPU_SHAPES


@dataclass(frozen=True)
class Work:
    """A shape as work to do.

    Attributes:
      step: `step(state, operands) -> state`, traceable.
      make: makes state and operands, on the device.
      nbytes: bytes that a step has to move.
      flops: of its matrix products, where they and not the bytes decide the time; else 0.
    """

    step: Callable[[Any, Any], Any]
    make: Callable[[], tuple[Any, Any]]
    nbytes: int
    flops: int = 0


def _random_cache(spec: CacheSpec) -> Any:
    """A cache of normal values: zeros cost a matrix unit less."""

    def make() -> Any:
        data = jax.random.normal(jax.random.key(9), spec.shape, jnp.bfloat16).astype(spec.dtype)
        return replace(
            init_cache(spec), data=data if data.dtype == spec.storage_dtype else jax.lax.bitcast_convert_type(data, spec.storage_dtype)
        )

    return jax.jit(make)()


def work_of(shape: Shape, target: Target, implementation: Any) -> Work:
    """The work of a shape through an implementation."""
    tokens, blocks = shape.length, -(-shape.length // BLOCK)
    dtype = e4m3_dtype(target.arch).type if shape.fp8 else jnp.bfloat16
    spec = CacheSpec(num_blocks=shape.num_seqs * blocks, block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=dtype)
    kv_bytes = shape.num_seqs * shape.length * KV_HEADS * 2 * HEAD_SIZE * spec.dtype.itemsize

    def normal(seed: int, *size: int) -> Any:
        return jax.random.normal(jax.random.key(seed), size, jnp.bfloat16)

    if shape.kind in ("decode", "prefill"):
        new = 1 if shape.kind == "decode" else shape.length
        rows = new * shape.num_seqs

        def make() -> tuple[Any, Any]:
            table = np.random.default_rng(0).permutation(spec.num_blocks).reshape(shape.num_seqs, blocks)
            metadata = make_metadata([new] * shape.num_seqs, [shape.length] * shape.num_seqs, table, block_size=BLOCK)
            return normal(0, rows, HEADS, HEAD_SIZE), (_random_cache(spec), metadata)

        def attend(query: Any, operands: Any) -> Any:
            cache, metadata = operands
            return paged_attention(query, cache, metadata, implementation=implementation)

        pairs = shape.num_seqs * shape.length * (shape.length + 1) // 2
        flops = 0 if shape.kind == "decode" else 4 * HEADS * HEAD_SIZE * pairs
        return Work(attend, make, kv_bytes + 2 * rows * HEADS * HEAD_SIZE * 2, flops)

    def make_writes() -> tuple[Any, Any]:
        slots = jnp.asarray(np.random.default_rng(0).permutation(spec.num_slots)[:tokens], jnp.int32)
        new = [normal(i, tokens, heads, HEAD_SIZE) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
        table = jnp.ones((tokens, HEAD_SIZE), jnp.bfloat16)
        return init_cache(spec), (new, slots, jnp.arange(tokens, dtype=jnp.int32), table)

    def write(cache: Any, operands: Any) -> Any:
        (query, key, value), slots, positions, table = operands
        if shape.kind == "write":
            return update_cache(cache, key, value, slots, implementation=implementation)
        done = rope_and_update_cache(query, key, value, positions, table, cache, slots, implementation=implementation)
        return jax.lax.optimization_barrier(done)[2]  # the rotated query is not left out

    moved = 2 * kv_bytes if shape.kind == "write" else 3 * kv_bytes + 2 * tokens * HEADS * HEAD_SIZE * 2
    return Work(write, make_writes, moved)


# --- kernels ------------------------------------------------------------------------------------------------------------------------------


def programs(shape: Shape, target: Target) -> list[Any]:
    """The Triton programs of a shape on a target, which need not be this machine."""
    found: list[Any] = []

    def interceptor(operation: str, call: Any, asked: str | None) -> str:
        planned = dispatch.plan_with("triton", operation, call, target, explicit=True)
        if isinstance(planned, dispatch.Unsupported):
            raise UnsupportedError("; ".join(planned.reasons))
        found.append(planned.program)
        return "xla"

    work = work_of(shape, target, "triton")
    state, operands = jax.eval_shape(work.make)
    with assuming_target(target), dispatch.intercept(interceptor):
        jax.eval_shape(work.step, state, operands)
    return [program for program in found if program is not None]


def kernels(target: Target, begin: Callable[[str], None]) -> Iterator[Row]:
    """Resources and code hash of each kernel of `GPU_SHAPES`, by this machine's Triton for the target.

    On a GPU `launched` is the hash of what the bridge's own launcher compiled for the device, and `same` whether that is what the compiler
    gives without a device, as the project's checks compile it.
    """
    for shape in GPU_SHAPES:
        begin(shape.name)
        try:
            wanted = programs(shape, target)
        except UnsupportedError as error:
            yield {"shape": shape.name, "arch": target.arch, "refused": str(error)}
            continue
        for program in wanted:
            jobs = compile_check.jobs_of(program, target.arch)
            launched = _launched(program, target) if target.platform != "cpu" and jax.default_backend() != "cpu" else None
            for place, usage in enumerate(compile_check.compile_for(jobs)):
                row = {"shape": shape.name, **asdict(usage)}
                if launched is not None:
                    row |= {"launched": launched[place], "same": launched[place] == usage.code_hash}
                yield row


def _launched(program: Any, target: Target) -> list[str] | None:
    """Hash of each launch's instructions as the launcher compiles it on the first GPU; None where torch is not there to launch it."""
    if importlib.util.find_spec("torch") is None:
        return None
    device, aligned = jax.local_devices()[0].local_hardware_id, (True,) * len(launcher.buffer_names(program))
    launches = [launch for launch in program.launches if 0 not in launch.grid]
    return [
        compile_check.read_usage(compiled.binary, kernel=launch.kernel, arch=target.arch, num_warps=launch.num_warps).code_hash
        for launch, compiled in zip(launches, launcher.compiled(program, device, aligned), strict=True)
    ]


# --- speeds -------------------------------------------------------------------------------------------------------------------------------


def copy_bandwidth(target: Target) -> Row:
    """Bytes a second that XLA's copy reads and writes."""
    elements = (1 << 25) if target.platform == "cpu" else (1 << 28)
    timed = time_steps(lambda x, _: x + 1, jnp.zeros(elements, jnp.float32), (), chain=1 if target.platform == "cpu" else 4)
    return {"shape": "copy", "us": timed.median * 1e6, "bytes_per_s": 2 * 4 * elements / timed.median}


def speeds(target: Target, begin: Callable[[str], None], implementations: Sequence[str]) -> Iterator[Row]:
    """Copy bandwidth, then time of each shape through each implementation that serves it."""
    begin("copy")
    copy = copy_bandwidth(target)
    yield copy
    chain = 1 if target.platform == "cpu" else 8
    for shape in shapes(target):
        for implementation in implementations:
            begin(f"{shape.name}, {implementation}")
            work = work_of(shape, target, implementation)
            row: Row = {"shape": shape.name, "implementation": implementation}
            try:
                timed = time_steps(work.step, *work.make(), chain=chain)
            except UnsupportedError as error:
                yield {**row, "refused": str(error)}
            except Exception as error:
                yield {**row, "failed": f"{type(error).__name__}: {str(error)[:400]}"}
            else:
                rate = work.nbytes / timed.median
                bound = {"flops_per_s": work.flops / timed.median} if work.flops else {"of_copy": rate / copy["bytes_per_s"]}
                yield {
                    **row,
                    "us": timed.median * 1e6,
                    "us_best": timed.best * 1e6,
                    "us_worst": timed.worst * 1e6,
                    "compile_s": timed.compile_s,
                    "bytes_per_s": rate,
                    **bound,
                }
