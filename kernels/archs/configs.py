"""The configurations of the attention kernels: block sizes, warps, pipeline stages and what a kernel does beside.

A configuration is data. `measured` names the device and the sweep behind it; None means that it was never timed and was chosen
because it compiles without spills.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Options = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class PrefillConfig:
    """Configuration of the prefill kernel and of encoder attention.

    Attributes:
      block_m: rows of a program; a row is one query token of one query head.
      block_n: keys of one iteration.
      num_warps, num_stages: as Triton takes them.
      options: further compile options, such as ("waves_per_eu", 2).
      reload_query: 0 keeps the query in registers. Otherwise heads wider than this many channels reload the query with every block of keys,
        this many channels at a time, since wide heads leave no registers for it.
      optimistic: masked blocks are attended without NaN safety first, and again with it where a NaN shows in the result.
      frozen_max: with `optimistic`, the row maximum of the masked blocks is kept for all others, where bfloat16 holds the weights.
      partial_sums: partial row sums that a row keeps while the loop runs; 0 keeps one. With as many as the matrix unit's layout has
        columns in one lane, no sum crosses lanes.
      late_clamp: block ids are clamped when their block is read, not when they are fetched one iteration ahead (pipelined loops on AMD).
      masked_block_n: keys of a masked iteration; 0 is `block_n`. Fewer keys leave more registers for the masks.
      kv_descriptor: blocks of keys and values within one page come through a tensor descriptor, where the cache is a matrix with a token
        a row.
      one_loop_tiles: sequences of at most so many tiles are attended in one loop, see `purepage.kernels.triton.kv_loop.attend_all`.
      phase_bytes: where the longest sequence's keys and values are more, some heads are attended after the others; 0 never.
      page_copy_from: from this many rows of a KV head on, pages that no descriptor can read are copied first; 0 never copies.
      measured: device and sweep, or None.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    options: Options = ()
    reload_query: int = 0
    optimistic: bool = False
    frozen_max: bool = False
    partial_sums: int = 0
    late_clamp: bool = False
    masked_block_n: int = 0
    kv_descriptor: bool = False
    one_loop_tiles: int = 0
    phase_bytes: int = 0
    page_copy_from: int = 0
    measured: str | None = None


@dataclass(frozen=True)
class DecodeConfig:
    """Configuration of the decode kernel, which splits each sequence, and of its reduction.

    Attributes:
      block_n: keys of one iteration.
      num_warps, num_stages: as Triton takes them.
      splits_per_cu: splits for each compute unit.
      max_block_m: most rows of a program.
      options, reload_query, partial_sums, late_clamp, masked_block_n, measured: as in `PrefillConfig`.
      values_first: the loads of the values are issued before the scores are computed, where the loop is not pipelined.
      reduce_num_warps: warps of the reduction.
      one_loop: one loop that masks every tile serves decode of one token a sequence, see `purepage.kernels.triton.kv_loop.attend_all`.
      unsplit_keys: where no sequence has more keys, the prefill kernel serves the sequences that decode beside prompts.
      whole_tiles: sequences of at most so many tiles are not split, where there are as many programs as compute units; longer ones where
        there are more.
    """

    block_n: int
    num_warps: int
    num_stages: int
    splits_per_cu: int
    max_block_m: int = 64
    options: Options = ()
    reload_query: int = 0
    partial_sums: int = 0
    late_clamp: bool = False
    masked_block_n: int = 0
    values_first: bool = False
    reduce_num_warps: int = 4
    one_loop: bool = False
    whole_tiles: int = 0
    unsplit_keys: int = 0
    measured: str | None = None


@dataclass(frozen=True)
class WriterConfig:
    """Configuration of the cache writers and of rotary embedding. No architecture has a table of them: they follow from the shapes.

    Attributes:
      block_tokens: tokens of a program.
      block_heads: heads of a program; of `update_cache` always 1.
      num_warps: as Triton takes them.
      measured: as in `PrefillConfig`.
    """

    block_tokens: int
    block_heads: int
    num_warps: int
    measured: str | None = None


Config = TypeVar("Config", PrefillConfig, DecodeConfig)

ConfigTable = Mapping[str, Mapping[int, Config]]
"""Configurations by kind of cache and by head size. The kinds are `ANY`, `FP8` and `KV_DESCRIPTOR`; the one of the smallest head size at
or above the (power of two) head size of the call is taken."""

ANY = "any"
"""Every cache that has no table of its own."""
FP8 = "fp8"
"""Quantized caches."""
KV_DESCRIPTOR = "kv_descriptor"
"""16-bit caches that are a matrix with a token a row ("packed" and "flash"), which tensor descriptors can read."""

KINDS = (ANY, FP8, KV_DESCRIPTOR)

WAVES_2: Options = (("waves_per_eu", 2),)
