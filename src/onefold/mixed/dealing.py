"""Divide the rows of a global batch among ranks: by weights, or so that all end together.

No torch here: every rank computes the same integers from the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, isfinite

from onefold.errors import ConfigError
from onefold.layout.cut import bounds_of
from onefold.layout.row_split import RankTime, rows_of

HYSTERESIS = 0.05
"""Rows move only if a step becomes shorter by more than this share."""

_SCALE = 1 << 30
_SHORTEST = 1e-12  # seconds of a row that took no time to be measured


def even(world_size: int) -> tuple[float, ...]:
    """Return equal weights."""
    return (1 / world_size,) * world_size


def check_shares(shares: Sequence[float], world_size: int) -> tuple[float, ...]:
    """Return weights of rows, scaled to a sum of 1.

    Raises `ConfigError` unless there is one finite weight a rank, none negative and one positive.
    """
    weights = tuple(float(share) for share in shares)
    hint = f"pass {world_size} weights, such as {[3, *[1] * (world_size - 1)]}"
    if len(weights) != world_size:
        raise ConfigError(f"{world_size} shares of rows, one a rank", weights, hint=hint)
    if any(not isfinite(share) or share < 0 for share in weights) or sum(weights) <= 0:
        raise ConfigError("finite shares of rows, none negative", weights, hint=hint)
    return tuple(share / sum(weights) for share in weights)


def split_rows(rows: int, shares: Sequence[float]) -> list[range]:
    """Return the rows of a global batch for each rank: contiguous, in rank order.

    Each rank gets its part rounded down. Ranks with the largest remainders get one row more. A rank
    with a positive weight gets one row at least, if there are enough; a rank with weight zero none.
    """
    weights = [round(share / sum(shares) * _SCALE) for share in shares]
    bounds = bounds_of(rows, len(shares), tuple(weights))
    counts = [stop - start for start, stop in pairwise(bounds)]
    without = [rank for rank, share in enumerate(shares) if share > 0 and counts[rank] == 0]
    if rows >= sum(share > 0 for share in shares):
        for rank in without:
            counts[counts.index(max(counts))] -= 1
            counts[rank] = 1
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def balance(
    times: Sequence[RankTime], now: Sequence[int], hysteresis: float = HYSTERESIS
) -> list[int]:
    """Divide the rows that ranks take now so that the slowest rank ends soonest.

    Ranks of known speed get one row at least, if there are enough. A rank whose `per_row` is
    infinite, unknown, gets none. Returns the rows of now where the best division does not save more
    than the share `hysteresis` of a step.
    """
    best = _best(times, sum(now))

    def seconds(rows: Sequence[int]) -> float:
        return max(time.seconds(count) for time, count in zip(times, rows, strict=True))

    return best if seconds(best) < (1 - hysteresis) * seconds(now) else list(now)


def _best(times: Sequence[RankTime], total: int) -> list[int]:
    is_known = [time.per_row < inf for time in times]
    least = int(total >= sum(is_known))  # the first row of each rank is part of its fixed time
    others = [
        RankTime(time.fixed + least * time.per_row, max(time.per_row, _SHORTEST))
        if known
        else RankTime(0.0, 1.0)
        for time, known in zip(times, is_known, strict=True)
    ]
    limits = [total * known for known in is_known]
    rows = rows_of(others, total - least * sum(is_known), limits)
    return [count + least * known for count, known in zip(rows, is_known, strict=True)]


class AffineFit:
    """Fits `seconds = fixed + per_row * rows` to the latest steps of one rank.

    Older steps weigh exponentially less. The fit remembers about `STEPS` steps, and more where
    these take less than `SECONDS`: the quota of a cgroup stops a process once in 100 ms.
    """

    STEPS = 20
    SECONDS = 1.0
    SPREAD = 0.1  # relative spread of rows below which the fixed part cannot be told

    def __init__(self) -> None:
        self.seconds = 0.0  # of all steps
        self.steps = 0
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    @property
    def is_ready(self) -> bool:
        """True if enough time or steps were measured."""
        return self.steps >= self.STEPS or (self.steps > 2 and self.seconds > self.SECONDS / 2)

    def note(self, rows: int, seconds: float) -> None:
        """Add one step."""
        self.steps += 1
        self.seconds += seconds
        keep = 1 - min(1 / self.STEPS, seconds / self.SECONDS)
        self._weight = self._weight * keep + 1
        self._rows = self._rows * keep + rows
        self._seconds = self._seconds * keep + seconds
        self._squares = self._squares * keep + rows * rows
        self._products = self._products * keep + rows * seconds

    def fit(self) -> tuple[float, float]:
        """Return seconds of the fixed part, and seconds of each row: infinite without any row."""
        if self._seconds <= 0:
            return 0.0, inf
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        if rows == 0:
            return seconds, inf
        variance = self._squares / self._weight - rows * rows
        if variance <= (self.SPREAD * rows) ** 2:
            return 0.0, seconds / rows
        slope = (self._products / self._weight - rows * seconds) / variance
        slope = min(max(slope, 0.1 * seconds / rows), seconds / rows)
        return seconds - slope * rows, slope
