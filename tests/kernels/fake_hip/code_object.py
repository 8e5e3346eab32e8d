"""What an AMD code object says of its kernels: the metadata note of the ELF file, which a runtime reads before it launches."""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EM_AMDGPU = 224
PT_NOTE = 4
NT_AMDGPU_METADATA = 32


@dataclass(frozen=True)
class Argument:
    """One entry of a kernel's segment of arguments; `kind` is "global_buffer", "by_value" or a hidden one, which the runtime fills in."""

    offset: int
    size: int
    kind: str

    @property
    def is_hidden(self) -> bool:
        return self.kind.startswith("hidden_")


@dataclass(frozen=True)
class KernelMetadata:
    """What a launch has to fit; see "Code Object Metadata" in LLVM's user guide of the AMDGPU backend.

    Attributes:
      target: the architecture.
      arguments: entries of the segment of arguments, in order; a launcher passes those that are not hidden.
      kernarg_bytes: size of that segment.
      fixed_lds_bytes: LDS beside what a launch asks for.
      wave_size, max_threads: threads of a wave, and of the largest workgroup.
    """

    target: str
    arguments: tuple[Argument, ...]
    kernarg_bytes: int
    fixed_lds_bytes: int
    wave_size: int
    max_threads: int


def kernels_of(image: bytes) -> dict[str, KernelMetadata]:
    """The kernels of a code object by their names.

    Raises:
      ValueError: it is no ELF file for AMD GPUs, or has no metadata.
    """
    if image[:4] != b"\x7fELF" or struct.unpack_from("<H", image, 18)[0] != EM_AMDGPU:
        raise ValueError("not a code object of an AMD GPU")
    metadata = _metadata(image)
    return {kernel[".name"]: _kernel(metadata["amdhsa.target"], kernel) for kernel in metadata["amdhsa.kernels"]}


def _kernel(target: str, found: Mapping[str, Any]) -> KernelMetadata:
    return KernelMetadata(
        target=re.findall(r"gfx[0-9a-f]+", target)[-1],
        arguments=tuple(Argument(a[".offset"], a[".size"], a[".value_kind"]) for a in found[".args"]),
        kernarg_bytes=found[".kernarg_segment_size"],
        fixed_lds_bytes=found[".group_segment_fixed_size"],
        wave_size=found[".wavefront_size"],
        max_threads=found[".max_flat_workgroup_size"],
    )


def _metadata(image: bytes) -> Mapping[str, Any]:
    (headers,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    for place in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", image, headers + place * size)
        at, end = offset, offset + length
        while kind == PT_NOTE and at < end:
            name_bytes, described, note = struct.unpack_from("<III", image, at)
            start = at + 12 + _padded(name_bytes)
            if note == NT_AMDGPU_METADATA:
                return _Reader(image[start : start + described]).value()
            at = start + _padded(described)
    raise ValueError("a code object without metadata")


def _padded(count: int) -> int:
    return -(-count // 4) * 4


class _Reader:
    """The kinds of MessagePack that LLVM writes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def _take(self, form: str) -> Any:
        (value,) = struct.unpack_from(">" + form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _text(self, length: int) -> str:
        return self._take(f"{length}s").decode()

    def _list(self, length: int) -> list[Any]:
        return [self.value() for _ in range(length)]

    def _map(self, length: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(length)}

    def value(self) -> Any:
        code = self._take("B")
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code < 0xC0:
            return self._text(code & 31) if code >= 0xA0 else self._list(code & 15) if code >= 0x90 else self._map(code & 15)
        if code <= 0xC3:
            return {0xC0: None, 0xC2: False, 0xC3: True}[code]
        if code in _NUMBERS:
            return self._take(_NUMBERS[code])
        form, read = _SIZED[code]
        return getattr(self, read)(self._take(form))


_NUMBERS = {0xCA: "f", 0xCB: "d", **dict(zip(range(0xCC, 0xD4), "BHIQbhiq", strict=True))}
_SIZED = {
    **{0xD9 + place: (form, "_text") for place, form in enumerate("BHI")},
    **{0xDC + place: (form, "_list") for place, form in enumerate("HI")},
    **{0xDE + place: (form, "_map") for place, form in enumerate("HI")},
}
