"""Three small kernels as `Program`s, for the tests of the bridges: an element-wise one, a scatter into a pool, two launches with scratch.

On a GPU they are compiled, elsewhere interpreted: the same tests serve both. Tests that import this are skipped where Triton or torch,
which its launches take, is missing.
"""

import os

import jax
import pytest

from purepage.kernels.launch import Buffer, Launch, Program

if jax.default_backend() == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

_HERE = "bridge_kernels"


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def scatter_kernel(pool_ptr, rows_ptr, slots_ptr, layer_ptr, num_slots, width, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        columns = tl.arange(0, WIDTH)
        mask = columns < width
        base = (tl.load(layer_ptr).to(tl.int64) * num_slots + slot) * width
        tl.store(pool_ptr + base + columns, tl.load(rows_ptr + row * width + columns, mask=mask), mask=mask)


@triton.jit
def row_sum_kernel(x_ptr, sums_ptr, width, scale, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    tl.store(sums_ptr + row, tl.sum(tl.load(x_ptr + row * width + columns, mask=columns < width, other=0.0)) * scale)


@triton.jit
def total_kernel(sums_ptr, total_ptr, rows, ROWS: tl.constexpr):
    i = tl.arange(0, ROWS)
    tl.store(total_ptr, tl.sum(tl.load(sums_ptr + i, mask=i < rows, other=0.0)))


@triton.jit
def flip_sign_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask, other=0) ^ 0x80, mask=mask)


@triton.jit
def broken_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) + no_such_name)  # noqa: F821


def _power_of_2(size: int) -> int:
    return max(1, 1 << (size - 1).bit_length())


def add_program(size: int, *, block: int = 256, dtype: str = "float32") -> Program:
    """out = x + y."""
    buffer = Buffer((size,), dtype)
    launch = Launch(f"{_HERE}:add_kernel", (-(-size // block), 1, 1), ("x", "y", "out", size), ("out",), (("BLOCK", block),))
    return Program("add", (("x", buffer), ("y", buffer)), (("out", buffer),), (), (), (launch,))


def scatter_program(layers: int, slots: int, width: int, rows: int, *, dtype: str = "uint16") -> Program:
    """pool[layer, slots[i]] = rows[i], in place; slots outside [0, slots) are skipped."""
    launch = Launch(
        f"{_HERE}:scatter_kernel",
        (rows, 1, 1),
        ("pool", "rows", "slots", "layer", slots, width),
        ("pool",),
        (("WIDTH", _power_of_2(width)),),
    )
    inputs = (
        ("pool", Buffer((layers, slots, width), dtype)),
        ("rows", Buffer((rows, width), dtype)),
        ("slots", Buffer((rows,), "int32")),
        ("layer", Buffer((1,), "int32")),
    )
    return Program("scatter", inputs, (), ("pool",), (), (launch,))


def total_program(rows: int, width: int, *, scale: float = 0.5) -> Program:
    """total = sum(x) * scale: row sums into scratch, then their sum."""
    x, sums, total = Buffer((rows, width), "float32"), Buffer((rows,), "float32"), Buffer((1,), "float32")
    launches = (
        Launch(f"{_HERE}:row_sum_kernel", (rows, 1, 1), ("x", "sums", width, scale), ("sums",), (("WIDTH", _power_of_2(width)),)),
        Launch(f"{_HERE}:total_kernel", (1, 1, 1), ("sums", "total", rows), ("total",), (("ROWS", _power_of_2(rows)),), num_warps=1),
    )
    return Program("total", (("x", x),), (("total", total),), (), (("sums", sums),), launches)


def flip_sign_program(size: int, *, dtype: str) -> Program:
    """out = -x of an fp8 kind, on its bytes."""
    buffer = Buffer((size,), dtype)
    launch = Launch(f"{_HERE}:flip_sign_kernel", (-(-size // 64), 1, 1), ("x", "out", size), ("out",), (("BLOCK", 64),))
    return Program("flip sign", (("x", buffer),), (("out", buffer),), (), (), (launch,))


def broken_program() -> Program:
    """A program whose kernel does not work."""
    buffer = Buffer((16,), "float32")
    launch = Launch(f"{_HERE}:broken_kernel", (1, 1, 1), ("x", "out"), ("out",), (("BLOCK", 16),))
    return Program("broken program", (("x", buffer),), (("out", buffer),), (), (), (launch,))
