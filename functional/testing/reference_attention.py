"""The float64 oracle of attention: plain NumPy, token by token, written from SEMANTICS.md Part I and sharing no code with the library.

It takes *logical* arrays, so it judges any kernel whatever its cache layout: keys and values are `[B, N, H, D]`, where slot
`block * N + offset` is element `[block, offset]`. Every array is read with `np.asarray` and converted to float64, exactly, fp8 and bfloat16
included. Only keys that a query sees are ever read: NaN, Inf and invalid block ids anywhere else can't matter, by construction.
"""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float

Out = Float[np.ndarray, "T Hq D"]
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


def _visible(position: int, kv_len: int, causal: bool, window: int | None) -> tuple[int, int]:
    """First and one past the last key that the query at `position` sees."""
    first, last = 0, (position + 1 if causal else kv_len)
    if window is not None:
        first = max(first, position - window + 1)
        if not causal:
            last = min(last, position + window)
    return first, max(last, first)


def _attend(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    factor: float,
    cap: float | None,
    bias: np.ndarray | float,
    sink: float | None,
) -> tuple[np.ndarray | float, float]:
    """One query [D] and the keys [n, D] and values [n, D] that it sees; `bias` [n] is added after the cap."""
    scores = factor * (keys @ query)
    if cap:
        scores = cap * np.tanh(scores / cap)
    scores = scores + bias
    kept = scores != -np.inf  # a bias of -inf is a mask
    scores, values = scores[kept], values[kept]
    logits = scores if sink is None else np.append(scores, sink)
    top = np.max(logits, initial=-np.inf)
    if top == -np.inf:
        return 0.0, -np.inf
    denominator = np.sum(np.exp(logits - top))
    lse = float(top + np.log(denominator))
    if scores.size == 0:
        return 0.0, lse
    return np.exp(scores - top) @ values / denominator, lse


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
      key_cache, value_cache: [B, N, H, D] logical cache of one layer, this step's tokens included; stored values, not yet scaled.
      query_start_loc: [S+1] prefix sums of the query lengths. Tokens at or past its last entry are padding.
      seq_lens: [S] tokens of each sequence in the cache.
      block_table: [S, M]; only entries of blocks that hold a visible key are read.
      causal: False: every query sees the whole of its sequence (cross attention).
      scale: factor on the scores; None means D ** -0.5.
      sliding_window: W, None is off: keep p - k < W, and k - p < W where not causal.
      logits_soft_cap: c of c * tanh(score / c); None and 0 are off.
      alibi_slopes: [Hq], adds slope * (k - p).
      sinks: [Hq], natural-log logits in the denominator.
      qq_bias: [Lq, Lk], adds qq_bias[i, k - ctx] where that element exists; -inf masks.
      q_scale: scalar factor on the query.
      k_scale, v_scale: scalar or [H] factors on the stored keys and values.
      output_scale: scalar; the result is then the fp8 codes of out / output_scale, clamped and rounded to nearest even.
      output_dtype: rounds the output once to this dtype; default float64, or float8_e4m3fn with `output_scale`.
      step_key, step_value: [T, H, D] keys and values of this step; where given, positions at or past the context are read from here,
        unscaled, and not from the cache (what ROCM_ATTN's prefill does with an fp8 cache).

    Returns:
      (out [T, Hq, D], lse float64 [T, Hq]). A token that sees no key gives 0 and lse -inf (the sink, if there are sinks); a padding token
      gives 0 and -inf.

    Raises:
      IndexError: a visible key lies in a block outside [0, B) or past the table's width.
    """
    query, key_cache, value_cache = (np.asarray(array) for array in (query, key_cache, value_cache))
    starts, lengths, table = (np.asarray(array).astype(np.int64) for array in (query_start_loc, seq_lens, block_table))
    tokens, num_heads, head_size = query.shape
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    group = num_heads // kv_heads
    factors = (head_size**-0.5 if scale is None else float(scale)) * (1.0 if q_scale is None else float(to_float64(q_scale).reshape(())))
    key_factor, value_factor = _per_head("k_scale", k_scale, kv_heads), _per_head("v_scale", v_scale, kv_heads)
    slopes = np.zeros(num_heads) if alibi_slopes is None else to_float64(alibi_slopes)
    sink_logits = None if sinks is None else to_float64(sinks)
    tree = None if qq_bias is None else to_float64(qq_bias)

    out, lse = np.zeros((tokens, num_heads, head_size)), np.full((tokens, num_heads), -np.inf)
    for s in range(len(lengths)):
        q_len, kv_len = int(starts[s + 1] - starts[s]), int(lengths[s])
        context = kv_len - q_len
        spans = [_visible(context + i, kv_len, causal, sliding_window) for i in range(q_len)]
        seen = [span for span in spans if span[0] < span[1]]
        first, last = (min(a for a, _ in seen), max(b for _, b in seen)) if seen else (0, 0)
        read = np.array([k for k in range(first, last) if step_key is None or k < context], np.int64)
        keys, values = np.full((2, last - first, kv_heads, head_size), np.nan)
        blocks = table[s, read // block_size]
        if np.any((blocks < 0) | (blocks >= num_blocks)):
            raise IndexError(f"sequence {s} sees a key in block {blocks[(blocks < 0) | (blocks >= num_blocks)][0]} of {num_blocks}")
        keys[read - first] = to_float64(key_cache[blocks, read % block_size]) * key_factor[:, None]
        values[read - first] = to_float64(value_cache[blocks, read % block_size]) * value_factor[:, None]
        if step_key is not None:
            fresh = np.arange(max(first, context), last)
            rows = int(starts[s]) + fresh - context
            keys[fresh - first] = to_float64(np.asarray(step_key)[rows])
            values[fresh - first] = to_float64(np.asarray(step_value)[rows])
        for i, (a, b) in enumerate(spans):
            position, row = context + i, int(starts[s]) + i
            k = np.arange(a, b)
            extra = np.zeros(b - a)
            if tree is not None and i < tree.shape[0]:
                inside = (k >= context) & (k - context < tree.shape[1])
                extra[inside] = tree[i, k[inside] - context]
            for h in range(num_heads):
                out[row, h], lse[row, h] = _attend(
                    to_float64(query[row, h]),
                    keys[a - first : b - first, h // group],
                    values[a - first : b - first, h // group],
                    factor=factors,
                    cap=logits_soft_cap,
                    bias=slopes[h] * (k - position) + extra,
                    sink=None if sink_logits is None else float(sink_logits[h]),
                )
    if output_scale is not None:
        quantum = float(to_float64(output_scale).reshape(()))
        return round_to(out / quantum, output_dtype or ml_dtypes.float8_e4m3fn, saturate=True), lse
    return (out if output_dtype is None else round_to(out, output_dtype)), lse


def reference_encoder_attention(
    query: Any,
    key: Any,
    value: Any,
    query_start_loc: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> tuple[Out, Lse]:
    """Self attention of packed sequences without a cache, in float64.

    Args:
      query: [T, Hq, D]; key, value: [T, H, D], packed alike: sequence s owns rows query_start_loc[s] to query_start_loc[s+1].
      query_start_loc: [S+1].
      causal, scale, sliding_window, logits_soft_cap, alibi_slopes, sinks: see `reference_attention`.

    Returns:
      (out float64 [T, Hq, D], lse float64 [T, Hq]); padding tokens give 0 and -inf.
    """
    query, key, value = (np.asarray(array) for array in (query, key, value))
    starts = np.asarray(query_start_loc).astype(np.int64)
    tokens, num_heads, head_size = query.shape
    group = num_heads // key.shape[1]
    out, lse = np.zeros((tokens, num_heads, head_size)), np.full((tokens, num_heads), -np.inf)
    for start, end in itertools.pairwise(starts):
        for i in range(int(end - start)):
            a, b = _visible(i, int(end - start), causal, sliding_window)
            for h in range(num_heads):
                out[start + i, h], lse[start + i, h] = _attend(
                    to_float64(query[start + i, h]),
                    to_float64(key[start + a : start + b, h // group]),
                    to_float64(value[start + a : start + b, h // group]),
                    factor=head_size**-0.5 if scale is None else float(scale),
                    cap=logits_soft_cap,
                    bias=0.0 if alibi_slopes is None else float(np.asarray(alibi_slopes)[h]) * (np.arange(a, b) - i),
                    sink=None if sinks is None else float(np.asarray(sinks)[h]),
                )
    return out, lse


def reference_merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Out, Lse]:
    """Two attention results over disjoint keys as one over both, in float64.

    Args:
      out_a, out_b: [T, Hq, D]; lse_a, lse_b: [T, Hq], natural log; -inf stands for no key, and that side's output is not read.

    Returns:
      (out float64 [T, Hq, D], lse float64 [T, Hq]); two empty sides give 0 and -inf.
    """
    outs, lses = (to_float64(out_a), to_float64(out_b)), (to_float64(lse_a), to_float64(lse_b))
    top = np.maximum(*lses)
    shift = np.where(top == -np.inf, 0.0, top)
    weights = [np.exp(lse - shift) for lse in lses]
    total = weights[0] + weights[1]
    divisor = np.where(total == 0, 1.0, total)
    parts = [np.where(weight[..., None] == 0, 0.0, (weight / divisor)[..., None] * out) for weight, out in zip(weights, outs, strict=True)]
    with np.errstate(divide="ignore"):
        return parts[0] + parts[1], shift + np.log(total)
