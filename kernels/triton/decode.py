"""Paged attention for decode: every program takes an equal share of the batch's KV tiles, wherever sequences begin and end.

The tiles of all sequences that decode are numbered one after another. Program p of a KV head takes tiles [p * share, (p + 1) * share), so a
ragged batch keeps every compute unit busy to the end. A sequence that lies within one share is written at once. The others leave one
partial result for each program, at most two a program, which `paged_attention_reduce` merges.

Where sequences are short, or their window is, each program takes one whole sequence instead, and nothing is left to merge.
"""

import triton
import triton.language as tl

from .address import side_base, uniform
from .kv_block import fetch_ids, first_blocks, lost_blocks
from .kv_loop import attend_all, attend_keys
from .masks import ANY_KEY, key_bounds, range_bounds, ranges_of, sequence_bounds, tile_bounds, window_of
from .output import store_rows, store_zeros
from .query import LOG2E, bias_table, block_rows, head_scale, load_query, score_factor
from .softmax import initial_state
from .spec import QueryRows, SequenceKeys, SoftmaxState


@triton.jit
def tiles_of(masks, seq, query_len, kv_len, is_seq, window, S: tl.constexpr):
    """Tiles to read for sequences (one, or a vector of them); 0 for those that do not belong to the decode kernel."""
    begin, end = sequence_bounds(masks, seq, query_len, kv_len, is_seq, window, S)
    lo, hi, _, _ = tile_bounds(begin, end, begin, end, S.block_n)
    return tl.where(is_seq & (query_len > 0) & (query_len <= S.split_tokens), hi - lo, 0)


@triton.jit
def tiles_of_batch(query_start_loc, seq_lens, num_seqs, masks, window, S: tl.constexpr):
    """([seqs_pad] sequence numbers, [seqs_pad] their tiles)."""
    seqs = tl.arange(0, S.seqs_pad)
    is_seq = seqs < num_seqs
    query_len = tl.load(query_start_loc + seqs + 1, mask=is_seq, other=0) - tl.load(query_start_loc + seqs, mask=is_seq, other=0)
    kv_len = tl.load(seq_lens + seqs, mask=is_seq, other=0)
    return seqs, tiles_of(masks, seqs, query_len, kv_len, is_seq, window, S)


@triton.jit
def paged_attention_decode(
    out,  # [T, Hq, Dv] output dtype
    lse,  # [T, Hq] f32, or None
    parts,  # f32: acc [part_rows, Dv], row_sum [part_rows], row_max [part_rows] of the partial results, or None
    query,  # [T, Hq, D] model dtype or fp8
    cache,  # the whole cache in its storage dtype
    k_scale,  # [L] or [L, H] f32
    v_scale,  # [L] or [L, H] f32
    query_start_loc,  # [S + 1] i32
    seq_lens,  # [S] i32
    block_table,  # [S, M] i32
    layer,  # i32: the layer, then the `masks` that are data
    alibi_slopes,  # [Hq] f32, or None
    sinks,  # [Hq] f32, or None
    qq_bias,  # [bias_rows, bias_columns] f32, or one for each sequence, or None
    score_scale,  # [1] f32, or None
    output_scale,  # [1] f32, or None
    num_tokens,  # i32: T
    num_seqs,  # i32: S
    table_width,  # i32: M
    S: tl.constexpr,  # AttentionSpec
):
    """Grid: num_splits, or with whole_sequences sequences (tokens where padding is written), x blocks of heads."""
    KEY: tl.constexpr = S.kv.key
    VALUE: tl.constexpr = S.kv.value
    STORED: tl.constexpr = S.kv.dtype
    KV: tl.constexpr = S.kv
    program = tl.program_id(0)
    head_block = program % S.head_blocks
    part = program // S.head_blocks
    kv_head = head_block // S.group_blocks

    masks = layer + 1
    window = window_of(masks, S)
    if S.whole_sequences:
        # One program for each sequence, or token where padding is written.
        if S.zero_padding:
            used_tokens = tl.load(query_start_loc + num_seqs)
            if (part >= used_tokens) & (part < num_tokens):
                row_token, head, is_row = block_rows(kv_head, head_block % S.group_blocks, S)
                store_zeros(out, lse, (part + row_token * 0).to(tl.int64), head, is_row & (row_token == 0), S)
        if part >= num_seqs:
            return
        first_seq = part
        last_seq = part
        seq_begin = part * 0
        share_begin = seq_begin
        share_end = seq_begin + ANY_KEY
    else:
        seqs, counts = tiles_of_batch(query_start_loc, seq_lens, num_seqs, masks, window, S)
        ends = tl.cumsum(counts, 0)
        total = uniform(tl.sum(counts, 0), S.amd)
        share = (total + S.num_splits - 1) // S.num_splits
        share_begin = part * share
        share_end = tl.minimum(share_begin + share, total)
        if share_begin >= share_end:
            return
        first_seq = uniform(tl.sum((ends <= share_begin).to(tl.int32), 0), S.amd)
        last_seq = uniform(tl.sum((ends < share_end).to(tl.int32), 0), S.amd)
        seq_begin = uniform(tl.sum(tl.where(seqs < first_seq, counts, 0), 0), S.amd)

    if not S.whole_sequences:
        part_sum = parts + S.part_rows * S.value_size
        part_max = part_sum + S.part_rows
    row_token, head, is_row = block_rows(kv_head, head_block % S.group_blocks, S)
    row = tl.arange(0, S.block_m)
    d = tl.arange(0, S.value_pad)
    layer_index = tl.load(layer)
    key_base = side_base(cache, layer_index, kv_head, KEY, STORED)
    value_base = side_base(cache, layer_index, kv_head, VALUE, STORED)
    scalar_factor = score_factor(score_scale, k_scale, layer_index, kv_head, S)
    if S.is_quantized:
        value_scale = head_scale(v_scale, layer_index, kv_head, S)
    else:
        value_scale = 1.0
    if S.has_alibi:
        slope = LOG2E * tl.load(alibi_slopes + head, mask=is_row, other=0.0)
    else:
        slope = None

    for seq in tl.range(first_seq, last_seq + 1, num_stages=1):
        query_start = tl.load(query_start_loc + seq)
        query_len = tl.load(query_start_loc + seq + 1) - query_start
        kv_len = tl.load(seq_lens + seq)
        count = tiles_of(masks, seq, query_len, kv_len, seq < num_seqs, window, S)
        part_lo = tl.maximum(share_begin - seq_begin, 0)
        part_hi = tl.minimum(share_end - seq_begin, count)
        if S.whole_sequences:
            attends = (query_len > 0) & (query_len <= S.split_tokens)  # without a key the output is 0
        else:
            attends = part_hi > part_lo
        if attends:
            context = kv_len - query_len
            ok = is_row & (row_token < query_len)
            visible_len = context if S.context_only else kv_len
            token = query_start.to(tl.int64) + row_token
            if S.ranged:
                ranges = ranges_of(masks, num_seqs, query_start, S)
                key_begin, key_end, full_begin, full_end = range_bounds(ranges, ok, S)
            else:
                ranges = None
                key_begin, key_end, full_begin, full_end = key_bounds(context, kv_len - 1, visible_len, window, S)
            if S.bias_columns > 0:
                bias_row = bias_table(qq_bias, seq, S) + row_token * S.bias_columns
                full_end = tl.minimum(full_end, tl.maximum(context, 0))
            else:
                bias_row = None
            lo, hi, full_lo, full_hi = tile_bounds(key_begin, key_end, full_begin, full_end, S.block_n)
            hi = lo + part_hi
            lo = lo + part_lo
            full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
            full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
            table_row = block_table + tl.cast(seq, tl.int64) * table_width
            lost_begin = tl.maximum(lo * S.block_n, key_begin)
            lost_end = tl.minimum(hi * S.block_n, key_end)
            first_ids = first_blocks(table_row, lost_begin, lost_end, table_width, S)
            ids = fetch_ids(table_row, lo, table_width, S.block_n, KV)
            q, source, factor = load_query(query, query_start, row_token, head, ok, scalar_factor, S)
            state = initial_state(sinks, head, ok, part_lo, S)
            keys = SequenceKeys(table_row, table_width, key_base, value_base, None, None, None, key_begin, key_end, context)
            rows = QueryRows(q, source, factor, context + row_token, window, ranges, slope, bias_row, ok & (row_token < S.bias_rows))
            if S.one_loop:
                state = attend_all(state, rows, keys, ids, lo, hi, S)
            else:
                state = attend_keys(state, rows, keys, lo, hi, full_lo, full_hi, S)
            lost = lost_blocks(first_ids, table_row, lost_begin, lost_end, table_width, S)
            state = SoftmaxState(state.acc, state.row_sum + lost, state.row_max)
            if S.whole_sequences:
                store_rows(out, lse, token, head, ok, state, value_scale, output_scale, S)
            elif part_hi - part_lo == count:
                store_rows(out, lse, token, head, ok, state, value_scale, output_scale, S)
            else:
                # A part that starts with the share is the program's first, another one its last.
                slot = part * 2 + (seq_begin + part_lo != share_begin).to(tl.int32)
                part_row = (slot * S.head_blocks + head_block) * (S.split_tokens * S.block_heads) + row
                part_ok = row < S.split_tokens * S.block_heads
                pointers = parts + part_row[:, None] * S.value_size + d[None, :]
                tl.store(pointers, state.acc, mask=part_ok[:, None] & (d < S.value_size)[None, :])
                tl.store(part_sum + part_row, state.row_sum, mask=part_ok)
                tl.store(part_max + part_row, state.row_max, mask=part_ok)
        seq_begin += count


@triton.jit
def paged_attention_reduce(
    out,  # [T, Hq, Dv] output dtype
    lse,  # [T, Hq] f32, or None
    parts,  # as in `paged_attention_decode`
    v_scale,  # [L] or [L, H] f32
    query_start_loc,  # [S + 1] i32
    seq_lens,  # [S] i32
    layer,  # i32: the layer, then the `masks` that are data
    sinks,  # [Hq] f32, or None
    output_scale,  # [1] f32, or None
    num_tokens,  # i32: T
    num_seqs,  # i32: S
    S: tl.constexpr,  # AttentionSpec; block_m are the rows of one of its programs
):
    """Merges the partial results of each sequence that crosses shares; writes sequences without keys and, if asked, padding tokens.

    Grid: sequences, or tokens where padding is written, x blocks of heads x blocks of rows.
    """
    ROW_COUNT: tl.constexpr = S.split_tokens * S.block_heads
    ROW_BLOCKS: tl.constexpr = (ROW_COUNT + S.block_m - 1) // S.block_m
    program = tl.program_id(0)
    row_block = program % ROW_BLOCKS
    head_block = program // ROW_BLOCKS % S.head_blocks
    seq = program // (ROW_BLOCKS * S.head_blocks)
    kv_head = head_block // S.group_blocks
    row = row_block * S.block_m + tl.arange(0, S.block_m)
    in_group = head_block % S.group_blocks * S.block_heads + row % S.block_heads
    head = kv_head * S.queries_per_kv_head + in_group
    is_row = (row < ROW_COUNT) & (in_group < S.queries_per_kv_head)

    if S.zero_padding:
        used_tokens = tl.load(query_start_loc + num_seqs)
        if (seq >= used_tokens) & (seq < num_tokens):
            store_zeros(out, lse, (seq + row * 0).to(tl.int64), head, is_row & (row < S.block_heads), S)
    if seq >= num_seqs:
        return
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    if (query_len <= 0) | (query_len > S.split_tokens):
        return
    masks = layer + 1
    seqs, counts = tiles_of_batch(query_start_loc, seq_lens, num_seqs, masks, window_of(masks, S), S)
    total = tl.sum(counts, 0)
    begin = tl.sum(tl.where(seqs < seq, counts, 0), 0)
    count = tl.sum(tl.where(seqs == seq, counts, 0), 0)
    share = tl.maximum((total + S.num_splits - 1) // S.num_splits, 1)
    first_part = begin // share
    last_part = (begin + tl.maximum(count, 1) - 1) // share
    if (count > 0) & (first_part == last_part):
        return

    ok = is_row & (row // S.block_heads < query_len)
    state = initial_state(sinks, head, ok, count, S)
    row_sum, row_max, acc = state.row_sum, state.row_max, state.acc
    d = tl.arange(0, S.value_pad)
    part_sum = parts + S.part_rows * S.value_size
    part_max = part_sum + S.part_rows
    for step in tl.range(first_part, tl.where(count > 0, last_part + 1, first_part), S.parts_per_step):
        part = step + tl.arange(0, S.parts_per_step)
        slot = part * 2 + ((part == first_part) & (begin % share != 0)).to(tl.int32)
        part_row = (slot[:, None] * S.head_blocks + head_block) * ROW_COUNT + row[None, :]
        part_ok = (part <= last_part)[:, None] & is_row[None, :]
        row_maxes = tl.load(part_max + part_row, mask=part_ok, other=float("-inf"))
        row_sums = tl.load(part_sum + part_row, mask=part_ok, other=0.0)
        pointers = parts + part_row[:, :, None] * S.value_size + d[None, None, :]
        values = tl.load(pointers, mask=part_ok[:, :, None] & (d < S.value_size)[None, None, :], other=0.0)
        new_max = tl.maximum(row_max, tl.max(row_maxes, 0))
        floor = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(row_maxes - floor[None, :])
        rescale = tl.exp2(row_max - floor)
        row_sum = row_sum * rescale + tl.sum(row_sums * weights, 0)
        acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 0)
        row_max = new_max
    if S.is_quantized:
        value_scale = head_scale(v_scale, tl.load(layer), kv_head, S)
    else:
        value_scale = 1.0
    token = query_start.to(tl.int64) + row // S.block_heads
    store_rows(out, lse, token, head, ok, SoftmaxState(acc, row_sum, row_max), value_scale, output_scale, S)
