"""A transport that quantizes its messages: fewer bytes on the link, rounded values.

    gather           own rows -> message -> every rank reads all messages into the full buffer
    reduce_scatter   a message for every rank -> each sums the messages that it received, in fp32

A message is quantized once and read once, so rounding does not add up as along a ring. Only
matrices are quantized; vectors (norms, biases), scalars and flags are few bytes and travel exactly,
in the same message; messages of complex numbers are exact. A rank's own part of a sum does not
travel and is not rounded.

On a GPU each message is one launch on either side, where there are kernels (wire/fused.py). On a
CPU a region takes one call for all ranks, if they are many, or a few (docs/adr/0038).
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onefold.layout.messages import Part, QuantizedMessages, Section, Strided
from onefold.wire.codec import CPU_BLOCK_NUMEL, Codec, add_rows, encode_with_feedback
from onefold.wire.fused import DTYPES, FusedCodec, MessageRow, address, kernels_for
from onefold.wire.message_cut import MessageLayout
from onefold.wire.ticket import Ticket, Waitable
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
        for section in messages.sections:
            if rank >= section.num_whole:
                staged[slice(*section.spans[rank])].zero_()
        parts = [part for section in messages.sections for part in section.own]
        self._encode_own(full, staged, parts, own)
        self.group.agree(("gather quantized", cut.identity), label, staged)

        def begin() -> list[Waitable]:
            works = list[Waitable]()
            for section in messages.sections:
                if section.is_counted:
                    works.append(exchange.all_gather_counted(staged, section.spans))
                else:
                    works += exchange.all_gather(staged, section.spans)
            return works

        works = exchange.together(full.device, begin)
        exchange.count("gather", messages.gather_nbytes, 0, messages.gather_padding)

        def read() -> None:
            self._decode_all(full, messages, staged, adds=is_difference)
            exchange.gathering.give([staged])

        return Ticket(self.group.track(works, label), read, label)

    def _decode_all(
        self, full: Tensor, messages: QuantizedMessages, staged: Tensor, *, adds: bool
    ) -> None:
        """Decode the messages of all ranks over `full`, or add them to it."""
        parts = [part for section in messages.sections for part in section.parts]
        if kernels_for(full.device) is not None:
            rows = [
                self._message_row(part, staged, address(full, part.rows.start), full.dtype)
                for part in parts
            ]
            if self._fused.decode(rows, full.device, full.dtype, adds=adds):
                return None if full.is_inference() else increment_version(full)
        for part in parts:
            count = len(part.ranks)
            message, target = _rows(staged, part.place, count), _rows(full, part.rows, count)
            if not part.is_quantized:
                target.copy_(message.view(full.dtype))
            elif adds:
                _add(self.codec, message, target)
            else:
                self.codec.decode(message, target)
        return None

    def _message_row(
        self, part: Part, buffer: Tensor, values: int, dtype: torch.dtype, **others: int
    ) -> MessageRow:
        """A part whose messages are in a buffer, and the address of its first values."""
        return self._fused.row(
            part.rows.numel, address(buffer, part.place.start), is_quantized=part.is_quantized,
            values=values, is_narrow=int(dtype == torch.bfloat16), ranks=len(part.ranks),
            message_stride=part.place.stride, values_stride=part.rows.stride * dtype.itemsize,
            **others,
        )  # fmt: skip

    def _encode_own(
        self, full: Tensor, staged: Tensor, parts: list[Part], own: SendRows | None
    ) -> None:
        """Code own rows, or with a base their differences to `full`."""
        if kernels_for(full.device) is not None:
            has_base, table = own is not None and own.has_base, list[MessageRow]()
            for part in parts:
                start, own_rows = part.rows.start, None if own is None else own.rows[part.region]
                values = _piece(full, part.rows) if own_rows is None else own_rows
                base = address(full, start) if has_base and part.is_quantized else 0
                if values.device != full.device or values.dtype not in DTYPES:
                    break
                places = staged, address(values), values.dtype
                table.append(self._message_row(part, *places, other=base))
            else:
                if self._fused.encode(table, full.device, full.dtype, has_base=has_base):
                    return
        for part in parts:
            message, target = _piece(staged, part.place), _piece(full, part.rows)
            own_rows = None if own is None else own.rows[part.region]
            values = target if own_rows is None else own_rows
            if not part.is_quantized:
                message.view(full.dtype).copy_(values)
            elif own is not None and own.has_base:
                self.codec.encode(
                    values.to(target.device, torch.float32, copy=True).sub_(target), message
                )
            else:
                self._encode_rows(values, message)

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
        cut, exchange, flags = reduction.cut, self._exchange, reduction.partials[-1]
        if flags.is_complex():
            return self._exact.reduce_scatter(reduction)
        key, label = (cut, flags.dtype), reduction.label
        if key not in self._reduced:
            self._reduced[key] = QuantizedMessages(
                cut, cut.pieces, self.codec.nbytes, flags.dtype.itemsize, is_reduced=True
            )
        messages = self._reduced[key]
        sent = exchange.reducing.take_buffer(messages.nbytes, torch.uint8, flags.device)
        self._pack(reduction, messages, sent)
        self.group.agree(("reduce quantized", cut.identity), label, sent)
        received = list[Tensor]()

        def begin() -> list[Waitable]:
            works = list[Waitable]()
            for section in messages.sections:
                whole = sent[section.spans[0][0] : section.spans[-1][1]]
                work, buffer, _ = exchange.all_to_all(whole, section.numels, section.own_nbytes)
                works.append(work)
                received.append(buffer)
            return works

        works = exchange.together(sent.device, begin)
        exchange.count("reduce_scatter", messages.reduce_nbytes, 0, messages.reduce_padding)

        def average() -> None:
            for section, buffer in zip(messages.sections, received, strict=True):
                if section.own and not self._average_at_once(reduction, section, buffer):
                    for part in section.own:
                        self._average(reduction, section, part, buffer)
            exchange.reducing.give([sent, *received])

        return Ticket(self.group.track(works, label), average, label)

    def rest(self) -> None:
        self._exchange.rest()

    def _pack(self, reduction: Reduction, messages: QuantizedMessages, sent: Tensor) -> None:
        """Write each other rank's message."""
        partials, sections = reduction.partials, messages.sections
        for section in sections:
            if section.num_whole < self.group.world_size:
                sent[section.spans[section.num_whole][0] : section.spans[-1][1]].zero_()
        parts = [part for section in sections for part in section.others]
        dtype, table = partials[-1].dtype, list[MessageRow]()
        if kernels_for(sent.device) is not None and {p.dtype for p in partials} <= set(DTYPES):
            for part in parts:
                values, rest = partials[part.region], self._rest(reduction, part)
                other = {} if rest is None else {
                    "other": address(rest), "other_stride": rest.stride(0) * rest.itemsize
                }  # fmt: skip
                start = address(values, part.rows.start)
                table.append(self._message_row(part, sent, start, values.dtype, **other))
            if self._fused.encode(table, sent.device, dtype, has_base=False):
                return
        for part in parts:
            count = len(part.ranks)
            values = _rows(partials[part.region], part.rows, count)
            message = _rows(sent, part.place, count)
            if not part.is_quantized:
                message.view(dtype).copy_(values)
            elif (rest := self._rest(reduction, part)) is None:
                self.codec.encode(values, message)
            else:
                encode_with_feedback(self.codec, values, rest, message)

    def _rest(self, reduction: Reduction, part: Part) -> Tensor | None:
        """The residuals of a part, a row for each rank; None without feedback."""
        if not part.is_quantized or reduction.feedback is None:
            return None
        cut, region = reduction.cut, part.region
        own = cut.own_numels[region]
        rest = reduction.feedback(region, cut.numels[region] - own)
        if rest is None:
            return None
        # it has no rows for this rank, which sends itself nothing
        before = own if part.ranks.start > self.group.rank else 0
        start, numel, stride = part.rows
        return _rows(rest, Strided(start - before, numel, stride), len(part.ranks))

    def _average_at_once(self, reduction: Reduction, section: Section, received: Tensor) -> bool:
        """Average the regions of a section by one launch; False if that cannot be."""
        partials, out, rank = reduction.partials, reduction.out, self.group.rank
        targets = {target.dtype for target in out}
        if kernels_for(received.device) is None or len(targets) > 1:
            return False
        if not {p.dtype for p in partials} | targets <= set(DTYPES):
            return False
        table = [
            self._message_row(
                _received(section, part), received, address(partials[part.region], part.rows.start),
                partials[part.region].dtype, other=address(out[part.region]),
                is_fresh=int(reduction.fresh[part.region]),
            )
            for part in section.own
        ]  # fmt: skip
        skipped = section.spans.length(rank)
        numbers = self.group.world_size, rank, section.own_nbytes, skipped, self._exact.scale
        dtype, into = partials[-1].dtype, targets.pop()
        if not self._fused.average(table, received.device, dtype, into, numbers):
            return False
        increment_version([target for target in out if not target.is_inference()])
        return True

    def _average(
        self, reduction: Reduction, section: Section, part: Part, received: Tensor
    ) -> None:
        """Average a region over the ranks, summed in fp32 from rank 0 up."""
        region, dtype, rank = part.region, reduction.partials[-1].dtype, self.group.rank
        values, target = _piece(reduction.partials[region], part.rows), reduction.out[region]
        is_fresh = reduction.fresh[region]
        is_direct = is_fresh and target.dtype == torch.float32
        total = target.zero_() if is_direct else target.new_zeros(len(values), dtype=torch.float32)
        inbox = received.view(-1, section.own_nbytes)
        start, numel, _ = _received(section, part).place
        behind = len(inbox) - (self.group.world_size - 1 - rank)
        for index, sent in enumerate((inbox[:rank], inbox[behind:])):
            messages = sent[:, start : start + numel]
            if index:
                total.add_(values if part.is_quantized else values.to(dtype))
            if not len(messages):
                continue
            if part.is_quantized:
                self.codec.add(messages, total)
            else:
                add_rows(total, messages.view(dtype))
        total.mul_(self._exact.scale)
        if not is_direct:
            target.copy_(total) if is_fresh else target.add_(total)


def _rows(flat: Tensor, at: Strided, count: int) -> Tensor:
    """The pieces of some ranks in a flat tensor: [ranks, elements of a piece]."""
    step = flat.stride(0)  # 0 where one element stands for all
    start = flat.storage_offset() + at.start * step
    return flat.as_strided((count, at.numel), (at.stride * step, step), start)


def _piece(flat: Tensor, at: Strided) -> Tensor:
    """The piece of one rank: [elements]."""
    return flat[at.start : at.start + at.numel]


def _received(section: Section, part: Part) -> Part:
    """This rank's part where it lies in the message of every rank."""
    start = part.place.start - section.spans[section.rank][0]
    return part._replace(place=part.place._replace(start=start))


def _add(codec: Codec, message: Tensor, target: Tensor) -> None:
    """Add decoded rows to those of `target`, of any floating dtype."""
    if target.dtype == torch.float32:
        codec.add(message, target)
        return
    step = max(1, CPU_BLOCK_NUMEL // target.shape[1])  # rows that are widened together
    for some, into in zip(message.split(step), target.split(step), strict=True):
        total = into.float()
        codec.add(some, total)
        into.copy_(total)
