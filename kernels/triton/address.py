"""Addresses of keys and values in every cache layout, on the device. STRIDES is a `SideStrides`, KV a `KVLayout`."""

import triton
import triton.language as tl

from .dtypes import typed


@triton.jit
def axis_offsets(index, OUTER: tl.constexpr, INNER: tl.constexpr, VECTOR: tl.constexpr):
    """Element offsets along one axis of a side (see `SideStrides`)."""
    if VECTOR == 1:
        return index * OUTER
    else:
        return (index // VECTOR) * OUTER + (index % VECTOR) * INNER


@triton.jit
def dim_offsets(d, STRIDES: tl.constexpr):
    """Element offsets of channels."""
    return axis_offsets(d, STRIDES.dim_outer, STRIDES.dim, STRIDES.d_vector)


@triton.jit
def token_offsets(ids, tile, BLOCK_N: tl.constexpr, STRIDES: tl.constexpr, KV: tl.constexpr):
    """Element offsets of a tile's tokens: one of the whole tile, and one of each token.

    64 bits are used only where gathered tokens need them.
    """
    if KV.block_size % BLOCK_N == 0:
        start = (tile % (KV.block_size // BLOCK_N)) * BLOCK_N
        base = ids.to(tl.int64) * STRIDES.block + (start // STRIDES.n_vector) * STRIDES.token_outer
        return base, axis_offsets(tl.arange(0, BLOCK_N), STRIDES.token_outer, STRIDES.token, STRIDES.n_vector)
    else:
        if KV.wide_offsets:
            paged = ids.to(tl.int64) * STRIDES.block
        else:
            paged = ids * STRIDES.block
        n = tl.arange(0, BLOCK_N)
        if STRIDES.n_vector == 1:
            return 0, paged + (tile * BLOCK_N + n) % KV.block_size * STRIDES.token_outer
        else:
            # A tile starts with a vector, so the compiler sees that the tokens within one are adjacent.
            vector = (tile * (BLOCK_N // STRIDES.n_vector) + n // STRIDES.n_vector) % (KV.block_size // STRIDES.n_vector)
            return 0, paged + (vector * STRIDES.token_outer + n % STRIDES.n_vector * STRIDES.token)


@triton.jit
def side_base(cache, layer, kv_head, STRIDES: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to the first element of one head of one layer of a side, in 64 bits: a cache can pass 2**31 elements."""
    return typed(cache, DTYPE) + (STRIDES.offset + layer.to(tl.int64) * STRIDES.layer + tl.cast(kv_head, tl.int64) * STRIDES.head)


@triton.jit
def matrix_place(layer, kv_head, STRIDES: tl.constexpr):
    """(row, column) of a head's first token in the cache as a matrix with a token a row; see `Descriptor`."""
    place = STRIDES.offset + layer.to(tl.int64) * STRIDES.layer + tl.cast(kv_head, tl.int64) * STRIDES.head
    return (place // STRIDES.token_outer).to(tl.int32), (place % STRIDES.token_outer).to(tl.int32)


@triton.jit
def uniform(x, AMD: tl.constexpr):
    """Forces a wave-uniform int32 into an SGPR (v_readfirstlane).

    AMD's compiler assumes that the result of a reduction differs between lanes, and then repeats a load from such an address for every
    value that the lanes hold.
    """
    if AMD:
        return tl.inline_asm_elementwise("v_readfirstlane_b32 $0, $1", "=s,v", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return x
