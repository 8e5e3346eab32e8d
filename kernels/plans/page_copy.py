"""Plan of the page copy before prefill, where it pays; see `purepage.kernels.triton.page_copy`."""

from dataclasses import replace
from typing import Any

from ...functional.cache import CacheSpec
from ..launch import Buffer, Descriptor, Launch
from ..triton.spec import AttentionSpec, PageCopySpec
from .shapes import PagedAttentionShape

PAGE_COPY_KERNEL = "purepage.kernels.triton.page_copy:copy_pages"
PAGE_SIZE = 64
"""Tokens of a page of the copy; a tile divides it."""

MAX_BYTES = 1 << 28
"""Largest copy. It has space for every sequence at its maximum length, so batches of many long sequences are not copied."""


def copied_shape(shape: PagedAttentionShape, rows: int) -> PagedAttentionShape | None:
    """The call over a copy of its pages in the query's dtype, or None where the copy can't be exact or would not pay.

    Args:
      rows: query tokens times heads of a KV head from which on it pays, 0 for never; `max_query_len` stands for the tokens.
    """
    if shape.cache.head_size_v is not None:
        return None
    exact = shape.cache.is_quantized or shape.cache.dtype.name == shape.query_dtype
    if not rows or shape.max_query_len * shape.group < rows or shape.query_dtype not in ("bfloat16", "float16") or not exact:
        return None
    width = -(-shape.longest // PAGE_SIZE)
    spec = CacheSpec(
        num_blocks=shape.num_seqs * width,
        block_size=PAGE_SIZE,
        num_kv_heads=shape.cache.num_kv_heads,
        head_size=shape.cache.head_size,
        dtype=shape.query_dtype,
        content="packed",
        order="LBHNC",
    )
    if shape.head_pad != spec.head_size or spec.nbytes > MAX_BYTES:
        return None
    return replace(shape, cache=spec, cache_dtype=shape.query_dtype, table_width=width)


def page_copy_launch(shape: PagedAttentionShape, copied: PagedAttentionShape, spec: AttentionSpec) -> tuple[Launch, dict[str, Buffer]]:
    """The launch that makes the copy, and the buffers that it writes; `spec` is that of prefill over the cache itself.

    Sequences of at most `spec.split_tokens` query tokens are not copied.
    """
    scratch = {
        "page_copy": Buffer(copied.cache.shape, copied.query_dtype),
        "page_copy_table": Buffer((shape.num_seqs, copied.table_width), "int32"),
    }
    facts = PageCopySpec(
        num_kv_heads=shape.cache.num_kv_heads,
        head_size=spec.head_size,
        split_tokens=spec.split_tokens,
        causal=spec.causal,
        context_only=spec.context_only,
        window=spec.window,
        traced_window=spec.traced_window,
        ranged=spec.ranged,
        page_size=PAGE_SIZE,
        out_dtype=copied.query_dtype,
        hardware_fp8=spec.hardware_fp8,
        sign_keys=spec.is_quantized and shape.scale > 0,
        scale_heads=spec.scale_heads,
        kv=spec.kv,
    )
    launch = Launch(
        kernel=PAGE_COPY_KERNEL,
        grid=(copied.cache.num_blocks, shape.cache.num_kv_heads, 1),
        args=(
            *"page_copy page_copy_table cache k_scale query_start_loc seq_lens block_table layer".split(),
            shape.table_width,
            copied.table_width,
        ),
        writes=tuple(scratch),
        constants=(("S", facts),),
        num_warps=4,
        num_stages=1,
    )
    return launch, scratch


def spec_on_copy(spec: AttentionSpec, original: AttentionSpec) -> AttentionSpec:
    """The facts of prefill over the copy, `original` those over the cache.

    The copy has one layer. The cache's scales still apply, but for the sign of the keys' where the scores' own factor is positive.
    """
    kv = replace(spec.kv, key=replace(spec.kv.key, layer=0), value=replace(spec.kv.value, layer=0))
    scales = {"is_quantized": original.is_quantized, "scale_heads": original.scale_heads}
    return replace(spec, kv=kv, signed_factor=original.scale < 0, **scales)


def reading_copy(launch: Launch) -> Launch:
    """The launch with the copy in the place of the cache."""
    names = {"cache": "page_copy", "block_table": "page_copy_table"}

    def renamed(arg: Any) -> Any:
        if isinstance(arg, Descriptor):
            return replace(arg, buffer=names[arg.buffer])
        return names.get(arg, arg) if isinstance(arg, str) else arg

    return replace(launch, args=tuple(map(renamed, launch.args)))
