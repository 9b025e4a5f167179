"""Files with a checksum for every MiB: written from front to back, read only through the checksums.

A checksum covers a block and not a file, so a rank that needs a part of a file reads and verifies
that part alone.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zlib_ng.zlib_ng import crc32  # zlib's bits, sooner: a load from the page cache waits for them

from onefold.checkpoint.agreement import damage
from onefold.checkpoint.direct_io import READ_CHUNK_NBYTES, CachedSink, DirectSink, ReadAhead

if TYPE_CHECKING:
    from typing_extensions import Buffer as BytesLike

BLOCK_NBYTES = 1 << 20
SMALL_NBYTES = 1 << 16
CACHED_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size, and the CRC-32 of each of its blocks as 8 hex digits, one after the other.

    `blocks` is empty where nobody recorded any: then nothing is verified. `head`: the bytes that
    list what the file holds, and their own CRC-32, as in "1200:0a1b2c3d"; "" without such a list.
    """

    nbytes: int
    blocks: str
    head: str = ""


class BlockWriter:
    """A new file that is written from front to back and computes its checksums on the way.

    It bypasses the page cache. With `is_cached`, `write` returns once the page cache has a copy.
    """

    def __init__(self, path: Path, *, is_cached: bool = False) -> None:
        self.name = path.name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._sink = CachedSink(fd) if is_cached else DirectSink(fd)
        self._small = bytearray()
        self._nbytes = 0  # without the bytes in `_small`
        self._crc = 0
        self._blocks: list[str] = []
        self._head = ""

    def write_checked(self, data: BytesLike) -> None:
        """Write all of `data`. Small pieces, such as headers, are collected first."""
        view = memoryview(data).cast("B")
        if len(view) < SMALL_NBYTES:
            self._small += view
        if len(view) >= SMALL_NBYTES or len(self._small) >= SMALL_NBYTES:
            self._write_small()
        if len(view) >= SMALL_NBYTES:
            self._write_blocks(view)

    def write_head(self, head: bytes) -> None:
        """Write the first bytes, which get a checksum of their own, too."""
        self._head = f"{len(head)}:{crc32(head):08x}"
        self.write_checked(head)

    def _write_small(self) -> None:
        small, self._small = self._small, bytearray()
        self._write_blocks(memoryview(small))

    def _write_blocks(self, view: memoryview) -> None:
        """Write block by block: the copy finds in the CPU's cache the bytes that the CRC read."""
        start = 0
        while start < len(view):
            room = BLOCK_NBYTES - self._nbytes % BLOCK_NBYTES
            piece = view[start : start + room]
            self._crc = crc32(piece, self._crc)
            self._sink.append_bytes(piece)
            self._nbytes += len(piece)
            start += len(piece)
            if self._nbytes % BLOCK_NBYTES == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(f"{self._crc:08x}")
        self._crc = 0

    def seal(self) -> FileRecord:
        """Wait until the disk has everything, close the file and return its record."""
        try:
            self._write_small()
            if self._nbytes % BLOCK_NBYTES:
                self._end_block()
            self._sink.flush_to_disk()
        finally:
            self._sink.close()
        return FileRecord(self._nbytes, "".join(self._blocks), self._head)

    def abandon(self) -> None:
        """Close the file without waiting for the disk."""
        self._sink.close()


class BlockReader:
    """Read any part of a file through its checksums. Use it as a context manager.

    `announced` are the ranges [start, stop) that will be read, in file order: they are read ahead,
    at the disk's speed. Raises `Damaged`, with the file's name, where bytes differ from the record.
    """

    def __init__(
        self, path: Path, record: FileRecord, announced: Iterable[tuple[int, int]] = ()
    ) -> None:
        check_size(path, record)
        self.name = path.name
        self.nbytes = record.nbytes
        self._path = path
        self._record = record
        self._fd = open_regular(path)
        self._verified_blocks: OrderedDict[int, memoryview] = OrderedDict()  # the last ones read
        chunks = _chunks_of(announced)
        # reads ahead through a descriptor of its own: O_DIRECT is a descriptor's flag
        self._ahead = ReadAhead(open_regular(path), chunks) if len(chunks) > 1 else None

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ahead is not None:
            self._ahead.close()
        os.close(self._fd)

    def read_checked(self, offset: int, nbytes: int) -> bytearray:
        """Return the `nbytes` from byte `offset`."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return data

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from byte `offset`. Where bytes are damaged it has some of them."""
        if offset + len(view) > self.nbytes:
            got = f"a read of {len(view)} bytes from {offset}"
            raise damage(f"{_in_checkpoint(self._path)} to have {self.nbytes} bytes", got)
        done = 0
        while done < len(view):
            index, skip = divmod(offset + done, BLOCK_NBYTES)
            piece = min(self._length(index) - skip, len(view) - done)
            target = view[done : done + piece]
            block = self._verified(index, target if piece == self._length(index) else None)
            if block is not target:
                target[:] = block[skip : skip + piece]
            done += piece

    def read_head(self) -> bytes:
        """Return the bytes that `write_head` wrote, without the rest of their block."""
        length, _, crc = self._record.head.partition(":")
        if not 0 < int(length) <= self.nbytes:
            raise ValueError(f"a header of {length} bytes in a file of {self.nbytes}")
        head = os.pread(self._fd, int(length), 0)
        if f"{crc32(head):08x}" != crc:
            raise damage(f"{_in_checkpoint(self._path)} as it was saved", "another header")
        return head

    def verify(self) -> None:
        """Read every block once."""
        for index in range(-(-self.nbytes // BLOCK_NBYTES)):
            self._verified(index)

    def _length(self, index: int) -> int:
        return min(BLOCK_NBYTES, self.nbytes - index * BLOCK_NBYTES)

    def _verified(self, index: int, room: memoryview | None = None) -> memoryview:
        """Return a block that passed its checksum: `room`, or one of the last, which are kept.

        `room`, of the block's size, is filled if the block is not in memory: no copy is between.
        """
        block = self._verified_blocks.get(index)
        if block is not None:
            return block
        try:
            block = self._from_ahead(index)
            if block is None:
                block = self._from_file(index, room)
        except OSError as error:
            got = f"{type(error).__name__}: {error.strerror}"
            raise damage(f"{_in_checkpoint(self._path)} to be readable", got) from error
        wanted = self._record.blocks[8 * index : 8 * index + 8]
        if self._record.blocks and f"{crc32(block):08x}" != wanted:
            start = index * BLOCK_NBYTES
            got = f"other bytes between {start} and {start + len(block)}"
            raise damage(f"{_in_checkpoint(self._path)} as it was saved", got)
        if block is not room:
            self._verified_blocks[index] = block
        return block

    def _from_ahead(self, index: int) -> memoryview | None:
        """Return a block of a chunk that was read ahead. Older chunks are overwritten."""
        if self._ahead is None:
            return None
        number, skip = divmod(index * BLOCK_NBYTES, READ_CHUNK_NBYTES)
        chunk = self._ahead.get(number)
        self._verified_blocks.clear()
        if chunk is None or len(chunk) < skip + self._length(index):
            return None
        return chunk[skip : skip + self._length(index)]

    def _from_file(self, index: int, room: memoryview | None) -> memoryview:
        """Read a block through the page cache, into `room` or new memory."""
        block = room
        if block is None:
            while len(self._verified_blocks) >= CACHED_BLOCKS:
                self._verified_blocks.popitem(last=False)
            block = memoryview(bytearray(self._length(index)))
        done = 0
        while done < len(block):
            offset = index * BLOCK_NBYTES + done
            got = os.preadv(self._fd, [block[done:]], offset)
            if got == 0:
                raise damage(f"{_in_checkpoint(self._path)} to be longer", f"{offset} bytes")
            done += got
        return block


def _chunks_of(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the numbers of the chunks that cover ranges [start, stop), each once, ascending."""
    chunks: list[int] = []
    for start, stop in sorted(ranges):
        first = max(start // READ_CHUNK_NBYTES, chunks[-1] + 1 if chunks else 0)
        chunks += range(first, -(-stop // READ_CHUNK_NBYTES))
    return chunks


def nbytes_of(path: Path) -> int:
    """Return a file's size. Raises `OSError` for a folder, a pipe or a device."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size


def open_regular(path: Path) -> int:
    """Open a file to read it. Raises `OSError`, and does not wait, where it is none."""
    nbytes_of(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def check_size(path: Path, record: FileRecord) -> None:
    """Raise `Damaged` unless the file exists and has as many bytes as were saved."""
    what = f"{_in_checkpoint(path)} to have {record.nbytes} bytes"
    try:
        nbytes = nbytes_of(path)
    except FileNotFoundError:
        raise damage(what, "no such file") from None
    except OSError as error:
        raise damage(what, error.strerror) from error
    if nbytes != record.nbytes:
        raise damage(what, f"{nbytes} bytes")


def _in_checkpoint(path: Path) -> str:
    return f"file {path.name!r} of checkpoint {str(path.parent)!r}"
