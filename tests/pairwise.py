"""Covers of parameter grids: `pairwise` of the test kit, and samples of a grid that is there already."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from purepage.functional.testing.pairwise import pairwise as pairwise


def sample(cases: Sequence[Sequence[Any]], count: int, *, seed: int = 0) -> list[int]:
    """Places, in order, of `count` of the given cases: they cover most values of the factors, then most pairs.

    Cases of one mapping each, as `pairwise` makes them, have its keys as factors. Any other single factor is a range: its cases are taken
    at equal distances, both ends among them.

    Args:
      cases: the values of each case, a factor at the same place in all of them; compared by `repr`.
      count: how many at most. With at least as many as a factor has values, every value is among them in nearly every grid.
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
    while order and len(chosen) < count:
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
