"""Whether what the runtime got is what a `Program` says."""

import struct
from collections.abc import Mapping, Sequence

from purepage.kernels.archs import arch_facts
from purepage.kernels.launch import Arg, Program

from .runtime import LAUNCHES, Call, RecordedLaunch

SCRATCH_POINTERS = 2
"""Triton's kernels have two more arguments: pointers to scratch memory of the compiler's and of a profiler's."""


def check_recording(calls: Sequence[Call]) -> None:
    """A recording consists of launches on the captured stream and of nothing else.

    Raises:
      AssertionError: it has another call of the runtime, or a launch that no graph would hold.
    """
    others = [call.name for call in calls if call.captured and call.name not in LAUNCHES]
    assert not others, f"calls of the runtime during a capture: {', '.join(others)}"
    missed = [call.name for call in calls if not call.captured and call.name in LAUNCHES]
    assert not missed, f"{len(missed)} launches are on a stream that is not captured"


def check_launches(
    program: Program, recorded: Sequence[RecordedLaunch], *, arch: str, stream: int, addresses: Mapping[str, int], lds: Sequence[int]
) -> None:
    """Each launch of the program, as the runtime got it.

    Args:
      program: what should have been launched; its launches without programs are left out.
      addresses: of each buffer of the program.
      lds: bytes of LDS that Triton's compiler gave each recorded kernel.

    Raises:
      AssertionError: the first difference.
    """
    live = [launch for launch in program.launches if 0 not in launch.grid]
    assert len(recorded) == len(live), f"{len(recorded)} launches of {len(live)}"
    facts = arch_facts(arch)
    for launch, found, lds_bytes in zip(live, recorded, lds, strict=True):
        metadata, name = found.metadata, launch.name
        assert found.kernel == name, f"{found.kernel} in place of {name}"
        assert found.grid == launch.grid, f"{name}: grid {found.grid}, not {launch.grid}"
        threads = facts.wave_size * launch.num_warps
        assert found.block == (threads, 1, 1), f"{name}: block {found.block}, not {threads} threads"
        assert (metadata.target, metadata.wave_size, metadata.max_threads) == (arch, facts.wave_size, threads), f"{name}: {metadata}"
        assert found.stream == stream, f"{name}: stream {found.stream:#x}, not {stream:#x}"
        assert not found.cooperative, f"{name} is a cooperative launch"
        assert found.lds_bytes == lds_bytes, f"{name}: {found.lds_bytes} bytes of dynamic LDS, not {lds_bytes}"
        assert found.lds_bytes + metadata.fixed_lds_bytes <= facts.shared_bytes, f"{name}: more LDS than {arch} has"
        _check_segment(name, found)
        _check_arguments(name, launch.args, found, addresses)


def _check_segment(name: str, found: RecordedLaunch) -> None:
    """The arguments lie in the segment one after another, each at a multiple of its size."""
    end = 0
    for argument in found.metadata.arguments:
        assert argument.offset >= end and argument.offset % argument.size == 0, f"{name}: {found.metadata.arguments}"
        end = argument.offset + argument.size
    assert end <= found.metadata.kernarg_bytes, f"{name}: {end} bytes of arguments in a segment of {found.metadata.kernarg_bytes}"


def _check_arguments(name: str, args: Sequence[Arg], found: RecordedLaunch, addresses: Mapping[str, int]) -> None:
    # None, and an integer 1, are part of the compiled code.
    wanted = [arg for arg in args if arg is not None and not (type(arg) is int and arg == 1)]
    explicit = [argument for argument in found.metadata.arguments if not argument.is_hidden]
    assert len(explicit) == len(wanted) + SCRATCH_POINTERS, f"{name}: {len(explicit)} arguments, not {len(wanted)} and scratch memory"
    for place, (arg, argument) in enumerate(zip([*wanted, *[0] * SCRATCH_POINTERS], explicit, strict=True)):
        packed = found.kernarg[argument.offset : argument.offset + argument.size]
        is_pointer = isinstance(arg, str) or place >= len(wanted)
        assert argument.kind == ("global_buffer" if is_pointer else "by_value"), f"{name}: argument {place} is a {argument.kind}"
        if isinstance(arg, float):
            bits = struct.pack("<f", arg)
        else:
            assert isinstance(arg, (str, int)), f"{name}: argument {place} is {arg}"
            value = addresses[arg] if isinstance(arg, str) else int(arg)
            bits = value.to_bytes(argument.size, "little", signed=value < 0)
        assert packed == bits, f"{name}: argument {place} is {packed[::-1].hex()}, not {arg!r}, {bits[::-1].hex()}"
