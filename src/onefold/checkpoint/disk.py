"""Bytes to and from a disk at its own speed: past the page cache, several requests at a time.

Checkpoints are written once and read once, so the page cache only costs: a copy of every byte, and
pages that others needed. O_DIRECT wants aligned memory, so bytes pass through a few aligned chunks,
which also lets checksums and copies overlap the transfer. Where a file system has no O_DIRECT
(tmpfs), the same chunks go the ordinary way.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from onefold.tier.disk import set_direct

WRITE_CHUNK_NBYTES, NUM_WRITE_CHUNKS = 4 << 20, 3
READ_CHUNK_NBYTES, NUM_READ_CHUNKS = 2 << 20, 8
"""Measured: two writers reach the disk's rate with three chunks, two readers need more requests."""


class Sink(Protocol):
    """Where a writer's bytes go, from front to back."""

    def write(self, view: memoryview) -> None: ...

    def finish(self) -> None:
        """Wait until the disk has everything, and close."""
        ...

    def close(self) -> None:
        """Close without waiting for the disk."""
        ...


class CachedSink:
    """Into the system's page cache, which keeps the bytes until the disk has them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, view: memoryview) -> None:
        _write_all(self._fd, view)

    def finish(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class DirectSink:
    """Past the page cache, chunk by chunk, while the next chunk is filled."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._chunks: deque[mmap.mmap] = deque()  # those that are free; made when needed
        self._num_chunks = 0
        self._current: mmap.mmap | None = None
        self._filled = 0
        self._under_way: deque[tuple[Future[None], mmap.mmap]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def write(self, view: memoryview) -> None:
        start = 0
        while start < len(view):
            if self._current is None:
                self._current = self._free_chunk()
                self._filled = 0
            piece = view[start : start + WRITE_CHUNK_NBYTES - self._filled]
            self._current[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            start += len(piece)
            if self._filled == WRITE_CHUNK_NBYTES:
                self._send()

    def _free_chunk(self) -> mmap.mmap:
        if not self._chunks and self._num_chunks < NUM_WRITE_CHUNKS:
            self._num_chunks += 1
            return mmap.mmap(-1, WRITE_CHUNK_NBYTES)
        if not self._chunks:
            self._land()
        return self._chunks.popleft()

    def _send(self) -> None:
        if self._pool is None:  # the first full chunk: a file this large is worth a thread
            self._pool = ThreadPoolExecutor(1, "onefold-write")
            set_direct(self._fd, True)
        assert self._current is not None, "nothing was written"
        chunk, self._current = self._current, None
        future = self._pool.submit(_write_all, self._fd, memoryview(chunk))
        self._under_way.append((future, chunk))

    def _land(self) -> None:
        future, chunk = self._under_way.popleft()
        future.result()
        self._chunks.append(chunk)

    def finish(self) -> None:
        try:
            while self._under_way:
                self._land()
            if self._current is not None:  # the last bytes fill no aligned chunk
                set_direct(self._fd, False)
                _write_all(self._fd, memoryview(self._current)[: self._filled])
            os.fsync(self._fd)
        finally:
            self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


class ReadAhead:
    """Chunks of a file that are known to be wanted, read before they are asked for."""

    def __init__(self, fd: int, chunks: list[int]) -> None:
        """`chunks`: numbers of chunks of READ_CHUNK_NBYTES, ascending."""
        self._fd = fd
        self._wanted = deque(chunks)
        self._ready: deque[tuple[int, Future[int], mmap.mmap]] = deque()
        self._free = deque(
            mmap.mmap(-1, READ_CHUNK_NBYTES) for _ in range(min(NUM_READ_CHUNKS, len(chunks)))
        )
        self._pool = ThreadPoolExecutor(NUM_READ_CHUNKS, "onefold-read")
        set_direct(fd, True)
        self._ask()

    def get(self, chunk: int) -> memoryview | None:
        """The chunk's bytes, valid until the next call; None if not announced, or past."""
        while self._ready and self._ready[0][0] < chunk:
            _, future, room = self._ready.popleft()
            future.result()
            self._free.append(room)
            self._ask()
        if not self._ready or self._ready[0][0] != chunk:
            return None
        _, future, room = self._ready[0]
        return memoryview(room)[: future.result()]

    def _ask(self) -> None:
        while self._wanted and self._free:
            chunk, room = self._wanted.popleft(), self._free.popleft()
            offset = chunk * READ_CHUNK_NBYTES
            self._ready.append((chunk, self._pool.submit(_read, self._fd, room, offset), room))

    def close(self) -> None:
        """Also the descriptor, which is this object's own: O_DIRECT is not for other readers."""
        self._pool.shutdown(cancel_futures=True)
        os.close(self._fd)


def _read(fd: int, room: mmap.mmap, offset: int) -> int:
    """Fill `room` from `offset`; fewer bytes only at the end of the file."""
    view, done = memoryview(room), 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        done += got
        if got == 0 or got % mmap.PAGESIZE:
            break
    return done
