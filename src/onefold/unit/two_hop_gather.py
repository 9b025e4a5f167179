"""The gather of a unit on a mesh of two axes: between nodes first, then inside each.

    keeps_weights   own rows -> between -> second shard, at rest for the node -> inside -> full
    otherwise       own rows -> between -> full -> inside -> full

The hop between nodes is made once a step: forward, backward and every micro-batch gather from the
second shard (hpZ: ZeRO++, arXiv 2306.10209, section 3.2). It begins with the forward, for all
units, into memory that is theirs anyway, so slow links have all of forward to hide behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onefold.layout.axes import NodeLayout
from onefold.layout.rows import Slot
from onefold.ledger import Kind
from onefold.ticket import DONE, Ticket
from onefold.unit.buffer import Buffer
from onefold.unit.context import Hops
from onefold.unit.gather import GatherMessage, Stretch, UnitGather, tags_of
from onefold.wire.cut import MessageLayout

if TYPE_CHECKING:
    from onefold.unit.unit import Unit


class TwoHopGather(UnitGather):
    """See the module. Tags travel with both hops, so that every rank sees those of all."""

    def __init__(self, unit: Unit, hops: Hops) -> None:
        super().__init__(unit, hops.gather_between)
        self._hops = hops
        self._second: Buffer | None = None  # the node's shard of weights, and a tag for each node
        self._filled = -1  # `edits` of the unit when it was filled
        self._between = DONE  # what fills it
        self._cut_between: MessageLayout
        self._cut_inside: MessageLayout
        self._from_second: list[
            tuple[Stretch, Stretch]
        ] = []  # in the full buffer, in the second shard
        self._layout = NodeLayout.build(unit.rest.slots, hops.axes)  # of the second shard
        if hops.keeps_weights:
            setting, numel = unit.setting, self._layout.numel + hops.axes.nodes
            self._second = Buffer(
                numel, unit.compute_dtype, Kind.SECONDARY, setting.store, setting.ledger
            )

    @property
    def is_exact(self) -> bool:
        """See `UnitGather.is_exact`: the second shard has the compute dtype."""
        return False

    def prefetch(self) -> None:
        """See `UnitGather.prefetch`."""
        if self._second is None or self._filled != self.unit.edits():
            super().prefetch()

    def begin_early(self, *, is_summoned: bool) -> None:
        """Begin the hop between nodes; not where that would wait for a step, or for a disk."""
        unit, is_late = self.unit, is_summoned or self._second is None
        if not is_late and not unit.steps_in_blocks and unit.weight.far is None:
            self._fill()

    def follow(self, full: Buffer, edits: int) -> None:
        """See `UnitGather.follow`: what the node keeps changes with them, and nothing travels."""
        if self._second is None or self._filled != edits:
            return
        kept, flat = self._second.tensor, full.tensor
        with torch.no_grad():
            pairs = [(kept[c:d], flat[a:b]) for (a, b), (c, d) in self._from_second]
            torch._foreach_copy_([into for into, _ in pairs], [near for _, near in pairs])
        self._filled = self.unit.edits()

    def start(self, full: Buffer) -> Ticket:
        """See `UnitGather.start`."""
        self._plan_once(full)
        flat = full.tensor
        where = f"gather of unit {self.unit.name!r} on {self.unit.setting.where}"
        inside = self._hops.gather_inside
        if self._second is None:
            between = self._cross(flat, self.unit.rest.full_numel, self._hops.axes.rank)
            return between.then(lambda: inside.gather(flat, self._cut_inside, where).wait())
        self._fill()
        self._await_second()
        second = self._second.tensor
        pairs = [(flat[a:b], second[c:d]) for (a, b), (c, d) in self._from_second]
        with torch.no_grad():
            torch._foreach_copy_([near for near, _ in pairs], [kept for _, kept in pairs])
            tags = flat[self.unit.rest.full_numel :]
            tags[self._hops.axes.place :: self._hops.axes.neighbours] = second[self._layout.numel :]
        return inside.gather(flat, self._cut_inside, where)

    def _fill(self) -> None:
        """Begin to fill the second shard, if weights have changed since it was."""
        unit, second = self.unit, self._second
        assert second is not None, "the second shard is filled where there is one"
        if self._filled == unit.edits():
            return
        self._plan_once(unit.full)
        self._await_second()  # of a forward that did not use the unit
        edits = unit.edits()
        self._filled = -1
        self._between = self._cross(second.tensor, self._layout.numel, self._hops.axes.node)
        self._filled = edits

    def _await_second(self) -> None:
        try:
            self._between.wait()
        except BaseException:
            self._filled = -1
            raise

    def _cross(self, flat: Tensor, tags_at: int, own_tag: int) -> Ticket:
        where = self._label("gather between nodes")
        message = GatherMessage(flat, self._cut_between, tags_at, own_tag, self._transport)
        return self._send(message, where)

    def _plan_once(self, full: Buffer) -> None:
        """What is sent and copied, found once."""
        if self._copies:
            return
        hops, axes, rest = self._hops, self._hops.axes, self.unit.rest
        itemsize, name = full.tensor.itemsize, self.unit.name
        sharded = [(i, slot) for i, slot in enumerate(rest.slots) if not slot.replicated]
        tags = tags_of(rest.world_size)
        regions = [(part, slot.full_offset) for _, slot in sharded for part in axes.inside(slot)]
        regions += [(part, rest.full_numel) for part in axes.inside(tags)]
        self._cut_inside = MessageLayout(
            *_unzipped(regions), hops.gather_inside.group, itemsize, name
        )
        if self._second is None:
            regions = [(axes.between(slot), slot.full_offset) for _, slot in sharded]
            regions.append((axes.between(tags), rest.full_numel))
            self._share(
                [(slot.full_offset + slot.pieces[axes.rank][0], slot) for slot in rest.slots]
            )
        else:
            layout = self._layout
            regions = [(layout.between(i), layout.region(i)[0]) for i, _ in sharded]
            regions.append((tags_of(axes.nodes), layout.numel))
            self._share([(layout.own(i)[0], slot) for i, slot in enumerate(rest.slots)])
            for slot, spans in zip(rest.slots, layout.spans, strict=True):
                pieces = slot.pieces[:1] if slot.replicated else axes.between(slot).pieces
                for (start, stop), span in zip(pieces, spans, strict=True):
                    target = (slot.full_offset + start, slot.full_offset + stop)
                    self._from_second.append((target, span))
        self._cut_between = MessageLayout(
            *_unzipped(regions), hops.gather_between.group, itemsize, name
        )


def _unzipped(regions: list[tuple[Slot, int]]) -> tuple[list[Slot], list[int]]:
    return [slot for slot, _ in regions], [offset for _, offset in regions]


def gather_of(unit: Unit) -> UnitGather:
    """The way in which a unit's weights are gathered to compute with."""
    routes = unit.setting.routes
    if unit.is_tiled or not unit.dtype.is_floating_point:  # neither is coded, nor kept twice
        return UnitGather(unit, routes.transport)
    if routes.hops is not None:
        return TwoHopGather(unit, routes.hops)
    return UnitGather(unit, routes.gather)
