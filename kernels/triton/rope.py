"""Rotary embedding of one head of a block of tokens, on the device, after a norm where one is asked for, and the kernel without a cache.

A head is held as its rotated pairs, two tiles [tokens, half_pad] of first and second members, and the channels from rotary_dim on as a
third. NEOX pairs channel j with j + half, GPT-J 2j with 2j + 1. Both load and store 128 bits at a time.
"""

import triton
import triton.language as tl

from .rounding import round_to


@triton.jit
def load_pairs(rows, is_row, S: tl.constexpr):
    """First and second members of the pairs, as stored; `rows` [tokens] points to channel 0."""
    j = tl.arange(0, S.half_pad)
    if S.is_neox:
        ok = is_row[:, None] & (j < S.half)[None, :]
        first = tl.load(rows[:, None] + j[None, :], mask=ok, other=0.0)
        second = tl.load(rows[:, None] + (j + S.half)[None, :], mask=ok, other=0.0)
    else:
        i = tl.arange(0, 2 * S.half_pad)
        both = tl.load(rows[:, None] + i[None, :], mask=is_row[:, None] & (i < S.rotary_dim)[None, :], other=0.0)
        HALF_PAD: tl.constexpr = S.half_pad
        first, second = tl.split(tl.reshape(both, [both.shape[0], HALF_PAD, 2]))
    return first, second


@triton.jit
def load_rest(rows, is_row, S: tl.constexpr):
    """Channels from rotary_dim on, as stored."""
    i = S.rotary_dim + tl.arange(0, S.rest_pad)
    return tl.load(rows[:, None] + i[None, :], mask=is_row[:, None] & (i < S.head_size)[None, :], other=0.0)


@triton.jit
def load_head(rows, is_row, S: tl.constexpr):
    """(first, second, rest) of a head, as stored; `rest` has no meaning where every channel is rotated.

    The kernels load a head before they compute with the one before it, so that no load waits behind a store.
    """
    first, second = load_pairs(rows, is_row, S)
    if S.rest_pad > 0:
        rest = load_rest(rows, is_row, S)
    else:
        rest = first
    return first, second, rest


@triton.jit
def position_row(positions, token, is_token, num_tokens, ROW: tl.constexpr):
    """One of the rows of positions [rows, T]."""
    return tl.load(positions + ROW * num_tokens + token, mask=is_token, other=0)


@triton.jit
def load_cos_sin(cos_sin, positions, token, is_token, num_tokens, S: tl.constexpr):
    """cos and sin [tokens, half_pad] as float32; NaN for a position outside [0, P).

    With mrope each frequency takes one of three rows of positions: time, height or width.
    """
    f = tl.arange(0, S.half_pad)
    if S.has_mrope:
        if S.is_interleaved:
            takes_h = (f % 3 == 1) & (f < 3 * S.mrope_section[1])
            takes_w = (f % 3 == 2) & (f < 3 * S.mrope_section[2])
        else:
            takes_h = (f >= S.mrope_section[0]) & (f < S.mrope_section[0] + S.mrope_section[1])
            takes_w = f >= S.mrope_section[0] + S.mrope_section[1]
        time = position_row(positions, token, is_token, num_tokens, 0)
        height = position_row(positions, token, is_token, num_tokens, 1)
        width = position_row(positions, token, is_token, num_tokens, 2)
        position = tl.where(takes_w[None, :], width[:, None], tl.where(takes_h[None, :], height[:, None], time[:, None]))
    else:
        position = position_row(positions, token, is_token, num_tokens, 0)[:, None]
    known = (position >= 0) & (position < S.num_positions) & (f < S.half)[None, :]
    pointers = cos_sin + position.to(tl.int64) * S.rotary_dim + f[None, :]
    cos = tl.load(pointers, mask=known, other=float("nan"))
    sin = tl.load(pointers + S.half, mask=known, other=float("nan"))
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotate(first, second, cos, sin, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Both members of the pairs, rotated in float32 and rounded to DTYPE."""
    rotated_first = round_to(first * cos - second * sin, DTYPE, INTERPRETED)
    return rotated_first, round_to(second * cos + first * sin, DTYPE, INTERPRETED)


@triton.jit
def store_pairs(rows, is_row, first, second, S: tl.constexpr):
    j = tl.arange(0, S.half_pad)
    if S.is_neox:
        ok = is_row[:, None] & (j < S.half)[None, :]
        tl.store(rows[:, None] + j[None, :], first, mask=ok)
        tl.store(rows[:, None] + (j + S.half)[None, :], second, mask=ok)
    else:
        i = tl.arange(0, 2 * S.half_pad)
        both = interleaved(first, second, S)
        tl.store(rows[:, None] + i[None, :], both, mask=is_row[:, None] & (i < S.rotary_dim)[None, :])


@triton.jit
def interleaved(first, second, S: tl.constexpr):
    """Channels [tokens, 2 * half_pad] of GPT-J pairs."""
    CHANNELS: tl.constexpr = 2 * S.half_pad
    return tl.reshape(tl.join(first, second), [first.shape[0], CHANNELS])


@triton.jit
def store_head(out, is_row, first, second, rest, S: tl.constexpr):
    """Stores a head at `out` [tokens] (pointers), in the order of channels in which `load_head` reads one."""
    store_pairs(out, is_row, first, second, S)
    if S.rest_pad > 0:
        i = S.rotary_dim + tl.arange(0, S.rest_pad)
        tl.store(out[:, None] + i[None, :], rest, mask=is_row[:, None] & (i < S.head_size)[None, :])


@triton.jit
def head_rows(base, token, head, num_tokens, HEADS: tl.constexpr, ROW: tl.constexpr, S: tl.constexpr):
    """Pointers [tokens] to one of HEADS heads in rows of ROW elements, and which of them belong to an existing token and head."""
    at = token.to(tl.int64) * ROW + head * S.head_size
    return base + at, token < tl.where(head < HEADS, num_tokens, 0)


@triton.jit
def normed_head(first, second, rest, weight, DTYPE: tl.constexpr, S: tl.constexpr):
    """`load_head`'s (first, second) as float32, and `rest` in its own dtype with its bits, NaN included.

    Where there is a weight, the members are those of round(x * rsqrt(mean(x^2) + eps) * weight).
    """
    first, second = first.to(tl.float32), second.to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first + second * second, 1)
        if S.rest_pad > 0:
            wide_rest = rest.to(tl.float32)
            squares += tl.sum(wide_rest * wide_rest, 1)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, S.head_size * 1.0) + S.eps))[:, None]
        weights = weight + tl.zeros([1], tl.int32)
        always = tl.full([1], True, tl.int1)
        first_weight, second_weight = load_pairs(weights, always, S)
        first = round_to(first * inverse * first_weight.to(tl.float32), DTYPE, S.interpreted).to(tl.float32)
        second = round_to(second * inverse * second_weight.to(tl.float32), DTYPE, S.interpreted).to(tl.float32)
        if S.rest_pad > 0:
            rest_weight = load_rest(weights, always, S).to(tl.float32)
            rest = round_to(wide_rest * inverse * rest_weight, DTYPE, S.interpreted)
    return first, second, rest


@triton.jit
def rotate_heads(
    out,  # [T, HEADS, D] DTYPE
    base,  # first of these heads in rows of ROW elements, a token a row
    weight,  # [D] of the norm, or None
    token,  # [block_tokens] i32
    head,  # i32: first head
    num_tokens,  # i32
    positions,  # [T] or [3, T] i32
    cos_sin,  # [P, R]
    HEADS: tl.constexpr,  # heads of a row
    ROW: tl.constexpr,
    DTYPE: tl.constexpr,
    S: tl.constexpr,
):
    """Rotates `block_heads` heads from `head` on, after the norm where there is a weight."""
    rows, ok = head_rows(base, token, head, num_tokens, HEADS, ROW, S)
    ahead = load_head(rows, ok, S)
    is_token = token < num_tokens
    cos, sin = load_cos_sin(cos_sin, positions, token, is_token, num_tokens, S)
    COUNT: tl.constexpr = S.block_heads
    for i in tl.static_range(COUNT):
        first, second, rest = ahead
        if i + 1 < COUNT:
            rows, ok = head_rows(base, token, head + i + 1, num_tokens, HEADS, ROW, S)
            ahead = load_head(rows, ok, S)
        first, second, rest = normed_head(first, second, rest, weight, DTYPE, S)
        first, second = rotate(first, second, cos, sin, DTYPE, S.interpreted)
        to, is_row = head_rows(out, token, head + i, num_tokens, HEADS, HEADS * S.head_size, S)
        store_head(to, is_row, first, second, rest, S)


@triton.jit
def rotary_kernel(
    query_out,  # [T, Hq, D] dtype of query
    key_out,  # [T, H, D] dtype of key
    query,  # [T, Hq, D] model dtype
    key,  # [T, H, D] model dtype
    positions,  # [T] i32
    cos_sin,  # [P, R] float: cosines of the pairs, then their sines
    num_tokens,  # i32: T
    S: tl.constexpr,  # RotarySpec
):
    """Grid: blocks of tokens x (groups of query heads, then groups of KV heads)."""
    QUERY_DTYPE: tl.constexpr = S.query_dtype
    KEY_DTYPE: tl.constexpr = S.key_dtype
    program = tl.program_id(0)
    group = program % S.groups
    token = program // S.groups * S.block_tokens + tl.arange(0, S.block_tokens)
    if group < S.query_groups:
        rotate_heads(
            query_out, query, None, token, group * S.block_heads, num_tokens, positions, cos_sin, S.num_heads, S.query_row, QUERY_DTYPE, S
        )  # fmt: skip
    else:
        k_head = (group - S.query_groups) * S.block_heads
        rotate_heads(key_out, key, None, token, k_head, num_tokens, positions, cos_sin, S.num_kv_heads, S.key_row, KEY_DTYPE, S)
