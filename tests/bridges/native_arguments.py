"""What the native bridge passes to a HIP runtime, for programs compiled for AMD: `python native_arguments.py FOLDER [ARCH:VARIANT ...]`.

FOLDER keeps the stub of a runtime and the handler, both built where they are not there yet. Every launch is compared with the program,
parameter by parameter: the order and sizes are those of the code object, the names those of Triton's intermediate code.
"""

import base64
import ctypes
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.amd_isa import VARIANTS
from purepage.bridges import launcher
from purepage.bridges.native import library
from purepage.bridges.native.program import packed
from purepage.kernels.archs import arch_facts
from purepage.kernels.compile_check import compile_job, jobs_of

HERE = Path(__file__).parent
STREAM = 0x1234ABCD
HOOK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))


def build_stub(folder: Path, name: str = "libamdhip64.so.7") -> Path:
    """The stub as a library of that name."""
    target = folder / name
    if not target.exists():
        command = [library.compiler() or "g++", "-x", "c", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(HERE / "stub_hip.c")]
        subprocess.run([*command, "-o", str(target)], check=True)
    return target


def build_handler(folder: Path) -> Path:
    target = folder / "native_on_cpu.so"
    if not target.exists():
        include = [option for path in (jax.ffi.include_dir(), str(library.SOURCE.parent)) for option in ("-I", path)]
        command = [library.compiler() or "g++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", *include, str(HERE / "native_on_cpu.cc")]
        subprocess.run([*command, "-o", str(target), "-ldl"], check=True)
    return target


def register(folder: Path) -> None:
    """The handler as the CPU's custom call "native_on_cpu"."""
    handler = ctypes.CDLL(str(build_handler(folder)))
    jax.ffi.register_ffi_target("native_on_cpu", jax.ffi.pycapsule(handler.native_on_cpu), platform="cpu")


def declared(compiled: Any) -> list[tuple[str, int]]:
    """(name, bytes) of each parameter of a code object; Triton's own pointers have no name."""
    text = compiled.asm["amdgcn"]
    arguments = text[text.index(".args:") : text.index(".group_segment_fixed_size:", text.index(".args:"))]
    sizes = [int(size) for size, kind in re.findall(r"\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", arguments) if not kind.startswith("hidden")]
    head = compiled.asm["ttir"].partition("tt.func public @")[2].partition("attributes")[0]
    names = re.findall(r"%(\w+): ", head)
    return list(zip([*names, *[""] * (len(sizes) - len(names))], sizes, strict=True))


def call(program: Any, arch: str) -> tuple[list[Any], list[int]]:
    """Runs the handler on buffers of 64 bytes: (what the runtime was asked to launch, addresses of inputs and of results)."""
    results = len(program.outputs) + len(program.updates) + len(program.scratch)
    inputs = [jnp.asarray(np.full(16, number, np.int32)) for number in range(len(program.inputs))]
    shapes = [jax.ShapeDtypeStruct((16,), jnp.int32)] * results
    outs = jax.jit(lambda *given: jax.ffi.ffi_call("native_on_cpu", shapes)(*given, **packed(program, arch)))(*inputs)
    jax.block_until_ready(outs)
    return outs, [array.unsafe_buffer_pointer() for array in (*inputs, *outs)]


def check(stub: Any, arch: str, variant: str) -> int:
    """Launches of a variant that were compared."""
    program = VARIANTS[variant](arch)
    jobs = [job for job in jobs_of(program, arch) if 0 not in job.launch.grid]
    compiled = [compile_job(job) for job in jobs]
    sizes = [declared(each) for each in compiled]
    seen: list[Any] = []

    def hook(name: bytes, dimensions: Any, stream: int, params: Any) -> None:
        raw = [ctypes.string_at(params[place], size) for place, (_, size) in enumerate(sizes[len(seen)])]
        seen.append((name.decode(), list(dimensions[:7]), stream, raw))

    kept = HOOK(hook)
    stub.stub_set(kept, int.from_bytes(compiled[0].asm["hsaco"][48:52], "little"))
    outs, addresses = call(program, arch)
    stub.stub_set(HOOK(0), 0)
    results = [*(name for name, _ in program.outputs), *program.updates, *(name for name, _ in program.scratch)]
    address = dict(zip([*(name for name, _ in program.inputs), *results], addresses, strict=False))
    assert len(addresses) == len(program.inputs) + len(results) and len(outs) == len(results)
    for name, where in zip(results, addresses[len(program.inputs) :], strict=True):
        address[name] = where  # of an update, the result
    assert len(seen) == len(jobs), (variant, len(seen), len(jobs))
    for job, binary, (name, dimensions, stream, raw), parameters in zip(jobs, compiled, seen, sizes, strict=True):
        launch = job.launch
        kernel = launcher.resolve_kernel(launch.kernel)
        runtime = [parameter for parameter, is_constant in launcher.parameters(kernel) if not is_constant]
        given = dict(zip(runtime, launch.args, strict=True))
        threads = launch.num_warps * arch_facts(arch).wave_size
        assert name == binary.metadata.name and f"{name}:" in binary.asm["amdgcn"]
        assert dimensions == [*launch.grid, threads, 1, 1, binary.metadata.shared], (variant, name, dimensions)
        assert stream == STREAM
        for (parameter, size), value in zip(parameters, raw, strict=True):
            assert value == expected(given[parameter] if parameter else 0, size, address), (variant, name, parameter, size, value)
    return len(jobs)


def call_one(image: bytes, arch: str = "gfx942") -> None:
    """One launch without arguments of a kernel named k in that code object."""
    attributes = {
        "program": "program",
        "arch": arch,
        "digest": np.int64(hash(image)),
        "symbols": "k",
        "modules": base64.b64encode(image).decode(),
        "launches": np.array([1, 1, 1, 64, 0, 0], np.int64),
    }
    call = jax.ffi.ffi_call("native_on_cpu", jax.ShapeDtypeStruct((16,), jnp.int32))
    jax.block_until_ready(jax.jit(lambda: call(**attributes))())


def code_object(flags: int) -> bytes:
    """As much of one as a runtime looks at to see what device it is for."""
    return b"\x7fELF".ljust(48, b"\0") + flags.to_bytes(4, "little") + bytes(12)


def build_plugin(folder: Path, runtime: Path) -> Path:
    """A library with the name of JAX's plugin for ROCm, linked to a runtime."""
    target = folder / "xla_rocm_plugin.so"
    source = folder / "plugin.c"
    source.write_text("extern int hipGetDevice(int*);\nint plugin(int* ordinal) { return hipGetDevice(ordinal); }\n")
    command = [library.compiler() or "g++", "-x", "c", "-shared", "-fPIC", str(source), "-x", "none", str(runtime)]
    subprocess.run([*command, f"-Wl,-rpath,{folder}", "-o", str(target)], check=True)
    return target


def expected(value: Any, size: int, address: dict[str, int]) -> bytes:
    if isinstance(value, str):
        assert size == 8
        return struct.pack("<Q", address[value])
    if isinstance(value, float):
        assert size == 4
        return struct.pack("<f", value)
    return int(value).to_bytes(size, "little", signed=int(value) < 0)


def main(folder: str, cases: Sequence[str]) -> None:
    stub = ctypes.CDLL(str(build_stub(Path(folder))))
    register(Path(folder))
    launches = 0
    for case in cases:
        arch, _, variant = case.partition(":")
        launches += check(stub, arch, variant)
    print(f"{len(cases)} programs, {launches} launches as the code objects declare them")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
