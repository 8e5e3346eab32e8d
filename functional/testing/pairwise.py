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
        best: list[int] = []
        best_new: set[tuple[int, int, int, int]] = set()
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
