"""A transport that tells an observer when a transfer begins, ends and is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock

import torch.distributed as dist

from onefold.layout.ledger import Ledger
from onefold.layout.observer import Observer, Span, Stream, watched
from onefold.wire.peers import works_of
from onefold.wire.ticket import Ticket
from onefold.wire.transport import Transport, Wrapped

_SHOWN = {"gather": (Stream.GATHER, "unpack"), "reduce_scatter": (Stream.REDUCE, "average")}
"""The stream of a collective, and the verb for its last step."""


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
        """See `Wrapped.wrap`."""
        observer = self._ledger.observer
        if observer is None:
            return start()
        stream, verb = _SHOWN[collective]
        span, sent = observer.begin(stream, collective, unit), self._sent()
        ticket = start()
        transfer = _Transfer(span, self._sent() - sent)
        if self._is_queued:
            return ticket.then(transfer.end)
        transfer.follow([work for each in ticket.works for work in works_of(each)])
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
            work.get_future().add_done_callback(self._note)

    def _note(self, _: object) -> None:
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
        """See `onefold.wire.ticket.Work`."""
        with watched(self._observer, Stream.COMPUTE, "wait", self._unit), suppress(RuntimeError):
            for work in self._ticket.works:  # an error comes again below, with its label
                work.wait()
        self._transfer.end()
        with watched(self._observer, Stream.COMPUTE, self._verb, self._unit):
            self._ticket.wait()

    def is_completed(self) -> bool:
        """See `onefold.wire.ticket.Work`."""
        return self._ticket.done
