"""Options of a random batch in groups, each with the closed sets of its values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, get_args

import jax.numpy as jnp
import numpy as np

from ..cache import CACHE_DTYPES
from ..config import check_positive_int
from ..errors import bad_type, bad_value
from ..literals import Content, Order

Kind = Literal["mixed", "decode", "prefill", "chunked", "cross"]
Scales = Literal["one", "layer", "head"]
Bias = Literal["shared", "each"]
Unused = Literal["nan", "zero"]
TablePadding = Literal["wild", "zero"]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Which sequences a batch has.

    Attributes:
      kind: "mixed" (a chunk, a decode, a prefill, an empty sequence, one without new tokens, and again), "decode", "prefill", "chunked",
        or "cross" (not causal, query lengths independent of the cached ones, one of four sequences empty, nothing to write).
      num_seqs: sequences before padding.
      query_lens, seq_lens: exact lengths, in order, in place of drawn ones; `kind` then says only whether the batch is "cross". Either may
        be given alone: queries are then the whole sequence (1 for "decode").
      max_query_len: most new tokens of one sequence; static in the metadata (1 for "decode"). Default 12, or the longest given.
      max_seq_len: most tokens of one sequence, at least 2; static in the metadata. Default 60, or the longest given.
      padding_tokens, padding_seqs: how many at least; T is rounded up to a multiple of 8 unless `padding_tokens` is 0.
    """

    kind: Kind = "mixed"
    num_seqs: int = 5
    query_lens: Sequence[int] | None = None
    seq_lens: Sequence[int] | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None
    padding_tokens: int = 3
    padding_seqs: int = 1

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, get_args(Kind))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Extents and layout of the cache.

    Attributes:
      block_size, num_heads, num_kv_heads, head_size, num_layers: N, Hq, H, D, L; H divides Hq.
      head_size_v: Dv, channels of a value; None is `head_size`.
      content, order: the layout that `Batch.cache` packs by default, see `CacheSpec`.
    """

    block_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int | None = None
    num_layers: int = 1
    content: Content = "packed"
    order: Order = "LBHNC"

    def __post_init__(self) -> None:
        for name in ("block_size", "num_heads", "num_kv_heads", "head_size", "num_layers"):
            check_positive_int(name, getattr(self, name))
        if self.head_size_v is not None:
            check_positive_int("head_size_v", self.head_size_v)
        if self.num_heads % self.num_kv_heads:
            bad_value("num_heads", self.num_heads, f"a multiple of num_kv_heads, which is {self.num_kv_heads}")
        _check_choice("content", self.content, get_args(Content))
        _check_choice("order", self.order, get_args(Order))


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """What is stored in which dtype.

    Attributes:
      dtype: the dtype of the new keys and values: the model's, or an fp8 dtype.
      query_dtype: default `dtype`; an fp8 dtype gives codes and a `q_scale`.
      cache_dtype: default `dtype`.
      scales: of an fp8 cache: "one" (1 in every layer), one a "layer", one a layer and KV "head".
    """

    dtype: Any = np.float32
    query_dtype: Any = None
    cache_dtype: Any = None
    scales: Scales = "layer"

    def __post_init__(self) -> None:
        own = _dtype("dtype", self.dtype, CACHE_DTYPES)
        object.__setattr__(self, "dtype", own)
        for name in ("query_dtype", "cache_dtype"):
            given = getattr(self, name)
            object.__setattr__(self, name, own if given is None else _dtype(name, given, CACHE_DTYPES))
        _check_choice("scales", self.scales, get_args(Scales))


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Which keys a query sees.

    Attributes:
      causal: False sees the whole sequence; "cross" is never causal.
      sliding_window: the window that the batch is for: keys before the window of every query are NaN, as freed blocks may be.
      key_range: draws a range of keys for each token, some empty: `Batch.key_range`.
      qq_bias: draws `Batch.qq_bias` with -inf in a quarter of it and in one whole column: one table for all sequences ("shared"), one for
        "each", or None.
      poison_newest: the last key and value of each sequence with several queries are NaN: under causality its last row alone is NaN.
    """

    causal: bool = True
    sliding_window: int | None = None
    key_range: bool = False
    qq_bias: Bias | None = None
    poison_newest: bool = False

    def __post_init__(self) -> None:
        _check_choice("qq_bias", self.qq_bias, (None, *get_args(Bias)))


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What happens to the scores before the softmax.

    Attributes:
      scale: factor on the scores; None is D ** -0.5, and attention is then not told.
      logits_soft_cap: c of c * tanh(score / c), or None.
      alibi: draws slopes, `Batch.alibi_slopes`, of both signs.
      sinks: draws `Batch.sinks`.
    """

    scale: float | None = None
    logits_soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Where blocks lie and what is in those that no query sees.

    Attributes:
      spare_blocks: blocks of the pool that no sequence owns.
      share_prefixes: sequences with at least one whole block of context may share their first blocks with another.
      common_prefix_blocks: this many blocks lead every sequence (cascade attention); empty and new sequences are then left out.
      unused: what every slot holds that no query sees, and every row of padding: "nan" or "zero".
      table_padding: table entries that no position needs: "wild" (-1, 2**31 - 1 or num_blocks) or "zero".
    """

    spare_blocks: int = 3
    share_prefixes: bool = True
    common_prefix_blocks: int = 0
    unused: Unused = "nan"
    table_padding: TablePadding = "wild"

    def __post_init__(self) -> None:
        _check_choice("unused", self.unused, get_args(Unused))
        _check_choice("table_padding", self.table_padding, get_args(TablePadding))


class BatchOptions(TypedDict, total=False):
    """Every option of the six groups as a keyword of `random_batch`."""

    kind: Kind
    num_seqs: int
    query_lens: Sequence[int] | None
    seq_lens: Sequence[int] | None
    max_query_len: int | None
    max_seq_len: int | None
    padding_tokens: int
    padding_seqs: int

    block_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int | None
    num_layers: int
    content: Content
    order: Order

    dtype: Any
    query_dtype: Any
    cache_dtype: Any
    scales: Scales

    causal: bool
    sliding_window: int | None
    key_range: bool
    qq_bias: Bias | None
    poison_newest: bool

    scale: float | None
    logits_soft_cap: float | None
    alibi: bool
    sinks: bool

    spare_blocks: int
    share_prefixes: bool
    common_prefix_blocks: int
    unused: Unused
    table_padding: TablePadding


GROUPS = (Lengths, Shape, Dtypes, Masks, Scores, Pool)


def grouped(options: Mapping[str, Any]) -> tuple[Lengths, Shape, Dtypes, Masks, Scores, Pool]:
    """The six groups that hold these options and their defaults.

    Raises:
      TypeError: no group has an option of that name.
      ValueError: an option's value is none of its closed set.
    """
    known = [f.name for group in GROUPS for f in fields(group)]
    for name in options:
        if name not in known:
            bad_type("option", name, f"one of {', '.join(known)}")

    def of(group: Any) -> Any:
        return group(**{f.name: options[f.name] for f in fields(group) if f.name in options})

    return of(Lengths), of(Shape), of(Dtypes), of(Masks), of(Scores), of(Pool)


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        bad_value(name, value, f"one of {', '.join(map(repr, known))}")


def _dtype(name: str, value: Any, known: tuple[np.dtype, ...]) -> np.dtype:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype not in known:
        bad_value(name, value if dtype is None else dtype.name, f"one of {', '.join(one.name for one in known)}")
    return dtype
