"""Devices that step blocks of offloaded state: the CPU, or the computing device.

    host     the CPU steps: state in CPU memory in place, state on disk in slots
    device   the device steps: state in CPU memory streams through slots there and back

Streaming moves 12 bytes of an element's fp32 states each way, and steps at the device's own
bandwidth. It is better where the link is faster than the host's cores (as in CPU-offloading
optimizers that stream); onefold.compose.stepping measures both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import local

import torch
from torch import Tensor

from onefold.layout.ledger import Ledger
from onefold.tier import accelerator
from onefold.tier.slots import Room, SlotPool, device_room

NUM_STREAMS = 3
"""Blocks on the device at a time, each with a thread: two workers and the waiting thread. While
one block arrives, another is stepped, and a third leaves."""

STREAMED_NBYTES = 12
"""Bytes of an element's fp32 states, each way at once, where the device steps them."""


class HostStep:
    """Steps on the CPU."""

    is_queued = False
    """True if copies run asynchronously: the end of `working` waits for them."""

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots

    def is_at(self, tensor: Tensor, tier: str) -> bool:
        """True if blocks of `tensor`, which rests in `tier`, are stepped in place."""
        return tensor.device.type == "cpu"

    def reserve(self, nbytes: int) -> None:
        """Do nothing: the system provides host memory as it is touched."""

    def lend(self, nbytes: int) -> AbstractContextManager[Room]:
        """Lend memory for one block, for the time of a `with` block."""
        return self._slots.lend(nbytes)

    def working(self) -> AbstractContextManager[None]:
        """Enclose all work on one block; at the end every copy has finished."""
        return nullcontext()


class DeviceStep:
    """Steps on the device. Each thread has a stream, so that copies run beside kernels.

    Where the CPU computes, the device's memory is CPU memory: blocks are copied all the same.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self._device = device
        self._slots = SlotPool(lambda nbytes: device_room(nbytes, device, ledger))
        self._streams = local()
        self.is_queued = device.type != "cpu"

    def is_at(self, tensor: Tensor, tier: str) -> bool:
        """See `HostStep.is_at`."""
        return tier == "device"

    def reserve(self, nbytes: int) -> None:
        """Allocate the blocks of `nbytes` now, so that no step fails for lack of memory."""
        self._slots.reserve(NUM_STREAMS, nbytes)  # a block waits for what used this memory before

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[Room]:
        """See `HostStep.lend`."""
        with self._slots.lend(nbytes) as slot:
            try:
                yield slot
            finally:  # the next thread has its own stream, which does not wait for this one
                self._finish()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run on this thread's stream; at the end the host waits for that stream alone."""
        stream = self._stream()
        with stream if stream is not None else nullcontext():
            try:
                yield
            finally:
                self._finish()

    def _stream(self) -> accelerator.Stream | None:
        """Return this thread's stream, None on the CPU."""
        stream: accelerator.Stream | None = getattr(self._streams, "stream", None)
        if stream is None and self.is_queued:
            stream = self._streams.stream = accelerator.new(self._device)
        return stream

    def _finish(self) -> None:
        stream = self._stream()
        if stream is not None:
            stream.synchronize()


StepDevice = HostStep | DeviceStep
"""Steps blocks of state; see the module."""
