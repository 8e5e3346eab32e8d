"""Adapter of AITER's `unified_attention`, on the caller's buffers, inside `jax.jit`, nothing copied.

What an operator can't do right is refused (see `rules`); what can be worked around is, here:

- AITER's kernels load whole pages and weigh keys that a row does not see by 0, so a NaN in a slot outside every sequence would reach
  results.
  They mask a tile of keys that is not exactly one page, so pages of 8 tokens are shown to them, or of one token where a window has freed
  the keys before it; and the kernel that spreads one sequence over several programs, which masks nothing, is kept out. That costs speed in
  decode steps of few long sequences: `PUREPAGE_AITER_FINITE_CACHE=1` promises that there is no such NaN, and AITER chooses as it likes.
- A NaN value of a token that one query sees may still reach the other queries of the same sequence in the same step.
- `max_seqlen_q == 1` makes recent releases take token s for sequence s, whatever the query starts say: queries are gathered to that first.
- Rows of padding and of empty sequences, which AITER leaves as they are, become 0.
- Entries of the block table that are not needed become valid blocks, and rows are padded to the tiles that are loaded.

Steps of one query a sequence go to AITER's other attention operator, its paged decode (see `decode`), where
`PUREPAGE_AITER_PAGED_DECODE=1` asks for it, and where `unified_attention` can't serve them.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...functional.cache import CacheSpec
from ...functional.calls import PagedAttentionCall
from ...functional.target import Target
from ..callback import call_torch
from . import package as package
from .rules import SPLIT_KERNEL_FROM, splits_a_sequence, splits_every_decode, takes_score_scale
from .views import TILE, Pages, native_page, page_table, pages, token_sequences, window_table, with_lost_rows

_MASKED_PAGE = 8
"""Smaller than every tile, so that no tile is exactly one page."""


@dataclass(frozen=True)
class UnifiedAttention:
    """One call of AITER's operator, all that is static of it. Called with torch tensors."""

    names: tuple[str, ...]
    pages: Pages
    cache_dtype: str
    max_query_len: int
    max_seq_len: int
    scale: float
    window: int | None
    soft_cap: float

    def arguments(self, inputs: tuple[Any, ...], out: Any) -> dict[str, Any]:
        """Keyword arguments of `unified_attention`, of any release."""
        import torch

        given = dict(zip(self.names, inputs, strict=True))
        key, value = self.pages.views(given["cache"], getattr(torch, self.cache_dtype))
        return {
            "q": given["query"],
            "k": key,
            "v": value,
            "out": out,
            "cu_seqlens_q": given["query_start_loc"],
            "max_seqlen_q": self.max_query_len,
            "seqused_k": given["seq_lens"],
            "max_seqlen_k": self.max_seq_len,
            "softmax_scale": self.scale,
            "causal": True,
            "window_size": (-1, -1) if self.window is None else (self.window - 1, 0),
            "block_table": given["block_table"],
            "softcap": self.soft_cap,
            **{name: given.get(name) for name in ("q_descale", "k_descale", "v_descale", "alibi_slopes", "output_scale", "sinks")},
        }

    def __call__(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        package.load("unified_attention")(**self.arguments(inputs, outputs[0]))


def unified_attention(target: Target, call: PagedAttentionCall) -> tuple[Array, None]:
    """(out [T, Hq, D], None)."""
    operator, arrays, rows = plan_unified_attention(call, target)
    shape = (arrays["query"].shape[0], *call.query.shape[1:])
    # The split kernel and an output scale allocate through torch, which a recorded command buffer must not depend on.
    splits = operator.max_seq_len > SPLIT_KERNEL_FROM and splits_a_sequence(call, target)
    record = target.settings.aiter_command_buffer and not splits and call.output_scale is None
    late_scale = _scales_values_late(call)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32 if late_scale else call.output_dtype)]
    inputs = [arrays[name] for name in operator.names]
    (out,) = call_torch(operator, inputs, results, command_buffer=record, name="aiter unified_attention")
    if rows == "sequences":
        out = jnp.take(out, token_sequences(call.metadata, call.query.shape[0])[0], axis=0)
    if late_scale:
        out = (out * call.cache.v_scale[call.layer]).astype(call.output_dtype)
    return with_lost_rows(out, call), None


def plan_unified_attention(call: PagedAttentionCall, target: Target) -> tuple[UnifiedAttention, dict[str, Array], str]:
    """(operator, its arrays by name, whether its rows are "tokens" or "sequences")."""
    spec, metadata = call.cache.local_spec, call.metadata
    starts, lengths = metadata.query_start_loc.astype(jnp.int32), metadata.seq_lens.astype(jnp.int32)
    most = min(metadata.max_seq_len or spec.block_size * metadata.block_table.shape[1], spec.block_size * metadata.block_table.shape[1])
    query, rows, longest = call.query, "tokens", max(metadata.max_query_len, 2)
    native = target.settings.aiter_finite_cache and native_page(spec) >= 16
    if native:
        view = pages(spec, native_page(spec))
        table = page_table(metadata.block_table, call.layer, view, spec, multiple=max(TILE // view.page, 1))
        odd_head = spec.head_size & (spec.head_size - 1)  # the split kernel's reduction does not compile for no power of two
        if odd_head:
            most = min(most, SPLIT_KERNEL_FROM)
        if metadata.max_query_len == 1 and not (odd_head and splits_every_decode(target)):
            query, rows, longest = jnp.take(query, jnp.clip(starts[:-1], 0, query.shape[0] - 1), axis=0), "sequences", 1
            starts = jnp.arange(len(lengths) + 1, dtype=jnp.int32)
    else:
        most = min(most, SPLIT_KERNEL_FROM)
        if call.sliding_window is None:
            view = pages(spec, _MASKED_PAGE)
            table = page_table(metadata.block_table, call.layer, view, spec, multiple=TILE // view.page)
        else:
            view = pages(spec, 1)
            first = jnp.maximum(lengths - (starts[1:] - starts[:-1]) - call.sliding_window + 1, 0)
            keys = min(spec.block_size * metadata.block_table.shape[1], call.sliding_window + metadata.max_query_len)
            table = window_table(metadata.block_table, call.layer, view, spec, first=first, width=-(-keys // TILE) * TILE)
            lengths = lengths - first
    arrays = {
        "query": query,
        "cache": call.cache.data,
        "query_start_loc": starts,
        "seq_lens": lengths,
        "block_table": table,
        **_scales(call, spec),
    }
    optional = {"alibi_slopes": call.alibi_slopes, "sinks": call.sinks}
    arrays |= {name: array for name, array in optional.items() if array is not None}
    if call.output_scale is not None:
        arrays["output_scale"] = call.output_scale.reshape(1)
    operator = UnifiedAttention(
        names=tuple(arrays),
        pages=view,
        cache_dtype=spec.dtype.name,
        max_query_len=longest,
        max_seq_len=most,
        scale=call.scale,
        window=call.sliding_window,
        soft_cap=call.logits_soft_cap or 0.0,
    )
    return operator, arrays, rows


def _scales(call: PagedAttentionCall, spec: CacheSpec) -> dict[str, Array]:
    """Factors of an fp8 cache; what multiplies the scores besides goes with the query's where there is such, else with the keys'.

    An unquantized cache gets none: AITER would apply them.
    """
    scales = {}
    factor = call.score_scale
    if factor is not None and takes_score_scale():
        scales["q_descale"], factor = factor.reshape(1), None
    if spec.is_quantized:
        key = call.cache.k_scale[call.layer]
        scales["k_descale"] = (key if factor is None else key * factor).reshape(1)
        value = call.cache.v_scale[call.layer].reshape(1)
        scales["v_descale"] = jnp.ones_like(value) if _scales_values_late(call) else value
    return scales


def _scales_values_late(call: PagedAttentionCall) -> bool:
    """Releases that take no score scale round every value to the query's dtype after its scale: there the scale of an fp8 cache is applied
    to a float32 output instead, and nothing is rounded twice. Keys they round all the same.
    """
    return call.cache.spec.is_quantized and call.output_scale is None and not takes_score_scale()
