"""Compiles the launches of a program without a GPU, and reads off the assembly which resources each kernel uses.

Each kernel is compiled by a child process, for two reasons. An abort inside LLVM then costs one result and not the caller. And Triton
compiles nothing in a process that was started with TRITON_INTERPRET=1, as the caller may be. Results are kept on disk.
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
from .launch import Buffer, Descriptor, Launch, Program, without_descriptors

POINTERS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16"}
RECORD = 3
"""Version of `ResourceUsage` and of how it is read. Results on disk of another version are not used."""
SIMDS = 4
"""SIMDs of a compute unit (CDNA) or a workgroup processor (RDNA), which a workgroup and its LDS occupy."""


@dataclass(frozen=True)
class ResourceUsage:
    """Resources that one compiled kernel uses on one architecture. For NVIDIA only the code's hash and the shared memory are read.

    Attributes:
      kernel, arch: name of the `@triton.jit` function; architecture as `purepage.kernels.archs` names it.
      num_warps: waves of a workgroup.
      vgprs: registers of a lane, AGPRs included.
      agprs: registers among them that only gfx9's matrix unit and copies can use.
      sgprs: scalar registers of a wave.
      vgpr_spills, sgpr_spills: spilled registers. SGPRs spill into lanes of a VGPR first: with `scratch_bytes` 0 none reached memory.
      scratch_bytes: private memory of a lane.
      lds_bytes: shared memory of a workgroup.
      waves_per_simd: waves that fit on one SIMD with these registers and this LDS.
      matrix_ops: matrix instructions in the assembly.
      loads: number of loads from global memory in the assembly, by width in bits.
      code_hash: hash of the instructions, without names, comments and debug information.
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
    code_hash: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Job:
    """One launch, the buffers that it names, and the architecture for which it is compiled."""

    launch: Launch
    buffers: tuple[tuple[str, Buffer], ...]
    arch: str


def jobs_of(program: Program, arch: str) -> tuple[Job, ...]:
    """One job for each launch of the program. For AMD its descriptors are dropped, so that the kernels read through pointers."""
    launches = map(without_descriptors, program.launches) if arch_facts(arch).vendor == "amd" else program.launches
    buffers = dict((*program.inputs, *program.outputs, *program.scratch))
    return tuple(
        Job(launch, tuple((arg, buffers[arg]) for arg in dict.fromkeys(launch.args) if isinstance(arg, str)), arch) for launch in launches
    )


def compile_for(jobs: Sequence[Job], *, cache_dir: Path | None = None, processes: int = 1) -> list[ResourceUsage]:
    """Compiles launches for their architectures.

    Args:
      jobs: see `jobs_of`; equal jobs are compiled once.
      cache_dir: folder that keeps results between runs, by a hash of the kernels' source, the job and Triton's version; None keeps none.
      processes: compilers that run at the same time, each with some 300 MB.

    Returns:
      One result for each job, in order. A kernel that does not compile has an `error`.
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
    """Hash of everything that the result depends on. Of a buffer that is its dtype, and whether 31-bit offsets reach its end."""
    source = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "triton").glob("*.py")):
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


def _store(cache_dir: Path, key: str, usage: ResourceUsage) -> None:
    cache_dir.mkdir(parents=True, exist_ok=True)
    partial = cache_dir / f"{key}.{os.getpid()}"
    partial.write_text(json.dumps(asdict(usage)))
    partial.replace(cache_dir / f"{key}.json")


class _Compiler:
    """A child process that compiles one job after another, and is replaced when it dies."""

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
    return ResourceUsage(job.launch.name, job.arch, job.launch.num_warps, error=why)


def _nbytes(buffer: Buffer) -> int:
    return math.prod(buffer.shape) * np.dtype(buffer.dtype).itemsize


def compile_job(job: Job) -> Any:
    """Triton's compiled kernel, with the types and specialisations of a launch with aligned buffers.

    It compiles in this process, which must have been started without TRITON_INTERPRET.
    """
    import triton
    from triton.compiler import ASTSource

    from .triton.run import compile_options, kernel_of

    kernel, buffers, constants = kernel_of(job.launch), dict(job.buffers), dict(job.launch.constants)
    given = iter(job.launch.args)
    signature, constexprs, attrs = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = constants[parameter.name] if parameter.is_constexpr else next(given)
        kind = "constexpr" if parameter.is_constexpr else type_of(value, buffers)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constexprs[(place,)] = value
        elif isinstance(value, str):
            small = [["tt.pointer_range", 32]] if _nbytes(buffers[value]) < 2**31 else []
            attrs[(place,)] = [["tt.divisibility", 16], *small]
        elif isinstance(value, int) and value % 16 == 0:
            attrs[(place,)] = [["tt.divisibility", 16]]
    target = _target_of(job.arch)
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs),
        target=target,
        options={**compile_options(job.launch, target), "num_warps": job.launch.num_warps, "num_stages": job.launch.num_stages},
    )


def _target_of(arch: str) -> Any:
    """Triton's `GPUTarget` of an architecture."""
    from triton.backends.compiler import GPUTarget

    facts = arch_facts(arch)
    if facts.vendor == "nvidia":
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), facts.wave_size)
    return GPUTarget("hip", arch, facts.wave_size)


def type_of(value: Any, buffers: dict[str, Buffer]) -> str:
    """Triton's type of an argument. A value that a launch compiles into the kernel is "constexpr"."""
    if isinstance(value, Descriptor):
        return f"tensordesc<{POINTERS[value.dtype]}[{value.block[0]}, {value.block[1]}]>"
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
"""Ends of a load's mnemonic by its width in bits, for gfx9 and from gfx11 on."""


def usage_of(job: Job) -> ResourceUsage:
    """Compiles in this process; see `compile_job`."""
    return read_usage(compile_job(job), kernel=job.launch.name, arch=job.arch, num_warps=job.launch.num_warps)


def read_usage(compiled: Any, *, kernel: str, arch: str, num_warps: int) -> ResourceUsage:
    """Resources of any kernel that Triton compiled for `arch`, ours or not."""
    facts, lds = arch_facts(arch), compiled.metadata.shared
    if facts.vendor == "nvidia":
        return ResourceUsage(kernel, arch, num_warps, lds_bytes=lds, code_hash=hash_of_code(_ptx_code(compiled.asm["ptx"])))
    text = compiled.asm["amdgcn"]

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
        code_hash=hash_of_code(_amd_code(text)),
    )


def hash_of_code(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _amd_code(text: str) -> str:
    """The instructions of a kernel's AMD assembly, one a line, without what changes when source lines move."""
    start = text.find("\n", text.find("; -- Begin function"))
    end = text.find(".section", start)
    code = text[start : text.rfind("s_endpgm", start, end if end > 0 else None)]
    code = re.sub(r"(?m)^\s*\.?(loc|file|section|ident|globl|p2align|type|cfi\w*|amdgcn\w*|set|size).*$", "", code)
    code = re.sub(r";.*", "", code)
    code = re.sub(r"\.L(tmp|func_\w+|pcsec\w*)\d*", ".L", code)
    return "\n".join(line for line in code.splitlines() if line.strip() and not re.match(r"\s*\w+:\s*$|\.L:", line))


def _ptx_code(text: str) -> str:
    """The instructions of a kernel's PTX, one a line, without what changes when source lines move."""
    code = re.sub(r"(?ms)\.section\s+\.debug.*", "", re.sub(r"//.*", "", text))
    code = re.sub(r"(?m)^\s*\.(loc|file).*$|^\$L__(tmp\d+|func_\w+):.*$", "", code)
    kernel = re.search(r"\.entry (\w+)\(", code)
    if kernel is not None:
        code = code.replace(kernel[1], "K")
    return "\n".join(line for line in code.splitlines() if line.strip())


def _serve(lines: Iterable[bytes]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints must not be taken for an answer
    for line in lines:
        job = pickle.loads(base64.b64decode(line))
        try:
            usage = usage_of(job)
        except Exception as error:
            usage = _failed(job, f"{type(error).__name__}: {error}"[:500])
        print(json.dumps(asdict(usage)), file=answers, flush=True)


if __name__ == "__main__":
    from purepage.kernels import compile_check  # pickled jobs name the class of the imported module

    compile_check._serve(sys.stdin.buffer)
