"""Near memory through which far bytes pass: a few slots, used over and over."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from onefold.errors import TierError, expected
from onefold.layout.rows import round_up
from onefold.ledger import Kind, Ledger

HUGE_NBYTES = 2 << 20
"""A huge page. A disk takes a request in a limited number of pieces of consecutive memory: 4 MiB
in 4 KiB pages are too many, and are split. A step from disk: 2.9 instead of 1.5 GB/s."""


class Room(Protocol):
    """Memory that is lent."""

    nbytes: int

    def tensor(self, numel: int, dtype: torch.dtype, start: int = 0) -> Tensor:
        """Its bytes from `start` as a flat tensor [numel]."""
        ...


class NearSlot:
    """One piece of host memory, page-aligned, in huge pages where the system has them."""

    __slots__ = ("_ledger", "_mapping", "_start", "nbytes")

    def __init__(self, nbytes: int, ledger: Ledger) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.nbytes = 0
        self._ledger = ledger
        whole_nbytes = round_up(max(1, nbytes), mmap.PAGESIZE)
        try:
            self._mapping = mmap.mmap(-1, whole_nbytes + HUGE_NBYTES, flags)
        except (OSError, ValueError, MemoryError) as error:
            raise TierError(
                expected(
                    f"{whole_nbytes:,} bytes of host memory for bytes on their way to another tier",
                    str(error),
                    hint="smaller units, or fewer ranks on this host",
                )
            ) from error
        self.nbytes = whole_nbytes
        with suppress(OSError, AttributeError):  # another system
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._start = -whole.data_ptr() % HUGE_NBYTES
        ledger.add(Kind.STAGING, "cpu", self.nbytes, is_mapped=True)

    def __del__(self) -> None:
        self._ledger.add(Kind.STAGING, "cpu", -self.nbytes, is_mapped=True)

    def tensor(self, numel: int, dtype: torch.dtype, start: int = 0) -> Tensor:
        """Its bytes from `start` as a flat tensor [numel]."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        offset = self._start + start
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset)


class SlotPool:
    """Slots of all sizes, kept when given back; as many come to be as are out at once.

    Whoever takes slots does so from a fixed number of threads, for blocks of a fixed size or for
    one unit's rows: so their number is small, and does not grow with the model.
    """

    def __init__(self, make: Callable[[int], Room]) -> None:
        self._free: list[Room] = []
        self._lock = Lock()
        self._make = make

    @staticmethod
    def on_host(ledger: Ledger) -> SlotPool:
        """A pool of `NearSlot`s."""
        return SlotPool(lambda nbytes: NearSlot(nbytes, ledger))

    def take(self, nbytes: int) -> Room:
        """A slot of at least `nbytes`, uninitialised: the smallest that is free, or a new one."""
        with self._lock:
            fitting = [slot for slot in self._free if slot.nbytes >= nbytes]
            if fitting:
                slot = min(fitting, key=lambda slot: slot.nbytes)
                self._free.remove(slot)
                return slot
            if self._free:  # too small: slots of all lengths would come to be many
                self._free.remove(max(self._free, key=lambda slot: slot.nbytes))
            return self._make(nbytes)

    def reserve(self, number: int, nbytes: int) -> None:
        """Have so many slots of at least `nbytes` from now on."""
        for slot in [self.take(nbytes) for _ in range(number)]:
            self.give(slot)

    def give(self, slot: Room) -> None:
        """Back for the next; nothing may use its tensors any more."""
        with self._lock:
            self._free.append(slot)

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[Room]:
        """A slot for the time of a `with` block."""
        slot = self.take(nbytes)
        try:
            yield slot
        finally:
            self.give(slot)
