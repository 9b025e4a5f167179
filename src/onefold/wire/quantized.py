"""A transport that quantizes its messages: fewer bytes on the link, rounded values.

    gather           own rows -> message -> every rank reads all messages into the full buffer
    reduce_scatter   a message for every rank -> each sums the messages that it received, in fp32

A message is quantized once and read once, so rounding does not add up as along a ring. Only
matrices are quantized; vectors (norms, biases), scalars and flags are few bytes and travel exactly,
in the same message; messages of complex numbers are exact. A rank's own part of a sum does not
travel and is not rounded.

On a GPU each message is one launch on either side, where there are kernels (wire/fused.py).
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onefold.layout.messages import Part, QuantizedMessages
from onefold.wire.codec import Codec, encode_with_feedback
from onefold.wire.fused import DTYPES, FusedCodec, MessageRow, address, kernels_for
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
        self._fused = FusedCodec(codec)
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
        staged = exchange.gathering.take_buffer(messages.nbytes, torch.uint8, full.device)
        is_difference = own is not None and own.has_base
        self._encode_own(full, staged[slice(*messages.spans[rank])], messages.parts[rank], own)
        self.group.agree(("gather quantized", cut.identity), label, staged)
        works = exchange.together(full.device, lambda: exchange.all_gather(staged, messages.spans))
        exchange.count("gather", messages.numels[rank] * (self.group.world_size - 1))

        def read() -> None:
            self._decode_all(full, messages, staged, adds=is_difference)
            exchange.gathering.give([staged])

        return Ticket(self.group.track(works, label), read, label)

    def _decode_all(
        self, full: Tensor, messages: QuantizedMessages, staged: Tensor, *, adds: bool
    ) -> None:
        """Decode the messages of all ranks over `full`, or add them to it."""
        if kernels_for(full.device) is not None:
            rows = [
                self._message_row(
                    part, address(staged, start), address(full, part.rows.start), full.dtype
                )
                for parts, (start, _) in zip(messages.parts, messages.spans, strict=True)
                for part in parts
            ]
            if self._fused.decode(rows, full.device, full.dtype, adds=adds):
                return None if full.is_inference() else increment_version(full)
        for parts, message in zip(messages.parts, staged.split(messages.numels), strict=True):
            for _, is_quantized, place, rows in parts:
                part, target = message[place], full[rows]
                if not is_quantized:
                    target.copy_(part.view(full.dtype))
                elif adds:
                    _add(self.codec, part, target)
                else:
                    self.codec.decode(part, target)
        return None

    def _message_row(
        self, part: Part, message: int, values: int, dtype: torch.dtype, **others: int
    ) -> MessageRow:
        """One part of a message that begins at an address, and its values at another."""
        numel, is_narrow = part.rows.stop - part.rows.start, int(dtype == torch.bfloat16)
        return self._fused.row(
            numel, message + part.place.start, is_quantized=part.is_quantized, values=values,
            is_narrow=is_narrow, **others,
        )  # fmt: skip

    def _encode_own(
        self, full: Tensor, message: Tensor, parts: list[Part], own: SendRows | None
    ) -> None:
        """Code own rows, or with a base their differences to `full`."""
        if kernels_for(full.device) is not None:
            has_base, table = own is not None and own.has_base, list[MessageRow]()
            for part in parts:
                start, own_rows = part.rows.start, None if own is None else own.rows[part.region]
                values = full[part.rows] if own_rows is None else own_rows
                base = address(full, start) if has_base and part.is_quantized else 0
                if values.device != full.device or values.dtype not in DTYPES:
                    break
                place = address(message), address(values)
                table.append(self._message_row(part, *place, values.dtype, other=base))
            else:
                if self._fused.encode(table, full.device, full.dtype, has_base=has_base):
                    return
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
                self._encode_rows(values, part)

    def _encode_rows(self, values: Tensor, part: Tensor) -> None:
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
        sent = exchange.reducing.take_buffer(messages.nbytes, torch.uint8, flags.device)
        self._pack(reduction, messages, sent)
        self.group.agree(("reduce quantized", cut.identity), label, sent)
        work, received, inbox = exchange.all_to_all(sent, messages.numels, messages.own_nbytes)
        exchange.count("reduce_scatter", sent.nbytes)

        def average() -> None:
            if self._average_at_once(reduction, messages, received):
                exchange.reducing.give([sent, received])
                return
            for part in messages.parts[rank]:
                region, values = part.region, partials[part.region][part.rows]
                own = values if part.is_quantized else values.to(flags.dtype)
                self._average(part, inbox, own, reduction.out[region], reduction.fresh[region])
            exchange.reducing.give([sent, received])

        return Ticket(self.group.track([work], label), average, label)

    def rest(self) -> None:
        self._exchange.rest()

    def _pack(self, reduction: Reduction, messages: QuantizedMessages, sent: Tensor) -> None:
        """Write each other rank's message."""
        rank, partials = self.group.rank, reduction.partials
        dtype, table = partials[-1].dtype, list[MessageRow]()
        if kernels_for(sent.device) is not None and {p.dtype for p in partials} <= set(DTYPES):
            for receiver, (start, _) in enumerate(messages.spans):
                for part in messages.parts[receiver] if receiver != rank else ():
                    values, rest = partials[part.region], self._rest(reduction, part, receiver)
                    places = address(sent, start), address(values, part.rows.start)
                    other = 0 if rest is None else address(rest)
                    table.append(self._message_row(part, *places, values.dtype, other=other))
            if self._fused.encode(table, sent.device, dtype, has_base=False):
                return
        for receiver, (parts, message) in enumerate(
            zip(messages.parts, sent.split(messages.numels), strict=True)
        ):
            for part in parts if receiver != rank else ():
                values = partials[part.region][part.rows]
                place = message[part.place]
                if not part.is_quantized:
                    place.view(dtype).copy_(values)
                elif (rest := self._rest(reduction, part, receiver)) is None:
                    self.codec.encode(values, place)
                else:
                    encode_with_feedback(self.codec, values, rest, place)

    def _rest(self, reduction: Reduction, part: Part, receiver: int) -> Tensor | None:
        """The residual of the part for a rank; None without feedback."""
        if not part.is_quantized or reduction.feedback is None:
            return None
        cut, region = reduction.cut, part.region
        own = cut.own_numels[region]
        rest = reduction.feedback(region, cut.numels[region] - own)
        if rest is None:
            return None
        # it has no rows for this rank, which sends itself nothing
        before = own if receiver > self.group.rank else 0
        return rest[part.rows.start - before : part.rows.stop - before]

    def _average_at_once(
        self, reduction: Reduction, messages: QuantizedMessages, received: Tensor
    ) -> bool:
        """Average all regions by one launch; False if that cannot be."""
        partials, out, rank = reduction.partials, reduction.out, self.group.rank
        targets = {target.dtype for target in out}
        if kernels_for(received.device) is None or len(targets) > 1:
            return False
        if not {p.dtype for p in partials} | targets <= set(DTYPES):
            return False
        table = [
            self._message_row(
                part, address(received), address(partials[part.region], part.rows.start),
                partials[part.region].dtype, other=address(out[part.region]),
                is_fresh=int(reduction.fresh[part.region]),
            )
            for part in messages.parts[rank]
        ]  # fmt: skip
        numbers = self.group.world_size, rank, messages.own_nbytes, self._exact.scale
        dtype, into = partials[-1].dtype, targets.pop()
        if not self._fused.average(table, received.device, dtype, into, numbers):
            return False
        increment_version([target for target in out if not target.is_inference()])
        return True

    def _average(
        self, part: Part, inbox: Iterable[Tensor], own: Tensor, target: Tensor, is_fresh: bool
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
