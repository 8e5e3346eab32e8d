"""The cache writer: stores the keys and values of this step's tokens in their slots, in every layout and dtype."""

import triton
import triton.language as tl

from .address import axis_offsets, dim_offsets, side_base
from .rounding import to_stored


@triton.jit
def side_scale(scales, layer, head, SCALE_HEADS: tl.constexpr, SLOTS: tl.constexpr):
    """The scale of one head of one layer; SCALE_HEADS is 1 where a layer has one scale."""
    if SLOTS.is_quantized:
        return tl.load(scales + layer * SCALE_HEADS + (head if SCALE_HEADS > 1 else 0))
    else:
        return 1.0


@triton.jit
def slot_offsets(slot, STRIDES: tl.constexpr, SLOTS: tl.constexpr):
    """Element offsets of slots within a layer and head, in 64 bits."""
    block = (slot // SLOTS.block_size).to(tl.int64) * STRIDES.block
    return block + axis_offsets(slot % SLOTS.block_size, STRIDES.token_outer, STRIDES.token, STRIDES.n_vector)


@triton.jit
def store_channels(head_base, slots, channel, values, slot_ok, channel_ok, STRIDES: tl.constexpr):
    """Stores values [tokens, channels] at slot offsets [tokens] and channels [channels] of one head.

    Where the tokens of a block are adjacent in memory, threads run along the tokens, so that neighbours write adjacent elements.
    """
    channels = dim_offsets(channel, STRIDES)
    if STRIDES.n_vector > 1 or STRIDES.token_outer == 1:
        pointers = head_base + (channels[:, None] + slots[None, :])
        tl.store(pointers, tl.trans(values), mask=channel_ok[:, None] & slot_ok[None, :])
    else:
        pointers = head_base + (slots[:, None] + channels[None, :])
        tl.store(pointers, values, mask=slot_ok[:, None] & channel_ok[None, :])


@triton.jit
def load_rows(rows, head, token, is_token, ROW: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr):
    """One head of a block of tokens, [tokens, PAD]; `rows` points to [tokens, ROW] with the head at column head * SIZE."""
    d = tl.arange(0, PAD)
    source = rows + head * SIZE + token.to(tl.int64)[:, None] * ROW + d[None, :]
    return tl.load(source, mask=is_token[:, None] & (d < SIZE)[None, :], other=0.0)


@triton.jit
def write_rows(
    cache, values, scale, layer, head, slot, is_token, STRIDES: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, S: tl.constexpr
):
    """Stores one side of one head of a block of tokens, [tokens, PAD] with SIZE channels, in its slots."""
    SLOTS: tl.constexpr = S.slots
    DTYPE: tl.constexpr = S.slots.dtype
    d = tl.arange(0, PAD)
    ok = is_token & (slot >= 0) & (slot < SLOTS.num_slots)
    codes = to_stored(values, scale, DTYPE, SLOTS.hardware_fp8, S.interpreted)
    base = side_base(cache, layer, head, STRIDES, DTYPE)
    store_channels(base, slot_offsets(slot, STRIDES, SLOTS), d, codes, ok, d < SIZE, STRIDES)


@triton.jit
def update_cache_kernel(
    cache,  # buffer of the cache, model dtype or bits of fp8; written in place
    key,  # [T, H, D] model dtype
    value,  # [T, H, Dv] model dtype
    slot_mapping,  # [T] i32; outside [0, B * N): the token is not stored
    k_scale,  # [L] or [L, H] f32, or None where the cache is not quantized
    v_scale,  # [L] or [L, H] f32, or None where the cache is not quantized
    layer,  # [1] i32
    num_tokens,  # i32: T
    S: tl.constexpr,  # UpdateSpec
):
    """Grid: blocks of tokens x KV heads."""
    SLOTS: tl.constexpr = S.slots
    KEY: tl.constexpr = S.slots.key
    VALUE: tl.constexpr = S.slots.value
    SIZE: tl.constexpr = S.head_size
    PAD: tl.constexpr = S.head_pad
    VALUE_SIZE: tl.constexpr = S.value_size
    VALUE_PAD: tl.constexpr = S.value_pad
    program = tl.program_id(0)
    head = program % S.num_kv_heads
    token = program // S.num_kv_heads * S.block_tokens + tl.arange(0, S.block_tokens)
    is_token = token < num_tokens
    # Every load is issued before the first use of one: the program is too short to wait more than once.
    slot = tl.load(slot_mapping + token, mask=is_token, other=-1)
    layer_index = tl.load(layer)
    key_rows = load_rows(key, head, token, is_token, S.num_kv_heads * SIZE, SIZE, PAD)
    value_rows = load_rows(value, head, token, is_token, S.num_kv_heads * VALUE_SIZE, VALUE_SIZE, VALUE_PAD)
    key_scale = side_scale(k_scale, layer_index, head, SLOTS.k_scale_heads, SLOTS)
    value_scale = side_scale(v_scale, layer_index, head, SLOTS.v_scale_heads, SLOTS)
    write_rows(cache, key_rows, key_scale, layer_index, head, slot, is_token, KEY, SIZE, PAD, S)
    write_rows(cache, value_rows, value_scale, layer_index, head, slot, is_token, VALUE, VALUE_SIZE, VALUE_PAD, S)
