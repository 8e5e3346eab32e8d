"""What moves between devices, read off a compiled program's text."""

import math
import re
from dataclasses import dataclass

import jax.numpy as jnp

from .errors import bad_type

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(rf"= (?P<type>\(?[a-z].*?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_LISTED, _IOTA = re.compile(r"replica_groups=\{\{([\d,]*)\}"), re.compile(r"replica_groups=\[\d+,(\d+)\]")
_MESH = re.compile(r"replica_groups=mesh\[(?P<sizes>[^\]]*)\][^{]*\{(?P<axes>[^}]*)\}")
_NAMES = {"pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "f8e5m2": "float8_e5m2"}
_NAMES |= {f"{sign}{bits}": f"{name}{bits}" for sign, name in (("s", "int"), ("u", "uint")) for bits in (4, 8, 16, 32, 64)}


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
      arrays: dtype and shape of what each device gets, as the program's text has them.
      nbytes: bytes of these arrays.
      devices: devices of a group; 0 where the text does not say (a permutation, or all devices).
      in_loop: whether it stands in another computation than the program's entry: the body of a loop runs it many times.
    """

    kind: str
    arrays: tuple[str, ...]
    nbytes: int
    devices: int
    in_loop: bool

    @property
    def largest_operand(self) -> int:
        """Bytes of what a device gives, at most."""
        if self.kind == "all-gather":
            return self.nbytes // max(self.devices, 1)
        return self.nbytes * max(self.devices, 1) if self.kind == "reduce-scatter" else self.nbytes

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a ring: all that is left of the operands after its own part, twice for an all-reduce."""
        count = max(self.devices, 1)
        if self.kind == "collective-permute":
            return float(self.nbytes)
        if self.kind == "reduce-scatter":
            return float(self.nbytes * (count - 1))
        return self.nbytes * (count - 1) / count * (2 if self.kind == "all-reduce" else 1)


def collectives(text: str) -> list[Collective]:
    """The collectives of a program, in the order of its text.

    Args:
      text: HLO after partitioning, of `jax.jit(f).lower(...).compile().as_text()`.

    Returns:
      A `Collective` for each; one in a loop counts once, and one that starts and ends apart is one.

    Raises:
      TypeError: `text` is no string.
    """
    if not isinstance(text, str):
        bad_type("text", text, "the text of a compiled program, compiled.as_text()")
    found, entry = [], False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            entry = line.startswith("ENTRY")
        match = _LINE.search(line)
        if match is None:
            continue
        arrays = [(name, dims) for name, dims in _ARRAY.findall(match["type"])]
        if match["start"] and match["kind"] in ("all-gather", "collective-permute"):  # operands stand beside the results
            arrays = [each for each in arrays if each != ("u32", "")]
            arrays = arrays[len(arrays) // 2 :]
        names = tuple(f"{name}[{dims}]" for name, dims in arrays)
        found.append(Collective(match["kind"], names, sum(map(_nbytes, arrays)), _devices(line), not entry))
    return found


def _devices(line: str) -> int:
    """Devices of a group, in any of the ways in which HLO writes groups."""
    listed, iota, mesh = _LISTED.search(line), _IOTA.search(line), _MESH.search(line)
    if listed:
        return len(listed[1].split(","))
    if iota:
        return int(iota[1])
    if mesh is None:
        return 0
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh["sizes"])}
    axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh["axes"])  # a part of an axis has a size of its own
    return math.prod(int(part) if part else sizes[name] for name, part in axes)


def _nbytes(array: tuple[str, str]) -> int:
    name, dims = array
    width = 1 if name.startswith("f8") else jnp.dtype(_NAMES[name]).itemsize
    return width * math.prod(int(size) for size in dims.split(",") if size)
