"""Rotary embedding, optionally after a norm of queries and keys, together with the cache write: the public functions."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from . import dispatch
from .cache import CacheSpec, KVCache, check_cache, check_layer
from .cache_writers import check_new_tokens
from .calls import QkNormRopeUpdateCall, RopeUpdateCall
from .checks import MODEL_DTYPES, check_bool, check_query, check_slots
from .config import check_float, check_positive_int, int_or_none, is_array
from .derivatives import refuse_derivatives
from .errors import bad_type, bad_value
from .literals import Implementation
from .rotary import check_cos_sin_cache, check_positions


def _slots_of_all(slot_mapping: Any, num_tokens: int, spec: CacheSpec) -> Int[Array, " T"]:
    """Slots of every token; those past the end of `slot_mapping` have none."""
    slots = check_slots(slot_mapping, num_tokens, spec)
    return jnp.pad(slots, (0, num_tokens - slots.shape[0]), constant_values=-1)


def rope_and_update_cache(
    query: Float[Array, "T Hq D"],
    key: Float[Array, "T H D"],
    value: Float[Array, "T H D"],
    positions: Int[Array, " T"],
    cos_sin_cache: Float[Array, "P R"],
    cache: KVCache,
    slot_mapping: Int[Array, " T"],
    *,
    is_neox: bool = True,
    layer: Any = 0,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T H D"], KVCache]:
    """`rotary_embedding`, then `update_cache` with the rotated key: the same bits in one call. Ports AITER's fused rope + cache writer.

    Args:
      query: [T, Hq, D]; key, value: [T, H, D]; float32, float16 or bfloat16.
      positions, cos_sin_cache, is_neox: see `rotary_embedding`.
      cache, slot_mapping, layer: see `update_cache`. A token without a slot (negative, past the cache, or past the end of `slot_mapping`)
        is rotated all the same.
      implementation: None (best), "xla", "pallas", "triton" or "aiter".

    Returns:
      (query, key, cache): rotated query and key in their dtypes, whatever the cache's dtype.

    Raises:
      ValueError, TypeError: a bad argument: its name, what it was, what it must be.
      UnsupportedError: the named implementation can't serve the call.
    """
    spec = check_cache(cache)
    query = check_query(query, spec)
    key, value = check_new_tokens(key, value, spec)
    if key.shape[0] != query.shape[0]:
        bad_value("key", key, f"of the query's {query.shape[0]} tokens")
    table = check_cos_sin_cache(cos_sin_cache, spec.head_size)
    call = RopeUpdateCall(
        query=query,
        key=key,
        value=value,
        positions=check_positions(positions, query.shape[:1], table.shape[0]),
        cos_sin_cache=table,
        cache=cache,
        slot_mapping=_slots_of_all(slot_mapping, query.shape[0], spec),
        layer=check_layer(layer, spec),
        is_neox=check_bool("is_neox", is_neox),
    )
    return dispatch.run("rope_and_update_cache", refuse_derivatives("rope_and_update_cache", call), implementation)


def qk_norm_rope_and_update_cache(
    qkv: Float[Array, "T C"],
    q_weight: Float[Array, " D"],
    k_weight: Float[Array, " D"],
    positions: Int[Array, " T"],
    cos_sin_cache: Float[Array, "P R"],
    cache: KVCache,
    slot_mapping: Int[Array, " T"],
    *,
    num_heads: int,
    eps: float = 1e-6,
    is_neox: bool = True,
    layer: Any = 0,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T H D"], Float[Array, "T H D"], KVCache]:
    """RMS norm of every query and key head, then `rope_and_update_cache`. Ports AITER's fused qk-norm + rope + cache writer.

        xn = round(x * rsqrt(mean(x^2) + eps) * weight), over the whole head in float32; then RoPE of xn, rounded again; the value as it is

    Args:
      qkv: [T, (Hq + 2 H) * D]: queries, keys, values of each token; float32, float16 or bfloat16.
      q_weight, k_weight: [D] plain weights (no 1 is added) of any of these dtypes; used in float32, never cast to qkv's dtype. float64 is
        rounded to float32. Squares of queries and keys must be finite in float32.
      positions, cos_sin_cache, is_neox: see `rotary_embedding`.
      cache, slot_mapping, layer: see `rope_and_update_cache`.
      num_heads: query heads Hq, static.
      eps: added to the mean square inside the root; static, above 0 and normal in float32.
      implementation: None (best), "xla", "pallas", "triton" or "aiter".

    Returns:
      (query [T, Hq, D], key [T, H, D], value [T, H, D], cache); the first three in qkv's dtype, for every token.

    Raises:
      ValueError, TypeError: a bad argument: its name, what it was, what it must be.
      UnsupportedError: the named implementation can't serve the call.
    """
    call = _qk_norm_call(
        qkv,
        q_weight,
        k_weight,
        positions,
        cos_sin_cache,
        cache,
        slot_mapping,
        num_heads=num_heads,
        eps=eps,
        is_neox=is_neox,
        layer=layer,
        mrope_section=None,
        is_interleaved=False,
    )
    return dispatch.run("qk_norm_rope_and_update_cache", refuse_derivatives("qk_norm_rope_and_update_cache", call), implementation)


def qk_norm_mrope_and_update_cache(
    qkv: Float[Array, "T C"],
    q_weight: Float[Array, " D"],
    k_weight: Float[Array, " D"],
    positions: Int[Array, "3 T"],
    cos_sin_cache: Float[Array, "P R"],
    cache: KVCache,
    slot_mapping: Int[Array, " T"],
    *,
    num_heads: int,
    mrope_section: tuple[int, int, int],
    is_interleaved: bool = False,
    eps: float = 1e-6,
    is_neox: bool = True,
    layer: Any = 0,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T H D"], Float[Array, "T H D"], KVCache]:
    """`qk_norm_rope_and_update_cache` with a position in time, height and width for each token (Qwen-VL's M-RoPE).

    Args:
      positions: [3, T], rows time, height, width; [T] stands for three equal rows.
      mrope_section: (t, h, w) frequencies of each row, of sum rotary_dim/2. Frequency f takes row 0 if f < t, 1 if f < t + h, else 2;
        interleaved: row f % 3 where that is 1 or 2 and f < 3 * its section, else 0.
      is_interleaved: see `mrope_section`.
      qkv, q_weight, k_weight, cos_sin_cache, cache, slot_mapping, num_heads, eps, is_neox, layer, implementation: see
        `qk_norm_rope_and_update_cache`.

    Returns:
      (query [T, Hq, D], key [T, H, D], value [T, H, D], cache); the first three in qkv's dtype, for every token.

    Raises:
      ValueError, TypeError: a bad argument: its name, what it was, what it must be.
      UnsupportedError: the named implementation can't serve the call.
    """
    check_bool("is_interleaved", is_interleaved)
    call = _qk_norm_call(
        qkv,
        q_weight,
        k_weight,
        positions,
        cos_sin_cache,
        cache,
        slot_mapping,
        num_heads=num_heads,
        eps=eps,
        is_neox=is_neox,
        layer=layer,
        mrope_section=_check_section(mrope_section),
        is_interleaved=is_interleaved,
    )
    return dispatch.run("qk_norm_mrope_and_update_cache", refuse_derivatives("qk_norm_mrope_and_update_cache", call), implementation)


def _qk_norm_call(
    qkv: Any,
    q_weight: Any,
    k_weight: Any,
    positions: Any,
    cos_sin_cache: Any,
    cache: Any,
    slot_mapping: Any,
    *,
    num_heads: Any,
    eps: Any,
    is_neox: Any,
    layer: Any,
    mrope_section: tuple[int, int, int] | None,
    is_interleaved: bool,
) -> QkNormRopeUpdateCall:
    spec = check_cache(cache)
    num_heads = check_positive_int("num_heads", num_heads)
    if num_heads % spec.num_kv_heads:
        bad_value("num_heads", num_heads, f"a multiple of num_kv_heads ({spec.num_kv_heads})")
    qkv = _check_qkv(qkv, num_heads, spec)
    tokens = qkv.shape[0]
    table = check_cos_sin_cache(cos_sin_cache, spec.head_size)
    if mrope_section is None:
        positions = check_positions(positions, (tokens,), table.shape[0])
    else:
        if sum(mrope_section) * 2 != table.shape[1]:
            bad_value("mrope_section", mrope_section, f"of sum rotary_dim/2 = {table.shape[1] // 2}")
        shape = (tokens,) if is_array(positions) and len(positions.shape) == 1 else (3, tokens)
        positions = jnp.broadcast_to(check_positions(positions, shape, table.shape[0]), (3, tokens))
    return QkNormRopeUpdateCall(
        qkv=qkv,
        q_weight=_check_weight("q_weight", q_weight, spec),
        k_weight=_check_weight("k_weight", k_weight, spec),
        positions=positions,
        cos_sin_cache=table,
        cache=cache,
        slot_mapping=_slots_of_all(slot_mapping, tokens, spec),
        layer=check_layer(layer, spec),
        num_heads=num_heads,
        eps=check_float("eps", eps),
        is_neox=check_bool("is_neox", is_neox),
        mrope_section=mrope_section,
        is_interleaved=is_interleaved,
    )


def _check_qkv(qkv: Any, num_heads: int, spec: CacheSpec) -> Array:
    width = (num_heads + spec.num_kv_heads) * spec.head_size + spec.num_kv_heads * spec.value_size
    if not is_array(qkv) or len(qkv.shape) != 2 or qkv.shape[1] != width:
        rule = f"(num_heads + 2 * num_kv_heads) * head_size = ({num_heads} + 2 * {spec.num_kv_heads}) * {spec.head_size} = {width}"
        if spec.head_size_v is not None:
            rule = f"(num_heads + num_kv_heads) * head_size + num_kv_heads * head_size_v = {width}"
        bad_value("qkv", qkv, f"an array of shape [T, {rule}]")
    if jnp.dtype(qkv.dtype) not in MODEL_DTYPES:
        bad_type("qkv", qkv, f"of dtype {', '.join(d.name for d in MODEL_DTYPES)}")
    return jnp.asarray(qkv)


def _check_weight(name: str, weight: Any, spec: CacheSpec) -> Float[Array, " D"]:
    if not is_array(weight) or tuple(weight.shape) != (spec.head_size,):
        bad_value(name, weight, f"an array of shape [head_size] = [{spec.head_size}]")
    if jnp.dtype(weight.dtype) not in (*MODEL_DTYPES, np.dtype(np.float64)):
        bad_type(name, weight, f"of dtype {', '.join(d.name for d in MODEL_DTYPES)}")
    return jnp.asarray(weight, jnp.float32)


def _check_section(section: Any) -> tuple[int, int, int]:
    if not isinstance(section, tuple | list) or len(section) != 3:
        bad_value("mrope_section", section, "three static ints (t, h, w)")
    found = (None if isinstance(size, bool) else int_or_none(size) for size in section)
    sizes = [size for size in found if size is not None and size >= 0]
    if len(sizes) != 3:
        bad_value("mrope_section", section, "three static ints (t, h, w), none below 0")
    return sizes[0], sizes[1], sizes[2]
