"""Plan of merging two attention results; it needs neither Triton nor a GPU."""

from dataclasses import dataclass

from ..archs import arch_facts
from ..launch import Buffer, Launch, Program
from ..triton.writer_spec import MergeSpec
from .sizes import ceil_div, next_power_of_two
from .writers import tokens_of_block, warps_of_tile

MERGE_KERNEL = "purepage.kernels.triton.merge:merge_states_kernel"


@dataclass(frozen=True, kw_only=True)
class MergeShape:
    """Everything static about `merge_attention_states`; dtypes are JAX names."""

    num_tokens: int
    num_heads: int
    head_size: int
    dtype_a: str
    dtype_b: str


def plan_merge(shape: MergeShape, arch: str, *, num_cus: int | None = None) -> Program:
    """Launches of one merge: inputs out_a, lse_a, out_b, lse_b; outputs out (in the dtype of out_a) and lse.

    Args:
      shape: what is static about the call.
      arch: see `purepage.kernels.archs`.
      num_cus: compute units of the device; default: those of the arch's usual product.

    Raises:
      UnsupportedError: the arch is not known.
    """
    facts = arch_facts(arch)
    states, sums = (shape.num_tokens, shape.num_heads, shape.head_size), Buffer((shape.num_tokens, shape.num_heads), "float32")
    rows, pad = shape.num_tokens * shape.num_heads, next_power_of_two(shape.head_size)
    block_m = tokens_of_block(rows, 1, pad, num_cus or facts.num_cus, at_least=1)
    spec = MergeSpec(block_m=block_m, head_size=shape.head_size, head_pad=pad, dtype=shape.dtype_a, interpreted=facts.vendor == "cpu")
    launch = Launch(
        kernel=MERGE_KERNEL,
        grid=(ceil_div(rows, block_m), 1, 1),
        args=("out", "lse", "out_a", "lse_a", "out_b", "lse_b", rows),
        writes=("out", "lse"),
        constants=(("S", spec),),
        num_warps=warps_of_tile(block_m * pad, facts),
        num_stages=1,
    )
    return Program(
        name="merge_attention_states",
        inputs=(("out_a", Buffer(states, shape.dtype_a)), ("lse_a", sums), ("out_b", Buffer(states, shape.dtype_b)), ("lse_b", sums)),
        outputs=(("out", Buffer(states, shape.dtype_a)), ("lse", sums)),
        updates=(),
        scratch=(),
        launches=(launch,),
    )
