"""A kernel that takes a rectangle of a matrix through a descriptor, as a `Program`, for the tests of the launcher."""

import triton
import triton.language as tl

from purepage.kernels.launch import Buffer, Descriptor, Launch, Program


@triton.jit
def fetch_kernel(matrix, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if matrix is not None:
        tile = matrix.load([ROWS, COLUMNS])
        tl.store(out_ptr + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], tile)


def fetch_program():
    """The second block of rows and columns of x, bf16[16, 128]."""
    return Program(
        name="fetch",
        inputs=(("x", Buffer((16, 128), "bfloat16")),),
        outputs=(("out", Buffer((8, 64), "bfloat16")),),
        updates=(),
        scratch=(),
        launches=(
            Launch(
                kernel="bridge_descriptors:fetch_kernel",
                grid=(1, 1, 1),
                args=(Descriptor("x", "bfloat16", (16, 128), (8, 64)), "out"),
                writes=("out",),
                constants=(("ROWS", 8), ("COLUMNS", 64)),
            ),
        ),
    )
