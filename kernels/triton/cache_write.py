"""The cache writer: this step's keys and values into their slots, in any layout and dtype."""

import triton
import triton.language as tl

from .common import side_base
from .slots import side_scale, slot_offsets, store_channels, to_stored


@triton.jit
def load_rows(rows, head, token, is_token, ROW: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr):
    """One head of a block of tokens; `rows` points at [tokens, ROW] with the head at head * HEAD_SIZE."""
    d = tl.arange(0, HEAD_PAD)
    source = rows + head * HEAD_SIZE + token.to(tl.int64)[:, None] * ROW + d[None, :]
    return tl.load(source, mask=is_token[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)


@triton.jit
def write_rows(
    cache,
    values,
    scale,
    layer,
    head,
    slot,
    is_token,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    SIDE: tl.constexpr,
):
    """One side of one head of a block of tokens into its slots."""
    d = tl.arange(0, HEAD_PAD)
    ok = is_token & (slot >= 0) & (slot < NUM_SLOTS)
    codes = to_stored(values, scale, STORED, HARDWARE_FP8, INTERPRETED)
    store_channels(side_base(cache, layer, head, SIDE, STORED), slot_offsets(slot, BLOCK_SIZE, SIDE), d, codes, ok, d < HEAD_SIZE, SIDE)


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
    # Every load before the first use of one: a program is too short to wait more than once.
    slot = tl.load(slot_mapping + token, mask=is_token, other=-1)
    layer_index = tl.load(layer)
    key_rows = load_rows(key, head, token, is_token, NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, HEAD_PAD)
    value_rows = load_rows(value, head, token, is_token, NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, HEAD_PAD)
    key_scale = side_scale(k_scale, layer_index, head, STORED, K_SCALE_HEADS)
    value_scale = side_scale(v_scale, layer_index, head, STORED, V_SCALE_HEADS)
    write_rows(
        cache, key_rows, key_scale, layer_index, head, slot, is_token, HEAD_SIZE, HEAD_PAD,
        NUM_SLOTS, BLOCK_SIZE, STORED, HARDWARE_FP8, INTERPRETED, K_SIDE,
    )  # fmt: skip
    write_rows(
        cache, value_rows, value_scale, layer_index, head, slot, is_token, HEAD_SIZE, HEAD_PAD,
        NUM_SLOTS, BLOCK_SIZE, STORED, HARDWARE_FP8, INTERPRETED, V_SIDE,
    )  # fmt: skip
