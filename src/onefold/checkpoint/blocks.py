"""Files whose every block has a checksum: written in one pass, read only through the check.

A checksum per block, not one per file, so that a rank that needs a part of a file verifies what it
reads and reads nothing else.
"""

from __future__ import annotations

import io
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from onefold.checkpoint.disk import READ_CHUNK_NBYTES, CachedSink, DirectSink, ReadAhead, Sink
from onefold.errors import CheckpointError, expected

if TYPE_CHECKING:
    from typing_extensions import Buffer as BytesLike

BLOCK_NBYTES = 1 << 20
SMALL_NBYTES = 1 << 16
HELD_BLOCKS = 2


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
    """A new file that is written from front to back, and notes its checksums on the way.

    Past the page cache; or with `is_cached` into it, so that `write` returns when it has a copy.
    """

    def __init__(self, path: Path, *, is_cached: bool = False) -> None:
        super().__init__()
        self.name = path.name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._sink: Sink = CachedSink(fd) if is_cached else DirectSink(fd)
        self.failure: OSError | None = None  # which torch's archive writer puts another over
        self._small = bytearray()
        self._nbytes = 0  # without those that are still small
        self._crc = 0
        self._blocks: list[str] = []

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
            try:
                self._sink.write(piece)
            except OSError as error:
                self.failure = error
                raise
            self._nbytes += len(piece)
            start += len(piece)
            if self._nbytes % BLOCK_NBYTES == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(f"{self._crc:08x}")
        self._crc = 0

    def finish(self) -> FileRecord:
        """Wait until the disk has everything, close, and return what was written. Blocks."""
        try:
            self._write_small()
            if self._nbytes % BLOCK_NBYTES:
                self._end_block()
            self._sink.finish()
        finally:
            self._sink.close()
        return FileRecord(self._nbytes, "".join(self._blocks))

    def abandon(self) -> None:
        """Close without waiting for the disk."""
        self._sink.close()


class BlockReader(io.RawIOBase):
    """A file that is read through its checksums, from anywhere.

    Stretches [start, stop) that will be read, in their order, can be announced: they are then read
    ahead, at the disk's speed. Raises `Damaged` naming the file at the first byte that is not as it
    was written.
    """

    def __init__(
        self, path: Path, record: FileRecord, announced: Iterable[tuple[int, int]] = ()
    ) -> None:
        super().__init__()
        check_size(path, record)
        self.name = path.name
        self._path = path
        self._record = record
        self._fd = os.open(path, os.O_RDONLY)
        self._at = 0
        # verified blocks of which more may be wanted
        self._held: OrderedDict[int, memoryview] = OrderedDict()
        chunks = _chunks_of(announced)
        # a descriptor of its own, whose flags are not ours
        self._ahead = ReadAhead(os.open(path, os.O_RDONLY), chunks) if len(chunks) > 1 else None

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
            if self._ahead is not None:
                self._ahead.close()
            os.close(self._fd)
        super().close()

    def read_at(self, offset: int, view: memoryview) -> None:
        """Fill `view` from byte `offset`."""
        done = 0
        while done < len(view):
            index, skip = divmod(offset + done, BLOCK_NBYTES)
            piece = min(self._length(index) - skip, len(view) - done)
            view[done : done + piece] = self._verified(index)[skip : skip + piece]
            done += piece

    def verify(self) -> None:
        """Read everything once."""
        for index in range(-(-self._record.nbytes // BLOCK_NBYTES)):
            self._verified(index)

    def _length(self, index: int) -> int:
        return min(BLOCK_NBYTES, self._record.nbytes - index * BLOCK_NBYTES)

    def _verified(self, index: int) -> memoryview:
        """A block's bytes, once they have passed their checksum; what was used last stays."""
        block = self._held.get(index)
        if block is not None:
            return block
        try:
            block = self._from_ahead(index)
            if block is None:
                block = self._from_file(index)
        except OSError as error:
            raise Damaged(
                expected(
                    f"file {self.name!r} of checkpoint {str(self._path.parent)!r} to be readable",
                    f"{type(error).__name__}: {error.strerror}",
                    hint=LOAD_ANOTHER,
                )
            ) from error
        if f"{zlib.crc32(block):08x}" != self._record.crc_of(index):
            start = index * BLOCK_NBYTES
            raise Damaged(
                expected(
                    f"file {self.name!r} of checkpoint {str(self._path.parent)!r} as it was saved",
                    f"other bytes between {start} and {start + len(block)}",
                    hint=LOAD_ANOTHER,
                )
            )
        self._held[index] = block
        return block

    def _from_ahead(self, index: int) -> memoryview | None:
        """A block out of a chunk that was read ahead. Older chunks are overwritten."""
        if self._ahead is None:
            return None
        number, skip = divmod(index * BLOCK_NBYTES, READ_CHUNK_NBYTES)
        chunk = self._ahead.get(number)
        self._held.clear()
        if chunk is None or len(chunk) < skip + self._length(index):
            return None
        return chunk[skip : skip + self._length(index)]

    def _from_file(self, index: int) -> memoryview:
        while len(self._held) >= HELD_BLOCKS:
            self._held.popitem(last=False)
        block = memoryview(bytearray(self._length(index)))
        done = 0
        while done < len(block):
            got = os.preadv(self._fd, [block[done:]], index * BLOCK_NBYTES + done)
            if got == 0:
                raise damaged(self._path, f"{index * BLOCK_NBYTES + done}")
            done += got
        return block


def _chunks_of(stretches: Iterable[tuple[int, int]]) -> list[int]:
    """Numbers of the chunks that cover stretches [start, stop), each once, ascending."""
    found: list[int] = []
    for start, stop in sorted(stretches):
        first = max(start // READ_CHUNK_NBYTES, found[-1] + 1 if found else 0)
        found += range(first, -(-stop // READ_CHUNK_NBYTES))
    return found


LOAD_ANOTHER = "the disk or a copy has damaged it; load an earlier checkpoint"


@dataclass(slots=True)
class Files:
    """The files that one rank writes into one directory."""

    folder: Path
    is_cached: bool = False
    writers: list[BlockWriter] = field(default_factory=list)

    def create(self, name: str) -> BlockWriter:
        writer = BlockWriter(self.folder / name, is_cached=self.is_cached)
        self.writers.append(writer)
        return writer

    def finish(self, *, verify: bool = False) -> dict[str, FileRecord]:
        """Wait for the disk; with `verify` also read everything back from it."""
        try:
            records = {writer.name: writer.finish() for writer in self.writers}
        finally:
            self.abandon()
        if verify:
            for name, record in records.items():
                # not read ahead: no thread can be started while the interpreter ends
                with BlockReader(self.folder / name, record) as reader:
                    reader.verify()
        return records

    def abandon(self) -> None:
        """Close all files without waiting for the disk."""
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
