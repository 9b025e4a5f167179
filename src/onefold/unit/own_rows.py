"""OwnRows: this rank's rows of a unit's weight, fetched to where they are sent or computed with."""

from __future__ import annotations

from torch import Tensor

from onefold.layout.observer import Stream, watched
from onefold.tier.scratch import Pieces
from onefold.tier.slots import Room
from onefold.tier.workers import Task
from onefold.unit.buffer import Buffer
from onefold.unit.context import Context
from onefold.wire.ticket import Ticket, Waitable


class OwnRows:
    """The flat rows of a weight that may rest in a far tier."""

    def __init__(self, weight: Buffer, context: Context, unit: str) -> None:
        self._weight = weight
        self._ledger = context.ledger
        self._unit = unit
        self._tiers = context.tiers
        self._slot: Room | None = None
        self._task: Task | None = None
        self._edits = -1  # of the weight, when the fetch began

    def start(self, edits: int, after: Waitable | None) -> None:
        """Begin to fetch the rows, once `after` is over; nothing to do where they rest near."""
        far = self._weight.far
        if far is None or (self._task is not None and self._edits == edits):
            return
        self.give_back()
        self._edits = edits
        slot = self._slot = self._tiers.slots.take(self._weight.tensor.nbytes)
        near = slot.tensor(len(self._weight.tensor), self._weight.tensor.dtype)

        def fetch() -> None:
            if after is not None:
                after.wait()
            with watched(self._ledger.observer, Stream.TIER, "fetch", self._unit, near.nbytes):
                far.fetch(0, near)

        self._task = self._tiers.fetchers.give(fetch)

    def take(self, edits: int) -> Tensor:
        """The rows as they are after `edits`, valid until `give_back`. Raises `TierError`."""
        self.start(edits, None)
        assert self._task is not None, "a fetch was just begun"
        assert self._slot is not None, "a fetch has a slot"
        self._task.wait()
        return self._slot.tensor(len(self._weight.tensor), self._weight.tensor.dtype)

    def read_into(self, full: Tensor) -> Ticket:
        """Begin to read all rows straight into `full`, whose memory ends with a whole page.

        Pieces are read in order, by the fetchers and by the thread that waits.
        """
        weight, far = self._weight.tensor, self._weight.far
        assert far is not None, "rows in memory are not read"

        def piece(start: int, stop: int) -> None:
            first, last = start // weight.itemsize, stop // weight.itemsize
            with watched(self._ledger.observer, Stream.TIER, "fetch", self._unit, stop - start):
                far.fetch(first, full[first:last])

        return Ticket([Pieces(self._tiers.fetchers, weight.nbytes, piece)])

    def give_back(self) -> None:
        """Return the slot of fetched rows; waits for a fetch that is still under way."""
        task, self._task = self._task, None
        slot, self._slot = self._slot, None
        if task is not None and slot is not None:
            task.finish()
            self._tiers.slots.give(slot)

    def await_fetch(self) -> None:
        """Wait for a fetch that is under way; its rows stay. Its error is raised by `take`."""
        if self._task is not None:
            self._task.finish()
