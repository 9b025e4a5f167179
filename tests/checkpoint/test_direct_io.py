"""Files that are read past the page cache, or from it, in whole or in part."""

from __future__ import annotations

import mmap
import os
import zlib
from itertools import pairwise

import pytest

from onefold.checkpoint import direct_io
from onefold.checkpoint.agreement import Damaged
from onefold.checkpoint.checked_files import BLOCK_NBYTES, BlockReader, BlockWriter
from onefold.checkpoint.direct_io import READ_CHUNK_NBYTES, PageCache, ReadAhead

PAGE = mmap.PAGESIZE


def drop(fd, start, nbytes):
    """Let the system forget pages of a file that the disk has."""
    os.fsync(fd)
    os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("tail", [0, 1, PAGE, 5 * PAGE + 17])
@pytest.mark.parametrize("kept", ["nothing", "everything", "beginnings", "ends", "one chunk"])
def test_bytes_are_right_whatever_the_page_cache_holds(kept, tail, tmp_path, monkeypatch):
    read, past_cache = direct_io._read_chunk, []

    def noted(fd, room, offset):
        past_cache.append(offset // READ_CHUNK_NBYTES)
        return read(fd, room, offset)

    monkeypatch.setattr(direct_io, "_read_chunk", noted)
    path, text = tmp_path / "file", os.urandom(6 * READ_CHUNK_NBYTES + tail)
    writer = BlockWriter(path, is_cached=True)
    writer.write_checked(text)
    record = writer.seal()
    fd = os.open(path, os.O_RDWR)
    for start in range(0, len(text), READ_CHUNK_NBYTES):
        here = {
            "nothing": (start, READ_CHUNK_NBYTES), "everything": None,
            "beginnings": (start + 3 * PAGE, READ_CHUNK_NBYTES - 3 * PAGE),
            "ends": (start, 3 * PAGE),
            "one chunk": None if start == READ_CHUNK_NBYTES else (start, READ_CHUNK_NBYTES),
        }[kept]  # fmt: skip
        if here is not None:
            drop(fd, *here)
    held = [
        PageCache(fd).has_pages(chunk * READ_CHUNK_NBYTES, READ_CHUNK_NBYTES) for chunk in range(7)
    ]
    parts = [0, 7, BLOCK_NBYTES + 7, 2 * BLOCK_NBYTES, 5 * BLOCK_NBYTES + 99, len(text)]
    with BlockReader(path, record, [(0, len(text))]) as reader:
        for start, stop in pairwise(parts):
            assert reader.read_checked(start, stop - start) == text[start:stop]
    os.close(fd)
    chunks = range(-(-len(text) // READ_CHUNK_NBYTES))
    assert sorted(past_cache) == [chunk for chunk in chunks if not held[chunk]]


@pytest.mark.parametrize("begins", [0, 7])
def test_damage_is_found_in_blocks_that_are_read_to_where_they_go(begins, tmp_path):
    text = os.urandom(6 * BLOCK_NBYTES)
    writer = BlockWriter(tmp_path / "file", is_cached=True)
    writer.write_checked(text)
    record = writer.seal()
    with (tmp_path / "file").open("r+b") as file:
        file.seek(3 * BLOCK_NBYTES + 5)
        file.write(bytes([text[3 * BLOCK_NBYTES + 5] ^ 1]))
    with BlockReader(tmp_path / "file", record, [(begins, len(text))]) as reader:
        assert reader.read_checked(begins, BLOCK_NBYTES) == text[begins : begins + BLOCK_NBYTES]
        with pytest.raises(Damaged, match=f"other bytes between {3 * BLOCK_NBYTES} and"):
            reader.read_checked(begins, len(text) - begins)
        with pytest.raises(Damaged, match=f"to have {len(text)} bytes, got a read of 9 bytes"):
            reader.read_checked(len(text) - 8, 9)


def test_a_file_that_the_page_cache_does_not_hold_is_read_past_it(tmp_path):
    """A read that asks the cache by RWF_NOWAIT has the kernel fill it: then this is not so."""
    path, nbytes = tmp_path / "file", 4 * READ_CHUNK_NBYTES
    path.write_bytes(os.urandom(nbytes))
    fd = os.open(path, os.O_RDWR)
    assert PageCache(fd).has_pages(0, nbytes)
    drop(fd, 0, nbytes)
    if _held_pages(fd, nbytes):
        pytest.skip("a file system in memory")
    ahead = ReadAhead(os.open(path, os.O_RDONLY), [0, 1, 2, 3])
    assert all(len(ahead.get(chunk) or b"") == READ_CHUNK_NBYTES for chunk in range(4))
    ahead.close()
    held = _held_pages(fd, nbytes)
    os.close(fd)
    assert held == 0


def _held_pages(fd: int, nbytes: int) -> int:
    cache = PageCache(fd)
    return sum(cache.has_pages(start, PAGE) for start in range(0, nbytes, PAGE))


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
