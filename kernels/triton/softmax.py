"""The online softmax, on the device: one tile of keys and values joins the running state of a block of rows. Scores are in base 2."""

import triton
import triton.language as tl

from .dtypes import cast, to_compute
from .kv_block import fetch_tile, load_keys, load_values
from .masks import sees
from .query import LOG2E, reload_query
from .spec import SoftmaxState


@triton.jit
def initial_state(sinks, head, ok, skipped, S: tl.constexpr):
    """State of rows that have seen no key; where there are sinks and no tile was `skipped`, the sink's logit is in it."""
    BLOCK_M: tl.constexpr = S.block_m
    VALUE_PAD: tl.constexpr = S.value_pad
    if sinks is not None:
        # The comparison is one of vectors: Triton's interpreter turns a mask `&` a scalar into integers.
        row_max = LOG2E * tl.load(sinks + head, mask=ok & (head * 0 + skipped == 0), other=float("-inf"))
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    else:
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return SoftmaxState(tl.zeros([BLOCK_M, VALUE_PAD], tl.float32), row_sum, row_max)


@triton.jit
def decoded(x, S: tl.constexpr):
    """Stored keys or values in the dtype of the matrix products."""
    STORED: tl.constexpr = S.kv.dtype
    COMPUTE: tl.constexpr = S.compute_dtype
    return to_compute(x, STORED, COMPUTE, S.hardware_fp8)


@triton.jit
def reloaded_scores(rows, keys, ids, tile, visible, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, S: tl.constexpr):
    """[block_m, block_n] products of the rows and a tile's keys, some channels at a time."""
    BLOCK_M: tl.constexpr = S.block_m
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, S.head_pad, S.reload_query, num_stages=1):
        d = first + tl.arange(0, S.reload_query)
        k = load_keys(keys.key_base, ids, tile, d, visible, MASKED, BLOCK_N, S)
        q = reload_query(rows.source, tile, d, S)
        s = tl.dot(q, decoded(k, S), s, input_precision="ieee")
    return s


@triton.jit
def tanh_of_exponent(t):
    """tanh(x) from t = 2 x log2(e), with a relative error of 2e-7 at every magnitude.

    1 - 2 / (1 + exp2(t)) reaches -1 and 1 without NaN, but cancels where x is small. There an odd polynomial replaces it, fitted to
    tanh on |x| < 0.5 (Chebyshev interpolation in t * t).
    """
    u = t * t
    odd = t * (0.34657359 + u * (-0.0138759166 + u * (0.000666248787 + u * (-3.18210841e-05 + u * 1.23580696e-06))))
    return tl.where(tl.abs(t) < LOG2E, odd, 1.0 - 2.0 / (1.0 + tl.exp2(t)))


@triton.jit
def biased_scores(s, rows, keys, tile, key, visible, MASKED: tl.constexpr, S: tl.constexpr):
    """Base-2 scores after soft cap, ALiBi, bias and mask, -inf for a key that its row does not see; `s` are the products."""
    if S.row_factor:
        s = s * rows.factor[:, None]
    else:
        s = s * rows.factor
    if S.soft_cap != 0.0:
        if S.rounds_past_tanh:
            s = (S.soft_cap * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(s)))
        else:
            s = (S.soft_cap * LOG2E) * tanh_of_exponent(s)
    if S.has_alibi:
        s += rows.slope[:, None] * (key[None, :] - rows.position[:, None]).to(tl.float32)
    if S.bias_columns > 0:
        column = key - keys.context
        bias_ok = rows.bias_ok[:, None] & ((column >= 0) & (column < S.bias_columns))[None, :]
        bias = tl.load(rows.bias[:, None] + column[None, :], mask=bias_ok, other=0.0)
        s = tl.where(bias == float("-inf"), bias, s + LOG2E * bias)  # a bias of -inf is a mask, also of a NaN key
    if MASKED:
        s = tl.where(sees(visible, key, rows, tile, S), s, float("-inf"))
    return s


@triton.jit
def add_guarded_values(acc, p, v, s, rows, keys, ids, tile, key, visible, BLOCK_N: tl.constexpr, S: tl.constexpr):
    """`acc` plus weights times values, where a key that only some rows see can hold NaN or Inf: 0 * NaN must not reach the other rows.

    Rows that see such a key get NaN, through a product past float32's range that is added to the same accumulator: another accumulator
    would not fit the registers.
    """
    COMPUTE: tl.constexpr = S.compute_dtype
    spoilt = ~(tl.abs(v.to(tl.float32)) < float("inf"))
    v = tl.where(spoilt, 0.0, v).to(v.dtype)
    acc = tl.dot(cast(p, COMPUTE), v, acc, input_precision="ieee")
    if tl.max(tl.max(spoilt.to(tl.int32), 1), 0) > 0:
        WIDE_DTYPE: tl.constexpr = "float32" if COMPUTE == "float32" else "bfloat16"
        if S.amd and S.bias_columns == 0 and S.value_pad <= 256:
            # Rare path: reloads the values and repeats the mask, since keeping them costs every tile registers. As in `reload_query`,
            # `tile >> 30` is always 0.
            again = keys.value_base + (tile >> 30) * S.value_pad
            stored = load_values(again, ids, tile, visible, True, BLOCK_N, S)
            bad = ~(tl.abs(decoded(stored, S).to(tl.float32)) < float("inf"))
            seen = sees(visible, key, rows, tile, S)
        else:
            bad = spoilt
            seen = s != float("-inf")
        seen = cast(tl.where(seen, 1e38, 0.0), WIDE_DTYPE)
        acc = tl.dot(seen, cast(tl.where(bad, 1e38, 0.0), WIDE_DTYPE), acc, input_precision="ieee")
        acc = tl.where(tl.abs(acc) == float("inf"), float("nan"), acc)
    return acc


@triton.jit
def attend_tile(
    state,  # SoftmaxState
    rows,  # QueryRows
    keys,  # SequenceKeys
    ids,  # i32, or [block_n] i32: see `block_ids`
    tile,  # i32: number of the tile in its sequence
    MASKED: tl.constexpr,
    NAN_SAFE: tl.constexpr,
    FROZEN_MAX: tl.constexpr,
    PARTIAL_SUMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    S: tl.constexpr,
):
    """The state after one more tile.

    NAN_SAFE: a NaN key that only some rows see does not reach the others; otherwise the caller looks for NaN in the result. Keys that no
    row sees never matter.
    FROZEN_MAX: the row maximum stays as it is and nothing is rescaled, see `attend_keys`.
    PARTIAL_SUMS: partial sums in the state's `row_sum`, 0 for one sum.
    """
    GUARDED: tl.constexpr = MASKED and NAN_SAFE
    BLOCK_M: tl.constexpr = S.block_m
    COMPUTE: tl.constexpr = S.compute_dtype
    KV: tl.constexpr = S.kv
    KEY: tl.constexpr = S.kv.key
    VALUE: tl.constexpr = S.kv.value
    acc, row_sum, row_max = state
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    visible = (key >= keys.begin) & (key < keys.end)

    if S.reload_query > 0:
        s = reloaded_scores(rows, keys, ids, tile, visible, GUARDED, BLOCK_N, S)
    else:
        if keys.descriptor is not None and not GUARDED:
            k = tl.trans(fetch_tile(keys.descriptor, keys.key_place, ids, tile, BLOCK_N, KEY, KV))
        else:
            k = load_keys(keys.key_base, ids, tile, tl.arange(0, S.head_pad), visible, GUARDED, BLOCK_N, S)
        if S.values_first:
            v = load_values(keys.value_base, ids, tile, visible, MASKED, BLOCK_N, S)
        s = tl.dot(rows.query, decoded(k, S), input_precision="ieee")

    if S.plain_scores and not MASKED:
        if FROZEN_MAX:
            new_max = row_max
        else:
            new_max = tl.maximum(row_max, tl.max(s, 1) * rows.factor)
        if S.row_factor:
            p = tl.exp2(s * rows.factor[:, None] - new_max[:, None])
        else:
            p = tl.exp2(s * rows.factor - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
    else:
        s = biased_scores(s, rows, keys, tile, key, visible, MASKED, S)
        if FROZEN_MAX:
            new_max = row_max
            floor = row_max
        else:
            new_max = tl.maximum(row_max, tl.max(s, 1))
            # The maximum of a row that has seen no key yet is -inf, and -inf - -inf would be NaN.
            floor = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - floor[:, None])
        rescale = tl.exp2(row_max - floor)
    if PARTIAL_SUMS > 0:
        more = tl.sum(tl.reshape(p, (BLOCK_M, BLOCK_N // PARTIAL_SUMS, PARTIAL_SUMS)), 1)
    else:
        more = tl.sum(p, 1)
    if FROZEN_MAX:
        row_sum = row_sum + more
        if tile < 0:  # Dead branch: without a use of acc between two products ptxas serialises them (C7515).
            acc = acc * 0.5
    else:
        row_sum = row_sum * (rescale[:, None] if PARTIAL_SUMS > 0 else rescale) + more
        acc = acc * rescale[:, None]

    if keys.descriptor is not None and not GUARDED:
        v = fetch_tile(keys.descriptor, keys.value_place, ids, tile, BLOCK_N, VALUE, KV)
        if MASKED and not S.optimistic:  # otherwise 0 * NaN shows in the result
            v = tl.where(visible[:, None], v, 0)
    elif not S.values_first or S.reload_query > 0:
        v = load_values(keys.value_base, ids, tile, visible, MASKED, BLOCK_N, S)
    v = decoded(v, S)
    if GUARDED and not S.rows_see_same_keys:
        acc = add_guarded_values(acc, p, v, s, rows, keys, ids, tile, key, visible, BLOCK_N, S)
    else:
        acc = tl.dot(cast(p, COMPUTE), v, acc, input_precision="ieee")
    return SoftmaxState(acc, row_sum, new_max)
