"""The committed list of seeds covers many pairs of values with few programs."""

from __future__ import annotations

from tests.support.programs.choosing import choose_seeds, covered_pairs
from tests.support.programs.chosen import CHOSEN


def test_eighty_chosen_seeds_cover_twice_the_pairs_of_the_first_sixty():
    assert len(set(CHOSEN)) == len(CHOSEN) == 120
    assert len(covered_pairs(CHOSEN[:80])) >= 2 * len(covered_pairs(range(60)))


def test_seeds_that_do_not_run_are_left_out_and_what_they_cover_is_covered_by_others():
    even = choose_seeds(range(40), 10, lambda seed: seed % 2 == 0)
    assert even == choose_seeds(range(0, 40, 2), 10, lambda _: True)
    assert len(covered_pairs(even)) > len(covered_pairs(range(0, 20, 2)))
