"""How the rows of all ranks become the whole weights of one unit, and what ranks tell each other.

Behind the weights every rank sends one number, its tag: which unit it gathers, or that it could not
have its rows. So ranks that use different units, and a disk that fails on one rank, are errors on
all of them, by name, and no rank waits for another that has given up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from onefold.errors import TierError, WireError, expected
from onefold.layout.rows import Slot
from onefold.state.buffer import Buffer
from onefold.ticket import DONE, Ticket
from onefold.wire.transport import Cut

if TYPE_CHECKING:
    from onefold.state.unit import Unit

FAILED_TAG = 0
"""In place of a unit's tag: the rank could not have its rows."""


def tags_of(world_size: int) -> Slot:
    """The region of a message in which each rank has one element; it carries no state."""
    return Slot("", (world_size,), 0, tuple((rank, rank + 1) for rank in range(world_size)), ())


class UnitGather:
    """Fills full buffers of a unit, of any dtype, from the shards of all ranks."""

    def __init__(self, unit: Unit) -> None:
        self._unit = ref(unit)
        self._cut: Cut | None = None
        self._own_spans: list[tuple[int, int]] = []  # of own rows in the full buffer
        self._near_spans: list[tuple[int, int]] = []  # and in the shard

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        assert unit is not None, "a gather outlived its unit"
        return unit

    @property
    def full_numel(self) -> int:
        """Elements of a full buffer: the regions, and a tag for each rank if it is gathered."""
        rest = self.unit.rest
        return rest.full_numel + (rest.world_size if rest.world_size > 1 else 0)

    def start(self, full: Buffer) -> Ticket:
        """Begin to fill `full`; once the ticket is waited for, `check` tells if it went well.

        Raises `TierError` if this rank's rows cannot be had and no other rank would learn of it.
        """
        unit = self.unit
        setting, flat = unit.setting, full.tensor
        self._plan(full)

        def bring() -> None:
            near = unit.rows.take(unit.edits())
            own = [flat[start:stop] for start, stop in self._own_spans]
            torch._foreach_copy_(own, [near[start:stop] for start, stop in self._near_spans])

        try:
            self.bring_and_tag(bring, flat[unit.rest.full_numel :])
        finally:
            unit.rows.give_back()
        if self._cut is None:
            return DONE
        where = f"gather of unit {unit.name!r} on rank {setting.rank}"
        return setting.transport.gather(flat, self._cut, where)

    def bring_and_tag(self, bring: Callable[[], None], tags: Tensor) -> None:
        """Have `bring` put own rows into a message; then fill its `tags` [N, or none in a world of
        one]. If the rows cannot be had they say so; where nobody looks at them, that is raised.
        """
        unit = self.unit
        with torch.no_grad():
            try:
                unit.settle()
                bring()
            except TierError as error:
                unit.failure = error
                if not self._tells(tags):
                    raise
            tags.fill_(unit.tag if unit.failure is None else FAILED_TAG)

    def _plan(self, full: Buffer) -> None:
        """What is sent and copied, found once."""
        if self._own_spans:
            return
        setting, rest = self.unit.setting, self.unit.rest
        if setting.rest_world > 1:
            sharded = [slot for slot in rest.slots if not slot.replicated]
            offsets = [slot.full_offset for slot in sharded]
            self._cut = Cut(
                [*sharded, tags_of(setting.world_size)], [*offsets, rest.full_numel],
                setting.transport.group, full.tensor.itemsize, self.unit.name,
            )  # fmt: skip
        rank = setting.rest_rank
        for slot in rest.slots:
            start, stop = slot.pieces[rank]
            first = slot.shard_offsets[rank]
            self._own_spans.append((slot.full_offset + start, slot.full_offset + stop))
            self._near_spans.append((first, first + stop - start))

    @staticmethod
    def _tells(tags: Tensor) -> bool:
        """True if ranks look at each other's tags: where the host can without a device's wait."""
        return len(tags) > 1 and tags.device.type == "cpu"

    def check(self, full: Buffer) -> None:
        """Raise if some rank gathered another unit at the same time, or had no rows to send.

        Pieces of equal length would otherwise mix two units without anyone noticing.
        """
        self.check_tags(full.tensor[self.unit.rest.full_numel :])

    def check_tags(self, told: Tensor) -> None:
        """Raise as `check` does, from the tags that came with a message of this unit."""
        if not self._tells(told):
            return
        unit, tags = self.unit, told.tolist()
        if any(abs(tag - FAILED_TAG) < 0.25 for tag in tags):
            raise self._failed_somewhere()
        for rank, tag in enumerate(tags):
            if abs(tag - unit.tag) > 0.25:
                raise WireError(
                    expected(
                        f"gather of unit {unit.name!r} on every rank",
                        f"another unit on rank {rank}",
                        where=f"rank {unit.setting.rank}",
                        hint="all ranks must use units in the same order; a branch that only some "
                        "ranks take has to be inside one unit (`units=`)",
                    )
                )

    def _failed_somewhere(self) -> TierError:
        """The error of this rank, or that of the first rank that has one. A collective."""
        unit = self.unit
        mine = None if unit.failure is None else str(unit.failure)
        texts = unit.setting.transport.group.all_gather_object(mine)
        if unit.failure is None:
            unit.failure = TierError(str(next(text for text in texts if text is not None)))
        return unit.failure
