"""Attention that takes the new tokens of a step from dense arrays, at full precision, and everything before them from the cache.

This is vLLM's ROCM_ATTN: its prefix prefill serves the sequences of more than one query token and reads their new keys and values from the
arguments, and its paged decode serves the sequences of one query token and reads everything from the cache, their own token too. An
implementation may do it in one pass. For the others the new tokens go to a scratch cache of their dtype; what the cache holds and the new
tokens are attended in parts and merged.
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
from .derivatives import refuse_derivatives
from .fp8 import quantize
from .literals import Implementation
from .metadata import AttentionMetadata
from .target import current_target

ONE_PASS = "paged_attention_with_new_tokens"
"""The operation, a function of (PagedAttentionCall, key, value)."""

BLOCK_SIZE = 16
"""Block size of the scratch cache: the smallest that every kernel takes."""


def attention_with_new_tokens(
    query: Float[Array, "T Hq D"],
    key: Float[Array, "T H D"],
    value: Float[Array, "T H D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
    implementation: Implementation | None = None,
    **options: Any,
) -> Float[Array, "T Hq D"]:
    """`paged_attention`, with the new tokens of every sequence of more than one query token read from `key` and `value`.

    A step of one query token a sequence (`metadata.max_query_len` of 1) is `paged_attention` itself: one pass over the cache. Where the
    implementation that `paged_attention` would take has no one-pass kernel, other steps are attended in parts.

    Args:
      query: [T, Hq, D].
      key, value: [T, H, D] of a model dtype, row by row with `query`.
      cache: what the other tokens are read from.
      metadata: see `AttentionMetadata`.
      implementation, options: see `paged_attention`.

    Returns:
      [T, Hq, D] in `output_dtype`.

    Raises:
      UnsupportedError: the named implementation can't serve a part.
    """
    call = refuse_derivatives("paged_attention", paged_attention_call(query, cache, metadata, **options))
    if metadata.max_query_len <= 1:
        return dispatch.run("paged_attention", call, implementation)[0]
    key, value = refuse_derivatives("forward", (key, value))
    chosen, _ = dispatch.choose("paged_attention", call, implementation)
    if dispatch.unsupported_reasons(ONE_PASS, call, chosen, current_target(), explicit=True):
        return _in_parts(call, key, value, implementation)
    out, _ = dispatch.run(ONE_PASS, call, chosen, key, value)
    return out


def _in_parts(call: PagedAttentionCall, key: Array, value: Array, implementation: Implementation | None) -> Array:
    """Three parts that share no key: the contexts of sequences of several query tokens, their new tokens, and sequences of one query token.

    The first has positions in the whole sequence, the second among the new tokens: a window and ALiBi depend on the distance of a key from
    its query alone.
    """
    metadata = call.metadata
    queries = metadata.query_start_loc[1:] - metadata.query_start_loc[:-1]
    single = queries == 1
    part = replace(call, sinks=None, output_scale=None, output_dtype=jnp.dtype(jnp.float32), return_lse=True)

    def attend(seq_lens: Array, **changes: Any) -> tuple[Array, Array]:
        return dispatch.run("paged_attention", replace(part, metadata=replace(metadata, seq_lens=seq_lens), **changes), implementation)

    contexts = attend(jnp.where(single, 1, metadata.seq_lens), context_only=True)
    scratch, placed = _cache_of_new_tokens(key, value, metadata, implementation)
    on_scratch = replace(part, cache=scratch, metadata=placed, layer=jnp.zeros((), jnp.int32), sinks=call.sinks)
    new = dispatch.run("paged_attention", on_scratch, implementation)
    singles = attend(jnp.where(single, metadata.seq_lens, 0))
    several = merge_attention_states(*contexts, *new, implementation=implementation)
    out, _ = merge_attention_states(*several, *singles, implementation=implementation)
    return out.astype(call.output_dtype) if call.output_scale is None else quantize(out, call.output_scale, call.output_dtype)


def _cache_of_new_tokens(
    key: Array, value: Array, metadata: AttentionMetadata, implementation: Implementation | None
) -> tuple[KVCache, AttentionMetadata]:
    """The new tokens in a scratch cache of their dtype: sequence after sequence, each from a fresh block.

    A sequence of one query token has none there: its token is read from the cache. A sequence shorter than its queries has no position for
    the first of them: they are left out.
    """
    tokens, heads, head_size = key.shape
    seqs = metadata.seq_lens.shape[0]
    starts = metadata.query_start_loc
    queries = starts[1:] - starts[:-1]
    lens = jnp.where(queries == 1, 0, queries)
    left_out = jnp.maximum(lens - metadata.seq_lens, 0)
    blocks = -(-lens // BLOCK_SIZE)
    first = jnp.cumsum(blocks) - blocks
    token = jnp.arange(tokens)
    sequence = sequence_of_tokens(metadata, tokens)
    place = token - (starts[:-1] + left_out)[sequence]
    is_new = (token < starts[-1]) & (lens[sequence] > 0) & (place >= 0)
    slots = jnp.where(is_new, first[sequence] * BLOCK_SIZE + place, -1)
    width = -(-min(metadata.max_query_len, tokens) // BLOCK_SIZE)
    spec = CacheSpec(
        num_blocks=tokens // BLOCK_SIZE + seqs,
        block_size=BLOCK_SIZE,
        num_kv_heads=heads,
        head_size=head_size,
        head_size_v=value.shape[2],
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
