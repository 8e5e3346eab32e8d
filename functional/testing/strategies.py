"""Hypothesis strategies for cache specs, batches and what attention can be asked for. They need hypothesis (`purepage[testing]`).

    from hypothesis import given
    from purepage.testing import strategies

    @given(strategies.batches(dtype=np.float32, qq_bias=None, key_range=False))
    def test_my_kernel(batch):
        batch.check(my_kernel(batch))

A failing example shrinks to few short sequences, few heads, no mask and no option that is not needed, and prints as the call of
`random_batch` that makes it.
"""

from typing import Any, get_args

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("purepage.testing.strategies needs hypothesis: pip install 'purepage[testing]'") from error

from ..cache import CACHE_DTYPES, FP8_DTYPES, CacheSpec
from ..literals import Content, Order
from .batch_options import Bias, Scales, TablePadding, Unused, grouped
from .batches import Batch, random_batch
from .checking import literal

__all__ = ["attention_options", "batch_options", "batches", "cache_specs"]

Strategy = st.SearchStrategy

_MODEL_DTYPES = tuple(dtype for dtype in CACHE_DTYPES if dtype not in FP8_DTYPES)
_HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (6, 2), (8, 1))
_HEAD_SIZES = (32, 64, 80, 128)
_BLOCK_SIZES = (16, 32, 48)


def cache_specs(**fixed: Any) -> Strategy[CacheSpec]:
    """Specs of small caches in every dtype and layout.

    Args:
      fixed: fields of `CacheSpec`, each a value or a strategy.

    Returns:
      A strategy; a spec shrinks to one block, head and layer of "packed".
    """
    fields = {
        "num_blocks": st.integers(1, 12),
        "block_size": st.sampled_from(_BLOCK_SIZES),
        "num_kv_heads": st.integers(1, 4),
        "head_size": st.sampled_from(_HEAD_SIZES),
        "num_layers": st.integers(1, 3),
        "dtype": st.sampled_from(CACHE_DTYPES),
        "content": st.sampled_from(get_args(Content)),
        "order": st.sampled_from(get_args(Order)),
    }
    return st.builds(CacheSpec, **{**fields, **_strategies(fixed)})


def attention_options(**fixed: Any) -> Strategy[dict[str, Any]]:
    """Masks and scores, as options of `random_batch`: `causal`, `sliding_window`, `key_range`, `qq_bias`, `poison_newest`, `scale`,
    `logits_soft_cap`, `alibi`, `sinks`.

    Args:
      fixed: such options, each a value or a strategy; it is then always there.

    Returns:
      A strategy of dicts, which shrink to an empty one.
    """
    optional = {
        "causal": st.just(False),
        "sliding_window": st.integers(1, 40),
        "key_range": st.just(True),
        "qq_bias": st.sampled_from(get_args(Bias)),
        "poison_newest": st.just(True),
        "scale": st.sampled_from((1.0, 0.01, -0.1)),
        "logits_soft_cap": st.sampled_from((30.0, 0.5)),
        "alibi": st.just(True),
        "sinks": st.just(True),
    }
    return _options({}, optional, fixed)


def batch_options(**fixed: Any) -> Strategy[dict[str, Any]]:
    """Options of `random_batch` with exact lengths.

    Args:
      fixed: options of `random_batch`, each a value or a strategy; the others are drawn.

    Returns:
      A strategy of dicts; `random_batch(0, **options)` takes each.

    Raises:
      TypeError: there is no such option.
      ValueError: a fixed value is none of its closed set.
    """
    grouped({name: value for name, value in fixed.items() if not isinstance(value, Strategy)})
    exact = "query_lens" in fixed or "seq_lens" in fixed or "kind" in fixed
    heads = "num_heads" in fixed or "num_kv_heads" in fixed
    optional = {
        "block_size": st.sampled_from(_BLOCK_SIZES),
        "num_layers": st.integers(1, 2),
        "content": st.sampled_from(get_args(Content)),
        "order": st.sampled_from(get_args(Order)),
        "cache_dtype": st.sampled_from(FP8_DTYPES),
        "scales": st.sampled_from(get_args(Scales)),
        "unused": st.sampled_from(get_args(Unused)),
        "table_padding": st.sampled_from(get_args(TablePadding)),
        "padding_tokens": st.integers(0, 3),
        "padding_seqs": st.integers(0, 2),
    }
    always = {"head_size": st.sampled_from(_HEAD_SIZES), "dtype": st.sampled_from(_MODEL_DTYPES)}
    parts = [_options(always, optional, {name: value for name, value in fixed.items() if name not in _MASKS_AND_SCORES})]
    parts.append(attention_options(**{name: value for name, value in fixed.items() if name in _MASKS_AND_SCORES}))
    if not heads:
        parts.append(st.sampled_from(_HEADS).map(lambda pair: {"num_heads": pair[0], "num_kv_heads": pair[1]}))
    if not exact:
        parts.append(st.one_of(_causal_lengths(), _cross_lengths()) if fixed.get("causal", True) is True else _causal_lengths())
    return st.tuples(*parts).map(lambda found: {name: value for part in reversed(found) for name, value in part.items()})


def batches(seed: int | Strategy[int] = 0, **fixed: Any) -> Strategy[Batch]:
    """Batches of `random_batch`: ragged, in every dtype and layout, with every mask, unless options are fixed.

    Args:
      seed: of the values.
      fixed: options of `random_batch`, each a value or a strategy; the others are drawn.

    Returns:
      A strategy; an example prints as `random_batch(0, ...)`.

    Raises:
      TypeError, ValueError: see `batch_options`.
    """
    seeds = seed if isinstance(seed, Strategy) else st.just(seed)
    return st.tuples(seeds, batch_options(**fixed)).map(lambda found: _shown(*found))


_MASKS_AND_SCORES = frozenset(
    ("causal", "sliding_window", "key_range", "qq_bias", "poison_newest", "scale", "logits_soft_cap", "alibi", "sinks")
)


class _ShownBatch(Batch):
    """A batch that prints as the call that makes it."""

    made_by: str

    def __repr__(self) -> str:
        return self.made_by

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # hypothesis would print the fields of a dataclass
        printer.text(self.made_by)


def _shown(seed: int, options: dict[str, Any]) -> Batch:
    batch = random_batch(seed, **options)  # type: ignore[arg-type]
    shown = _ShownBatch(**vars(batch))
    given = (f"{name}={literal(value)}" for name, value in options.items())
    object.__setattr__(shown, "made_by", f"random_batch({', '.join((str(seed), *given))})")
    return shown


def _causal_lengths() -> Strategy[dict[str, Any]]:
    """Exact lengths of one to four sequences; at least as many keys as queries, as a cache has after the write."""
    pair = st.tuples(st.integers(0, 12), st.integers(0, 60)).map(lambda lens: (lens[0], lens[0] + lens[1]))
    return _lengths(pair)


def _cross_lengths() -> Strategy[dict[str, Any]]:
    return _lengths(st.tuples(st.integers(1, 12), st.integers(0, 70))).map(lambda lens: {"kind": "cross", **lens})


def _lengths(pair: Strategy[tuple[int, int]]) -> Strategy[dict[str, Any]]:
    pairs = st.lists(pair, min_size=1, max_size=4)
    return pairs.map(lambda found: {"query_lens": [q for q, _ in found], "seq_lens": [n for _, n in found]})


def _options(always: dict[str, Strategy[Any]], optional: dict[str, Strategy[Any]], fixed: dict[str, Any]) -> Strategy[dict[str, Any]]:
    given = _strategies(fixed)
    rest = {name: st.one_of(st.just(_ABSENT), strategy) for name, strategy in optional.items() if name not in given}
    drawn = st.fixed_dictionaries({**always, **given, **rest})
    return drawn.map(lambda found: {name: value for name, value in found.items() if value is not _ABSENT})


_ABSENT = object()
"""An option that is left out; each shrinks to it on its own."""


def _strategies(fixed: dict[str, Any]) -> dict[str, Strategy[Any]]:
    return {name: value if isinstance(value, Strategy) else st.just(value) for name, value in fixed.items()}
