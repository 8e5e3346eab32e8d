"""The stub `libamdhip64.so`: how it is built, and what it saw of the process that loaded it.

    library = build(folder, triton_folder)

    runtime = Runtime()
    with runtime.capture(stream):
        ...
    runtime.launches, runtime.calls

The process of a `Runtime` was started with the library's path in TRITON_LIBHIP_PATH and with `describe(arch)` in FAKE_HIP_DEVICE.
"""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from purepage.kernels.archs import arch_facts

from .code_object import KernelMetadata, kernels_of

SOURCE = Path(__file__).with_name("libamdhip64.c")
LAUNCHES = ("hipModuleLaunchKernel", "hipModuleLaunchCooperativeKernel", "hipDrvLaunchKernelEx")
HIP_VERSION = "7.2.0"
"""What torch says it was built with."""


def build(folder: Path, triton_folder: Path, compiler: str = "cc") -> Path:
    """Compiles the stub against the headers of an unpacked Triton; returns the library's path."""
    library = folder / "libamdhip64.so"
    include = triton_folder / "backends" / "amd" / "include"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-isystem", str(include), str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def describe(arch: str) -> str:
    """The value of FAKE_HIP_DEVICE for an architecture, with the target's name as a driver says it."""
    facts = arch_facts(arch)
    features = ":sramecc+:xnack-" if facts.wave_size == 64 else ""
    return f"{arch}{features} {facts.wave_size} {facts.shared_bytes} {facts.num_cus}"


class _Event(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_char_p),
        ("captured", ctypes.c_int),
        ("handle", ctypes.c_void_p),
        ("image", ctypes.c_void_p),
        ("image_bytes", ctypes.c_size_t),
        ("kernel", ctypes.c_char_p),
        ("dimensions", ctypes.c_uint * 6),
        ("lds_bytes", ctypes.c_uint),
        ("cooperative", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
    )


_Observer = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Event))


@dataclass(frozen=True)
class Call:
    """One call of the runtime, and whether a stream was being captured then."""

    name: str
    captured: bool


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch as the runtime got it.

    Attributes:
      kernel, metadata, image: name, metadata and code object of the function.
      grid, block, lds_bytes, stream, cooperative: as passed; `lds_bytes` are the dynamic ones.
      captured: whether its stream was being captured.
      kernarg: the segment of packed arguments, each at the offset that the metadata gives; hidden ones are 0.
    """

    kernel: str
    metadata: KernelMetadata
    image: bytes
    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    lds_bytes: int
    stream: int
    cooperative: bool
    captured: bool
    kernarg: bytes


class Runtime:
    """The stub of this process, whose path TRITON_LIBHIP_PATH holds.

    Attributes:
      calls: every call, in order.
      launches: the launches among them.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.launches: list[RecordedLaunch] = []
        self._library = ctypes.CDLL(os.environ["TRITON_LIBHIP_PATH"])
        self._observer = _Observer(self._observe)  # the library does not keep it alive
        self._library.fake_hip_observe(self._observer)

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function of the runtime; returns its status."""
        return getattr(self._library, name)(*arguments)

    @contextlib.contextmanager
    def capture(self, stream: int) -> Iterator[None]:
        """The stream is being captured inside, as when XLA records a command buffer."""
        handle = ctypes.c_void_p(stream)
        assert self.call("hipStreamBeginCapture", handle, 0) == 0
        try:
            yield
        finally:
            assert self.call("hipStreamEndCapture", handle, ctypes.byref(ctypes.c_void_p())) == 0

    def clear(self) -> None:
        self.calls.clear()
        self.launches.clear()

    def _observe(self, pointer: Any) -> None:
        event = pointer.contents
        name = event.call.decode()
        self.calls.append(Call(name, bool(event.captured)))
        if name in LAUNCHES:
            self.launches.append(_recorded(event))


def _recorded(event: _Event) -> RecordedLaunch:
    image = ctypes.string_at(event.image, event.image_bytes)
    kernel = event.kernel.decode()
    metadata = kernels_of(image)[kernel]
    segment = bytearray(metadata.kernarg_bytes)
    for place, argument in enumerate(a for a in metadata.arguments if not a.is_hidden):
        segment[argument.offset : argument.offset + argument.size] = ctypes.string_at(event.params[place], argument.size)
    x, y, z, *block = event.dimensions
    return RecordedLaunch(
        kernel=kernel,
        metadata=metadata,
        image=image,
        function=event.handle,
        grid=(x, y, z),
        block=(block[0], block[1], block[2]),
        lds_bytes=event.lds_bytes,
        stream=event.stream or 0,
        cooperative=bool(event.cooperative),
        captured=bool(event.captured),
        kernarg=bytes(segment),
    )


@contextlib.contextmanager
def torch_with_hip() -> Iterator[None]:
    """torch as a build for ROCm presents itself to Triton and to the bridge: one device, and buffers that are tensors as they are."""
    import torch

    cuda = {
        "is_available": lambda: True,
        "device": lambda _: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=0),
    }
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(torch.version, "hip", HIP_VERSION),
        mock.patch.object(torch, "from_dlpack", lambda buffer: buffer),
    ):
        yield


@dataclass(frozen=True)
class DeviceBuffer:
    """A buffer of XLA's at an address, as the bridge's callback gets it."""

    address: int

    def __dlpack_device__(self) -> tuple[int, int]:
        return 10, 0  # kDLROCM

    def __dlpack__(self) -> "DeviceBuffer":
        return self

    def data_ptr(self) -> int:
        return self.address
