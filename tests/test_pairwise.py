"""Covers of parameter grids: every pair that a full cover promises, every value that a sample promises, the same cases each time."""

import itertools

from pairwise import case_id, pairwise, sample

FACTORS = {"size": (8, 16, 48), "kind": ("mixed", "decode"), "layout": (("packed", 1), ("flash", 2), ("xpacked", 3)), "window": (None, 1)}
GRID = list(itertools.product(*FACTORS.values()))


def pairs_of(cases):
    return {((a, x), (b, y)) for case in cases for (a, x), (b, y) in itertools.combinations(enumerate(case), 2)}


def test_a_pairwise_cover_holds_every_pair_in_fewer_cases_than_the_product():
    cases = [tuple(case.values()) for case in pairwise(FACTORS)]
    assert pairs_of(cases) == pairs_of(GRID) and len(cases) < len(GRID) / 2


def test_a_sample_holds_every_value_and_more_pairs_than_a_run_of_neighbours():
    places = sample(GRID, 8)
    chosen = [GRID[place] for place in places]
    assert len(places) == len(set(places)) == 8 and places == sorted(places) == sample(GRID, 8)
    for factor, values in enumerate(FACTORS.values()):
        assert {case[factor] for case in chosen} == set(values)
    assert len(pairs_of(chosen)) > 1.5 * len(pairs_of(GRID[:8]))


def test_a_sample_is_never_larger_than_it_was_asked_to_be_nor_than_the_cases():
    assert len(sample([(0, value) for value in range(5)], 2)) == 2
    assert sample([(value,) for value in range(5)], 2) == [0, 4] and sample([(value,) for value in range(9)], 3) == [0, 4, 8]
    rows = [({"a": a, "b": b},) for a in range(3) for b in range(3)]
    assert {rows[place][0]["a"] for place in sample(rows, 3)} == {rows[place][0]["b"] for place in sample(rows, 3)} == {0, 1, 2}
    assert sample([(1,), (2,)], 10) == [0, 1] and sample([], 3) == []


def test_an_id_names_the_values_in_order():
    assert case_id({"a": 3, "b": ("flash", 2), "c": int}) == "3-flashx2-int"
