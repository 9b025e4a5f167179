"""Gathers: from the own rows of all ranks to the unsharded weights of one unit.

Behind the weights every rank sends its tag: the number of the unit that it gathers, or FAILED_TAG
if it has no rows to send. So a mix of units and a disk that fails on one rank raise errors on every
rank, and no rank waits for another that has given up.

    UnitGather      own rows -> full
    TwoHopGather    own rows -> between nodes -> second shard (at rest) -> inside the node -> full
                    or, without a second shard, own rows -> between -> full -> inside -> full

The hop between nodes is made once a step. Forward, backward and every micro-batch gather from the
second shard (hpZ: ZeRO++, arXiv 2306.10209, section 3.2). It begins with the forward, for all
units, so slow links have all of forward to hide behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from onefold.errors import TierError
from onefold.layout.axes import NodeLayout
from onefold.layout.rows import Slot
from onefold.ledger import Kind
from onefold.ticket import DONE, Ticket
from onefold.unit.buffer import Buffer
from onefold.unit.context import Hops
from onefold.unit.weights import UnitWeights
from onefold.wire.collectives import Group
from onefold.wire.cut import MessageLayout
from onefold.wire.transport import SendRows, Transport

Stretch = tuple[int, int]
"""[start, stop) in elements."""

FAILED_TAG = 0
"""Replaces a unit's tag: the rank has no rows to send."""


def tags_of(world_size: int) -> Slot:
    """The region of a message in which each rank has one element; it carries no state."""
    return Slot("", (world_size,), 0, tuple((rank, rank + 1) for rank in range(world_size)), ())


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """One hop's message: how it is cut, and where own rows and the own tag lie in it."""

    cut: MessageLayout | None  # None: a world of one
    tags_at: int
    own_tag: int
    copies: list[tuple[Stretch, Stretch]]  # in the message, in the shard
    uncoded: list[tuple[Stretch, Stretch]]  # the copies of rows that no transport codes
    coded: list[Stretch]  # the other rows, in the shard

    @staticmethod
    def of(
        cut: MessageLayout | None, tags_at: int, own_tag: int, starts: Sequence[int],
        slots: Sequence[Slot], rank: int,
    ) -> GatherPlan:  # fmt: skip
        """The plan of a message in which own rows of `slots` begin at `starts`."""
        plan = GatherPlan(cut, tags_at, own_tag, [], [], [])
        for start, slot in zip(starts, slots, strict=True):
            first, numel = slot.shard_offsets[rank], slot.piece_numel(rank)
            copy = ((start, start + numel), (first, first + numel))
            plan.copies.append(copy)
            if slot.replicated:
                plan.uncoded.append(copy)
            else:
                plan.coded.append(copy[1])
        return plan


class UnitGather:
    """Fills full buffers of a unit, of any dtype, from the shards of all ranks."""

    def __init__(self, weights: UnitWeights, transport: Transport) -> None:
        self._weights = ref(weights)
        self._spec = weights.spec
        self._transport = transport
        self._plan: GatherPlan | None = None
        self._has_base = False  # the buffer holds the weights that every rank read last
        self._user_edits: list[int] = []  # of each parameter, at the last gather
        self._gathered = -1  # all edits then
        rest = weights.rest
        self.full_numel = rest.full_numel + (rest.world_size if rest.world_size > 1 else 0)
        """Elements of a full buffer: the regions, and a tag for each rank if it is gathered."""

    @property
    def weights(self) -> UnitWeights:
        weights = self._weights()
        assert weights is not None, "a gather outlived its unit"
        return weights

    @property
    def is_exact(self) -> bool:
        """True if every rank reads weights as they rest, in whatever dtype the buffer has."""
        return not self._transport.is_coded

    def prefetch(self) -> None:
        """Begin to fetch own rows, as `start` comes soon."""
        weights = self.weights
        if weights.weight.far is not None:
            weights.rows.start(weights.edits(), weights.pending)

    def begin_early(self, *, is_summoned: bool) -> None:
        """A forward begins that may use the unit: begin the hop that every rank will need.

        Nothing where modules show unsharded weights already: ranks may differ in their use.
        """

    def forget_base(self) -> None:
        """Weights were replaced on every rank: the next message is no difference."""
        self._has_base = False

    def follow(self, full: Buffer, edits: int) -> None:
        """A forward changed the unsharded weights in `full`, on every rank alike, since `edits`."""

    def start(self, full: Buffer) -> Ticket:
        """Begin to fill `full`. Call `check` once the ticket was waited for.

        Raises `TierError` if this rank has no rows to send and no other rank would learn of it.
        """
        plan = self._plan
        if plan is None:
            plan = self._plan = self._planned(full)
        return self._send(full.tensor, plan, self._label("gather"))

    def _label(self, verb: str) -> str:
        """The name of a collective, for errors: one rank may have edited a parameter alone."""
        weights, since = self.weights, ""
        edits = weights.edits()
        if edits != self._gathered:
            self._gathered = edits
            before, self._user_edits = self._user_edits, [p.user_edits for p in weights.parameters]
            pairs = zip(weights.parameters, before, self._user_edits, strict=False)
            edited = next((p.fqn for p, old, new in pairs if old != new), "")
            since = f", where {edited!r} was edited," if edited else ""
        return f"{self._spec.label(verb)}{since}"

    def _send(self, flat: Tensor, plan: GatherPlan, label: str) -> Ticket:
        """Put own rows and the tag into the message `flat`, and begin to exchange it."""
        weights, own = self.weights, self._coded_rows(plan)

        def bring() -> None:
            near = weights.own_rows()
            if own is not None:
                self._take_rows(near, own, plan)
            # a transport takes the rows that it codes itself; a base has other values there
            copies = plan.copies if own is None or own.starts_base else plan.uncoded
            if copies:
                torch._foreach_copy_(
                    [flat[a:b] for (a, b), _ in copies], [near[c:d] for _, (c, d) in copies]
                )

        try:
            self.bring_and_tag(bring, flat[plan.tags_at :], plan.own_tag)
            if plan.cut is None:
                return DONE
            self._has_base = False  # until this message has arrived
            ticket = self._transport.gather(flat, plan.cut, label, own)
        finally:
            weights.rows.give_back()
        return ticket if own is None or not own.is_base_kept else ticket.then(self._note_base)

    def _note_base(self) -> None:
        self._has_base = True

    def _coded_rows(self, plan: GatherPlan) -> SendRows | None:
        """For a coding transport: whether it sends differences. The same on every rank."""
        if plan.cut is None or not self._transport.is_coded:
            return None
        keeps = self._spec.context.routes.sends_differences
        rows: list[Tensor | None] = [None] * len(plan.cut.numels)
        return SendRows(rows, has_base=keeps and self._has_base, is_base_kept=keeps)

    def _take_rows(self, near: Tensor, own: SendRows, plan: GatherPlan) -> None:
        """Let a coding transport send rows of the master, so that they are rounded once."""
        weights = self.weights
        is_near = not weights.steps_in_blocks and weights.stepped.device == near.device
        if is_near:
            weights.refresh_master()
        source = weights.stepped if is_near else near
        for index, (start, stop) in enumerate(plan.coded):
            own.rows[index] = source[start:stop]

    def bring_and_tag(self, bring: Callable[[], None], tags: Tensor, own: int) -> None:
        """Have `bring` put own rows into a message; then set the `own` one of its `tags`.

        `tags` [N], or none in a world of one. On a failure, send FAILED_TAG. Raise it where ranks
        do not read each other's tags at once. The tags of other ranks are FAILED_TAG until they
        arrive.
        """
        weights = self.weights
        with torch.no_grad():
            try:
                weights.wait_step()
                bring()
            except TierError as error:
                weights.failure = error
                if not self._reads(tags):
                    raise
            if len(tags):
                tags.fill_(FAILED_TAG)
                if weights.failure is None:
                    tags[own : own + 1] = self._spec.tag

    def _planned(self, full: Buffer) -> GatherPlan:
        """The message of all regions, made with the first gather."""
        context, rest = self._spec.context, self._spec.rest
        group, itemsize, rank = context.transport.group, full.tensor.itemsize, context.rest_rank
        cut, slabs = None, [slab for slot in rest.slots for slab in slot.slabs()]
        if context.rest_world > 1:
            regions = [(slab, slab.full_offset) for slab in slabs if not slab.replicated]
            tags = (tags_of(context.world_size), rest.full_numel)
            cut = _cut([*regions, tags], group, itemsize, self._spec.name)
        starts = [slab.full_offset + slab.pieces[rank][0] for slab in slabs]
        return GatherPlan.of(cut, rest.full_numel, rank, starts, slabs, rank)

    def _reads(self, tags: Tensor) -> bool:
        """True if ranks read each other's tags at once: where the host need not wait for it."""
        return len(tags) > 1 and not self._spec.context.tags.defers(tags)

    def check(self, full: Buffer) -> None:
        """Raise if some rank gathered another unit at the same time, or had no rows to send.

        Pieces of equal length would otherwise mix two units without anyone noticing.
        """
        if self._spec.rest.world_size > 1:
            self.check_tags(full.tensor[self._spec.rest.full_numel :])

    def check_tags(self, tags: Tensor) -> None:
        """Raise as `check` does, from the tags [N] that came with a message of this unit."""
        spec, context = self._spec, self._spec.context
        if not self._reads(tags):
            if len(tags) > 1:
                context.tags.note("gather", spec.name, tags, spec.tag)
            return
        found = tags.tolist()
        if found.count(spec.tag) == len(found):
            return
        if any(context.is_tag(tag, FAILED_TAG) for tag in found):
            raise self._failed_somewhere()
        for rank, tag in enumerate(found):
            if not context.is_tag(tag, spec.tag):
                raise context.mixed("gather", spec.name, context.named(rank))

    def _failed_somewhere(self) -> TierError:
        """The error of this rank, or of the first rank that has one.

        A collective of the ranks that have seen each other's tags: not of nodes that are replicas.
        """
        weights = self.weights
        mine = None if weights.failure is None else str(weights.failure)
        texts = self._spec.context.transport.group.all_gather_object(mine)
        if weights.failure is None:
            weights.failure = TierError(str(next(text for text in texts if text is not None)))
        return weights.failure


class TwoHopGather(UnitGather):
    """Gathers between nodes, then inside. Tags travel with both hops: every rank sees all."""

    def __init__(self, weights: UnitWeights, hops: Hops) -> None:
        super().__init__(weights, hops.gather_between)
        self._hops = hops
        self._second: Buffer | None = None  # the node's shard of weights, and a tag for each node
        self._filled = -1  # `edits` of the unit when it was filled
        self._between = DONE  # fills it
        self._cut_inside: MessageLayout
        self._from_second: list[tuple[Stretch, Stretch]] = []  # in full, in the second shard
        self._layout = NodeLayout.build(weights.rest.slots, hops.axes)  # of the second shard
        if hops.keeps_weights:
            context, numel = weights.context, self._layout.numel + hops.axes.nodes
            self._second = Buffer(
                numel, weights.compute_dtype, Kind.SECONDARY, context.store, context.ledger
            )

    @property
    def is_exact(self) -> bool:
        """See `UnitGather.is_exact`: the second shard has the compute dtype."""
        return False

    def prefetch(self) -> None:
        """See `UnitGather.prefetch`."""
        if self._second is None or self._filled != self.weights.edits():
            super().prefetch()

    def begin_early(self, *, is_summoned: bool) -> None:
        """Begin the hop between nodes; not where that would wait for a step, or for a disk."""
        weights, is_late = self.weights, is_summoned or self._second is None
        if not is_late and not weights.steps_in_blocks and weights.weight.far is None:
            self._fill()

    def follow(self, full: Buffer, edits: int) -> None:
        """See `UnitGather.follow`: the second shard takes the changes; nothing travels."""
        if self._second is not None and self._filled == edits:
            self._copy_second(full.tensor, into_second=True)
            self._filled = self.weights.edits()

    def start(self, full: Buffer) -> Ticket:
        """See `UnitGather.start`."""
        flat, axes, numel = full.tensor, self._hops.axes, self._spec.rest.full_numel
        inside, label = self._hops.gather_inside, self._spec.label("gather")
        if self._second is None:
            between = self._cross(full)
            return between.then(lambda: inside.gather(flat, self._cut_inside, label).wait())
        self._fill(full)
        self._await_second()
        self._copy_second(flat, into_second=False)
        tags = self._second.tensor[self._layout.numel :]
        with torch.no_grad():
            flat[numel:][axes.local_rank :: axes.local_world_size] = tags
        return inside.gather(flat, self._cut_inside, label)

    def _copy_second(self, flat: Tensor, *, into_second: bool) -> None:
        """Copy the node's shard from the second shard into the message, or back."""
        assert self._second is not None, "the second shard is copied where there is one"
        second = self._second.tensor
        near = [flat[a:b] for (a, b), _ in self._from_second]
        kept = [second[c:d] for _, (c, d) in self._from_second]
        with torch.no_grad():
            torch._foreach_copy_(*((kept, near) if into_second else (near, kept)))

    def _fill(self, full: Buffer | None = None) -> None:
        """Begin to fill the second shard, if weights have changed since it was filled."""
        edits = self.weights.edits()
        if self._filled == edits:
            return
        assert self._second is not None, "the second shard is filled where there is one"
        self._await_second()  # of a forward that did not use the unit
        self._filled = -1
        self._between = self._cross(self._second)
        self._filled = edits

    def _await_second(self) -> None:
        try:
            self._between.wait()
        except BaseException:
            self._filled = -1
            raise

    def _cross(self, message: Buffer) -> Ticket:
        plan = self._plan
        if plan is None:
            plan = self._plan = self._planned(message)
        return self._send(message.tensor, plan, self._label("gather between nodes"))

    def _planned(self, full: Buffer) -> GatherPlan:
        """The messages of both hops. Both have the compute dtype, as has the second shard."""
        hops, axes, rest = self._hops, self._hops.axes, self._spec.rest
        itemsize, name, layout = full.tensor.itemsize, self._spec.name, self._layout
        sharded = [(i, slot) for i, slot in enumerate(rest.slots) if not slot.replicated]
        tags = tags_of(rest.world_size)
        inside = [(part, slot.full_offset) for _, slot in sharded for part in axes.inside(slot)]
        inside += [(part, rest.full_numel) for part in axes.inside(tags)]
        self._cut_inside = _cut(inside, hops.gather_inside.group, itemsize, name)
        if self._second is None:
            regions = [(axes.between(slot), slot.full_offset) for _, slot in sharded]
            regions.append((axes.between(tags), rest.full_numel))
            starts = [slot.full_offset + slot.pieces[axes.rank][0] for slot in rest.slots]
            tags_at, own_tag = rest.full_numel, axes.rank
        else:
            regions = [(layout.between(i), layout.region(i)[0]) for i, _ in sharded]
            regions.append((tags_of(axes.nodes), layout.numel))
            starts = [layout.own(i)[0] for i in range(len(rest.slots))]
            tags_at, own_tag = layout.numel, axes.node
            for slot, spans in zip(rest.slots, layout.spans, strict=True):
                pieces = slot.pieces[:1] if slot.replicated else axes.between(slot).pieces
                for (start, stop), span in zip(pieces, spans, strict=True):
                    target = (slot.full_offset + start, slot.full_offset + stop)
                    self._from_second.append((target, span))
        cut = _cut(regions, hops.gather_between.group, itemsize, name)
        rank = self._spec.context.rest_rank
        return GatherPlan.of(cut, tags_at, own_tag, starts, rest.slots, rank)


def _cut(
    regions: Sequence[tuple[Slot, int]], group: Group, itemsize: int, name: str
) -> MessageLayout:
    """The cut of a message of regions, each with its offset."""
    slots, offsets = [slot for slot, _ in regions], [offset for _, offset in regions]
    return MessageLayout(slots, offsets, group, itemsize, name)


def gather_of(weights: UnitWeights, *, is_tiled: bool) -> UnitGather:
    """The gather of a unit's weights in the compute dtype, on its routes."""
    routes = weights.context.routes
    if is_tiled or not weights.dtype.is_floating_point:  # neither coded nor kept twice
        return UnitGather(weights, routes.transport)
    if routes.hops is not None:
        return TwoHopGather(weights, routes.hops)
    return UnitGather(weights, routes.gather)
