"""Plan of encoder attention. Planning needs neither Triton nor a GPU."""

from dataclasses import dataclass

from ...functional.cache import CacheSpec
from ...functional.errors import UnsupportedError, bad_value
from ...functional.layout import SideStrides
from ..archs import Arch, arch_facts
from ..archs.choice import config_for, narrowed, over_limits, smaller
from ..archs.configs import PrefillConfig
from ..launch import Buffer, Launch, Program
from ..triton.spec import AttentionSpec, KVLayout
from .attention import channels_at_a_time, edge_of, heads_of_rows, kernel_window, masks_of, shared_bytes, sums_of
from .shapes import PagedAttentionShape
from .sizes import ceil_div, next_power_of_two

ENCODER_KERNEL = "purepage.kernels.triton.encoder:encoder_attention"


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """Everything static about `encoder_attention`; the dtype's name is that of query, key, value and output."""

    num_tokens: int
    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    dtype: str
    max_query_len: int
    scale: float
    causal: bool = False
    sliding_window: int | None = None
    traced_window: bool = False
    ranged: bool = False
    logits_soft_cap: float | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    has_score_scale: bool = False
    return_lse: bool = False

    @property
    def head_pad(self) -> int:
        return max(16, next_power_of_two(self.head_size))

    @property
    def value_pad(self) -> int:
        return max(16, next_power_of_two(self.value_size))

    @property
    def widest(self) -> int:
        """Channels of the wider side: configurations are for these."""
        return max(self.head_pad, self.value_pad)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


def _heads_and_rows(shape: EncoderShape, row: PrefillConfig) -> tuple[int, int]:
    """(heads of a group, rows) of one program."""
    heads = heads_of_rows(shape.group, row.block_m)
    return heads, min(row.block_m, max(16, next_power_of_two(heads * shape.max_query_len)))


def encoder_config(shape: EncoderShape, arch: Arch) -> PrefillConfig:
    """The configuration of the tables that serves a shape."""
    return _fitting_row(shape, arch, None)


def _fitting_row(shape: EncoderShape, arch: Arch, override: PrefillConfig | None) -> PrefillConfig:
    """The override, or the tables' row, made smaller until it keeps the arch's limits."""
    crowded = shape.widest > 64 and (shape.has_alibi or shape.ranged)
    row = override or narrowed(config_for(arch, arch.prefill, shape.widest), arch, float32=shape.dtype == "float32", crowded=crowded)
    while True:
        why = over_limits(arch, shared_bytes=_shared_bytes(shape, arch, row), num_warps=row.num_warps)
        if why is None:
            return row
        if override is not None:
            bad_value("tiled", override, f"within the limits of {arch.name}: {why}")
        following = smaller(row)
        if following is None:
            raise UnsupportedError(f"triton: head size {shape.head_size} does not fit {arch.name}: {why}")
        row = following


def _shared_bytes(shape: EncoderShape, arch: Arch, row: PrefillConfig) -> int:
    """That of paged attention over a cache of the same dtype and heads."""
    spec = CacheSpec(
        num_blocks=1,
        block_size=16,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        head_size_v=shape.value_size,
        dtype=shape.dtype,
    )
    paged = PagedAttentionShape(
        num_tokens=shape.num_tokens,
        num_seqs=shape.num_seqs,
        num_heads=shape.num_heads,
        table_width=1,
        cache=spec,
        query_dtype=shape.dtype,
        output_dtype=shape.dtype,
        max_query_len=shape.max_query_len,
        scale=shape.scale,
    )
    rows = _heads_and_rows(shape, row)[1]
    return shared_bytes(
        paged, arch, rows=rows, tile=row.block_n, num_stages=row.num_stages, reload_query=channels_at_a_time(shape.head_pad, row)
    )


def _strides(heads: int, head_size: int, tile: int) -> SideStrides:
    """Of a side [T, H, D]. Every tile is a block of its own, so that the tokens of long sequences have 64-bit addresses."""
    row = heads * head_size
    return SideStrides(
        offset=0,
        layer=0,
        block=tile * row,
        head=head_size,
        token_outer=row,
        token=0,
        n_vector=1,
        dim_outer=1,
        dim=0,
        d_vector=1,
    )


def plan_encoder_attention(shape: EncoderShape, arch: str, *, num_cus: int | None = None, tiled: PrefillConfig | None = None) -> Program:
    """Launches of one encoder attention.

    Args:
      shape: what is static about the call.
      arch: see `purepage.kernels.archs`.
      num_cus: not used: the grid follows from the tokens.
      tiled: tile sizes in place of the table's.

    Returns:
      A program with inputs query, key, value, query_start_loc and those optional ones that the shape has (masks, alibi_slopes, sinks,
      score_scale); outputs out and, if asked, lse.

    Raises:
      ValueError: the override passes a limit of the arch.
      UnsupportedError: nothing is tuned for the arch, or no tile fits it.
    """
    facts = arch_facts(arch)
    row = _fitting_row(shape, facts, tiled)
    heads, rows = _heads_and_rows(shape, row)
    tokens = rows // heads
    states, results = (Buffer((shape.num_tokens, shape.num_heads, size), shape.dtype) for size in (shape.head_size, shape.value_size))
    keys, values = (Buffer((shape.num_tokens, shape.num_kv_heads, size), shape.dtype) for size in (shape.head_size, shape.value_size))
    inputs = {"query": states, "key": keys, "value": values, "query_start_loc": Buffer((shape.num_seqs + 1,), "int32")}
    if masks_of(shape):
        inputs["masks"] = Buffer((masks_of(shape),), "int32")
    if shape.has_alibi:
        inputs["alibi_slopes"] = Buffer((shape.num_heads,), "float32")
    if shape.has_sinks:
        inputs["sinks"] = Buffer((shape.num_heads,), "float32")
    if shape.has_score_scale:
        inputs["score_scale"] = Buffer((1,), "float32")
    key, value = (_strides(shape.num_kv_heads, size, row.block_n) for size in (shape.head_size, shape.value_size))
    spec = AttentionSpec(
        num_heads=shape.num_heads,
        queries_per_kv_head=shape.group,
        head_size=shape.head_size,
        head_pad=shape.head_pad,
        value_size=shape.value_size,
        value_pad=shape.value_pad,
        scale=float(shape.scale),
        causal=shape.causal and not shape.ranged,
        window=0 if shape.ranged else kernel_window(shape.sliding_window),
        traced_window=shape.traced_window and not shape.ranged,
        ranged=shape.ranged,
        soft_cap=float(shape.logits_soft_cap or 0.0),
        has_alibi=shape.has_alibi,
        query_dtype=shape.dtype,
        out_dtype=shape.dtype,
        compute_dtype="float32" if arch == "cpu" else shape.dtype,  # the interpreter's dot takes bfloat16 for integers
        kv=KVLayout(num_blocks=0, block_size=row.block_n, dtype=shape.dtype, key=key, value=value),
        seqs_pad=max(16, next_power_of_two(shape.num_seqs)),
        block_heads=heads,
        block_tokens=tokens,
        block_m=rows,
        block_n=row.block_n,
        masked_block_n=edge_of(row),
        reload_query=channels_at_a_time(shape.head_pad, row),
        partial_sums=sums_of(row),
        amd=facts.vendor == "amd",
    )
    # Sequence s has row blocks from query_start_loc[s] // tokens + s on: at most this many in all, whatever the lengths.
    blocks = ceil_div(shape.num_tokens, tokens) + shape.num_seqs if shape.num_tokens else 0
    outputs = {"out": results, **({"lse": Buffer((shape.num_tokens, shape.num_heads), "float32")} if shape.return_lse else {})}
    names = "out lse query key value query_start_loc masks alibi_slopes sinks score_scale".split()
    launch = Launch(
        kernel=ENCODER_KERNEL,
        grid=(blocks * shape.num_kv_heads * ceil_div(shape.group, heads), 1, 1),
        args=(*(name if name in inputs or name in outputs else None for name in names), shape.num_tokens, shape.num_seqs),
        writes=tuple(outputs),
        constants=(("S", spec),),
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        options=row.options,
    )
    return Program("encoder_attention", tuple(inputs.items()), tuple(outputs.items()), (), (), (launch,))
