"""Static facts of the attention kernels, as one frozen value for each launch, and the groups of values that their device functions share.

Nothing here imports Triton. A kernel takes its facts as `S: tl.constexpr`. Triton reads the attributes of such a value at compile time,
properties included.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...functional.layout import SideStrides


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Where a token's key and value are.

    Attributes:
      num_blocks: B; 0 where there is no block table and the tokens of a sequence are adjacent.
      block_size: N, tokens of a block.
      dtype: JAX name of the stored dtype; the kernels read fp8 as uint8.
      key, value: element strides of the two sides.
      wide_offsets: an offset within a side can pass 31 bits, so gathered tokens have 64-bit addresses.
    """

    num_blocks: int
    block_size: int
    dtype: str
    key: SideStrides
    value: SideStrides
    wide_offsets: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Static facts of one attention launch: paged prefill, paged decode, its reduction, or the encoder.

    Attributes:
      num_heads: Hq.
      queries_per_kv_head: G, query heads that share a KV head.
      head_size: D.
      head_pad: D rounded up to a power of two, at least 16.
      value_size, value_pad: the same of a value.
      scale: factor of the scores that is known at compile time.
      causal: a query sees no later key.
      context_only: only keys before this step's tokens are seen.
      window: W, 0 for none.
      traced_window: W is data, see `masks`.
      ranged: what a row sees is one interval of keys, which is data, see `masks`; causal, context_only and window are off.
      soft_cap: 0.0 for none.
      has_alibi: slopes are passed.
      bias_rows, bias_columns: shape of the bias between this step's tokens; 0, 0 for none.
      bias_per_sequence: each sequence has a bias of its own.
      query_dtype, out_dtype: JAX names.
      compute_dtype: JAX name of the operands' dtype in matrix products.
      hardware_fp8: the architecture converts the stored fp8 dtype.
      row_factor: each query row is scaled by a power of two of its own, see `load_query`.
      signed_factor: the factor of the scores can be negative.
      is_quantized: `k_scale` and `v_scale` apply.
      scale_heads: scales of a layer, 1 or H.
      kv: layout of keys and values.
      seqs_pad: S rounded up to a power of two, at least 16.
      split_tokens: sequences of at most this many query tokens belong to the decode kernel.
      block_heads, block_tokens: query heads of one KV head and query tokens in a block of rows.
      block_m: rows of a block, padding included.
      block_n: keys of a tile.
      masked_block_n: keys of a tile that needs a mask; divides `block_n`.
      reload_query: channels of the query that are loaded at a time, with every tile; 0 keeps the query in registers.
      partial_sums: partial sums that a row keeps in the loop over full tiles, 0 for its one sum.
      optimistic: masked tiles are computed without NaN safety and once more where NaN shows, see `attend_keys`.
      frozen_max: full tiles use the row maximum of the masked ones, see `attend_keys`.
      late_clamp: block ids are clamped with their tile and not a tile ahead, where a pipelined loop would wait for them.
      values_first: a tile's values are requested before its scores are computed.
      one_loop: one loop masks every tile, see `attend_all`.
      phase_heads: blocks of heads whose programs of the prefill kernel are adjacent; divides head_blocks. 0 is all.
      whole_sequences: a program of the decode kernel attends a whole sequence, so there is no partial result.
      num_splits: programs of the decode kernel for each block of heads.
      parts_per_step: partial results that the reduction loads at a time.
      zero_padding: the reduction, or with whole_sequences the decode kernel, writes padding tokens.
      amd: the target is an AMD GPU.
    """

    num_heads: int
    queries_per_kv_head: int
    head_size: int
    head_pad: int
    value_size: int
    value_pad: int
    scale: float
    causal: bool
    context_only: bool = False
    window: int = 0
    traced_window: bool = False
    ranged: bool = False
    soft_cap: float = 0.0
    has_alibi: bool = False
    bias_rows: int = 0
    bias_columns: int = 0
    bias_per_sequence: bool = False
    query_dtype: str
    out_dtype: str
    compute_dtype: str
    hardware_fp8: bool = False
    row_factor: bool = False
    signed_factor: bool = True
    is_quantized: bool = False
    scale_heads: int = 1
    kv: KVLayout
    seqs_pad: int
    split_tokens: int = 0
    block_heads: int
    block_tokens: int
    block_m: int
    block_n: int
    masked_block_n: int
    reload_query: int = 0
    partial_sums: int = 0
    optimistic: bool = False
    frozen_max: bool = False
    late_clamp: bool = False
    values_first: bool = False
    one_loop: bool = False
    phase_heads: int = 0
    whole_sequences: bool = False
    num_splits: int = 0
    parts_per_step: int = 0
    zero_padding: bool = False
    amd: bool = False
    by_vector: bool = False

    @property
    def group_blocks(self) -> int:
        """Blocks of heads that a KV head has."""
        return -(-self.queries_per_kv_head // self.block_heads)

    @property
    def head_blocks(self) -> int:
        """Blocks of heads in all."""
        return self.num_heads // self.queries_per_kv_head * self.group_blocks

    @property
    def in_phases(self) -> bool:
        return self.phase_heads not in (0, self.head_blocks)

    @property
    def part_rows(self) -> int:
        """Rows of partial results: two parts for each program of the decode kernel."""
        return 2 * self.num_splits * self.head_blocks * self.split_tokens * self.block_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads // self.queries_per_kv_head

    @property
    def pads_head(self) -> bool:
        return self.head_pad != self.head_size

    @property
    def pads_value(self) -> bool:
        return self.value_pad != self.value_size

    @property
    def rows_see_same_keys(self) -> bool:
        """Every row of a block sees the same keys, so a NaN key spoils all of them or none."""
        return self.bias_columns == 0 and (self.block_tokens == 1 or not (self.causal or self.has_window or self.ranged))

    @property
    def has_window(self) -> bool:
        return self.traced_window or self.window > 0

    @property
    def rounds_past_tanh(self) -> bool:
        """Operands of 16 bits or fewer round the scores by more than a plain tanh does, whose error is 1.2e-7 of the cap at every score."""
        return self.soft_cap <= 64 and "float32" not in (self.query_dtype, self.kv.dtype)

    @property
    def plain_scores(self) -> bool:
        """Scores are only scaled."""
        return self.soft_cap == 0.0 and not self.has_alibi and self.bias_columns == 0


@dataclass(frozen=True, kw_only=True)
class PageCopySpec:
    """Static facts of a page copy.

    Attributes:
      num_kv_heads: H.
      head_size: D, a power of two.
      split_tokens: sequences of at most this many query tokens are not copied.
      causal, context_only, window, traced_window, ranged: as in `AttentionSpec`.
      page_size: tokens of a page of the copy.
      out_dtype: JAX name of the copy's dtype.
      hardware_fp8: the architecture converts the stored fp8 dtype.
      sign_keys: keys are multiplied by the sign of their scale.
      scale_heads: scales of a layer, 1 or H.
      kv: layout of the cache.
    """

    num_kv_heads: int
    head_size: int
    split_tokens: int
    causal: bool
    context_only: bool
    window: int
    traced_window: bool
    ranged: bool
    page_size: int
    out_dtype: str
    hardware_fp8: bool
    sign_keys: bool
    scale_heads: int
    kv: KVLayout

    @property
    def has_window(self) -> bool:
        return self.traced_window or self.window > 0


class SoftmaxState(NamedTuple):
    """Online softmax of a block of rows: its results so far."""

    acc: Any  # [block_m, value_pad] f32: sum of weights times values
    row_sum: Any  # [block_m] f32, [block_m, partial_sums] in the loop over full tiles: sum of weights
    row_max: Any  # [block_m] f32: base-2 score whose weight is 1


class QuerySource(NamedTuple):
    """Where a block's query rows are in memory."""

    base: Any  # pointer to the first token
    offsets: Any  # [block_m] i32 elements
    ok: Any  # [block_m] bool: the row exists
    multiplier: Any  # [block_m] or scalar f32: what the rows were multiplied by


class QueryRows(NamedTuple):
    """A block of query rows and what their scores need."""

    query: Any  # [block_m, head_pad] compute dtype
    source: Any  # QuerySource
    factor: Any  # scalar f32, [block_m] with row_factor: from a product to a base-2 score
    position: Any  # [block_m] i32: position in the sequence
    window: Any  # i32: W, see `window_of`
    ranges: Any  # pointer to the first key and one past the last that the block's first token sees, i32, or None
    slope: Any  # [block_m] f32, base 2, or None
    bias: Any  # [block_m] pointers to rows of the bias, or None
    bias_ok: Any  # [block_m] bool: the row has a bias


class SequenceKeys(NamedTuple):
    """Keys of one sequence that a block of rows sees, and where they are."""

    table_row: Any  # pointer to the sequence's i32 block ids, or None where its tokens are adjacent
    table_width: Any  # i32: M
    key_base: Any  # pointer to the KV head's first key
    value_base: Any  # pointer to its first value
    descriptor: Any  # tensor descriptor of the cache with a token a row, or None
    key_place: Any  # (row, column) i32 of the KV head's first key in the descriptor
    value_place: Any  # (row, column) i32 of its first value
    begin: Any  # i32: first key that a row sees
    end: Any  # i32: end of the keys that a row sees
    context: Any  # i32: keys before this step's tokens
