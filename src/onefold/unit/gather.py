"""How the rows of all ranks become the whole weights of one unit, and what ranks tell each other.

Behind the weights every rank sends one number, its tag: which unit it gathers, or that it could not
have its rows. So ranks that use different units, and a disk that fails on one rank, are errors on
all of them, by name, and no rank waits for another that has given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from onefold.errors import TierError, WireError, expected
from onefold.layout.rows import Slot
from onefold.ticket import DONE, Ticket
from onefold.unit.buffer import Buffer
from onefold.wire.cut import MessageLayout
from onefold.wire.transport import SendRows, Transport

if TYPE_CHECKING:
    from onefold.unit.unit import Unit

Stretch = tuple[int, int]
"""[start, stop) in elements."""

FAILED_TAG = 0
"""In place of a unit's tag: the rank could not have its rows."""


def tags_of(world_size: int) -> Slot:
    """The region of a message in which each rank has one element; it carries no state."""
    return Slot("", (world_size,), 0, tuple((rank, rank + 1) for rank in range(world_size)), ())


@dataclass(frozen=True, slots=True)
class GatherMessage:
    """A buffer that one hop fills: how it is cut, its tags and which is ours, what carries it."""

    flat: Tensor
    cut: MessageLayout | None
    tags_at: int
    own_tag: int
    transport: Transport


class UnitGather:
    """Fills full buffers of a unit, of any dtype, from the shards of all ranks."""

    def __init__(self, unit: Unit, transport: Transport) -> None:
        self._unit = ref(unit)
        self._transport = transport
        self._cut: MessageLayout | None = None
        self._copies: list[tuple[Stretch, Stretch]] = []  # in the buffer to fill, in the shard
        self._always: list[tuple[Stretch, Stretch]] = []  # those of them that no transport codes
        self._coded: list[Stretch] = []  # own rows of the others in the shard
        self._has_base = False  # the buffer holds what every rank has read last
        self._edits: list[int] = []  # of each parameter, when it was gathered last

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        assert unit is not None, "a gather outlived its unit"
        return unit

    @property
    def is_exact(self) -> bool:
        """True if every rank reads weights as they rest, in whatever dtype the buffer has."""
        return not self._transport.is_coded

    @property
    def full_numel(self) -> int:
        """Elements of a full buffer: the regions, and a tag for each rank if it is gathered."""
        rest = self.unit.rest
        return rest.full_numel + (rest.world_size if rest.world_size > 1 else 0)

    def prefetch(self) -> None:
        """`start` comes soon: begin what has to be done before."""
        self.unit.rows.start(self.unit.edits(), self.unit.pending)

    def begin_early(self, *, is_summoned: bool) -> None:
        """A forward begins that may use the unit: begin what every rank will want of it.

        Nothing where modules show whole weights already, of which each rank does what it likes.
        """

    def forget_base(self) -> None:
        """Weights were replaced on every rank: the next message is no difference."""
        self._has_base = False

    def follow(self, full: Buffer, edits: int) -> None:
        """A forward changed the whole weights in `full`, on every rank alike, since `edits`."""

    def start(self, full: Buffer) -> Ticket:
        """Begin to fill `full`; once the ticket is waited for, `check` tells if it went well.

        Raises `TierError` if this rank's rows cannot be had and no other rank would learn of it.
        """
        unit = self.unit
        if not self._copies:
            self._plan(full)
        where = self._label("gather")
        rank = unit.setting.rest_rank
        message = GatherMessage(full.tensor, self._cut, unit.rest.full_numel, rank, self._transport)
        return self._send(message, where)

    def _label(self, what: str) -> str:
        """What is begun, for the message if it fails: perhaps since the others know of no edit."""
        before, self._edits = self._edits, [p.edits_by_users for p in self.unit.parameters]
        pairs = zip(self.unit.parameters, before, self._edits, strict=False)
        edited = next((p.fqn for p, old, new in pairs if old != new), "")
        since = f", where {edited!r} was edited," if edited else ""
        return f"{what} of unit {self.unit.name!r} on {self.unit.setting.where}{since}"

    def _send(self, message: GatherMessage, where: str) -> Ticket:
        """Put own rows and the tag into a message, and begin to exchange it."""
        unit, flat = self.unit, message.flat
        own = self._own(message)

        def bring() -> None:
            near = unit.rows.take(unit.edits())
            if own is not None:
                self._take_rows(near, own)
            # what a transport codes it takes itself, and a base has other things in its place
            copies = self._copies if own is None or own.starts_base else self._always
            places = [flat[start:stop] for (start, stop), _ in copies]
            if places:
                torch._foreach_copy_(places, [near[start:stop] for _, (start, stop) in copies])

        try:
            self.bring_and_tag(bring, flat[message.tags_at :], message.own_tag)
            if message.cut is None:
                return DONE
            self._has_base = False  # until this message has arrived
            ticket = message.transport.gather(flat, message.cut, where, own)
        finally:
            unit.rows.give_back()
        return ticket if own is None or not own.is_base_kept else ticket.then(self._note_base)

    def _note_base(self) -> None:
        self._has_base = True

    def _own(self, message: GatherMessage) -> SendRows | None:
        """For a coding transport: whether it sends differences. The same on every rank."""
        if not self._transport.is_coded or message.cut is None:
            return None
        keeps = self.unit.setting.routes.sends_differences
        rows: list[Tensor | None] = [None] * len(message.cut.numels)
        return SendRows(rows, has_base=keeps and self._has_base, is_base_kept=keeps)

    def _take_rows(self, near: Tensor, own: SendRows) -> None:
        """Let a coding transport send rows of the master, so that they are rounded once."""
        unit = self.unit
        is_near = not unit.steps_in_blocks and unit.stepped.device == near.device
        if is_near:
            unit.refresh_master()
        source = unit.stepped if is_near else near
        for index, (start, stop) in enumerate(self._coded):
            own.rows[index] = source[start:stop]

    def bring_and_tag(self, bring: Callable[[], None], tags: Tensor, own: int) -> None:
        """Have `bring` put own rows into a message; then set the `own` one of its `tags` [N, or
        none in a world of one]. If the rows cannot be had it says so; where nobody looks at it,
        that is raised. The others say so until their ranks' have come.
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
            tags.fill_(FAILED_TAG)
            if unit.failure is None:
                tags[own : own + 1] = unit.tag

    def _plan(self, full: Buffer) -> None:
        """What is sent and copied, found once."""
        setting, rest = self.unit.setting, self.unit.rest
        if setting.rest_world > 1:
            sharded = [slot for slot in rest.slots if not slot.replicated]
            offsets = [slot.full_offset for slot in sharded]
            self._cut = MessageLayout(
                [*sharded, tags_of(setting.world_size)], [*offsets, rest.full_numel],
                setting.transport.group, full.tensor.itemsize, self.unit.name,
            )  # fmt: skip
        self._share(
            [
                (slot.full_offset + slot.pieces[setting.rest_rank][0], slot)
                for slot in rest.slots
            ]
        )  # fmt: skip

    def _share(self, starts: list[tuple[int, Slot]]) -> None:
        """Note where own rows of each slot begin in the message."""
        rank = self.unit.setting.rest_rank
        for start, slot in starts:
            first, numel = slot.shard_offsets[rank], slot.piece_numel(rank)
            copy = ((start, start + numel), (first, first + numel))
            self._copies.append(copy)
            if slot.replicated:
                self._always.append(copy)
            else:
                self._coded.append(copy[1])

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
                        f"another unit on {unit.setting.named(rank)}",
                        where=unit.setting.where,
                        hint="all ranks must use units in the same order; a branch that only some "
                        "ranks take has to be inside one unit (`units=`)",
                    )
                )

    def _failed_somewhere(self) -> TierError:
        """The error of this rank, or that of the first rank that has one.

        A collective of those who have seen each other's tags: not of nodes that are replicas.
        """
        unit = self.unit
        mine = None if unit.failure is None else str(unit.failure)
        texts = unit.setting.transport.group.all_gather_object(mine)
        if unit.failure is None:
            unit.failure = TierError(str(next(text for text in texts if text is not None)))
        return unit.failure
