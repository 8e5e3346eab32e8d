"""The cache writer and the fused rotary embedding and write as Pallas kernels. Both write the given buffer in place."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from purepage.functional.fp8 import quantize
from purepage.kernels.pallas.refs import Pool, compiler_params, load
from purepage.kernels.xla.rounding import round_to

TOKENS = 16
"""Tokens of a program."""


def store_rows(cache, side: int, rows: Float[Array, "R channels"], scale, layer, slot: Int[Array, " R"], head, live, *, pool: Pool):
    """Writes the channels of a head into the slots of tokens; a token whose slot is outside the cache is dropped.

    Args:
      scale: f32 of the side, or None for a cache that is not quantized.
      live: which rows are tokens.
    """
    ok = live & (slot >= 0) & (slot < pool.num_blocks * pool.block_size)
    slot = jnp.where(ok, slot, pool.num_blocks * pool.block_size)
    stored = rows.astype(pool.dtype) if scale is None else quantize(rows, scale, pool.dtype)
    stored = pool.encoded(stored, cache.dtype)
    target = pool.rows(cache, side, layer, slot // pool.block_size, slot % pool.block_size, head)
    plgpu.store(target, stored, mask=ok[:, None] & pool.is_channel())


def rows_of(array, token, head, live, pool: Pool):
    """The reference to [R, channels] of a head of tokens in [T, H, D], and its mask."""
    channel = jnp.arange(pool.channels, dtype=jnp.int32)[None]
    return array.at[token[:, None], head, channel], live[:, None] & pool.is_channel()


def tile_of(num_tokens: int):
    """(token, live) of this program's rows."""
    token = pl.program_id(0) * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
    return token, token < num_tokens


def scale_of(scales, layer, head):
    """The scale of a side: scales is [L], [L, H], or None."""
    if scales is None:
        return None
    return scales[layer, head] if len(scales.shape) == 2 else scales[layer]


def write_kernel(*refs, pool: Pool, quantized: bool):
    """One program: tokens x KV head.

    Args:
      refs: layer i32[1], slots i32[T], key [T, H, D], value [T, H, D], with a quantized cache k_scale and v_scale, the cache, and the cache
        again as the output that it is aliased to.
    """
    layer, slots, key, value, *scales, _, cache = refs
    token, live = tile_of(slots.shape[0])
    head, at = pl.program_id(1), layer[0]
    slot = plgpu.load(slots.at[token], mask=live, other=-1)
    for side, (rows, scale) in enumerate(zip((key, value), scales if quantized else (None, None), strict=True)):
        values = load(*rows_of(rows, token, head, live, pool))
        store_rows(cache, side, values, scale_of(scale, at, head), at, slot, head, live, pool=pool)


def rotated(rows, token, head, live, cos, sin, *, pool: Pool, is_neox: bool, half: int, interpret: bool):
    """[R, channels] of a head, rotated in float32 and rounded once to the dtype of `rows`; channels past 2 * half as they are.

    A channel meets its partner: d + half or d - half (neox), or the other of a pair 2j, 2j + 1 (gptj). cos and sin are f32[R, channels],
    those of each channel's frequency.
    """
    channel = jnp.arange(pool.channels, dtype=jnp.int32)
    turned = channel < 2 * half
    is_first = channel < half if is_neox else channel % 2 == 0
    step = half if is_neox else 1
    partner = jnp.clip(jnp.where(is_first, channel + step, channel - step), 0, pool.head_size - 1)
    reference, mask = rows_of(rows, token, head, live, pool)
    own = load(reference, mask)
    other = load(rows.at[token[:, None], head, jnp.where(turned, partner, 0)[None]], mask).astype(jnp.float32)
    exact = own.astype(jnp.float32)
    out = jnp.where(is_first[None], exact * cos - other * sin, exact * cos + other * sin)
    if interpret:  # XLA may leave out a conversion to 16 bits and back, Triton does not
        out = round_to(out, rows.dtype)
    return jnp.where(turned[None], out.astype(rows.dtype), own)


def rope_write_kernel(*refs, pool: Pool, quantized: bool, is_neox: bool, num_heads: int, interpret: bool):
    """One program: tokens x head; heads below Hq are queries, the H after them keys, with their values.

    Args:
      refs: layer i32[1], slots i32[T], positions i32[T], table [P, R], query [T, Hq, D], key and value [T, H, D], with a quantized cache
        k_scale and v_scale, the cache, then the outputs: rotated query and key, and the cache, aliased.
    """
    layer, slots, positions, table, query, key, value, *scales, _, query_out, key_out, cache = refs
    token, live = tile_of(slots.shape[0])
    head, at, half = pl.program_id(1), layer[0], table.shape[1] // 2
    channel = jnp.arange(pool.channels, dtype=jnp.int32)
    frequency = jnp.where(channel < 2 * half, channel % half if is_neox else channel // 2, 0)[None]
    position = plgpu.load(positions.at[token], mask=live, other=0)
    known = live & (position >= 0) & (position < table.shape[0])
    row, mask = jnp.where(known, position, 0)[:, None], known[:, None] & (channel < 2 * half)[None]
    # NaN where there is no such position.
    cos, sin = (jnp.where(mask, load(table.at[row, frequency + offset], mask).astype(jnp.float32), jnp.nan) for offset in (0, half))
    turn = partial(rotated, token=token, live=live, cos=cos, sin=sin, pool=pool, is_neox=is_neox, half=half, interpret=interpret)

    @pl.when(head < num_heads)
    def _():
        reference, ok = rows_of(query_out, token, head, live, pool)
        plgpu.store(reference, turn(query, head=head), mask=ok)

    @pl.when(head >= num_heads)
    def _():
        kv_head = head - num_heads
        slot = plgpu.load(slots.at[token], mask=live, other=-1)
        turned = turn(key, head=kv_head)
        reference, ok = rows_of(key_out, token, kv_head, live, pool)
        plgpu.store(reference, turned, mask=ok)
        values = load(*rows_of(value, token, kv_head, live, pool))
        for side, (rows, scale) in enumerate(zip((turned, values), scales if quantized else (None, None), strict=True)):
            store_rows(cache, side, rows, scale_of(scale, at, kv_head), at, slot, kv_head, live, pool=pool)


def write(data: Array, pool: Pool, key, value, slots, layer, scales, *, interpret: bool) -> Array:
    """The buffer with the tokens' keys and values in their slots. `scales`: (k_scale, v_scale), or () for a cache that is not quantized."""
    if not slots.shape[0]:
        return data
    operands = (layer[None], slots, key, value, *scales, data)
    return pl.pallas_call(
        partial(write_kernel, pool=pool, quantized=bool(scales)),
        grid=(pl.cdiv(slots.shape[0], TOKENS), key.shape[1]),
        out_shape=jax.ShapeDtypeStruct(data.shape, data.dtype),
        input_output_aliases={len(operands) - 1: 0},
        compiler_params=compiler_params(),
        interpret=interpret,
        name="update_cache",
    )(*operands)


def rope_and_write(data, pool: Pool, query, key, value, positions, table, slots, layer, scales, *, is_neox: bool, interpret: bool):
    """(rotated query, rotated key, the buffer with the tokens in their slots)."""
    num_tokens, num_heads, _ = query.shape
    if not num_tokens:
        return query, key, data
    operands = (layer[None], slots, positions, table, query, key, value, *scales, data)
    static = {"pool": pool, "quantized": bool(scales), "is_neox": is_neox, "num_heads": num_heads, "interpret": interpret}
    return pl.pallas_call(
        partial(rope_write_kernel, **static),
        grid=(pl.cdiv(num_tokens, TOKENS), num_heads + key.shape[1]),
        out_shape=tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (query, key, data)),
        input_output_aliases={len(operands) - 1: 2},
        compiler_params=compiler_params(),
        interpret=interpret,
        name="rope_and_update_cache",
    )(*operands)
