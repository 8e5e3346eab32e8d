"""`check_attention`: any attention kernel over a grid of what attention can be asked for, and what of it fails."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import bad_value
from .batch_options import BatchOptions, grouped
from .batches import Batch, random_batch
from .pairwise import pairwise

Kernel = Callable[[Batch], Any]
Features = Mapping[str, Mapping[str, Mapping[str, Any]]]

FEATURES: Features = {
    "lengths": {
        "decode": {"query_lens": (1, 1, 1), "seq_lens": (5, 16, 100)},
        "decode beside an empty sequence": {"query_lens": (1, 1), "seq_lens": (40, 0)},
        "prefill": {"query_lens": (3, 20), "seq_lens": (3, 20)},
        "chunked prefill": {"query_lens": (9, 2), "seq_lens": (30, 99)},
        "ragged mix with empty sequences": {"query_lens": (1, 0, 7, 5, 0), "seq_lens": (33, 0, 70, 5, 12)},
        "cross attention": {"kind": "cross", "query_lens": (4, 1, 2), "seq_lens": (0, 100, 17)},
    },
    "heads": {
        "as many KV heads as query heads": {"num_heads": 2, "num_kv_heads": 2},
        "2 query heads a KV head": {"num_heads": 4, "num_kv_heads": 2},
        "1 KV head": {"num_heads": 4, "num_kv_heads": 1},
        "3 query heads a KV head": {"num_heads": 6, "num_kv_heads": 2},
    },
    "head size": {"64": {"head_size": 64}, "128": {"head_size": 128}, "80": {"head_size": 80}},
    "block size": {"16": {"block_size": 16}, "32": {"block_size": 32}, "48": {"block_size": 48}},
    "dtype": {name: {"dtype": np.dtype(name)} for name in ("float32", "bfloat16", "float16")},
    "cache": {
        "the model's dtype": {},
        "fp8": {"cache_dtype": ml_dtypes.float8_e4m3fn, "scales": "one"},
        "fp8, a scale for each layer": {"cache_dtype": ml_dtypes.float8_e4m3fn, "scales": "layer"},
        "fp8, a scale for each head": {"cache_dtype": ml_dtypes.float8_e4m3fn, "scales": "head"},
    },
    "window": {"none": {}, "1": {"sliding_window": 1}, "7": {"sliding_window": 7}, "a block": {"sliding_window": 16}},
    "key range": {"none": {}, "drawn for each token": {"key_range": True}},
    "bias": {"none": {}, "a tree for all": {"qq_bias": "shared"}, "a tree for each sequence": {"qq_bias": "each"}},
    "soft cap": {"none": {}, "30": {"logits_soft_cap": 30.0}, "0.5": {"logits_soft_cap": 0.5}},
    "ALiBi": {"none": {}, "drawn for each head": {"alibi": True}},
    "sinks": {"none": {}, "drawn for each head": {"sinks": True}},
    "scale": {"D ** -0.5": {}, "1, so that scores are large": {"scale": 1.0}, "negative": {"scale": -0.1}},
    "unused slots": {"zero": {"unused": "zero"}, "NaN": {"unused": "nan"}},
    "unused table entries": {"zero": {"table_padding": "zero"}, "out of range": {"table_padding": "wild"}},
    "newest key": {"finite": {}, "NaN where causality hides it": {"poison_newest": True}},
    "padding": {"none": {"padding_tokens": 0, "padding_seqs": 0}, "tokens and sequences": {"padding_tokens": 3, "padding_seqs": 1}},
}
"""What `check_attention` varies: for each feature its kinds by name, the plain one first, as options of `random_batch`."""


@dataclass(frozen=True)
class Failure:
    """Something that a kernel gets wrong.

    Attributes:
      kinds: the kinds that are needed to see it, by feature; all other features have their plain kind. Empty: plain attention fails.
      seed, options: the smallest batch that shows it, `random_batch(seed, **options)`.
      error: what was raised, or how the result is off.
    """

    kinds: Mapping[str, str]
    seed: int
    options: BatchOptions
    error: str

    @property
    def name(self) -> str:
        return " with ".join(f"{feature} {kind!r}" for feature, kind in self.kinds.items()) or "plain attention"

    def __str__(self) -> str:
        given = ", ".join(f"{name}={literal(value)}" for name, value in self.options.items())
        return f"{self.name}\n    random_batch({self.seed}, {given})\n    " + self.error.replace("\n", "\n    ")


@dataclass(frozen=True)
class Report:
    """What `check_attention` found; prints as text.

    Attributes:
      passed, failed: how many cases did.
      refused: kinds that the kernel refused, by (feature, kind), with its words.
      failures: what fails, each with its smallest case; failing cases that hold the kinds of an earlier failure are counted only.
      tested: kinds that passed in a case of their own.
    """

    passed: int
    failed: int
    refused: Mapping[tuple[str, str], str]
    failures: tuple[Failure, ...]
    tested: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        """Whether some case passed and none failed."""
        return self.passed > 0 and self.failed == 0

    def __str__(self) -> str:
        lines = [f"{self.passed} cases pass, {self.failed} fail, {len(self.refused)} kinds are refused"]
        alone = [next(iter(failure.kinds.items())) for failure in self.failures if len(failure.kinds) == 1]
        states = (("passes", self.tested), ("refuses", tuple(self.refused)), ("FAILS", tuple(alone)))
        for feature in dict.fromkeys(feature for _, kinds in states for feature, _ in kinds):
            of_state = [(state, [kind for name, kind in kinds if name == feature]) for state, kinds in states]
            lines.append(f"  {feature}: " + "; ".join(f"{state} {', '.join(kinds)}" for state, kinds in of_state if kinds))
        groups: dict[tuple[str, ...], list[Failure]] = {}
        for failure in self.failures:
            groups.setdefault(tuple(failure.kinds), []).append(failure)
        for group in groups.values():
            first, *others = sorted(group, key=lambda failure: sum(failure.options.get("seq_lens") or (2**31,)))
            lines.append(f"FAILS: {first}")
            if others:
                lines.append(f"    and so does {'; '.join(other.name for other in others)}")
        return "\n".join(lines)

    __repr__ = __str__


def check_attention(
    kernel: Kernel,
    *,
    features: Mapping[str, Sequence[str] | Mapping[str, Mapping[str, Any]]] | None = None,
    seed: int = 0,
    pairs: bool = True,
    compute_dtype: Any = None,
    padding: bool = False,
    refusals: tuple[type[Exception], ...] = (NotImplementedError,),
    verbose: bool = True,
) -> Report:
    """Runs an attention kernel over a grid of batches, compares with the oracle, and prints which kinds fail and the smallest case of each.

        def mine(batch):
            options = batch.pick("sliding_window", "scale")  # refuses the rest
            return my_kernel(batch.query, batch.cache(content="flash").data, batch.metadata.block_table, ..., **options)

        assert check_attention(mine, features={"dtype": ["bfloat16"], "head size": ["128"]}).ok

    Each kind of each feature runs in a case of its own beside plain ones. The kinds that pass are then combined so that every two of them
    meet in a case. A failing case is reduced: features become plain, sequences are left out and shortened while it fails.

    Args:
      kernel: takes a `Batch`, returns out [T, Hq, Dv] or (out, lse [T, Hq]) in any dtypes; raises one of `refusals` for what it does not
        serve.
      features: restricts or replaces features of `FEATURES`: a list of names of kinds, the plain one first, or kinds as options of
        `random_batch`. A new name is a feature more.
      seed: of the batches and of the choice of cases.
      pairs: False leaves the combinations out.
      compute_dtype: see `tolerance`.
      padding: whether rows of padding tokens must be 0 as well.
      refusals: exceptions with which the kernel refuses a batch.
      verbose: prints the report.

    Returns:
      The `Report`.

    Raises:
      ValueError: `features` names a kind that does not exist.
    """
    run = _Run(kernel, _chosen(features), seed, compute_dtype, padding, refusals)
    report = run.report(pairs)
    if verbose:
        print(report)
    return report


def _chosen(features: Mapping[str, Any] | None) -> dict[str, dict[str, Mapping[str, Any]]]:
    chosen = {name: dict(kinds) for name, kinds in FEATURES.items()}
    for name, kinds in (features or {}).items():
        if isinstance(kinds, Mapping):
            for options in kinds.values():
                grouped(options)
            chosen[name] = dict(kinds)
            continue
        known = FEATURES.get(name)
        if known is None:
            bad_value("features", name, f"one of {', '.join(map(repr, FEATURES))}, or come with options of random_batch")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        for kind in kinds:
            if kind not in known:
                bad_value(f"features[{name!r}]", kind, f"one of {', '.join(map(repr, known))}")
        chosen[name] = {kind: known[kind] for kind in kinds}
    return chosen


class _Refused(Exception):
    """The kernel does not serve the batch."""


@dataclass(frozen=True)
class _Run:
    """One check. A choice is a kind for each feature."""

    kernel: Kernel
    features: Mapping[str, Mapping[str, Mapping[str, Any]]]
    seed: int
    compute_dtype: Any
    padding: bool
    refusals: tuple[type[Exception], ...]

    def report(self, pairs: bool) -> Report:
        plain = {feature: next(iter(kinds)) for feature, kinds in self.features.items()}
        refused: dict[tuple[str, str], str] = {}
        failures: list[Failure] = []
        passing = {feature: [kind] for feature, kind in plain.items()}
        try:
            error = self.error(self.options(plain))
        except _Refused as why:
            return Report(0, 0, {("everything", "plain attention"): str(why)}, (), ())
        if error:
            return Report(0, 1, {}, (self.smallest({}, plain, plain, error),), ())
        passed, failed = 1, 0
        for feature, kinds in self.features.items():
            for kind in list(kinds)[1:]:
                choice = {**plain, feature: kind}
                try:
                    error = self.error(self.options(choice))
                except _Refused as why:
                    refused[feature, kind] = str(why)
                    continue
                if error:
                    failed += 1
                    failures.append(self.smallest({feature: kind}, choice, plain, error))
                else:
                    passed += 1
                    passing[feature].append(kind)
        tested = tuple((feature, kind) for feature, kinds in passing.items() for kind in kinds if len(self.features[feature]) > 1)
        for choice in pairwise(passing, seed=self.seed) if pairs else ():
            try:
                error = self.error(self.options(choice))
            except _Refused:
                continue  # a combination that the kernel does not serve, of kinds that it does
            if not error:
                passed += 1
                continue
            failed += 1
            if not any(failure.kinds.items() <= choice.items() for failure in failures):
                kinds, error = self.reduced(choice, plain, error)
                failures.append(self.smallest(kinds, {**plain, **kinds}, plain, error))
        return Report(passed, failed, refused, tuple(failures), tested)

    def options(self, choice: Mapping[str, str]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for feature, kind in choice.items():
            merged |= self.features[feature][kind]
        return merged

    def error(self, options: Mapping[str, Any]) -> str:
        """How the kernel fails on a batch; empty where it is right.

        Raises:
          _Refused: the kernel refuses it.
        """
        batch = random_batch(self.seed, **options)  # type: ignore[arg-type]
        try:
            result = self.kernel(batch)
            out, lse = result if isinstance(result, tuple) else (result, None)
            out, lse = np.asarray(out), None if lse is None else np.asarray(lse)
        except self.refusals as why:
            raise _Refused(str(why)) from why
        except Exception as raised:
            place = traceback.extract_tb(raised.__traceback__)[-1]
            text = (str(raised).splitlines() or [""])[0]
            return f"{type(raised).__name__}: {text} ({place.name}, {place.filename.rpartition('/')[2]}:{place.lineno})"
        try:
            batch.check(out, lse, compute_dtype=self.compute_dtype, padding=self.padding)
        except AssertionError as off:
            return str(off)
        return ""

    def fails(self, options: Mapping[str, Any]) -> str:
        """As `error`, and empty where the kernel refuses or the options make no batch."""
        try:
            return self.error(options)
        except (_Refused, ValueError):
            return ""

    def reduced(self, choice: Mapping[str, str], plain: Mapping[str, str], error: str) -> tuple[dict[str, str], str]:
        """The kinds of a failing choice without which it passes."""
        current = dict(choice)
        for feature, kind in plain.items():
            if current[feature] != kind:
                found = self.fails(self.options({**current, feature: kind}))
                if found:
                    current[feature], error = kind, found
        return {feature: kind for feature, kind in current.items() if kind != plain[feature]}, error

    def smallest(self, kinds: Mapping[str, str], choice: Mapping[str, str], plain: Mapping[str, str], error: str) -> Failure:
        """The failure of a choice in as few and as short sequences as still fail, where plain attention of those lengths does not."""
        options = self.options(choice)
        batch = random_batch(self.seed, **options)  # type: ignore[arg-type]
        count = len(batch.seq_lens) - options.get("padding_seqs", 1)
        lengths = [(int(q), int(n)) for q, n in zip(batch.query_lens[:count], batch.seq_lens[:count], strict=True)]
        drawn = ("num_seqs", "max_query_len", "max_seq_len", "query_lens", "seq_lens")
        rest = {name: value for name, value in options.items() if name not in drawn and (name != "kind" or value == "cross")}

        def of_lengths(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
            return {"query_lens": [q for q, _ in pairs], "seq_lens": [n for _, n in pairs]}

        def exact(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
            return of_lengths(pairs) | rest

        lengths_kind = {name: options[name] for name in ("kind",) if name in rest}
        base = {name: value for name, value in self.options(plain).items() if name not in drawn and name != "kind"} | lengths_kind
        others = [feature for feature in kinds if feature != "lengths"]

        def shows(pairs: Sequence[tuple[int, int]]) -> str:
            found = self.fails(exact(pairs))
            return "" if found and others and self.fails({**base, **of_lengths(pairs)}) else found

        found = shows(lengths)
        if not found:  # other values, as other lengths draw others
            return Failure(dict(kinds), self.seed, options, error)  # type: ignore[arg-type]
        error = found
        for _ in range(_REDUCTIONS):
            for shorter in _shorter(lengths):
                found = shows(shorter)
                if found:
                    lengths, error = shorter, found
                    break
            else:
                break
        return Failure(dict(kinds), self.seed, exact(lengths), error)  # type: ignore[arg-type]


_REDUCTIONS = 12
"""Most steps in which a case becomes smaller."""


def _shorter(lengths: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Lengths with a sequence less, then with one that is shorter."""
    if len(lengths) > 1:
        for place in range(len(lengths)):
            yield lengths[:place] + lengths[place + 1 :]
    for place, (q, n) in enumerate(lengths):
        for smaller in dict.fromkeys([(min(q, 1), min(n, 1)), (min(q, 1), n), (q // 2, n // 2), (q, q), (q, (q + n) // 2), (q, n - 1)]):
            if smaller != (q, n) and smaller[0] >= min(q, 1) and smaller[1] >= 0 and smaller[0] <= max(smaller[1], q):
                yield [*lengths[:place], smaller, *lengths[place + 1 :]]


def literal(value: Any) -> str:
    """An option as it is written in a call of `random_batch`."""
    if isinstance(value, (np.dtype, type)):
        return repr(np.dtype(value).name)
    return repr(value)
