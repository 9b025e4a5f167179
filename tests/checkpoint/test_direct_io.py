"""Files that are read past the page cache, or from it, in whole or in part."""

from __future__ import annotations

import mmap
import os
import zlib

import pytest

from onefold.checkpoint.checked_files import BLOCK_NBYTES, BlockWriter
from onefold.checkpoint.direct_io import READ_CHUNK_NBYTES, PageCache, ReadAhead

PAGE = mmap.PAGESIZE


def drop(fd, start, nbytes):
    """Let the system forget pages of a file that the disk has."""
    os.fsync(fd)
    os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("tail", [0, 1, PAGE, 5 * PAGE + 17])
@pytest.mark.parametrize("kept", ["nothing", "everything", "beginnings", "ends"])
def test_chunks_are_right_whatever_the_page_cache_holds(kept, tail, tmp_path, monkeypatch):
    read, from_cache = PageCache.read_held, []

    def noted(cache, view, offset):
        from_cache.append(read(cache, view, offset))
        return from_cache[-1]

    monkeypatch.setattr(PageCache, "read_held", noted)
    path, text = tmp_path / "file", os.urandom(3 * READ_CHUNK_NBYTES + tail)
    path.write_bytes(text)
    fd = os.open(path, os.O_RDWR)
    for start in range(0, len(text), READ_CHUNK_NBYTES):
        here = {
            "nothing": (start, READ_CHUNK_NBYTES), "everything": None,
            "beginnings": (start + 3 * PAGE, READ_CHUNK_NBYTES - 3 * PAGE),
            "ends": (start, 3 * PAGE),
        }[kept]  # fmt: skip
        if here is not None:
            drop(fd, *here)
    chunks = [*range(-(-len(text) // READ_CHUNK_NBYTES))]
    ahead = ReadAhead(os.open(path, os.O_RDONLY), fd, chunks)
    assert b"".join(bytes(ahead.get(chunk) or b"") for chunk in chunks) == text
    ahead.close()
    os.close(fd)
    if kept == "everything" and from_cache[0]:  # a file system that can tell
        assert sum(from_cache) == len(text) - tail % PAGE


def test_a_file_that_the_page_cache_does_not_hold_is_read_past_it(tmp_path):
    """A read that asks the cache by RWF_NOWAIT has the kernel fill it: then this is not so."""
    path, nbytes = tmp_path / "file", 4 * READ_CHUNK_NBYTES
    path.write_bytes(os.urandom(nbytes))
    fd = os.open(path, os.O_RDWR)
    assert PageCache(fd).held_nbytes(0, nbytes) == nbytes
    drop(fd, 0, nbytes)
    if _held_pages(fd, nbytes):
        pytest.skip("a file system in memory")
    ahead = ReadAhead(os.open(path, os.O_RDONLY), fd, [0, 1, 2, 3])
    assert all(len(ahead.get(chunk) or b"") == READ_CHUNK_NBYTES for chunk in range(4))
    ahead.close()
    held = _held_pages(fd, nbytes)
    os.close(fd)
    assert held == 0


def _held_pages(fd: int, nbytes: int) -> int:
    cache = PageCache(fd)
    return sum(cache.held_nbytes(start, PAGE) > 0 for start in range(0, nbytes, PAGE))


@pytest.mark.parametrize("is_cached", [False, True])
def test_checksums_are_those_of_zlib_block_by_block(is_cached, tmp_path):
    """zlib-ng computes them: another program that verifies a checkpoint may use either."""
    text = os.urandom(2 * BLOCK_NBYTES + 99)
    writer = BlockWriter(tmp_path / "file", is_cached=is_cached)
    writer.write_head(text[:7])
    for start in range(7, len(text), 300_001):
        writer.write_checked(text[start : start + 300_001])
    record = writer.seal()
    blocks = [text[start : start + BLOCK_NBYTES] for start in range(0, len(text), BLOCK_NBYTES)]
    assert record.blocks == "".join(f"{zlib.crc32(block):08x}" for block in blocks)
    assert record.head == f"7:{zlib.crc32(text[:7]):08x}"
