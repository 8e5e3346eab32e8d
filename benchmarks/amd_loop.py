"""The main loop of a compiled AMD kernel: it is found in the assembly, counted by instruction, and timed on paper.

A loop reaches from its label to the last branch back to it. The main loop has matrix instructions and no inner loop with matrix
instructions. Of several such loops it is the one with the fewest instructions, since the others are its copies with masks.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from purepage.kernels.compile_check import LOADS

_LABEL = re.compile(r"^(\.LBB\w+):")
_LINE = re.compile(r"^\s+([a-z]\w+)\s*([^;]*)")
_REGISTER = re.compile(r"\b([va])(?:\[(\d+):(\d+)\]|(\d+))")
_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)_?(\w+)$")
_LOAD = re.compile(r"(?:global|buffer|flat)_load_(?:lds_|async_to_lds_|tr_)?(\w+)$")
_SPACE = re.compile(r"(?:global|buffer|flat|scratch)_(?:load|store|atomic)")
_TRANSCENDENTAL = re.compile(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_")
_WAIT = re.compile(r"(vmcnt|lgkmcnt)\((\d+)\)")


@dataclass(frozen=True)
class Instruction:
    """One line of assembly. With `label` it is a label, and `name` is the label's name."""

    name: str
    operands: str = ""
    label: bool = False


def instructions(text: str) -> list[Instruction]:
    """Labels and instructions of an assembly text in order, without directives and comments."""
    found = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            found.append(Instruction(label[1], label=True))
        elif plain := _LINE.match(line):
            found.append(Instruction(plain[1].removesuffix("_e32").removesuffix("_e64"), plain[2].strip()))
    return found


def loops(code: Sequence[Instruction]) -> list[tuple[int, int]]:
    """(first, last) index of each loop: its label, and the last branch back to it."""
    places = {line.name: place for place, line in enumerate(code) if line.label}
    ends: dict[int, int] = {}
    for place, line in enumerate(code):
        if not line.label and line.name.startswith(("s_cbranch", "s_branch")) and places.get(line.operands, place) < place:
            ends[places[line.operands]] = place
    return sorted(ends.items())


def main_loop(text: str, load_bytes: int = 0) -> list[Instruction]:
    """Labels and instructions of the main loop; empty where no loop has matrix instructions.

    Args:
      text: assembly of the kernel.
      load_bytes: bytes that one lane loads at least in one iteration; loops that load less, over smaller masked tiles, are skipped.
    """
    code = instructions(text)
    found = [(begin, end) for begin, end in loops(code) if any(is_matrix(line) for line in code[begin:end])]
    inner = [(b, e) for b, e in found if not any((b, e) != (c, f) and b <= c and f <= e for c, f in found)]
    bodies = [code[begin : end + 1] for begin, end in inner]
    whole = [body for body in bodies if sum(map(load_bits, body)) // 8 >= load_bytes]
    return min(whole or bodies, key=len, default=[])


def is_matrix(line: Instruction) -> bool:
    return line.name.startswith(("v_mfma_", "v_wmma_", "v_swmmac_"))


def is_vector(line: Instruction) -> bool:
    """Whether it runs on the vector ALU and is no matrix instruction."""
    return line.name.startswith("v_") and not is_matrix(line)


def is_transcendental(line: Instruction) -> bool:
    return bool(_TRANSCENDENTAL.match(line.name))


def load_bits(line: Instruction) -> int:
    """Bits that one lane loads from global memory; 0 for other instructions."""
    kind = _LOAD.match(line.name)
    return 0 if kind is None else next((bits for bits, names in LOADS.items() if re.fullmatch(names, kind[1])), 0)


def lds_bytes(line: Instruction) -> int:
    """Bytes that one lane moves to or from shared memory, or through it in a permutation between lanes; 0 for other instructions."""
    if not line.name.startswith("ds_"):
        return 0
    size = re.search(r"_(?:[bui])(\d+)", line.name)
    pair = 2 if re.match(r"ds_(?:read|write|load|store|load_|store_)2|ds_(?:load|store)_2addr", line.name) else 1
    return pair * int(size[1]) // 8 if size else 4


def is_lds_write(line: Instruction) -> bool:
    return line.name.startswith(("ds_write", "ds_store"))


def matrix_shape(line: Instruction) -> tuple[int, int, int, str]:
    """(M, N, K, dtype of the operands) of a matrix instruction."""
    shape = _SHAPE.search(line.name)
    if shape is None:
        raise ValueError(f"matrix instruction of unknown shape: {line.name}")
    return int(shape[1]), int(shape[2]), int(shape[3]), shape[4]


def matrix_flops(line: Instruction) -> int:
    m, n, k, _ = matrix_shape(line)
    return 2 * m * n * k


def matrix_cycles(line: Instruction) -> int:
    """Cycles for which a matrix instruction occupies the matrix unit of one SIMD on CDNA 3 and 4, with 16-bit, fp8 or float32 operands.

    Sources: AMD's matrix instruction calculator, and the table in "Matrix Core Programming on AMD CDNA3 and CDNA4 architecture" (ROCm
    blogs).
    """
    m, _, k, kind = matrix_shape(line)
    cycles = {16: 16, 32: 32}[m]
    if kind == "f32":
        return 2 * cycles
    return cycles * (2 if k >= 64 and kind == "f8f6f4" else 1)


@dataclass(frozen=True)
class Counts:
    """Instructions of one iteration of a loop, for one wave. A conditional block or an inner loop counts once.

    Attributes:
      matrix: matrix instructions by mnemonic.
      loads: loads from global memory by width in bits.
      vector: other vector instructions.
      transcendental: vector instructions at a fraction of the rate.
      selects: v_cndmask instructions, of masks and of bfloat16 rounding where the architecture does not convert.
      lane_moves: v_readfirstlane instructions.
      lds_read, lds_write: bytes that one lane reads and writes.
      lds_ops: instructions that read or write shared memory.
      scratch: loads and stores of spilled registers.
      barriers: s_barrier instructions.
      inner_loops: loops inside; one around a single load is a waterfall over the values of its address.
      scalar_loads: s_load.
    """

    matrix: tuple[tuple[str, int], ...]
    loads: tuple[tuple[int, int], ...]
    vector: int
    transcendental: int
    selects: int
    lane_moves: int
    lds_read: int
    lds_write: int
    lds_ops: int
    scratch: int
    barriers: int
    inner_loops: int
    scalar_loads: int

    @property
    def load_bytes(self) -> int:
        """Bytes that one lane loads."""
        return sum(bits * count for bits, count in self.loads) // 8

    @property
    def bytes_per_load(self) -> float:
        """Mean bytes that one lane loads in an instruction that loads more than a block id."""
        wide = [(bits, count) for bits, count in self.loads if bits > 32] or list(self.loads)
        return sum(bits * count for bits, count in wide) / 8 / max(1, sum(count for _, count in wide))


def count(body: Sequence[Instruction]) -> Counts:
    lines = [line for line in body if not line.label]

    def number(*starts: str) -> int:
        return sum(line.name.startswith(starts) for line in lines)

    return Counts(
        matrix=tuple(sorted(Counter(line.name for line in lines if is_matrix(line)).items())),
        loads=tuple(sorted(Counter(bits for line in lines if (bits := load_bits(line))).items(), reverse=True)),
        vector=sum(map(is_vector, lines)),
        transcendental=sum(map(is_transcendental, lines)),
        selects=number("v_cndmask"),
        lane_moves=number("v_readfirstlane"),
        lds_read=sum(lds_bytes(line) for line in lines if not is_lds_write(line)),
        lds_write=sum(lds_bytes(line) for line in lines if is_lds_write(line)),
        lds_ops=number("ds_"),
        scratch=number("scratch_"),
        barriers=number("s_barrier"),
        inner_loops=max(0, len(loops(body)) - 1),
        scalar_loads=number("s_load", "s_buffer_load"),
    )


@dataclass(frozen=True)
class Alone:
    """Time of one wave that has its SIMD to itself.

    Attributes:
      cycles: cycles of one iteration in the steady state.
      stalled: cycles among them that wait for global memory.
      in_flight: most bytes of one lane in flight at a time, of loads wider than a block id.
    """

    cycles: int
    stalled: int
    in_flight: int


ISSUE = 4
"""Cycles between two instructions of one wave, and cycles for which a vector instruction of 64 lanes occupies its 16-lane SIMD."""
LDS_LATENCY = 64


def alone(body: Sequence[Instruction], *, wide_latency: int, narrow_latency: int, transcendental: int) -> Alone:
    """Times the loop as one wave runs it, in order. It waits where the assembly waits and for the results of matrix instructions.

    Args:
      body: labels and instructions of the loop.
      wide_latency, narrow_latency: cycles until a load of more than 32 bits, or of at most 32, has its value.
      transcendental: cycles of a transcendental instruction.
    """
    now, stalled, pipe, most = 0, 0, 0, 0
    ready: dict[tuple[str, int], int] = {}
    waiting: dict[str, list[tuple[int, int]]] = {"vmcnt": [], "lgkmcnt": []}
    passes = []
    for _ in range(4):
        begun, stalled_before = now, stalled
        for line in body:
            if line.label or line.name == "s_nop":
                continue
            if line.name == "s_waitcnt":
                for counter, left in _WAIT.findall(line.operands):
                    queue = waiting[counter]
                    while len(queue) > int(left):
                        done, _ = queue.pop(0)
                        stalled += max(0, done - now) if counter == "vmcnt" else 0
                        now = max(now, done)
                continue
            registers = _registers(line.operands)
            now = max([now, *(ready.get(register, 0) for register in registers)]) if is_vector(line) else now
            if is_matrix(line):
                now = max(now, pipe)
                pipe = now + matrix_cycles(line)
                ready.update((register, pipe) for register in _registers(line.operands.partition(",")[0]))
            elif _SPACE.match(line.name):
                bits = load_bits(line)
                latency = wide_latency if bits > 32 else narrow_latency
                waiting["vmcnt"].append((now + latency, bits // 8 if bits > 32 else 0))
                most = max(most, sum(size for _, size in waiting["vmcnt"]))
            elif line.name.startswith(("ds_", "s_load", "s_buffer_load")):
                waiting["lgkmcnt"].append((now + LDS_LATENCY, 0))
            now += transcendental if is_transcendental(line) else ISSUE
        passes.append((now - begun, stalled - stalled_before))
    return Alone(*passes[-1], most)


def _registers(operands: str) -> set[tuple[str, int]]:
    found = set()
    for kind, first, last, single in _REGISTER.findall(operands):
        found.update((kind, number) for number in range(int(first or single), int(last or single) + 1))
    return found
