"""Write and read files at the disk's full rate: past the page cache, several requests at a time.

A checkpoint is written once and read once. The page cache would only cost a copy of every byte, and
pages that other processes use; what it holds already is read from it. O_DIRECT needs aligned
memory, so bytes pass through a few aligned chunks; checksums and copies then overlap the transfer.
A file system without O_DIRECT (tmpfs) gets the same chunks through the page cache.
"""

import ctypes
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy

from onefold.tier.disk import set_direct

WRITE_CHUNK_NBYTES, NUM_WRITE_CHUNKS = 4 << 20, 3
READ_CHUNK_NBYTES, NUM_READ_CHUNKS = 1 << 20, 8
"""Measured: two writers reach the disk's rate with three chunks. Two readers need more requests,
of which larger ones are slower (docs/development/performance.md).
"""


class CachedSink:
    """Write into the system's page cache, which keeps the bytes until the disk has them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def append_bytes(self, view: memoryview) -> None:
        """Append bytes to the file."""
        _write_all(self._fd, view)

    def flush_to_disk(self) -> None:
        """Wait until the disk has everything."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close without waiting for the disk."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class DirectSink(CachedSink):
    """Write past the page cache, chunk by chunk, while the next chunk is filled."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._free: deque[mmap.mmap] = deque()  # chunks are made when they are needed
        self._num_chunks = 0
        self._current: mmap.mmap | None = None
        self._filled = 0
        self._under_way: deque[tuple[Future[None], mmap.mmap]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def append_bytes(self, view: memoryview) -> None:
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
        if not self._free and self._num_chunks < NUM_WRITE_CHUNKS:
            self._num_chunks += 1
            return mmap.mmap(-1, WRITE_CHUNK_NBYTES)
        if not self._free:
            self._wait_oldest()
        return self._free.popleft()

    def _send(self) -> None:
        if self._pool is None:  # the first full chunk: a file of this size is worth a thread
            self._pool = ThreadPoolExecutor(1, "onefold-write")
            set_direct(self._fd, True)
        assert self._current is not None, "only a full chunk is sent"
        chunk, self._current = self._current, None
        future = self._pool.submit(_write_all, self._fd, memoryview(chunk))
        self._under_way.append((future, chunk))

    def _wait_oldest(self) -> None:
        future, chunk = self._under_way.popleft()
        future.result()
        self._free.append(chunk)

    def flush_to_disk(self) -> None:
        while self._under_way:
            self._wait_oldest()
        if self._current is not None:  # the last bytes do not fill an aligned chunk
            set_direct(self._fd, False)
            _write_all(self._fd, memoryview(self._current)[: self._filled])
        super().flush_to_disk()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        super().close()


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


class PageCache:
    """Tells which parts of a file the system's page cache holds. It does not own `fd`.

    The kernel tells it of pages that are mapped (mincore). A read that may not wait (RWF_NOWAIT)
    tells it, too, but begins to read into the cache what is read past it next: on Linux 6.18, files
    that are not cached then came at half the disk's rate.
    """

    def __init__(self, fd: int) -> None:
        self._mapped = numpy.empty(0, numpy.uint8)  # no page of it is touched
        # a system without mincore; a file system without mappings; an empty file
        with suppress(AttributeError, OSError, TypeError, ValueError):
            self._mincore = ctypes.CDLL(None).mincore
            self._mapped = numpy.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), numpy.uint8)

    def has_pages(self, offset: int, nbytes: int) -> bool:
        """True if it holds all of `nbytes` from `offset`, a page's start, that the file has.

        False where nothing tells it. Pages of a file of another user count as held.
        """
        nbytes = min(nbytes, len(self._mapped) - offset)
        if nbytes <= 0:
            return False
        pages = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
        start = ctypes.c_void_p(self._mapped.ctypes.data + offset)
        failed = self._mincore(start, ctypes.c_size_t(nbytes), pages)
        return not failed and not pages.raw.strip(b"\1")


class ReadAhead:
    """Read chunks of a file before they are needed, but those in the page cache. Owns `fd`.

    `chunks` are the numbers of chunks of READ_CHUNK_NBYTES, ascending.
    """

    def __init__(self, fd: int, chunks: list[int]) -> None:
        self._fd = fd
        self._cache = PageCache(fd)
        self._wanted = deque(chunks)
        self._ready: deque[tuple[int, Future[int], mmap.mmap]] = deque()
        self._free = deque(
            mmap.mmap(-1, READ_CHUNK_NBYTES) for _ in range(min(NUM_READ_CHUNKS, len(chunks)))
        )
        self._pool = ThreadPoolExecutor(NUM_READ_CHUNKS, "onefold-read")
        set_direct(fd, True)
        self._submit()

    def get(self, chunk: int) -> memoryview | None:
        """Return the chunk, valid until the next call; None if it is not read ahead, or is past."""
        while self._ready and self._ready[0][0] < chunk:
            _, future, room = self._ready.popleft()
            future.result()
            self._free.append(room)
            self._submit()
        if not self._ready or self._ready[0][0] != chunk:
            return None
        _, future, room = self._ready[0]
        return memoryview(room)[: future.result()]

    def _submit(self) -> None:
        while self._wanted and self._free:
            chunk = self._wanted.popleft()
            offset = chunk * READ_CHUNK_NBYTES
            if not self._cache.has_pages(offset, READ_CHUNK_NBYTES):
                room = self._free.popleft()
                future = self._pool.submit(_read_chunk, self._fd, room, offset)
                self._ready.append((chunk, future, room))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._fd)


def _read_chunk(fd: int, room: mmap.mmap, offset: int) -> int:
    """Fill `room` from `offset` and return the number of bytes: fewer only at the file's end."""
    view, done = memoryview(room), 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        done += got
        if got == 0 or got % mmap.PAGESIZE:
            break
    return done
