"""Tile sizes of paged attention, by architecture and head size (rounded up to a power of two).

`measured` says where a row comes from: a row that nobody timed says so. Rows start from what compiles without spills.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...functional.errors import UnsupportedError
from .arch import Arch

Options = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class PrefillConfig:
    """Tiled kernel: `rows` of query tokens times heads by `tile` keys.

    `reload_query`: where wide heads leave no registers to keep the query in, it comes from the cache with every tile, this many channels
    at a time, and the keys with them; heads no wider than that keep it, and 0 always does.
    `optimistic`: masked tiles are attended without care for NaN, and once more with it where NaN shows.
    `frozen_max`, with `optimistic`: the peaks of the masked tiles' scores stand for the others, where bfloat16 keeps their weights.
    `sums`: partial sums of a row while it is under way, 0 for its one sum: as many as the matrix unit's layout has columns side by side,
    no sum then crosses lanes.
    `late_clamp`: ids of blocks are clamped with their tile, not where they are fetched, a tile ahead: for pipelined loops on AMD.
    `edge`: keys of a masked tile, 0 for those of any other: a smaller one leaves more registers for its masks.
    `descriptors`: tiles within a page of a cache that is a matrix, a token a row, come by the copy engine.
    `stage`: from this many query tokens times heads of a KV head on, pages that can't come so are copied first; 0 for never.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    options: Options = ()
    reload_query: int = 0
    optimistic: bool = False
    frozen_max: bool = False
    sums: int = 0
    late_clamp: bool = False
    edge: int = 0
    descriptors: bool = False
    stage: int = 0
    measured: str | None = None


@dataclass(frozen=True)
class DecodeConfig:
    """Split kernel: `tile` keys at a time; `programs_per_cu` shares for each compute unit; at most `max_rows` rows.

    `sums`, `late_clamp` and `edge` as in `PrefillConfig`; `values_first`: a tile's values are asked for before its scores are made, where no
    pipeline does; `reduce_warps` are those of a program of the reduction.
    """

    tile: int
    num_warps: int
    num_stages: int
    programs_per_cu: int
    max_rows: int = 64
    options: Options = ()
    reload_query: int = 0
    sums: int = 0
    late_clamp: bool = False
    edge: int = 0
    values_first: bool = False
    reduce_warps: int = 4
    measured: str | None = None


Row = TypeVar("Row", PrefillConfig, DecodeConfig)

WAVES_2: Options = (("waves_per_eu", 2),)

OPTIMISTIC: Mapping[str, Any] = {"optimistic": True, "frozen_max": True, "sums": 8}
FETCHED: Mapping[str, Any] = {**OPTIMISTIC, "descriptors": True, "stage": 1024}

TILED: Mapping[str, Mapping[int, PrefillConfig]] = {
    "sm_90": {
        64: PrefillConfig(64, 64, 4, 4, **OPTIMISTIC, measured="H200: best of twelve at 1x8192, D 64, bf16"),
        128: PrefillConfig(128, 64, 8, 3, **OPTIMISTIC, stage=1024, measured="H200: best of three at 1x8192, x-packed, bf16"),
        256: PrefillConfig(128, 64, 8, 2, **OPTIMISTIC, stage=1024),
        512: PrefillConfig(64, 32, 8, 2),
    },
    "sm_90 descriptors": {
        64: PrefillConfig(64, 64, 4, 4, **OPTIMISTIC, measured="H200: pointers were as fast as descriptors at D 64"),
        128: PrefillConfig(64, 64, 4, 3, **FETCHED, measured="H200: best of forty at 1x8192, 4x4096 and 16 x 512 of 2048, bf16"),
        256: PrefillConfig(128, 64, 8, 2, **FETCHED, measured="H200: best of eight at 1x8192, D 256, bf16"),
    },
    "sm_90 fp8": {128: PrefillConfig(128, 128, 8, 3, **OPTIMISTIC, stage=1024, measured="H200: best of twenty-five at 1x8192, D 128")},
    "sm_80": {
        64: PrefillConfig(128, 64, 4, 3),
        128: PrefillConfig(128, 64, 8, 2),
        256: PrefillConfig(64, 32, 4, 2),
        512: PrefillConfig(32, 32, 4, 1),
    },
    "gfx90a": {
        64: PrefillConfig(64, 64, 4, 1, WAVES_2),
        128: PrefillConfig(128, 32, 4, 1),
        256: PrefillConfig(64, 32, 4, 1),
        512: PrefillConfig(32, 16, 4, 1),
    },
    "gfx942": {
        64: PrefillConfig(64, 64, 4, 1, WAVES_2),
        128: PrefillConfig(128, 64, 4, 1, WAVES_2, edge=32),
        256: PrefillConfig(64, 32, 4, 1),
        512: PrefillConfig(32, 16, 4, 1),
    },
    "gfx950": {
        64: PrefillConfig(64, 64, 4, 2, WAVES_2, late_clamp=True),
        128: PrefillConfig(128, 64, 4, 2, edge=32, late_clamp=True),
        256: PrefillConfig(64, 32, 4, 1),
        512: PrefillConfig(32, 32, 4, 1),
    },
    "gfx1100": {
        64: PrefillConfig(64, 32, 4, 1),
        128: PrefillConfig(32, 16, 8, 1),
        256: PrefillConfig(16, 16, 8, 1, reload_query=128),
        512: PrefillConfig(16, 16, 8, 1, reload_query=128),
    },
    "gfx1151": {
        64: PrefillConfig(64, 32, 4, 1),
        128: PrefillConfig(32, 16, 8, 1),
        256: PrefillConfig(16, 16, 8, 1, reload_query=128),
        512: PrefillConfig(16, 16, 8, 1, reload_query=128),
    },
    "gfx1201": {
        64: PrefillConfig(64, 32, 4, 1),
        128: PrefillConfig(64, 32, 8, 1),
        256: PrefillConfig(32, 16, 8, 1),
        512: PrefillConfig(16, 16, 8, 1, reload_query=128),
    },
    "gfx1250": {
        64: PrefillConfig(128, 64, 4, 2),
        128: PrefillConfig(128, 32, 8, 2),
        256: PrefillConfig(64, 32, 8, 2),
        512: PrefillConfig(32, 16, 8, 2),
    },
    "cpu": {4096: PrefillConfig(16, 16, 1, 1)},
}
"""Row of the smallest head size at or above the one at hand; "fp8" are quantized caches, "descriptors" those that are a matrix, a token
a row (packed and flash, 16-bit). Encoder attention takes those of unquantized caches."""

SPLIT: Mapping[str, Mapping[int, DecodeConfig]] = {
    "sm_90": {
        64: DecodeConfig(64, 2, 3, 4, 128, reduce_warps=1, measured="H200: best of twelve at 64x8192, D 64, bf16"),
        128: DecodeConfig(
            64, 4, 3, 2, 128, reduce_warps=1, measured="H200: within 1 % of the best of thirty at 64x8192 and 256x2048, bf16"
        ),
        256: DecodeConfig(32, 4, 3, 2, 64, reduce_warps=1),
        512: DecodeConfig(32, 8, 2, 1, 64, reduce_warps=1),
    },
    "sm_90 fp8": {128: DecodeConfig(64, 2, 3, 4, 64, sums=16, reduce_warps=1, measured="H200: best of thirty at 64x8192, D 128")},
    "sm_80": {128: DecodeConfig(64, 4, 3, 2, 64), 256: DecodeConfig(32, 4, 2, 2, 64), 512: DecodeConfig(16, 4, 2, 1, 32)},
    "gfx90a": {128: DecodeConfig(64, 4, 1, 2), 256: DecodeConfig(32, 4, 1, 2), 512: DecodeConfig(16, 4, 1, 2, 32)},
    "gfx942": {
        128: DecodeConfig(64, 2, 1, 4, edge=32, values_first=True),
        256: DecodeConfig(32, 4, 1, 2),
        512: DecodeConfig(16, 4, 1, 2, 32),
    },
    "gfx942 fp8": {128: DecodeConfig(32, 1, 1, 8, edge=16, values_first=True)},
    "gfx950": {
        128: DecodeConfig(64, 2, 1, 4, edge=32, values_first=True),
        256: DecodeConfig(32, 4, 2, 2, late_clamp=True),
        512: DecodeConfig(32, 4, 1, 2, 32),
    },
    "gfx950 fp8": {128: DecodeConfig(64, 2, 2, 4, edge=32, late_clamp=True, values_first=True)},
    "gfx1100": {
        64: DecodeConfig(32, 4, 1, 4, 32),
        128: DecodeConfig(16, 8, 1, 4, 16, reload_query=64),
        256: DecodeConfig(16, 8, 1, 4, 16, reload_query=128),
        512: DecodeConfig(16, 16, 1, 4, 16, reload_query=128),
    },
    "gfx1151": {
        64: DecodeConfig(32, 4, 1, 4, 32),
        128: DecodeConfig(16, 8, 1, 4, 16, reload_query=64),
        256: DecodeConfig(16, 8, 1, 4, 16, reload_query=128),
        512: DecodeConfig(16, 16, 1, 4, 16, reload_query=128),
    },
    "gfx1201": {
        64: DecodeConfig(32, 4, 1, 4, 32),
        128: DecodeConfig(32, 8, 1, 4, 32),
        256: DecodeConfig(16, 8, 1, 4, 16),
        512: DecodeConfig(16, 8, 1, 4, 16, reload_query=128),
    },
    "gfx1250": {128: DecodeConfig(64, 4, 2, 2), 256: DecodeConfig(64, 4, 2, 2), 512: DecodeConfig(16, 8, 2, 2, 32)},
    "cpu": {4096: DecodeConfig(16, 1, 1, 2, 128)},
}


def row_for(tables: Mapping[str, Mapping[int, Row]], arch: str, head_pad: int, *, kind: str = "") -> Row:
    """The row of the smallest head size in the arch's table that is not below `head_pad`; a kind of cache may have rows of its own.

    Raises:
      UnsupportedError: the table ends below `head_pad`.
    """
    own = tables.get(f"{arch} {kind}", {})
    table = own if any(size >= head_pad for size in own) else tables[arch]
    if head_pad > max(table):
        raise UnsupportedError(f"triton: head sizes up to {max(table)} on {arch}, not {head_pad}: no tile fits the registers")
    return table[min(size for size in table if size >= head_pad)]


def narrowed(row: Row, arch: Arch, *, float32: bool, biased: bool = False, crowded: bool = False, decoded: bool = False) -> Row:
    """The row for calls whose tiles need more registers than those that the tables are for.

    float32 has no matrix unit worth the name, and none at all on RDNA: its operands fill the registers. On AMD a bias between query tokens
    takes a tile of pointers, `crowded` calls more registers than an option for two waves leaves, and fp8 that is `decoded` with integers
    more of them than the widest heads leave.
    """
    if float32:
        most, waves = (16, 8) if arch.matrix == "wmma" else (32, 1)
        row = replace(row, tile=min(row.tile, most), num_warps=max(row.num_warps, waves), measured=None)
        if arch.vendor == "amd":
            row = replace(row, reload_query=64 if arch.matrix == "wmma" else 128)
        if isinstance(row, PrefillConfig):
            return replace(row, rows=min(row.rows, most), num_stages=1, optimistic=False, sums=0)
        return replace(row, max_rows=min(row.max_rows, most), num_stages=min(row.num_stages, 2), sums=0)
    if decoded and arch.vendor == "amd":
        row = replace(row, reload_query=min(row.reload_query or 256, 256), measured=None)
    if (crowded or biased) and arch.vendor == "amd":
        row = replace(row, options=(), measured=None)
    if biased and arch.vendor == "amd":
        return replace(row, tile=max(16, row.tile // 2), options=(), measured=None)  # nor does it leave room for two waves
    return row


def smaller(row: Row) -> Row | None:
    """The next configuration that needs less shared memory, or None: fewer stages, then a smaller tile, then fewer rows."""
    if row.num_stages > 1:
        return replace(row, num_stages=row.num_stages - 1, measured=None)
    if row.tile > 16:
        return replace(row, tile=row.tile // 2, measured=None)
    if isinstance(row, PrefillConfig) and row.rows > 16:
        return replace(row, rows=row.rows // 2, measured=None)
    if isinstance(row, DecodeConfig) and row.max_rows > 16:
        return replace(row, max_rows=row.max_rows // 2, measured=None)
    return None
