"""Plans of paged attention: from shapes to launches. Planning needs neither Triton nor a GPU."""

import math
from dataclasses import dataclass, replace
from typing import Any

from ...functional.errors import UnsupportedError, bad_value
from ..archs import Arch, arch_facts
from ..archs.choice import config_for, narrowed, over_limits, smaller
from ..archs.configs import ANY, FP8, KV_DESCRIPTOR, DecodeConfig, PrefillConfig
from ..launch import Buffer, Descriptor, Launch, Program
from ..triton.spec import AttentionSpec, KVLayout
from .page_copy import copied_shape, page_copy_launch, reading_copy, spec_on_copy
from .shapes import ITEMSIZE, PagedAttentionShape
from .sizes import ceil_div, next_power_of_two

PREFILL_KERNEL = "purepage.kernels.triton.prefill:paged_attention_prefill"
DECODE_KERNEL = "purepage.kernels.triton.decode:paged_attention_decode"
REDUCE_KERNEL = "purepage.kernels.triton.decode:paged_attention_reduce"
FLOATS_PER_THREAD = 128
"""Scores and sums of a decode program, float32, that a thread of an NVIDIA GPU keeps in registers."""
MOST_DRAFTS = 16
"""Query tokens of a sequence that decodes, drafts included."""
MAX_WINDOW = 2**30
"""No sequence has as many tokens."""


def kernel_window(window: int | None) -> int:
    """W for the kernels, 0 where it is off. MAX_WINDOW serves for any wider one, so that no position plus or minus W leaves 32 bits."""
    return min(max(window or 0, 0), MAX_WINDOW)


def masks_of(shape: Any) -> int:
    """Integers that `purepage.kernels.triton.masks` reads: a window, or two of each sequence and two of each token."""
    return 2 * (shape.num_seqs + shape.num_tokens) if shape.ranged else int(shape.traced_window)


def channels_at_a_time(head_pad: int, row: PrefillConfig | DecodeConfig) -> int:
    """How many channels of the query are loaded at a time, with every tile; 0 where it is kept."""
    return row.reload_query if row.reload_query < head_pad else 0


def shared_bytes(shape: PagedAttentionShape, arch: Arch, *, rows: int, tile: int, num_stages: int, reload_query: int = 0) -> int:
    """Shared memory of a workgroup, from above: the query's rows, a key and a value tile a stage, scores on their way to a product."""
    compute = ITEMSIZE[shape.compute_dtype]
    stored = shape.cache.dtype.itemsize
    # Tiles wait in shared memory as stored; one that must be converted goes through it a second time.
    channels = reload_query or shape.head_pad
    elements = tile * (channels + shape.value_pad)
    converted = 0 if shape.cache.dtype.name == shape.compute_dtype else elements * compute
    scores = rows * tile * (compute if shape.qq_bias is None else 4)  # a bias is added in float32
    query, tiles = rows * channels * compute, num_stages * elements * stored + converted + scores
    # On AMD the query only passes through on its way to registers, before the first tile comes.
    together = max(query, tiles) if arch.vendor == "amd" else query + tiles
    return together + together * arch.shared_padding // 16


def _fit(shape: PagedAttentionShape, arch: Arch, row: Any, override: Any, rows_of: Any) -> Any:
    """`override` if it keeps the arch's limits (else ValueError), or the first of ever smaller configurations from `row` that does."""
    candidate = row if override is None else override
    while True:
        why = over_limits(
            arch,
            shared_bytes=shared_bytes(
                shape,
                arch,
                rows=rows_of(candidate),
                tile=candidate.block_n,
                num_stages=candidate.num_stages,
                reload_query=channels_at_a_time(shape.head_pad, candidate),
            ),
            num_warps=candidate.num_warps,
        )
        if why is None:
            return candidate
        if override is not None:
            bad_value("tuning", override, f"within the limits of {arch.name}: {why}")
        following = smaller(candidate)
        if following is None:
            raise UnsupportedError(f"triton: head size {shape.cache.head_size} does not fit {arch.name}: {why}")
        candidate = following


@dataclass(frozen=True)
class WorkCut:
    """Which kernels serve a call, and with which configurations.

    Attributes:
      prefill, decode: configuration of each kernel; None where it is not launched.
      split_tokens: sequences of at most so many query tokens are the decode kernel's; 0 where it is not launched.
      copied: the call over a copy of its pages, which the prefill kernel reads; None where nothing is copied.
    """

    prefill: PrefillConfig | None
    decode: DecodeConfig | None
    split_tokens: int
    copied: PagedAttentionShape | None


def work_cut(
    shape: PagedAttentionShape,
    arch: str,
    *,
    num_cus: int | None = None,
    tiled: PrefillConfig | None = None,
    split: DecodeConfig | None = None,
) -> WorkCut:
    """The kernels and configurations of a call; arguments and errors are those of `plan_paged_attention`."""
    facts = arch_facts(arch)
    cus = num_cus or facts.num_cus
    chosen = _with_warps(shape, facts, _row(facts.decode, shape, facts), cus)
    split_row = _fit(shape, facts, chosen, split, lambda row: _split_rows(shape, row, cus)[2])
    split_tokens = _split_rows(shape, split_row, cus)[1]
    uses_tiled = shape.max_query_len > split_tokens
    if uses_tiled and (shape.num_seqs == 1 or _longest_span(shape, 1) <= split_row.unsplit_keys):
        split_tokens = 0  # the one sequence is a prefill, or none has keys enough for a launch of its own
    tiled_row = _fit(shape, facts, _row(facts.prefill, shape, facts), tiled, lambda row: _tiled_rows(shape, row)[2])
    if not shape.num_tokens:
        return WorkCut(None, None, 0, None)
    copied = copied_shape(shape, tiled_row.page_copy_from) if uses_tiled and _pages(shape, tiled_row) is None else None
    if copied is not None:
        tiled_row = _fit(copied, facts, _row(facts.prefill, copied, facts), tiled, lambda row: _tiled_rows(copied, row)[2])
    return WorkCut(tiled_row if uses_tiled else None, split_row if split_tokens else None, split_tokens, copied)


def plan_paged_attention(
    shape: PagedAttentionShape,
    arch: str,
    *,
    num_cus: int | None = None,
    tiled: PrefillConfig | None = None,
    split: DecodeConfig | None = None,
) -> Program:
    """Launches of one call.

    Args:
      shape: what is static about the call.
      arch: see `purepage.kernels.archs`.
      num_cus: compute units of the device; default: the arch's usual part.
      tiled, split: tile sizes in place of the tables'.

    Returns:
      A program with inputs query, cache, k_scale, v_scale, query_start_loc, seq_lens, block_table, layer and those optional ones that the
      shape has (alibi_slopes, sinks, qq_bias, score_scale, output_scale); outputs out and, if asked, lse.

    Raises:
      ValueError: an override passes a limit of the arch.
      UnsupportedError: nothing is tuned for the arch, or no tile fits it.
    """
    facts = arch_facts(arch)
    cus = num_cus or facts.num_cus
    inputs = _inputs(shape)
    outputs = {"out": Buffer((shape.num_tokens, shape.num_heads, shape.cache.value_size), shape.output_dtype)}
    if shape.return_lse:
        outputs["lse"] = Buffer((shape.num_tokens, shape.num_heads), "float32")

    cut = work_cut(shape, arch, num_cus=num_cus, tiled=tiled, split=split)
    names = {**inputs, **outputs}
    launches, scratch = [], {}
    if cut.copied is not None and cut.prefill is not None:
        original = _prefill_spec(shape, facts, cut.prefill, cut.split_tokens)
        copy, scratch = page_copy_launch(shape, cut.copied, original)
        on_copy = spec_on_copy(_prefill_spec(cut.copied, facts, cut.prefill, cut.split_tokens), original)
        launches += [copy, reading_copy(_prefill_launch(cut.copied, cut.prefill, names, on_copy))]
    elif cut.prefill is not None:
        launches.append(_prefill_launch(shape, cut.prefill, names, _prefill_spec(shape, facts, cut.prefill, cut.split_tokens)))
    if cut.decode is not None:
        parts, more = _decode_launches(shape, facts, cut.decode, cus, names, zero_padding=cut.prefill is None)
        launches += parts
        scratch |= more
    return Program(
        name="paged_attention",
        inputs=tuple(inputs.items()),
        outputs=tuple(outputs.items()),
        updates=(),
        scratch=tuple(scratch.items()),
        launches=tuple(launches),
    )


def _hardware_fp8(shape: PagedAttentionShape, arch: Arch) -> bool:
    return shape.cache.dtype.name in arch.hardware_fp8 and (shape.query_dtype in ITEMSIZE or shape.query_dtype in arch.hardware_fp8)


def _row(table: Any, shape: PagedAttentionShape, arch: Arch) -> Any:
    kind = FP8 if shape.cache.is_quantized else KV_DESCRIPTOR if _pitch(shape) else ANY
    row = config_for(arch, table, shape.widest, kind=kind)
    # float8_e5m2 is the upper half of a float16: decoding it takes no registers.
    decoded = shape.cache.is_quantized and shape.cache.dtype.name != "float8_e5m2" and not _hardware_fp8(shape, arch)
    straddles = shape.cache.block_size % row.block_n != 0
    crowded = shape.widest > 64 and (shape.has_alibi or straddles or shape.query_dtype not in ITEMSIZE)
    float32, biased = shape.compute_dtype == "float32", shape.qq_bias is not None
    return narrowed(row, arch, float32=float32, has_bias=biased, crowded=crowded, decoded_fp8=decoded)


def _pitch(shape: PagedAttentionShape) -> int:
    """Elements from a token to the next where the cache is a matrix with a token a row and a head a run of columns, else 0."""
    if shape.cache.head_size_v is not None:  # one descriptor serves both sides
        return 0
    sides = shape.cache.side_strides
    pitch, heads = sides[0].token_outer, shape.cache.num_kv_heads
    for side in sides:
        across = side.head if side.head < pitch else 0  # heads side by side in a row, or each in rows of its own
        together = (side.layer, side.block, 0 if across else side.head)
        row_like = side.n_vector == side.d_vector == side.dim_outer == 1 and side.token_outer == pitch
        if (
            not row_like
            or any(stride % pitch for stride in together)
            or side.offset % pitch + across * (heads - 1) + shape.head_pad > pitch
        ):
            return 0
    whole = shape.head_pad == shape.cache.head_size and shape.compute_dtype == shape.cache.dtype.name != "float32"
    return pitch if whole and pitch * shape.cache.dtype.itemsize % 16 == 0 else 0


def _pages(shape: PagedAttentionShape, row: PrefillConfig) -> Descriptor | None:
    pitch = _pitch(shape) if row.kv_descriptor else 0
    if not pitch or shape.cache.block_size % row.block_n:
        return None
    rows = math.prod(shape.cache.shape) // pitch
    return Descriptor("cache", shape.cache.dtype.name, (rows, pitch), (row.block_n, shape.head_pad)) if rows < 2**31 else None


def sums_of(row: PrefillConfig | DecodeConfig) -> int:
    return row.partial_sums if row.partial_sums and row.block_n % row.partial_sums == 0 else 0


def edge_of(row: PrefillConfig | DecodeConfig) -> int:
    return min(row.masked_block_n or row.block_n, row.block_n)


def heads_of_rows(group: int, rows: int) -> int:
    """Heads of one KV head that a program of so many rows has: as many as leave at most 15 % of all rows empty.

    Of 71 heads 9, with 7 query tokens in 64 rows, and not 36 with one.
    """

    def used(heads: int) -> float:
        return group / (ceil_div(group, heads) * heads) * (rows // heads * heads / rows)

    choices = sorted({ceil_div(group, blocks) for blocks in range(1, group + 1) if ceil_div(group, blocks) <= rows}, reverse=True)
    return next((heads for heads in choices if used(heads) >= 0.85), max(choices, key=used))


def _tiled_rows(shape: PagedAttentionShape, row: PrefillConfig) -> tuple[int, int, int]:
    """(heads of a group, query tokens, rows) of one program."""
    heads = heads_of_rows(shape.group, row.block_m)
    rows = min(row.block_m, max(16, next_power_of_two(heads * shape.max_query_len)))
    return heads, rows // heads, rows


def _split_rows(shape: PagedAttentionShape, row: DecodeConfig, cus: int) -> tuple[int, int, int]:
    """(heads of a group, most query tokens, rows). The matrix unit has 16 rows at least: several query tokens may share them at no cost.

    All query tokens of a short chunk are rows of one program where the prefill kernel would leave compute units without one.
    """
    heads = ceil_div(shape.group, ceil_div(shape.group, row.max_block_m))
    fits = shape.max_query_len * heads <= row.max_block_m
    few = shape.max_query_len <= MOST_DRAFTS or shape.num_seqs * shape.cache.num_kv_heads < cus
    tokens = shape.max_query_len if fits and few else max(1, 16 // heads)
    tokens = max(1, min(tokens, shape.max_query_len))
    return heads, tokens, max(16, next_power_of_two(heads * tokens))


def _with_warps(shape: PagedAttentionShape, arch: Arch, row: DecodeConfig, cus: int) -> DecodeConfig:
    """`row` with as many warps as its scores and sums need: many heads of one KV head fill more rows than the table's warps can hold.

    A thread has 255 registers. Half of them are for the operands on their way and for addresses.
    """
    rows = _split_rows(shape, row, cus)[2]
    values = rows * (shape.value_pad + row.block_n)
    while arch.vendor == "nvidia" and row.num_warps < 8 and values > FLOATS_PER_THREAD * arch.wave_size * row.num_warps:
        row = replace(row, num_warps=2 * row.num_warps, splits_per_cu=max(1, row.splits_per_cu // 2), measured=None)
    return row


def _inputs(shape: PagedAttentionShape) -> dict[str, Buffer]:
    spec = shape.cache
    scales = (spec.num_layers, spec.num_kv_heads) if shape.scales_per_head else (spec.num_layers,)
    inputs = {
        "query": Buffer((shape.num_tokens, shape.num_heads, spec.head_size), shape.query_dtype),
        "cache": Buffer(spec.shape, shape.cache_dtype or spec.storage_dtype.name),
        "k_scale": Buffer(scales, "float32"),
        "v_scale": Buffer(scales, "float32"),
        "query_start_loc": Buffer((shape.num_seqs + 1,), "int32"),
        "seq_lens": Buffer((shape.num_seqs,), "int32"),
        "block_table": Buffer((shape.num_seqs, shape.table_width), "int32"),
        "layer": Buffer((1 + masks_of(shape),), "int32"),
    }
    if shape.has_alibi:
        inputs["alibi_slopes"] = Buffer((shape.num_heads,), "float32")
    if shape.has_sinks:
        inputs["sinks"] = Buffer((shape.num_heads,), "float32")
    if shape.qq_bias is not None:
        inputs["qq_bias"] = Buffer(shape.qq_bias, "float32")
    if shape.has_score_scale:
        inputs["score_scale"] = Buffer((1,), "float32")
    if shape.has_output_scale:
        inputs["output_scale"] = Buffer((1,), "float32")
    return inputs


def _spec(shape: PagedAttentionShape, arch: Arch, row: PrefillConfig | DecodeConfig, **cut: Any) -> AttentionSpec:
    """Facts of a launch: those of the call, those of the configuration, and how the work is cut."""
    cache = shape.cache
    key, value = cache.side_strides
    bias_rows, bias_columns = (shape.qq_bias or (0, 0))[-2:]
    return AttentionSpec(
        num_heads=shape.num_heads,
        queries_per_kv_head=shape.group,
        head_size=cache.head_size,
        head_pad=shape.head_pad,
        value_size=cache.value_size,
        value_pad=shape.value_pad,
        scale=float(shape.scale),
        causal=shape.causal and not shape.context_only and not shape.ranged,  # a key of the context is before every query
        context_only=shape.context_only and not shape.ranged,
        window=0 if shape.ranged else kernel_window(shape.sliding_window),
        traced_window=shape.traced_window and not shape.ranged,
        ranged=shape.ranged,
        soft_cap=float(shape.logits_soft_cap or 0.0),
        has_alibi=shape.has_alibi,
        bias_rows=bias_rows,
        bias_columns=bias_columns,
        bias_per_sequence=shape.qq_bias is not None and len(shape.qq_bias) == 3,
        query_dtype=shape.query_dtype,
        out_dtype=shape.output_dtype,
        compute_dtype="float32" if arch.vendor == "cpu" else shape.compute_dtype,  # the interpreter's dot takes bfloat16 for integers
        hardware_fp8=_hardware_fp8(shape, arch),
        row_factor=shape.row_factor,
        is_quantized=cache.is_quantized,
        scale_heads=cache.num_kv_heads if shape.scales_per_head else 1,
        kv=KVLayout(
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            dtype=cache.dtype.name,
            key=key,
            value=value,
            wide_offsets=cache.num_blocks * max(key.block, value.block) >= 2**31,
        ),
        seqs_pad=max(16, next_power_of_two(shape.num_seqs)),
        block_n=row.block_n,
        masked_block_n=edge_of(row),
        reload_query=channels_at_a_time(shape.head_pad, row),
        partial_sums=sums_of(row),
        late_clamp=row.late_clamp,
        amd=arch.vendor == "amd",
        by_vector=arch.vendor != "amd" and 1 < key.d_vector == key.token_outer and not channels_at_a_time(shape.head_pad, row),
        **cut,
    )


def _args(names: dict[str, Buffer], wanted: str, *others: int | Descriptor | None) -> tuple[Any, ...]:
    return (*[name if name in names else None for name in wanted.split()], *others)


def _prefill_spec(shape: PagedAttentionShape, arch: Arch, row: PrefillConfig, split_tokens: int) -> AttentionSpec:
    heads, tokens, rows = _tiled_rows(shape, row)
    spec = _spec(shape, arch, row, split_tokens=split_tokens, block_heads=heads, block_tokens=tokens, block_m=rows)
    optimistic = row.optimistic and not spec.rows_see_same_keys
    one_loop = ceil_div(_longest_span(shape, tokens), row.block_n) <= row.one_loop_tiles and (optimistic or spec.rows_see_same_keys)
    one_loop = one_loop and not spec.reload_query and not shape.qq_bias
    # float16 weights end at 2**16, so they can't exceed the maximum of the masked tiles by much.
    frozen_max = optimistic and row.frozen_max and shape.compute_dtype != "float16" and not one_loop
    phase_heads = _phase_heads(shape, row, spec)
    # Keys and values that pass through registers are slower where the products read shared memory.
    spec = replace(spec, by_vector=False) if rows >= 64 else spec
    return replace(spec, optimistic=optimistic, frozen_max=frozen_max, one_loop=one_loop, phase_heads=phase_heads)


def _longest_span(shape: PagedAttentionShape, tokens: int) -> int:
    """Most keys that a block of so many query tokens reads; W's are not known to be adjacent to a tile's edge."""
    window = kernel_window(shape.sliding_window)
    sides = window if shape.causal else 2 * window
    return min(shape.longest, sides + tokens) if window else shape.longest


def _phase_heads(shape: PagedAttentionShape, row: PrefillConfig, spec: AttentionSpec) -> int:
    """Blocks of heads that are attended together: whole KV heads, with `phase_bytes` of keys and values in the longest sequence at most."""
    if not row.phase_bytes:
        return 0
    kv_heads = shape.cache.num_kv_heads
    each = shape.longest * (shape.cache.head_size + shape.cache.value_size) * shape.cache.dtype.itemsize
    together = max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and (n == 1 or n * each <= row.phase_bytes))
    return together * spec.group_blocks


def _prefill_launch(shape: PagedAttentionShape, row: PrefillConfig, names: dict[str, Buffer], spec: AttentionSpec) -> Launch:
    # Sequence s has row blocks from query_start_loc[s] // block_tokens + s on: at most this many in all, whatever the lengths.
    blocks = shape.num_tokens // spec.block_tokens + shape.num_seqs
    blocks = max(blocks, ceil_div(shape.num_tokens, spec.block_tokens))
    return Launch(
        kernel=PREFILL_KERNEL,
        grid=(blocks * spec.head_blocks, 1, 1),
        args=_args(
            names,
            "out lse query cache k_scale v_scale query_start_loc seq_lens block_table layer "
            "alibi_slopes sinks qq_bias score_scale output_scale",
            shape.num_tokens,
            shape.num_seqs,
            shape.table_width,
            _pages(shape, row),
        ),
        writes=tuple(name for name in ("out", "lse") if name in names),
        constants=(("S", spec),),
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        options=row.options,
    )


def _decode_launches(
    shape: PagedAttentionShape, arch: Arch, row: DecodeConfig, cus: int, names: dict[str, Buffer], *, zero_padding: bool
) -> tuple[list[Launch], dict[str, Buffer]]:
    heads, tokens, rows = _split_rows(shape, row, cus)
    head_blocks = shape.cache.num_kv_heads * ceil_div(shape.group, heads)
    window = kernel_window(shape.sliding_window)
    keys = min(shape.longest, window + tokens + row.block_n) if window else shape.longest
    tiles = ceil_div(keys, row.block_n)
    # Each compute unit runs `splits_per_cu` programs at a time. With this many rounds for each tile of the longest sequence the last round
    # costs less than the merge, whatever the lengths are.
    programs = shape.num_seqs * head_blocks
    enough = cus if tiles <= row.whole_tiles else cus * row.splits_per_cu * tiles / 5
    whole = tiles <= 8 * row.whole_tiles and programs >= enough
    splits = 0 if whole else max(1, min(cus * row.splits_per_cu // head_blocks, shape.num_seqs * tiles))
    spec = _spec(
        shape,
        arch,
        row,
        split_tokens=tokens,
        block_heads=heads,
        block_tokens=tokens,
        block_m=rows,
        num_splits=splits,
        whole_sequences=whole,
        zero_padding=whole and zero_padding,
        values_first=row.values_first and not (shape.has_alibi or shape.logits_soft_cap),  # those need the registers
    )
    spec = replace(spec, one_loop=row.one_loop and spec.rows_see_same_keys and not spec.reload_query)
    scratch = {} if whole else {"parts": Buffer((spec.part_rows * (shape.cache.value_size + 2),), "float32")}
    names = {**names, **scratch}
    written = tuple(name for name in ("out", "lse") if name in names)
    if whole:
        programs = max(shape.num_seqs, shape.num_tokens if zero_padding else 0) * head_blocks
    else:
        programs = splits * head_blocks
    decode = Launch(
        kernel=DECODE_KERNEL,
        grid=(programs, 1, 1),
        args=_args(
            names,
            "out lse parts query cache k_scale v_scale query_start_loc seq_lens block_table layer "
            "alibi_slopes sinks qq_bias score_scale output_scale",
            shape.num_tokens,
            shape.num_seqs,
            shape.table_width,
        ),
        writes=(*written, *scratch),
        constants=(("S", spec),),
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        options=row.options,
    )
    if whole:
        return [decode], scratch
    # With many sequences a program merges all rows of one. With few it merges one row, so that the merge of a long sequence is spread out.
    row_count = heads * tokens
    merged = next_power_of_two(row_count) if shape.num_seqs * head_blocks >= cus else 1
    merged = min(merged, max(1, 2048 // shape.value_pad))
    parts = max(1, min(next_power_of_two(splits), 4096 // (merged * shape.value_pad), 32))
    reduce = Launch(
        kernel=REDUCE_KERNEL,
        grid=(max(shape.num_seqs, shape.num_tokens if zero_padding else 0) * head_blocks * ceil_div(row_count, merged), 1, 1),
        args=_args(
            names,
            "out lse parts v_scale query_start_loc seq_lens layer sinks output_scale",
            shape.num_tokens,
            shape.num_seqs,
        ),
        writes=written,
        constants=(("S", replace(spec, block_m=merged, parts_per_step=parts, zero_padding=zero_padding)),),
        num_warps=row.reduce_num_warps,
        num_stages=1,
    )
    return [decode, reduce], scratch
