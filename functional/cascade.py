"""Attention in parts: merging two results over disjoint keys, and a prefix that every sequence shares read once.

Sources: `merge_attn_states` and `cascade_attention` of vLLM; the merge is that of FlashAttention's split (Dao et al., 2022).
"""

from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from . import dispatch
from .attention import Lse, Out, check_key_range, output_dtype_of, paged_attention
from .cache import CacheSpec, KVCache, check_cache
from .calls import MergeCall
from .checks import check_bool, check_query, check_static_tokens, check_tokens, optional_scalar
from .config import check_window, int_or_none, is_array, is_floating
from .debug import check_step, without_checks
from .derivatives import refuse_derivatives
from .errors import UnsupportedError, bad_type, bad_value
from .fp8 import quantize
from .literals import CascadeOptions, Implementation
from .metadata import AttentionMetadata, check_metadata
from .partition import together


def merge_attention_states(
    out_a: Float[Array, "T Hq D"],
    lse_a: Float[Array, "T Hq"],
    out_b: Float[Array, "T Hq D"],
    lse_b: Float[Array, "T Hq"],
    *,
    output_scale: Any = None,
    output_dtype: Any = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"]]:
    """Two attention results of the same queries over disjoint keys as one result over both. Ports vLLM's `merge_attn_states`.

    Args:
      out_a, out_b: [T, Hq, D], float32, float16 or bfloat16, each normalised by its own softmax denominator.
      lse_a, lse_b: f32[T, Hq], natural log of these denominators. -inf and +inf (FlashAttention 2's value) are a side that saw no key; its
        output is not read.
      output_scale: f32 scalar: out / output_scale, clamped and rounded to `output_dtype`, an fp8 dtype (default float8_e4m3fn).
      output_dtype: default: the dtype of `out_a`.
      implementation: see `paged_attention`.

    Returns:
      (out [T, Hq, D] in `output_dtype`, lse f32[T, Hq]). Float32 inside, one rounding. Two sides without keys give 0 and -inf. Sinks must
      have entered one side only.

    Raises:
      ValueError, TypeError: names the argument, what it was and what it must be.
      UnsupportedError: see `paged_attention`.
    """
    out_a, out_b = check_tokens("out_a", out_a, None, None), check_tokens("out_b", out_b, None, None)
    if out_b.shape != out_a.shape:
        bad_value("out_b", out_b, f"of the shape of out_a {list(out_a.shape)}")
    sides = []
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if not is_array(lse) or tuple(lse.shape) != out_a.shape[:2]:
            bad_value(name, lse, f"an array of shape [T, Hq] = {list(out_a.shape[:2])}")
        if not is_floating(lse.dtype):
            bad_type(name, lse, "of a float dtype")
        sides.append(jnp.asarray(lse, jnp.float32))
    divisor = optional_scalar("output_scale", output_scale)
    dtype = output_dtype_of(out_a.dtype, output_dtype, divisor is not None)
    if dtype != out_a.dtype:  # float32 until the one rounding at the end
        out_a = out_a.astype(jnp.float32)
    call = MergeCall(out_a=out_a, lse_a=sides[0], out_b=out_b, lse_b=sides[1])
    out, lse = dispatch.run("merge_attention_states", refuse_derivatives("merge_attention_states", call), implementation)
    return out.astype(dtype) if divisor is None else quantize(out, divisor, dtype), lse


@overload
def cascade_attention(
    query: Float[Array, "T Hq D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CascadeOptions],
) -> Out: ...
@overload
def cascade_attention(
    query: Float[Array, "T Hq D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
    return_lse: Literal[True],
    **options: Unpack[CascadeOptions],
) -> tuple[Out, Lse]: ...
@overload
def cascade_attention(
    query: Float[Array, "T Hq D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
    return_lse: bool,
    **options: Unpack[CascadeOptions],
) -> Out | tuple[Out, Lse]: ...
def cascade_attention(
    query: Float[Array, "T Hq D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
    common_prefix_len: int,
    layer: Any = 0,
    scale: Any = None,
    sliding_window: Any = None,
    key_range: Any = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    q_scale: Any = None,
    output_scale: Any = None,
    output_dtype: Any = None,
    qq_bias: Any = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Out | tuple[Out, Lse]:
    """`paged_attention` of sequences that share their first tokens: the shared prefix is read once for all of them.

    The prefix is attended by all tokens as one sequence, what follows it by each sequence alone, and the two are merged. Every sequence
    that has queries and keys must lead with the blocks of the first such row, and no query may lie before the prefix's end: that is how
    vLLM's scheduler counts common blocks. Both ROCm backends leave cascade attention off.

    Args:
      query: see `paged_attention`.
      cache: see `paged_attention`.
      metadata: see `paged_attention`.
      common_prefix_len: tokens of the prefix, a static int, a multiple of the cache's block size; 0 is plain `paged_attention`.
      sliding_window, alibi_slopes: None, unless the prefix is 0: both need each query's distance from the prefix.
      sinks: as in `paged_attention`; they enter the softmax once.
      layer, scale, key_range, logits_soft_cap, q_scale, output_scale, output_dtype, qq_bias, return_lse, implementation: see
        `paged_attention`.

    Returns:
      As `paged_attention`, and the same values to rounding. Where values are traced and can't be checked, a token whose sequence does not
      share the prefix gives NaN.

    Raises:
      ValueError: a prefix that is no multiple of the block size or longer than the table; where values are concrete, also the sequence that
        does not share it.
      UnsupportedError: `sliding_window` or `alibi_slopes` with a prefix; the rest as `paged_attention`.
    """
    spec = check_cache(cache)
    metadata = check_metadata(metadata, spec)
    query = check_query(query, spec, fp8=True)
    check_static_tokens("query", query)
    query, cache = refuse_derivatives("cascade_attention", (query, cache))
    prefix = _prefix_blocks(common_prefix_len, spec, metadata)
    shared = {"layer": layer, "scale": scale, "logits_soft_cap": logits_soft_cap, "q_scale": q_scale, "implementation": implementation}
    outer = {"output_scale": output_scale, "output_dtype": output_dtype, "return_lse": return_lse}
    positional = {"sliding_window": sliding_window, "alibi_slopes": alibi_slopes}
    refused = [name for name, value in positional.items() if value is not None]
    if check_window(sliding_window) is None and "sliding_window" in refused:
        refused.remove("sliding_window")
    if prefix and refused:
        raise UnsupportedError(
            f"cascade_attention can't serve {', '.join(refused)}: the shared part has no query positions; paged_attention can"
        )
    if not prefix or not metadata.seq_lens.shape[0]:
        return paged_attention(query, cache, metadata, sinks=sinks, qq_bias=qq_bias, key_range=key_range, **positional, **shared, **outer)
    check_bool("return_lse", return_lse)
    divisor = optional_scalar("output_scale", output_scale)
    dtype = output_dtype_of(query.dtype, output_dtype, divisor is not None)

    ranges = check_key_range(key_range, query.shape[0])
    metadata = check_step(metadata, spec, query.shape[0], None, ranges)
    behind = None if ranges is None else tuple(_minus(bound, common_prefix_len) for bound in ranges)
    batch = together(metadata)  # small, and asked for across sequences
    live, shares = _sharing(batch, prefix, spec.block_size)
    _check_sharing(live, shares, common_prefix_len)
    parts = {"output_dtype": jnp.float32, "return_lse": True, **shared}  # float32 until the one rounding at the end
    whole, rest = (
        _prefix_metadata(batch, live, prefix, spec.block_size, query.shape[0]),
        _suffix_metadata(metadata, prefix, spec.block_size),
    )
    with without_checks():  # the slots are those of the whole step
        prefix_out, prefix_lse = paged_attention(query, cache, whole, key_range=ranges, **parts)
        suffix_out, suffix_lse = paged_attention(query, cache, rest, sinks=sinks, qq_bias=qq_bias, key_range=behind, **parts)
    sequence = sequence_of_tokens(batch, query.shape[0])
    sees_prefix, broken = live[sequence], (live & ~shares)[sequence]
    prefix_lse = jnp.where(sees_prefix[:, None], prefix_lse, -jnp.inf)
    out, lse = merge_attention_states(prefix_out, prefix_lse, suffix_out, suffix_lse, implementation=implementation)
    broken &= jnp.arange(query.shape[0], dtype=jnp.int32) < batch.query_start_loc[-1]
    out, lse = jnp.where(broken[:, None, None], jnp.nan, out), jnp.where(broken[:, None], jnp.nan, lse)
    out = out.astype(dtype) if divisor is None else quantize(out, divisor, dtype)
    return (out, lse) if return_lse else out


def _minus(positions: Array, length: int) -> Array:
    """Positions less `length`, without leaving int32."""
    return jnp.maximum(positions, length - 2**31) - length


def _prefix_blocks(length: Any, spec: CacheSpec, metadata: AttentionMetadata) -> int:
    number = int_or_none(length)
    if number is None or isinstance(length, bool):
        bad_type("common_prefix_len", length, "a static int")
    if number < 0 or number % spec.block_size:
        bad_value("common_prefix_len", length, f"a multiple of block_size ({spec.block_size}), at least 0")
    most = metadata.block_table.shape[1] * spec.block_size
    if metadata.max_seq_len is not None:
        most = min(most, int(metadata.max_seq_len))
    if number > most:
        bad_value("common_prefix_len", length, f"at most the longest sequence that the metadata allows ({most})")
    return number // spec.block_size


def _sharing(metadata: AttentionMetadata, prefix: int, block_size: int) -> tuple[Bool[Array, " S"], Bool[Array, " S"]]:
    """Which sequences have queries and keys, and which of them lead with the first such row's prefix, all their queries past it."""
    lens = metadata.query_start_loc[1:] - metadata.query_start_loc[:-1]
    live = (lens > 0) & (metadata.seq_lens > 0)
    blocks = metadata.block_table[:, :prefix]
    same = jnp.all(blocks == blocks[jnp.argmax(live)][None], axis=1)
    before = metadata.seq_lens - lens if metadata.causal else metadata.seq_lens
    return live, same & (before >= prefix * block_size)


def _check_sharing(live: Array, shares: Array, length: int) -> None:
    if isinstance(live, Tracer) or isinstance(shares, Tracer):
        return
    broken = np.flatnonzero(np.asarray(live & ~shares))
    if broken.size:
        rule = "tokens that every sequence with queries leads with, in the same blocks and before its first query"
        bad_value("common_prefix_len", length, f"a number of {rule}; sequence {broken[0]} does not")


def _prefix_metadata(metadata: AttentionMetadata, live: Array, prefix: int, block_size: int, num_tokens: int) -> AttentionMetadata:
    """All tokens as one sequence over the shared blocks. Sequences without keys are among them; their part is dropped at the merge."""
    starts = metadata.query_start_loc
    return AttentionMetadata(
        jnp.stack([jnp.zeros_like(starts[-1]), starts[-1]]),
        jnp.where(jnp.any(live), prefix * block_size, 0).astype(jnp.int32)[None],
        metadata.block_table[jnp.argmax(live), :prefix][None],
        metadata.slot_mapping,
        max_query_len=num_tokens,
        max_seq_len=prefix * block_size,
        causal=False,
        block_size=block_size,
    )


def _suffix_metadata(metadata: AttentionMetadata, prefix: int, block_size: int) -> AttentionMetadata:
    """Each sequence without its prefix. Positions count from the prefix's end, for queries and keys alike."""
    longest = metadata.max_seq_len
    return replace(
        metadata,
        seq_lens=jnp.maximum(metadata.seq_lens - prefix * block_size, 0),
        block_table=metadata.block_table[:, prefix:],
        max_seq_len=None if longest is None else max(int(longest) - prefix * block_size, 0),
    )


def sequence_of_tokens(metadata: AttentionMetadata, num_tokens: int) -> Array:
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    found = jnp.searchsorted(metadata.query_start_loc, tokens, side="right") - 1
    return jnp.clip(found, 0, metadata.seq_lens.shape[0] - 1)
