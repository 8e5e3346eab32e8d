"""Rotary embedding and the cache write in one pass over the tokens, after the norm of queries and keys where one is asked for.

Every element is read once and written once. The cache gets the rounded key that the call also returns, so the fused call stores the bits
that separate calls store.
"""

import triton
import triton.language as tl

from .address import side_base
from .cache_write import load_rows, side_scale, slot_offsets, store_channels, write_rows
from .rope import head_rows, interleaved, load_cos_sin, load_head, normed_head, rotate, rotate_heads, store_head
from .rounding import to_stored


@triton.jit
def store_key(head_base, slots, slot_ok, scale, first, second, rest, S: tl.constexpr):
    """Stores a rotated key in its slots."""
    KEY: tl.constexpr = S.slots.key
    DTYPE: tl.constexpr = S.slots.dtype
    first = to_stored(first, scale, DTYPE, S.slots.hardware_fp8, S.interpreted)
    second = to_stored(second, scale, DTYPE, S.slots.hardware_fp8, S.interpreted)
    j = tl.arange(0, S.half_pad)
    if S.is_neox:
        store_channels(head_base, slots, j, first, slot_ok, j < S.half, KEY)
        store_channels(head_base, slots, j + S.half, second, slot_ok, j < S.half, KEY)
    else:
        i = tl.arange(0, 2 * S.half_pad)
        store_channels(head_base, slots, i, interleaved(first, second, S), slot_ok, i < S.rotary_dim, KEY)
    if S.rest_pad > 0:
        i = S.rotary_dim + tl.arange(0, S.rest_pad)
        rest = to_stored(rest, scale, DTYPE, S.slots.hardware_fp8, S.interpreted)
        store_channels(head_base, slots, i, rest, slot_ok, i < S.head_size, KEY)


@triton.jit
def rope_update_kernel(
    query_out,  # [T, Hq, D] dtype of query
    key_out,  # [T, H, D] dtype of key
    cache,  # buffer of the cache, model dtype or bits of fp8; written in place
    query,  # [T, Hq, D] model dtype, or qkv [T, (Hq + H) * D + H * Dv]
    key,  # [T, H, D] model dtype, or qkv
    value,  # [T, H, Dv] model dtype, or qkv
    q_weight,  # [D] f32 of the norm, or None
    k_weight,  # [D] f32 of the norm, or None
    positions,  # [T] i32, [3, T] with mrope
    cos_sin,  # [P, R] float: cosines of the pairs, then their sines
    slot_mapping,  # [T] i32; outside [0, B * N): the token is not stored
    k_scale,  # [L] or [L, H] f32, or None where the cache is not quantized
    v_scale,  # [L] or [L, H] f32, or None where the cache is not quantized
    layer,  # [1] i32
    num_tokens,  # i32: T
    S: tl.constexpr,  # RotarySpec
):
    """Grid: blocks of tokens x (groups of query heads, then groups of KV heads)."""
    SLOTS: tl.constexpr = S.slots
    KEY: tl.constexpr = S.slots.key
    VALUE: tl.constexpr = S.slots.value
    VALUE_SIZE: tl.constexpr = S.value_size
    VALUE_PAD: tl.constexpr = S.value_pad
    STORED: tl.constexpr = S.slots.dtype
    QUERY_DTYPE: tl.constexpr = S.query_dtype
    KEY_DTYPE: tl.constexpr = S.key_dtype
    program = tl.program_id(0)
    group = program % S.groups
    token = program // S.groups * S.block_tokens + tl.arange(0, S.block_tokens)
    is_token = token < num_tokens
    if group < S.query_groups:
        q_head = group * S.block_heads
        rotate_heads(
            query_out, query, q_weight, token, q_head, num_tokens, positions, cos_sin, S.num_heads, S.query_row, QUERY_DTYPE, S
        )  # fmt: skip
    else:
        # As `rotate_heads`, with the value of each head beside its key and both stored in the cache.
        k_head = (group - S.query_groups) * S.block_heads
        k_rows, k_ok = head_rows(key + S.key_start, token, k_head, num_tokens, S.num_kv_heads, S.key_row, S)
        k_ahead = load_head(k_rows, k_ok, S)
        v_ahead = load_rows(value + S.value_start, k_head, token, k_ok, S.value_row, VALUE_SIZE, VALUE_PAD)
        slot = tl.load(slot_mapping + token, mask=is_token, other=-1)
        layer_index = tl.load(layer)
        k_cos, k_sin = load_cos_sin(cos_sin, positions, token, is_token, num_tokens, S)
        offsets = slot_offsets(slot, KEY, SLOTS)
        COUNT: tl.constexpr = S.block_heads
        for i in tl.static_range(COUNT):
            # A group can end past the last head. It then takes scale and place of head 0 and stores nothing.
            real = tl.where(k_head + i < S.num_kv_heads, k_head + i, 0)
            k_first, k_second, k_rest = k_ahead
            v_rows = v_ahead
            if i + 1 < COUNT:
                k_rows, k_ok = head_rows(key + S.key_start, token, k_head + i + 1, num_tokens, S.num_kv_heads, S.key_row, S)
                k_ahead = load_head(k_rows, k_ok, S)
                v_ahead = load_rows(value + S.value_start, k_head + i + 1, token, k_ok, S.value_row, VALUE_SIZE, VALUE_PAD)
            key_scale = side_scale(k_scale, layer_index, real, SLOTS.k_scale_heads, SLOTS)
            value_scale = side_scale(v_scale, layer_index, real, SLOTS.v_scale_heads, SLOTS)
            k_first, k_second, k_rest = normed_head(k_first, k_second, k_rest, k_weight, KEY_DTYPE, S)
            k_first, k_second = rotate(k_first, k_second, k_cos, k_sin, KEY_DTYPE, S.interpreted)
            k_to, k_is_row = head_rows(key_out, token, k_head + i, num_tokens, S.num_kv_heads, S.num_kv_heads * S.head_size, S)
            store_head(k_to, k_is_row, k_first, k_second, k_rest, S)
            key_base = side_base(cache, layer_index, real, KEY, STORED)
            key_ok = k_is_row & (slot >= 0) & (slot < S.slots.num_slots)
            store_key(key_base, offsets, key_ok, key_scale, k_first, k_second, k_rest, S)
            write_rows(cache, v_rows, value_scale, layer_index, real, slot, k_is_row, VALUE, VALUE_SIZE, VALUE_PAD, S)
