"""Paged attention for prefill and mixed batches: one program for each block of query tokens and group of query heads, over all its keys."""

import triton
import triton.language as tl

from .address import matrix_place, side_base
from .kv_block import fetch_ids, first_blocks, lost_blocks
from .kv_loop import attend_all, attend_keys
from .masks import key_bounds, range_bounds, ranges_of, sequence_bounds, tile_bounds, window_of
from .output import store_rows, zero_padding
from .query import LOG2E, bias_table, block_rows, head_scale, load_query, locate_block, score_factor
from .softmax import initial_state
from .spec import QueryRows, SequenceKeys, SoftmaxState


@triton.jit
def paged_attention_prefill(
    out,  # [T, Hq, Dv] output dtype
    lse,  # [T, Hq] f32, or None
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
    descriptor,  # tensor descriptor of the cache as a matrix with a token a row, or None
    S: tl.constexpr,  # AttentionSpec
):
    """Grid: blocks of query tokens x blocks of heads. Sequences of at most split_tokens query tokens belong to the decode kernel."""
    KEY: tl.constexpr = S.kv.key
    VALUE: tl.constexpr = S.kv.value
    STORED: tl.constexpr = S.kv.dtype
    KV: tl.constexpr = S.kv
    program = tl.program_id(0)
    if S.in_phases:
        # Some heads after the other, so that the keys and values of those that run together fit the L2 cache.
        blocks = tl.num_programs(0) // S.head_blocks
        phase = program // (blocks * S.phase_heads)
        head_block = phase * S.phase_heads + program % S.phase_heads
        order = program // S.phase_heads % blocks
    else:
        head_block = program % S.head_blocks
        order = program // S.head_blocks
    kv_head = head_block // S.group_blocks
    row_token, head, is_row = block_rows(kv_head, head_block % S.group_blocks, S)
    used_tokens = tl.load(query_start_loc + num_seqs)
    zero_padding(out, lse, order, used_tokens, num_tokens, row_token, head, is_row, S)

    # The last blocks run first: under a causal mask they have the most tiles, and the light ones fill the tail.
    block = used_tokens // S.block_tokens + num_seqs - 1 - order
    if block < 0:
        return
    seq, query_start, query_len, first = locate_block(block, query_start_loc, num_seqs, S)
    if (first >= query_len) | (query_len <= S.split_tokens):
        return
    kv_len = tl.load(seq_lens + seq)
    layer_index = tl.load(layer)
    context = kv_len - query_len
    count = tl.minimum(query_len - first, S.block_tokens)
    ok = is_row & (row_token < count)
    position = context + first + row_token
    token = (query_start + first).to(tl.int64) + row_token

    # All rows of a sequence are NaN where one of them needs a block that is not in the cache, so the blocks of all rows are looked at.
    visible_len = context if S.context_only else kv_len
    table_row = block_table + tl.cast(seq, tl.int64) * table_width
    masks = layer + 1
    window = window_of(masks, S)
    seq_begin, seq_end = sequence_bounds(masks, seq, query_len, kv_len, True, window, S)
    # Only looked at after the keys: nothing waits for them.
    first_ids = first_blocks(table_row, seq_begin, seq_end, table_width, S)
    factor = score_factor(score_scale, k_scale, layer_index, kv_head, S)
    q, source, factor = load_query(query, query_start + first, row_token, head, ok, factor, S)
    state = initial_state(sinks, head, ok, 0, S)
    if S.has_alibi:
        slope = LOG2E * tl.load(alibi_slopes + head, mask=ok, other=0.0)
    else:
        slope = None
    if S.bias_columns > 0:
        bias_row = bias_table(qq_bias, seq, S) + (first + row_token) * S.bias_columns
    else:
        bias_row = None

    if S.ranged:
        ranges = ranges_of(masks, num_seqs, query_start + first, S)
        key_begin, key_end, full_begin, full_end = range_bounds(ranges, ok, S)
    else:
        ranges = None
        key_begin, key_end, full_begin, full_end = key_bounds(context + first, context + first + count - 1, visible_len, window, S)
    if S.bias_columns > 0:
        full_end = tl.minimum(full_end, tl.maximum(context, 0))  # tiles with a bias are masked: its columns have an end
    if S.frozen_max:
        full_end = tl.maximum(full_end - 1, 0)  # the last key that every row sees is left to a masked tile
    lo, hi, full_lo, full_hi = tile_bounds(key_begin, key_end, full_begin, full_end, S.block_n)
    if descriptor is not None:
        key_place = matrix_place(layer_index, kv_head, KEY)
        value_place = matrix_place(layer_index, kv_head, VALUE)
    else:
        key_place = None
        value_place = None
    keys = SequenceKeys(
        table_row,
        table_width,
        side_base(cache, layer_index, kv_head, KEY, STORED),
        side_base(cache, layer_index, kv_head, VALUE, STORED),
        descriptor,
        key_place,
        value_place,
        key_begin,
        key_end,
        context,
    )
    rows = QueryRows(q, source, factor, position, window, ranges, slope, bias_row, ok & (first + row_token < S.bias_rows))
    if S.one_loop:
        ids = fetch_ids(table_row, lo, table_width, S.block_n, KV)
        state = attend_all(state, rows, keys, ids, lo, hi, S)
    else:
        state = attend_keys(state, rows, keys, lo, hi, full_lo, full_hi, S)
    lost = lost_blocks(first_ids, table_row, seq_begin, seq_end, table_width, S)
    state = SoftmaxState(state.acc, state.row_sum + lost, state.row_max)
    if S.is_quantized:
        value_scale = head_scale(v_scale, layer_index, kv_head, S)
    else:
        value_scale = 1.0
    store_rows(out, lse, token, head, ok, state, value_scale, output_scale, S)
