"""Messages between the ranks of different islands: which rows they share, and the bytes of these.

Each island cuts a parameter over its own ranks. Between two neighbouring bounds, of whichever
island, one rank of each island holds the elements:

    island 0, two ranks    |    0    |    1    |
    island 1, three ranks  |   0  |   1  |  2  |
    owners                 | 0,0  |01|11|  1,2 |

The elements of one unit with the same owners are one parcel: one message, which its owners send
one another. Among islands of the same size each rank has one parcel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from onefold.layout.cut import Cut
from onefold.layout.message_plan import ALIGN_NBYTES
from onefold.layout.ranges import Range
from onefold.layout.rows import round_up
from onefold.wire.codec import Codec

Owners = tuple[int, ...]
"""One rank of each island, in the order of the islands."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Elements with the same owners, as ranges of this rank's rows of a unit.

    `quantized` elements go through the codec, `exact` ones (vectors and scalars) do not.
    """

    owners: Owners
    quantized: list[Range] = field(default_factory=list[Range])
    exact: list[Range] = field(default_factory=list[Range])

    def add(self, start: int, stop: int, *, is_matrix: bool) -> None:
        """Add a range, joined to the one before where they touch."""
        ranges = self.quantized if is_matrix else self.exact
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
    parcels: dict[Owners, Parcel] = {}
    for own, of_islands in zip(rows, cuts, strict=True):
        at = own.offset
        for owners, (start, stop) in _refined(of_islands):
            if owners[island] == rank:
                parcel = parcels.setdefault(owners, Parcel(owners))
                parcel.add(at, at + stop - start, is_matrix=len(own.cut.shape) > 1)
                at += 0 if own.cut.is_replicated else stop - start
    return [parcels[owners] for owners in sorted(parcels)]


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


class ParcelMessage:
    """Packs one parcel of flat rows [own rows] into a message, and reads it again.

    Without a codec all elements are exact. `dtype` is that of the rows.
    """

    def __init__(self, parcel: Parcel, dtype: torch.dtype, codec: Codec | None) -> None:
        is_quantized = codec is not None and dtype.is_floating_point
        self.owners, self._dtype, self._codec = parcel.owners, dtype, codec
        self.quantized = parcel.quantized if is_quantized else []
        self.exact = parcel.exact if is_quantized else parcel.quantized + parcel.exact
        self._quantized_numel, exact_numel = _numel(self.quantized), _numel(self.exact)
        self._quantized_nbytes = 0 if codec is None else codec.nbytes(self._quantized_numel)
        self._start = round_up(self._quantized_nbytes, ALIGN_NBYTES)
        self.nbytes = self._start + exact_numel * dtype.itemsize

    def pack(self, rows: Tensor) -> Tensor:
        """Return the message, uint8 [nbytes], of `rows` [own rows]."""
        message = torch.zeros(self.nbytes, dtype=torch.uint8)
        if self._codec is not None and self.quantized:
            self._codec.encode(
                _taken(rows, self.quantized).float(), message[: self._quantized_nbytes]
            )
        if self.exact:
            message[self._start :].view(self._dtype).copy_(_taken(rows, self.exact))
        return message

    def unpack(self, message: Tensor, rows: Tensor) -> None:
        """Write the values of a message to their places in `rows`; leave the others."""
        if self._codec is not None and self.quantized:
            values = torch.empty(self._quantized_numel)
            self._codec.decode(message[: self._quantized_nbytes], values)
            _put(values, rows, self.quantized)
        if self.exact:
            _put(message[self._start :].view(self._dtype), rows, self.exact)

    def mean(self, messages: Sequence[Tensor], weights: Sequence[int], rows: Tensor) -> None:
        """Write the weighted mean of all islands' values to `rows`: the same bits on each.

        Values are added in the order of the islands.
        """
        total, values = torch.zeros_like(rows), torch.zeros_like(rows)
        for message, weight in zip(messages, weights, strict=True):
            self.unpack(message, values)
            total.add_(values, alpha=weight)
        total.div_(sum(weights))
        for start, stop in (*self.quantized, *self.exact):
            rows[start:stop] = total[start:stop]

    def keep_rounding(self, sent: Tensor, message: Tensor, residual: Tensor) -> None:
        """Write the part of `sent` that the codec rounded off to `residual` (error feedback).

        Source: Seide et al., Interspeech 2014.
        """
        if self._codec is None or not self.quantized:
            return
        values = torch.empty(self._quantized_numel)
        self._codec.decode(message[: self._quantized_nbytes], values)
        rounded = _taken(sent, self.quantized).float().sub_(values)
        _put(rounded.nan_to_num_(0.0, 0.0, 0.0), residual, self.quantized)


def _numel(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _taken(rows: Tensor, ranges: Sequence[Range]) -> Tensor:
    return torch.cat([rows[start:stop] for start, stop in ranges])


def _put(values: Tensor, rows: Tensor, ranges: Sequence[Range]) -> None:
    parts = values.split([stop - start for start, stop in ranges])
    for (start, stop), part in zip(ranges, parts, strict=True):
        rows[start:stop] = part
