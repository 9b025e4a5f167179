"""What ranks expect of a lane: the same on all that have sent the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onefold.wire.lanes import _MOST_EXPECTED, Lane

UNITS = st.sampled_from("abc")


def test_a_walk_that_repeats_is_expected_from_its_second_time():
    """A unit that is used twice has two successors, told apart by what came before it."""
    lane = Lane("forward", None)
    for number in range(4):
        expected = [lane.expects(unit) for unit in "abacd"]
        assert all(expected) == (number > 1), (number, expected)
        assert sum(not one for one in expected) <= (5, 2, 0, 0)[number]


@given(st.lists(UNITS, max_size=40), UNITS, UNITS)
def test_ranks_that_sent_the_same_never_both_begin_what_differs(sent, mine, theirs):
    one, other = Lane("forward", None), Lane("forward", None)
    assert [one.expects(unit) for unit in sent] == [other.expects(unit) for unit in sent]
    if mine != theirs:
        assert not (one.expects(mine) and other.expects(theirs))


def test_a_walk_that_never_repeats_is_remembered_within_bounds():
    lane = Lane("forward", None)
    assert not any(lane.expects(number) for number in range(3 * _MOST_EXPECTED))
    assert len(lane._expected) <= _MOST_EXPECTED
