"""Tiers for activations and KV caches: bytes in leased places, moved beside the compute.

[Note: threads of a transfer] Workers and the waiting thread share the pieces of a disk transfer;
each piece runs once (tier/workers.py). Pieces hold the lease of their place (tier/area.py), even if
no thread waits for them. So no late write reaches a place that another lease has. Locks guard
counters alone. The callback of a write runs outside of them, as it may free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

from onefold.errors import TierError
from onefold.layout.ledger import Kind, Ledger
from onefold.tier import accelerator
from onefold.tier.area import Area, Lease
from onefold.tier.cpu import HostStore
from onefold.tier.device import return_free_memory
from onefold.tier.disk import SwapFile, page_view
from onefold.tier.slots import SlotPool
from onefold.tier.store import PAGE_NBYTES, whole_pages
from onefold.tier.workers import Task, Workers

PIECE_NBYTES = 4 << 20
"""Bytes of one disk request: large enough for the disk's full rate."""

ARENA_NBYTES = 256 << 20
"""Page-locked memory registered at a time. Registering stalls the device, so it should be rare."""

TRIM_NBYTES = 64 << 20
"""Bytes moved between two trims of the heap, each of which takes 10-20 ms. Freed activations lie
between small blocks that stay: without trimming, a forward reused only half of the memory that it
had freed (measured: 1095 MB resident after it, with trimming 574)."""


class DiskScratch:
    """Places in files on one or several paths, used in turn.

    Workers move pieces past the page cache. On the CPU, reads go straight to the new memory;
    writes, and all transfers of a CUDA device, pass through page-aligned slots.
    """

    name = "disk"

    def __init__(
        self, files: Sequence[SwapFile], workers: Workers, slots: SlotPool, device: torch.device,
        ledger: Ledger, kind: Kind = Kind.ACTIVATION,
    ) -> None:  # fmt: skip
        self._files = list(files)
        self._workers = workers
        self._slots = slots
        self._device = device
        self._stream = accelerator.new(device) if device.type != "cpu" else None
        self._area = Area(self.name, ledger, kind)
        self._moved_nbytes = 0  # since the heap was trimmed
        self._counting = Lock()
        self._turn = 0

    def lease_place(self, nbytes: int) -> Lease:
        """Lease a place for `nbytes`. Raises `TierError` when the tier has no room."""
        full = whole_pages(nbytes)
        ground = self._turn % len(self._files)
        self._turn += 1
        grow = self._files[ground].extend
        return self._area.take_or_grow(full, ground, lambda: (ground, grow(full), full))

    def begin_write(
        self, lease: Lease, source: Tensor, then: Callable[[], None], at: int = 0
    ) -> Pieces:
        """Begin to write `source` [nbytes, uint8], which the transfer keeps alive.

        A worker or the waiting thread calls `then` when `source` may be freed. The first byte goes
        to byte `at` of the place, a whole page.
        """
        file, ready, offset = self._files[lease.ground], self._mark(), lease.offset + at

        def piece(start: int, stop: int) -> None:
            part = source[start:stop]
            if _is_whole_pages(part):
                file.write_block(offset + start, page_view(part))
                return
            with self._slots.lend(PIECE_NBYTES) as slot:
                staged = slot.tensor(stop - start, torch.uint8)
                self._copy(staged, part, ready)
                file.write_block(offset + start, page_view(staged))

        def written() -> None:
            then()
            self._note_moved(lease.nbytes)

        return Pieces(self._workers, len(source), piece, written)

    def begin_read(self, lease: Lease, nbytes: int) -> tuple[Tensor, Pieces]:
        """Begin to read into new memory [nbytes, uint8] of the computing device."""
        into = self._allocate(nbytes)
        return into, self._read_pieces(lease, into, 0, lambda: self._note_moved(nbytes))

    def read_into(self, lease: Lease, into: Tensor, at: int = 0) -> Pieces:
        """Begin to fill `into` [nbytes, uint8], page-aligned, from byte `at` of the place."""
        return self._read_pieces(lease, into, at, None)

    def _read_pieces(
        self, lease: Lease, into: Tensor, at: int, then: Callable[[], None] | None
    ) -> Pieces:
        file, ready, offset = self._files[lease.ground], self._mark(), lease.offset + at

        def piece(start: int, stop: int) -> None:
            if self._stream is None:
                file.read_block(offset + start, page_view(into[start:stop]))
                return
            with self._slots.lend(PIECE_NBYTES) as slot:
                staged = slot.tensor(stop - start, torch.uint8)
                file.read_block(offset + start, page_view(staged))
                self._copy(into[start:stop], staged, ready)

        return Pieces(self._workers, len(into), piece, then)

    def _note_moved(self, nbytes: int) -> None:
        """Count bytes that left CPU memory; trim the heap now and then, beside the compute."""
        if self._stream is not None:
            return
        with self._counting:
            self._moved_nbytes += nbytes
            is_due = self._moved_nbytes >= TRIM_NBYTES
            if is_due:
                self._moved_nbytes = 0
        if is_due:
            return_free_memory()

    def _allocate(self, nbytes: int) -> Tensor:
        """Allocate memory [nbytes]: on the CPU page-aligned, and up to the end of a page."""
        if self._stream is not None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        room = torch.empty(whole_pages(nbytes) + PAGE_NBYTES, dtype=torch.uint8)
        start = -room.data_ptr() % PAGE_NBYTES
        return room[start : start + nbytes]

    def _mark(self) -> accelerator.Event | None:
        """Record when the computing stream has filled memory, or freed it to be filled."""
        if self._stream is None:
            return None
        return accelerator.record(self._device)

    def _copy(self, into: Tensor, source: Tensor, ready: accelerator.Event | None) -> None:
        """Copy on a worker, and return when the copy has ended."""
        if self._stream is None or ready is None:
            into.copy_(source)
            return
        with self._stream:
            self._stream.wait_event(ready)
            into.copy_(source)  # to or from pageable memory: waits for the stream


def _is_whole_pages(flat: Tensor) -> bool:
    """True if the bytes of a flat tensor can be written past the page cache as they lie."""
    is_aligned = flat.device.type == "cpu" and flat.data_ptr() % PAGE_NBYTES == 0
    return is_aligned and flat.nbytes % PAGE_NBYTES == 0


class Pieces:
    """A transfer cut into tasks, for workers and the waiting thread.

    It keeps a copy of an error, not the exception: the exception holds the frames of the waiting
    thread, they hold a graph, and the graph holds this object. No collector sees through
    autograd's part of that circle.
    """

    def __init__(
        self, workers: Workers, nbytes: int, piece: Callable[[int, int], None],
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        starts = range(0, nbytes, PIECE_NBYTES)
        self._is_abandoned = False
        self._failure: TierError | None = None  # never raised itself
        self._left = len(starts)
        self._counting = Lock()

        def task(start: int) -> Task:
            stop = min(start + PIECE_NBYTES, nbytes)
            return workers.give(lambda: self._run_piece(lambda: piece(start, stop), then))

        self._tasks = [task(start) for start in starts]

    def _run_piece(self, piece: Callable[[], None], then: Callable[[], None] | None) -> None:
        if self._is_abandoned:
            return
        try:
            piece()
        except TierError as error:
            self._failure = _copy_of(error)
            return
        with self._counting:
            self._left -= 1
            is_last = self._left == 0
        if is_last and then is not None:
            then()

    def is_completed(self) -> bool:
        """True when `wait` would not block."""
        return all(task.is_completed() for task in self._tasks)

    def wait(self) -> None:
        """Run pieces that no worker has begun, then wait for the others. Raises `TierError`.

        Afterwards the caller may use the bytes read, or reuse the memory written.
        """
        for task in self._tasks:
            task.run_once()
        for task in self._tasks:
            task.await_end()
        for task in self._tasks:
            task.wait()
        if self._failure is not None:
            raise _copy_of(self._failure)

    def abandon(self) -> None:
        """Skip pieces that have not begun. Does not block."""
        self._is_abandoned = True


def _copy_of(error: TierError) -> TierError:
    """Copy an error without its traceback."""
    copy = TierError(str(error))
    copy.errno, copy.path = error.errno, error.path
    copy.offset, copy.nbytes = error.offset, error.nbytes
    return copy


class HostScratch:
    """Places in page-locked CPU memory, for a CUDA device, by copies on one side stream.

    A free place may be written at once: the stream has read its old bytes by then. Device memory
    goes back to the computing stream only behind its copy.
    """

    name = "cpu"

    def __init__(self, device: torch.device, ledger: Ledger, kind: Kind = Kind.ACTIVATION) -> None:
        self._device = device
        self._stream = accelerator.new(device)
        self._arenas: list[Tensor] = []
        self._area = Area(self.name, ledger, kind)

    def lease_place(self, nbytes: int) -> Lease:
        full = whole_pages(nbytes)
        return self._area.take_or_grow(full, 0, lambda: self._grow(full))

    def _grow(self, nbytes: int) -> tuple[int, int, int]:
        length = max(nbytes, ARENA_NBYTES)
        self._arenas.append(HostStore(length).allocate(length, torch.uint8).tensor)
        return len(self._arenas) - 1, 0, length

    def begin_write(
        self, lease: Lease, source: Tensor, then: Callable[[], None], at: int = 0
    ) -> StreamCopy:
        """See `DiskScratch.begin_write`. The waiting thread calls `then`."""
        return StreamCopy(self._stream, self._bytes(lease, at, len(source)), source, source, then)

    def begin_read(self, lease: Lease, nbytes: int) -> tuple[Tensor, StreamCopy]:
        into = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return into, self.read_into(lease, into)

    def read_into(self, lease: Lease, into: Tensor, at: int = 0) -> StreamCopy:
        return StreamCopy(self._stream, into, self._bytes(lease, at, len(into)), into)

    def _bytes(self, lease: Lease, at: int, nbytes: int) -> Tensor:
        return self._arenas[lease.ground][lease.offset + at : lease.offset + at + nbytes]


class StreamCopy:
    """A copy on a side stream, which keeps `on_device` from being reused before its end."""

    def __init__(
        self, stream: accelerator.Stream, into: Tensor, source: Tensor, on_device: Tensor,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._then = then
        self._on_device: Tensor | None = on_device
        # the allocator reuses memory on the stream that frees it, so that stream has to wait
        self._owner = accelerator.current(on_device.device)
        stream.wait_stream(self._owner)
        with stream:
            into.copy_(source, non_blocking=True)
            self._done = accelerator.record(stream.device)

    def is_completed(self) -> bool:
        """True when the copy has ended."""
        return self._done.query()

    def wait(self) -> None:
        """Have the current stream wait for the copy; the host does not wait."""
        then, self._then = self._then, None
        accelerator.wait(self._done, self._owner.device)
        if accelerator.current(self._owner.device) == self._owner:  # it waits already
            self._on_device = None
        self.abandon()
        if then is not None:
            then()

    def abandon(self) -> None:
        """Free the device memory; the computing stream reuses it only behind the copy."""
        on_device, self._on_device = self._on_device, None
        if on_device is not None:
            self._owner.wait_event(self._done)

    def __del__(self) -> None:
        with suppress(AttributeError):  # of a copy that could not begin
            self.abandon()


Scratch = DiskScratch | HostScratch
"""A tier for short-lived bytes."""

Transfer = Pieces | StreamCopy
"""A copy between the computing device and a leased place."""
