"""Messages between the ranks of different islands: which rows they share, and gloo groups to send.

Each island cuts a parameter over its own ranks. Between two neighbouring bounds, of whichever
island, one rank of each island holds the elements:

    island 0, two ranks    |    0    |    1    |
    island 1, three ranks  |   0  |   1  |  2  |
    owners                 | 0,0  |01|11|  1,2 |

The elements of one unit with the same owners are one parcel: one message, which its owners send
one another. Among islands of the same size each rank has one parcel.

Connections are gloo, on the CPU, one group per parcel's owners. A group whose peer has gone fails
for good. It is left, and islands that go on connect anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from onefold.errors import WireError, expected
from onefold.layout.cut import Cut, Range
from onefold.layout.messages import ALIGN_NBYTES
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


_GLOO: Any = ProcessGroupGloo  # whose stubs lack some names
_LOOK = timedelta(seconds=0.25)


@dataclass(frozen=True, slots=True)
class IslandPlace:
    """An island among all: the store to meet them, its number, and how many there are."""

    store: Store
    island: int
    num_islands: int
    address: str = ""  # that peers of this rank dial; "": gloo's choice, or GLOO_SOCKET_IFNAME


class IslandLinks:
    """The groups of this rank among the islands that take part now."""

    def __init__(
        self, place: IslandPlace, name: str, seat: tuple[int, int], timeout: float
    ) -> None:
        """`seat`: the position of this island among those that take part, and their number."""
        self._place, self._name, self._timeout = place, name, timeout
        self._position, self._size = seat
        self._groups: dict[Owners, Any] = {}
        self._works: list[Any] = []  # of groups that were left: gloo still uses their buffers

    def connect(self, everyone: Iterable[Owners]) -> None:
        """Connect the groups with these owners. A collective of their islands.

        Raises `WireError` if a peer does not come within the timeout.
        """
        if self._size == 1:
            return
        wanted = sorted(set(everyone) - self._groups.keys())
        within(self._timeout, lambda: [self._connect(owners) for owners in wanted])

    def _connect(self, owners: Owners) -> None:
        store, rank = self._place.store.clone(), self._position  # type: ignore[attr-defined]
        prefix = PrefixStore(f"{self._name}/{'-'.join(map(str, owners))}", store)
        limit = timedelta(seconds=self._timeout)
        if not self._place.address:
            self._groups[owners] = ProcessGroupGloo(prefix, rank, self._size, limit)
            return
        options = _GLOO._Options()
        options._devices = [_GLOO.create_device(hostname=self._place.address)]
        options._timeout = limit
        self._groups[owners] = ProcessGroupGloo(prefix, rank, self._size, options)

    def gather(self, owners: Owners, message: Tensor) -> Arriving:
        """Begin to send a message to the other owners, who send one of the same length."""
        if self._size == 1:
            return Arriving([], [message])
        received = torch.empty(self._size * len(message), dtype=torch.uint8)
        options = AllgatherOptions()
        options.asyncOp = True
        work = self._groups[owners]._allgather_base(received, message, options)
        self._works.append((work, received, message))
        return Arriving([work], list(received.split(len(message))))

    def broadcast(self, owners: Owners, message: Tensor, source: int) -> Arriving:
        """Begin to send the message of the island at position `source` to the other owners."""
        if self._size == 1:
            return Arriving([], [message])
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = source, 0, True
        work = self._groups[owners].broadcast([message], options)
        self._works.append((work, message))
        return Arriving([work], [message])

    def sent_nbytes(self, message: Tensor) -> int:
        """Bytes that an exchange of a message sends from this rank."""
        return (self._size - 1) * len(message)

    def forget(self) -> None:
        """Free the buffers of messages that are complete."""
        self._works = [work for work in self._works if not work[0].is_completed()]

    @property
    def is_busy(self) -> bool:
        """True while gloo uses a buffer of ours."""
        self.forget()
        return bool(self._works)


@dataclass(frozen=True, slots=True)
class Arriving:
    """Messages under way: one of each island, in their order."""

    works: list[Any]
    messages: list[Tensor]

    def wait(self, deadline: float, has_failed: Callable[[], bool]) -> None:
        """Wait until they are there; `WireError` at the deadline, or where a peer has gone.

        `has_failed` is asked now and then: True where waiting has become useless.
        """
        for work in self.works:
            while True:
                try:
                    work.wait(_LOOK)
                    break
                except RuntimeError as error:
                    if work.is_completed():
                        raise WireError(_lost(str(error).splitlines()[0])) from error
                    if time.monotonic() > deadline:
                        raise WireError(_lost("none within the timeout")) from error
                    if has_failed():
                        raise WireError(_lost("another island gave up")) from error


def within(timeout: float, act: Callable[[], object]) -> None:
    """Call `act` in a thread that is left behind if it takes longer than `timeout` seconds.

    gloo's listening side ignores its own timeout.
    """
    failed: list[Exception] = []

    def run() -> None:
        try:
            act()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="onefold-islands-connect")
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise WireError(_lost(f"no connection within {timeout:g} s"))
    if failed:
        raise WireError(_lost(str(failed[0]).splitlines()[0])) from failed[0]


def _lost(got: str) -> str:
    return expected(
        "a message of every island that takes part", got,
        hint="the round is repeated without islands that do not answer",
    )  # fmt: skip
