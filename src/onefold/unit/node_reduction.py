"""From partial gradients on every rank to where their mean rests, where nodes talk in between.

Between micro-batches `Replicated` and `TwoHop` can stop after the first hop, inside the node: nodes
then talk once a step.

Sources: ZeRO++, arXiv 2306.10209, section 3.3 (two hops); MiCS, arXiv 2205.00119, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onefold.layout.axes import NodeLayout
from onefold.layout.rows import Slot
from onefold.ledger import Kind
from onefold.ticket import Ticket
from onefold.unit.buffer import Buffer
from onefold.unit.context import Hops
from onefold.unit.feedback import Region
from onefold.unit.parameter import UnitParameter
from onefold.unit.reduction import Key, OneHop, Spread, flags_of, regions_of
from onefold.wire.cut import MessageLayout
from onefold.wire.transport import Transport

if TYPE_CHECKING:
    from onefold.unit.gradient import UnitGradient


class Replicated(OneHop):
    """Nodes that are replicas average own rows once a step: each its part, then all gather them."""

    rests_between = True
    rests_in_place = True
    finishes_alone = False

    def __init__(self, gradient: UnitGradient, replicas: Transport) -> None:
        super().__init__(gradient)
        self._replicas = replicas
        self._waits = False
        self._between: dict[Key, tuple[MessageLayout, MessageLayout, list[tuple[int, int]]]] = {}

    def start(
        self, parameters: list[UnitParameter], partials: list[Tensor], used: list[bool]
    ) -> Ticket:
        """See `OneHop.start`: rows hold the node's mean until nodes have talked."""
        self._waits = True
        return super().start(parameters, partials, used)

    def go_on(self, parameters: list[UnitParameter], users: list[UnitParameter]) -> Ticket:
        """See `OneHop.go_on`. Exact means travel in the compute dtype, as partials do."""
        gradient, replicas = self.gradient, self._replicas
        self._waits = False
        reduce, gather, spans = self._cuts_between(parameters)
        dtype = self.unit.compute_dtype
        wide = self.unit.dtype if replicas.is_coded else dtype  # rounded once
        rows = [gradient.rest_rows(p).to(wide) for p in parameters]
        is_used = [p in users or p in gradient.shown for p in parameters]
        for index, parameter in enumerate(parameters):
            if parameter in gradient.shown:  # by an earlier micro-batch
                self.counts[index] += 1
        flags = self.counts.to(dtype)
        means = [
            row.new_empty(stop - start) for row, (start, stop) in zip(rows, spans, strict=True)
        ]
        self.counts = torch.empty_like(self.counts)
        first = replicas.reduce_scatter(
            [*rows, flags], reduce, [*means, self.counts], [True] * (len(rows) + 1),
            self._where("reduce_scatter between nodes"),
            self.feedback.of("between", regions_of(parameters, is_used)),
        )  # fmt: skip

        def go_on() -> None:
            first.wait()
            flat = torch.cat(rows)
            starts = accumulate(map(len, rows), initial=0)
            own: list[Tensor] = []
            for mean, begin, (start, stop) in zip(means, starts, spans, strict=False):
                own.append(flat[begin + start : begin + stop])
                own[-1].copy_(mean)
            owed = self._add_owed(parameters, own)
            replicas.gather(flat, gather, self._where("gather between nodes")).wait()
            for rest, read in owed:
                rest.sub_(read).nan_to_num_(0.0, 0.0, 0.0)
            for p, row in zip(parameters, flat.split([len(row) for row in rows]), strict=True):
                gradient.rest_rows(p).copy_(row)

        return Ticket(first.works, go_on, self._where("reduction between nodes"))

    def _add_owed(
        self, parameters: list[UnitParameter], own: list[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Means are coded again, to be gathered: add what that owes; later, less what was read."""
        if not (self._replicas.is_coded and self.unit.setting.routes.feeds_back):
            return []
        is_used = [count != 0 for count in self.counts[:-1].tolist()]
        ask = self.feedback.of("means", regions_of(parameters, is_used))
        found: list[tuple[Tensor, Tensor]] = []
        for index, (p, mean) in enumerate(zip(parameters, own, strict=True)):
            rest = ask(index, len(mean)) if ask and len(p.slot.shape) > 1 and len(mean) else None
            if rest is not None:
                found.append((rest.copy_(mean.add_(rest)), mean))
        return found

    @property
    def waits(self) -> bool:
        """See `OneHop.waits`."""
        return self._waits

    def rest(self, used: list[UnitParameter]) -> list[UnitParameter]:
        """See `OneHop.rest`: the node's mean rests where that of all will be."""
        return used

    def _cuts_between(
        self, parameters: list[UnitParameter]
    ) -> tuple[MessageLayout, MessageLayout, list[tuple[int, int]]]:
        """Own rows of each parameter, cut by elements over the nodes; and this node's span."""
        key = tuple(map(id, parameters))
        if key not in self._between:
            group = self._replicas.group
            slots = [_in_parts(p, group.world_size) for p in parameters]
            flags = flags_of(len(parameters) + 1, group.world_size)
            reduce = self._made([*slots, flags], None, self._replicas)
            starts = accumulate((p.local.numel() for p in parameters), initial=0)
            sharded = [(s, at) for s, at in zip(slots, starts, strict=False) if not s.replicated]
            gather = self._made(
                [s for s, _ in sharded], [at for _, at in sharded], self._replicas
            )  # fmt: skip
            self._between[key] = (reduce, gather, [slot.pieces[group.rank] for slot in slots])
        return self._between[key]


def _in_parts(parameter: UnitParameter, parts: int) -> Slot:
    numel = parameter.local.numel()
    if parameter.slot.replicated:
        return Slot(parameter.fqn, (), 0, ((0, 1),) * parts, ())
    bounds = [numel * part // parts for part in range(parts + 1)]
    pieces = tuple(pairwise(bounds))
    return Slot(parameter.fqn, parameter.slot.shape, 0, pieces, ())


class TwoHop(OneHop):
    """Inside the node first, into sums that may rest there; then between nodes."""

    finishes_alone = False

    def __init__(self, gradient: UnitGradient, hops: Hops) -> None:
        super().__init__(gradient)
        self._hops = hops
        self.rests_between = hops.keeps_gradients
        self._layout = NodeLayout.build(self.unit.wire.slots, hops.axes)
        self._sums: Buffer | None = None
        self._entered: list[UnitParameter] = []  # of the first hop that is under way
        self._used: dict[UnitParameter, Tensor] = {}  # counts of those that the sums hold
        self._users: dict[UnitParameter, None] = {}  # those of them that a rank of the node used
        self._cuts_between: dict[Key, MessageLayout] = {}

    def start(
        self, parameters: list[UnitParameter], partials: list[Tensor], used: list[bool]
    ) -> Ticket:
        """See `OneHop.start`: a piece of every node's rows is added to the node's sums."""
        setting, inside = self.unit.setting, self._hops.reduce_inside
        self._entered = parameters
        if self._sums is None:
            self._sums = Buffer(
                self._layout.numel, self.unit.dtype, Kind.PARTIAL_GRAD, setting.store,
                setting.ledger, is_brief=True,
            )  # fmt: skip
        sent: list[Tensor] = []
        out: list[Tensor] = []
        fresh: list[bool] = []
        regions: list[Region] = []
        for parameter, partial, is_used in zip(parameters, partials, used, strict=True):
            index = self.unit.parameters.index(parameter)
            slot = self._layout.slots[index]
            stretches = [(0, 1)] if slot.replicated else self._hops.axes.stretches(slot)
            sent += [partial[start:stop] for start, stop in stretches]
            out += [self._sums.tensor[a:b] for a, b in self._layout.spans[index]]
            fresh += [parameter not in self._used] * len(stretches)
            regions += [(parameter, n) if is_used else None for n in range(len(stretches))]
        flags = self._flags(used)
        return inside.reduce_scatter(
            [*sent, flags], self._cut(parameters, inside), [*out, self.counts], [*fresh, True],
            self._where("reduce_scatter inside the node"), self.feedback.of("inside", regions),
        )  # fmt: skip

    @property
    def waits(self) -> bool:
        """See `OneHop.waits`."""
        return bool(self._used)

    def rest(self, used: list[UnitParameter]) -> list[UnitParameter]:
        """See `OneHop.rest`."""
        self._note_counts()
        self._users |= dict.fromkeys(used)
        return list(self._users)

    def _note_counts(self) -> None:
        """The first hop is over: count who used what, over micro-batches."""
        for parameter, count in zip(self._entered, self.counts[:-1], strict=True):
            known = self._used.get(parameter)
            self._used[parameter] = count if known is None else known + count

    def go_on(self, parameters: list[UnitParameter], users: list[UnitParameter]) -> Ticket:
        """See `OneHop.go_on`. Exact messages travel in the compute dtype, as partials do;
        coded ones are made of the sums as they are.
        """
        gradient, between = self.gradient, self._hops.reduce_between
        assert self._sums is not None, "sums are reduced before there are any"
        self._note_counts()
        sums, self._sums = self._sums, None
        dtype = self.unit.compute_dtype
        wide = sums.tensor.dtype if between.is_coded else dtype  # rounded once
        indices = [self.unit.parameters.index(p) for p in parameters]
        partials = [sums.tensor[slice(*self._layout.region(i))].to(wide) for i in indices]
        flags = torch.stack([*(self._used[p] for p in parameters), self.counts[-1]]).to(dtype)
        is_used = [p in self._users or p in users for p in parameters]
        self._used.clear()
        self._users.clear()
        fresh = gradient.prepare_reduced(parameters)
        self.counts = torch.empty_like(self.counts)
        ticket = between.reduce_scatter(
            [*partials, flags], self._cut_between(parameters),
            [*(gradient.own_piece(p) for p in parameters), self.counts], [*fresh, True],
            self._where("reduce_scatter between nodes"),
            self.feedback.of("between", regions_of(parameters, is_used)),
        )  # fmt: skip

        def finish() -> None:
            partials.clear()
            sums.release()

        return ticket.then(finish)

    def drop(self, parameters: Sequence[UnitParameter]) -> None:
        """See `OneHop.drop`: sums begin anew."""
        super().drop(parameters)
        for parameter in parameters:
            self._used.pop(parameter, None)
            self._users.pop(parameter, None)
        if not self._used:
            self._sums = None

    def _cut(self, parameters: list[UnitParameter], transport: Transport) -> MessageLayout:
        key = tuple(map(id, parameters))
        if key not in self._cuts:
            indices = [self.unit.parameters.index(p) for p in parameters]
            slots = [part for index in indices for part in self._layout.inside(index)]
            flags = flags_of(len(parameters) + 1, transport.group.world_size)
            self._cuts[key] = self._made([*slots, flags], None, transport)
        return self._cuts[key]

    def _cut_between(self, parameters: list[UnitParameter]) -> MessageLayout:
        key = tuple(map(id, parameters))
        if key not in self._cuts_between:
            between = self._hops.reduce_between
            indices = [self.unit.parameters.index(p) for p in parameters]
            slots = [self._layout.between(index) for index in indices]
            flags = flags_of(len(parameters) + 1, between.group.world_size)
            self._cuts_between[key] = self._made([*slots, flags], None, between)
        return self._cuts_between[key]


def reduction_of(gradient: UnitGradient) -> OneHop:
    """The way in which a unit's gradients are reduced."""
    setting = gradient.unit.setting
    routes = setting.routes
    if not setting.is_sharded:
        return Spread(gradient)
    if routes.hops is not None:
        return TwoHop(gradient, routes.hops)
    if routes.replicas is not None:
        return Replicated(gradient, routes.replicas)
    return OneHop(gradient)
