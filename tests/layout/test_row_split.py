"""The rows of ranks with unequal speeds: the law is the best of all splits."""

from itertools import product
from math import nan

import pytest

from onefold.errors import ConfigError
from onefold.layout.row_split import RankTime, rows_of


def slowest(times, rows):
    return max(time.seconds(each) for time, each in zip(times, rows, strict=True))


@pytest.mark.parametrize("rows", [1, 2, 7, 12])
@pytest.mark.parametrize(
    "times",
    [
        [RankTime(0.0, 1.0), RankTime(0.0, 3.0)],
        [RankTime(2.0, 0.3), RankTime(0.1, 1.0), RankTime(0.5, 0.5)],
        [RankTime(9.0, 1.0), RankTime(0.0, 1.0), RankTime(0.0, 1.0)],
        [RankTime(0.1, 0.1)] * 3,
    ],
)
def test_no_split_of_the_rows_has_a_faster_slowest_rank(times, rows):
    found = rows_of(times, rows)
    splits = [s for s in product(range(rows + 1), repeat=len(times)) if sum(s) == rows]
    assert sum(found) == rows
    assert slowest(times, found) == pytest.approx(min(slowest(times, s) for s in splits))


def test_rows_follow_speeds_and_equal_ranks_differ_by_one_row_at_most():
    assert rows_of([RankTime(0.0, 1.0), RankTime(0.0, 3.0)], 64) == (48, 16)
    assert rows_of([RankTime(0.2, 0.1)] * 3, 8) == (3, 3, 2)
    assert sum(rows_of([RankTime(0.0, 1.0 / (1 + rank % 3)) for rank in range(1000)], 99_999)) == (
        99_999
    )


def test_no_rank_takes_more_rows_than_fit():
    assert rows_of([RankTime(0.0, 1.0), RankTime(0.0, 3.0)], 64, [40, 64]) == (40, 24)
    assert rows_of([RankTime(0.0, 1.0), RankTime(0.0, 1.0)], 3, [0, 3]) == (0, 3)
    with pytest.raises(ConfigError, match="room for 5 rows, got 4"):
        rows_of([RankTime(0.0, 1.0)] * 2, 5, [2, 2])


@pytest.mark.parametrize("time", [RankTime(0.0, 0.0), RankTime(nan, 1.0), RankTime(-1.0, 1.0)])
def test_a_time_that_cannot_be_is_named_with_its_rank(time):
    with pytest.raises(ConfigError, match="rank 1"):
        rows_of([RankTime(0.0, 1.0), time], 4)
