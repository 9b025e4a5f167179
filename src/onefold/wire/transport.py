"""Transports: how a unit's weights are gathered and its gradients reduced.

    gather           shard [own rows]   -> full  [all rows]      Shard   -> Replicate
    reduce_scatter   partial [all rows] -> shard [own rows, mean] Partial -> Shard

Both work on *regions*: one parameter each, given as its pieces in rank order. What is sent is the
sum of the pieces, nothing else: (N-1)/N of the whole per rank and call when pieces are equal.
Gradients are summed in rank order in the dtype of the result, so that every stage and every cut of
a buffer gives the same bits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onefold.layout.messages import own_part_travels
from onefold.wire import fused
from onefold.wire.codec import add_rows
from onefold.wire.collectives import Group
from onefold.wire.exchange import Exchange
from onefold.wire.message_cut import MessageLayout, TightChunks
from onefold.wire.ticket import DONE, Ticket, Waitable

MEAN_NUMEL = 64 * 1024
"""Elements of one block when a mean is taken: sum and scaling stay in the cache."""


@dataclass(frozen=True, slots=True)
class SendRows:
    """The own rows that a rank quantizes, instead of the rows in the full buffer.

    `rows`: per region a flat tensor of any floating dtype, so that values are rounded once; None
    takes the rows in the full buffer. An exact message has them all, or none. `has_base`: the full
    buffer holds the values that every rank read last, and the message holds differences to them.
    `is_base_kept`: later messages will hold differences; the first one, without a base, is exact.
    """

    rows: list[Tensor | None]
    has_base: bool = False
    is_base_kept: bool = False

    @property
    def starts_base(self) -> bool:
        """True for the exact message that differences will refer to."""
        return self.is_base_kept and not self.has_base


ErrorFeedback = Callable[[int, int], Tensor | None]
"""Return the residual of a region (error feedback, see `onefold.unit.reduction.Feedback`), or None.

Arguments: the region's index, and how many of its elements go to other ranks. The residual is fp32
[these elements, in rank order]; the quantized transport reads it and writes the new one."""


class Reduction(NamedTuple):
    """The means over ranks of this rank's piece of every flat partial.

    The ticket owns the partials until it is waited for.
    """

    partials: Sequence[Tensor]  # by region: [all rows]
    cut: MessageLayout
    out: Sequence[Tensor]  # by region: [own rows]
    fresh: Sequence[bool]  # by region: `out` is overwritten; else the mean is added to it
    label: str
    feedback: ErrorFeedback | None = None  # for transports that quantize


class Transport(Protocol):
    """How regions cross between ranks. Every rank calls with the same cut, in the same order."""

    @property
    def group(self) -> Group: ...

    @property
    def is_quantized(self) -> bool:
        """True if matrices are rounded on the way."""
        ...

    def gather(
        self, full: Tensor, cut: MessageLayout, label: str, own: SendRows | None = None
    ) -> Ticket:
        """Fill every region of the flat `full` from its owners; own pieces are in place already.

        `full` may not be read or freed before the ticket is waited for. `own`: see `SendRows`.
        """
        ...

    def reduce_scatter(self, reduction: Reduction) -> Ticket:
        """Begin a reduction. The sum happens while the ticket is waited for."""
        ...

    def rest(self) -> None:
        """Free the buffers kept for the next message: none follows for now."""
        ...


class LocalTransport:
    """A world of one: everything is already where it belongs."""

    is_quantized = False

    def __init__(self, group: Group) -> None:
        self.group = group

    def gather(
        self, full: Tensor, cut: MessageLayout, label: str, own: SendRows | None = None
    ) -> Ticket:
        """Nothing to do."""
        return DONE

    def reduce_scatter(self, reduction: Reduction) -> Ticket:
        """The mean over one rank is its own gradient."""
        regions = zip(reduction.partials, reduction.out, reduction.fresh, strict=True)
        for partial, target, is_fresh in regions:
            target.copy_(partial) if is_fresh else target.add_(partial)
        return DONE

    def rest(self) -> None:
        """Nothing is kept."""


Mean = tuple[Sequence[Tensor] | Tensor, Tensor, bool]
"""The parts of all ranks in rank order (a matrix, of many ranks), their target, and whether they
replace its values."""

RANKS_AT_ONCE = 16
"""Rows of a narrower dtype that are widened together."""


class Composed:
    """Gathers in place; reduces by all-to-all and a sum in rank order. Messages are exact."""

    is_quantized = False

    def __init__(
        self, exchange: Exchange, *, reduce: torch.dtype = torch.float32, divisor: int = 0
    ) -> None:
        """`divisor`: of sums; 0: the ranks of the group. See `Context.sources`."""
        self.exchange = exchange
        self.group = exchange.group
        self.reduce = reduce
        self.scale = 1.0 / (divisor or self.group.world_size)
        self._sends_own_part = own_part_travels(self.group.world_size)

    # gather

    def gather(
        self, full: Tensor, cut: MessageLayout, label: str, own: SendRows | None = None
    ) -> Ticket:
        exchange = self.exchange
        self.group.agree(("gather", cut.identity), label, full)
        numel = cut.packed_numel
        if cut.medium:
            staged = exchange.gathering.take_buffer(numel, full.dtype, full.device)
        else:  # small regions alone are too few bytes to keep and count
            staged = full.new_empty(numel)

        def begin() -> list[Waitable]:
            works = list[Waitable]()
            for index in cut.large:
                works += exchange.all_gather(full, cut.spans[index])
            for index in cut.counted:
                works.append(exchange.all_gather_counted(full, cut.spans[index]))
            if numel:
                cut.chunks.pack_own(staged, full, () if own is None else own.rows)
                works += exchange.all_gather(staged, cut.chunks.spans)
            return works

        def read() -> None:
            cut.chunks.unpack(full, staged)
            if cut.medium:
                exchange.gathering.give([staged])

        works = exchange.together(full.device, begin)
        itemsize = full.element_size()
        nbytes, control = cut.gather_numel * itemsize, cut.control_numel * itemsize
        exchange.count("gather", nbytes, control, cut.gather_padding * itemsize)
        return Ticket(self.group.track(works, label), read if numel else None, label)

    # reduce

    def reduce_scatter(self, reduction: Reduction) -> Ticket:
        cut, label, partials = reduction.cut, reduction.label, reduction.partials
        out, fresh = reduction.out, reduction.fresh
        self.group.agree(("reduce", cut.identity), label, partials[0])
        received, messages = list[Tensor](), list[Sequence[Tensor] | Tensor]()
        apart = (*cut.large, *cut.counted)
        parts: list[Sequence[Tensor] | Tensor] = []  # of these: every rank's partial of our piece
        packed = self._packed(partials, cut)

        def begin() -> list[Waitable]:
            works: list[Waitable] = []
            for index in apart:
                sent = partials[index], cut.piece_numels(index), cut.own_numels[index]
                parts.append(self._exchange_pieces(*sent, works, received))
            if packed.numel():
                sent = packed, cut.chunks.numels, cut.chunk_numel
                messages.append(self._exchange_pieces(*sent, works, received))
            return works

        works = self.exchange.together(partials[0].device, begin)
        itemsize = packed.element_size()
        nbytes, control = cut.reduce_numel * itemsize, cut.control_numel * itemsize
        self.exchange.count("reduce_scatter", nbytes, control, cut.reduce_padding * itemsize)
        if cut.medium:
            received.append(packed)  # kept for the next reduction, too

        def average() -> None:
            means: list[Mean] = []
            for index, pieces in zip(apart, parts, strict=True):
                if out[index].numel():
                    means.append((pieces, out[index], fresh[index]))
            if messages:
                self._spread_packed(messages[0], cut, out, fresh, means)
            else:
                self._mean_in_rank_order(means)
            parts.clear()
            messages.clear()
            self.exchange.reducing.give(received)

        return Ticket(self.group.track(works, label), average, label)

    def rest(self) -> None:
        self.exchange.rest()

    def _exchange_pieces(
        self, sent: Tensor, numels: Sequence[int], own: int, works: list[Waitable],
        buffers: list[Tensor],
    ) -> Sequence[Tensor] | Tensor:  # fmt: skip
        """Send each rank its piece of `sent`; return every rank's piece for us, in rank order.

        No `numels`: all pieces have `own` elements.
        """
        rank, ours = self.group.rank, None
        if not self._sends_own_part:
            numels = numels or [own] * self.group.world_size
            pieces = sent.split_with_sizes(list(numels))
            ours, sent = pieces[rank], pieces[1 - rank]
            numels = [0 if peer == rank else numel for peer, numel in enumerate(numels)]
        work, received, pieces = self.exchange.all_to_all(sent, numels, own)
        works.append(work)
        buffers.append(received)
        if ours is not None:
            return [ours if number == rank else piece for number, piece in enumerate(pieces)]
        return pieces

    def _packed(self, partials: Sequence[Tensor], cut: MessageLayout) -> Tensor:
        """Pack the shared message: all pieces for rank 0, then for rank 1, ..."""
        like, chunks = partials[0], cut.chunks
        if not cut.packed_numel:
            return like.new_empty(0)
        if isinstance(chunks, TightChunks) and not cut.medium:
            return chunks.pack_small(partials)
        packed = self.exchange.reducing.take_buffer(cut.packed_numel, like.dtype, like.device)
        chunks.pack(packed, partials)
        return packed

    def _spread_packed(
        self,
        messages: Sequence[Tensor] | Tensor,
        cut: MessageLayout,
        out: Sequence[Tensor],
        fresh: Sequence[bool],
        means: list[Mean],
    ) -> None:
        """Average the packed message, and `means`; copy each region's piece to its target."""
        chunks = cut.chunks
        if not isinstance(chunks, TightChunks):
            mean = out[cut.medium[0]].new_empty(cut.chunk_numel)
            self._mean_in_rank_order([*means, (messages, mean, True)])
            _place(chunks.own_parts(mean), cut.medium, out, fresh)
            return
        medium, small = chunks.split_medium(list(messages))
        for index, pieces in zip(cut.medium, medium, strict=True):
            means.append((pieces, out[index], fresh[index]))
        if not cut.small:
            self._mean_in_rank_order(means)
            return
        targets = [out[index] for index in cut.small]
        device = small[0].device
        has_kernels = device.type in fused.DEVICES and fused.kernels_for(device) is not None
        if has_kernels:  # one launch for these, too
            each = zip(*map(chunks.split_small, small), strict=True)
            pairs = zip(each, cut.small, strict=True)
            means += [(pieces, out[i], fresh[i]) for pieces, i in pairs if out[i].numel()]
            self._mean_in_rank_order(means)
            return
        mean = targets[0].new_empty(small[0].numel())
        means.append((small, mean, True))
        self._mean_in_rank_order(means)
        _place(chunks.split_small(mean), cut.small, out, fresh)

    def _mean_in_rank_order(self, means: Sequence[Mean]) -> None:
        """Set each target to the mean of the ranks' parts, or add it; summed from rank 0 up.

        The sum is in the reduce dtype, whatever narrower dtype the parts travelled in. On the CPU
        all passes go over one block before the next, so that only the first one waits for memory.
        """
        if not means:
            return
        sent = means[0][0][0].dtype  # of all: they travelled together
        widens = sent.is_floating_point and sent.itemsize < self.reduce.itemsize
        dtype = self.reduce if widens else sent
        device = means[0][1].device.type
        if device in fused.DEVICES and fused.mean(means, self.scale, dtype):
            return
        if device != "cpu":
            self._mean_by_launches(means, dtype, widens=widens)
            return
        for parts, target, is_fresh in means:
            if isinstance(parts, Tensor):
                self._mean_of_rows(parts, target, is_fresh, dtype)
            else:
                self._mean_of_parts(parts, target, is_fresh, dtype, widens=widens)

    def _mean_of_parts(
        self, parts: Sequence[Tensor], target: Tensor, is_fresh: bool, dtype: torch.dtype, *,
        widens: bool,
    ) -> None:  # fmt: skip
        numel = target.numel()
        is_direct = is_fresh and target.dtype == dtype
        scratch = target if is_direct else target.new_empty(min(MEAN_NUMEL, numel), dtype=dtype)
        passes: Iterable[Sequence[Tensor]] = [(*parts, target)]
        if numel > MEAN_NUMEL:
            passes = zip(*(part.split(MEAN_NUMEL) for part in (*parts, target)), strict=True)
        for first, *rest, into in passes:
            total = into if is_direct else scratch[: into.numel()]
            if widens or not rest:
                total.copy_(first)
            else:
                torch.add(first, rest.pop(0), out=total)
            for part in rest:
                total.add_(part)
            total.mul_(self.scale)
            if not is_direct:
                into.copy_(total) if is_fresh else into.add_(total)

    def _mean_of_rows(
        self, rows: Tensor, target: Tensor, is_fresh: bool, dtype: torch.dtype
    ) -> None:
        """The same of many ranks, one call for all of them.

        Rows of a narrower dtype are widened `RANKS_AT_ONCE` at a time.
        """
        ranks, numel = rows.shape
        for start in range(0, numel, MEAN_NUMEL):
            part, into = rows[:, start : start + MEAN_NUMEL], target[start : start + MEAN_NUMEL]
            total = part[0].to(dtype, copy=True)
            step = ranks if rows.dtype == dtype else RANKS_AT_ONCE
            for first in range(1, ranks, step):
                add_rows(total, part[first : first + step])
            total.mul_(self.scale)
            into.copy_(total) if is_fresh else into.add_(total)

    def _mean_by_launches(self, means: Sequence[Mean], dtype: torch.dtype, *, widens: bool) -> None:
        """The same on a device without kernels: a launch for all regions takes a rank's parts."""
        targets = [target for _, target, _ in means]
        direct = [is_fresh and target.dtype == dtype for _, target, is_fresh in means]
        totals = [
            target if is_direct else torch.empty_like(target, dtype=dtype)
            for target, is_direct in zip(targets, direct, strict=True)
        ]
        wide = [torch.empty_like(total) for total in totals] if widens else []
        first, *rest = zip(*(parts for parts, _, _ in means), strict=True)
        torch._foreach_copy_(totals, list(first))
        for of_rank in map(list, rest):
            if wide:  # one launch adds tensors of one dtype alone
                torch._foreach_copy_(wide, of_rank)
            torch._foreach_add_(totals, wide or of_rank)
        torch._foreach_mul_(totals, self.scale)
        for write, is_fresh in ((torch._foreach_copy_, True), (torch._foreach_add_, False)):
            which = [i for i, (_, _, f) in enumerate(means) if f is is_fresh and not direct[i]]
            if which:
                write([targets[i] for i in which], [totals[i] for i in which])


def _place(
    parts: Sequence[Tensor], which: Sequence[int], out: Sequence[Tensor], fresh: Sequence[bool]
) -> None:
    """Copy the means of some regions to their targets, or add them there."""
    for write, is_wanted in ((torch._foreach_copy_, True), (torch._foreach_add_, False)):
        into, values = list[Tensor](), list[Tensor]()
        for part, index in zip(parts, which, strict=True):
            if fresh[index] is is_wanted:
                into.append(out[index])
                values.append(part)
        if into:
            write(into, values)
