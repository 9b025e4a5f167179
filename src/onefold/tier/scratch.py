"""Far bytes that come and go within a step: places that are taken, filled, read once, free again.

A transfer holds the lease of its place (tier/area.py) until it is over, though nobody may wait for
it any more: so no late write reaches a place that others have taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from onefold.errors import TierError
from onefold.ledger import Ledger
from onefold.tier.area import Area, Lease
from onefold.tier.cpu import HostStore
from onefold.tier.disk import SwapFile, page_view
from onefold.tier.pages import return_free_memory
from onefold.tier.slots import SlotPool
from onefold.tier.store import PAGE_NBYTES, whole_pages
from onefold.tier.workers import Task, Workers

PIECE_NBYTES = 4 << 20
"""Of a transfer to or from disk: a request large enough for the disk's full rate."""

ARENA_NBYTES = 256 << 20
"""Of page-locked memory at a time: registering stalls the device, so it is to happen seldom."""

TRIM_NBYTES = 64 << 20
"""Bytes moved between two requests to the heap to give back what is free: each takes 10-20 ms."""


class Transfer(Protocol):
    """Bytes on their way between near memory and a leased place."""

    def wait(self) -> None:
        """Return when what was read may be used, or what was written let go of: by the caller, or
        by what it queues on its CUDA stream. Raises `TierError`.
        """
        ...

    def is_completed(self) -> bool:
        """True when `wait` would make nobody wait."""
        ...

    def abandon(self) -> None:
        """Nobody needs it any more: what has not begun need not happen. Blocks nobody."""
        ...


class Scratch(Protocol):
    """A tier for bytes that come and go. `name` is the word in the ledger."""

    @property
    def name(self) -> str: ...

    def take(self, nbytes: int) -> Lease:
        """A place for `nbytes`. Raises `TierError` when the tier has no room."""
        ...

    def write(self, lease: Lease, source: Tensor, then: Callable[[], None]) -> Transfer:
        """Begin to write `source` [nbytes, uint8], which the transfer keeps alive.

        `then` is called when it may be let go of: by a worker, or by whoever waits.
        """
        ...

    def read(self, lease: Lease, nbytes: int) -> tuple[Tensor, Transfer]:
        """Begin to read into new memory [nbytes, uint8] of the device that computes."""
        ...


class DiskScratch:
    """Places in files on one or several paths, through which they go in turn.

    Workers move pieces, past the page cache. Towards the CPU they are read to where they are used;
    away from it, and to and from a CUDA device, they pass through page-aligned slots.
    """

    name = "disk"

    def __init__(
        self, files: Sequence[SwapFile], workers: Workers, slots: SlotPool, device: torch.device,
        ledger: Ledger,
    ) -> None:  # fmt: skip
        self._files = list(files)
        self._workers = workers
        self._slots = slots
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._area = Area(self.name, ledger)
        self._heap = Heap() if self._stream is None else None
        self._turn = 0

    def take(self, nbytes: int) -> Lease:
        """See `Scratch.take`. The files grow where no stretch is free."""
        whole = whole_pages(nbytes)
        ground = self._turn % len(self._files)
        self._turn += 1
        lease = self._area.take(whole, ground)
        if lease is None:
            self._area.add(ground, self._files[ground].extend(whole), whole)
            lease = self._area.take(whole, ground)
            assert lease is not None, "the area has just grown by this much"
        return lease

    def write(self, lease: Lease, source: Tensor, then: Callable[[], None]) -> Pieces:
        """See `Scratch.write`."""
        file, ready = self._files[lease.ground], self._mark()

        def piece(start: int, stop: int) -> None:
            with self._slots.lend(PIECE_NBYTES) as slot:
                near = slot.tensor(stop - start, torch.uint8)
                self._copy(near, source[start:stop], ready)
                file.write(lease.offset + start, page_view(near))

        def written() -> None:
            then()
            self._note_moved(lease.nbytes)

        return Pieces(self._workers, len(source), piece, written)

    def read(self, lease: Lease, nbytes: int) -> tuple[Tensor, Pieces]:
        """See `Scratch.read`."""
        file, ready = self._files[lease.ground], self._mark()
        into = self._landing(nbytes)

        def piece(start: int, stop: int) -> None:
            if self._stream is None:
                file.read(lease.offset + start, page_view(into[start:stop]))
                return
            with self._slots.lend(PIECE_NBYTES) as slot:
                near = slot.tensor(stop - start, torch.uint8)
                file.read(lease.offset + start, page_view(near))
                self._copy(into[start:stop], near, ready)

        return into, Pieces(self._workers, nbytes, piece, lambda: self._note_moved(nbytes))

    def _note_moved(self, nbytes: int) -> None:
        if self._heap is not None:
            self._heap.note_moved(nbytes)

    def _landing(self, nbytes: int) -> Tensor:
        """New memory [nbytes]; on the CPU from a page's beginning, with room for whole pages."""
        if self._stream is not None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        room = torch.empty(whole_pages(nbytes) + PAGE_NBYTES, dtype=torch.uint8)
        start = -room.data_ptr() % PAGE_NBYTES
        return room[start : start + nbytes]

    def _mark(self) -> torch.cuda.Event | None:
        """This moment of the stream that computes: memory is filled, or free to be filled."""
        if self._stream is None:
            return None
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        return ready

    def _copy(self, into: Tensor, source: Tensor, ready: torch.cuda.Event | None) -> None:
        """Copy on a worker; on return it has happened."""
        if self._stream is None or ready is None:
            into.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            into.copy_(source)  # to or from pageable memory: waits for the stream


class Heap:
    """Has glibc give free pages back, which it keeps to itself below 32 MB a block.

    Activations that leave lie between small ones that stay: without this a forward found only half
    of the memory again that it had freed (measured: 1095 MB resident after it, with this 574).
    """

    def __init__(self) -> None:
        self._moved_nbytes = 0
        self._counting = Lock()

    def note_moved(self, nbytes: int) -> None:
        """So many bytes have left near memory, or will soon; on a worker, beside the compute."""
        with self._counting:
            self._moved_nbytes += nbytes
            is_due = self._moved_nbytes >= TRIM_NBYTES
            if is_due:
                self._moved_nbytes = 0
        if is_due:
            return_free_memory()


class Pieces:
    """A transfer cut into tasks, for workers and whoever waits.

    It keeps of an error what was told, not the exception: that holds the frames of whoever waited,
    these hold a graph, and the graph holds this; no collector sees through autograd's part of it.
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
        self._tasks: list[Task] = []
        for start in starts:
            stop = min(start + PIECE_NBYTES, nbytes)
            self._tasks.append(workers.give(lambda a=start, b=stop: self._run(piece, a, b, then)))

    def _run(
        self, piece: Callable[[int, int], None], start: int, stop: int,
        then: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        if self._is_abandoned:
            return
        try:
            piece(start, stop)
        except TierError as error:
            self._failure = _told(error)
            return
        with self._counting:
            self._left -= 1
            is_last = self._left == 0
        if is_last and then is not None:
            then()

    def is_completed(self) -> bool:
        """See `Transfer.is_completed`."""
        return all(task.is_completed() for task in self._tasks)

    def wait(self) -> None:
        """See `Transfer.wait`."""
        for task in self._tasks:
            task.run()
        for task in self._tasks:
            task.finish()
        for task in self._tasks:
            task.wait()
        if self._failure is not None:
            raise _told(self._failure)

    def abandon(self) -> None:
        """See `Transfer.abandon`."""
        self._is_abandoned = True


class HostScratch:
    """Places in page-locked CPU memory, for a CUDA device, by copies on a stream of their own.

    All copies are on one stream, so a place that is free again may be written at once: the stream
    has read it by then. Device memory goes back to the stream that computes only behind its copy.
    """

    name = "cpu"

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._arenas: list[Tensor] = []
        self._area = Area(self.name, ledger)

    def take(self, nbytes: int) -> Lease:
        """See `Scratch.take`. Another arena comes where no stretch is free."""
        whole = whole_pages(nbytes)
        lease = self._area.take(whole)
        if lease is None:
            length = max(whole, ARENA_NBYTES)
            arena = HostStore(length).allocate(length, torch.uint8).tensor
            self._arenas.append(arena)
            self._area.add(len(self._arenas) - 1, 0, length)
            lease = self._area.take(whole)
            assert lease is not None, "the area has just grown by this much"
        return lease

    def write(self, lease: Lease, source: Tensor, then: Callable[[], None]) -> StreamCopy:
        """See `Scratch.write`. `then` is called by whoever waits."""
        far = self._arenas[lease.ground][lease.offset : lease.offset + len(source)]
        return StreamCopy(self._stream, far, source, source, then)

    def read(self, lease: Lease, nbytes: int) -> tuple[Tensor, StreamCopy]:
        """See `Scratch.read`."""
        far = self._arenas[lease.ground][lease.offset : lease.offset + nbytes]
        near = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return near, StreamCopy(self._stream, near, far, near)


class StreamCopy:
    """A copy on a side stream, and the device memory that must not be reused before it is over."""

    def __init__(
        self, stream: torch.cuda.Stream, into: Tensor, source: Tensor, near: Tensor,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._then = then
        self._near: Tensor | None = near
        # memory that this stream frees is reused by it, so it is the one that has to wait
        self._owner = torch.cuda.current_stream(near.device)
        stream.wait_stream(self._owner)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def is_completed(self) -> bool:
        """See `Transfer.is_completed`."""
        return self._done.query()

    def wait(self) -> None:
        """See `Transfer.wait`."""
        then, self._then = self._then, None
        torch.cuda.current_stream(self._owner.device).wait_event(self._done)
        self.abandon()
        if then is not None:
            then()

    def abandon(self) -> None:
        """See `Transfer.abandon`. The stream that computes goes on behind the copy."""
        near, self._near = self._near, None
        if near is not None:
            self._owner.wait_event(self._done)

    def __del__(self) -> None:
        with suppress(AttributeError):  # of a copy that could not begin
            self.abandon()


def _told(error: TierError) -> TierError:
    """An error that says the same, and comes from nowhere."""
    told = TierError(str(error))
    told.errno, told.path = error.errno, error.path
    told.offset, told.nbytes = error.offset, error.nbytes
    return told
