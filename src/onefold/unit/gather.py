"""Gather the own rows of all ranks into the unsharded weights of one unit.

A rank that could not read its rows still sends a message, so that no other rank waits for it. Where
a disk, or a step in the background, can fail, every rank sends a flag behind its weights: all raise
the same error. On a device the digest of the step holds that flag (wire/digest.py).

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
from onefold.unit.parameter import user_edits
from onefold.unit.weights import UnitWeights
from onefold.wire.digest import first_failure
from onefold.wire.message_cut import MessageLayout
from onefold.wire.ticket import DONE, Ticket
from onefold.wire.transport import SendRows, Transport


class UnitGather:
    """Fills full buffers of a unit, of any dtype, from the shards of all ranks."""

    def __init__(self, weights: UnitWeights, transport: Transport) -> None:
        self._weights = ref(weights)
        self._spec = weights.spec
        self._transport = transport
        self._plan: GatherPlan | None = None
        self._layout: MessageLayout | None = None  # of its message; None: nothing is sent
        self._name = weights.spec.label("gather")  # for errors
        self._has_base = False  # the buffer holds the weights that every rank read last
        self._user_edits: list[int] = []  # of each parameter, at the last gather
        self._gathered = -1  # all edits then
        rest, self._copies = weights.rest, weights.context.tiers.copies
        self._copy = torch._foreach_copy_ if self._copies is None else self._copies.copy
        self._num_flags = weights.context.num_flags
        is_cast = weights.dtype != weights.compute_dtype
        self._reads_directly = weights.context.reads_directly and not is_cast
        self.full_numel = rest.full_numel + self._num_flags
        """Elements of a full buffer: the regions, and flags behind them."""

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

        Raises `TierError` if this rank could not read its rows and cannot tell the other ranks.
        """
        if self._reads_directly:
            return self.weights.rows.read_into(full.tensor)
        if self._plan is None:
            context, rest = self._spec.context, self._spec.rest
            self._plan = GatherPlan.on_one_axis(rest, context.rest_rank, self._num_flags)
            if context.gathers:
                self._layout = self._laid_out(self._plan.regions, self._transport, full)
        if (layout := self._layout) is not None and self._goes_straight(self._plan, layout):
            own = SendRows([*self.weights.own_rows(self._plan.shard)])
            return self._transport.gather(full.tensor, layout, self._label(), own)
        return self._send(full, self._plan, self._label())

    def _label(self) -> str:
        """Name a collective for errors; include a parameter that was edited since the last one."""
        weights = self.weights
        edits = weights.edits.all()
        if edits == self._gathered:
            return self._name
        self._gathered = edits
        before, self._user_edits = self._user_edits, user_edits(weights.parameters)
        pairs = zip(weights.parameters, before, self._user_edits, strict=False)
        edited = next((p.fqn for p, old, new in pairs if old != new), "")
        return f"{self._name}, where {edited!r} was edited," if edited else self._name

    def _send(self, message: Buffer, plan: GatherPlan, label: str) -> Ticket:
        """Put own rows into the message, and begin to exchange it."""
        rows, copies = self.weights.rows, self._copies
        if copies is None:
            try:
                return self._begin_message(message, plan, label)
            finally:
                rows.give_back()
        try:
            with copies:
                ticket = self._begin_message(message, plan, label)
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

    def _begin_message(self, message: Buffer, plan: GatherPlan, label: str) -> Ticket:
        weights, own = self.weights, self._rows_to_send()
        places = message.parts(plan.message)[1::2]
        flags = message.tensor[len(message.tensor) - plan.num_flags :]

        def bring() -> None:
            rows = weights.own_rows(plan.shard)
            copied: Sequence[int] = range(len(rows))
            if own is not None:
                self._take_rows(rows, own, plan)
                if not own.starts_base:  # in place of quantized rows, the message holds the base
                    copied = plan.exact
            if copied:
                self._copy([places[i] for i in copied], [rows[i] for i in copied])

        self.bring_and_flag(bring, places, flags)
        if self._layout is None:
            return DONE
        self._has_base = False  # until this message has arrived
        ticket = self._transport.gather(message.tensor, self._layout, label, own)
        return ticket if own is None or not own.is_base_kept else ticket.then(self._note_base)

    def _goes_straight(self, plan: GatherPlan, layout: MessageLayout) -> bool:
        """True if one copy takes own rows to the wire's buffer, not by way of the full buffer.

        All of them are small, and nothing that may fail has to come before.
        """
        weights = self.weights
        if layout.medium or layout.large or plan.exact or self._transport.is_quantized:
            return False
        is_near = self._copies is None and weights.weight.far is None
        is_ready = weights.pending is None and weights.failure is None
        return is_near and is_ready and not self._num_flags

    def _note_base(self) -> None:
        self._has_base = True

    def _rows_to_send(self) -> SendRows | None:
        """Say, for a quantizing transport, whether it sends differences: the same on every rank."""
        if self._layout is None or not self._transport.is_quantized:
            return None
        keeps = self._spec.context.routes.sends_differences
        rows: list[Tensor | None] = [None] * len(self._layout.pieces)
        return SendRows(rows, has_base=keeps and self._has_base, is_base_kept=keeps)

    def _take_rows(self, rows: Sequence[Tensor], own: SendRows, plan: GatherPlan) -> None:
        """Have a quantizing transport read rows of the master, so that they are rounded once."""
        weights = self.weights
        if not weights.steps_in_blocks and weights.stepped.device == rows[0].device:
            weights.refresh_master()
            rows = weights.stepped.split_with_sizes(plan.shard)[1::2]
        for region, number in enumerate(plan.quantized):
            own.rows[region] = rows[number]

    def bring_and_flag(
        self, bring: Callable[[], None], own: Sequence[Tensor], flags: Tensor
    ) -> None:
        """Have `bring` put own rows into a message, at `own`; then write whether that failed.

        `flags` [N], those of other ranks arrive with the message; or none. A rank that fails sends
        zeros. It raises `TierError` where other ranks would not learn of it.
        """
        weights, context = self.weights, self._spec.context
        try:
            weights.join_step(raises=True)
            bring()
        except TierError as error:
            weights.note_failure(error)
            if not self._num_flags:
                if not context.defers_failures:
                    raise
                context.transport.group.digest.tell_failure(error)
            torch._foreach_zero_(list(own))
        if self._num_flags:
            flags.fill_(weights.failure is not None)

    def _laid_out(
        self, regions: Regions, transport: Transport, message: Buffer
    ) -> MessageLayout | None:
        itemsize = message.tensor.itemsize
        layout = MessageLayout(*regions, transport.group, itemsize, self._spec.name)
        return layout if layout.numel else None

    def check(self, full: Buffer) -> None:
        """Raise `TierError`, on all ranks, if one could not read its rows, and said so."""
        if self._num_flags:
            self.check_flags(full.tensor[self._spec.rest.full_numel :])

    def check_flags(self, flags: Tensor) -> None:
        """Raise as `check` does, from the flags [N], or none, that came with a message."""
        if any(flags.tolist()):
            weights, group = self.weights, self._spec.context.transport.group
            failure = first_failure(group, weights.failure)
            weights.note_failure(failure)
            raise failure


class TwoHopGather(UnitGather):
    """Gathers between nodes, then inside. Flags travel with both hops: every rank sees all."""

    def __init__(self, weights: UnitWeights, hops: Hops) -> None:
        super().__init__(weights, hops.between)
        self._hops = hops
        self._name = weights.spec.label("gather between nodes")
        self._second: Buffer | None = None  # the node's shard of weights, and a flag of each node
        self._filled = -1  # `edits` of the unit when it was filled
        self._between = DONE  # fills it
        self._inside: MessageLayout | None  # of the hop inside the node; None: nothing is sent
        self._node_rows: tuple[list[int], list[int]] = [], []  # split full and second at its rows
        self._node = NodeLayout.build(weights.rest.slots, hops.axes)  # of the secondary shard
        if weights.context.routes.keeps_weights:
            context = weights.context
            numel = self._node.numel + (hops.axes.nodes if self._num_flags else 0)
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
        if self._second is None:
            between = self._cross(full)
            return between.then(lambda: self._gather_inside(full).wait())
        self._fill()
        self._await_second()
        near, kept = self._rows_of_node(full, self._second)
        with torch.no_grad():
            torch._foreach_copy_(near, kept)
            if self._num_flags:
                axes, flags = self._hops.axes, self._second.tensor[self._node.numel :]
                of_all = full.tensor[self._spec.rest.full_numel :]
                of_all[axes.local_rank :: axes.local_world_size] = flags
        return self._gather_inside(full)

    def _gather_inside(self, full: Buffer) -> Ticket:
        if self._inside is None:
            return DONE
        return self._hops.inside.gather(full.tensor, self._inside, self._spec.label("gather"))

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
        has_flags = self._num_flags > 0
        plan = GatherPlan.between(rest, node, keeps=self._second is not None, has_flags=has_flags)
        inside = gather_inside(rest, node, has_flags=has_flags)
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
