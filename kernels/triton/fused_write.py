"""Rotary embedding and the cache write in one pass over the tokens, after the norm of queries and keys if asked: one kernel for all three.

Every element is read once and written once. What goes into the cache is the rounded key that also comes back, so that the fused call stores
the bits that separate calls do.
"""

import triton
import triton.language as tl

from .cache_write import load_rows, write_rows
from .common import side_base
from .rope import head_rows, load_cos_sin, load_head, normed_head, rotate, rotate_heads, store_turned
from .slots import side_scale, slot_offsets, store_channels, to_stored


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
    if group < Q_GROUPS:
        rotate_heads(
            q_out, query, q_weight, token, group * HEADS, num_tokens, positions, cos_sin, HEADS, NUM_HEADS, Q_ROW, HEAD_SIZE, NEOX, HALF,
            HALF_PAD, REST_PAD, NUM_POSITIONS, SECTION, INTERLEAVED, EPS, Q_KIND, INTERPRETED,
        )  # fmt: skip
    else:
        # As `rotate_heads`, with each head's value beside it and both into the cache.
        k_head = (group - Q_GROUPS) * HEADS
        k_rows, k_ok = head_rows(key + K_START, token, k_head, num_tokens, NUM_KV_HEADS, K_ROW, HEAD_SIZE)
        k_ahead = load_head(k_rows, k_ok, NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD)
        v_ahead = load_rows(value + V_START, k_head, token, k_ok, K_ROW, HEAD_SIZE, HEAD_PAD)
        slot = tl.load(slot_mapping + token, mask=is_token, other=-1)
        layer_index = tl.load(layer)
        k_cos, k_sin = load_cos_sin(cos_sin, positions, token, is_token, num_tokens, NUM_POSITIONS, HALF, HALF_PAD, SECTION, INTERLEAVED)
        offsets = slot_offsets(slot, BLOCK_SIZE, K_SIDE)
        for i in tl.static_range(HEADS):
            # A group may end past the last head: whose scale and place are then head 0's, and nothing is stored.
            real = tl.where(k_head + i < NUM_KV_HEADS, k_head + i, 0)
            k_first, k_second, k_rest = k_ahead
            v_rows = v_ahead
            if i + 1 < HEADS:
                k_rows, k_ok = head_rows(key + K_START, token, k_head + i + 1, num_tokens, NUM_KV_HEADS, K_ROW, HEAD_SIZE)
                k_ahead = load_head(k_rows, k_ok, NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD)
                v_ahead = load_rows(value + V_START, k_head + i + 1, token, k_ok, K_ROW, HEAD_SIZE, HEAD_PAD)
            key_scale = side_scale(k_scale, layer_index, real, STORED, K_SCALE_HEADS)
            value_scale = side_scale(v_scale, layer_index, real, STORED, V_SCALE_HEADS)
            k_first, k_second, k_rest = normed_head(
                k_first, k_second, k_rest, k_weight, NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD, EPS, K_KIND, INTERPRETED
            )  # fmt: skip
            k_first, k_second = rotate(k_first, k_second, k_cos, k_sin, K_KIND, INTERPRETED)
            k_to, k_is_row = head_rows(k_out, token, k_head + i, num_tokens, NUM_KV_HEADS, NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE)
            store_turned(k_to, k_is_row, k_first, k_second, k_rest, NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD)
            store_head(
                side_base(cache, layer_index, real, K_SIDE, STORED), offsets, k_is_row & (slot >= 0) & (slot < NUM_SLOTS), key_scale,
                k_first, k_second, k_rest, NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD, STORED, HARDWARE_FP8, INTERPRETED, K_SIDE,
            )  # fmt: skip
            write_rows(
                cache, v_rows, value_scale, layer_index, real, slot, k_is_row, HEAD_SIZE, HEAD_PAD,
                NUM_SLOTS, BLOCK_SIZE, STORED, HARDWARE_FP8, INTERPRETED, V_SIDE,
            )  # fmt: skip
