"""A transport whose messages are coded: fewer bytes on the link, for values that are rounded.

    gather           own rows -> message -> every rank reads all messages into the full buffer
    reduce_scatter   a message for every rank -> each sums what it was sent, in fp32

A message is coded once and read once, never passed on: rounding does not add up along a ring. Only
matrices are coded; vectors (norms, biases), scalars and flags are few bytes and travel as they are,
in the same message. This rank's own part of a sum need not travel, and is not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from onefold.layout.rows import Slot, round_up
from onefold.ledger import Kind, Ledger
from onefold.ticket import Ticket
from onefold.wire.codec import Codec
from onefold.wire.collectives import Group
from onefold.wire.transport import Composed, Cut, Own

ALIGN_NBYTES = 16
"""Parts of a message start at multiples of this, so that they can be read as wider numbers."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """The parts of one rank's message: for each region its numel, and [start, stop) in bytes."""

    numels: tuple[int, ...]
    is_coded: tuple[bool, ...]
    spans: tuple[tuple[int, int], ...]
    nbytes: int

    @staticmethod
    def build(
        numels: Sequence[int], is_coded: Sequence[bool], codec: Codec, itemsize: int
    ) -> Parcel:
        """Lay out parts of `numels` elements: coded ones by `codec`, others of `itemsize` bytes."""
        spans: list[tuple[int, int]] = []
        end = 0
        for numel, coded in zip(numels, is_coded, strict=True):
            nbytes = codec.nbytes(numel) if coded else numel * itemsize
            spans.append((end, end + nbytes))
            end = round_up(end + nbytes, ALIGN_NBYTES)
        return Parcel(tuple(numels), tuple(is_coded), tuple(spans), end)

    def parts(self, message: Tensor) -> Iterator[tuple[int, bool, Tensor]]:
        """Region, whether it is coded, and its bytes in `message`; empty ones are left out."""
        for index, (start, stop) in enumerate(self.spans):
            if self.numels[index]:
                yield index, self.is_coded[index], message[start:stop]


class _Plan:
    """The parcels of one cut, and how they lie in a buffer of all of them."""

    def __init__(self, cut: Cut, codec: Codec, dtype: torch.dtype, group: Group) -> None:
        ranks = range(group.world_size)
        is_coded = [
            is_matrix and not replicated
            for is_matrix, replicated in zip(cut.is_matrix, cut.is_replicated, strict=True)
        ]
        self.parcels = [
            Parcel.build([numels[rank] for numels in cut.numels], is_coded, codec, dtype.itemsize)
            for rank in ranks
        ]
        ends = [0, *accumulate(parcel.nbytes for parcel in self.parcels)]
        self.spans = list(pairwise(ends))
        self.nbytes = ends[-1]
        messages = Slot("messages", (self.nbytes,), 0, tuple(self.spans), ())
        self.gather = Cut([messages], [0], group, 1, cut.name)


class Coded:
    """See the module. `Own.has_base` makes a gather send differences to what `full` holds."""

    def __init__(self, inner: Composed, codec: Codec) -> None:
        self.inner = inner
        self.group = inner.group
        self.ledger: Ledger = inner.ledger
        self.codec = codec
        self._plans: dict[tuple[Cut, torch.dtype], _Plan] = {}

    def _plan(self, cut: Cut, dtype: torch.dtype) -> _Plan:
        key = (cut, dtype)
        if key not in self._plans:
            self._plans[key] = _Plan(cut, self.codec, dtype, self.group)
        return self._plans[key]

    # gather

    def gather(self, full: Tensor, cut: Cut, label: str, own: Own | None = None) -> Ticket:
        """See `Transport.gather`; own pieces become what every other rank reads, too."""
        if own is not None and own.starts_base:
            return self.inner.gather(full, cut, label)
        plan = self._plan(cut, full.dtype)
        staged = full.new_empty(plan.nbytes, dtype=torch.uint8)
        self.ledger.add(Kind.WIRE, "device", staged.nbytes)
        rank = self.group.rank
        mine = plan.parcels[rank]
        message = staged[slice(*plan.spans[rank])]
        is_difference = own is not None and own.has_base
        for index, coded, part in mine.parts(message):
            target = full[slice(*cut.spans[index][rank])]
            values = target if own is None or own.rows[index] is None else own.rows[index]
            assert values is not None, "a region without rows of its own is sent from its place"
            if not coded:
                part.view(full.dtype).copy_(values)
            elif is_difference:
                self.codec.encode(values.to(torch.float32, copy=True).sub_(target), part)
            else:
                self.codec.encode(values, part)
        ticket = self.inner.gather(staged, plan.gather, label)

        def read() -> None:
            for sender, (span, parcel) in enumerate(zip(plan.spans, plan.parcels, strict=True)):
                for index, coded, part in parcel.parts(staged[slice(*span)]):
                    target = full[slice(*cut.spans[index][sender])]
                    if not coded:
                        target.copy_(part.view(full.dtype))
                    elif is_difference:
                        _add(self.codec, part, target)
                    else:
                        self.codec.decode(part, target)
            self.ledger.add(Kind.WIRE, "device", -staged.nbytes)

        return ticket.then(read)

    # reduce

    def reduce_scatter(
        self,
        partials: Sequence[Tensor],
        cut: Cut,
        out: Sequence[Tensor],
        fresh: Sequence[bool],
        label: str,
    ) -> Ticket:
        """See `Transport.reduce_scatter`. If a rank has values that are not finite, every rank
        finds what travels without a name (flags) to be NaN.
        """
        dtype = partials[-1].dtype
        plan, group = self._plan(cut, dtype), self.group
        sent = partials[-1].new_empty(plan.nbytes, dtype=torch.uint8)
        self.ledger.add(Kind.WIRE, "device", sent.nbytes)
        self._pack(partials, cut, plan, sent)
        own = plan.parcels[group.rank]
        numels_sent = [parcel.nbytes for parcel in plan.parcels]
        numels_sent[group.rank] = 0  # the next line sends what lies around it
        start, stop = plan.spans[group.rank]
        others = torch.cat([sent[:start], sent[stop:]])
        numels_in = [0 if rank == group.rank else own.nbytes for rank in range(group.world_size)]
        received = sent.new_empty(sum(numels_in))
        self.ledger.add(Kind.WIRE, "device", received.nbytes + others.nbytes)
        works = [group.all_to_all(received, others, numels_in, numels_sent)]
        self.inner.count("reduce_scatter", others.nbytes)

        def average() -> None:
            messages = list(received.split(own.nbytes)) if own.nbytes else []
            messages.insert(group.rank, sent[start:stop])
            self._average(messages, own, (partials, cut), out, fresh)
            self.ledger.add(Kind.WIRE, "device", -sent.nbytes - received.nbytes - others.nbytes)

        return Ticket(works, average, label)

    def end_backward(self) -> None:
        """See `Transport.end_backward`."""
        self.inner.end_backward()

    def _pack(self, partials: Sequence[Tensor], cut: Cut, plan: _Plan, sent: Tensor) -> None:
        """Code each rank's pieces into its message, this rank's own parts as far as they travel
        raw; then flags, which turn NaN if anything was not finite.
        """
        is_finite = torch.ones((), dtype=torch.bool, device=sent.device)
        flags: list[tuple[int, Tensor]] = []
        for rank, (span, parcel) in enumerate(zip(plan.spans, plan.parcels, strict=True)):
            for index, coded, part in parcel.parts(sent[slice(*span)]):
                values = _piece(partials[index], cut, index, rank)
                if not cut.has_name[index]:
                    flags.append((index, part))
                elif coded and rank != self.group.rank:
                    self.codec.encode(values, part)
                    is_finite &= self.codec.is_finite(part)
                else:
                    if not coded:
                        part.view(partials[-1].dtype).copy_(values)
                    is_finite &= torch.isfinite(values).all()
        for index, part in flags:
            told = partials[index].to(partials[-1].dtype)
            part.view(told.dtype).copy_(torch.where(is_finite, told, torch.nan))

    def _average(
        self, messages: list[Tensor], own: Parcel, sent: tuple[Sequence[Tensor], Cut],
        out: Sequence[Tensor], fresh: Sequence[bool],
    ) -> None:  # fmt: skip
        """The mean of what the ranks sent, summed in fp32 from rank 0 up."""
        partials, cut = sent
        dtype, rank = partials[-1].dtype, self.group.rank
        parts = [dict((i, part) for i, _, part in own.parts(message)) for message in messages]
        for index, numel in enumerate(own.numels):
            if not numel:
                continue
            target, is_fresh = out[index], fresh[index]
            is_direct = is_fresh and target.dtype == torch.float32
            total = target.zero_() if is_direct else target.new_zeros(numel, dtype=torch.float32)
            for sender, part in enumerate(part[index] for part in parts):
                if own.is_coded[index] and sender != rank:
                    self.codec.add(part, total)
                elif own.is_coded[index]:
                    total.add_(_piece(partials[index], cut, index, rank))
                else:
                    total.add_(part.view(dtype))
            total.mul_(1.0 / self.group.world_size)
            if not is_direct:
                target.copy_(total) if is_fresh else target.add_(total)


def _piece(partial: Tensor, cut: Cut, index: int, rank: int) -> Tensor:
    """What of a flat partial goes to a rank: the partial holds all pieces, one behind the other."""
    if cut.is_replicated[index]:
        return partial
    numels = cut.numels[index]
    start = sum(numels[:rank])
    return partial[start : start + numels[rank]]


def _add(codec: Codec, message: Tensor, target: Tensor) -> None:
    if target.dtype == torch.float32:
        codec.add(message, target)
    else:
        total = target.float()
        codec.add(message, total)
        target.copy_(total)
