"""The float64 oracle of attention: plain NumPy, token by token, written from docs/semantics.md and sharing no code with the library.

It takes *logical* arrays, so it judges any kernel whatever its cache layout: keys and values are `[B, N, H, D]`, where slot
`block * N + offset` is element `[block, offset]`. Every array is read with `np.asarray` and converted to float64, exactly, fp8 and bfloat16
included. Length, causality, window, key range and a bias of -inf are one mask; a masked key's K and V are dropped before any arithmetic, so
NaN and Inf there can't matter. Long sequences are taken in tiles of rows, see `reference_tiles`.
"""

from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float

from . import reference_tiles

Out = Float[np.ndarray, "T Hq Dv"]
Lse = Float[np.ndarray, "T Hq"]


def to_float64(array: Any) -> np.ndarray:
    """Exact values of an array of any float dtype."""
    return np.asarray(array).astype(np.float64)


def round_to(values: Any, dtype: Any, *, saturate: bool = False) -> np.ndarray:
    """Values rounded once, to nearest even, to `dtype`, whatever they are given in.

    A cast from float64 may round twice (through float32); this does not.

    Args:
      values: any floats.
      dtype: the result's dtype.
      saturate: clamp to the largest finite value first, as every fp8 store does; NaN stays NaN. Otherwise an overflow is infinite.
    """
    dtype = np.dtype(dtype)
    exact = to_float64(values)
    if dtype == np.float64:
        return exact
    info = ml_dtypes.finfo(dtype)
    largest = float(info.max)
    if saturate:
        exact = np.clip(exact, -largest, largest)
    finite = np.where(np.isfinite(exact), exact, 0.0)
    exponent = np.maximum(np.frexp(finite)[1] - 1, info.minexp)
    ulp = np.ldexp(1.0, exponent - info.nmant)
    rounded = np.where(np.isfinite(exact), np.rint(finite / ulp) * ulp, exact)
    rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, rounded), rounded)
    return rounded.astype(dtype)


def _per_head(name: str, value: Any, heads: int) -> np.ndarray:
    """A scale, scalar or [heads], as float64 [heads]."""
    array = to_float64(1.0 if value is None else value)
    if array.shape not in ((), (1,), (heads,)):
        raise ValueError(f"{name} has shape {array.shape}: it must be a scalar or [{heads}]")
    return np.broadcast_to(array, (heads,))


def _span(position: int, kv_len: int, causal: bool, window: int | None, key_range: np.ndarray | None = None) -> tuple[int, int]:
    """First and one past the last key that length, causality, window and a range leave to the query at `position`."""
    first, last = 0, (position + 1 if causal else kv_len)
    if window is not None and window > 0:
        first = max(first, position - window + 1)
        if not causal:
            last = min(last, position + window)
    if key_range is not None:
        first, last = max(first, int(key_range[0])), min(last, int(key_range[1]))
    return first, max(last, first)


def _attend(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    factor: float,
    cap: float | None,
    bias: np.ndarray,
    sink: float | None,
) -> tuple[np.ndarray | float, float]:
    """One query [D] and the keys [n, D] and values [n, Dv] that it sees; `bias` [n] is added after the cap, and -inf in it masks."""
    kept = bias != -np.inf
    scores, values = factor * (keys[kept] @ query), values[kept]
    if cap:
        scores = cap * np.tanh(scores / cap)
    scores = scores + bias[kept]
    logits = scores if sink is None else np.append(scores, sink)
    top = np.max(logits, initial=-np.inf)
    if top == -np.inf:
        return 0.0, -np.inf
    denominator = np.sum(np.exp(logits - top))
    lse = float(top + np.log(denominator))
    if scores.size == 0:
        return 0.0, lse
    return np.exp(scores - top) @ values / denominator, lse


def _attend_sequence(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    first: int,
    spans: list[tuple[int, int]],
    context: int,
    factor: float,
    cap: float | None,
    slopes: np.ndarray,
    sinks: np.ndarray | None,
    bias: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one sequence.

    Args:
      query: float64 [q, Hq, D].
      keys, values: float64 [n, H, D] and [n, H, Dv], of positions first to first + n.
      first: position of keys[0].
      spans: of each row, the keys that length, causality, window and key range leave.
      context: position of the first query.
      factor, cap: on the scores.
      slopes, sinks: [Hq].
      bias: [Lq, Lk], added to the keys of this step.
    """
    num_heads, group = query.shape[1], query.shape[1] // keys.shape[1]
    out, lse = np.zeros((len(query), num_heads, values.shape[-1])), np.full((len(query), num_heads), -np.inf)
    todo = range(len(spans))
    if len(query) * len(keys) >= reference_tiles.SCORES_FROM:
        todo = reference_tiles.attend_rows(query, keys, values, first, spans, context, factor, cap, slopes, sinks, bias, out, lse)
    for i in todo:
        a, b = spans[i]
        k = np.arange(a, b)
        extra = np.zeros(b - a)
        if bias is not None and i < bias.shape[0]:
            inside = (k >= context) & (k - context < bias.shape[1])
            extra[inside] = bias[i, k[inside] - context]
        for h in range(num_heads):
            out[i, h], lse[i, h] = _attend(
                query[i, h],
                keys[k - first, h // group],
                values[k - first, h // group],
                factor=factor,
                cap=cap,
                bias=extra + slopes[h] * (k - context - i),
                sink=None if sinks is None else float(sinks[h]),
            )
    return out, lse


def _key_ranges(key_range: Any, tokens: int) -> np.ndarray | None:
    """Start and stop of every token's keys as int64 [2, T]."""
    if key_range is None:
        return None
    start, stop = (np.broadcast_to(np.asarray(bound).astype(np.int64), (tokens,)) for bound in key_range)
    return np.stack([start, stop])


def _stored(out: np.ndarray, output_scale: Any, output_dtype: Any) -> np.ndarray:
    """An output in its dtype: fp8 codes over a scale, one rounding, or float64 as it is."""
    if output_scale is not None:
        quantum = float(to_float64(output_scale).reshape(()))
        return round_to(out / quantum, output_dtype or ml_dtypes.float8_e4m3fn, saturate=True)
    return out if output_dtype is None else round_to(out, output_dtype)


def reference_attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    query_start_loc: Any,
    seq_lens: Any,
    block_table: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    sliding_window: int | None = None,
    key_range: tuple[Any, Any] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    qq_bias: Any = None,
    q_scale: Any = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    output_scale: Any = None,
    output_dtype: Any = None,
    step_key: Any = None,
    step_value: Any = None,
) -> tuple[Out, Lse]:
    """Attention over a paged cache, in float64.

    Args:
      query: [T, Hq, D], any float dtype; fp8 codes are multiplied by `q_scale`.
      key_cache, value_cache: [B, N, H, D] and [B, N, H, Dv], logical cache of one layer, this step's tokens included; stored values,
        not yet scaled. Dv may differ from D.
      query_start_loc: [S+1] prefix sums of the query lengths. Tokens at or past its last entry are padding.
      seq_lens: [S] tokens of each sequence in the cache.
      block_table: [S, M]; only entries from the first to the last block that holds a key in reach of a row (length, causality, window,
        key range) are read.
      causal: False: every query sees the whole of its sequence (cross attention).
      scale: factor on the scores; None means D ** -0.5.
      sliding_window: W; None, 0 and negative numbers are off: keep p - k < W, and k - p < W where not causal.
      key_range: (start [T], stop [T]): row t sees keys start[t] <= k < stop[t] only, besides what the other masks leave.
      logits_soft_cap: c of c * tanh(score / c); None and 0 are off.
      alibi_slopes: [Hq], adds slope * (k - p).
      sinks: [Hq], natural-log logits in the denominator.
      qq_bias: [Lq, Lk], or [S, Lq, Lk] with a table for each sequence; adds qq_bias[i, k - ctx] where that element exists; -inf masks.
      q_scale: scalar factor on the query.
      k_scale, v_scale: scalar or [H] factors on the stored keys and values.
      output_scale: scalar; the result is then the fp8 codes of out / output_scale, clamped and rounded to nearest even.
      output_dtype: rounds the output once to this dtype; default float64, or float8_e4m3fn with `output_scale`.
      step_key, step_value: [T, H, D] and [T, H, Dv], keys and values of this step; where given, positions at or past the context are read
        from here, unscaled, and not from the cache (what ROCM_ATTN's prefill does with an fp8 cache).

    Returns:
      (out [T, Hq, Dv], lse float64 [T, Hq]). A token that sees no key gives 0 and lse -inf (the sink, if there are sinks); a padding token
      gives 0 and -inf. A sequence that reads a block outside [0, B) is NaN in all its rows, out and lse.

    Raises:
      IndexError: a key in reach lies past the table's width.
    """
    query, key_cache, value_cache = (np.asarray(array) for array in (query, key_cache, value_cache))
    starts, lengths, table = (np.asarray(array).astype(np.int64) for array in (query_start_loc, seq_lens, block_table))
    tokens, num_heads, head_size = query.shape
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    factor = (head_size**-0.5 if scale is None else float(scale)) * (1.0 if q_scale is None else float(to_float64(q_scale).reshape(())))
    sides = [
        (key_cache, _per_head("k_scale", k_scale, kv_heads), step_key),
        (value_cache, _per_head("v_scale", v_scale, kv_heads), step_value),
    ]
    ranges = _key_ranges(key_range, tokens)
    bias = None if qq_bias is None else to_float64(qq_bias)

    out, lse = np.zeros((tokens, num_heads, value_cache.shape[-1])), np.full((tokens, num_heads), -np.inf)
    for s in range(len(lengths)):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        q_len, kv_len = rows.stop - rows.start, int(lengths[s])
        context = kv_len - q_len
        spans = [
            _span(context + i, kv_len, causal, sliding_window, None if ranges is None else ranges[:, rows.start + i]) for i in range(q_len)
        ]
        seen = [span for span in spans if span[0] < span[1]]
        first, last = (min(a for a, _ in seen), max(b for _, b in seen)) if seen else (0, 0)
        cached = np.array([k for k in range(first, last) if step_key is None or k < context], np.int64)
        blocks, fresh = table[s, cached // block_size], np.arange(max(first, context), last)
        if np.any((blocks < 0) | (blocks >= num_blocks)):
            out[rows], lse[rows] = np.nan, np.nan
            continue
        keys, values = (np.full((last - first, kv_heads, cache.shape[-1]), np.nan) for cache, _, _ in sides)
        for gathered, (cache, scales, step) in zip((keys, values), sides, strict=True):
            gathered[cached - first] = to_float64(cache[blocks, cached % block_size]) * scales[:, None]
            if step is not None:
                gathered[fresh - first] = to_float64(np.asarray(step)[rows.start + fresh - context])
        out[rows], lse[rows] = _attend_sequence(
            to_float64(query[rows]),
            keys,
            values,
            first=first,
            spans=spans,
            context=context,
            factor=factor,
            cap=logits_soft_cap,
            slopes=np.zeros(num_heads) if alibi_slopes is None else to_float64(alibi_slopes),
            sinks=None if sinks is None else to_float64(sinks),
            bias=bias[s] if bias is not None and bias.ndim == 3 else bias,
        )
    return _stored(out, output_scale, output_dtype), lse


def reference_encoder_attention(
    query: Any,
    key: Any,
    value: Any,
    query_start_loc: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    sliding_window: int | None = None,
    key_range: tuple[Any, Any] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> tuple[Out, Lse]:
    """Self attention of packed sequences without a cache, in float64.

    Args:
      query: [T, Hq, D]; key, value: [T, H, D] and [T, H, Dv], packed alike: sequence s owns rows query_start_loc[s] up to
        query_start_loc[s+1].
      query_start_loc: [S+1].
      causal, scale, sliding_window, key_range, logits_soft_cap, alibi_slopes, sinks: see `reference_attention`; positions count from the
        first row of each sequence.

    Returns:
      (out float64 [T, Hq, Dv], lse float64 [T, Hq]); padding tokens give 0 and -inf.
    """
    query, key, value = (np.asarray(array) for array in (query, key, value))
    starts = np.asarray(query_start_loc).astype(np.int64)
    tokens, num_heads, head_size = query.shape
    ranges = _key_ranges(key_range, tokens)
    out, lse = np.zeros((tokens, num_heads, value.shape[-1])), np.full((tokens, num_heads), -np.inf)
    for s in range(len(starts) - 1):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        length = rows.stop - rows.start
        out[rows], lse[rows] = _attend_sequence(
            to_float64(query[rows]),
            to_float64(key[rows]),
            to_float64(value[rows]),
            first=0,
            spans=[_span(i, length, causal, sliding_window, None if ranges is None else ranges[:, rows.start + i]) for i in range(length)],
            context=0,
            factor=head_size**-0.5 if scale is None else float(scale),
            cap=logits_soft_cap,
            slopes=np.zeros(num_heads) if alibi_slopes is None else to_float64(alibi_slopes),
            sinks=None if sinks is None else to_float64(sinks),
            bias=None,
        )
    return out, lse


def reference_merge(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, output_scale: Any = None, output_dtype: Any = None
) -> tuple[Out, Lse]:
    """Two attention results over disjoint keys as one over both, in float64.

    Args:
      out_a, out_b: [T, Hq, Dv].
      lse_a, lse_b: [T, Hq], natural log. -inf, and +inf as FlashAttention 2 writes it, say that the side saw no key; its output is then not
        read.
      output_scale, output_dtype: see `reference_attention`.

    Returns:
      (out [T, Hq, Dv], lse float64 [T, Hq]); two empty sides give 0 and -inf.
    """
    outs, lses = (to_float64(out_a), to_float64(out_b)), [to_float64(lse) for lse in (lse_a, lse_b)]
    lses = [np.where(np.isinf(lse), -np.inf, lse) for lse in lses]
    top = np.maximum(*lses)
    shift = np.where(top == -np.inf, 0.0, top)
    weights = [np.exp(lse - shift) for lse in lses]
    total = weights[0] + weights[1]
    divisor = np.where(total == 0, 1.0, total)
    parts = [np.where(weight[..., None] == 0, 0.0, (weight / divisor)[..., None] * out) for weight, out in zip(weights, outs, strict=True)]
    with np.errstate(divide="ignore"):
        return _stored(parts[0] + parts[1], output_scale, output_dtype), shift + np.log(total)
