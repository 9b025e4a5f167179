"""Gather the own rows of all ranks into the unsharded weights of one unit.

Behind the weights every rank sends its tag: the number of the unit that it gathers, or FAILED_TAG
if it could not read its rows. So ranks that gather different units, and a disk that fails on one
rank, raise errors on every rank, and no rank waits for another that has given up.

    UnitGather      own rows -> full buffer
    TwoHopGather    own rows -> between nodes -> secondary shard (rests) -> inside the node -> full
                    or, without a secondary shard, own rows -> between -> full -> inside -> full

Ranks run the hop between nodes once a step. Forward, backward and every micro-batch gather from the
secondary shard (hpZ: ZeRO++, arXiv 2306.10209, section 3.2). The hop begins for all units when a
forward begins, so that the whole forward hides slow links.
"""

from collections.abc import Callable, Sequence
from weakref import ref

import torch
from torch import Tensor

from onefold.errors import TierError
from onefold.layout.ledger import Kind
from onefold.layout.messages import GatherPlan, Regions, gather_inside, node_rows
from onefold.layout.rows import split_at
from onefold.layout.two_axes import NodeLayout
from onefold.unit.buffer import Buffer
from onefold.unit.context import Hops
from onefold.unit.weights import UnitWeights
from onefold.wire.message_cut import MessageLayout
from onefold.wire.ticket import DONE, Ticket
from onefold.wire.transport import SendRows, Transport

FAILED_TAG = 0
"""Replaces a unit's tag: the rank could not read its rows."""


class UnitGather:
    """Fills full buffers of a unit, of any dtype, from the shards of all ranks."""

    def __init__(self, weights: UnitWeights, transport: Transport) -> None:
        self._weights = ref(weights)
        self._spec = weights.spec
        self._transport = transport
        self._plan: GatherPlan | None = None
        self._layout: MessageLayout | None = None  # of its message; None: a world of one
        self._tag: Tensor | None = None  # this rank's, for messages that go straight
        self._own_tags: Tensor | None = None  # this rank's tag, and FAILED_TAG for the other ranks
        self._name = weights.spec.label("gather")  # for errors
        self._has_base = False  # the buffer holds the weights that every rank read last
        self._user_edits: list[int] = []  # of each parameter, at the last gather
        self._gathered = -1  # all edits then
        rest, self._copies = weights.rest, weights.context.tiers.copies
        self._copy = torch._foreach_copy_ if self._copies is None else self._copies.copy
        self._num_tags = rest.world_size if weights.context.gathers else 0
        is_cast = weights.dtype != weights.compute_dtype
        self._reads_directly = weights.context.reads_directly and not is_cast
        self.full_numel = rest.full_numel + self._num_tags
        """Elements of a full buffer: the regions, and a tag for each rank if it is gathered."""

    @property
    def weights(self) -> UnitWeights:
        weights = self._weights()
        assert weights is not None, "a gather outlived its unit"
        return weights

    @property
    def is_exact(self) -> bool:
        """True if every rank reads weights as they rest, in whatever dtype the buffer has."""
        return not self._transport.is_quantized

    def prefetch(self) -> None:
        """Begin to fetch own rows, as `start` comes soon."""
        weights = self.weights
        if weights.weight.far is not None and not self._reads_directly:
            weights.rows.start(weights.edits.all(), weights.pending)

    def begin_early(self, *, is_unsharded: bool) -> None:
        """A forward begins that may use the unit: begin the hop that every rank will need.

        Do nothing where modules show unsharded weights already: ranks may differ in their use.
        """

    def forget_base(self) -> None:
        """Weights were replaced on every rank: the next message holds no differences."""
        self._has_base = False

    def follow(self, full: Buffer, edits: int) -> None:
        """A forward changed the unsharded weights in `full`, on every rank alike, since `edits`."""

    def start(self, full: Buffer) -> Ticket:
        """Begin to fill `full`. Call `check` once the ticket was waited for.

        Raises `TierError` if this rank could not read its rows and ranks do not read tags at once.
        """
        if self._reads_directly:
            return self.weights.rows.read_into(full.tensor)
        if self._plan is None:
            context, rest = self._spec.context, self._spec.rest
            self._plan = GatherPlan.on_one_axis(rest, context.rest_rank, self._num_tags)
            if self._num_tags:
                self._layout = self._laid_out(self._plan.regions, self._transport, full)
        if (layout := self._layout) is not None and self._goes_straight(full, self._plan, layout):
            own = SendRows([*self.weights.own_rows(self._plan.shard), self._tag])
            return self._transport.gather(full.tensor, layout, self._label(), own)
        return self._send(full, self._plan, self._label())

    def _label(self) -> str:
        """Name a collective for errors; include a parameter that was edited since the last one."""
        weights = self.weights
        edits = weights.edits.all()
        if edits == self._gathered:
            return self._name
        self._gathered = edits
        before, self._user_edits = self._user_edits, [p.user_edits for p in weights.parameters]
        pairs = zip(weights.parameters, before, self._user_edits, strict=False)
        edited = next((p.fqn for p, old, new in pairs if old != new), "")
        return f"{self._name}, where {edited!r} was edited," if edited else self._name

    def _send(self, message: Buffer, plan: GatherPlan, label: str) -> Ticket:
        """Put own rows and the tag into the message, and begin to exchange it."""
        rows, copies = self.weights.rows, self._copies
        if copies is None:
            try:
                return self._begin(message, plan, label)
            finally:
                rows.give_back()
        try:
            with copies:
                ticket = self._begin(message, plan, label)
        except BaseException:
            rows.leave_by(copies.mark())
            rows.give_back()
            raise
        copied = copies.mark()
        rows.leave_by(copied)

        def arrived() -> None:
            copies.follow(copied)
            rows.give_back()

        return ticket.then(arrived)

    def _begin(self, message: Buffer, plan: GatherPlan, label: str) -> Ticket:
        weights, own = self.weights, self._rows_to_send()
        *places, tags = message.parts(plan.message)[1::2]

        def bring() -> None:
            rows = weights.own_rows(plan.shard)
            copied: Sequence[int] = range(len(rows))
            if own is not None:
                self._take_rows(rows, own, plan)
                if not own.starts_base:  # in place of quantized rows, the message holds the base
                    copied = plan.exact
            if copied:
                self._copy([places[i] for i in copied], [rows[i] for i in copied])

        self.bring_and_tag(bring, tags, plan.own_tag)
        if self._layout is None:
            return DONE
        self._has_base = False  # until this message has arrived
        ticket = self._transport.gather(message.tensor, self._layout, label, own)
        return ticket if own is None or not own.is_base_kept else ticket.then(self._note_base)

    def _goes_straight(self, full: Buffer, plan: GatherPlan, layout: MessageLayout) -> bool:
        """True if one copy takes own rows and `_tag` to the wire's buffer, not by way of `full`.

        All of them are small, and nothing that may fail has to come before.
        """
        weights = self.weights
        if layout.medium or layout.large or plan.exact or self._transport.is_quantized:
            return False
        is_near = self._copies is None and weights.weight.far is None
        is_ready = weights.pending is None and weights.failure is None
        if is_near and is_ready:
            if self._tag is None:
                with torch.inference_mode(False):
                    tag, device = self._spec.tag, full.tensor.device
                    self._tag = torch.full((1,), tag, dtype=weights.dtype, device=device)
            return True
        return False

    def _note_base(self) -> None:
        self._has_base = True

    def _rows_to_send(self) -> SendRows | None:
        """Say, for a quantizing transport, whether it sends differences: the same on every rank."""
        if self._layout is None or not self._transport.is_quantized:
            return None
        keeps = self._spec.context.routes.sends_differences
        rows: list[Tensor | None] = [None] * len(self._layout.numels)
        return SendRows(rows, has_base=keeps and self._has_base, is_base_kept=keeps)

    def _take_rows(self, rows: Sequence[Tensor], own: SendRows, plan: GatherPlan) -> None:
        """Have a quantizing transport read rows of the master, so that they are rounded once."""
        weights = self.weights
        if not weights.steps_in_blocks and weights.stepped.device == rows[0].device:
            weights.refresh_master()
            rows = weights.stepped.split_with_sizes(plan.shard)[1::2]
        for region, number in enumerate(plan.quantized):
            own.rows[region] = rows[number]

    def bring_and_tag(self, bring: Callable[[], None], tags: Tensor, own: int) -> None:
        """Have `bring` put own rows into a message; then write its `tags`, number `own` is ours.

        `tags` [N], or none in a world of one. On a failure, send FAILED_TAG. Raise it where ranks
        do not read each other's tags at once. The tags of other ranks are FAILED_TAG until they
        arrive.
        """
        weights = self.weights
        try:
            weights.join_step(raises=True)
            bring()
        except TierError as error:
            weights.note_failure(error)
            if not self._reads(tags):
                raise
        if weights.failure is not None:
            tags.fill_(FAILED_TAG)
        elif tags.numel():
            if self._own_tags is None:
                with torch.inference_mode(False):
                    self._own_tags = torch.full_like(tags, FAILED_TAG)
                    self._own_tags[own] = self._spec.tag
            tags.copy_(self._own_tags)

    def _laid_out(self, regions: Regions, transport: Transport, message: Buffer) -> MessageLayout:
        itemsize = message.tensor.itemsize
        return MessageLayout(*regions, transport.group, itemsize, self._spec.name)

    def _reads(self, tags: Tensor) -> bool:
        """True if ranks read each other's tags at once: where the host need not wait for it."""
        return self._num_tags > 0 and not self._spec.context.tags.defers(tags)

    def check(self, full: Buffer) -> None:
        """Raise if some rank gathered another unit at the same time, or could not read its rows.

        Pieces of equal length would otherwise mix two units without anyone noticing.
        """
        if self._tag is not None and self._plan is not None:
            self.check_tags(full.parts(self._plan.message)[-2])
        elif self._num_tags:
            self.check_tags(full.tensor[self._spec.rest.full_numel :])

    def check_tags(self, tags: Tensor) -> None:
        """Raise as `check` does, from the tags [N] that came with a message of this unit."""
        spec, context = self._spec, self._spec.context
        if not self._reads(tags):
            if self._num_tags:
                context.tags.note(context, "gather", spec.name, tags, spec.tag)
            return
        sent = tags.tolist()
        if sent.count(spec.tag) == len(sent):
            return
        if any(context.is_tag(tag, FAILED_TAG) for tag in sent):
            raise self._failed_somewhere()
        for rank, tag in enumerate(sent):
            if not context.is_tag(tag, spec.tag):
                raise context.mixed("gather", spec.name, context.named(rank))

    def _failed_somewhere(self) -> TierError:
        """The error of this rank, or of the first rank that has one.

        A collective of the ranks that have seen each other's tags: not of nodes that are replicas.
        """
        weights = self.weights
        mine = None if weights.failure is None else str(weights.failure)
        texts = self._spec.context.transport.group.gather(mine)
        if weights.failure is None:
            weights.note_failure(TierError(next(text for text in texts if text is not None)))
        assert weights.failure is not None, "some rank has failed"
        return weights.failure


class TwoHopGather(UnitGather):
    """Gathers between nodes, then inside. Tags travel with both hops: every rank sees all."""

    def __init__(self, weights: UnitWeights, hops: Hops) -> None:
        super().__init__(weights, hops.between)
        self._hops = hops
        self._name = weights.spec.label("gather between nodes")
        self._second: Buffer | None = None  # the node's shard of weights, and a tag for each node
        self._filled = -1  # `edits` of the unit when it was filled
        self._between = DONE  # fills it
        self._inside: MessageLayout  # of the hop inside the node
        self._node_rows: tuple[list[int], list[int]] = [], []  # split full and second at its rows
        self._node = NodeLayout.build(weights.rest.slots, hops.axes)  # of the secondary shard
        if weights.context.routes.keeps_weights:
            context, numel = weights.context, self._node.numel + hops.axes.nodes
            self._second = Buffer(
                numel, weights.compute_dtype, Kind.SECONDARY, context.store, context.ledger
            )

    @property
    def is_exact(self) -> bool:
        """See `UnitGather.is_exact`: the secondary shard has the compute dtype."""
        return False

    def prefetch(self) -> None:
        if self._second is None or self._filled != self.weights.edits.all():
            super().prefetch()

    def begin_early(self, *, is_unsharded: bool) -> None:
        """Begin the hop between nodes; not where that would wait for a step, or for a disk."""
        weights, is_late = self.weights, is_unsharded or self._second is None
        if not is_late and not weights.steps_in_blocks and weights.weight.far is None:
            self._fill()

    def follow(self, full: Buffer, edits: int) -> None:
        """See `UnitGather.follow`: the secondary shard takes the changes; nothing is sent."""
        if self._second is not None and self._filled == edits:
            near, kept = self._rows_of_node(full, self._second)
            with torch.no_grad():
                torch._foreach_copy_(kept, near)
            self._filled = self.weights.edits.all()

    def start(self, full: Buffer) -> Ticket:
        flat, axes, numel = full.tensor, self._hops.axes, self._spec.rest.full_numel
        inside, label = self._hops.inside, self._spec.label("gather")
        if self._second is None:
            between = self._cross(full)
            return between.then(lambda: inside.gather(flat, self._inside, label).wait())
        self._fill()
        self._await_second()
        near, kept = self._rows_of_node(full, self._second)
        tags = self._second.tensor[self._node.numel :]
        with torch.no_grad():
            torch._foreach_copy_(near, kept)
            flat[numel:][axes.local_rank :: axes.local_world_size] = tags
        return inside.gather(flat, self._inside, label)

    def _rows_of_node(self, full: Buffer, second: Buffer) -> tuple[list[Tensor], list[Tensor]]:
        """The node's shard, row by row: in the full buffer, and in the secondary shard."""
        in_full, in_second = self._node_rows
        return list(full.parts(in_full)[1::2]), list(
            second.tensor.split_with_sizes(in_second)[1::2]
        )

    def _fill(self) -> None:
        """Begin to fill the secondary shard, if weights have changed since it was filled."""
        edits = self.weights.edits.all()
        if self._filled == edits:
            return
        assert self._second is not None, "the secondary shard is filled where there is one"
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
        if self._plan is None:
            self._plan = self._planned(message)
        return self._send(message, self._plan, self._label())

    def _planned(self, message: Buffer) -> GatherPlan:
        """Plan the messages of both hops, in the compute dtype, as is the secondary shard."""
        rest, node = self._spec.rest, self._node
        if self._second is not None:
            in_full, in_second = node_rows(rest, node)
            self._node_rows = (
                split_at(in_full, self.full_numel),
                split_at(in_second, self._second.tensor.numel()),
            )
        plan = GatherPlan.between(rest, node, keeps=self._second is not None)
        inside = gather_inside(rest, node)
        self._layout = self._laid_out(plan.regions, self._transport, message)
        self._inside = self._laid_out(inside, self._hops.inside, message)
        return plan


def gather_of(weights: UnitWeights, *, is_tiled: bool) -> UnitGather:
    """The gather of a unit's weights in the compute dtype, on its routes."""
    routes = weights.context.routes
    is_number = weights.dtype.is_floating_point and not weights.spec.is_packed
    if is_tiled or not is_number:  # neither quantized nor kept twice
        return UnitGather(weights, routes.transport)
    if routes.gather_hops is not None:
        return TwoHopGather(weights, routes.gather_hops)
    return UnitGather(weights, routes.gather)
