"""Rotary embedding and the cache write in one pass over the tokens, after the norm of queries and keys if asked: one kernel for all three.

Every element is read once and written once. What goes into the cache is the rounded key that also comes back, so that the fused call stores
the bits that separate calls do.
"""

import triton
import triton.language as tl

from .rotary import load_cos_sin, load_pairs, load_rest, rotate, store_pairs, store_rest
from .slots import round_to, side_scale, slot_offsets, store_channels, to_stored
from .tiles import side_base
from .writers import write_rows


@triton.jit
def normed_head(
    rows,
    is_row,
    weight,
    NEOX: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    REST_PAD: tl.constexpr,
    EPS: tl.constexpr,
    KIND: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """(first, second, rest) of one head, float32: as loaded, or, where there is a weight, round(x * rsqrt(mean(x^2) + EPS) * weight)."""
    first, second = load_pairs(rows, is_row, NEOX, HALF, HALF_PAD)
    if REST_PAD > 0:
        rest = load_rest(rows, is_row, 2 * HALF, HEAD_SIZE, REST_PAD)
    else:
        rest = first
    if weight is not None:
        squares = tl.sum(first * first + second * second, 1)
        if REST_PAD > 0:
            squares += tl.sum(rest * rest, 1)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, HEAD_SIZE * 1.0) + EPS))[:, None]
        weights = weight + tl.zeros([1], tl.int32)
        always = tl.full([1], True, tl.int1)
        first_weight, second_weight = load_pairs(weights, always, NEOX, HALF, HALF_PAD)
        first = round_to(first * inverse * first_weight, KIND, INTERPRETED).to(tl.float32)
        second = round_to(second * inverse * second_weight, KIND, INTERPRETED).to(tl.float32)
        if REST_PAD > 0:
            rest = rest * inverse * load_rest(weights, always, 2 * HALF, HEAD_SIZE, REST_PAD)
    return first, second, rest


@triton.jit
def store_head(
    head_base,
    slots,
    slot_ok,
    scale,
    first,
    second,
    rest,
    NEOX: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    REST_PAD: tl.constexpr,
    STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    SIDE: tl.constexpr,
):
    """A rotated head into its slots."""
    first = to_stored(first, scale, STORED, HARDWARE_FP8, INTERPRETED)
    second = to_stored(second, scale, STORED, HARDWARE_FP8, INTERPRETED)
    j = tl.arange(0, HALF_PAD)
    if NEOX:
        store_channels(head_base, slots, j, first, slot_ok, j < HALF, SIDE)
        store_channels(head_base, slots, j + HALF, second, slot_ok, j < HALF, SIDE)
    else:
        i = tl.arange(0, 2 * HALF_PAD)
        both = tl.reshape(tl.join(first, second), [first.shape[0], 2 * HALF_PAD])
        store_channels(head_base, slots, i, both, slot_ok, i < 2 * HALF, SIDE)
    if REST_PAD > 0:
        i = 2 * HALF + tl.arange(0, REST_PAD)
        rest = to_stored(rest, scale, STORED, HARDWARE_FP8, INTERPRETED)
        store_channels(head_base, slots, i, rest, slot_ok, i < HEAD_SIZE, SIDE)


@triton.jit
def rope_update_kernel(
    q_out,
    k_out,
    cache,
    query,
    key,
    value,
    q_weight,
    k_weight,
    positions,
    cos_sin,
    slot_mapping,
    k_scale,
    v_scale,
    layer,
    num_tokens,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    K_START: tl.constexpr,
    V_START: tl.constexpr,
    NEOX: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    SECTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EPS: tl.constexpr,
    Q_KIND: tl.constexpr,
    K_KIND: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STORED: tl.constexpr,
    K_SCALE_HEADS: tl.constexpr,
    V_SCALE_HEADS: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    K_SIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
):
    """Grid: blocks of TOKENS tokens x groups of HEADS query heads, then of HEADS KV heads.

    Queries lie at rows of Q_ROW elements, keys and values at rows of K_ROW from K_START and V_START on: apart, or in one qkv buffer.
    """
    Q_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    GROUPS: tl.constexpr = Q_GROUPS + (NUM_KV_HEADS + HEADS - 1) // HEADS
    program = tl.program_id(0)
    group = program % GROUPS
    token = program // GROUPS * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    long_token = token.to(tl.int64)
    cos, sin = load_cos_sin(cos_sin, positions, token, is_token, num_tokens, NUM_POSITIONS, HALF, HALF_PAD, SECTION, INTERLEAVED)
    if group < Q_GROUPS:
        for i in tl.static_range(HEADS):
            head = group * HEADS + i
            ok = token < tl.where(head < NUM_HEADS, num_tokens, 0)
            rows = query + long_token * Q_ROW + head * HEAD_SIZE
            out = q_out + long_token * (NUM_HEADS * HEAD_SIZE) + head * HEAD_SIZE
            first, second, rest = normed_head(
                rows, ok, q_weight, NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD, EPS, Q_KIND, INTERPRETED
            )  # fmt: skip
            first, second = rotate(first, second, cos, sin, Q_KIND, INTERPRETED)
            store_pairs(out, ok, first, second, NEOX, HALF, HALF_PAD)
            if REST_PAD > 0:
                store_rest(out, ok, round_to(rest, Q_KIND, INTERPRETED), 2 * HALF, HEAD_SIZE, REST_PAD)
    else:
        slot = tl.load(slot_mapping + token, mask=is_token, other=-1)
        offsets = slot_offsets(slot, BLOCK_SIZE, K_SIDE)
        layer_index = tl.load(layer)
        for i in tl.static_range(HEADS):
            head = (group - Q_GROUPS) * HEADS + i
            ok = token < tl.where(head < NUM_KV_HEADS, num_tokens, 0)
            # Names of their own: Triton joins what both branches name, and keys may have another dtype than queries.
            k_rows = key + long_token * K_ROW + (K_START + head * HEAD_SIZE)
            k_to = k_out + long_token * (NUM_KV_HEADS * HEAD_SIZE) + head * HEAD_SIZE
            k_first, k_second, k_rest = normed_head(
                k_rows, ok, k_weight, NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD, EPS, K_KIND, INTERPRETED
            )  # fmt: skip
            k_first, k_second = rotate(k_first, k_second, cos, sin, K_KIND, INTERPRETED)
            store_pairs(k_to, ok, k_first, k_second, NEOX, HALF, HALF_PAD)
            if REST_PAD > 0:
                k_rest = round_to(k_rest, K_KIND, INTERPRETED)
                store_rest(k_to, ok, k_rest, 2 * HALF, HEAD_SIZE, REST_PAD)
            # A group may end past the last head: whose scale and place are then head 0's, and nothing is stored.
            real = tl.where(head < NUM_KV_HEADS, head, 0)
            store_head(
                side_base(cache, layer_index, real, K_SIDE, STORED), offsets, ok & (slot >= 0) & (slot < NUM_SLOTS),
                side_scale(k_scale, layer_index, real, STORED, K_SCALE_HEADS), k_first, k_second, k_rest,
                NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD, STORED, HARDWARE_FP8, INTERPRETED, K_SIDE,
            )  # fmt: skip
            write_rows(
                cache, value + V_START, v_scale, layer_index, real, token, slot, ok, K_ROW, HEAD_SIZE, HEAD_PAD,
                NUM_SLOTS, BLOCK_SIZE, STORED, V_SCALE_HEADS, HARDWARE_FP8, INTERPRETED, V_SIDE,
            )  # fmt: skip
