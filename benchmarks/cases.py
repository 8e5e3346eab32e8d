"""The workloads, with the fewest bytes and operations that each needs. Plain data: no device is used."""

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
LLAMA_8B_LAYERS = 32


@dataclass(frozen=True)
class Case:
    """Attention of one batch over one layer of a paged cache.

    Attributes:
      name: as the tables print it; unique.
      lengths: (new tokens, tokens in the cache with them) of each sequence.
      num_heads, num_kv_heads, head_size, block_size, content: see `CacheSpec`.
      dtype: of queries; cache_dtype: of the cache.
      window: sliding window or None.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 64
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    content: str = "packed"
    window: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(q for q, _ in self.lengths)

    @property
    def width(self) -> int:
        """Blocks of the longest sequence."""
        return max(math.ceil(n / self.block_size) for _, n in self.lengths)

    @property
    def num_blocks(self) -> int:
        return sum(math.ceil(n / self.block_size) for _, n in self.lengths)

    @property
    def is_decode(self) -> bool:
        return all(q == 1 for q, _ in self.lengths)

    @property
    def is_trace(self) -> bool:
        """Whether its lengths are a production trace's, or the same bytes in equal lengths."""
        return self.name.startswith(("decode ragged, ", "decode uniform, "))

    @property
    def is_uniform(self) -> bool:
        return len(set(self.lengths)) == 1

    @property
    def kv_bytes(self) -> int:
        """Keys and values that some query sees, each read once."""
        seen = sum(min(n, self.window + q - 1) if self.window else n for q, n in self.lengths)
        return 2 * seen * self.num_kv_heads * self.head_size * ITEMSIZE[self.cache_dtype]

    @property
    def min_bytes(self) -> int:
        """Keys, values, queries and outputs, each moved once."""
        return self.kv_bytes + 2 * self.num_tokens * self.num_heads * self.head_size * ITEMSIZE[self.dtype]

    @property
    def flops(self) -> int:
        """Two products a visible pair of query and key. Masked pairs are not counted."""
        pairs = 0
        for q, n in self.lengths:
            first = n - q + 1  # keys that the sequence's first query sees
            if self.window is None:
                pairs += q * (first + n) // 2
            else:
                pairs += sum(min(first + i, self.window) for i in range(q))
        return 4 * pairs * self.num_heads * self.head_size


@dataclass(frozen=True)
class WriterCase:
    """One write of a step's new tokens. `kind`: "update", "rope" or "qk_norm"."""

    name: str
    kind: str
    num_tokens: int = 8192
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 64
    num_blocks: int = 256
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"

    @property
    def min_bytes(self) -> int:
        """Inputs read once; the cache rows and the returned query and key written once. The returned value is not counted: it need not be
        written.
        """
        row = self.num_tokens * self.head_size
        read, wrote = ITEMSIZE[self.dtype], ITEMSIZE[self.cache_dtype]
        moved = 2 * row * self.num_kv_heads * (read + wrote)
        if self.kind != "update":
            moved += row * (2 * self.num_heads + self.num_kv_heads) * read
        return moved


def decode(count: int, context: int) -> tuple[tuple[int, int], ...]:
    return ((1, context),) * count


def prefill(count: int, new: int, context: int | None = None) -> tuple[tuple[int, int], ...]:
    return ((new, context or new),) * count


MIXED = ("mixed 2048 + 63 x 4096", "prefill 1 x 2048", "decode 63 x 4096")
WINDOWED = ("decode 16 x 32768, window 4096", "decode 16 x 4096")

GPU_CASES = (
    Case("decode 1 x 32768", decode(1, 32768)),
    Case("decode 8 x 4096", decode(8, 4096)),
    Case("decode 64 x 8192", decode(64, 8192)),
    Case("decode 256 x 2048", decode(256, 2048)),
    Case("decode 64 x 8192, block 16", decode(64, 8192), block_size=16),
    Case("decode 64 x 8192, fp8 cache", decode(64, 8192), cache_dtype="float8_e4m3fn"),
    Case("prefill 1 x 8192", prefill(1, 8192)),
    Case("prefill 4 x 4096", prefill(4, 4096)),
    Case("chunked 16 x (512 of 2048)", prefill(16, 512, 2048)),
    Case("prefill 1 x 8192, fp8 cache", prefill(1, 8192), cache_dtype="float8_e4m3fn"),
    Case("chunked 16 x (512 of 2048), fp8 cache", prefill(16, 512, 2048), cache_dtype="float8_e4m3fn"),
    Case(MIXED[0], (*prefill(1, 2048), *decode(63, 4096))),
    Case(MIXED[1], prefill(1, 2048)),
    Case(MIXED[2], decode(63, 4096)),
    Case(WINDOWED[0], decode(16, 32768), window=4096),
    Case(WINDOWED[1], decode(16, 4096)),
    Case("decode 64 x 8192, D 64", decode(64, 8192), num_heads=64, head_size=64),
    Case("decode 64 x 8192, G 8", decode(64, 8192), num_heads=64),
)

CPU_CASES = tuple(
    Case(name, lengths, dtype="float32", cache_dtype="float32")
    for name, lengths in (
        ("decode 1 x 32768", decode(1, 32768)),
        ("decode 8 x 4096", decode(8, 4096)),
        ("decode 32 x 1024", decode(32, 1024)),
        ("prefill 1 x 1024", prefill(1, 1024)),
        ("prefill 1 x 2048", prefill(1, 2048)),
        ("prefill 4 x 512", prefill(4, 512)),
        ("chunked 4 x (256 of 1024)", prefill(4, 256, 1024)),
    )
)

TINY_CASES = (
    Case("decode 2 x 48", decode(2, 48), num_heads=4, num_kv_heads=2, head_size=32, block_size=16, dtype="float32", cache_dtype="float32"),
    Case("chunked 2 x (8 of 24)", prefill(2, 8, 24), 4, 2, 32, block_size=16, dtype="float32", cache_dtype="float32"),
)
"""Small cases that show that everything runs; their times mean nothing."""

WRITERS = (
    WriterCase("update_cache, 8192 tokens", "update"),
    WriterCase("update_cache, 8192 tokens, cache x 16", "update", num_blocks=4096),
    WriterCase("update_cache, 8192 tokens, fp8 cache", "update", cache_dtype="float8_e4m3fn"),
    WriterCase("rope + update_cache, 8192 tokens", "rope"),
    WriterCase("qk-norm + rope + update_cache, 8192 tokens", "qk_norm"),
)
TINY_WRITERS = tuple(
    WriterCase(f"{kind}, 32 tokens", kind, 32, 4, 2, 32, 16, 8, dtype="float32", cache_dtype="float32")
    for kind in ("update", "rope", "qk_norm")
)


def trace_lengths(folder: Path, count: int = 64) -> dict[str, list[int]]:
    """Context lengths of the first `count` requests of each trace in a folder: Azure's CSV files and Mooncake's JSON lines.

    Raises:
      FileNotFoundError: no such file is there.
    """
    traces = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as rows:
            traces[path.stem] = [int(row["ContextTokens"]) for row, _ in zip(csv.DictReader(rows), range(count), strict=False)]
    for path in sorted(folder.glob("*.jsonl")):
        with path.open() as rows:
            traces[path.stem] = [json.loads(row)["input_length"] for row, _ in zip(rows, range(count), strict=False)]
    if not traces:
        raise FileNotFoundError(f"no .csv or .jsonl trace in {folder}")
    return traces


def ragged_cases(traces: dict[str, list[int]]) -> tuple[Case, ...]:
    """For each trace a decode batch of its context lengths, then a uniform one of the same bytes of keys and values."""
    cases = []
    for name, lengths in traces.items():
        mean = round(sum(lengths) / len(lengths))
        cases.append(Case(f"decode ragged, {name}", tuple((1, n) for n in lengths)))
        cases.append(Case(f"decode uniform, {name}", decode(len(lengths), mean)))
    return tuple(cases)
