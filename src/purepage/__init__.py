"""Paged attention as pure JAX functions: a port of vLLM's ROCM_ATTN and ROCM_AITER_UNIFIED_ATTN backends.

    import purepage as pp

    spec = pp.CacheSpec(num_blocks=64, block_size=16, num_kv_heads=8, head_size=128)
    cache = pp.init_cache(spec)
    metadata = pp.make_metadata([3, 1], [3, 20], block_table, block_size=16)
    cache = pp.update_cache(cache, key, value, metadata.slot_mapping)
    out = pp.paged_attention(query, cache, metadata)

Everything takes arrays and immutable pytrees, and returns new ones. `purepage.testing` has the oracle and random batches.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import key_ranges, rocm_aiter_unified_attn, rocm_attn, sharding
from .functional import (
    AttentionConfig,
    AttentionMetadata,
    AttentionType,
    Blocks,
    CacheSpec,
    Capabilities,
    KVCache,
    UnsupportedError,
    cache_from_logical,
    cache_to_logical,
    cascade_attention,
    convert_cache,
    copy_blocks,
    cross_metadata,
    debug_checks,
    decode_metadata,
    encoder_attention,
    gather_blocks,
    init_cache,
    make_metadata,
    merge_attention_states,
    paged_attention,
    qk_norm_mrope_and_update_cache,
    qk_norm_rope_and_update_cache,
    rope_and_update_cache,
    rotary_embedding,
    scatter_blocks,
    update_cache,
    validate_metadata,
)

__version__ = "0.2.0"

__all__ = [
    "AttentionConfig",
    "AttentionMetadata",
    "AttentionType",
    "Blocks",
    "CacheSpec",
    "Capabilities",
    "KVCache",
    "UnsupportedError",
    "__version__",
    "cache_from_logical",
    "cache_to_logical",
    "cascade_attention",
    "convert_cache",
    "copy_blocks",
    "cross_metadata",
    "debug_checks",
    "decode_metadata",
    "encoder_attention",
    "gather_blocks",
    "init_cache",
    "key_ranges",
    "make_metadata",
    "merge_attention_states",
    "paged_attention",
    "qk_norm_mrope_and_update_cache",
    "qk_norm_rope_and_update_cache",
    "rocm_aiter_unified_attn",
    "rocm_attn",
    "rope_and_update_cache",
    "rotary_embedding",
    "scatter_blocks",
    "sharding",
    "update_cache",
    "validate_metadata",
]

_ON_FIRST_USE = ("explain", "testing", "viz")


if TYPE_CHECKING:
    from . import testing as testing
    from . import viz as viz
    from .bridges.explain import explain as explain
else:  # a type checker that saw `__getattr__` would take any name for one of the package

    def __getattr__(name: str) -> Any:
        if name == "explain":
            return importlib.import_module(".bridges.explain", __name__).explain
        if name in _ON_FIRST_USE:
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
