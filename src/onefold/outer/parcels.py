"""Cut the rows that ranks of different islands share into parcels. No torch here.

Each island cuts a parameter over its own ranks. Between two neighbouring bounds, of whichever
island, one rank of each island holds the elements:

    island 0, two ranks    |    0    |    1    |
    island 1, three ranks  |   0  |   1  |  2  |
    owners                 | 0,0  |01|11|  1,2 |

The elements of one unit with the same owners are one parcel: one message, which its owners send
one another. Among islands of the same size each rank has one parcel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from onefold.layout.cut import Cut, Range

Owners = tuple[int, ...]
"""One rank of each island, in the order of the islands."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Elements with the same owners, as ranges of this rank's rows of a unit.

    `coded` elements go through the codec, `exact` ones (vectors and scalars) do not.
    """

    owners: Owners
    coded: list[Range] = field(default_factory=list[Range])
    exact: list[Range] = field(default_factory=list[Range])

    def add(self, start: int, stop: int, *, is_matrix: bool) -> None:
        """Add a range, joined to the one before where they touch."""
        ranges = self.coded if is_matrix else self.exact
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))


@dataclass(frozen=True, slots=True)
class ShareRows:
    """The place of this rank's rows of one parameter: `offset` in its rows of the unit."""

    cut: Cut
    offset: int


def parcels_of(
    rows: Sequence[ShareRows], cuts: Sequence[Sequence[Cut]], island: int, rank: int
) -> list[Parcel]:
    """This rank's parcels of a unit, in the order that all owners agree on.

    Args:
        rows: this rank's rows of each parameter.
        cuts: of each parameter, the cut of every island.
        island: the position of this rank's island among them.
        rank: this rank's number in its island.
    """
    found: defaultdict[Owners, Parcel] = defaultdict(lambda: Parcel(()))
    for own, of_islands in zip(rows, cuts, strict=True):
        starts = _starts(own, rank)
        for owners, (start, stop) in _refined(of_islands):
            if owners[island] == rank:
                first = next(at for at in starts if at[0] <= start < at[1])
                if owners not in found:
                    found[owners] = Parcel(owners)
                at = first[2] + start - first[0]
                found[owners].add(at, at + stop - start, is_matrix=len(own.cut.shape) > 1)
    return [found[owners] for owners in sorted(found)]


def _starts(own: ShareRows, rank: int) -> list[tuple[int, int, int]]:
    """This rank's spans of a parameter: start, stop, and where it lies in the unit's rows."""
    found, at = list[tuple[int, int, int]](), own.offset
    for start, stop in own.cut.spans(rank):
        found.append((start, stop, at))
        at += stop - start
    return found


def _refined(cuts: Sequence[Cut]) -> Iterator[tuple[Owners, Range]]:
    """The elements of a parameter between neighbouring bounds of all cuts, with their owners."""
    if cuts[0].is_replicated:  # every rank needs it: each gets it from one rank of each island
        sizes = [len(cut.ranges) for cut in cuts]
        for number in range(max(sizes)):
            yield tuple(number % size for size in sizes), (0, 1)
        return
    lists = [_spans(cut) for cut in cuts]
    places, start, numel = [0] * len(cuts), 0, prod(cuts[0].shape)
    while start < numel:
        now = [spans[place] for spans, place in zip(lists, places, strict=True)]
        stop = min(span[1] for span in now)
        yield tuple(span[2] for span in now), (start, stop)
        places = [place + (span[1] == stop) for place, span in zip(places, now, strict=True)]
        start = stop


def _spans(cut: Cut) -> list[tuple[int, int, int]]:
    """Start, stop and rank of every range of a parameter, in order, empty ones left out."""
    return [
        (slab * cut.slab_numel + start, slab * cut.slab_numel + stop, rank)
        for slab in range(cut.num_slabs)
        for rank, (start, stop) in enumerate(cut.slab_ranges)
        if stop > start
    ]
