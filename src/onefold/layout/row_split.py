"""Split the rows of a batch over ranks of unequal speed. Pure numbers: no torch here.

A rank needs `fixed + per_row * rows` seconds for its rows. A step takes as long as its slowest
rank, so `rows_of` finds the rows that make the slowest rank fastest. Plain weights, as users give
them, are those of `split_rows` (mixed/sampler.py).

The method is bisection on the time T of the step: the ranks together finish
sum(floor((T - fixed) / per_row)) rows within T.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf, isfinite

from onefold.errors import ConfigError

_HALVINGS = 64
"""Of the range of T: more would not change a float."""


@dataclass(frozen=True, slots=True)
class RankTime:
    """The seconds of one rank in a step: `fixed` for any rows, and `per_row` for each of them."""

    fixed: float
    per_row: float

    def seconds(self, rows: int) -> float:
        """Return the seconds of so many rows; a rank without rows computes nothing."""
        return self.fixed + self.per_row * rows if rows else 0.0

    def rows_within(self, seconds: float, most: float) -> int:
        """Return the rows that the rank finishes in so many seconds, at most `most`."""
        return int(max(0.0, min(most, (seconds - self.fixed) / self.per_row)))


def rows_of(
    times: Sequence[RankTime], rows: int, most: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the rows of each rank that end a step of `rows` rows soonest.

    No other split has a faster slowest rank. Equal ranks differ by one row at most, and lower ranks
    have it.

    Args:
        times: one a rank, in rank order; `per_row` above 0.
        rows: of all ranks together, in one step.
        most: the rows that fit into the memory of each rank; default: any number.

    Raises:
        ConfigError: a time that is not a finite number, or fewer places for rows than rows.
    """
    limits = [inf] * len(times) if most is None else [float(limit) for limit in most]
    _check_times(times, rows, limits)
    early, late = 0.0, max(time.fixed + time.per_row * rows for time in times)
    for _ in range(_HALVINGS):  # at `early` all ranks together finish no more than `rows`
        middle = (early + late) / 2
        finished = sum(map(RankTime.rows_within, times, [middle] * len(times), limits))
        early, late = (middle, late) if finished <= rows else (early, middle)
    taken = [*map(RankTime.rows_within, times, [early] * len(times), limits)]
    ends = [(_end(times[rank], taken[rank] + 1, limits[rank]), rank) for rank in range(len(times))]
    heapify(ends)
    for _ in range(rows - sum(taken)):  # ranks that finish another row at about the same time
        rank = ends[0][1]
        taken[rank] += 1
        heapreplace(ends, (_end(times[rank], taken[rank] + 1, limits[rank]), rank))
    return tuple(taken)


def _end(time: RankTime, rows: int, most: float) -> float:
    return time.seconds(rows) if rows <= most else inf


def _check_times(times: Sequence[RankTime], rows: int, most: Sequence[float]) -> None:
    for rank, time in enumerate(times):
        is_known = isfinite(time.fixed) and isfinite(time.per_row)
        if not is_known or time.fixed < 0 or time.per_row <= 0:
            hint = "measure the rank again: at least two steps of different rows"
            wanted = "finite seconds of a rank: fixed from 0 on, per row above 0"
            raise ConfigError(wanted, time, where=f"rank {rank}", hint=hint)
    if sum(most) < rows:
        got = f"{sum(most):,.0f} that fit, on {len(times)} ranks"
        hint = "take fewer rows a step, or more micro-batches"
        raise ConfigError(f"room for {rows:,d} rows", got, hint=hint)
