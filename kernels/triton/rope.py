"""Rotary embedding: one head of a block of tokens, on the device, after a norm if asked, and the kernel that rotates without a cache.

A head is held as its rotated pairs, two tiles [tokens, HALF_PAD] of first and second members, and the channels past rotary_dim as a third.
NEOX pairs channel j with j + HALF, GPT-J 2j with 2j + 1; both load and store 128 bits at a time.
"""

import triton
import triton.language as tl

from .slots import round_to


@triton.jit
def load_pairs(rows, is_row, NEOX: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """First and second members of the pairs, as stored; `rows` [tokens] are pointers to channel 0."""
    j = tl.arange(0, HALF_PAD)
    if NEOX:
        ok = is_row[:, None] & (j < HALF)[None, :]
        first = tl.load(rows[:, None] + j[None, :], mask=ok, other=0.0)
        second = tl.load(rows[:, None] + (j + HALF)[None, :], mask=ok, other=0.0)
    else:
        i = tl.arange(0, 2 * HALF_PAD)
        both = tl.load(rows[:, None] + i[None, :], mask=is_row[:, None] & (i < 2 * HALF)[None, :], other=0.0)
        first, second = tl.split(tl.reshape(both, [both.shape[0], HALF_PAD, 2]))
    return first, second


@triton.jit
def load_rest(rows, is_row, ROTARY: tl.constexpr, HEAD_SIZE: tl.constexpr, REST_PAD: tl.constexpr):
    """Channels at or past rotary_dim, as stored."""
    i = ROTARY + tl.arange(0, REST_PAD)
    return tl.load(rows[:, None] + i[None, :], mask=is_row[:, None] & (i < HEAD_SIZE)[None, :], other=0.0)


@triton.jit
def load_head(
    rows,
    is_row,
    NEOX: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    REST_PAD: tl.constexpr,
):
    """(first, second, rest) of a head, as stored; rest means nothing where there is none.

    The kernels load a head before they compute with the one before it: a load never waits behind a store.
    """
    first, second = load_pairs(rows, is_row, NEOX, HALF, HALF_PAD)
    if REST_PAD > 0:
        rest = load_rest(rows, is_row, 2 * HALF, HEAD_SIZE, REST_PAD)
    else:
        rest = first
    return first, second, rest


@triton.jit
def position_row(positions, token, is_token, num_tokens, ROW: tl.constexpr):
    """Positions of one of the rows of [rows, T]."""
    return tl.load(positions + ROW * num_tokens + token, mask=is_token, other=0)


@triton.jit
def load_cos_sin(
    cos_sin,
    positions,
    token,
    is_token,
    num_tokens,
    NUM_POSITIONS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    SECTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """cos and sin [tokens, HALF_PAD], float32; NaN where there is no such position.

    SECTION is () or the (t, h, w) of mrope: each frequency then takes one of three rows of positions.
    """
    f = tl.arange(0, HALF_PAD)
    if len(SECTION) == 3:
        if INTERLEAVED:
            takes_h = (f % 3 == 1) & (f < 3 * SECTION[1])
            takes_w = (f % 3 == 2) & (f < 3 * SECTION[2])
        else:
            takes_h = (f >= SECTION[0]) & (f < SECTION[0] + SECTION[1])
            takes_w = f >= SECTION[0] + SECTION[1]
        time = position_row(positions, token, is_token, num_tokens, 0)
        height = position_row(positions, token, is_token, num_tokens, 1)
        width = position_row(positions, token, is_token, num_tokens, 2)
        position = tl.where(takes_w[None, :], width[:, None], tl.where(takes_h[None, :], height[:, None], time[:, None]))
    else:
        position = position_row(positions, token, is_token, num_tokens, 0)[:, None]
    known = (position >= 0) & (position < NUM_POSITIONS) & (f < HALF)[None, :]
    pointers = cos_sin + position.to(tl.int64) * (2 * HALF) + f[None, :]
    cos = tl.load(pointers, mask=known, other=float("nan"))
    sin = tl.load(pointers + HALF, mask=known, other=float("nan"))
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotate(first, second, cos, sin, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """Both members of the pairs, rotated in float32 and rounded to the model's dtype."""
    turned_first = round_to(first * cos - second * sin, KIND, INTERPRETED)
    return turned_first, round_to(second * cos + first * sin, KIND, INTERPRETED)


@triton.jit
def store_pairs(rows, is_row, first, second, NEOX: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    j = tl.arange(0, HALF_PAD)
    if NEOX:
        ok = is_row[:, None] & (j < HALF)[None, :]
        tl.store(rows[:, None] + j[None, :], first, mask=ok)
        tl.store(rows[:, None] + (j + HALF)[None, :], second, mask=ok)
    else:
        i = tl.arange(0, 2 * HALF_PAD)
        both = tl.reshape(tl.join(first, second), [first.shape[0], 2 * HALF_PAD])
        tl.store(rows[:, None] + i[None, :], both, mask=is_row[:, None] & (i < 2 * HALF)[None, :])


@triton.jit
def store_rest(rows, is_row, rest, ROTARY: tl.constexpr, HEAD_SIZE: tl.constexpr, REST_PAD: tl.constexpr):
    i = ROTARY + tl.arange(0, REST_PAD)
    tl.store(rows[:, None] + i[None, :], rest, mask=is_row[:, None] & (i < HEAD_SIZE)[None, :])


@triton.jit
def store_turned(
    out,
    is_row,
    first,
    second,
    rest,
    NEOX: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    REST_PAD: tl.constexpr,
):
    """A head to `out` [tokens] (pointers), in the order in which `load_head` reads one."""
    store_pairs(out, is_row, first, second, NEOX, HALF, HALF_PAD)
    if REST_PAD > 0:
        store_rest(out, is_row, rest, 2 * HALF, HEAD_SIZE, REST_PAD)


@triton.jit
def head_rows(base, token, head, num_tokens, HEADS: tl.constexpr, ROW: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Pointers [tokens] to one of HEADS heads in rows of ROW elements, and which of them are of tokens and a head that exist."""
    at = token.to(tl.int64) * ROW + head * HEAD_SIZE
    return base + at, token < tl.where(head < HEADS, num_tokens, 0)


@triton.jit
def normed_head(
    first,
    second,
    rest,
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
    """`load_head`'s (first, second) as float32, and rest, which nothing turns, in its own dtype and untouched: a NaN keeps its bits.

    Where there is a weight, of round(x * rsqrt(mean(x^2) + EPS) * weight).
    """
    first, second = first.to(tl.float32), second.to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first + second * second, 1)
        if REST_PAD > 0:
            wide_rest = rest.to(tl.float32)
            squares += tl.sum(wide_rest * wide_rest, 1)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, HEAD_SIZE * 1.0) + EPS))[:, None]
        weights = weight + tl.zeros([1], tl.int32)
        always = tl.full([1], True, tl.int1)
        first_weight, second_weight = load_pairs(weights, always, NEOX, HALF, HALF_PAD)
        first = round_to(first * inverse * first_weight.to(tl.float32), KIND, INTERPRETED).to(tl.float32)
        second = round_to(second * inverse * second_weight.to(tl.float32), KIND, INTERPRETED).to(tl.float32)
        if REST_PAD > 0:
            rest_weight = load_rest(weights, always, 2 * HALF, HEAD_SIZE, REST_PAD).to(tl.float32)
            rest = round_to(wide_rest * inverse * rest_weight, KIND, INTERPRETED)
    return first, second, rest


@triton.jit
def rotate_heads(
    out,
    base,
    weight,
    token,
    head,
    num_tokens,
    positions,
    cos_sin,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    ROW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    NEOX: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    SECTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EPS: tl.constexpr,
    KIND: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """COUNT heads from `head` on, of HEADS in rows of ROW elements, after the norm where there is a weight."""
    rows, ok = head_rows(base, token, head, num_tokens, HEADS, ROW, HEAD_SIZE)
    ahead = load_head(rows, ok, NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD)
    is_token = token < num_tokens
    cos, sin = load_cos_sin(cos_sin, positions, token, is_token, num_tokens, NUM_POSITIONS, HALF, HALF_PAD, SECTION, INTERLEAVED)
    for i in tl.static_range(COUNT):
        first, second, rest = ahead
        if i + 1 < COUNT:
            rows, ok = head_rows(base, token, head + i + 1, num_tokens, HEADS, ROW, HEAD_SIZE)
            ahead = load_head(rows, ok, NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD)
        first, second, rest = normed_head(
            first, second, rest, weight, NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD, EPS, KIND, INTERPRETED
        )  # fmt: skip
        first, second = rotate(first, second, cos, sin, KIND, INTERPRETED)
        to, is_row = head_rows(out, token, head + i, num_tokens, HEADS, HEADS * HEAD_SIZE, HEAD_SIZE)
        store_turned(to, is_row, first, second, rest, NEOX, HALF, HALF_PAD, HEAD_SIZE, REST_PAD)


@triton.jit
def rotary_kernel(
    q_out,
    k_out,
    query,
    key,
    positions,
    cos_sin,
    num_tokens,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    NEOX: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    Q_KIND: tl.constexpr,
    K_KIND: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid: blocks of TOKENS tokens x groups of HEADS query heads, then of HEADS key heads."""
    Q_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    GROUPS: tl.constexpr = Q_GROUPS + (NUM_KV_HEADS + HEADS - 1) // HEADS
    program = tl.program_id(0)
    group = program % GROUPS
    token = program // GROUPS * TOKENS + tl.arange(0, TOKENS)
    if group < Q_GROUPS:
        rotate_heads(
            q_out, query, None, token, group * HEADS, num_tokens, positions, cos_sin, HEADS, NUM_HEADS, NUM_HEADS * HEAD_SIZE, HEAD_SIZE,
            NEOX, HALF, HALF_PAD, REST_PAD, NUM_POSITIONS, (), False, 0.0, Q_KIND, INTERPRETED,
        )  # fmt: skip
    else:
        rotate_heads(
            k_out, key, None, token, (group - Q_GROUPS) * HEADS, num_tokens, positions, cos_sin, HEADS, NUM_KV_HEADS,
            NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, NEOX, HALF, HALF_PAD, REST_PAD, NUM_POSITIONS, (), False, 0.0, K_KIND, INTERPRETED,
        )  # fmt: skip
