"""What a rank needs in one memory, as a straight line in its share of the state, and what fits.

    need(share) = fixed + base + share * whole

    whole   all the state
    base    what every rank holds of each model: unsharded units, messages
    fixed   what a larger model has no more of: activations; 0 where they are not known yet

Shares are filled to one level: a rank sends its own rows to all others, so the largest share sets
the pace of the wire. Source: docs/guides/mixed-clusters.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, inf

from onefold.layout.cut import Shares

PARTS_A_RANK = 32
"""Shares are rounded down to so many parts of the mean share: free memory flickers."""
MOST_PARTS = 1 << 40
"""Of all ranks, where coarser ones leave no room for the state."""


@dataclass(frozen=True, slots=True)
class Line:
    """The need of one rank in one memory, and the bytes that it may take there."""

    tier: str
    free: int
    base: int
    whole: int
    fixed: int = 0

    @staticmethod
    def through(tier: str, free: int, even: int, alone: int, ranks: int, fixed: int = 0) -> Line:
        """Draw the line through the needs of an even share and of all the state, on `ranks`."""
        whole = max(0, alone - even) * ranks // (ranks - 1)
        return Line(tier, free, alone - whole - fixed, whole, fixed)

    def need(self, share: float) -> int:
        """Return the bytes of a share of the state."""
        return self.fixed + self.base + int(share * self.whole)

    def most(self, left: float = 0.0, times: float = 1.0) -> float:
        """Return the largest share that fits; below 0 where none does.

        Args:
            left: the part of the free bytes that stays free.
            times: how many times as large as the model another one is, whose share is asked for.
        """
        spare = ((1 - left) * self.free - self.fixed) / times - self.base
        if self.whole <= 0:
            return inf if spare >= 0 else -inf
        return spare / self.whole


def most_of(lines: Iterable[Line], left: float = 0.0, times: float = 1.0) -> float:
    """Return the largest share that fits into all memories of a rank, up to 1."""
    return min([1.0, *(line.most(left, times) for line in lines)])


def fill(limits: Sequence[float]) -> Shares:
    """Return the most even shares within limits, as integer weights; None where all are equal.

    Shares of ranks with little room are their limits, rounded down. The others share the rest
    evenly. Where all limits together are less than 1, shares are in proportion to them.

    Args:
        limits: the largest share of the state for which each rank has room, in rank order.

    >>> fill((0.5, 0.3, 0.3))
    (10, 7, 7)
    """
    bounded = [min(1.0, max(0.0, limit)) for limit in limits]
    parts = PARTS_A_RANK * len(limits)
    rounded = [int(limit * parts) for limit in bounded]
    while sum(rounded) < parts < MOST_PARTS and sum(bounded) >= 1:
        parts *= 2
        rounded = [int(limit * parts) for limit in bounded]
    rest, open_ranks = parts, set(range(len(limits)))
    while full := {rank for rank in open_ranks if rounded[rank] * len(open_ranks) < rest}:
        open_ranks -= full
        rest -= sum(rounded[rank] for rank in full)
    count = len(open_ranks)
    weights = [
        rest if rank in open_ranks else rounded[rank] * max(1, count) for rank in range(len(limits))
    ]
    divisor = gcd(*weights)
    return None if len(set(weights)) == 1 else tuple(weight // divisor for weight in weights)
