"""Triton's own HIP driver and launcher over a stub runtime: `python launched_kernels.py COMMAND ARCH FOLDER_OF_AMDEMU NAME...`.

It runs in a process of its own, with TRITON_LIBHIP_PATH and FAKE_HIP_DEVICE as `fake_hip.runtime` has them. Programs go through the body of
the bridge's callback while the stub's stream is being captured, as XLA calls it. The first line that it prints has Triton's version, and
every command prints one line of JSON for each name, the name and what was wrong or null:

- launch: plans of `benchmarks.amd_isa.VARIANTS`; what the runtime got is compared with the plan.
- execute: cases of `amd_emulation`; the captured launches are also executed by the emulator, and the case compares with the oracle.
- spoil: each of `SPOILED`, of which every one must be noticed; null says that it was not.
"""

import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import amd_emulation
import ml_dtypes
from fake_hip.check import check_launches, check_recording
from fake_hip.runtime import DeviceBuffer, RecordedLaunch, Runtime, torch_with_hip

from benchmarks.amd_isa import VARIANTS, writer
from purepage.bridges import callback
from purepage.bridges.launcher import buffer_names
from purepage.functional.attention import paged_attention_call
from purepage.kernels.archs.configs import DecodeConfig, PrefillConfig
from purepage.kernels.launch import Launch, Program
from purepage.testing import assert_close, random_batch

STREAM, OTHER_STREAM = 0x5EED0100, 0x5EED0200
COPIED = {"tiled": PrefillConfig(16, 16, 1, 1, page_copy_from=1), "split": DecodeConfig(16, 1, 1, 2, max_block_m=16)}
"""No table of an AMD architecture copies pages; these sizes do."""


class Machine:
    """The stub's device, and the files of every kernel that Triton loaded onto it."""

    def __init__(self, arch: str) -> None:
        from triton import knobs

        self.arch, self.runtime = arch, Runtime()
        self._files: dict[int, dict[str, Path]] = {}
        knobs.runtime.kernel_load_end_hook.add(self._loaded)

    def _loaded(self, module: int, function: int, name: str, files: Mapping[str, str], hash: str) -> None:
        self._files[function] = {path.suffix: path for path in map(Path, files.values())}

    def files_of(self, launch: RecordedLaunch) -> Mapping[str, Path]:
        """Triton's files of the kernel that was launched, by suffix."""
        files = self._files[launch.function]
        assert files[".hsaco"].read_bytes() == launch.image, f"{launch.kernel}: another code object was loaded than was compiled"
        return files

    def addresses_of(self, program: Program, *, misaligned: int = 0) -> dict[str, int]:
        """An address for each buffer, so far apart that no buffer reaches the next."""
        return {name: (place + 1 << 40) + 256 * place + misaligned for place, name in enumerate(buffer_names(program))}

    def record(self, program: Program, addresses: Mapping[str, int], *, stream: int = STREAM) -> None:
        """Runs the program as XLA does when it records a command buffer, after the bridge prepared it where the call was traced."""
        callback._prepare(program, "rocm")
        self.runtime.clear()
        buffers = {name: DeviceBuffer(address) for name, address in addresses.items()}
        results = [*(name for name, _ in program.outputs), *program.updates, *(name for name, _ in program.scratch)]
        body = callback._ProgramBody(program)
        with self.runtime.capture(STREAM):
            body(SimpleNamespace(stream=stream), [buffers[name] for name in results], *(buffers[name] for name, _ in program.inputs))

    def check(self, program: Program, addresses: Mapping[str, int]) -> None:
        """Compares what was recorded last with the program that should have been."""
        check_recording(self.runtime.calls)
        compiled = [json.loads(self.files_of(launch)[".json"].read_text()) for launch in self.runtime.launches]
        lds = [metadata["shared"] for metadata in compiled]
        check_launches(program, self.runtime.launches, arch=self.arch, stream=STREAM, addresses=addresses, lds=lds)

    def launch(self, program: Program) -> dict[str, int]:
        """Records the program and checks it; returns the addresses of its buffers."""
        addresses = self.addresses_of(program)
        self.record(program, addresses)
        self.check(program, addresses)
        return addresses

    def launch_and_execute(self, program: Program, memory: Mapping[str, Any], arch: str) -> None:
        """As `amd_emulation.execute`: the captured launches run on `memory`, which stands for the buffers at the captured addresses."""
        at = {address: memory[name] for name, address in self.launch(program).items()}
        for launch in list(self.runtime.launches):
            amd_emulation.execute_assembly(
                self.files_of(launch)[".amdgcn"].read_text(),
                launch.grid,
                list(_values(launch, at)),
                num_warps=launch.block[0] // launch.metadata.wave_size,
                lds_bytes=launch.lds_bytes,
            )


def _values(launch: RecordedLaunch, at: Mapping[int, Any]) -> Iterator[Any]:
    """The packed arguments: the memory for which an address stands, and the bits of a number."""
    for argument in launch.metadata.arguments:
        if not argument.is_hidden:
            bits = int.from_bytes(launch.kernarg[argument.offset : argument.offset + argument.size], "little")
            yield at[bits] if argument.kind == "global_buffer" and bits else bits


def copy_of_pages(arch: str) -> None:
    """The page copy, then prefill over it."""
    batch = random_batch(
        31, kind="prefill", head_size=64, dtype=ml_dtypes.bfloat16, cache_dtype=amd_emulation.foreign_fp8(arch), **amd_emulation.SMALL
    )
    call = paged_attention_call(batch.query, batch.cache(content="xpacked"), batch.metadata, layer=1, q_scale=batch.q_scale)
    out = amd_emulation.emulate("paged_attention", call, arch, **COPIED)
    assert_close(out["out"], batch.reference(layer=1)[0], dtype=ml_dtypes.bfloat16)


CASES = {**amd_emulation.CASES, "copy of pages": copy_of_pages}


def _with(program: Program, change: Any) -> Program:
    """The program with its first launch changed."""
    first, *others = program.launches
    return replace(program, launches=(change(first), *others))


def _swapped(launch: Launch) -> Launch:
    names = {"k_scale": "v_scale", "v_scale": "k_scale"}
    assert set(names) <= set(launch.args)
    return replace(launch, args=tuple(names.get(arg, arg) if isinstance(arg, str) else arg for arg in launch.args))


def _larger_number(launch: Launch) -> Launch:
    place = next(place for place, arg in enumerate(launch.args) if type(arg) is int and arg > 1)
    return replace(launch, args=(*launch.args[:place], launch.args[place] + 16, *launch.args[place + 1 :]))


SPOILED = {
    "grid": {"change": lambda launch: replace(launch, grid=(launch.grid[0], launch.grid[1] + 1, launch.grid[2]))},
    "swapped buffers": {"change": _swapped},
    "number": {"change": _larger_number},
    "waves": {"change": lambda launch: replace(launch, num_warps=2 * launch.num_warps)},
    "stream": {"stream": OTHER_STREAM},
    "module load": {"misaligned": 4},
    "allocation": {"during": ("hipMalloc", None, 16)},
    "wait": {"during": ("hipDeviceSynchronize",)},
    "LDS": {"got": lambda found: replace(found, lds_bytes=found.lds_bytes + 16)},
    "cooperative": {"got": lambda found: replace(found, cooperative=True)},
    "scratch memory": {"got": lambda found: replace(found, kernarg=found.kernarg[:-8] + bytes([1] * 8))},
}
"""What differs from the plan, by name: a change of the first launch, the stream, buffers for which nothing was compiled, a call during the
recording, a change of what the runtime got."""


def spoil(machine: Machine, name: str) -> None:
    """Launches a program other than planned, and compares it with the plan."""
    planned = writer(128, "native")(machine.arch)
    difference = dict(SPOILED[name])
    program = _with(planned, difference.get("change", lambda launch: launch))
    addresses = machine.addresses_of(planned, misaligned=difference.get("misaligned", 0))
    if "during" in difference:
        function, *arguments = difference["during"]
        machine.record(program, addresses)
        with machine.runtime.capture(STREAM):
            assert machine.runtime.call(function, *arguments) == 900, "the stub allows the call during a capture"
    else:
        try:
            machine.record(program, addresses, stream=difference.get("stream", STREAM))
        except RuntimeError as error:  # the runtime's refusal; the log of calls has to say as much
            print(error, file=sys.stderr)
    if "got" in difference:
        machine.runtime.launches[0] = difference["got"](machine.runtime.launches[0])
    machine.check(planned, addresses)


def main(command: str, arch: str, folder: str, *names: str) -> None:
    import triton

    if command == "execute":
        amd_emulation.use_emulator(folder)
    print(json.dumps(["triton", triton.__version__]), flush=True)
    with torch_with_hip():
        machine = Machine(arch)
        amd_emulation.execute = machine.launch_and_execute
        for name in names or {"launch": VARIANTS, "execute": CASES, "spoil": SPOILED}[command]:
            try:
                if command == "launch":
                    machine.launch(VARIANTS[name](arch))
                elif command == "execute":
                    CASES[name](arch)
                else:
                    spoil(machine, name)
            except AssertionError as error:
                wrong = str(error) if command == "spoil" else traceback.format_exc(limit=-6)[-3000:]
            except Exception:
                wrong = traceback.format_exc(limit=-6)[-3000:]
            else:
                wrong = None
            print(json.dumps([name, wrong]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
