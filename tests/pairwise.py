"""Pairwise covers: few cases in which every two values of every two factors meet. A product would cost a trace a case."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def pairwise(factors: Mapping[str, Sequence[Any]], *, seed: int = 0, tries: int = 40) -> list[dict[str, Any]]:
    """Cases that hold every pair of values of every two factors; greedy over random candidates, the same for the same arguments.

    A fault that two choices make together is in one of the cases. Values are taken by place, so they need not be hashable.
    """
    names = list(factors)
    sizes = [len(factors[name]) for name in names]
    pairs = list(itertools.combinations(range(len(names)), 2))
    missing = {(a, i, b, j) for a, b in pairs for i in range(sizes[a]) for j in range(sizes[b])}
    rng, cases = np.random.default_rng(seed), []
    while missing:
        best, best_new = None, set()
        first = min(missing)
        for _ in range(tries):
            case = [int(rng.integers(size)) for size in sizes]
            case[first[0]], case[first[2]] = first[1], first[3]
            new = {(a, case[a], b, case[b]) for a, b in pairs} & missing
            if len(new) > len(best_new):
                best, best_new = case, new
        missing -= best_new
        cases.append({name: factors[name][i] for name, i in zip(names, best, strict=True)})
    return cases


def sample(cases: Sequence[Sequence[Any]], count: int, *, seed: int = 0) -> list[int]:
    """Places, in order, of `count` of the given cases: they cover every value of every factor first, then most pairs.

    Cases of one mapping each, as `pairwise` makes them, have its keys as factors. Any other single factor is a range: its cases are taken
    at equal distances, both ends among them.

    Args:
      cases: the values of each case, a factor at the same place in all of them; compared by `repr`.
      count: how many; more are taken where that many don't hold every value.
      seed: decides between cases that cover as much.
    """
    if cases and all(len(case) == 1 and isinstance(case[0], Mapping) and case[0].keys() == cases[0][0].keys() for case in cases):
        cases = [tuple(case[0].values()) for case in cases]
    if cases and len(cases[0]) == 1:
        return sorted({int(place) for place in np.linspace(0, len(cases) - 1, min(count, len(cases))).round()})
    order = [int(place) for place in np.random.default_rng(seed).permutation(len(cases))]
    values = [{(factor, repr(value)) for factor, value in enumerate(case)} for case in cases]
    pairs = [{frozenset(pair) for pair in itertools.combinations(sorted(held), 2)} for held in values]
    unseen, uncovered, chosen = set().union(*values), set().union(*pairs), []
    while order and (unseen or len(chosen) < count):
        best = max(order, key=lambda place: (len(values[place] & unseen), len(pairs[place] & uncovered)))
        order.remove(best)
        chosen.append(best)
        unseen -= values[best]
        uncovered -= pairs[best]
    return sorted(chosen)


def case_id(case: Mapping[str, Any]) -> str:
    """A readable id of a case: its values in order."""
    return "-".join(_text(value) for value in case.values())


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return getattr(value, "__name__", None) or getattr(value, "name", None) or str(value)
