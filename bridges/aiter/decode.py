"""Adapter of AITER's Triton paged decode, `paged_attention_decode`: one query a sequence, long sequences split over programs.

It sees the same strided pages as `unified_attention`, as `[pages, H, page size, D]`. It loads what lies past a sequence's end as 0, so NaN
in free slots never matters to it, whatever the page. Three of its habits are kept from results:

- It takes scales as Python numbers, one for all heads. Here every factor of the scores goes into a float32 query, and the values' scale
  onto a float32 output: both may be traced, and differ from KV head to KV head.
- It multiplies the query by `scale` in the query's dtype, so that bfloat16 would round `scale` itself: float32 again. What it rounds is
  their product, once. Partial results of a split sequence have the output's dtype.
- It multiplies page and stride in the block table's dtype: the table is widened to int64 on the torch side, which a large cache needs.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...functional.calls import PagedAttentionCall
from ..callback import call_torch
from . import package as package
from .views import Pages, native_page, page_table, pages, token_sequences, with_lost_rows


@dataclass(frozen=True)
class PagedDecode:
    """One call of AITER's operator, all that is static of it. Called with torch tensors."""

    names: tuple[str, ...]
    pages: Pages
    cache_dtype: str
    compute_dtype: str
    max_seq_len: int
    scale: float

    def arguments(self, inputs: tuple[Any, ...], out: Any) -> dict[str, Any]:
        """Keyword arguments of `paged_attention_decode`."""
        import torch
        import triton.language as tl

        given = dict(zip(self.names, inputs, strict=True))
        key, value = (side.transpose(1, 2) for side in self.pages.views(given["cache"], getattr(torch, self.cache_dtype)))
        one = torch.ones(1, dtype=torch.float32, device="cpu")  # read on the host
        return {
            "output": out,
            "query": given["query"],
            "key_cache": key,
            "value_cache": value,
            "seq_lens": given["seq_lens"],
            "block_tables": given["block_table"].to(torch.int64),
            "attn_scale": self.scale,
            "max_seq_len": self.max_seq_len,
            "compute_type": getattr(tl, self.compute_dtype),
            "k_scale": one,
            "v_scale": one,
            "alibi_slopes": given.get("alibi_slopes"),
        }

    def __call__(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        package.load("paged_attention_decode")(**self.arguments(inputs, outputs[0]))


def paged_decode(call: PagedAttentionCall) -> tuple[Array, None]:
    """(out [T, Hq, D], None)."""
    operator, arrays = plan_paged_decode(call)
    results = [jax.ShapeDtypeStruct(arrays["query"].shape, jnp.float32)]
    (rows,) = call_torch(operator, [arrays[name] for name in operator.names], results, name="aiter paged_attention_decode")
    sequence, _ = token_sequences(call.metadata, call.query.shape[0])
    out = jnp.take(rows, sequence, axis=0)
    if call.cache.spec.is_quantized:
        out = out * _of_query_heads(call.cache.v_scale[call.layer], call)
    return with_lost_rows(out, call).astype(call.output_dtype), None


def plan_paged_decode(call: PagedAttentionCall) -> tuple[PagedDecode, dict[str, Array]]:
    """(operator, its arrays by name); its rows are sequences."""
    spec, metadata = call.cache.local_spec, call.metadata
    width = spec.block_size * metadata.block_table.shape[1]
    query = jnp.take(call.query, jnp.clip(metadata.query_start_loc[:-1], 0, call.query.shape[0] - 1), axis=0).astype(jnp.float32)
    if call.score_scale is not None:
        query = query * call.score_scale
    if spec.is_quantized:
        query = query * _of_query_heads(call.cache.k_scale[call.layer], call)
    view = pages(spec, native_page(spec))
    arrays = {
        "query": query,
        "cache": call.cache.data,
        "seq_lens": metadata.seq_lens.astype(jnp.int32),
        "block_table": page_table(metadata.block_table, call.layer, view, spec, multiple=1),
    }
    if call.alibi_slopes is not None:
        arrays["alibi_slopes"] = call.alibi_slopes
    operator = PagedDecode(
        names=tuple(arrays),
        pages=view,
        cache_dtype=spec.dtype.name,
        compute_dtype=call.query.dtype.name,
        max_seq_len=max(min(metadata.max_seq_len or width, width), 1),
        scale=call.scale,
    )
    return operator, arrays


def _of_query_heads(scale: Array, call: PagedAttentionCall) -> Array:
    """A layer's scale, one or one per KV head, as [1, 1] or [Hq, 1]."""
    group = call.query.shape[1] // call.cache.local_spec.num_kv_heads
    return jnp.repeat(scale.reshape(-1, 1), group if scale.ndim else 1, axis=0)
