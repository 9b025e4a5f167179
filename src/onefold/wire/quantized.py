"""A transport that quantizes its messages: fewer bytes on the link, rounded values.

    gather           own rows -> message -> every rank reads all messages into the full buffer
    reduce_scatter   a message for every rank -> each sums the messages that it received, in fp32

A message is quantized once and read once, so rounding does not add up as along a ring. Only
matrices are quantized; vectors (norms, biases), scalars and flags are few bytes and travel exactly,
in the same message; messages of complex numbers are exact. A rank's own part of a sum does not
travel and is not rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onefold.layout.messages import Part, QuantizedMessages
from onefold.wire.codec import Codec, encode_with_feedback
from onefold.wire.message_cut import MessageLayout
from onefold.wire.ticket import Ticket
from onefold.wire.transport import Composed, Reduction, SendRows


class Quantized:
    """See the module. With `SendRows.has_base` a gather sends differences to `full`."""

    is_quantized = True

    def __init__(self, exact: Composed, codec: Codec) -> None:
        self.group = exact.group
        self.codec = codec
        self._exact = exact
        self._exchange = exact.exchange
        self._gathered: dict[tuple[MessageLayout, torch.dtype], QuantizedMessages] = {}
        self._reduced: dict[tuple[MessageLayout, torch.dtype], QuantizedMessages] = {}

    # gather

    def gather(
        self, full: Tensor, cut: MessageLayout, label: str, own: SendRows | None = None
    ) -> Ticket:
        """See `Transport.gather`; own pieces become the rounded values that other ranks read."""
        if full.is_complex() or (own is not None and own.starts_base):
            return self._exact.gather(full, cut, label)
        key, exchange, rank = (cut, full.dtype), self._exchange, self.group.rank
        if key not in self._gathered:
            self._gathered[key] = QuantizedMessages(
                cut, cut.spans, self.codec.nbytes, full.dtype.itemsize
            )
        messages = self._gathered[key]
        staged = exchange.gathering.take(messages.nbytes, torch.uint8, full.device)
        is_difference = own is not None and own.has_base
        self._write(full, staged[slice(*messages.spans[rank])], messages.parts[rank], own)
        self.group.agree(("gather quantized", cut.identity), label, staged)
        works = exchange.all_gather(staged, messages.spans)
        exchange.count("gather", messages.numels[rank] * (self.group.world_size - 1))

        def read() -> None:
            for parts, message in zip(messages.parts, staged.split(messages.numels), strict=True):
                for _, is_quantized, place, rows in parts:
                    part, target = message[place], full[rows]
                    if not is_quantized:
                        target.copy_(part.view(full.dtype))
                    elif is_difference:
                        _add(self.codec, part, target)
                    else:
                        self.codec.decode(part, target)
            exchange.gathering.give([staged])

        return Ticket(self.group.track(works, label), read, label)

    def _write(
        self, full: Tensor, message: Tensor, parts: list[Part], own: SendRows | None
    ) -> None:
        """Code own rows, or with a base their differences to `full`."""
        for index, is_quantized, place, rows in parts:
            part, target = message[place], full[rows]
            own_rows = None if own is None else own.rows[index]
            values = target if own_rows is None else own_rows
            if not is_quantized:
                part.view(full.dtype).copy_(values)
            elif own is not None and own.has_base:
                self.codec.encode(
                    values.to(target.device, torch.float32, copy=True).sub_(target), part
                )
            else:
                self._encode(values, part)

    def _encode(self, values: Tensor, part: Tensor) -> None:
        """Code rows on their own device; the message alone crosses to another."""
        if values.device == part.device:
            self.codec.encode(values, part)
        else:
            message = torch.empty_like(part, device=values.device)
            self.codec.encode(values, message)
            part.copy_(message)

    # reduce

    def reduce_scatter(self, reduction: Reduction) -> Ticket:
        """See `Transport.reduce_scatter`. NaN and Inf decode to NaN."""
        partials, cut, exchange = reduction.partials, reduction.cut, self._exchange
        flags, label, rank = partials[-1], reduction.label, self.group.rank
        if flags.is_complex():
            return self._exact.reduce_scatter(reduction)
        key = (cut, flags.dtype)
        if key not in self._reduced:
            self._reduced[key] = QuantizedMessages(
                cut, cut.pieces, self.codec.nbytes, flags.dtype.itemsize, is_reduced=True
            )
        messages = self._reduced[key]
        sent = exchange.reducing.take(messages.nbytes, torch.uint8, flags.device)
        self._pack(reduction, messages, sent)
        self.group.agree(("reduce quantized", cut.identity), label, sent)
        work, received, inbox = exchange.all_to_all(sent, messages.numels, messages.own_nbytes)
        exchange.count("reduce_scatter", sent.nbytes)

        def average() -> None:
            for part in messages.parts[rank]:
                region, values = part.region, partials[part.region][part.rows]
                own = values if part.is_quantized else values.to(flags.dtype)
                self._average(part, inbox, own, reduction.out[region], reduction.fresh[region])
            exchange.reducing.give([sent, received])

        return Ticket(self.group.track([work], label), average, label)

    def rest(self) -> None:
        """See `Transport.rest`."""
        self._exchange.rest()

    def _pack(self, reduction: Reduction, messages: QuantizedMessages, sent: Tensor) -> None:
        """Write each other rank's message."""
        rank, partials, feedback = self.group.rank, reduction.partials, reduction.feedback
        dtype = partials[-1].dtype
        for receiver, (parts, message) in enumerate(
            zip(messages.parts, sent.split(messages.numels), strict=True)
        ):
            for part in parts if receiver != rank else ():
                values = partials[part.region][part.rows]
                place = message[part.place]
                if part.is_quantized:
                    numels = reduction.cut.numels[part.region]
                    rest = feedback and feedback(part.region, sum(numels) - numels[rank])
                    if rest is None:
                        self.codec.encode(values, place)
                    else:  # it has no rows for this rank, which sends itself nothing
                        start = part.rows.start - (numels[rank] if receiver > rank else 0)
                        rest = rest[start : start + len(values)]
                        encode_with_feedback(self.codec, values, rest, place)
                else:
                    place.view(dtype).copy_(values)

    def _average(
        self, part: Part, inbox: list[Tensor], own: Tensor, target: Tensor, is_fresh: bool
    ) -> None:
        """Average a region over the ranks, summed in fp32 from rank 0 up."""
        is_direct = is_fresh and target.dtype == torch.float32
        total = target.zero_() if is_direct else target.new_zeros(len(own), dtype=torch.float32)
        for sender, message in enumerate(inbox):
            if sender == self.group.rank:
                total.add_(own)
            elif part.is_quantized:
                self.codec.add(message[part.place], total)
            else:
                total.add_(message[part.place].view(own.dtype))
        total.mul_(self._exact.scale)
        if not is_direct:
            target.copy_(total) if is_fresh else target.add_(total)


def _add(codec: Codec, message: Tensor, target: Tensor) -> None:
    if target.dtype == torch.float32:
        codec.add(message, target)
    else:
        total = target.float()
        codec.add(message, total)
        target.copy_(total)
