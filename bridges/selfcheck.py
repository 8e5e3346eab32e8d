"""Every installed implementation against the float64 oracle, on the device that JAX computes on: NaN in every slot that no query sees.

The grid is small on purpose: a kernel is trusted on a machine where it gets all of this right. `python -m purepage.selfcheck` prints the
table.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..functional.attention import paged_attention
from ..functional.cache_writers import update_cache
from ..functional.dispatch import IMPLEMENTATIONS
from ..functional.errors import UnsupportedError
from ..functional.fp8 import e4m3_dtype
from ..functional.fused_writers import rope_and_update_cache
from ..functional.literals import Content, Order
from ..functional.target import Target, current_target
from ..functional.testing import assert_close, random_batch, reference_rope

PASSED, FAILED, REFUSED = "passed", "failed", "refused"

_BF16, _F16 = ml_dtypes.bfloat16, np.float16


@dataclass(frozen=True)
class Case:
    """One row of the grid.

    Attributes:
      name: what is checked.
      run: given an implementation's name, returns the largest absolute difference from the oracle; raises AssertionError on a wrong
        result and UnsupportedError where it is refused.
    """

    name: str
    run: Callable[[Any], float]


@dataclass(frozen=True)
class Outcome:
    case: str
    implementation: str
    verdict: str
    detail: str = ""
    error: float | None = None
    """Largest absolute difference from the oracle, where the case passed."""


@dataclass(frozen=True)
class Attention:
    """`paged_attention` of one random batch. `made` goes to `random_batch`, `options` to the function and the oracle."""

    made: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    content: Content = "packed"
    order: Order = "LBHNC"

    def __call__(self, implementation: Any) -> float:
        made: dict[str, Any] = {"num_layers": 2, "dtype": _BF16, "sliding_window": self.options.get("sliding_window"), **self.made}
        batch = random_batch(7, **made)
        cache = batch.cache(content=self.content, order=self.order)

        @jax.jit
        def attend(query: Any, cache: Any, metadata: Any, layer: Any) -> Any:
            return paged_attention(query, cache, metadata, layer=layer, implementation=implementation, **self.options)

        out = attend(jnp.asarray(batch.query), cache, batch.metadata, jnp.int32(1))
        expected, _ = batch.reference(layer=1, **self.options)
        assert_close(out, expected, dtype=np.asarray(batch.query).dtype)
        return _largest_difference(out, expected)


@dataclass(frozen=True)
class Write:
    """`update_cache`, or with `rope` the fused rotary writer: live slots hold the values, every other one its old bits."""

    rope: bool = False
    content: Content = "packed"
    cache_dtype: Any = None
    dtype: Any = _BF16

    def __call__(self, implementation: Any) -> float:
        batch = random_batch(8, dtype=self.dtype, cache_dtype=self.cache_dtype, num_layers=2)
        cache, slots, error = batch.cache_before(content=self.content), batch.metadata.slot_mapping, 0.0
        query, key, value = (_finite(x) for x in (batch.query, batch.new_keys[1], batch.new_values[1]))
        if self.rope:
            table = np.random.default_rng(9).uniform(-1, 1, (64, query.shape[-1])).astype(np.float32)
            write = jax.jit(lambda *args: rope_and_update_cache(*args, layer=1, implementation=implementation))
            rotated_query, rotated, written = write(query, key, value, batch.positions, table, cache, slots)
            for actual, x in ((rotated_query, query), (rotated, key)):
                rotated_x = reference_rope(batch.positions, x, table, is_neox=True)
                assert_close(actual, rotated_x, dtype=self.dtype)
                error = max(error, _largest_difference(actual, rotated_x))
            key = np.asarray(rotated)
        else:
            written = jax.jit(lambda *args: update_cache(*args, layer=1, implementation=implementation))(cache, key, value, slots)
        expected = update_cache(cache, jnp.asarray(key), jnp.asarray(value), slots, layer=1, implementation="xla")
        wrong = int(np.sum(_bytes(written.data) != _bytes(expected.data)))
        assert not wrong, f"{wrong} bytes of the cache differ from what XLA stores"
        return error


def _finite(array: np.ndarray) -> np.ndarray:
    """0 for NaN; `np.nan_to_num` leaves bfloat16 as it is."""
    return np.where(np.isnan(array), np.zeros((), array.dtype), array)


def _largest_difference(actual: Any, expected: Any) -> float:
    return float(np.max(np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64)), initial=0.0))


def _bytes(array: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


def cases(target: Target) -> tuple[Case, ...]:
    """The grid; fp8 in the kind that vLLM uses on the target."""
    fp8 = e4m3_dtype(target.arch).type
    slopes, sinks = (0.5, 0.25, 0.125, 1.0), (0.3, -1.0, 5.0, -np.inf)
    features = {
        "window": {"sliding_window": 9},
        "soft cap": {"logits_soft_cap": 0.7},
        "alibi": {"alibi_slopes": slopes},
        "sinks": {"sinks": sinks},
    }
    grid: dict[str, Callable[[Any], float]] = {}
    for kind in ("decode", "mixed", "chunked", "cross"):
        grid[f"attention, {kind}"] = Attention({"kind": kind})
    for content in ("flash", "xpacked", "xpacked_interleaved_v", "shuffled"):
        grid[f"attention, {content}"] = Attention(content=content, order="LHBNC")
    for name, options in features.items():
        for kind in ("decode", "chunked"):
            grid[f"attention, {kind}, {name}"] = Attention({"kind": kind}, options)
    for size in (48, 64):
        grid[f"attention, blocks of {size}"] = Attention({"block_size": size, "max_seq_len": 150})
    grid["attention, decode, 600 keys"] = Attention({"kind": "decode", "num_seqs": 2, "max_seq_len": 600, "block_size": 64})
    grid["attention, head size 80"] = Attention({"head_size": 80})
    grid["attention, float16"] = Attention({"dtype": _F16})
    grid["attention, decode, float16"] = Attention({"kind": "decode", "dtype": _F16})
    for kind in ("decode", "mixed"):
        grid[f"attention, {kind}, fp8 cache"] = Attention({"kind": kind, "cache_dtype": fp8})
        grid[f"attention, {kind}, fp8 cache, a scale per head"] = Attention({"kind": kind, "cache_dtype": fp8, "scales": "head"})
    for content in ("packed", "flash", "xpacked", "xpacked_interleaved_v", "shuffled"):
        grid[f"write, {content}"] = Write(content=content)
    grid["write, fp8 cache"] = Write(cache_dtype=fp8)
    grid["rope and write"] = Write(rope=True)
    grid["rope and write, xpacked"] = Write(rope=True, content="xpacked")
    grid["rope and write, float16"] = Write(rope=True, dtype=_F16)
    return tuple(Case(name, run) for name, run in grid.items())


def outcome(case: Case, implementation: Any) -> Outcome:
    """Runs one case; a kernel that does not compile, or fails in any other way, has failed."""
    try:
        error = case.run(implementation)
    except UnsupportedError as refusal:
        reason = str(refusal).removeprefix(f"{implementation} can't serve this ").rpartition("; ")[0] or str(refusal)
        return Outcome(case.name, implementation, REFUSED, reason.partition(": ")[2] or reason)
    except Exception as failure:
        return Outcome(case.name, implementation, FAILED, f"{type(failure).__name__}: {failure}".replace("\n", " "))
    return Outcome(case.name, implementation, PASSED, error=error)


def default_implementations(target: Target) -> tuple[str, ...]:
    """All, but for `pallas` on a CPU: its interpreter is checked where it is asked for."""
    return tuple(name for name in IMPLEMENTATIONS if name != "pallas" or target.platform != "cpu")


def outcomes(grid: Sequence[Case], implementations: Iterable[str]) -> Iterator[Outcome]:
    for implementation in implementations:
        for case in grid:
            yield outcome(case, implementation)


def check(
    *,
    implementations: Iterable[str] | None = None,
    grid: Sequence[Case] | None = None,
    only: str = "",
    write: Callable[[str], Any] = print,
) -> int:
    """Prints the table as it grows, and after each implementation its refusals, a line for each reason.

    Args:
      implementations: names, checked in this order; default `default_implementations` of this machine.
      grid: the cases; default `cases` of this machine's architecture.
      only: leaves out cases without this text in their name.
      write: prints one line.

    Returns:
      The exit status: 1 where a result was wrong or none was right, else 0.
    """
    target = current_target()
    device = jax.local_devices()[0]
    write(f"purepage self-check on {device.platform} {device.device_kind}, {target.arch}, jax {jax.__version__}")
    found = []
    grid = [case for case in (cases(target) if grid is None else grid) if only in case.name]
    for implementation in default_implementations(target) if implementations is None else implementations:
        refused: dict[str, list[str]] = {}
        for result in outcomes(grid, [implementation]):
            found.append(result)
            if result.verdict == REFUSED:
                refused.setdefault(result.detail, []).append(result.case)
            else:
                write(f"{implementation:7} {result.verdict:8} {result.case:46} {result.detail[:300]}".rstrip())
        for reason, names in refused.items():
            shown = names[0] if len(names) == 1 else f"{len(names)} cases, the first {names[0]}"
            write(f"{implementation:7} {REFUSED:8} {shown:46} {reason[:300]}".rstrip())
    counts = {verdict: sum(result.verdict == verdict for result in found) for verdict in (PASSED, FAILED, REFUSED)}
    write(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts[FAILED] > 0 or counts[PASSED] == 0)
