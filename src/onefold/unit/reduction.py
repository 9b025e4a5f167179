"""From partial gradients on every rank to where their mean rests, over one axis.

    OneHop       sharded over one axis    partial -> own rows
    Spread       stage 0                  partial -> a rank's rows -> all rows everywhere
    Replicated   nodes are replicas       partial -> own rows, of the node's mean -> of all nodes'
    TwoHop       sharded over two axes    partial -> a piece of every node's rows -> own rows

The last two are in node_reduction.py. The first hop begins when backward is through with a unit;
what follows begins when that has landed, at the same place in the order on every rank. Beside
gradients travels one number for each parameter and one for the unit (flags, `counts`): the share of
ranks that used it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from onefold.errors import WireError, expected
from onefold.layout.rows import Slot
from onefold.ticket import Ticket
from onefold.unit.feedback import Feedback, Region
from onefold.unit.parameter import UnitParameter
from onefold.wire.cut import MessageLayout
from onefold.wire.transport import Transport

if TYPE_CHECKING:
    from onefold.unit.gradient import UnitGradient
    from onefold.unit.unit import Unit

Key = tuple[int, ...]


def flags_of(numel: int, world_size: int) -> Slot:
    """The region of a message that goes whole to every rank; it carries no state."""
    return Slot("", (), 0, ((0, numel),) * world_size, (0,) * world_size)


class OneHop:
    """Own rows of the mean, or at stage 0 this rank's part of them; also the base of the others."""

    rests_between = False  # can stop after the first hop, until nodes talk
    rests_in_place = False  # and then has sums where the mean will be
    finishes_alone = True  # what follows the first hop is no collective

    def __init__(self, gradient: UnitGradient) -> None:
        self._gradient = ref(gradient)
        self._cuts: dict[Key, MessageLayout] = {}
        self.feedback = Feedback(gradient.unit.setting)
        self._told: tuple[list[bool], Tensor] = [], torch.empty(0)  # the last flags
        self.counts: Tensor  # of the hop that has landed last: [parameters + 1]

    @property
    def gradient(self) -> UnitGradient:
        gradient = self._gradient()
        assert gradient is not None, "a reduction outlived its gradient"
        return gradient

    @property
    def unit(self) -> Unit:
        return self.gradient.unit

    def start(
        self, parameters: list[UnitParameter], partials: list[Tensor], used: list[bool]
    ) -> Ticket:
        """Begin the first hop with flat `partials` [all rows]; this rank has `used` some."""
        gradient, transport = self.gradient, self._first
        fresh = gradient.prepare_reduced(parameters)
        flags = self._flags(used)
        owed = self.feedback.of("", regions_of(parameters, used))
        out = [*(gradient.own_piece(p) for p in parameters), self.counts]
        cut = self._cut(parameters, transport)
        where = self._where("reduce_scatter")
        return transport.reduce_scatter([*partials, flags], cut, out, [*fresh, True], where, owed)

    def _flags(self, used: list[bool]) -> Tensor:
        """What rides with gradients: whether this rank used each, and the unit's tag."""
        unit = self.unit
        device = unit.setting.store.device
        told, flags = self._told
        if told != used:  # seldom: a GPU's host waits for what it copies there
            flags = torch.tensor([*used, unit.tag], dtype=unit.compute_dtype, device=device)
            self._told = used, flags
        self.counts = torch.empty(len(flags), dtype=unit.dtype, device=device)
        return flags

    def go_on(self, parameters: list[UnitParameter], users: list[UnitParameter]) -> Ticket | None:
        """Begin what follows the first hop, which summed gradients of `users` and zeros; None where
        the mean is in its place already.
        """
        return None

    @property
    def waits(self) -> bool:
        """True if it has stopped after the first hop, and nodes have yet to talk."""
        return False

    def rest(self, used: list[UnitParameter]) -> list[UnitParameter]:
        """Stop after the first hop; what rests: `used`, and what earlier micro-batches used."""
        raise NotImplementedError("only reductions with `rests_between` are asked to rest")

    def drop(self, parameters: Sequence[UnitParameter]) -> None:
        """Their gradients were cleared: forget what rests of them."""
        self.feedback.forget(parameters)

    def check_tag(self, mean: float | complex) -> None:
        """Raise `WireError` if the ranks did not all reduce this unit."""
        if abs(mean - self.unit.tag) > 0.25:
            raise WireError(
                expected(
                    f"reduce_scatter of unit {self.unit.name!r} on every rank",
                    "another unit on at least one",
                    where=self.unit.setting.where,
                    hint="all ranks must run backward through units in the same order; a branch "
                    "that only some ranks take has to be inside one unit (`units=`)",
                )
            )

    @property
    def _first(self) -> Transport:
        return self.unit.setting.routes.reduce

    def _where(self, collective: str) -> str:
        return f"{collective} of unit {self.unit.name!r} on {self.unit.setting.where}"

    def _slots(self, parameters: Sequence[UnitParameter]) -> list[Slot]:
        unit = self.unit
        return [unit.wire.slots[unit.parameters.index(p)] for p in parameters]

    def _cut(self, parameters: list[UnitParameter], transport: Transport) -> MessageLayout:
        """How these parameters' gradients, and one flag for each, are cut over the ranks."""
        key = tuple(map(id, parameters))
        if key not in self._cuts:
            flags = flags_of(len(parameters) + 1, transport.group.world_size)
            self._cuts[key] = self._made([*self._slots(parameters), flags], None, transport)
        return self._cuts[key]

    def _made(
        self, slots: list[Slot], offsets: list[int] | None, transport: Transport
    ) -> MessageLayout:
        return MessageLayout(
            slots, offsets, transport.group, self.unit.compute_dtype.itemsize, self.unit.name
        )


class Spread(OneHop):
    """Stage 0: every rank reduces its rows, then all gather them."""

    finishes_alone = False

    def __init__(self, gradient: UnitGradient) -> None:
        super().__init__(gradient)
        self._spread_cuts: dict[Key, MessageLayout] = {}

    def go_on(self, parameters: list[UnitParameter], users: list[UnitParameter]) -> Ticket:
        """See `OneHop.go_on`."""
        setting, reduced = self.unit.setting, self.gradient.reduced
        assert reduced is not None, "reduced rows are gathered before there are any"
        key = tuple(map(id, parameters))
        if key not in self._spread_cuts:
            slots = [slot for slot in self._slots(parameters) if not slot.replicated]
            offsets = [slot.full_offset for slot in slots]
            group, itemsize = setting.transport.group, reduced.tensor.itemsize
            self._spread_cuts[key] = MessageLayout(slots, offsets, group, itemsize, self.unit.name)
        with torch.no_grad():
            return setting.transport.gather(
                reduced.tensor, self._spread_cuts[key], self._where("gather of gradients")
            )


def regions_of(parameters: list[UnitParameter], used: list[bool]) -> list[Region]:
    """For the feedback of messages with one region a parameter."""
    return [(p, 0) if is_used else None for p, is_used in zip(parameters, used, strict=True)]
