"""Attention that takes the step's own tokens from dense arrays, at full precision, and everything before them from the cache.

That is what ROCM_ATTN's prefix prefill does: with an fp8 cache, the keys and values of this step do not pass through fp8 (SEMANTICS.md,
II.2.3 and G3). An implementation may do it in one pass. For the others the step's tokens go to a small cache of their own, as wide as their
dtype; context and new tokens are attended apart and merged.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from . import dispatch
from .attention import paged_attention_call
from .cache import CacheSpec, KVCache, init_cache
from .cache_writers import update_cache
from .calls import PagedAttentionCall
from .cascade import merge_attention_states, sequence_of_tokens
from .fp8 import quantize
from .metadata import AttentionMetadata
from .target import current_target

ONE_PASS = "paged_attention_with_new_tokens"
"""The operation, a function of (PagedAttentionCall, key, value)."""

BLOCK_SIZE = 16
"""Of the small cache: the least padding that every kernel takes."""


def attention_with_new_tokens(
    query: Float[Array, "T Hq D"],
    key: Float[Array, "T H D"],
    value: Float[Array, "T H D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
    implementation: str | None = None,
    **options: Any,
) -> Float[Array, "T Hq D"]:
    """`paged_attention`, but positions from a sequence's context on are read from `key` and `value`, row by row with `query`.

    Where the implementation that `paged_attention` would take has no one-pass kernel, it attends in two parts, each by the best that can.

    Raises:
      UnsupportedError: the named implementation can't serve a part.
    """
    call = paged_attention_call(query, cache, metadata, **options)
    chosen, _ = dispatch.choose("paged_attention", call, implementation)
    if dispatch.unsupported_reasons(ONE_PASS, call, chosen, current_target(), explicit=True):
        return _two_parts(call, key, value, implementation)
    out, _ = dispatch.run(ONE_PASS, call, chosen, key, value)
    return out


def _two_parts(call: PagedAttentionCall, key: Array, value: Array, implementation: str | None) -> Array:
    """The context with positions in the whole sequence, the new tokens with positions among themselves: all that a window and ALiBi ask
    for is how far a key is from its query.
    """
    part = replace(call, sinks=None, output_scale=None, output_dtype=jnp.dtype(jnp.float32), return_lse=True)
    old = dispatch.run("paged_attention", replace(part, context_only=True), implementation)
    small, placed = _cache_of_new_tokens(key, value, call.metadata, implementation)
    part = replace(part, cache=small, metadata=placed, layer=jnp.zeros((), jnp.int32), sinks=call.sinks)
    new = dispatch.run("paged_attention", part, implementation)
    out, _ = merge_attention_states(*old, *new, implementation=implementation)
    return out.astype(call.output_dtype) if call.output_scale is None else quantize(out, call.output_scale, call.output_dtype)


def _cache_of_new_tokens(
    key: Array, value: Array, metadata: AttentionMetadata, implementation: str | None
) -> tuple[KVCache, AttentionMetadata]:
    """The step's tokens in a cache of their dtype: sequence after sequence, each from a fresh block.

    A sequence shorter than its queries has no place for the first of them: they are left out.
    """
    tokens, heads, head_size = key.shape
    seqs = metadata.seq_lens.shape[0]
    starts = metadata.query_start_loc
    lens = starts[1:] - starts[:-1]
    left_out = jnp.maximum(lens - metadata.seq_lens, 0)
    blocks = -(-lens // BLOCK_SIZE)
    first = jnp.cumsum(blocks) - blocks
    token = jnp.arange(tokens)
    sequence = sequence_of_tokens(metadata, tokens)
    place = token - (starts[:-1] + left_out)[sequence]
    slots = jnp.where((token < starts[-1]) & (place >= 0), first[sequence] * BLOCK_SIZE + place, -1)
    width = -(-min(metadata.max_query_len, tokens) // BLOCK_SIZE)
    spec = CacheSpec(
        num_blocks=tokens // BLOCK_SIZE + seqs,
        block_size=BLOCK_SIZE,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=jnp.promote_types(key.dtype, value.dtype),
    )
    placed = AttentionMetadata(
        starts,
        lens - left_out,
        first[:, None] + jnp.arange(width)[None],
        slots,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_query_len,
        causal=metadata.causal,
        block_size=BLOCK_SIZE,
    )
    return update_cache(init_cache(spec), key, value, slots, implementation=implementation), placed
