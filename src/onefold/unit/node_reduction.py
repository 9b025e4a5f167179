"""Hops of a unit's gradients between nodes.

Between micro-batches `Replicated` and `TwoHop` can stop after the first hop, inside the node. Nodes
then exchange gradients once a step.

Sources: ZeRO++, arXiv 2306.10209, section 3.3 (two hops); MiCS, arXiv 2205.00119, section 3.3.
See docs/adr/0013.
"""

from collections.abc import Iterable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from onefold.layout.ledger import Kind
from onefold.layout.messages import NodeParts, parts_of_replicas
from onefold.layout.ranges import Range
from onefold.unit.buffer import Buffer
from onefold.unit.context import Hops, UnitSpec
from onefold.unit.reduction import GradientHop, MeanRows, OneHop, Spread, Users, Which
from onefold.wire.ticket import Ticket
from onefold.wire.transport import Transport

INSIDE, BETWEEN = "inside the node", "between nodes"
"""Names of hops, in labels of collectives."""


class Replicated(OneHop):
    """Nodes are replicas. They average own rows once a step: each its part, then all gather."""

    rests_in_place = True
    finishes_alone = sees_all = False

    def __init__(self, spec: UnitSpec, transport: Transport, replicas: Transport) -> None:
        super().__init__(spec, transport)
        self._waits = False
        parts = parts_of_replicas(spec.wire, spec.context.rest_rank, replicas.group.world_size)
        self._between = GradientHop(spec, replicas, self.feedback, parts, BETWEEN)

    def start(
        self, which: Which, partials: list[Tensor], used: list[bool], mean: MeanRows | None
    ) -> Ticket:
        """See `OneHop.start`: rows hold the node's mean until nodes have exchanged theirs."""
        self._waits = True
        return super().start(which, partials, used, mean)

    def follow(self, which: Which, users: Users, shown: list[bool], mean: MeanRows) -> Ticket:
        """See `OneHop.follow`. Exact means travel in the compute dtype, as partials do."""
        replicas, spec = self._between.transport, self._spec
        self._waits = False
        wide = spec.dtype if replicas.is_quantized else spec.compute_dtype  # rounded once
        rows = [row.to(wide) for row in mean.rows]
        for index, is_shown in enumerate(shown):
            if is_shown:  # by an earlier micro-batch
                self.counts[index] += 1
        flags = self.counts.to(spec.compute_dtype)
        own = [row.new_empty(b - a) for row, (a, b) in zip(rows, self._spans(which), strict=True)]
        self.counts = torch.empty_like(self.counts)
        is_used = [a or b for a, b in zip(self._fed(which, users), shown, strict=True)]
        first = self._between.reduce(
            which, is_used, [*rows, flags], [*own, self.counts], [True] * (len(rows) + 1)
        )
        spread = partial(self._spread, which, first, rows, own, mean)
        return Ticket(first.works, spread, self._spec.label("reduction between nodes"))

    def _spread(
        self, which: Which, first: Ticket, rows: list[Tensor], own: list[Tensor], mean: MeanRows
    ) -> None:
        """Gather the parts that each node has averaged."""
        first.wait()
        flat = torch.cat(rows)
        starts = list(accumulate(map(len, rows), initial=0))[:-1]
        parts: list[Tensor] = []
        for averaged, begin, (start, stop) in zip(own, starts, self._spans(which), strict=True):
            parts.append(flat[begin + start : begin + stop])
            parts[-1].copy_(averaged)
        residuals = self._add_residuals(which, parts)
        replicas, parts_of = self._between.transport, self._between.parts
        regions = ((parts_of[i][0], start) for i, start in zip(which, starts, strict=True))
        self._gather_means(replicas, flat, which, regions, "gather between nodes").wait()
        for residual, decoded in residuals:
            residual.sub_(decoded).nan_to_num_(0.0, 0.0, 0.0)
        for target, row in zip(mean.rows, flat.split([len(row) for row in rows]), strict=True):
            target.copy_(row)

    def _add_residuals(self, which: Which, parts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Means are quantized again, to be gathered: add the residuals of the last such message."""
        if not (self._between.transport.is_quantized and self._spec.context.routes.feeds_back):
            return []
        is_used = [count != 0 for count in self.counts.tolist()]
        residual_of = self.feedback.residuals_of("means", self._between.regions(which, is_used))
        pairs = list[tuple[Tensor, Tensor]]()
        for region, (index, part) in enumerate(zip(which, parts, strict=True)):
            is_quantized = len(self._spec.wire.slots[index].shape) > 1 and len(part)
            residual = residual_of(region, len(part)) if residual_of and is_quantized else None
            if residual is not None:
                pairs.append((residual.copy_(part.add_(residual)), part))
        return pairs

    @property
    def waits(self) -> bool:
        return self._waits

    def rest(self, which: Which, users: list[bool]) -> list[int]:
        """See `OneHop.rest`: the node's mean rests in the rows of the mean of all."""
        return [index for index, is_user in zip(which, users, strict=True) if is_user]

    def _spans(self, which: Which) -> list[tuple[int, int]]:
        """This node's part of each parameter's own rows."""
        rank, parts = self._between.transport.group.rank, self._between.parts
        return [parts[index][0].pieces[rank] for index in which]


class TwoHop(OneHop):
    """Inside the node first, into sums that may rest there; then between nodes."""

    finishes_alone = sees_all = False
    fills_rows = False

    def __init__(self, spec: UnitSpec, hops: Hops) -> None:
        super().__init__(spec, hops.inside)
        self._node = node = NodeParts.from_slabs(self._slabs, hops.axes)
        feedback = self.feedback
        self._first = GradientHop(spec, hops.inside, feedback, node.inside, INSIDE)
        self._between = GradientHop(spec, hops.between, feedback, node.between, BETWEEN)
        self._sums: Buffer | None = None
        self._entered: Which = ()  # of the first hop that is under way
        self._counts: dict[int, Tensor] = {}  # of the parameters in the sums
        self._users: dict[int, None] = {}  # the parameters in the sums that the node used

    def _targets(self, which: Which, mean: MeanRows | None) -> tuple[list[Tensor], list[bool]]:
        """A piece of every node's rows is added to the node's sums."""
        spec, self._entered = self._spec, which
        if self._sums is None:
            self._sums = Buffer(
                self._node.numel, spec.dtype, Kind.PARTIAL_GRAD, spec.context.store,
                spec.context.ledger, is_brief=True,
            )  # fmt: skip
        spans, sums = self._node.spans, self._sums.tensor
        out = [sums[slice(*span)] for index in which for span in spans[index]]
        return out, [index not in self._counts for index in which]

    @property
    def waits(self) -> bool:
        return bool(self._counts)

    def rest(self, which: Which, users: list[bool]) -> list[int]:
        self._add_counts()
        self._users |= {index: None for index, used in zip(which, users, strict=True) if used}
        return list(self._users)

    def _add_counts(self) -> None:
        """Add the counts of the first hop to those of earlier micro-batches."""
        for index, count in zip(self._entered, self.counts, strict=True):
            known = self._counts.get(index)
            self._counts[index] = count if known is None else known + count

    def follow(self, which: Which, users: Users, shown: list[bool], mean: MeanRows) -> Ticket:
        """See `OneHop.follow`. Exact messages travel in the compute dtype, as partials do;
        quantized messages are made of the sums as they are.
        """
        between = self._between
        assert self._sums is not None, "sums are reduced before there are any"
        self._add_counts()
        sums, self._sums = self._sums, None
        dtype = self._spec.compute_dtype
        wide = sums.tensor.dtype if between.transport.is_quantized else dtype  # rounded once
        nodes = between.transport.group.world_size
        regions = [span for index in which for span in self._regions(index, nodes)]
        partials = [sums.tensor[slice(*span)].to(wide) for span in regions]
        flags = torch.stack([self._counts[index] for index in which]).to(dtype)
        is_used = [
            used or index in self._users
            for index, used in zip(which, self._fed(which, users), strict=True)
        ]
        self._counts.clear()
        self._users.clear()
        self.counts = torch.empty_like(self.counts)
        pairs = zip(which, mean.fresh, strict=True)
        fresh = [is_fresh for index, is_fresh in pairs for _ in between.parts[index]]
        out = [*self._reduced_pieces(which, mean.rows), self.counts]
        ticket = between.reduce(which, is_used, [*partials, flags], out, [*fresh, True])
        return ticket.then(partial(_free, partials, sums))

    def _regions(self, index: int, nodes: int) -> list[Range]:
        """A parameter's regions of the node's buffer: each has a piece for every node."""
        spans = self._node.spans[index]
        if len(spans) == 1:  # replicated
            return spans
        pairs = zip(spans[::nodes], spans[nodes - 1 :: nodes], strict=True)
        return [(start, stop) for (start, _), (_, stop) in pairs]

    def drop(self, which: Iterable[int]) -> None:
        """See `OneHop.drop`: sums begin anew."""
        dropped = list(which)
        super().drop(dropped)
        for index in dropped:
            self._counts.pop(index, None)
            self._users.pop(index, None)
        if not self._counts:
            self._sums = None


class SpreadTwoHop(TwoHop):
    """Stage 0: every rank reduces its rows in two hops, then all gather them."""

    def follow(self, which: Which, users: Users, shown: list[bool], mean: MeanRows) -> Ticket:
        second = super().follow(which, users, shown, mean)
        return second.then(lambda: self._gather_rows(which, mean.flat).wait())


def _free(partials: list[Tensor], sums: Buffer) -> None:
    partials.clear()
    sums.release()


def reduction_of(spec: UnitSpec) -> OneHop:
    """The reduction of a unit's gradients on its routes."""
    routes = spec.context.routes
    if routes.reduce_hops is not None:
        is_sharded = spec.context.is_sharded
        return (TwoHop if is_sharded else SpreadTwoHop)(spec, routes.reduce_hops)
    if not spec.context.is_sharded:
        return Spread(spec, routes.reduce)
    if routes.replicas is not None:
        return Replicated(spec, routes.reduce, routes.replicas)
    return OneHop(spec, routes.reduce)
