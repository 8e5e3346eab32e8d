"""Plans of the cache writers, of rotary embedding and of the fused writers; they need neither Triton nor a GPU.

These kernels move bytes. Their blocks follow from the shapes and the number of compute units, so no architecture has configurations for
them.
"""

from dataclasses import dataclass

from ...functional.cache import CacheSpec
from ...functional.errors import bad_value
from ..archs import Arch, arch_facts
from ..archs.choice import over_limits
from ..archs.configs import WriterConfig
from ..launch import Buffer, Launch, Program
from ..triton.writer_spec import CacheSlots, RotarySpec, UpdateSpec
from .sizes import ceil_div, next_power_of_two

UPDATE_KERNEL = "purepage.kernels.triton.cache_write:update_cache_kernel"

EXACT = (("enable_fp_fusion", False),)
"""Products and sums are not fused, so the result has the same bits on every architecture, in a fused kernel and in separate ones."""

MAX_BLOCK_TOKENS = 32
ADJACENT_TOKENS = 16
"""Tokens that a program has at least where the tokens of a block are adjacent in memory, so that its stores coalesce."""
TILE_ELEMENTS = 1024
"""Elements of one head's tile of keys or values: one load of 16 bytes a thread. On an H200 tiles of 4096 were as fast for copies, 6 %
slower for fp8 caches and 4 % slower with norms."""
MAX_BLOCK_HEADS = 4


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """A cache as a writer sees it; dtypes are JAX names.

    Attributes:
      spec: spec of the cache that the call gets; under `shard_map` it is the shard's.
      dtype: dtype of the cache's buffer; None is `spec.storage_dtype`.
      k_scale_per_head, v_scale_per_head: the scale is [L, H], not [L].
    """

    spec: CacheSpec
    dtype: str | None = None
    k_scale_per_head: bool = False
    v_scale_per_head: bool = False


@dataclass(frozen=True, kw_only=True)
class UpdateShape:
    """Everything static about `update_cache`; dtypes are JAX names."""

    num_tokens: int
    cache: CacheShape
    key_dtype: str
    value_dtype: str


def cache_inputs(cache: CacheShape, num_tokens: int) -> dict[str, Buffer]:
    """The cache, the slots, the layer, and the scales of a quantized cache."""
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


def cache_slots(cache: CacheShape, arch: Arch) -> CacheSlots:
    spec = cache.spec
    key, value = spec.side_strides
    return CacheSlots(
        num_slots=spec.num_slots,
        block_size=spec.block_size,
        dtype=spec.dtype.name,
        hardware_fp8=spec.dtype.name in arch.hardware_fp8,
        key=key,
        value=value,
        k_scale_heads=spec.num_kv_heads if cache.k_scale_per_head else 1,
        v_scale_heads=spec.num_kv_heads if cache.v_scale_per_head else 1,
    )


def has_adjacent_tokens(spec: CacheSpec) -> bool:
    """Whether the tokens of a block are adjacent in memory, so that stores coalesce over tokens and not over channels."""
    return any(side.n_vector > 1 or side.token_outer == 1 for side in spec.side_strides)


def tokens_of_block(num_tokens: int, parts: int, width: int, cus: int, *, at_least: int) -> int:
    """Tokens of a program: as many as fill a tile, fewer while the grid does not cover the device twice.

    Args:
      num_tokens: tokens in all.
      parts: programs for one block of tokens.
      width: elements that a program handles for one token.
      cus: compute units.
      at_least: tokens that a program has in any case, where there are as many.
    """
    tokens = max(1, min(MAX_BLOCK_TOKENS, TILE_ELEMENTS // width, next_power_of_two(num_tokens)))
    tokens = max(tokens, min(at_least, next_power_of_two(num_tokens)))
    while tokens > at_least and ceil_div(num_tokens, tokens) * parts < 2 * cus:
        tokens //= 2
    return tokens


def warps_of_tile(elements: int, arch: Arch) -> int:
    """From 1 to 8 warps, with 8 elements a thread or more: 128 bits of a 16-bit dtype."""
    return max(1, min(8 if elements > TILE_ELEMENTS else 4, elements // (8 * max(arch.wave_size, 32))))


MOST_ELEMENTS = 16384
"""Elements of a tuned program's tile, which it holds in registers: 64 a thread with eight warps of 32."""


def checked_config(config: WriterConfig, arch: Arch, *, width: int, head_counts: tuple[int, ...]) -> WriterConfig:
    """A configuration in place of the one that follows from the shapes.

    Args:
      config: what is asked for.
      arch: the architecture, for its limits.
      width: elements of one head of one token, a power of two.
      head_counts: numbers that `block_heads` must divide.

    Raises:
      ValueError: it passes a limit of the kernels or of the arch.
    """
    if any(count % config.block_heads for count in head_counts):
        bad_value("block_heads", config.block_heads, f"a divisor of {' and '.join(map(str, head_counts))}")
    if config.block_tokens * config.block_heads * width > MOST_ELEMENTS:
        bad_value("tuning", config, f"within {MOST_ELEMENTS} elements of {width} a head")
    if why := over_limits(arch, shared_bytes=0, num_warps=config.num_warps):
        bad_value("tuning", config, f"within the limits of {arch.name}: {why}")
    return config


def update_config(shape: UpdateShape, arch: Arch, cus: int) -> WriterConfig:
    """The configuration that follows from the shapes."""
    spec, pad = shape.cache.spec, _update_pad(shape)
    at_least = ADJACENT_TOKENS if has_adjacent_tokens(spec) else 1
    tokens = tokens_of_block(shape.num_tokens, spec.num_kv_heads, pad, cus, at_least=at_least)
    return WriterConfig(tokens, 1, warps_of_tile(tokens * pad, arch))


def _update_pad(shape: UpdateShape) -> int:
    return max(map(next_power_of_two, (shape.cache.spec.head_size, shape.cache.spec.value_size)))


def plan_update_cache(shape: UpdateShape, arch: str, *, num_cus: int | None = None, tiled: WriterConfig | None = None) -> Program:
    """Launches of one `update_cache`.

    Args:
      shape: what is static about the call.
      arch: see `purepage.kernels.archs`.
      num_cus: compute units of the device; default: those of the arch's usual product.
      tiled: a configuration in place of `update_config`'s.

    Returns:
      A program with inputs key, value, cache, slot_mapping, layer, and k_scale and v_scale where the cache is quantized; it updates cache.

    Raises:
      ValueError: `tiled` passes a limit.
      UnsupportedError: the arch is not known.
    """
    facts, spec = arch_facts(arch), shape.cache.spec
    rows = (shape.num_tokens, spec.num_kv_heads)
    inputs = {
        "key": Buffer((*rows, spec.head_size), shape.key_dtype),
        "value": Buffer((*rows, spec.value_size), shape.value_dtype),
        **cache_inputs(shape.cache, shape.num_tokens),
    }
    key_pad, value_pad = next_power_of_two(spec.head_size), next_power_of_two(spec.value_size)
    if tiled is None:
        config = update_config(shape, facts, num_cus or facts.num_cus)
    else:
        config = checked_config(tiled, facts, width=_update_pad(shape), head_counts=(1,))
    tokens = config.block_tokens
    kernel_spec = UpdateSpec(
        block_tokens=tokens,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_pad=key_pad,
        value_size=spec.value_size,
        value_pad=value_pad,
        slots=cache_slots(shape.cache, facts),
        interpreted=facts.vendor == "cpu",
    )
    launch = Launch(
        kernel=UPDATE_KERNEL,
        grid=(ceil_div(shape.num_tokens, tokens) * spec.num_kv_heads, 1, 1),
        args=(
            *(name if name in inputs else None for name in ("cache", "key", "value", "slot_mapping", "k_scale", "v_scale", "layer")),
            shape.num_tokens,
        ),
        writes=("cache",),
        constants=(("S", kernel_spec),),
        num_warps=config.num_warps,
        num_stages=1,
        options=EXACT,
    )
    return Program("update_cache", tuple(inputs.items()), (), ("cache",), (), (launch,))


@dataclass(frozen=True, kw_only=True)
class RopeShape:
    """Everything static about rotary embedding, alone or with the cache write and the norm. Dtypes are JAX names.

    Attributes:
      num_tokens, num_heads, num_kv_heads, head_size: T, Hq, H, D.
      num_positions, rotary_dim: shape of `cos_sin_cache`.
      is_neox: the pairs are (d, d + rotary_dim/2), else (2j, 2j+1).
      query_dtype, key_dtype, value_dtype, table_dtype: the last is that of `cos_sin_cache`.
      cache: None where nothing is written.
      eps: of the norm, None for no norm. With a norm, query, key and value come in one qkv array of `query_dtype`.
      mrope_section: (t, h, w), or () for one position a token.
      is_interleaved: see `mrope_section` of `qk_norm_mrope_and_update_cache`.
    """

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_positions: int
    rotary_dim: int
    is_neox: bool
    query_dtype: str
    key_dtype: str
    value_dtype: str
    table_dtype: str
    cache: CacheShape | None = None
    eps: float | None = None
    mrope_section: tuple[int, ...] = ()
    is_interleaved: bool = False

    @property
    def packed(self) -> bool:
        """Whether query, key and value come in one qkv array."""
        return self.eps is not None

    @property
    def name(self) -> str:
        if self.cache is None:
            return "rotary_embedding"
        if not self.packed:
            return "rope_and_update_cache"
        return "qk_norm_mrope_and_update_cache" if self.mrope_section else "qk_norm_rope_and_update_cache"


ROTARY_KERNEL = "purepage.kernels.triton.rope:rotary_kernel"
ROPE_UPDATE_KERNEL = "purepage.kernels.triton.fused_write:rope_update_kernel"


def rope_config(shape: RopeShape, arch: Arch, cus: int) -> WriterConfig:
    """The configuration that follows from the shapes."""
    tokens, heads = _rope_block(shape, cus)
    # NEOX loads its halves apart. On AMD a lane takes 16 bytes of each; on an H200 8 bytes and twice the threads were 4 to 13 % faster.
    halved = shape.is_neox and arch.vendor == "amd"
    loaded = next_power_of_two(shape.rotary_dim // 2) if halved else next_power_of_two(shape.head_size)
    return WriterConfig(tokens, heads, warps_of_tile(tokens * loaded, arch))


def plan_rope(shape: RopeShape, arch: str, *, num_cus: int | None = None, tiled: WriterConfig | None = None) -> Program:
    """Launches of `rotary_embedding` and of the three fused writers: one kernel each.

    Args:
      shape: what is static about the call.
      arch: see `purepage.kernels.archs`.
      num_cus: compute units of the device; default: those of the arch's usual product.
      tiled: a configuration in place of `rope_config`'s.

    Returns:
      A program with inputs query and key, or qkv, q_weight and k_weight; positions, cos_sin_cache; where it writes also value, and those of
      `cache_inputs`. Its outputs are query_out [T, Hq, D] and key_out [T, H, D]; it updates cache where there is one.

    Raises:
      ValueError: `tiled` passes a limit.
      UnsupportedError: the arch is not known.
    """
    facts = arch_facts(arch)
    inputs = _rope_inputs(shape)
    outputs = {
        "query_out": Buffer((shape.num_tokens, shape.num_heads, shape.head_size), shape.query_dtype),
        "key_out": Buffer((shape.num_tokens, shape.num_kv_heads, shape.head_size), shape.key_dtype),
    }
    cus = num_cus or facts.num_cus
    if tiled is None:
        config = rope_config(shape, facts, cus)
    else:
        config = checked_config(tiled, facts, width=_rope_width(shape), head_counts=(shape.num_heads, shape.num_kv_heads))
    tokens = config.block_tokens
    spec = _rotary_spec(shape, facts, tokens, config.block_heads)
    names = ("query_out", "key_out", "query", "key", "positions", "cos_sin_cache")
    if shape.cache is not None:
        names = (
            *("query_out", "key_out", "cache", *(("qkv",) * 3 if shape.packed else ("query", "key", "value")), "q_weight", "k_weight"),
            *("positions", "cos_sin_cache", "slot_mapping", "k_scale", "v_scale", "layer"),
        )
    launch = Launch(
        kernel=ROTARY_KERNEL if shape.cache is None else ROPE_UPDATE_KERNEL,
        grid=(ceil_div(shape.num_tokens, tokens) * spec.groups, 1, 1),
        args=(*(name if name in inputs or name in outputs else None for name in names), shape.num_tokens),
        writes=("query_out", "key_out", *(() if shape.cache is None else ("cache",))),
        constants=(("S", spec),),
        num_warps=config.num_warps,
        num_stages=1,
        options=EXACT,
    )
    return Program(shape.name, tuple(inputs.items()), tuple(outputs.items()), () if shape.cache is None else ("cache",), (), (launch,))


def _rope_width(shape: RopeShape) -> int:
    return next_power_of_two(max(shape.head_size, 0 if shape.cache is None else shape.cache.spec.value_size))


def _rope_block(shape: RopeShape, cus: int) -> tuple[int, int]:
    """(tokens, heads) of a program: as many heads as divide both counts, fewer while the grid does not cover the device twice."""
    at_least = ADJACENT_TOKENS if shape.cache is not None and has_adjacent_tokens(shape.cache.spec) else 1
    width, all_heads = _rope_width(shape), shape.num_heads + shape.num_kv_heads

    def tokens_for(heads: int) -> int:
        return tokens_of_block(shape.num_tokens, all_heads // heads, width, cus, at_least=at_least)

    heads = MAX_BLOCK_HEADS
    while heads > 1 and (shape.num_heads % heads or shape.num_kv_heads % heads):
        heads //= 2
    while heads > 1 and ceil_div(shape.num_tokens, tokens_for(heads)) * (all_heads // heads) < 2 * cus:
        heads //= 2
    return tokens_for(heads), heads


def _rotary_spec(shape: RopeShape, arch: Arch, tokens: int, heads: int) -> RotarySpec:
    query, key, value = (count * size for count, size in zip(*_rope_rows(shape), strict=True))
    row = query + key + value
    half, rest = shape.rotary_dim // 2, shape.head_size - shape.rotary_dim
    return RotarySpec(
        block_tokens=tokens,
        block_heads=heads,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        head_pad=next_power_of_two(shape.head_size),
        is_neox=shape.is_neox,
        half=half,
        half_pad=next_power_of_two(half),
        rest_pad=next_power_of_two(rest) if rest else 0,
        num_positions=shape.num_positions,
        query_dtype=shape.query_dtype,
        key_dtype=shape.key_dtype,
        query_row=row if shape.packed else query,
        key_row=row if shape.packed else key,
        value_row=row if shape.packed else value,
        value_size=0 if shape.cache is None else shape.cache.spec.value_size,
        value_pad=0 if shape.cache is None else next_power_of_two(shape.cache.spec.value_size),
        key_start=query if shape.packed else 0,
        value_start=query + key if shape.packed else 0,
        mrope_section=tuple(shape.mrope_section),
        is_interleaved=shape.is_interleaved,
        eps=shape.eps or 0.0,
        slots=None if shape.cache is None else cache_slots(shape.cache, arch),
        interpreted=arch.vendor == "cpu",
    )


def _rope_rows(shape: RopeShape) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(heads, head sizes) of query, key and value; no value where nothing is written."""
    heads = shape.num_heads, shape.num_kv_heads, 0 if shape.cache is None else shape.num_kv_heads
    return heads, (shape.head_size, shape.head_size, shape.head_size if shape.cache is None else shape.cache.spec.value_size)


def _rope_inputs(shape: RopeShape) -> dict[str, Buffer]:
    tokens, size = shape.num_tokens, shape.head_size
    if shape.packed:
        row = sum(count * size for count, size in zip(*_rope_rows(shape), strict=True))
        inputs = {
            "qkv": Buffer((tokens, row), shape.query_dtype),
            "q_weight": Buffer((size,), "float32"),
            "k_weight": Buffer((size,), "float32"),
        }
    else:
        inputs = {
            "query": Buffer((tokens, shape.num_heads, size), shape.query_dtype),
            "key": Buffer((tokens, shape.num_kv_heads, size), shape.key_dtype),
        }
        if shape.cache is not None:
            inputs["value"] = Buffer((tokens, shape.num_kv_heads, shape.cache.spec.value_size), shape.value_dtype)
    inputs["positions"] = Buffer((3, tokens) if shape.mrope_section else (tokens,), "int32")
    inputs["cos_sin_cache"] = Buffer((shape.num_positions, shape.rotary_dim), shape.table_dtype)
    return inputs if shape.cache is None else {**inputs, **cache_inputs(shape.cache, tokens)}
