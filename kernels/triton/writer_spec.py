"""Static facts of the writers' kernels, of rotary embedding and of the merge: one frozen value for each launch.

Nothing here imports Triton. A kernel takes its facts as `S: tl.constexpr` and reads the attributes at compile time.
"""

from dataclasses import dataclass

from ...functional.layout import SideStrides


@dataclass(frozen=True, kw_only=True)
class CacheSlots:
    """Where and how keys and values are stored.

    Attributes:
      num_slots: B * N.
      block_size: N.
      dtype: JAX name of the stored dtype; the kernels write fp8 as uint8.
      hardware_fp8: the architecture converts that dtype.
      key, value: element strides of the two sides.
      k_scale_heads, v_scale_heads: scales of a layer, 1 or H.
    """

    num_slots: int
    block_size: int
    dtype: str
    hardware_fp8: bool
    key: SideStrides
    value: SideStrides
    k_scale_heads: int = 1
    v_scale_heads: int = 1

    @property
    def is_quantized(self) -> bool:
        return self.dtype not in ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """Static facts of `update_cache_kernel`.

    Attributes:
      block_tokens: tokens of a program.
      num_kv_heads: H.
      head_size, value_size: D of a key, Dv of a value.
      head_pad, value_pad: those rounded up to a power of two.
      slots: the cache.
      interpreted: Triton's interpreter runs the kernel.
    """

    block_tokens: int
    num_kv_heads: int
    head_size: int
    head_pad: int
    value_size: int
    value_pad: int
    slots: CacheSlots
    interpreted: bool


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Static facts of `rotary_kernel` and `rope_update_kernel`.

    Attributes:
      block_tokens, block_heads: tokens and heads of a program.
      num_heads, num_kv_heads: Hq, H.
      head_size, value_size: D, and Dv of a value; 0 where no value is written.
      head_pad, value_pad: those rounded up to a power of two.
      is_neox: channel j is paired with j + half, else 2j with 2j + 1.
      half: pairs of a head, R / 2.
      half_pad: `half` rounded up to a power of two.
      rest_pad: channels from R on, rounded up to a power of two; 0 for none.
      num_positions: P.
      query_dtype, key_dtype: JAX names.
      query_row, key_row, value_row: elements from a token to the next of the queries, of the keys, and of the values.
      key_start, value_start: elements from the start of a token's row to its keys and to its values, where both are parts of a qkv array.
      mrope_section: pairs that take the time, height and width position, or ().
      is_interleaved: the three kinds of pairs alternate, else they follow one another.
      eps: of the norm.
      slots: the cache, or None.
      interpreted: Triton's interpreter runs the kernel.
    """

    block_tokens: int
    block_heads: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_pad: int
    is_neox: bool
    half: int
    half_pad: int
    rest_pad: int
    num_positions: int
    query_dtype: str
    key_dtype: str
    query_row: int
    key_row: int
    value_row: int = 0
    value_size: int = 0
    value_pad: int = 0
    key_start: int = 0
    value_start: int = 0
    mrope_section: tuple[int, ...] = ()
    is_interleaved: bool = False
    eps: float = 0.0
    slots: CacheSlots | None = None
    interpreted: bool

    @property
    def query_groups(self) -> int:
        """Programs for the query heads of a block of tokens."""
        return -(-self.num_heads // self.block_heads)

    @property
    def groups(self) -> int:
        """Programs for a block of tokens."""
        return self.query_groups + -(-self.num_kv_heads // self.block_heads)

    @property
    def rotary_dim(self) -> int:
        """R."""
        return 2 * self.half

    @property
    def has_mrope(self) -> bool:
        return len(self.mrope_section) == 3


@dataclass(frozen=True, kw_only=True)
class MergeSpec:
    """Static facts of `merge_states_kernel`.

    Attributes:
      block_m: rows of a program; a row is one token of one head.
      head_size: D.
      head_pad: D rounded up to a power of two.
      dtype: JAX name of the result's dtype.
      interpreted: Triton's interpreter runs the kernel.
    """

    block_m: int
    head_size: int
    head_pad: int
    dtype: str
    interpreted: bool
