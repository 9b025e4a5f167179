"""Files whose every block has a checksum: written in one pass, read only through the check.

A checksum per block, not one per file, so that a rank that needs a part of a file verifies what it
reads and reads nothing else.
"""

from __future__ import annotations

import io
import os
import zlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from onefold.errors import CheckpointError, expected

if TYPE_CHECKING:
    from typing_extensions import Buffer as BytesLike

BLOCK_NBYTES = 1 << 20
SMALL_NBYTES = 1 << 16
FLUSH_NBYTES = 32 << 20
"""Written bytes start on their way to the disk in portions of this size, while more are written."""

HELD_BLOCKS = 2
AHEAD_NBYTES = 16 << 20
"""The system is asked for this much of a file before it is read."""


class Damaged(CheckpointError):
    """A file is not as it was saved, so an earlier checkpoint has to do."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest says of one file: bytes, and CRC-32 of each block, 8 hex digits in a row."""

    nbytes: int
    blocks: str

    def crc_of(self, index: int) -> str:
        return self.blocks[8 * index : 8 * index + 8]


class BlockWriter(io.RawIOBase):
    """A new file that is written from front to back, and notes its checksums on the way."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.name = path.name
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._small = bytearray()
        self._nbytes = 0  # without those that are still small
        self._crc = 0
        self._blocks: list[str] = []
        self._flusher: ThreadPoolExecutor | None = None
        self._flushing: Future[None] | None = None
        self._flushed = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._nbytes + len(self._small)

    def write(self, data: BytesLike, /) -> int:
        """Write all of `data`; headers and other small pieces wait for company."""
        view = memoryview(data).cast("B")
        if len(view) < SMALL_NBYTES:
            self._small += view
        if len(view) >= SMALL_NBYTES or len(self._small) >= SMALL_NBYTES:
            self._write_small()
        if len(view) >= SMALL_NBYTES:
            self._write(view)
        return len(view)

    def _write_small(self) -> None:
        small, self._small = self._small, bytearray()
        self._write(memoryview(small))

    def _write(self, view: memoryview) -> None:
        """Block by block, each while it lies in the cache."""
        start = 0
        while start < len(view):
            room = BLOCK_NBYTES - self._nbytes % BLOCK_NBYTES
            piece = view[start : start + room]
            self._crc = zlib.crc32(piece, self._crc)
            _write_all(self._fd, piece)
            self._nbytes += len(piece)
            start += len(piece)
            if self._nbytes % BLOCK_NBYTES == 0:
                self._end_block()
        self._flush_behind()

    def _end_block(self) -> None:
        self._blocks.append(f"{self._crc:08x}")
        self._crc = 0

    def _flush_behind(self) -> None:
        """Have the disk work while the next portion is copied."""
        is_idle = self._flushing is None or self._flushing.done()
        if is_idle and self._nbytes - self._flushed >= FLUSH_NBYTES:
            if self._flusher is None:
                self._flusher = ThreadPoolExecutor(1, "onefold-flush")
            self._flushed = self._nbytes
            self._flushing = self._flusher.submit(os.fdatasync, self._fd)

    def finish(self) -> FileRecord:
        """Wait until the disk has everything, close, and return what was written. Blocks."""
        try:
            self._write_small()
            if self._nbytes % BLOCK_NBYTES:
                self._end_block()
            if self._flushing is not None:
                self._flushing.result()
            os.fsync(self._fd)
        finally:
            self.abandon()
        return FileRecord(self._nbytes, "".join(self._blocks))

    def abandon(self) -> None:
        """Close without waiting for the disk."""
        if self._flusher is not None:
            self._flusher.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class BlockReader(io.RawIOBase):
    """A file that is read through its checksums, from anywhere.

    Raises `CheckpointError` naming the file at the first byte that is not as it was written.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        super().__init__()
        check_size(path, record)
        self.name = path.name
        self._path = path
        self._record = record
        self._fd = os.open(path, os.O_RDONLY)
        self._at = 0
        self._asked = 0
        # an archive's directory is read before its elements: with two blocks, each is read once
        self._held: OrderedDict[int, memoryview] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        start = (0, self._at, self._record.nbytes)[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: BytesLike, /) -> int:
        view = memoryview(buffer).cast("B")
        nbytes = max(0, min(len(view), self._record.nbytes - self._at))
        self.read_at(self._at, view[:nbytes])
        self._at += nbytes
        return nbytes

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()

    def read_at(self, offset: int, view: memoryview) -> None:
        """Fill `view` from byte `offset`; whole blocks go straight to their place."""
        done = 0
        while done < len(view):
            index, skip = divmod(offset + done, BLOCK_NBYTES)
            length = min(BLOCK_NBYTES, self._record.nbytes - index * BLOCK_NBYTES)
            if skip == 0 and len(view) - done >= length and index not in self._held:
                self._fill(index, view[done : done + length])
                done += length
                continue
            piece = min(length - skip, len(view) - done)
            view[done : done + piece] = self._hold(index, length)[skip : skip + piece]
            done += piece

    def _hold(self, index: int, length: int) -> memoryview:
        """A block of which a part is wanted; the two that were used last stay."""
        block = self._held.pop(index, None)
        if block is None:
            is_full = len(self._held) == HELD_BLOCKS
            room = (
                self._held.popitem(last=False)[1]
                if is_full
                else memoryview(bytearray(BLOCK_NBYTES))
            )
            self._fill(index, room[:length])
            block = room
        self._held[index] = block
        return block

    def verify(self) -> None:
        """Read everything once, from the disk where the system has not changed it since."""
        with suppress(OSError):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        room = memoryview(bytearray(BLOCK_NBYTES))
        for index in range(0, -(-self._record.nbytes // BLOCK_NBYTES)):
            length = min(BLOCK_NBYTES, self._record.nbytes - index * BLOCK_NBYTES)
            self._fill(index, room[:length])

    def _fill(self, index: int, view: memoryview) -> None:
        start = index * BLOCK_NBYTES
        self._ask_ahead(start)
        done = 0
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], start + done)
            if got == 0:
                raise damaged(self._path, f"{start + done}")
            done += got
        if f"{zlib.crc32(view):08x}" != self._record.crc_of(index):
            raise Damaged(
                expected(
                    f"file {self.name!r} of checkpoint {str(self._path.parent)!r} as it was saved",
                    f"other bytes between {start} and {start + len(view)}",
                    hint=LOAD_ANOTHER,
                )
            )

    def _ask_ahead(self, start: int) -> None:
        if not self._asked - AHEAD_NBYTES <= start < self._asked - AHEAD_NBYTES // 2:
            self._asked = start + AHEAD_NBYTES
            with suppress(OSError):
                os.posix_fadvise(self._fd, start, AHEAD_NBYTES, os.POSIX_FADV_WILLNEED)


LOAD_ANOTHER = "the disk or a copy has damaged it; load an earlier checkpoint"


@dataclass(slots=True)
class Files:
    """The files that one rank writes into one directory."""

    folder: Path
    writers: list[BlockWriter] = field(default_factory=list)

    def create(self, name: str) -> BlockWriter:
        writer = BlockWriter(self.folder / name)
        self.writers.append(writer)
        return writer

    def finish(self, *, verify: bool = False) -> dict[str, FileRecord]:
        """Wait for the disk; with `verify` also read everything back from it."""
        records = {writer.name: writer.finish() for writer in self.writers}
        if verify:
            for name, record in records.items():
                with BlockReader(self.folder / name, record) as reader:
                    reader.verify()
        return records

    def abandon(self) -> None:
        for writer in self.writers:
            writer.abandon()


def check_size(path: Path, record: FileRecord) -> None:
    """Raise `CheckpointError` unless the file is there with as many bytes as it was saved with."""
    try:
        nbytes = path.stat().st_size
    except FileNotFoundError:
        nbytes = -1
    if nbytes != record.nbytes:
        raise damaged(path, "none" if nbytes < 0 else str(nbytes), record.nbytes)


def damaged(path: Path, got: str, wanted: int | None = None) -> Damaged:
    """The error for a file that is missing or short."""
    what = f"{wanted} bytes" if wanted is not None else "more bytes"
    return Damaged(
        expected(
            f"file {path.name!r} of checkpoint {str(path.parent)!r} to have {what}",
            got if got == "none" else f"{got} bytes",
            hint=LOAD_ANOTHER,
        )
    )


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]
