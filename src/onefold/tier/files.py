"""Weights that rest in the files of a checkpoint: read where they lie, never written or copied.

A tensor lies at any byte of such a file, so its blocks pass through the page cache, which gives
them up at once. Users who read a parameter see a private mapping of the file.
"""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onefold.tier.disk import BlockFile, page_view
from onefold.tier.store import Allocation


class CheckpointFile(BlockFile):
    """A file that is read alone."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, rank)
        try:
            self.fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise self._failed("to open it", error) from error
        # private: an edit of a parameter that is shown here does not reach the file
        self._mapping = mmap.mmap(
            self.fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )

    def show(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor [numel] over the mapping from byte `offset`."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset)

    def write(self, offset: int, source: memoryview) -> None:
        """Raise `TierError`: a checkpoint stays as it is."""
        error = OSError(errno.EROFS, os.strerror(errno.EROFS))
        raise self._failed(f"to write {len(source):,} bytes", error, offset, len(source))


@dataclass(frozen=True, slots=True)
class FilePart:
    """Consecutive bytes of a buffer, and where they lie in a file."""

    file: CheckpointFile
    offset: int
    start: int
    nbytes: int


class FileRows(Allocation):
    """One flat buffer whose parts lie in files. See `Far`."""

    __slots__ = ("__weakref__", "_itemsize", "_parts", "_store")

    def __init__(self, numel: int, dtype: torch.dtype, store: FileStore) -> None:
        # a length and a version counter: nobody touches its pages, so it takes no memory
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        room = mmap.mmap(-1, max(1, numel * dtype.itemsize), flags)
        super().__init__(torch.frombuffer(room, dtype=dtype, count=numel))
        self._itemsize = dtype.itemsize
        self._parts: list[FilePart] = []
        self._store = store

    @property
    def far(self) -> FileRows:
        return self

    def place(self, path: Path, offset: int, start: int, numel: int) -> Tensor:
        """Say that elements from `start` lie at byte `offset` of a file; return them [numel]."""
        file, size = self._store.open(path), self._itemsize
        self._parts.append(FilePart(file, offset, start * size, numel * size))
        return file.show(offset, numel, self.tensor.dtype)

    def fetch(self, start: int, into: Tensor) -> None:
        first, view = start * self._itemsize, page_view(into)
        last = first + into.nbytes
        for part in self._parts:
            low, high = max(first, part.start), min(last, part.start + part.nbytes)
            if low < high:
                part.file.read(part.offset + low - part.start, view[low - first : high - first])

    def flush(self, start: int, source: Tensor) -> None:
        for part in self._parts[:1]:
            part.file.write(start * self._itemsize, page_view(source))

    def forget(self) -> None:
        """Nothing was read into memory of ours."""


class FileStore:
    """Buffers whose bytes lie in files that exist."""

    name = "disk"
    is_far = True

    def __init__(self, rank: int) -> None:
        self.device = torch.device("cpu")
        self._rank = rank
        self._files: dict[Path, CheckpointFile] = {}

    @property
    def files(self) -> list[CheckpointFile]:
        """The files that are open."""
        return list(self._files.values())

    def open(self, path: Path) -> CheckpointFile:
        """Open a file, once. Raises `TierError`."""
        if path not in self._files:
            self._files[path] = CheckpointFile(path, self._rank)
        return self._files[path]

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> FileRows:
        """A flat tensor [numel] whose parts will be named."""
        return FileRows(numel, dtype, self)

    @property
    def moved_nbytes(self) -> tuple[int, int]:
        """Bytes that this rank has read, and none that it has written."""
        return sum(file.read_nbytes for file in self.files), 0
