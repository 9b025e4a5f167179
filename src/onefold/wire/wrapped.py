"""Transports around another one: `Timed` tells an observer of transfers, `Streamed` runs them on
device streams of their own, so that they run beside compute.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.layout.ledger import Ledger
from onefold.layout.observer import Observer, Span, Stream, watched
from onefold.tier import accelerator
from onefold.wire.message_cut import MessageLayout
from onefold.wire.peers import works_of
from onefold.wire.ticket import Ticket
from onefold.wire.transport import Reduction, SendRows, Transport

_SHOWN = {"gather": (Stream.GATHER, "unpack"), "reduce_scatter": (Stream.REDUCE, "average")}
"""The stream of a collective, and the verb for its last step."""


class Wrapped(ABC):
    """Another transport with something `wrap` each transfer."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.group = inner.group
        self.is_quantized = inner.is_quantized

    @abstractmethod
    def wrap(self, collective: str, unit: str, start: Callable[[], Ticket]) -> Ticket:
        """Have `start` begin a "gather" or "reduce_scatter" of a unit."""

    def gather(
        self, full: Tensor, cut: MessageLayout, label: str, own: SendRows | None = None
    ) -> Ticket:
        return self.wrap("gather", cut.name, partial(self.inner.gather, full, cut, label, own))

    def reduce_scatter(self, reduction: Reduction) -> Ticket:
        start = partial(self.inner.reduce_scatter, reduction)
        return self.wrap("reduce_scatter", reduction.cut.name, start)

    def rest(self) -> None:
        self.inner.rest()


class Timed(Wrapped):
    """Times the transfers of another transport.

    A transfer's span ends when its last collective is complete; gloo's own threads report that at
    once. The training thread's time on a ticket is two more spans: "wait" for the transfer, then
    "unpack" or "average". With `is_queued` (a stream of a GPU) the host waits for nothing, and the
    span ends where the stream does.
    """

    def __init__(self, inner: Transport, ledger: Ledger, *, is_queued: bool = False) -> None:
        super().__init__(inner)
        self._ledger = ledger
        self._is_queued = is_queued

    def wrap(self, collective: str, unit: str, start: Callable[[], Ticket]) -> Ticket:
        observer = self._ledger.observer
        if observer is None:
            return start()
        stream, verb = _SHOWN[collective]
        span, sent = observer.begin(stream, collective, unit), self._sent()
        ticket = start()
        transfer = _Transfer(span, self._sent() - sent)
        if self._is_queued:
            return ticket.then(transfer.end)
        transfer.follow([work for works in ticket.works for work in works_of(works)])
        return Ticket([_Awaited(ticket, transfer, observer, unit, verb)])

    def _sent(self) -> int:
        return sum(traffic.sent_nbytes for traffic in self._ledger.traffic.values())


class _Transfer:
    """Ends a span once, with the last of its collectives."""

    def __init__(self, span: Span, nbytes: int) -> None:
        self._span = span
        self._nbytes = nbytes
        self._num_left = 0
        self._counting = Lock()

    def follow(self, works: Sequence[dist.Work]) -> None:
        self._num_left = len(works)
        for work in works:
            work.get_future().add_done_callback(self._note_end)

    def _note_end(self, _: object) -> None:
        with self._counting:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self.end()

    def end(self) -> None:
        """End the span; a span that has ended stays as it is."""
        self._span.end(self._nbytes)


class _Awaited:
    """A ticket as the one work of another ticket, so that its wait is timed."""

    def __init__(
        self, ticket: Ticket, transfer: _Transfer, observer: Observer, unit: str, verb: str
    ) -> None:
        self._ticket = ticket
        self._transfer = transfer
        self._observer = observer
        self._unit = unit
        self._verb = verb

    def wait(self) -> None:
        with watched(self._observer, Stream.COMPUTE, "wait", self._unit), suppress(RuntimeError):
            for work in self._ticket.works:  # an error comes again below, with its label
                work.wait()
        self._transfer.end()
        with watched(self._observer, Stream.COMPUTE, self._verb, self._unit):
            self._ticket.wait()

    def is_completed(self) -> bool:
        return self._ticket.done


class Streamed(Wrapped):
    """Runs another transport on one stream for gathers and one for reductions.

    The side stream first waits for what compute has queued (the buffers' last uses), and the
    ticket's `wait` makes compute's stream wait for the side stream; the host blocks for neither.
    The ticket keeps its tensors until then, so no block is recorded on a second stream and the
    caching allocator can reuse it at once.
    """

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(inner)
        self._streams = {name: accelerator.new(device) for name in ("gather", "reduce_scatter")}

    def wrap(self, collective: str, unit: str, start: Callable[[], Ticket]) -> Ticket:
        stream, watch = self._streams[collective], self.group.watch
        if watch is not None:
            watch.check()
        stream.wait_stream(accelerator.current(stream.device))
        with stream:
            start().wait()  # on a GPU this queues the rest on `stream` and returns
            finished = accelerator.record(stream.device)
        if watch is not None:
            watch.note(finished, f"{collective} of unit {unit!r}", stream.device)
        return Ticket([_Queued(finished, stream.device, start)])


class _Queued:
    """Work on a side stream: waiting for it makes compute's stream wait, never the host."""

    def __init__(self, event: accelerator.Event, device: torch.device, kept: object) -> None:
        self._event = event
        self._device = device
        self._kept = kept  # tensors of compute's stream, whose memory it would reuse meanwhile

    def wait(self) -> None:
        accelerator.wait(self._event, self._device)
        self._kept = None

    def is_completed(self) -> bool:
        """True once the device has completed it."""
        return self._event.query()
