"""Weights that rest in the files of a checkpoint: read where they lie, never written or copied.

A tensor lies at any byte of such a file, and reads past the page cache begin with a page. So
whole pages come into a slot, and the wanted bytes are copied from there. The last page of a file
passes through the page cache. Users who read a parameter see a private mapping of the file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from onefold.tier.disk import BlockFile, Stripe, page_view, parts_of, set_direct
from onefold.tier.slots import SlotPool
from onefold.tier.store import PAGE_NBYTES, Allocation, whole_pages


class CheckpointFile(BlockFile):
    """A file that is read alone."""

    def __init__(self, path: Path, rank: int, slots: SlotPool) -> None:
        super().__init__(path, rank)
        self._slots = slots
        try:
            self.fd, cached = (os.open(path, os.O_RDONLY) for _ in range(2))
        except OSError as error:
            raise self._failed("to open it", error) from error
        self._cached = BlockFile(path, rank, cached)  # the same file, through the page cache
        self.is_direct = set_direct(self.fd, True)
        self._direct_nbytes = os.fstat(self.fd).st_size // PAGE_NBYTES * PAGE_NBYTES
        # private: an edit of a parameter that is shown here does not reach the file
        self._mapping = mmap.mmap(
            self.fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )

    def show(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor [numel] over the mapping from byte `offset`."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset)

    def read_into(self, offset: int, into: Tensor) -> None:
        """Fill `into` [nbytes, uint8] from any offset. Raises `TierError`."""
        first, last = offset // PAGE_NBYTES * PAGE_NBYTES, whole_pages(offset + len(into))
        if not self.is_direct or last > self._direct_nbytes:
            view = (ctypes.c_char * len(into)).from_address(into.data_ptr())
            self._cached.read_block(offset, memoryview(view).cast("B"))
        else:
            with self._slots.lend(last - first) as slot:
                staged = slot.tensor(last - first, torch.uint8)
                self._move(os.preadv, first, page_view(staged), "read")
                into.copy_(staged[offset - first : offset - first + len(into)])
        with self._counting:
            self.read_nbytes += len(into)

    def write_block(self, offset: int, source: memoryview) -> None:
        """Raise `TierError`: a checkpoint stays as it is."""
        error = OSError(errno.EROFS, os.strerror(errno.EROFS))
        raise self._failed(f"to write {len(source):,} bytes", error, offset, len(source))


class FileRows(Allocation):
    """One flat buffer whose parts lie in files. See `Far`."""

    __slots__ = ("__weakref__", "_itemsize", "_parts", "_store")

    def __init__(self, numel: int, dtype: torch.dtype, store: FileStore) -> None:
        # a length and a version counter: nobody touches its pages, so it takes no memory
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        room = mmap.mmap(-1, max(1, numel * dtype.itemsize), flags)
        super().__init__(torch.frombuffer(room, dtype=dtype, count=numel))
        self._itemsize = dtype.itemsize
        self._parts: list[Stripe[CheckpointFile]] = []
        self._store = store

    @property
    def far(self) -> FileRows:
        return self

    def place(self, path: Path, offset: int, start: int, numel: int) -> Tensor:
        """Say that elements from `start` lie at byte `offset` of a file; return them [numel]."""
        file, size = self._store.open(path), self._itemsize
        self._parts.append(Stripe(file, offset, start * size, numel * size))
        return file.show(offset, numel, self.tensor.dtype)

    def fetch(self, start: int, into: Tensor) -> None:
        first, flat = start * self._itemsize, into.view(torch.uint8)
        for file, offset, part in parts_of(self._parts, first, len(flat)):
            file.read_into(offset, flat[part])

    def flush(self, start: int, source: Tensor) -> None:
        for part in self._parts[:1]:
            part.file.write_block(start * self._itemsize, page_view(source))

    def forget(self) -> None:
        """Nothing was read into memory of ours."""


class FileStore:
    """Buffers whose bytes lie in files that exist."""

    name = "disk"
    is_far = True

    def __init__(self, rank: int, slots: SlotPool) -> None:
        self.device = torch.device("cpu")
        self._slots = slots
        self._rank = rank
        self._files: dict[Path, CheckpointFile] = {}

    @property
    def files(self) -> list[CheckpointFile]:
        """The files that are open."""
        return list(self._files.values())

    def open(self, path: Path) -> CheckpointFile:
        """Open a file, once. Raises `TierError`."""
        if path not in self._files:
            self._files[path] = CheckpointFile(path, self._rank, self._slots)
        return self._files[path]

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> FileRows:
        """A flat tensor [numel] whose parts will be named."""
        return FileRows(numel, dtype, self)

    @property
    def moved_nbytes(self) -> tuple[int, int]:
        """Bytes that this rank has read, and none that it has written."""
        return sum(file.read_nbytes for file in self.files), 0
