"""Storing this step's keys and values in the paged cache: the public function."""

from typing import Any

from jaxtyping import Array, Float, Int

from . import dispatch
from .cache import CacheSpec, KVCache, check_cache, check_layer
from .calls import UpdateCacheCall
from .checks import check_slots, check_tokens
from .derivatives import refuse_derivatives
from .errors import bad_value
from .literals import Implementation


def check_new_tokens(key: Any, value: Any, spec: CacheSpec) -> tuple[Array, Array]:
    """This step's key and value, as many tokens each, of the cache's heads and head size."""
    key = check_tokens("key", key, spec.num_kv_heads, spec.head_size)
    value = check_tokens("value", value, spec.num_kv_heads, spec.value_size)
    if value.shape[0] != key.shape[0]:
        bad_value("value", value, f"of the key's {key.shape[0]} tokens")
    return key, value


def update_cache(
    cache: KVCache,
    key: Float[Array, "T H D"],
    value: Float[Array, "T H Dv"],
    slot_mapping: Int[Array, " T"],
    *,
    layer: Any = 0,
    implementation: Implementation | None = None,
) -> KVCache:
    """The cache with new keys and values in their slots. Ports vLLM's `reshape_and_cache` and `reshape_and_cache_flash`.

    An fp8 cache stores clamp(float32(value) / scale, -MAX, +MAX) rounded to nearest even (NaN stays NaN, infinities saturate); any other
    stores the value cast to its dtype. Under `jit` with the cache donated the update is in place, whatever the cache's size.

    Args:
      cache: never changed, unless donated.
      key: [T, H, D], float32, float16 or bfloat16.
      value: [T, H, Dv], alike; Dv is D unless the cache has a `head_size_v`. Rows past the end of `slot_mapping` are ignored.
      slot_mapping: i32[<= T] or i64, block * block_size + offset. Slots below 0 and at or past num_blocks * block_size skip their token.
        Two tokens with one slot: undefined (`validate_metadata` finds them).
      layer: layer of the cache, an int or a traced i32 scalar.
      implementation: None (best), "xla", "pallas", "triton" or "aiter".

    Returns:
      The cache with the tokens in their slots; everything else in it is as before.

    Raises:
      ValueError, TypeError: a bad argument: its name, what it was, what it must be.
      UnsupportedError: the named implementation can't serve the call.
    """
    spec = check_cache(cache)
    key, value = check_new_tokens(key, value, spec)
    slots = check_slots(slot_mapping, key.shape[0], spec)
    count = slots.shape[0]
    call = UpdateCacheCall(cache=cache, key=key[:count], value=value[:count], slot_mapping=slots, layer=check_layer(layer, spec))
    return dispatch.run("update_cache", refuse_derivatives("update_cache", call), implementation)
