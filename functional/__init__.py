"""Pure functions on immutable values: what a model calls, on any JAX device.

Types (`CacheSpec`, `KVCache`, `AttentionMetadata`, `AttentionConfig`), functions on whole caches, attention and the writers. Nothing here
imports Triton, torch or a GPU library: an implementation is resolved by name when it is first chosen (see `dispatch`).
"""

from . import key_ranges, sharding
from .attention import encoder_attention, paged_attention
from .backends import rocm_aiter_unified_attn, rocm_attn
from .backends.capabilities import Capabilities
from .block_ops import Blocks, convert_cache, copy_blocks, gather_blocks, scatter_blocks
from .cache import CacheSpec, KVCache, cache_from_logical, cache_to_logical, init_cache
from .cache_writers import update_cache
from .cascade import cascade_attention, merge_attention_states
from .config import AttentionConfig, AttentionType
from .debug import debug_checks
from .errors import UnsupportedError
from .fused_writers import qk_norm_mrope_and_update_cache, qk_norm_rope_and_update_cache, rope_and_update_cache
from .metadata import AttentionMetadata
from .metadata_builders import cross_metadata, decode_metadata, make_metadata
from .rotary import rotary_embedding
from .validation import validate_metadata

__all__ = [
    "AttentionConfig",
    "AttentionMetadata",
    "AttentionType",
    "Blocks",
    "CacheSpec",
    "Capabilities",
    "KVCache",
    "UnsupportedError",
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
