"""Plan of merging two attention results. ResourceUsage no Triton and no GPU."""

from dataclasses import dataclass

from ..archs import arch_facts
from ..launch import Buffer, Launch, Program
from .attention import ceil_div, next_power_of_two
from .writers import tokens_of_tile, warps_of_tile

MERGE_KERNEL = "purepage.kernels.triton.merge:merge_states_kernel"


@dataclass(frozen=True, kw_only=True)
class MergeShape:
    """Everything static about `merge_attention_states`; dtypes are names."""

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
      num_cus: compute units of the device; default: the arch's usual part.

    Raises:
      UnsupportedError: the arch is not known.
    """
    facts = arch_facts(arch)
    states, sums = (shape.num_tokens, shape.num_heads, shape.head_size), Buffer((shape.num_tokens, shape.num_heads), "float32")
    rows, pad = shape.num_tokens * shape.num_heads, next_power_of_two(shape.head_size)
    tile = tokens_of_tile(rows, 1, pad, num_cus or facts.num_cus, at_least=1)
    launch = Launch(
        kernel=MERGE_KERNEL,
        grid=(ceil_div(rows, tile), 1, 1),
        args=("out", "lse", "out_a", "lse_a", "out_b", "lse_b", rows),
        writes=("out", "lse"),
        constants=(
            ("ROWS", tile),
            ("HEAD_SIZE", shape.head_size),
            ("HEAD_PAD", pad),
            ("KIND", shape.dtype_a),
            ("INTERPRETED", facts.vendor == "cpu"),
        ),
        num_warps=warps_of_tile(tile * pad, facts),
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
