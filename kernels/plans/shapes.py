"""What is static about a call of paged attention, which the plans of attention and of page copies share."""

from dataclasses import dataclass
from functools import cached_property

from ...functional.cache import CacheSpec
from .sizes import next_power_of_two

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class PagedAttentionShape:
    """Everything static about a call of paged attention; hashable. Dtypes are names.

    Attributes:
      num_tokens, num_seqs, num_heads: T, S, Hq.
      table_width: M, blocks of a row of the block table.
      cache: spec of the cache at hand (under `shard_map` the shard's).
      cache_dtype: dtype of the cache's buffer; None is `cache.storage_dtype`.
      max_query_len, max_seq_len: upper bounds; `max_seq_len` None is the table's width.
      traced_window: W is data; `sliding_window` is then None.
      ranged: the interval of keys that each row sees is data, with causality, window and length in it.
      qq_bias: shape of the bias, [Lq, Lk] or [S, Lq, Lk], or None.
      has_score_scale: an f32[1] that multiplies the scores is passed.
      scales_per_head: `k_scale` and `v_scale` are [L, H], not [L].
      context_only: only keys before this step's tokens are seen.
    """

    num_tokens: int
    num_seqs: int
    num_heads: int
    table_width: int
    cache: CacheSpec
    cache_dtype: str | None = None
    query_dtype: str
    output_dtype: str
    max_query_len: int
    max_seq_len: int | None = None
    causal: bool = True
    sliding_window: int | None = None
    traced_window: bool = False
    ranged: bool = False
    logits_soft_cap: float | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    qq_bias: tuple[int, ...] | None = None
    has_score_scale: bool = False
    scale: float
    scales_per_head: bool = False
    has_output_scale: bool = False
    return_lse: bool = False
    context_only: bool = False

    @cached_property
    def group(self) -> int:
        return self.num_heads // self.cache.num_kv_heads

    @cached_property
    def head_pad(self) -> int:
        return max(16, next_power_of_two(self.cache.head_size))

    @cached_property
    def value_pad(self) -> int:
        return max(16, next_power_of_two(self.cache.value_size))

    @cached_property
    def widest(self) -> int:
        """Channels of the wider side: configurations are for these."""
        return max(self.head_pad, self.value_pad)

    @cached_property
    def longest(self) -> int:
        """Most keys of a sequence."""
        width = self.table_width * self.cache.block_size
        return width if self.max_seq_len is None else min(width, self.max_seq_len)

    @cached_property
    def compute_dtype(self) -> str:
        """Dtype of the matrix products: the narrowest that holds both operands exactly.

        float16 holds every fp8 value, and converts faster than bfloat16; bfloat16 queries join it row by row, scaled by a power of two.
        """
        query, key = self.query_dtype, self.cache.dtype.name
        if "float32" in (query, key):
            return "float32"
        if self.cache.is_quantized:
            return "float16"
        if query not in ITEMSIZE or query == key:
            return key
        return "float32"

    @cached_property
    def row_factor(self) -> bool:
        return self.compute_dtype == "float16" and self.query_dtype == "bfloat16"
