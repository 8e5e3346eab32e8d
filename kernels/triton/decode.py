"""Paged attention for decode: every program takes an equal share of the batch's KV tiles, wherever sequences begin and end.

The tiles of all sequences that decode are numbered one after another. Program p of a KV head takes tiles [p * share, (p + 1) * share):
a ragged batch keeps every compute unit busy to the end. A sequence that lies within one share is written at once; the others leave one
partial result per program, at most two a program, which `paged_attention_reduce` merges.
"""

import triton
import triton.language as tl

from .common import uniform
from .kv_block import LOG2E, key_bounds, side_base, tile_bounds
from .kv_loop import attend_range
from .output import block_rows, score_factor, start_rows, store_rows, store_zeros
from .query import load_query


@triton.jit
def tiles_of(
    query_len,
    kv_len,
    is_seq,
    SPLIT_TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CONTEXT_ONLY: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Tiles to read for sequences (one, or a vector of them); none for those that the split kernel leaves alone."""
    context = kv_len - query_len
    begin, end, _, _ = key_bounds(context, kv_len - 1, context if CONTEXT_ONLY else kv_len, CAUSAL, WINDOW)
    lo, hi, _, _ = tile_bounds(begin, end, begin, end, TILE)
    return tl.where(is_seq & (query_len > 0) & (query_len <= SPLIT_TOKENS), hi - lo, 0)


@triton.jit
def tiles_of_batch(
    query_start_loc,
    seq_lens,
    num_seqs,
    SEQS_PAD: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CONTEXT_ONLY: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    seqs = tl.arange(0, SEQS_PAD)
    is_seq = seqs < num_seqs
    query_len = tl.load(query_start_loc + seqs + 1, mask=is_seq, other=0) - tl.load(query_start_loc + seqs, mask=is_seq, other=0)
    kv_len = tl.load(seq_lens + seqs, mask=is_seq, other=0)
    return seqs, tiles_of(query_len, kv_len, is_seq, SPLIT_TOKENS, CAUSAL, CONTEXT_ONLY, WINDOW, TILE)


@triton.jit
def paged_attention_split(
    out,
    lse,
    part_acc,
    part_sum,
    part_max,
    query,
    cache,
    k_scale,
    v_scale,
    query_start_loc,
    seq_lens,
    block_table,
    layer,
    alibi_slopes,
    sinks,
    qq_bias,
    score_scale,
    output_scale,
    num_seqs,
    table_width,
    PROGRAMS: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    CONTEXT_ONLY: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    BIAS_COLUMNS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    RELOAD_QUERY: tl.constexpr,
    SUMS: tl.constexpr,
    LATE_CLAMP: tl.constexpr,
    VALUES_FIRST: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    EDGE: tl.constexpr,
    QUERY_KIND: tl.constexpr,
    STORED: tl.constexpr,
    COMPUTE: tl.constexpr,
    OUT_KIND: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    ROW_FACTOR: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SCALE_HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    AMD: tl.constexpr,
    K_SIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    HEAD_BLOCKS: tl.constexpr = NUM_HEADS // GROUP * HEAD_TILES
    program = tl.program_id(0)
    head_block = program % HEAD_BLOCKS
    part = program // HEAD_BLOCKS
    kv_head = head_block // HEAD_TILES

    seqs, counts = tiles_of_batch(query_start_loc, seq_lens, num_seqs, SEQS_PAD, SPLIT_TOKENS, CAUSAL, CONTEXT_ONLY, WINDOW, TILE)
    ends = tl.cumsum(counts, 0)
    total = uniform(tl.sum(counts, 0), AMD)
    share = (total + PROGRAMS - 1) // PROGRAMS
    share_begin = part * share
    share_end = tl.minimum(share_begin + share, total)
    if share_begin >= share_end:
        return
    first_seq = uniform(tl.sum((ends <= share_begin).to(tl.int32), 0), AMD)
    last_seq = uniform(tl.sum((ends < share_end).to(tl.int32), 0), AMD)
    seq_begin = uniform(tl.sum(tl.where(seqs < first_seq, counts, 0), 0), AMD)

    row_token, head, is_row = block_rows(kv_head, head_block % HEAD_TILES, GROUP, HEADS, SPLIT_TOKENS, ROWS)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_PAD)
    layer_index = tl.load(layer)
    key_base = side_base(cache, layer_index, kv_head, K_SIDE, STORED)
    value_base = side_base(cache, layer_index, kv_head, V_SIDE, STORED)
    scalar_factor = score_factor(score_scale, k_scale, layer_index, kv_head, SCALE, SOFT_CAP, QUANTIZED, SCALE_HEADS)
    if QUANTIZED:
        value_scale = tl.load(v_scale + layer_index * SCALE_HEADS + (kv_head if SCALE_HEADS > 1 else 0))
    else:
        value_scale = 1.0
    if alibi_slopes is not None:
        slope = LOG2E * tl.load(alibi_slopes + head, mask=is_row, other=0.0)
    else:
        slope = None
    if BIAS_COLUMNS > 0:
        bias_row = qq_bias + row_token * BIAS_COLUMNS
    else:
        bias_row = None

    for seq in tl.range(first_seq, last_seq + 1, num_stages=1):
        query_start = tl.load(query_start_loc + seq)
        query_len = tl.load(query_start_loc + seq + 1) - query_start
        kv_len = tl.load(seq_lens + seq)
        count = tiles_of(query_len, kv_len, seq < num_seqs, SPLIT_TOKENS, CAUSAL, CONTEXT_ONLY, WINDOW, TILE)
        seg_lo = tl.maximum(share_begin - seq_begin, 0)
        seg_hi = tl.minimum(share_end - seq_begin, count)
        if seg_hi > seg_lo:
            context = kv_len - query_len
            ok = is_row & (row_token < query_len)
            q_base = query + query_start.to(tl.int64) * (NUM_HEADS * HEAD_SIZE)
            q_offsets = (row_token * NUM_HEADS + head) * HEAD_SIZE
            q, factor, multiplier = load_query(
                q_base, q_offsets, ok, scalar_factor, QUERY_KIND, COMPUTE, HARDWARE_FP8, ROW_FACTOR, HEAD_SIZE, HEAD_PAD
            )
            row_sum, row_max = start_rows(sinks, head, ok, seg_lo, ROWS)
            acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
            keys = context if CONTEXT_ONLY else kv_len
            key_begin, key_end, full_begin, full_end = key_bounds(context, kv_len - 1, keys, CAUSAL, WINDOW)
            if BIAS_COLUMNS > 0:
                full_end = tl.minimum(full_end, tl.maximum(context, 0))
            lo, hi, full_lo, full_hi = tile_bounds(key_begin, key_end, full_begin, full_end, TILE)
            hi = lo + seg_hi
            lo = lo + seg_lo
            full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
            full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
            acc, row_sum, row_max = attend_range(
                acc,
                row_sum,
                row_max,
                q,
                (q_base, q_offsets, ok, multiplier),
                factor,
                lo,
                hi,
                full_lo,
                full_hi,
                block_table + tl.cast(seq, tl.int64) * table_width,
                table_width,
                key_base,
                value_base,
                None,
                (0, 0),
                context + row_token,
                key_begin,
                key_end,
                slope,
                bias_row,
                ok & (row_token < BIAS_ROWS),
                context,
                False,
                False,
                SUMS,
                BIAS_COLUMNS == 0 and (SPLIT_TOKENS == 1 or (not CAUSAL and WINDOW == 0)),
                RELOAD_QUERY,
                QUERY_KIND,
                ROW_FACTOR,
                CAUSAL,
                WINDOW,
                SOFT_CAP,
                alibi_slopes is not None,
                BIAS_COLUMNS,
                HEAD_SIZE,
                HEAD_PAD,
                NUM_BLOCKS,
                BLOCK_SIZE,
                TILE,
                EDGE,
                STORED,
                COMPUTE,
                HARDWARE_FP8,
                WIDE,
                K_SIDE,
                V_SIDE,
                AMD,
                LATE_CLAMP,
                VALUES_FIRST,
            )
            if seg_hi - seg_lo == count:
                token = query_start.to(tl.int64) + row_token
                store_rows(
                    out, lse, token, head, ok, acc, row_sum, row_max, value_scale, output_scale, NUM_HEADS, HEAD_SIZE, HEAD_PAD, OUT_KIND
                )
            else:
                # A part that starts with the share is the program's first, another one its last.
                slot = part * 2 + (seq_begin + seg_lo != share_begin).to(tl.int32)
                part_row = (slot * HEAD_BLOCKS + head_block) * (SPLIT_TOKENS * HEADS) + row
                part_ok = row < SPLIT_TOKENS * HEADS
                pointers = part_acc + part_row[:, None] * HEAD_SIZE + d[None, :]
                tl.store(pointers, acc, mask=part_ok[:, None] & (d < HEAD_SIZE)[None, :])
                tl.store(part_sum + part_row, row_sum, mask=part_ok)
                tl.store(part_max + part_row, row_max, mask=part_ok)
        seq_begin += count


@triton.jit
def paged_attention_reduce(
    out,
    lse,
    part_acc,
    part_sum,
    part_max,
    v_scale,
    query_start_loc,
    seq_lens,
    layer,
    sinks,
    output_scale,
    num_tokens,
    num_seqs,
    ZERO_PADDING: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CONTEXT_ONLY: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr,
    OUT_KIND: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SCALE_HEADS: tl.constexpr,
):
    """Merges the parts of each sequence that crosses shares, PARTS at a time; writes sequences of no key and, if asked, padding tokens."""
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    HEAD_BLOCKS: tl.constexpr = NUM_HEADS // GROUP * HEAD_TILES
    ROW_COUNT: tl.constexpr = SPLIT_TOKENS * HEADS
    ROW_BLOCKS: tl.constexpr = (ROW_COUNT + ROWS - 1) // ROWS
    program = tl.program_id(0)
    row_block = program % ROW_BLOCKS
    head_block = program // ROW_BLOCKS % HEAD_BLOCKS
    seq = program // (ROW_BLOCKS * HEAD_BLOCKS)
    kv_head = head_block // HEAD_TILES
    row = row_block * ROWS + tl.arange(0, ROWS)
    in_group = head_block % HEAD_TILES * HEADS + row % HEADS
    head = kv_head * GROUP + in_group
    is_row = (row < ROW_COUNT) & (in_group < GROUP)

    if ZERO_PADDING:
        used_tokens = tl.load(query_start_loc + num_seqs)
        if (seq >= used_tokens) & (seq < num_tokens):
            store_zeros(out, lse, (seq + row * 0).to(tl.int64), head, is_row & (row < HEADS), NUM_HEADS, HEAD_SIZE, HEAD_PAD, OUT_KIND)
    if seq >= num_seqs:
        return
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    if (query_len <= 0) | (query_len > SPLIT_TOKENS):
        return
    seqs, counts = tiles_of_batch(query_start_loc, seq_lens, num_seqs, SEQS_PAD, SPLIT_TOKENS, CAUSAL, CONTEXT_ONLY, WINDOW, TILE)
    total = tl.sum(counts, 0)
    begin = tl.sum(tl.where(seqs < seq, counts, 0), 0)
    count = tl.sum(tl.where(seqs == seq, counts, 0), 0)
    share = tl.maximum((total + PROGRAMS - 1) // PROGRAMS, 1)
    first_part = begin // share
    last_part = (begin + tl.maximum(count, 1) - 1) // share
    if (count > 0) & (first_part == last_part):
        return

    ok = is_row & (row // HEADS < query_len)
    row_sum, row_max = start_rows(sinks, head, ok, count, ROWS)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    d = tl.arange(0, HEAD_PAD)
    for group in tl.range(first_part, tl.where(count > 0, last_part + 1, first_part), PARTS):
        part = group + tl.arange(0, PARTS)
        slot = part * 2 + ((part == first_part) & (begin % share != 0)).to(tl.int32)
        part_row = (slot[:, None] * HEAD_BLOCKS + head_block) * ROW_COUNT + row[None, :]
        part_ok = (part <= last_part)[:, None] & is_row[None, :]
        row_maxes = tl.load(part_max + part_row, mask=part_ok, other=float("-inf"))
        row_sums = tl.load(part_sum + part_row, mask=part_ok, other=0.0)
        pointers = part_acc + part_row[:, :, None] * HEAD_SIZE + d[None, None, :]
        values = tl.load(pointers, mask=part_ok[:, :, None] & (d < HEAD_SIZE)[None, None, :], other=0.0)
        new_max = tl.maximum(row_max, tl.max(row_maxes, 0))
        floor = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(row_maxes - floor[None, :])
        rescale = tl.exp2(row_max - floor)
        row_sum = row_sum * rescale + tl.sum(row_sums * weights, 0)
        acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 0)
        row_max = new_max
    if QUANTIZED:
        value_scale = tl.load(v_scale + tl.load(layer) * SCALE_HEADS + (kv_head if SCALE_HEADS > 1 else 0))
    else:
        value_scale = 1.0
    token = query_start.to(tl.int64) + row // HEADS
    store_rows(out, lse, token, head, ok, acc, row_sum, row_max, value_scale, output_scale, NUM_HEADS, HEAD_SIZE, HEAD_PAD, OUT_KIND)
