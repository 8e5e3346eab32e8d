"""Plans the copy of pages that goes before prefill where it pays; see `purepage.kernels.triton.page_copy`."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...functional.cache import CacheSpec
from ..launch import Buffer, Descriptor, Launch

if TYPE_CHECKING:
    from .attention import PagedAttentionShape

STAGE_KERNEL = "purepage.kernels.triton.page_copy:stage_pages"
PAGE = 64
"""Tokens of a page of the copy; a tile divides it."""

MOST_BYTES = 1 << 28
"""Of the copy. It has room for every sequence at its longest, so many sequences that might be long go without."""


def staged_shape(shape: "PagedAttentionShape", rows: int) -> "PagedAttentionShape | None":
    """The call as one over a copy of its pages in the query's dtype, or None where that can't be, or would be too large to pay.

    Args:
      rows: fewest query tokens times heads of a KV head that it pays for, 0 for never; `max_query_len` stands for the tokens.
    """
    exact = shape.cache.is_quantized or shape.cache.dtype.name == shape.query_dtype
    if not rows or shape.max_query_len * shape.group < rows or shape.query_dtype not in ("bfloat16", "float16") or not exact:
        return None
    width = -(-shape.longest // PAGE)
    spec = CacheSpec(
        num_blocks=shape.num_seqs * width,
        block_size=PAGE,
        num_kv_heads=shape.cache.num_kv_heads,
        head_size=shape.cache.head_size,
        dtype=shape.query_dtype,
        content="packed",
        order="LBHNC",
    )
    if shape.head_pad != spec.head_size or spec.nbytes > MOST_BYTES:
        return None
    return replace(shape, cache=spec, cache_dtype=shape.query_dtype, table_width=width)


def stage_launch(
    shape: "PagedAttentionShape", staged: "PagedAttentionShape", split_tokens: int, common: dict[str, Any]
) -> tuple[Launch, dict[str, Buffer]]:
    """The launch that makes the copy, and the buffers that it writes. Sequences of at most `split_tokens` query tokens are left out."""
    pages = staged.cache.num_blocks
    scratch = {
        "staged": Buffer(staged.cache.shape, staged.query_dtype),
        "staged_table": Buffer((shape.num_seqs, staged.table_width), "int32"),
    }
    same = "WINDOW HEAD_SIZE NUM_BLOCKS BLOCK_SIZE STORED HARDWARE_FP8 SCALE_HEADS WIDE K_SIDE V_SIDE".split()
    launch = Launch(
        kernel=STAGE_KERNEL,
        grid=(pages, shape.cache.num_kv_heads, 1),
        args=(
            *"staged staged_table cache k_scale query_start_loc seq_lens block_table layer".split(),
            shape.table_width,
            staged.table_width,
        ),
        writes=tuple(scratch),
        constants=(
            *((name, common[name]) for name in same),
            ("SIGN_KEYS", shape.cache.is_quantized and shape.scale > 0),
            ("NUM_KV_HEADS", shape.cache.num_kv_heads),
            ("SPLIT_TOKENS", split_tokens),
            ("TILE", PAGE),
            ("COMPUTE", staged.query_dtype),
        ),
        num_warps=4,
        num_stages=1,
    )
    return launch, scratch


def staged_constants(constants: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """The copy's constants: it has one layer, and the cache's scales are still to be applied, but for the sign of the keys' where
    the scores' own is above 0."""
    sides = {side: (constants[side][0], 0, *constants[side][2:]) for side in ("K_SIDE", "V_SIDE")}
    return {**constants, **sides, **{name: common[name] for name in ("QUANTIZED", "SCALE_HEADS")}, "SIGNED": common["SCALE"] < 0}


def on_the_copy(launch: Launch) -> Launch:
    """The launch with the copy in the place of the cache."""
    names = {"cache": "staged", "block_table": "staged_table"}

    def renamed(arg: Any) -> Any:
        if isinstance(arg, Descriptor):
            return replace(arg, buffer=names[arg.buffer])
        return names.get(arg, arg) if isinstance(arg, str) else arg

    return replace(launch, args=tuple(map(renamed, launch.args)))
