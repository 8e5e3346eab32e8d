"""The cache writer: this step's keys and values into their slots, in any layout and dtype."""

import triton
import triton.language as tl

from .slots import side_scale, slot_offsets, store_channels, to_stored
from .tiles import side_base


@triton.jit
def write_rows(
    cache,
    rows,
    scales,
    layer,
    head,
    token,
    slot,
    is_token,
    ROW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STORED: tl.constexpr,
    SCALE_HEADS: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    SIDE: tl.constexpr,
):
    """One side of one head of a block of tokens; `rows` points at [tokens, ROW] with the head at head * HEAD_SIZE."""
    d = tl.arange(0, HEAD_PAD)
    d_ok = d < HEAD_SIZE
    ok = is_token & (slot >= 0) & (slot < NUM_SLOTS)
    source = rows + head * HEAD_SIZE + token.to(tl.int64)[:, None] * ROW + d[None, :]
    values = tl.load(source, mask=ok[:, None] & d_ok[None, :], other=0.0)
    codes = to_stored(values, side_scale(scales, layer, head, STORED, SCALE_HEADS), STORED, HARDWARE_FP8, INTERPRETED)
    store_channels(side_base(cache, layer, head, SIDE, STORED), slot_offsets(slot, BLOCK_SIZE, SIDE), d, codes, ok, d_ok, SIDE)


@triton.jit
def update_cache_kernel(
    cache,
    key,
    value,
    slot_mapping,
    k_scale,
    v_scale,
    layer,
    num_tokens,
    TOKENS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
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
    """Grid: blocks of TOKENS tokens x KV heads."""
    program = tl.program_id(0)
    head = program % NUM_KV_HEADS
    token = program // NUM_KV_HEADS * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    slot = tl.load(slot_mapping + token, mask=is_token, other=-1)
    layer_index = tl.load(layer)
    write_rows(
        cache, key, k_scale, layer_index, head, token, slot, is_token, NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, HEAD_PAD,
        NUM_SLOTS, BLOCK_SIZE, STORED, K_SCALE_HEADS, HARDWARE_FP8, INTERPRETED, K_SIDE,
    )  # fmt: skip
    write_rows(
        cache, value, v_scale, layer_index, head, token, slot, is_token, NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, HEAD_PAD,
        NUM_SLOTS, BLOCK_SIZE, STORED, V_SCALE_HEADS, HARDWARE_FP8, INTERPRETED, V_SIDE,
    )  # fmt: skip
