"""One tile of keys and values, on the device: the blocks that hold it, and loading it through pointers or the cache's descriptor."""

import triton
import triton.language as tl

from .address import dim_offsets, token_offsets, uniform


@triton.jit
def fetch_ids(table_row, tile, table_width, BLOCK_N: tl.constexpr, KV: tl.constexpr):
    """The block of a tile, or one block for each key where a tile can straddle blocks. Unneeded ids may be anything, see `clamped`.

    Without a table block i of a sequence is block i.
    """
    if KV.block_size % BLOCK_N == 0:
        page = tile // (KV.block_size // BLOCK_N)
    else:
        page = (tile * BLOCK_N + tl.arange(0, BLOCK_N)) // KV.block_size
    if table_row is None:
        return page
    else:
        return tl.load(table_row + page, mask=page < table_width, other=0)


@triton.jit
def clamped(ids, BLOCK_N: tl.constexpr, AMD: tl.constexpr, KV: tl.constexpr):
    """Ids of `fetch_ids` that address no memory outside the cache; without a table the ids are right already."""
    if KV.num_blocks > 0:
        ids = tl.minimum(tl.maximum(ids, 0), KV.num_blocks - 1)
    if KV.block_size % BLOCK_N != 0:
        # A run of tokens never straddles a block, so layouts with adjacent tokens still load 128 bits at a time. The hint stands where the
        # ids are made: Triton drops it from a function's argument.
        RUN: tl.constexpr = 16 if KV.block_size % 16 == 0 else (8 if KV.block_size % 8 == 0 else 1)
        ids = tl.max_constancy(ids, [RUN])
    elif KV.num_blocks > 0:
        ids = uniform(ids, AMD)
    return ids


@triton.jit
def block_ids(table_row, tile, table_width, BLOCK_N: tl.constexpr, AMD: tl.constexpr, KV: tl.constexpr):
    """Ids of a tile's blocks that address no memory outside the cache."""
    return clamped(fetch_ids(table_row, tile, table_width, BLOCK_N, KV), BLOCK_N, AMD, KV)


CHUNK: tl.constexpr = tl.constexpr(256)
"""Block ids that are checked at a time."""


@triton.jit
def first_blocks(table_row, begin, end, table_width, S: tl.constexpr):
    """[CHUNK] block ids of keys [begin, end), -1 where the table has none: what `lost_blocks` looks at first.

    They are loaded before the keys are attended and looked at afterwards, so that nothing waits for them.
    """
    block = begin // S.kv.block_size + tl.arange(0, CHUNK)
    return tl.load(table_row + block, mask=(block * S.kv.block_size < end) & (block < table_width), other=-1)


@triton.jit
def lost_blocks(first_ids, table_row, begin, end, table_width, S: tl.constexpr):
    """NaN where the table has no valid id for a block of keys [begin, end), else 0.0. Added to the row sums it marks all rows.

    `first_ids` are those of `first_blocks`.
    """
    first = begin // S.kv.block_size
    last = tl.where(end > begin, (end + S.kv.block_size - 1) // S.kv.block_size, first)
    block = first + tl.arange(0, CHUNK)
    lost = tl.where((block < last) & ((first_ids < 0) | (first_ids >= S.kv.num_blocks)), 1, 0)
    for start in tl.range(first + CHUNK, last, CHUNK, num_stages=1):
        block = start + tl.arange(0, CHUNK)
        ids = tl.load(table_row + block, mask=(block < last) & (block < table_width), other=-1)
        lost = tl.where((block < last) & ((ids < 0) | (ids >= S.kv.num_blocks)), 1, lost)
    return tl.where(tl.max(lost, 0) > 0, float("nan"), 0.0)


@triton.jit
def fetch_tile(descriptor, place, ids, tile, BLOCK_N: tl.constexpr, STRIDES: tl.constexpr, KV: tl.constexpr):
    """[block_n, head_size] of a side through the cache's descriptor, for tiles that lie within a block; `place` is `matrix_place`'s."""
    row = place[0] + ids * (STRIDES.block // STRIDES.token_outer) + tile % (KV.block_size // BLOCK_N) * BLOCK_N
    return descriptor.load([row, place[1]])


@triton.jit
def load_masked(pointers, d_ok, n_ok, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Loads elements with the masks that a tile needs; masked elements are 0."""
    if PADDED and MASKED:
        return tl.load(pointers, mask=d_ok & n_ok, other=0)
    elif PADDED:
        return tl.load(pointers, mask=d_ok, other=0)
    elif MASKED:
        return tl.load(pointers, mask=n_ok, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def load_keys_by_vector(key_base, ids, tile, visible, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, S: tl.constexpr):
    """What `load_keys` gives, where adjacent tokens have adjacent vectors of channels ("xpacked").

    Neighbouring threads read neighbouring vectors: Triton gives them neighbouring channels otherwise, which lie in a cache line each.
    """
    KV: tl.constexpr = S.kv
    KEY: tl.constexpr = S.kv.key
    VECTOR: tl.constexpr = S.kv.key.d_vector
    k_tile, k_token = token_offsets(ids, tile, BLOCK_N, KEY, KV)
    chunk = tl.arange(0, S.head_pad // VECTOR)
    inner = tl.arange(0, VECTOR)
    pointers = key_base + k_tile + ((chunk * KEY.dim_outer)[:, None, None] + k_token[None, :, None] + inner[None, None, :])
    d_ok = (chunk * VECTOR < S.head_size)[:, None, None]
    k = load_masked(pointers, d_ok, visible[None, :, None], S.pads_head, MASKED)
    return tl.reshape(tl.permute(k, (0, 2, 1)), (S.head_pad, BLOCK_N))


@triton.jit
def load_values_by_run(value_base, ids, BLOCK_N: tl.constexpr, S: tl.constexpr):
    """What `load_values` gives, where a channel's tokens of a block are adjacent and so are its channels: neighbouring threads read on."""
    KV: tl.constexpr = S.kv
    VALUE: tl.constexpr = S.kv.value
    RUN: tl.constexpr = S.kv.block_size
    d = tl.arange(0, S.value_pad)
    # One id for each block, so that the compiler sees that its tokens are adjacent.
    blocks = tl.max(tl.reshape(ids, (BLOCK_N // RUN, RUN)), 1)
    if KV.wide_offsets:
        blocks = blocks.to(tl.int64)
    pointers = value_base + (
        (blocks * VALUE.block)[:, None, None] + dim_offsets(d, VALUE)[None, :, None] + tl.arange(0, RUN)[None, None, :]
    )
    v = load_masked(pointers, d[None, :, None] < S.value_size, True, S.pads_value, False)
    return tl.reshape(tl.permute(v, (0, 2, 1)), (BLOCK_N, S.value_pad))


@triton.jit
def load_keys(key_base, ids, tile, d, visible, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, S: tl.constexpr):
    """[channels `d`, block_n] stored keys of a tile; MASKED: 0 for keys that are not `visible`."""
    KV: tl.constexpr = S.kv
    KEY: tl.constexpr = S.kv.key
    if S.by_vector:
        return load_keys_by_vector(key_base, ids, tile, visible, MASKED, BLOCK_N, S)
    else:
        k_tile, k_token = token_offsets(ids, tile, BLOCK_N, KEY, KV)
        pointers = key_base + k_tile + (dim_offsets(d, KEY)[:, None] + k_token[None, :])
        return load_masked(pointers, d[:, None] < S.head_size, visible[None, :], S.pads_head, MASKED)


@triton.jit
def load_values(value_base, ids, tile, visible, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, S: tl.constexpr):
    """[block_n, value_pad] stored values of a tile; MASKED: 0 for keys that are not `visible`."""
    KV: tl.constexpr = S.kv
    VALUE: tl.constexpr = S.kv.value
    # A mask along adjacent tokens would break 128-bit loads, so a side whose tokens are adjacent is loaded whole and masked afterwards.
    BY_TOKEN: tl.constexpr = VALUE.n_vector > 1 or VALUE.token_outer == 1
    if S.by_vector and VALUE.n_vector == 1 and S.kv.block_size < BLOCK_N and BLOCK_N % S.kv.block_size == 0:
        v = load_values_by_run(value_base, ids, BLOCK_N, S)
    else:
        d = tl.arange(0, S.value_pad)
        v_tile, v_token = token_offsets(ids, tile, BLOCK_N, VALUE, KV)
        v_dim = dim_offsets(d, VALUE)
        pointers = value_base + v_tile + (v_token[:, None] + v_dim[None, :])
        v = load_masked(pointers, d[None, :] < S.value_size, visible[:, None], S.pads_value, MASKED and not BY_TOKEN)
    if MASKED and BY_TOKEN:
        v = tl.where(visible[:, None], v, 0)
    return v
