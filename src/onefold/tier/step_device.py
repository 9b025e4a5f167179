"""Devices that step blocks of offloaded state: the CPU, or the computing device.

    host     the CPU steps: state in CPU memory in place, state on disk in slots
    device   the device steps: state in CPU memory streams through slots there and back

Streaming moves 12 bytes of an element's fp32 states each way, and steps at the device's own
bandwidth. It is better where the link is faster than the host's cores (as in CPU-offloading
optimizers that stream); onefold.compose.stepping measures both.

[Note: streams of blocks] Beside an accelerator each thread has a stream, so that the copies of one
block run beside the kernels and copies of others. The stream waits for the gradients, not the host.
The host waits once a block: where the device steps, at the block's end; where the CPU steps, for
the gradient. The new weights then leave by the stream, and whoever waits for the step waits for
them. See docs/adr/0014.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Semaphore, local

import torch
from torch import Tensor

from onefold.layout.ledger import Ledger
from onefold.tier import accelerator
from onefold.tier.slots import Room, SlotPool, device_room
from onefold.tier.workers import NUM_DISK_SLOTS

NUM_STREAMS = 3
"""Blocks on the device at a time. While one arrives, another is stepped, and a third leaves.

As many workers take blocks. A thread that waits for blocks takes the place of one."""

STREAMED_NBYTES = 12
"""Bytes of an element's fp32 states, each way at once, where the device steps them."""


class _Lane:
    """The streams on which threads copy blocks; there are none where the CPU computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = local()
        self.is_queued = device.type != "cpu"
        """True if copies run asynchronously, so that the host cannot see when they do."""

    @contextmanager
    def working(self, ready: accelerator.Event | None) -> Iterator[None]:
        """Enclose all work on one block, on this thread's stream, which begins behind `ready`.

        After an error no copy is under way any more.
        """
        stream = self.stream()
        if stream is None:
            yield
            return
        with stream:
            if ready is not None:
                stream.wait_event(ready)
            try:
                yield
            except BaseException:
                stream.synchronize()
                raise

    def stream(self) -> accelerator.Stream | None:
        """Return this thread's stream, None on the CPU."""
        stream: accelerator.Stream | None = getattr(self._streams, "stream", None)
        if stream is None and self.is_queued:
            stream = self._streams.stream = accelerator.new(self._device)
        return stream

    def await_stream(self) -> None:
        """Wait, on the host, for the copies and kernels of this thread's stream."""
        stream = self.stream()
        if stream is not None:
            stream.synchronize()


class HostStep(_Lane):
    """Steps on the CPU. Gradients on an accelerator pass through page-locked slots."""

    def __init__(self, slots: SlotPool, device: torch.device) -> None:
        super().__init__(device)
        self._slots = slots

    def is_at(self, tensor: Tensor, tier: str) -> bool:
        """True if blocks of `tensor`, which rests in `tier`, are stepped in place."""
        return tensor.device.type == "cpu"

    def reserve(self, slots: Sequence[int]) -> None:
        """Allocate slots for blocks on disk now, of these bytes at most: as many as are in use.

        A short block takes a long slot where no other is free, so all are as long as the longest.
        The system provides their memory as it is touched.
        """
        self._slots.reserve(min(NUM_DISK_SLOTS, len(slots)), max(slots))

    @contextmanager
    def lend(self, nbytes: int, *, fills_by_host: bool) -> Iterator[Room]:
        """Lend memory for one block, for the time of a `with` block.

        `fills_by_host`: the disk fills it, not this thread's stream alone.
        """
        slot = self._slots.take_slot(nbytes, None if fills_by_host else self.stream())
        try:
            yield slot
        finally:
            self._slots.give(slot)

    def arrived(self) -> None:
        """What a block needs was queued: wait until the CPU may read it."""
        self.await_stream()

    def leave(self, slot: Room | None) -> accelerator.Event | None:
        """What a block changed was queued: return the event of its end, None if it is over."""
        if slot is None or not self.is_queued:
            return None
        event = accelerator.record(self._device)
        slot.leave_by(event)
        return event


class DeviceStep(_Lane):
    """Steps on the device.

    Where the CPU computes, the device's memory is CPU memory: blocks are copied all the same.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        super().__init__(device)
        self._slots = SlotPool(lambda nbytes: device_room(nbytes, device, ledger))
        self.places = Semaphore(NUM_STREAMS)

    def is_at(self, tensor: Tensor, tier: str) -> bool:
        return tier == "device"

    def reserve(self, slots: Sequence[int]) -> None:
        """Allocate slots of these bytes at most now, so that no step fails for lack of memory."""
        # a block waits for what used this memory before
        self._slots.reserve(NUM_STREAMS, max(slots))

    @contextmanager
    def lend(self, nbytes: int, *, fills_by_host: bool) -> Iterator[Room]:
        with self.places, self._slots.lend(nbytes) as slot:
            yield slot

    def arrived(self) -> None:
        """See `HostStep.arrived`: kernels are queued behind the copies."""

    def leave(self, slot: Room | None) -> accelerator.Event | None:
        """See `HostStep.leave`. The host waits: the next thread's stream waits for no other."""
        self.await_stream()
        return None


StepDevice = HostStep | DeviceStep
"""Steps blocks of state; see the module."""
