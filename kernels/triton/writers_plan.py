"""Plans of the cache writers, of rotary embedding and of the two fused. Needs no Triton and no GPU.

These kernels move bytes: their tiles follow from shapes and the number of compute units alone, so there is no tuning table.
"""

from dataclasses import astuple, dataclass
from typing import Any

from ...functional.cache import CacheSpec
from ..launch import Buffer, Launch, Program
from ..tuning.archs import Arch, arch_facts
from .attention_plan import ceil_div, next_power_of_two

UPDATE_KERNEL = "purepage.kernels.triton.writers:update_cache_kernel"

EXACT = (("enable_fp_fusion", False),)
"""No fused multiply-add: the result then has the same bits on every architecture, and in a fused kernel as in separate ones."""

MOST_TOKENS = 32
TILE_ELEMENTS = 4096
BY_TOKEN_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """A cache as a writer sees it; dtypes are names.

    Attributes:
      spec: spec of the cache at hand (under `shard_map` the shard's).
      dtype: dtype of the cache's buffer; None is `spec.storage_dtype`.
      k_scale_per_head, v_scale_per_head: the scale is [L, H], not [L].
    """

    spec: CacheSpec
    dtype: str | None = None
    k_scale_per_head: bool = False
    v_scale_per_head: bool = False


@dataclass(frozen=True, kw_only=True)
class UpdateShape:
    """Everything static about `update_cache`."""

    num_tokens: int
    cache: CacheShape
    key_dtype: str
    value_dtype: str


def cache_inputs(cache: CacheShape, num_tokens: int) -> dict[str, Buffer]:
    """The cache and what says where and how to write into it. Scales are passed to quantized caches only."""
    spec = cache.spec
    inputs = {
        "cache": Buffer(spec.shape, cache.dtype or spec.storage_dtype.name),
        "slot_mapping": Buffer((num_tokens,), "int32"),
        "layer": Buffer((1,), "int32"),
    }
    if spec.is_quantized:
        for name, per_head in (("k_scale", cache.k_scale_per_head), ("v_scale", cache.v_scale_per_head)):
            inputs[name] = Buffer((spec.num_layers, spec.num_kv_heads) if per_head else (spec.num_layers,), "float32")
    return inputs


def cache_constants(cache: CacheShape, arch: Arch) -> dict[str, Any]:
    spec = cache.spec
    key, value = spec.side_strides
    return {
        "NUM_SLOTS": spec.num_slots,
        "BLOCK_SIZE": spec.block_size,
        "STORED": spec.dtype.name,
        "K_SCALE_HEADS": spec.num_kv_heads if cache.k_scale_per_head else 1,
        "V_SCALE_HEADS": spec.num_kv_heads if cache.v_scale_per_head else 1,
        "HARDWARE_FP8": spec.dtype.name in arch.fp8,
        "K_SIDE": astuple(key),
        "V_SIDE": astuple(value),
    }


def writes_by_token(spec: CacheSpec) -> bool:
    """Whether the places of a block lie side by side in memory, so that a store coalesces over tokens and not over channels."""
    return any(side.n_vector > 1 or side.token_outer == 1 for side in spec.side_strides)


def tokens_of_tile(num_tokens: int, parts: int, width: int, cus: int, *, at_least: int, elements: int = TILE_ELEMENTS) -> int:
    """Tokens of a program: as many as make a full tile, fewer while the grid does not cover the device twice.

    Args:
      num_tokens: tokens in all.
      parts: programs for one block of tokens.
      width: elements that a program handles for one token.
      cus: compute units.
      at_least: tokens that must share a program for stores to coalesce.
    """
    tokens = max(1, min(MOST_TOKENS, elements // width, next_power_of_two(num_tokens)))
    tokens = max(tokens, min(at_least, next_power_of_two(num_tokens)))
    while tokens > at_least and ceil_div(num_tokens, tokens) * parts < 2 * cus:
        tokens //= 2
    return tokens


def warps_of_tile(elements: int, arch: Arch) -> int:
    """8 elements a thread or more: 128 bits of a 16-bit dtype; from 1 to 8 warps."""
    return max(1, min(8 if elements > TILE_ELEMENTS else 4, elements // (8 * max(arch.wave_size, 32))))


def plan_update_cache(shape: UpdateShape, arch: str, *, num_cus: int | None = None) -> Program:
    """Launches of one `update_cache`.

    Args:
      shape: what is static about the call.
      arch: see `purepage.kernels.tuning.archs`.
      num_cus: compute units of the device; default: the arch's usual part.

    Returns:
      A program with inputs key, value, cache, slot_mapping, layer, and k_scale and v_scale where the cache is quantized; it updates cache.

    Raises:
      UnsupportedError: the arch is not known.
    """
    facts, spec = arch_facts(arch), shape.cache.spec
    rows = (shape.num_tokens, spec.num_kv_heads, spec.head_size)
    inputs = {
        "key": Buffer(rows, shape.key_dtype),
        "value": Buffer(rows, shape.value_dtype),
        **cache_inputs(shape.cache, shape.num_tokens),
    }
    pad = next_power_of_two(spec.head_size)
    tokens = tokens_of_tile(
        shape.num_tokens, spec.num_kv_heads, pad, num_cus or facts.num_cus, at_least=BY_TOKEN_TOKENS if writes_by_token(spec) else 1
    )
    constants = {
        "TOKENS": tokens,
        "NUM_KV_HEADS": spec.num_kv_heads,
        "HEAD_SIZE": spec.head_size,
        "HEAD_PAD": pad,
        "INTERPRETED": facts.vendor == "cpu",
        **cache_constants(shape.cache, facts),
    }
    launch = Launch(
        kernel=UPDATE_KERNEL,
        grid=(ceil_div(shape.num_tokens, tokens) * spec.num_kv_heads, 1, 1),
        args=(
            *(name if name in inputs else None for name in ("cache", "key", "value", "slot_mapping", "k_scale", "v_scale", "layer")),
            shape.num_tokens,
        ),
        writes=("cache",),
        constants=tuple(constants.items()),
        num_warps=warps_of_tile(tokens * pad, facts),
        num_stages=1,
        options=EXACT,
    )
    return Program("update_cache", tuple(inputs.items()), (), ("cache",), (), (launch,))
