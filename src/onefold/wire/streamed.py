"""Collectives on device streams of their own, so that they run beside compute."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onefold.wire.ticket import Ticket
from onefold.wire.transport import Transport, Wrapped


class Streamed(Wrapped):
    """Runs another transport on one stream for gathers and one for reductions.

    The side stream first waits for what compute has queued (the buffers' last uses), and the
    ticket's `wait` makes compute's stream wait for the side stream; the host blocks for neither.
    The ticket keeps its tensors until then, so no block is recorded on a second stream and the
    caching allocator can reuse it at once.
    """

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(inner)
        self._streams = {name: torch.Stream(device) for name in ("gather", "reduce_scatter")}

    def wrap(self, collective: str, unit: str, start: Callable[[], Ticket]) -> Ticket:
        """See `Wrapped.wrap`."""
        return _beside(self._streams[collective], start)


def _beside(stream: torch.Stream, start: Callable[[], Ticket]) -> Ticket:
    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    with stream:
        start().wait()  # on a GPU this queues the rest on `stream` and returns
        finished = torch.Event(stream.device)
        finished.record(stream)
    return Ticket([_Queued(finished, stream.device, start)])


class _Queued:
    """Work on a side stream: waiting for it makes compute's stream wait, never the host."""

    def __init__(self, event: torch.Event, device: torch.device, kept: object) -> None:
        self._event = event
        self._device = device
        self._kept = kept  # tensors of compute's stream, whose memory it would reuse meanwhile

    def wait(self) -> None:
        """See `onefold.wire.ticket.Work`."""
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        self._kept = None

    def is_completed(self) -> bool:
        """True once the device has completed it."""
        return self._event.query()
