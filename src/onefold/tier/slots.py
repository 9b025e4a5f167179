"""Staging memory between tiers: a few slots that are used over and over.

[Note: locking] The lock of a pool guards its list of free slots. A new slot is allocated under it,
so that two threads do not replace the same one. A slot may end on any thread, in any garbage
collection: its `__del__` takes only the ledger's lock, which is reentrant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

from onefold.errors import TierError
from onefold.layout.ledger import Kind, Ledger
from onefold.tier import accelerator
from onefold.tier.cpu import page_locked

HUGE_NBYTES = 2 << 20
"""A huge page. A disk request holds a limited number of pieces of consecutive memory: 4 MiB in
4 KiB pages exceed it, and are split. A step from disk: 2.9 instead of 1.5 GB/s."""


class Room:
    """Memory [nbytes, uint8] of a tier, counted in the ledger while it lives."""

    __slots__ = ("_flat", "_kind", "_ledger", "_tier", "leaving", "nbytes")

    def __init__(self, flat: Tensor, tier: str, ledger: Ledger, kind: Kind = Kind.STAGING) -> None:
        self._flat = flat
        self._tier = tier
        self._ledger = ledger
        self._kind = kind
        self.nbytes = flat.nbytes
        self.leaving: accelerator.Event | None = None  # the last copies from here end with it
        ledger.add(kind, tier, self.nbytes, is_mapped=tier == "cpu")

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_over():
            self._ledger.add(self._kind, self._tier, -self.nbytes, is_mapped=self._tier == "cpu")

    def leave_by(self, event: accelerator.Event) -> None:
        """Copies from here end with `event`: the next user waits for it."""
        self.leaving = event

    def tensor(self, numel: int, dtype: torch.dtype, start: int = 0) -> Tensor:
        """Return the bytes from `start` as a flat tensor [numel]."""
        return self._flat[start : start + numel * dtype.itemsize].view(dtype)


def host_room(nbytes: int, ledger: Ledger) -> Room:
    """Allocate host memory, page-aligned, in huge pages where the system has them."""
    try:
        pages, _ = page_locked(nbytes, HUGE_NBYTES)  # not locked: copies to a device are slower
    except (OSError, ValueError, MemoryError, RuntimeError) as error:
        wanted = f"{nbytes:,} bytes of CPU memory for blocks that pass between tiers"
        hint = "smaller units, or fewer ranks on this host"
        raise TierError(wanted, str(error), hint=hint) from error
    return Room(pages, "cpu", ledger)


def device_room(nbytes: int, device: torch.device, ledger: Ledger) -> Room:
    """Allocate memory of the computing device."""
    try:
        flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        wanted = f"{nbytes:,} bytes on {device} for blocks of states that it steps"
        hint = 'Offload(step="cpu"), or smaller micro-batches'
        raise TierError(wanted, str(error).splitlines()[0], hint=hint) from error
    return Room(flat, "device", ledger)


class SlotPool:
    """Slots of all sizes, kept when given back: as many as were taken at the same time.

    Callers take slots from a fixed number of threads, for blocks of a fixed size or for one unit's
    rows. So their number is small and does not grow with the model.
    """

    def __init__(self, make: Callable[[int], Room]) -> None:
        self._free: list[Room] = []
        self._lock = Lock()
        self._make = make

    @staticmethod
    def on_host(ledger: Ledger) -> SlotPool:
        """Return a pool of host memory."""
        return SlotPool(lambda nbytes: host_room(nbytes, ledger))

    def take_slot(self, nbytes: int, stream: accelerator.Stream | None = None) -> Room:
        """Take the smallest free slot of at least `nbytes`, or a new one; uninitialised.

        Copies that leave it still are waited for: by `stream`, if there is one, else by the host.
        """
        slot = self._taken(nbytes)
        leaving, slot.leaving = slot.leaving, None
        if leaving is not None:
            accelerator.await_event(leaving) if stream is None else stream.wait_event(leaving)
        return slot

    def _taken(self, nbytes: int) -> Room:
        with self._lock:
            fitting = [slot for slot in self._free if slot.nbytes >= nbytes]
            if fitting:
                slot = min(fitting, key=lambda slot: slot.nbytes)
                self._free.remove(slot)
                return slot
            if self._free:  # the new slot replaces one that is too small
                self._free.sort(key=lambda slot: slot.nbytes)
                leaving = self._free.pop().leaving  # its memory is free before the new one is made
                if leaving is not None:
                    accelerator.await_event(leaving)
            return self._make(nbytes)

    def reserve(self, number: int, nbytes: int) -> None:
        """Allocate so many slots of at least `nbytes` now."""
        for slot in [self.take_slot(nbytes) for _ in range(number)]:
            self.give(slot)

    def give(self, slot: Room) -> None:
        """Return a slot. Nothing may use its tensors any more."""
        with self._lock:
            self._free.append(slot)

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[Room]:
        """Lend a slot for the time of a `with` block."""
        slot = self.take_slot(nbytes)
        try:
            yield slot
        finally:
            self.give(slot)
