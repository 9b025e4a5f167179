"""Say which indices each rank has, by arithmetic: nothing here is as long as the world.

    even       rank r has torch.chunk's part: [r * longest, (r + 1) * longest), cut off at `extent`
    weighted   [extent * prefix[r] // prefix[-1], extent * prefix[r + 1] // prefix[-1])
    alike      every rank has [0, extent)

A `Ranges` is a sequence: an index gives a range, a slice the ranges of other ranks. Weighted ranges
share one prefix, the running sum of the weights of a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple, overload

Range = tuple[int, int]
"""[start, stop)."""

Shares = tuple[int, ...] | None
"""One weight per rank, in rank order; None where all ranks hold the same."""


class Stack(NamedTuple):
    """Ranges as the rows of a matrix: `full` of them, then one of `short` indices, if not 0."""

    start: int  # of the first row
    longest: int  # the indices of a full row
    stride: int  # between rows
    full: int
    short: int


@dataclass(frozen=True, slots=True)
class Ranges(Sequence[Range]):
    """The range of each of some ranks, in rank order; see the module."""

    extent: int
    which: range  # the ranks
    longest: int = 0  # of even ranges
    prefix: Sequence[int] = ()  # of weighted ranges; neither: all alike
    scale: int = 1  # bounds are multiplied by it
    shift: int = 0  # and then moved by it

    @staticmethod
    def over(extent: int, world_size: int, shares: Shares = None) -> Ranges:
        """Cut `extent` indices over `world_size` ranks, by one weight each or evenly."""
        if shares is None:
            return Ranges(extent, range(world_size), max(1, -(-extent // world_size)))
        return Ranges(extent, range(world_size), prefix=_prefix_of(shares))

    @staticmethod
    def alike(extent: int, world_size: int) -> Ranges:
        """Give all of `extent` indices to each of `world_size` ranks."""
        return Ranges(extent, range(world_size))

    @staticmethod
    def ending_at(ends: Sequence[int]) -> Ranges:
        """Range r lies between numbers r and r + 1 of `ends`, which begin at 0."""
        return Ranges(ends[-1], range(len(ends) - 1), prefix=tuple(ends))

    @property
    def is_alike(self) -> bool:
        """True if every rank has the same range."""
        return not (self.longest or self.prefix)

    def __len__(self) -> int:
        return len(self.which)

    @overload
    def __getitem__(self, key: int) -> Range: ...
    @overload
    def __getitem__(self, key: slice) -> Ranges: ...
    def __getitem__(self, key: int | slice) -> Range | Ranges:
        if isinstance(key, slice):
            chosen, how = self.which[key], (self.longest, self.prefix, self.scale, self.shift)
            return Ranges(self.extent, chosen, *how)
        rank, extent, prefix = self.which[key], self.extent, self.prefix
        if prefix:
            total = prefix[-1] or 1
            start, stop = extent * prefix[rank] // total, extent * prefix[rank + 1] // total
        elif self.longest:
            start = min(rank * self.longest, extent)
            stop = min(start + self.longest, extent)
        else:
            start, stop = 0, extent
        return start * self.scale + self.shift, stop * self.scale + self.shift

    def __iter__(self) -> Iterator[Range]:
        extent, longest, scale, shift = self.extent, self.longest, self.scale, self.shift
        if self.is_alike:
            return repeat((shift, extent * scale + shift), len(self.which))
        if prefix := self.prefix:
            total = prefix[-1] or 1
            starts = [extent * prefix[rank] // total * scale + shift for rank in self.which]
            stops = [extent * prefix[rank + 1] // total * scale + shift for rank in self.which]
        else:
            starts = [min(rank * longest, extent) * scale + shift for rank in self.which]
            stops = [min(rank * longest + longest, extent) * scale + shift for rank in self.which]
        return zip(starts, stops, strict=True)

    @property
    def lengths(self) -> list[int]:
        """Indices of each rank."""
        return [stop - start for start, stop in self]

    @property
    def numel(self) -> int:
        """Indices of these ranks together."""
        if not self.which:
            return 0
        if self.which.step == 1 and not self.is_alike:
            return self[-1][1] - self[0][0]
        if self.prefix:
            return sum(self.lengths)
        num_full = len(self.which) if self.is_alike else self._num_full()
        full = num_full * (self.longest or self.extent) * self.scale
        short = self[num_full] if num_full < len(self.which) else (0, 0)
        return full + short[1] - short[0]

    def _num_full(self) -> int:
        """How many of these ranks have as much as a rank can: the first ones."""
        full = self.extent // self.longest  # ranks of the whole world
        return len(range(self.which.start, min(full, self.which.stop), self.which.step))

    def length(self, number: int) -> int:
        """Indices of one of these ranks."""
        start, stop = self[number]
        return stop - start

    @property
    def most(self) -> int:
        """The indices of the rank that has most."""
        if self.prefix:
            return max(self.lengths, default=0)
        return self.length(0) if self.which else 0  # the first is the longest

    @property
    def common(self) -> int:
        """The length of every range, where all are alike and lie side by side; else 0."""
        if not self.which:
            return 0
        length = self.length(0)
        is_equal = set(self.lengths) == {length} if self.prefix else self.length(-1) == length
        return length if is_equal and self.is_joined else 0

    @property
    def is_joined(self) -> bool:
        """True if each range begins where the one before ends."""
        if self.prefix and self.which.step > 1:  # ranks between may have nothing
            return all(end == begin for (_, end), (begin, _) in pairwise(self))
        return len(self.which) < 2 or not (self.is_alike or self.which.step > 1)

    @property
    def stack(self) -> Stack:
        """Where unweighted ranges lie: many as long as the first, at most one that is shorter."""
        start, longest = self.shift, (self.longest or self.extent) * self.scale
        if self.is_alike:
            return Stack(start, longest, 0, len(self.which), 0)
        full, step = self._num_full(), self.which.step * longest
        short = self.length(full) if full < len(self.which) else 0
        return Stack(self[0][0] if self.which else start, longest, step, full, short)

    @property
    def has_empty(self) -> bool:
        """True if some rank has no index."""
        if self.prefix:
            return 0 in self.lengths
        start, stop = self[-1]  # of even ranges, the last is the shortest
        return start == stop

    def scaled(self, numel: int) -> Ranges:
        """The ranges of elements, where an index stands for `numel` of them."""
        scale, shift = self.scale * numel, self.shift * numel
        return Ranges(self.extent, self.which, self.longest, self.prefix, scale, shift)

    def moved(self, by: int) -> Ranges:
        """The same ranges, counted from `-by`."""
        shift = self.shift + by
        return Ranges(self.extent, self.which, self.longest, self.prefix, self.scale, shift)

    def joined(self, start: int) -> Ranges:
        """Ranges as long as these, laid one behind the other from `start` on."""
        if self.prefix:
            return Ranges.ending_at([*accumulate(self.lengths, initial=0)]).moved(start)
        longest = max(1, (self.longest or self.extent) * self.scale)
        return Ranges(self.numel, range(len(self.which)), longest, shift=start)


@lru_cache(maxsize=64)
def _prefix_of(shares: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(shares, initial=0))
