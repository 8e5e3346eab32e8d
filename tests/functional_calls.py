"""Small valid arguments of every public function on arrays, for the tests that go over all of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

import purepage as pp

TOKENS, HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 3, 4, 2, 32, 16, 6
KINDS = ("float32", "bfloat16", "fp8")
"""Of the cache; the tokens beside an fp8 cache are bfloat16."""

IMPLEMENTED: Mapping[str, Callable[..., Any]] = {
    "paged_attention": pp.paged_attention,
    "encoder_attention": pp.encoder_attention,
    "update_cache": pp.update_cache,
    "rotary_embedding": pp.rotary_embedding,
    "rope_and_update_cache": pp.rope_and_update_cache,
    "qk_norm_rope_and_update_cache": pp.qk_norm_rope_and_update_cache,
    "qk_norm_mrope_and_update_cache": pp.qk_norm_mrope_and_update_cache,
    "merge_attention_states": pp.merge_attention_states,
    "cascade_attention": pp.cascade_attention,
}
"""Functions that several implementations serve."""

CALLS: Mapping[str, Callable[..., Any]] = {
    **IMPLEMENTED,
    "gather_blocks": pp.gather_blocks,
    "scatter_blocks": pp.scatter_blocks,
    "copy_blocks": pp.copy_blocks,
    "convert_cache": pp.convert_cache,
    "cache_to_logical": pp.cache_to_logical,
    "cache_from_logical": pp.cache_from_logical,
}


def cache_spec(kind: str, *, layers: int = 1) -> pp.CacheSpec:
    dtype = "float8_e4m3fn" if kind == "fp8" else kind
    return pp.CacheSpec(
        num_blocks=BLOCKS, block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, num_layers=layers, dtype=jnp.dtype(dtype)
    )


def arguments(name: str, kind: str, *, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays and pytrees, static options) of a valid call of `CALLS[name]`, both by keyword. Two sequences of 2 and 1 tokens."""
    rng = np.random.default_rng(seed)
    spec = cache_spec(kind)
    dtype = jnp.bfloat16 if kind == "fp8" else jnp.dtype(kind)

    def floats(*shape: int, dtype: Any = dtype) -> Any:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    scale = 0.5 if kind == "fp8" else 1.0
    sides = [floats(1, BLOCKS, BLOCK, KV_HEADS, SIZE, dtype=jnp.float32).astype(spec.dtype) for _ in range(2)]
    cache = pp.cache_from_logical(spec, sides[0], sides[1], k_scale=scale, v_scale=scale)
    metadata = pp.make_metadata([2, 1], [20, 18], [[1, 2], [1, 4]], block_size=BLOCK)
    query, key, value = floats(TOKENS, HEADS, SIZE), floats(TOKENS, KV_HEADS, SIZE), floats(TOKENS, KV_HEADS, SIZE)
    positions = jnp.array([18, 19, 17], jnp.int32)
    table = floats(32, SIZE)
    slots = metadata.slot_mapping
    rope = {"positions": positions, "cos_sin_cache": table}
    packed = {"qkv": floats(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE), "q_weight": floats(SIZE), "k_weight": floats(SIZE)}
    norms = {**packed, **rope, "cache": cache, "slot_mapping": slots}
    lse = [floats(TOKENS, HEADS, dtype=jnp.float32) for _ in "ab"]
    static = {"implementation": "xla"} if name in IMPLEMENTED else {}
    match name:
        case "paged_attention":
            arrays = {"query": query, "cache": cache, "metadata": metadata}
        case "cascade_attention":
            arrays = {"query": query, "cache": cache, "metadata": metadata}
            static["common_prefix_len"] = BLOCK
        case "encoder_attention":
            arrays = {"query": query, "key": key, "value": value, "metadata": replace(metadata, causal=False)}
        case "update_cache":
            arrays = {"cache": cache, "key": key, "value": value, "slot_mapping": slots}
        case "rotary_embedding":
            arrays = {"query": query, "key": key, **rope}
        case "rope_and_update_cache":
            arrays = {"query": query, "key": key, "value": value, **rope, "cache": cache, "slot_mapping": slots}
        case "qk_norm_rope_and_update_cache":
            arrays = norms
            static["num_heads"] = HEADS
        case "qk_norm_mrope_and_update_cache":
            arrays = {**norms, "positions": jnp.stack([positions] * 3)}
            static.update(num_heads=HEADS, mrope_section=(6, 5, 5))
        case "merge_attention_states":
            arrays = {"out_a": query, "lse_a": lse[0], "out_b": floats(TOKENS, HEADS, SIZE), "lse_b": lse[1]}
        case "gather_blocks":
            arrays = {"cache": cache, "block_ids": jnp.array([2, 0])}
        case "scatter_blocks":
            blocks = pp.gather_blocks(cache, jnp.array([1, 3]))
            arrays = {"cache": cache, "block_ids": jnp.array([2, 0]), "blocks": blocks}
        case "copy_blocks":
            arrays = {"cache": cache, "src": jnp.array([2, 0]), "dst": jnp.array([1, 5])}
        case "convert_cache":
            arrays = {"cache": cache}
            static["spec"] = replace(spec, content="xpacked")
        case "cache_to_logical":
            arrays = {"cache": cache}
        case "cache_from_logical":
            arrays = {"key": sides[0], "value": sides[1]}
            static["spec"] = spec
        case _:
            raise ValueError(f"no arguments for {name}")
    return arrays, static
