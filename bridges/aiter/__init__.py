"""The `aiter` implementation: AITER's own operators on XLA's buffers, inside `jax.jit`.

`unified` and `decode` are attention, `writers` the cache writers; `rules` says what each operator can't serve, `views` shows it a cache in
the form that it reads, `package` loads it. AITER is imported when an operator is first used.
"""

from .rules import refusals
from .unified import paged_attention
from .writers import (
    qk_norm_mrope_and_update_cache,
    qk_norm_rope_and_update_cache,
    rope_and_update_cache,
    update_cache,
)

__all__ = [
    "paged_attention",
    "qk_norm_mrope_and_update_cache",
    "qk_norm_rope_and_update_cache",
    "refusals",
    "rope_and_update_cache",
    "update_cache",
]
