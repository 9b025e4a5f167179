"""Where blocks of state that rests off the device are stepped.

    host     by the CPU: what rests in CPU memory where it is, what lies on disk in slots
    device   by the device: what rests in CPU memory is streamed through slots there and back

The second moves 12 bytes of an element's fp32 states each way, and steps them at the device's own
bandwidth; it is better where the link is faster than what the host's cores reach (as CPU-offloading
optimizers that stream do; onefold.build.stepping measures both).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import local
from typing import Protocol

import torch
from torch import Tensor

from onefold.errors import TierError, expected
from onefold.ledger import Kind, Ledger
from onefold.tier.slots import Room, SlotPool

NUM_STREAMS = 3
"""Blocks on the device at a time, each with a thread: two workers, and whoever waits. While one
comes, another may be stepped, and a third go."""


class StepDevice(Protocol):
    """See the module."""

    @property
    def is_queued(self) -> bool:
        """True if copies only have to be asked for: `working` ends when they are done."""
        ...

    def is_at(self, tensor: Tensor, tier: str) -> bool:
        """True if blocks of `tensor`, which rests in `tier`, are stepped where they are."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Blocks will need `nbytes` of room: fail now if there is none, not within a step."""
        ...

    def lend(self, nbytes: int) -> AbstractContextManager[Room]:
        """Room for one block, for the time of a `with` block."""
        ...

    def working(self) -> AbstractContextManager[None]:
        """Around all that is done for one block; behind it everything is where it belongs."""
        ...


class HostStep:
    """The CPU steps."""

    is_queued = False

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots

    def is_at(self, tensor: Tensor, tier: str) -> bool:
        """See `StepDevice.is_at`: whatever lies in CPU memory."""
        return tensor.device.type == "cpu"

    def reserve(self, nbytes: int) -> None:
        """See `StepDevice.reserve`: the system gives the host's memory as it is touched."""

    def lend(self, nbytes: int) -> AbstractContextManager[Room]:
        """See `StepDevice.lend`."""
        return self._slots.lend(nbytes)

    def working(self) -> AbstractContextManager[None]:
        """See `StepDevice.working`: nothing runs on by itself."""
        return nullcontext()


class DeviceStep:
    """The device steps. Each thread has a stream of its own, so that copies run beside kernels.

    Where the CPU computes, the device's memory is CPU memory: blocks are copied all the same.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self._device = device
        self._slots = SlotPool(lambda nbytes: DeviceSlot(nbytes, device, ledger))
        self._streams = local()
        self.is_queued = device.type == "cuda"

    def is_at(self, tensor: Tensor, tier: str) -> bool:
        """See `StepDevice.is_at`: what rests on the device."""
        return tier == "device"

    def reserve(self, nbytes: int) -> None:
        """See `StepDevice.reserve`. Whatever had this memory before is through with it then."""
        self._slots.reserve(NUM_STREAMS, nbytes)
        if self.is_queued:
            torch.cuda.synchronize(self._device)

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[Room]:
        """See `StepDevice.lend`; what `reserve` has taken."""
        with self._slots.lend(nbytes) as slot:
            try:
                yield slot
            finally:  # the next thread has a stream of its own, which knows nothing of this one's
                self._finish()

    @contextmanager
    def working(self) -> Iterator[None]:
        """See `StepDevice.working`: the host waits for this thread's stream, and for no other."""
        stream = self._stream()
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            try:
                yield
            finally:
                self._finish()

    def _stream(self) -> torch.cuda.Stream | None:
        """This thread's, if there are streams."""
        stream: torch.cuda.Stream | None = getattr(self._streams, "stream", None)
        if stream is None and self.is_queued:
            stream = self._streams.stream = torch.cuda.Stream(self._device)
        return stream

    def _finish(self) -> None:
        stream = self._stream()
        if stream is not None:
            stream.synchronize()


class DeviceSlot:
    """One piece of the device's memory."""

    __slots__ = ("_flat", "_ledger", "nbytes")

    def __init__(self, nbytes: int, device: torch.device, ledger: Ledger) -> None:
        self.nbytes = 0
        self._ledger = ledger
        try:
            self._flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch's own want of memory is one
            raise TierError(
                expected(
                    f"{nbytes:,} bytes on {device} for states on their way through it",
                    str(error).splitlines()[0],
                    hint='Offload(step="cpu"), or smaller micro-batches',
                )
            ) from error
        self.nbytes = nbytes
        ledger.add(Kind.STAGING, "device", nbytes)

    def __del__(self) -> None:
        self._ledger.add(Kind.STAGING, "device", -self.nbytes)

    def tensor(self, numel: int, dtype: torch.dtype, start: int = 0) -> Tensor:
        """Its bytes from `start` as a flat tensor [numel]."""
        return self._flat[start : start + numel * dtype.itemsize].view(dtype)
