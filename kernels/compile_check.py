"""Compiles the launches of a program for an AMD architecture without a GPU, and reads what each kernel needs off the assembly.

Each kernel is compiled by a child process: an abort inside LLVM then costs one result and not the caller, and the caller may itself have
been started with TRITON_INTERPRET=1, under which Triton compiles nothing. Results are kept on disk.
"""

import base64
import hashlib
import importlib.metadata
import json
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import ml_dtypes  # noqa: F401  # names bfloat16 and the fp8 kinds to NumPy
import numpy as np

from .archs import arch_facts
from .launch import Buffer, Launch, Program, without_descriptors

POINTERS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16"}
RECORD = 2
"""Counts up when `ResourceUsage`, or how it is read, changes: results on disk are then made again."""
SIMDS = 4
"""Of a compute unit (CDNA) or a workgroup processor (RDNA), which is what a workgroup's LDS belongs to."""


@dataclass(frozen=True)
class ResourceUsage:
    """What one compiled kernel needs of one architecture.

    Attributes:
      kernel, arch: name of the `@triton.jit` function; architecture as `purepage.kernels.archs` names it.
      num_warps: waves of a workgroup.
      vgprs: registers of a lane, AGPRs included; agprs: those of them that only gfx9's matrix unit and copies can use.
      sgprs: scalar registers of a wave.
      vgpr_spills, sgpr_spills: registers that did not fit. SGPRs spill into lanes of a VGPR first: where `scratch_bytes` is 0, none
        reached memory.
      scratch_bytes: private memory of a lane.
      lds_bytes: shared memory of a workgroup.
      waves_per_simd: waves that the registers and the LDS leave room for on one SIMD.
      matrix_ops: matrix instructions in the text of the kernel.
      loads: number of loads from global memory in the text, by width in bits.
      error: why there is no kernel, or None.
    """

    kernel: str
    arch: str
    num_warps: int
    vgprs: int = 0
    agprs: int = 0
    sgprs: int = 0
    vgpr_spills: int = 0
    sgpr_spills: int = 0
    scratch_bytes: int = 0
    lds_bytes: int = 0
    waves_per_simd: int = 0
    matrix_ops: int = 0
    loads: tuple[tuple[int, int], ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Job:
    """One launch, the buffers that it names, and the architecture to compile it for."""

    launch: Launch
    buffers: tuple[tuple[str, Buffer], ...]
    arch: str


def jobs_of(program: Program, arch: str) -> tuple[Job, ...]:
    """One job for each launch of the program; AMD's compiler reads through pointers where a launch has descriptors."""
    buffers = dict((*program.inputs, *program.outputs, *program.scratch))
    return tuple(
        Job(launch, tuple((arg, buffers[arg]) for arg in dict.fromkeys(launch.args) if isinstance(arg, str)), arch)
        for launch in map(without_descriptors, program.launches)
    )


def compile_for(jobs: Sequence[Job], *, cache_dir: Path | None = None, processes: int = 1) -> list[ResourceUsage]:
    """Compiles launches for their architectures; one result for each, in order. A kernel that does not compile has an `error`.

    Args:
      jobs: see `jobs_of`; equal jobs are compiled once.
      cache_dir: where results are kept between runs, by a hash of the kernels' source, the job and Triton's version; None keeps none.
      processes: compilers at a time, each with some 300 MB.
    """
    keys = {job: _key(job) for job in dict.fromkeys(jobs)}
    found: dict[Job, ResourceUsage] = {}
    for job, key in keys.items():
        stored = _stored(cache_dir, key)
        if stored is not None:
            found[job] = stored
    waiting: SimpleQueue[Job] = SimpleQueue()
    missing = [job for job in keys if job not in found]
    for job in missing:
        waiting.put(job)

    def work(_: int) -> None:
        with _Compiler() as compiler:
            while True:
                try:
                    job = waiting.get_nowait()
                except Empty:
                    return
                found[job] = compiler(job)
                if cache_dir is not None and found[job].error is None:
                    _store(cache_dir, keys[job], found[job])

    count = min(processes, len(missing))
    if count == 1:
        work(0)
    elif count:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(work, range(count)))
    return [found[job] for job in jobs]


def _key(job: Job) -> str:
    """Hash of everything that the result depends on. Of a buffer only the dtype counts, and whether 31 bits reach its end."""
    source = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "triton").glob("*.py")):
        if not path.stem.endswith("_plan"):
            source.update(path.read_bytes())
    buffers = [(name, buffer.dtype, _nbytes(buffer) < 2**31) for name, buffer in job.buffers]
    numbers = [arg if not isinstance(arg, int) or arg is True or arg is False else (arg == 1, arg % 16 == 0, arg.bit_length() > 31)
               for arg in job.launch.args]  # fmt: skip
    launch = (job.launch.kernel, numbers, job.launch.constants, job.launch.num_warps, job.launch.num_stages, job.launch.options)
    text = repr((RECORD, source.hexdigest(), importlib.metadata.version("triton"), job.arch, launch, buffers))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _stored(cache_dir: Path | None, key: str) -> ResourceUsage | None:
    path = None if cache_dir is None else cache_dir / f"{key}.json"
    if path is None or not path.exists():
        return None
    fields = json.loads(path.read_text())
    return ResourceUsage(**{**fields, "loads": tuple(map(tuple, fields["loads"]))})


def _store(cache_dir: Path, key: str, needs: ResourceUsage) -> None:
    cache_dir.mkdir(parents=True, exist_ok=True)
    partial = cache_dir / f"{key}.{os.getpid()}"
    partial.write_text(json.dumps(asdict(needs)))
    partial.replace(cache_dir / f"{key}.json")


class _Compiler:
    """A child process that compiles one job after another; another one takes its place where it dies."""

    def __init__(self) -> None:
        self._child: subprocess.Popen | None = None

    def __enter__(self) -> "_Compiler":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._child is not None:
            self._child.communicate()

    def __call__(self, job: Job) -> ResourceUsage:
        child = self._child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(base64.b64encode(pickle.dumps(job)) + b"\n")
        child.stdin.flush()
        line = child.stdout.readline()
        if line:
            fields = json.loads(line)
            return ResourceUsage(**{**fields, "loads": tuple(map(tuple, fields["loads"]))})
        self._child = None
        return _failed(job, f"the compiler died with status {child.wait()}")

    def _start(self) -> subprocess.Popen:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        )


def _failed(job: Job, why: str) -> ResourceUsage:
    return ResourceUsage(job.launch.kernel.partition(":")[2], job.arch, job.launch.num_warps, error=why)


def _nbytes(buffer: Buffer) -> int:
    return math.prod(buffer.shape) * np.dtype(buffer.dtype).itemsize


def compile_job(job: Job) -> Any:
    """Triton's compiled kernel, typed and specialised as a launch with aligned buffers is. Only where TRITON_INTERPRET is not set."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .triton.run import compile_options, kernel_of

    kernel, buffers, constants = kernel_of(job.launch), dict(job.buffers), dict(job.launch.constants)
    given = iter(job.launch.args)
    signature, constexprs, attrs = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = constants[parameter.name] if parameter.is_constexpr else next(given)
        kind = "constexpr" if parameter.is_constexpr else _type_of(value, buffers)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constexprs[(place,)] = value
        elif isinstance(value, str):
            small = [["tt.pointer_range", 32]] if _nbytes(buffers[value]) < 2**31 else []
            attrs[(place,)] = [["tt.divisibility", 16], *small]
        elif isinstance(value, int) and value % 16 == 0:
            attrs[(place,)] = [["tt.divisibility", 16]]
    target = GPUTarget("hip", job.arch, arch_facts(job.arch).wave_size)
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs),
        target=target,
        options={**compile_options(job.launch, target), "num_warps": job.launch.num_warps, "num_stages": job.launch.num_stages},
    )


def _type_of(value: Any, buffers: dict[str, Buffer]) -> str:
    """Triton's type of an argument; what a launch makes part of the kernel is "constexpr"."""
    if isinstance(value, str):
        dtype = buffers[value].dtype
        return "*" + POINTERS["uint8" if dtype.startswith("float8") else dtype]
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


LOADS = {
    128: "dwordx4|b128",
    96: "dwordx3|b96",
    64: "dwordx2|b64",
    32: "dword|b32",
    16: r"[us]short|[ui]16|short_d16\w*|d16_(?:hi_)?b16",
    8: r"[us]byte\w*|[ui]8|d16_(?:hi_)?[ui]8",
}
"""What ends a load's mnemonic, by its width in bits: gfx9's names and those since gfx11."""


def usage_of(job: Job) -> ResourceUsage:
    """Compiles here and now; see `compile_job`."""
    return read_usage(compile_job(job), kernel=job.launch.kernel.partition(":")[2], arch=job.arch, num_warps=job.launch.num_warps)


def read_usage(compiled: Any, *, kernel: str, arch: str, num_warps: int) -> ResourceUsage:
    """What Triton's compiled kernel, whoever's it is, needs of the architecture that it was compiled for."""
    text, facts, lds = compiled.asm["amdgcn"], arch_facts(arch), compiled.metadata.shared

    def entry(name: str) -> int:
        return int((re.findall(rf"\.{name}:\s+(\d+)", text) or [0])[0])

    waves = int(re.findall(r";\s*Occupancy:\s*(\d+)", text)[0])
    if lds:
        waves = min(waves, max(1, facts.shared_bytes // lds * num_warps // SIMDS))
    loads = (
        (bits, len(re.findall(rf"\b(?:global|buffer|flat)_load_(?:lds_|async_to_lds_|tr_)?(?:{names})\b", text)))
        for bits, names in LOADS.items()
    )
    return ResourceUsage(
        kernel=kernel,
        arch=arch,
        num_warps=num_warps,
        vgprs=entry("vgpr_count"),
        agprs=entry("agpr_count"),
        sgprs=entry("sgpr_count"),
        vgpr_spills=entry("vgpr_spill_count"),
        sgpr_spills=entry("sgpr_spill_count"),
        scratch_bytes=entry("private_segment_fixed_size"),
        lds_bytes=lds,
        waves_per_simd=waves,
        matrix_ops=len(re.findall(r"\bv_(?:mfma|wmma|swmmac)_\w+", text)),
        loads=tuple((bits, count) for bits, count in loads if count),
    )


def _serve(lines: Iterable[bytes]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints is no answer
    for line in lines:
        job = pickle.loads(base64.b64decode(line))
        try:
            needs = usage_of(job)
        except Exception as error:
            needs = _failed(job, f"{type(error).__name__}: {error}"[:500])
        print(json.dumps(asdict(needs)), file=answers, flush=True)


if __name__ == "__main__":
    from purepage.kernels import compile_check as verify  # pickled jobs name the imported module's class

    verify._serve(sys.stdin.buffer)
