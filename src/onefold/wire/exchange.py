"""The two moves of which transports are made: a piece to all ranks, or a piece to each.

    all_gather   flat | 0 | 1 | 2 |   each rank's piece reaches all others, in place
    all_to_all   sent | 0 | 1 | 2 |   each rank gets the piece for it from all others

Pieces may have any length. On gloo, broadcasts and `all_to_all` are 2-4 times as fast as its own
gathers and reductions, which stage everything in hidden copies.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from onefold.layout import message_plan
from onefold.layout.ledger import Kind, Ledger, padding_of
from onefold.layout.message_plan import PACK_NBYTES
from onefold.layout.ranges import Ranges
from onefold.wire.collectives import Group
from onefold.wire.ticket import Waitable

B = TypeVar("B")


class Exchange:
    """Moves pieces of flat buffers between the ranks of a group, and counts what it sends.

    With `native`, the backend's own all-gather gathers large equal pieces. `where` names the links
    if there are several kinds: "inside" a node, or "between" nodes. With `coalesces`, the backend
    begins all collectives of one message by one launch, over regions as they lie.
    """

    def __init__(
        self,
        group: Group,
        ledger: Ledger,
        *,
        native: bool = False,
        where: str = "",
        coalesces: bool = False,
    ) -> None:
        self.group = group
        self.ledger = ledger
        self.gathering, self.reducing = Buffers(ledger), Buffers(ledger)
        self.coalesces = coalesces
        self._native = native
        self._where = f" {where}" if where else ""  # behind names of traffic: "gather between"

    def rest(self) -> None:
        """Free the buffers kept for the next message: none follows for now."""
        self.gathering.clear()
        self.reducing.clear()

    def together(self, device: torch.device, begin: Callable[[], list[Waitable]]) -> list[Waitable]:
        """Begin the collectives of one message, by one launch where the backend can."""
        if not self.coalesces:
            return begin()
        self.group.begin_one(device)
        try:
            begin()
        finally:
            work = self.group.end_one(device)
        return [work]

    def count(
        self, collective: str, nbytes: int, control_nbytes: int = 0, padding_nbytes: int = 0
    ) -> None:
        """Count the bytes of one collective, under the name of its links; flags and padding too."""
        name = collective + self._where
        self.ledger.sent(name, nbytes)
        if control_nbytes:
            self.ledger.sent("control", control_nbytes, 0)
        if padding_nbytes:
            self.ledger.sent(padding_of(name), padding_nbytes, 0)

    def all_gather(self, flat: Tensor, spans: Ranges) -> list[Waitable]:
        """Begin to send each rank's span of `flat` to all others.

        One collective where pieces are equal, lie together and are small, or ranks are many:
        latency counts then.
        """
        common, first, start, stop, last = _edges(spans, self.group.rank)
        is_wide, nbytes = self.group.world_size > message_plan.FEW_RANKS, common * flat.itemsize
        if nbytes and (self._native or is_wide or nbytes < PACK_NBYTES):
            full = flat if last - first == flat.numel() else flat[first:last]
            return [self.group.all_gather(full, flat[start:stop])]
        return [
            self.group.broadcast(flat[start:stop], source)
            for source, (start, stop) in enumerate(spans)
            if stop > start
        ]

    def all_gather_counted(self, flat: Tensor, spans: Ranges) -> Waitable:
        """The same for unequal spans of many ranks that lie together, by one collective."""
        (first, _), (start, stop), (_, last) = spans[0], spans[self.group.rank], spans[-1]
        sent, ranks = flat[start:stop].repeat(len(spans)), len(spans)
        return self.group.all_to_all(flat[first:last], sent, spans.lengths, [stop - start] * ranks)

    def all_to_all(
        self, sent: Tensor, numels: Sequence[int], own: int
    ) -> tuple[Waitable, Tensor, Sequence[Tensor] | Tensor]:
        """Begin to send consecutive pieces of `sent`, of `numels` elements, to ranks 0, 1, ...

        Each other rank sends a piece of `own` elements; no `numels`: all pieces are as long.
        Returns the work, the buffer that it fills, which `reducing` gets back, and the buffer's
        pieces in rank order: of many ranks as the rows of a matrix. A rank's piece for itself,
        often empty, is copied too.
        """
        ranks = self.group.world_size
        if not numels:  # no list of all ranks is made, here or in a backend
            received = self.reducing.take_buffer(own * ranks, sent.dtype, sent.device)
            work = self.group.all_to_all(received, sent, [], [])
            return work, received, received.view(ranks, own)
        counts = [own] * ranks
        counts[self.group.rank] = numels[self.group.rank]
        received = self.reducing.take_buffer(sum(counts), sent.dtype, sent.device)
        work = self.group.all_to_all(received, sent, counts, list(numels))
        if ranks > message_plan.FEW_RANKS and counts[self.group.rank] == own:
            return work, received, received.view(ranks, own)
        return work, received, received.split_with_sizes(counts)


@lru_cache(maxsize=4096)
def _edges(spans: Ranges, rank: int) -> tuple[int, int, int, int, int]:
    """The length of all spans if they are equal, where all begin, a rank's own, where all end."""
    return spans.common, spans[0][0], *spans[rank], spans[-1][1]


class SpareBuffers(Generic[B]):
    """Buffers of one message kept for the next one: the rules, for tensors and for plans.

    Units are often alike. Freed memory would be mapped and cleared again page by page, or another
    allocation would take its place and the heap would grow. `count` receives bytes: allocated, or
    negative where freed.
    """

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._spare: list[tuple[Hashable, int, B]] = []

    def take_spare(self, kind: Hashable, nbytes: int, allocate: Callable[[], B]) -> B:
        """Return a spare buffer of the same `kind`, or a new one of `nbytes`."""
        for index, (spare, _, buffer) in enumerate(self._spare):
            if spare == kind:
                del self._spare[index]
                return buffer
        buffer = allocate()
        self._count(nbytes)
        return buffer

    def give(self, kind: Hashable, nbytes: int, buffer: B, *, keeps: bool) -> None:
        """Keep a buffer that was read; without `keeps` it is freed."""
        if keeps:
            self._spare.append((kind, nbytes, buffer))
        else:
            self._count(-nbytes)

    def clear(self) -> None:
        """Free the spare buffers."""
        while self._spare:
            self._count(-self._spare.pop()[1])


class Buffers:
    """Buffers of messages on the host, kept from one gather or reduction to the next.

    A device's allocator keeps its blocks itself.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._spare = SpareBuffers[Tensor](partial(ledger.add, Kind.WIRE, "device"))

    def take_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer [numel]."""
        new = partial(torch.empty, numel, dtype=dtype, device=device)
        return self._spare.take_spare((numel, dtype), numel * dtype.itemsize, new)

    def give(self, buffers: list[Tensor]) -> None:
        """Keep the buffers of a message that was read, and free those of the one before."""
        self.clear()
        for buffer in buffers:  # nothing but inference may fill a buffer made in inference mode
            keeps = buffer.device.type == "cpu" and not buffer.is_inference()
            self._spare.give((buffer.numel(), buffer.dtype), buffer.nbytes, buffer, keeps=keeps)

    def clear(self) -> None:
        """Free the kept buffers."""
        self._spare.clear()
