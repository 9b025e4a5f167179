"""Hops of a unit's gradients: from partial gradients on every rank to the rows where means rest.

    OneHop       sharded over one axis    partial -> own rows
    Spread       stage 0                  partial -> a rank's rows -> all rows everywhere
    Replicated   nodes are replicas       partial -> own rows, of the node's mean -> of all nodes'
    TwoHop       sharded over two axes    partial -> a piece of every node's rows -> own rows

`Replicated` and `TwoHop` are in node_reduction.py. The first hop begins when backward has passed
a unit. The second begins when the first is over, at the same point of the order on every
rank. One number for each parameter is sent with the gradients (`counts`): the share of ranks that
used it.

A hop refers to no unit, parameter or `.grad`: it takes indices of parameters, tensors and flags.
See docs/adr/0005.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.layout.ledger import Account, Kind
from onefold.layout.messages import Parts, gathered, reduce_message
from onefold.layout.ranges import Range
from onefold.layout.rows import Layout, Slot, split_at
from onefold.tier.accelerator import Fetched
from onefold.unit.buffer import Buffer
from onefold.unit.context import Context, UnitSpec
from onefold.wire.message_cut import MessageLayout
from onefold.wire.ticket import Ticket
from onefold.wire.transport import ErrorFeedback, Reduction, Transport

Which = tuple[int, ...]
"""The parameters of a message, by their index in the unit."""

Users = list[bool] | Fetched
"""Whether some rank used each parameter; or counts of ranks, on their way to the host."""


def known(users: Users) -> list[bool]:
    """Wait, on the host, for counts that are on their way."""
    return users if isinstance(users, list) else [count != 0 for count in users.read().tolist()]


Region = tuple[str, int] | None
"""The fqn of a parameter and one of its regions; None for a region without feedback."""


class MeanRows(NamedTuple):
    """The memory at rest of some parameters' means."""

    flat: Tensor  # the unit's buffer of reduced gradients
    rows: list[Tensor]  # of each parameter, flat
    fresh: list[bool]  # True: the mean replaces the rows; False: it is added to them


class Landed(NamedTuple):
    """The result of a reduction's first hop."""

    parameters: list[Any]
    users: Users
    mean: MeanRows | None

    @property
    def which(self) -> Which:
        """The numbers of the parameters."""
        return tuple([parameter.index for parameter in self.parameters])

    def used(self) -> list[Any]:
        """The parameters that some rank used."""
        return [p for p, used in zip(self.parameters, known(self.users), strict=True) if used]


class Partials(dict[Any, int]):
    """Partial gradients of a unit's parameters: their bytes, which an account counts."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self._account = account

    def note(self, parameters: Iterable[Any], nbytes: int = 0) -> None:
        """Count gradients that autograd has accumulated, of `nbytes` each where that is given."""
        new = {p: nbytes or p.full_nbytes for p in parameters if p not in self}
        if new:
            self.update(new)
            self._account.add(sum(new.values()))

    def drop(self, parameters: Iterable[Any]) -> None:
        """Count them no longer."""
        nbytes = sum([self.pop(parameter, 0) for parameter in parameters])
        if nbytes:
            self._account.add(-nbytes)


class MeanBuffer:
    """One flat buffer with a row for each parameter. It has its bytes while there are gradients."""

    def __init__(self, spec: UnitSpec, spans: Sequence[Range], *, keeps_bytes: bool) -> None:
        """`spans`: own rows of each parameter; `keeps_bytes`: from one step to the next."""
        self._spec = spec
        self._numels = split_at(spans, spec.rest.shard_numel(spec.context.rest_rank))
        self._keeps_bytes = keeps_bytes
        self._buffer: Buffer | None = None
        self._gaps: Tensor | None = None  # int64: elements that no reduction writes

    @property
    def held(self) -> Buffer | None:
        """The buffer, if it has its bytes."""
        buffer = self._buffer
        return buffer if buffer is not None and buffer.is_held else None

    def allocate(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Give the buffer its bytes, if it has none; return it and its rows, all flat."""
        context, buffer = self._spec.context, self._buffer
        if buffer is None or not buffer.is_held:
            if buffer is None:
                buffer = self._buffer = Buffer(
                    sum(self._numels), self._spec.dtype, Kind.GRAD, context.store, context.ledger,
                    is_brief=not self._keeps_bytes,
                )  # fmt: skip
            buffer.reallocate()
            if self._gaps is None:
                gaps = self._spec.rest.gaps(context.rest_rank)
                self._gaps = torch.tensor(gaps, dtype=torch.int64, device=context.store.device)
            if self._gaps.numel():
                buffer.tensor.index_fill_(0, self._gaps, 0)  # optimizers read gaps, too
        return buffer.tensor, buffer.parts(self._numels)[1::2]

    def rows(self) -> Sequence[Tensor]:
        """The flat row of each parameter; none before there is a buffer."""
        return () if self._buffer is None else self._buffer.parts(self._numels)[1::2]

    def free(self) -> None:
        """No `.grad` shows a row any more: free the bytes, unless the next backward needs them.

        Where a user kept a gradient, the buffer is the user's from now on.
        """
        if self._buffer is not None and self._buffer.num_users > 1:
            self._buffer = None
        elif self._buffer is not None and not self._keeps_bytes:
            self._buffer.release()

    def hand_over(self) -> None:
        """Leave the bytes to a step that reads them."""
        self._buffer = None


class Feedback:
    """Error feedback: the residuals of quantized gradients, which the next message carries.

        message = quantize(gradient + residual)     residual = gradient + residual - decoded message

    Over all steps the decoded messages sum to the gradients, up to the last residual. Every hop
    that quantizes has residuals of its own, fp32, made with its first message.

    Residuals belong to gradients that were stepped by. They are dropped with gradients that are
    cleared without a step, lost with their backward or not finite, and when weights are loaded. A
    rank that did not use a parameter sends zeros and keeps its residual.

    Sources: 1-bit SGD (Seide et al., Interspeech 2014, section 3), which named it; EF-SGD
    (Karimireddy et al., arXiv 1901.09847, section 4), which shows that it converges.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._residuals: dict[tuple[str, str, int], Buffer] = {}

    def residuals_of(self, hop: str, regions: Sequence[Region]) -> ErrorFeedback | None:
        """The residuals of a message's `regions`, for its transport; None without feedback."""
        if not self._context.routes.feeds_back:
            return None

        def residual(index: int, numel: int) -> Tensor | None:
            region = regions[index]
            if region is None:
                return None
            key = (region[0], hop, region[1])
            if key not in self._residuals:
                self._make_residual(key, numel).zero_()
            return self._residuals[key].tensor

        return residual

    def _make_residual(self, key: tuple[str, str, int], numel: int) -> Tensor:
        store, ledger = self._context.store, self._context.ledger
        buffer = Buffer(numel, torch.float32, Kind.FEEDBACK, store, ledger)
        self._residuals[key] = buffer
        return buffer.tensor

    def taken(self, layout: Layout, rank: int) -> dict[str, Tensor]:
        """Take all residuals of messages over one axis: all elements of each parameter, by fqn.

        A rank has none for its own rows, as it sends itself nothing: they are zeros here.
        """
        residuals: dict[str, list[Tensor]] = {}
        for slot in layout.slots:
            for region, slab in enumerate(slot.slabs()):
                buffer = self._residuals.pop((slot.fqn, "", region), None)
                if buffer is not None:
                    start, stop = slab.pieces[rank]
                    own = buffer.tensor.new_zeros(stop - start)
                    parts = [buffer.tensor[:start], own, buffer.tensor[start:]]
                    residuals.setdefault(slot.fqn, []).append(torch.cat(parts))
        return {fqn: torch.cat(parts) for fqn, parts in residuals.items()}

    def give(self, residuals: Mapping[str, Tensor], layout: Layout, rank: int) -> None:
        """Continue with `residuals` in messages of another layout."""
        for slot in layout.slots:
            if slot.fqn in residuals:
                parts = residuals[slot.fqn].chunk(slot.num_slabs)
                for region, (slab, part) in enumerate(zip(slot.slabs(), parts, strict=True)):
                    start, stop = slab.pieces[rank]
                    rest = torch.cat([part[:start], part[stop:]])
                    self._make_residual((slot.fqn, "", region), len(rest)).copy_(rest)

    def forget(self, parameters: Iterable[Any]) -> None:
        """Drop the residuals of these parameters, or of their slots."""
        if self._residuals:
            forgotten = {parameter.fqn for parameter in parameters}
            for key in [key for key in self._residuals if key[0] in forgotten]:
                del self._residuals[key]


class GradientHop:
    """One hop: a message with the `parts` of some parameters, and flags behind them."""

    def __init__(
        self, spec: UnitSpec, transport: Transport, feedback: Feedback, parts: Parts, name: str = ""
    ) -> None:
        self.transport = transport
        self.parts = parts
        self._spec = spec
        self._feedback = feedback
        self._name = name  # of the residuals; "between nodes" in labels
        self._label = spec.label(f"reduce_scatter {name}".rstrip())
        self._feeds_back = spec.context.routes.feeds_back
        self._cuts: dict[Which, MessageLayout] = {}
        self._numels = [[region.pieces[-1][1] for region in regions] for regions in parts]
        self.is_cut = any(len(regions) > 1 for regions in parts)

    def split(self, which: Which, partials: list[Tensor]) -> list[Tensor]:
        """The regions of flat gradients [all elements]."""
        if not self.is_cut:
            return partials
        pairs = zip(which, partials, strict=True)
        return [part for i, flat in pairs for part in flat.split_with_sizes(self._numels[i])]

    def reduce(
        self, which: Which, used: list[bool], partials: list[Tensor], out: list[Tensor],
        fresh: list[bool],
    ) -> Ticket:  # fmt: skip
        """Begin to reduce regions and flags to `out`; this rank used some of the parameters."""
        spec, cut = self._spec, self._cuts.get(which)
        if cut is None:
            group, itemsize = self.transport.group, spec.compute_dtype.itemsize
            regions = reduce_message([self.parts[index] for index in which], group.world_size)
            cut = self._cuts[which] = MessageLayout(*regions, group, itemsize, spec.name)
        feedback = None
        if self._feeds_back:
            feedback = self._feedback.residuals_of(self._name, self.regions(which, used))
        reduction = Reduction(partials, cut, out, fresh, self._label, feedback)
        return self.transport.reduce_scatter(reduction)

    def regions(self, which: Which, used: list[bool]) -> list[Region]:
        """The regions of the message, for its feedback."""
        slots = self._spec.wire.slots
        return [
            (slots[index].fqn, number) if is_used else None
            for index, is_used in zip(which, used, strict=True)
            for number in range(len(self.parts[index]))
        ]


class OneHop:
    """Reduce partial gradients to own rows; the base of the other reductions."""

    rests_in_place = False  # and then has its sums in the rows of the mean
    finishes_alone = True  # no collective follows the first hop
    fills_rows = True  # the first hop writes the rows of the mean
    sees_all = True  # its counts are those of all ranks

    def __init__(self, spec: UnitSpec, transport: Transport) -> None:
        self._spec = spec
        self.feedback = Feedback(spec.context)
        self._slabs = spec.wire.slabs()
        self._is_cut = any(len(slabs) > 1 for slabs in self._slabs)
        self._first = GradientHop(spec, transport, self.feedback, self._slabs)
        self._means: dict[Which, MessageLayout] = {}  # of means that all ranks gather
        self._sent_flags: tuple[list[bool], Tensor] = [], torch.empty(0)
        self.counts: Tensor  # of the last hop that has landed: [parameters]

    def start(
        self, which: Which, partials: list[Tensor], used: list[bool], mean: MeanRows | None
    ) -> Ticket:
        """Begin the first hop with flat `partials` [all elements]; this rank used some parameters.

        `mean` receives the result where `fills_rows`.
        """
        sent, flags = self._first.split(which, partials), self._flags(used)
        out, are_fresh = self._targets(which, mean)
        fresh = [*are_fresh, True]
        if self._first.is_cut:
            regions = zip(which, fresh, strict=False)
            fresh = [is_fresh for i, is_fresh in regions for _ in self._first.parts[i]] + [True]
        return self._first.reduce(which, used, [*sent, flags], [*out, self.counts], fresh)

    def _targets(self, which: Which, mean: MeanRows | None) -> tuple[list[Tensor], list[bool]]:
        """The tensors that receive each region; for each parameter, whether to replace values."""
        assert mean is not None, "the first hop of this reduction fills the rows of the mean"
        return self._reduced_pieces(which, mean.rows), mean.fresh

    def users(self, used: Users) -> Users:
        """For each parameter, whether some rank used it, from the counts of the last message."""
        if isinstance(used, list) and all(used):
            return used
        fetched = Fetched(self.counts)  # the host may have to wait for the device
        return known(fetched) if self.counts.device.type == "cpu" else fetched

    def follow(
        self, which: Which, users: Users, shown: list[bool], mean: MeanRows
    ) -> Ticket | None:
        """Begin the second hop, of gradients of `users` and zeros; None where there is none.

        `shown`: parameters whose mean of earlier micro-batches a `.grad` shows.
        """
        return None

    def _fed(self, which: Which, users: Users) -> list[bool]:
        """The parameters whose residuals the second hop adds to; any, if there is no feedback."""
        return known(users) if self._spec.context.routes.feeds_back else [True] * len(which)

    @property
    def waits(self) -> bool:
        """True if sums rest inside the node, and nodes have yet to exchange them."""
        return False

    def rest(self, which: Which, users: list[bool]) -> list[int]:
        """Stop after the first hop; returns the parameters whose sums rest now."""
        raise NotImplementedError("only reductions inside a node keep sums")

    def drop(self, which: Iterable[int]) -> None:
        """Forget the sums and residuals of gradients that were cleared."""
        slots = self._spec.wire.slots
        self.feedback.forget(slots[index] for index in which)

    def _flags(self, used: list[bool]) -> Tensor:
        """The numbers that travel with gradients: whether this rank used each parameter."""
        spec = self._spec
        device = spec.context.store.device
        sent, flags = self._sent_flags
        if sent != used:  # seldom: a GPU's host waits for the copy
            flags = torch.tensor(used, dtype=spec.compute_dtype, device=device)
            self._sent_flags = list(used), flags
        self.counts = torch.empty(flags.numel(), dtype=spec.dtype, device=device)
        return flags

    def _reduced_pieces(self, which: Which, rows: list[Tensor]) -> list[Tensor]:
        """The part of each parameter's rows that this rank reduces: a piece of every slab."""
        pairs, context = zip(which, rows, strict=True), self._spec.context
        if not context.is_sharded:  # each rank has all rows
            slots, rank = self._spec.wire.slots, context.rank
            return [row[slice(*span)] for i, row in pairs for span in slots[i].cut.spans(rank)]
        if not self._is_cut:
            return rows
        return [piece for i, row in pairs for piece in row.chunk(len(self._slabs[i]))]

    def _gather_rows(self, which: Which, flat: Tensor) -> Ticket:
        """All ranks gather the rows that each has averaged."""
        regions = ((slab, slab.full_offset) for index in which for slab in self._slabs[index])
        transport, label = self._spec.context.transport, "gather of gradients"
        with torch.no_grad():
            return self._gather_means(transport, flat, which, regions, label)

    def _gather_means(
        self, transport: Transport, flat: Tensor, which: Which,
        regions: Iterable[tuple[Slot, int]], label: str,
    ) -> Ticket:  # fmt: skip
        """All ranks gather means of which each has a part: `regions` of `flat`, with offsets."""
        cut = self._means.get(which)
        if cut is None:
            group, name = transport.group, self._spec.name
            cut = MessageLayout(*gathered(regions), group, flat.itemsize, name)
            self._means[which] = cut
        return transport.gather(flat, cut, self._spec.label(label))


class Spread(OneHop):
    """Stage 0: every rank reduces its rows, then all gather them."""

    finishes_alone = False

    def follow(self, which: Which, users: Users, shown: list[bool], mean: MeanRows) -> Ticket:
        return self._gather_rows(which, mean.flat)
