"""Attention over a paged cache, and over packed sequences without one: the public functions."""

from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from . import dispatch
from .cache import FP8_DTYPES, KVCache, check_cache, check_layer
from .calls import EncoderAttentionCall, PagedAttentionCall
from .checks import (
    MODEL_DTYPES,
    check_bool,
    check_head_ratio,
    check_query,
    check_static_tokens,
    check_tokens,
    optional_scalar,
    optional_vector,
    product,
    split_scale,
)
from .config import check_logits_soft_cap, check_window, is_array, is_floating
from .debug import check_step
from .derivatives import refuse_derivatives
from .errors import bad_type, bad_value
from .integers import INT32_MAX, saturate
from .literals import AttentionOptions, EncoderOptions, Implementation
from .metadata import AttentionMetadata, check_metadata

Out = Float[Array, "T Hq Dv"]
Lse = Float[Array, "T Hq"]


def output_dtype_of(query_dtype: np.dtype, output_dtype: Any, quantized: bool) -> np.dtype:
    """Dtype of an output: what was asked for, or the default for this query and for whether `output_scale` is given."""
    if output_dtype is None:
        if quantized:
            return jnp.dtype("float8_e4m3fn")
        return jnp.dtype("bfloat16") if query_dtype in FP8_DTYPES else query_dtype
    allowed = ", ".join(d.name for d in (FP8_DTYPES if quantized else MODEL_DTYPES))
    try:
        dtype = jnp.dtype(output_dtype)
    except Exception:
        bad_type("output_dtype", output_dtype, f"None or one of {allowed}")
    if quantized and dtype not in FP8_DTYPES:
        bad_value("output_dtype", dtype.name, f"an fp8 dtype where output_scale is given ({allowed})")
    if not quantized and dtype not in MODEL_DTYPES:
        hint = ": an fp8 output needs output_scale" if dtype in FP8_DTYPES else ""
        bad_value("output_dtype", dtype.name, f"one of {allowed}{hint}")
    return dtype


def split_window(window: Any) -> tuple[int | None, Int[Array, ""] | None]:
    """A window as (static, data): an int is static, a `jax.Array` is data, INT32_MAX where it is off."""
    window = check_window(window)
    if not isinstance(window, jax.Array):
        return window, None
    width = saturate(window).reshape(())
    return None, jnp.where(width > 0, width, INT32_MAX)


def check_key_range(key_range: Any, num_tokens: int) -> tuple[Int[Array, " T"], Int[Array, " T"]] | None:
    """`None`, or (start, stop), i32[T] each, from integers of any width."""
    if key_range is None:
        return None
    rule = f"None or a pair (start, stop) of integer arrays of shape [T] = [{num_tokens}]"
    if not isinstance(key_range, tuple | list) or len(key_range) != 2:
        bad_type("key_range", key_range, rule)
    for name, side in zip(("start", "stop"), key_range, strict=True):
        if not is_array(side) or tuple(side.shape) != (num_tokens,):
            bad_value(f"key_range {name}", side, rule)
        if not jnp.issubdtype(side.dtype, jnp.integer):
            bad_type(f"key_range {name}", side, rule)
    start, stop = map(saturate, key_range)
    return start, stop


def _optional_bias(qq_bias: Any, num_seqs: int) -> Float[Array, "*S Lq Lk"] | None:
    """`None`, f32[Lq, Lk] or f32[S, Lq, Lk]. Values of host arrays are checked: finite in float32, or -inf, which masks."""
    if qq_bias is None:
        return None
    rule = f"None or a float array of shape [Lq, Lk] or [S, Lq, Lk] with S = {num_seqs}"
    try:
        given = qq_bias if is_array(qq_bias) else np.asarray(qq_bias)
    except Exception:
        bad_value("qq_bias", qq_bias, rule)
    if len(given.shape) not in (2, 3) or (len(given.shape) == 3 and given.shape[0] != num_seqs):
        bad_value("qq_bias", qq_bias, rule)
    if not (is_floating(given.dtype) or np.issubdtype(given.dtype, np.integer)):
        bad_type("qq_bias", qq_bias, rule)
    if isinstance(given, np.ndarray):
        with np.errstate(over="ignore"):
            single = given.astype(np.float32)
        if np.any(np.isnan(single) | np.isposinf(single)):
            bad_value("qq_bias", qq_bias, "finite in float32, or -inf, which masks a key")
    return jnp.asarray(given, jnp.float32)


def paged_attention_call(
    query: Float[Array, "T Hq D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
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
) -> PagedAttentionCall:
    """The checked call that `paged_attention` makes of its arguments; see there."""
    spec = check_cache(cache)
    metadata = check_metadata(metadata, spec)
    query = check_query(query, spec, fp8=True)
    check_static_tokens("query", query)
    window, traced_window = split_window(sliding_window)
    ranges = check_key_range(key_range, query.shape[0])
    metadata = check_step(metadata, spec, query.shape[0], window if traced_window is None else traced_window, ranges)
    factor, traced = split_scale(scale, spec.head_size)
    check_bool("return_lse", return_lse)
    quantum = optional_scalar("output_scale", output_scale)
    return PagedAttentionCall(
        query=query,
        cache=cache,
        metadata=metadata,
        layer=check_layer(layer, spec),
        score_scale=product(traced, optional_scalar("q_scale", q_scale)),
        alibi_slopes=optional_vector("alibi_slopes", alibi_slopes, query, metadata),
        sinks=optional_vector("sinks", sinks, query, metadata),
        qq_bias=_optional_bias(qq_bias, metadata.seq_lens.shape[0]),
        key_range=ranges,
        traced_window=traced_window,
        output_scale=quantum,
        scale=factor,
        sliding_window=window,
        logits_soft_cap=check_logits_soft_cap(logits_soft_cap),
        output_dtype=output_dtype_of(query.dtype, output_dtype, quantum is not None),
        return_lse=return_lse,
    )


@overload
def paged_attention(
    query: Float[Array, "T Hq D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Out: ...
@overload
def paged_attention(
    query: Float[Array, "T Hq D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Out, Lse]: ...
@overload
def paged_attention(
    query: Float[Array, "T Hq D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Out | tuple[Out, Lse]: ...
def paged_attention(
    query: Float[Array, "T Hq D"],
    cache: KVCache,
    metadata: AttentionMetadata,
    *,
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
    """Attention of a ragged batch of queries over the keys and values of a paged cache.

    Ports AITER's `unified_attention` and vLLM's `chunked_prefill_paged_decode`. Prefill, chunked prefill and decode sequences mix freely.

    Args:
      query: [T, Hq, D], float32, float16, bfloat16 or fp8; sequence s owns rows `query_start_loc[s]` to `query_start_loc[s+1]`.
      cache: holds this step's keys and values already (see `update_cache`).
      metadata: see `AttentionMetadata`; `causal=False` is cross attention.
      layer: layer of the cache, an int or a traced i32 scalar.
      scale: factor on the scores; None means D ** -0.5. A float is static, an array is traced.
      sliding_window: W: a query at position p sees keys k with p - k < W, and k - p < W where not causal. None, 0 and -1 are off, and so is
        a window wider than any sequence (2**31 and more are allowed). An int is static; an integer scalar `jax.Array` is data, so that the
        layers of one `lax.scan` may differ, and any W below 1 is then off.
      key_range: (start, stop), i32[T] each: row t sees keys start[t] <= k < stop[t] alone, of those that causality, window and length leave
        it. With metadata of `causal=False` it says by itself what a row sees. Data; `purepage.key_ranges` makes it.
      logits_soft_cap: c, a static float: scores become c * tanh(score / c). None and 0 are off.
      alibi_slopes: f32[Hq]: adds slope * (k - p). Inside `shard_map` with heads divided over a mesh axis it may be the whole model's
        vector, of Hq times the axis' size; each shard takes its part. The axis is the one that the query varies over and the metadata does
        not; where two axes fit, or the heads lie on several, pass the shard's own part.
      sinks: f32[Hq]: adds exp(sink) to the softmax denominator; a natural-log logit, neither scaled nor capped. Of a shard or the whole
        model, as `alibi_slopes`. -inf is no sink.
      q_scale: f32 scalar that an fp8 query was divided by.
      output_scale: f32 scalar: returns out / output_scale, clamped and rounded to `output_dtype`, an fp8 dtype (default float8_e4m3fn).
      output_dtype: default: the query's dtype; bfloat16 for an fp8 query.
      qq_bias: f32[Lq, Lk], or f32[S, Lq, Lk] with a table for each sequence: adds qq_bias[i, j] to the score of this step's query i and
        key j of one sequence (tree attention). -inf masks the key, as causality does.
      return_lse: also return the log of the softmax denominator.
      implementation: None (best), "xla", "pallas", "triton" or "aiter".

    Returns:
      out [T, Hq, Dv], and with `return_lse` also lse f32[T, Hq] (natural log, sink included). Padding tokens and tokens that see no key
      give 0 and lse -inf (the sink where there is one). A key that is masked by length, causality, window, range or bias never reaches an
      output, whatever it holds. All rows of a sequence are NaN where a block id from its first to its last key that one of them may see is
      outside [0, B). Scores, and sums of values by weights of at most 1 each, must be finite in float32. There are no derivatives.

    Raises:
      ValueError, TypeError: a bad argument: its name, what it was, what it must be.
      UnsupportedError: the named implementation can't serve the call.
    """
    call = paged_attention_call(
        query,
        cache,
        metadata,
        layer=layer,
        scale=scale,
        sliding_window=sliding_window,
        key_range=key_range,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        q_scale=q_scale,
        output_scale=output_scale,
        output_dtype=output_dtype,
        qq_bias=qq_bias,
        return_lse=return_lse,
    )
    out, lse = dispatch.run("paged_attention", refuse_derivatives("paged_attention", call), implementation)
    return (out, lse) if return_lse else out


@overload
def encoder_attention(
    query: Float[Array, "T Hq D"],
    key: Float[Array, "T H D"],
    value: Float[Array, "T H Dv"],
    metadata: AttentionMetadata,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[EncoderOptions],
) -> Out: ...
@overload
def encoder_attention(
    query: Float[Array, "T Hq D"],
    key: Float[Array, "T H D"],
    value: Float[Array, "T H Dv"],
    metadata: AttentionMetadata,
    *,
    return_lse: Literal[True],
    **options: Unpack[EncoderOptions],
) -> tuple[Out, Lse]: ...
@overload
def encoder_attention(
    query: Float[Array, "T Hq D"],
    key: Float[Array, "T H D"],
    value: Float[Array, "T H Dv"],
    metadata: AttentionMetadata,
    *,
    return_lse: bool,
    **options: Unpack[EncoderOptions],
) -> Out | tuple[Out, Lse]: ...
def encoder_attention(
    query: Float[Array, "T Hq D"],
    key: Float[Array, "T H D"],
    value: Float[Array, "T H Dv"],
    metadata: AttentionMetadata,
    *,
    scale: Any = None,
    sliding_window: Any = None,
    key_range: Any = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    causal: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Out | tuple[Out, Lse]:
    """Self attention of packed sequences, without a cache. Ports vLLM's Triton prefill attention.

    Args:
      query: [T, Hq, D]; key: [T, H, D]; value: [T, H, Dv], packed alike, of one dtype: float32, float16 or bfloat16.
      metadata: only `query_start_loc` and `max_query_len` are read; a sequence's keys are its own tokens.
      scale: factor on the scores; None means D ** -0.5.
      sliding_window: W: token i sees j with |i - j| < W (W = 1: itself). None, 0 and -1 are off. It may be data, as in `paged_attention`.
      key_range: see `paged_attention`; keys count from the first token of each sequence.
      logits_soft_cap: c: scores become c * tanh(score / c). None and 0 are off.
      alibi_slopes: f32[Hq]: adds slope * (j - i) for key j of token i.
      sinks: f32[Hq]: adds exp(sink) to the softmax denominator.
      causal: token i sees j <= i only.
      return_lse: also return the log of the softmax denominator.
      implementation: see `paged_attention`.

    Returns:
      out [T, Hq, Dv] in the query's dtype, and with `return_lse` also lse f32[T, Hq]; padding tokens give 0 and lse -inf.

    Raises:
      ValueError, TypeError, UnsupportedError: see `paged_attention`.
    """
    metadata = check_metadata(metadata)
    key = check_tokens("key", key, None, None)
    _, heads, head_size = key.shape
    query = check_tokens("query", query, None, head_size)
    check_static_tokens("query", query)
    value = check_tokens("value", value, heads, None)
    check_head_ratio(query.shape[1], heads)
    for name, array in (("key", key), ("value", value)):
        if array.dtype != query.dtype:
            bad_type(name, array, f"of the query's dtype {query.dtype.name}")
        if array.shape[0] != query.shape[0]:
            bad_value(name, array, f"of the query's {query.shape[0]} tokens")
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    metadata = check_step(metadata, None, query.shape[0])
    factor, traced = split_scale(scale, head_size)
    window, traced_window = split_window(sliding_window)
    call = EncoderAttentionCall(
        query=query,
        key=key,
        value=value,
        metadata=metadata,
        score_scale=traced,
        alibi_slopes=optional_vector("alibi_slopes", alibi_slopes, query, metadata),
        sinks=optional_vector("sinks", sinks, query, metadata),
        key_range=check_key_range(key_range, query.shape[0]),
        traced_window=traced_window,
        scale=factor,
        sliding_window=window,
        logits_soft_cap=check_logits_soft_cap(logits_soft_cap),
        causal=causal,
        return_lse=return_lse,
    )
    return dispatch.run("encoder_attention", refuse_derivatives("encoder_attention", call), implementation)
