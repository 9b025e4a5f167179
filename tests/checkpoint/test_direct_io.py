"""Files that are read past the page cache, or from it, in whole or in part."""

from __future__ import annotations

import mmap
import os

import pytest

from onefold.checkpoint import direct_io
from onefold.checkpoint.direct_io import READ_CHUNK_NBYTES, ReadAhead

PAGE = mmap.PAGESIZE


def drop(fd, start, nbytes):
    """Let the system forget pages of a file that the disk has."""
    os.fsync(fd)
    os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("tail", [0, 1, PAGE, 5 * PAGE + 17])
@pytest.mark.parametrize("kept", ["nothing", "everything", "beginnings", "ends"])
def test_chunks_are_right_whatever_the_page_cache_holds(kept, tail, tmp_path, monkeypatch):
    read, from_cache = direct_io._read_cached, []

    def noted(fd, view, offset):
        from_cache.append(read(fd, view, offset))
        return from_cache[-1]

    monkeypatch.setattr(direct_io, "_read_cached", noted)
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
