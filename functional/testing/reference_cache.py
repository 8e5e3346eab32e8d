"""The oracle of cache writers, RoPE and layouts: plain NumPy, written from docs/semantics.md, sharing no code with the library."""

import math
from typing import Any

import numpy as np

from .reference_attention import _per_head, round_to, to_float64


def reference_update_cache(
    key_cache: Any,
    value_cache: Any,
    key: Any,
    value: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    dtype: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """New logical caches with this step's tokens stored, bit for bit what a writer must store.

    Args:
      key_cache, value_cache: [B, N, H, D] of one layer.
      key, value: [T, H, D]; rows at or past the end of `slot_mapping` are ignored.
      slot_mapping: [<= T] block * N + offset; a slot below 0 or at or past B * N skips its token.
      k_scale, v_scale: scalar or [H]; used where the cache is fp8: float32(value) / scale in float32, clamped, rounded to nearest even.
      dtype: the cache's dtype; default that of `key_cache`.

    Returns:
      (key_cache, value_cache): fresh arrays of `dtype`.
    """
    caches = []
    for cache, rows, scale, name in ((key_cache, key, k_scale, "k_scale"), (value_cache, value, v_scale, "v_scale")):
        stored = np.array(cache, dtype=np.asarray(cache).dtype if dtype is None else dtype)
        num_blocks, block_size, heads, _ = stored.shape
        new, divisor = np.asarray(rows), _per_head(name, scale, heads)
        for token, slot in enumerate(np.asarray(slot_mapping).astype(np.int64)):
            if 0 <= slot < num_blocks * block_size:
                stored[slot // block_size, slot % block_size] = quantize(new[token], stored.dtype, divisor[:, None])
        caches.append(stored)
    return caches[0], caches[1]


def quantize(values: Any, dtype: Any, scale: Any = 1.0) -> np.ndarray:
    """What a cache of `dtype` stores for `values`; `scale` broadcasts against them and counts for fp8 alone."""
    if np.dtype(dtype).itemsize > 1:
        return round_to(values, dtype)
    with np.errstate(over="ignore"):
        quotient = np.asarray(values).astype(np.float32) / np.asarray(scale, np.float32)
    return round_to(quotient, dtype, saturate=True)


def reference_rope(positions: Any, x: Any, cos_sin_cache: Any, *, is_neox: bool = True) -> np.ndarray:
    """Rotary embedding of queries or keys.

    Args:
      positions: [T], within [0, max_pos).
      x: [T, heads, D].
      cos_sin_cache: [max_pos, rotary_dim], cos || sin, each rotary_dim/2 wide; channels at or past rotary_dim pass through.
      is_neox: pairs (d, d + rotary_dim/2); otherwise pairs (2j, 2j+1).

    Returns:
      [T, heads, D] in the dtype of `x`, rounded once; unrounded where `x` is float64.
    """
    table = to_float64(cos_sin_cache)
    half = table.shape[1] // 2
    rows = _cache_rows(positions, table)
    return _rotate(x, rows[:, :half], rows[:, half:], is_neox)


def _cache_rows(positions: Any, table: np.ndarray) -> np.ndarray:
    positions = np.asarray(positions).astype(np.int64)
    if np.any((positions < 0) | (positions >= len(table))):
        raise IndexError(f"a position lies outside the {len(table)} rows of cos_sin_cache")
    return table[positions]


def _rotate(x: Any, cos: np.ndarray, sin: np.ndarray, is_neox: bool) -> np.ndarray:
    """cos, sin: [T, rotary_dim/2]."""
    exact = to_float64(x)
    rotated, half = exact.copy(), cos.shape[1]
    for j in range(half):
        a, b = (j, j + half) if is_neox else (2 * j, 2 * j + 1)
        c, s = cos[:, None, j], sin[:, None, j]
        rotated[..., a] = exact[..., a] * c - exact[..., b] * s
        rotated[..., b] = exact[..., b] * c + exact[..., a] * s
    return round_to(rotated, np.asarray(x).dtype)


def mrope_rows(section: tuple[int, int, int], *, is_interleaved: bool) -> list[int]:
    """Which of the three position rows (t, h, w) each frequency takes."""
    t, h, w = section
    if not is_interleaved:
        return [0 if f < t else 1 if f < t + h else 2 for f in range(t + h + w)]
    return [f % 3 if f % 3 and f < 3 * section[f % 3] else 0 for f in range(t + h + w)]


def reference_qk_norm_rope(
    qkv: Any,
    q_weight: Any,
    k_weight: Any,
    positions: Any,
    cos_sin_cache: Any,
    *,
    num_heads: int,
    eps: float = 1e-6,
    is_neox: bool = True,
    mrope_section: tuple[int, int, int] | None = None,
    is_interleaved: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """RMS norm of every query and key head, then RoPE: round(x * r * w), rotate, round again. The value passes through.

    Args:
      qkv: [T, (Hq + 2 H) * D], queries, keys, values.
      q_weight, k_weight: [D].
      positions: [T]; with `mrope_section` also [3, T].
      cos_sin_cache: [max_pos, rotary_dim].
      num_heads: Hq.
      eps: added to the mean square, inside the root.
      is_neox: see `reference_rope`.
      mrope_section: (t, h, w), of sum rotary_dim/2.
      is_interleaved: mrope's rows cycle t, h, w instead of lying in three runs.

    Returns:
      (query [T, Hq, D], key [T, H, D], value [T, H, D]) in qkv's dtype.
    """
    packed = np.asarray(qkv)
    head_size = np.asarray(q_weight).shape[0]
    heads = packed.reshape(packed.shape[0], -1, head_size)
    kv_heads = (heads.shape[1] - num_heads) // 2
    query, key, value = np.split(heads, (num_heads, num_heads + kv_heads), axis=1)
    table = to_float64(cos_sin_cache)
    half = table.shape[1] // 2
    positions = np.asarray(positions)
    if mrope_section is None:
        rows = _cache_rows(positions, table)
        cos, sin = rows[:, :half], rows[:, half:]
    else:
        if sum(mrope_section) != half:
            raise ValueError(f"mrope_section {mrope_section} must sum to rotary_dim/2 = {half}")
        rows = _cache_rows(np.broadcast_to(positions, (3, packed.shape[0])), table)
        source = mrope_rows(mrope_section, is_interleaved=is_interleaved)
        cos, sin = (np.stack([rows[r, :, f + base] for f, r in enumerate(source)], axis=1) for base in (0, half))
    normed = (_rms_norm(x, weight, eps) for x, weight in ((query, q_weight), (key, k_weight)))
    query, key = (_rotate(x, cos, sin, is_neox) for x in normed)
    return query, key, value


def _rms_norm(x: np.ndarray, weight: Any, eps: float) -> np.ndarray:
    exact = to_float64(x)
    r = 1 / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + eps)
    return round_to(exact * r * to_float64(weight), x.dtype)


def reference_address(
    content: str,
    order: str,
    *,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    itemsize: int,
    side: int,
    layer: Any,
    block: Any,
    head: Any,
    token: Any,
    dim: Any,
) -> Any:
    """Where one element lies in the flat cache buffer, counted in elements, from the formulas of docs/semantics.md, Layouts.

    Args:
      content, order: see `CacheSpec`.
      num_blocks, num_kv_heads, block_size, head_size: B, H, N, D.
      itemsize: bytes of an element; x = 16 // itemsize.
      side: 0 for the key, 1 for the value.
      layer, block, head, token, dim: l, b, h, n, d: ints, or integer arrays that broadcast (use int64).

    Returns:
      The element's index, an int or an array.
    """
    B, H, N, D, x = num_blocks, num_kv_heads, block_size, head_size, 16 // itemsize
    h, n, d = head, token, dim
    if content == "packed":
        inner = {"LBHNC": ((layer * B + block) * H + h) * N + n, "LHBNC": ((layer * H + h) * B + block) * N + n}[order]
        return inner * 2 * D + side * D + d
    x_key = ((h * (D // x) + d // x) * N + n) * x + d % x
    x_value = h * D * N + (n // x) * D * x + d * x + n % x
    flash = (n * H + h) * D + d
    inner = {
        "xpacked": (x_key, (h * D + d) * N + n),
        "xpacked_interleaved_v": (x_key, x_value),
        "shuffled": (x_key, x_value),
        "flash": (flash, flash),
    }[content][side]
    slot = {"LBHNC": (layer * B + block) * 2 + side, "LHBNC": (layer * 2 + side) * B + block}[order]
    return slot * math.prod((H, D, N)) + inner
