"""Use files as memory: state on one or several disks (ZeRO-Infinity, arXiv 2104.07857).

Each path gets one file, opened past the page cache (O_DIRECT), preallocated, and unlinked at once:
its space is free when the process ends, however it ends, and two jobs on one path never meet. A
buffer is an *extent*, cut into stripes that go around the paths, so that their bandwidths add.

An extent is also mapped into memory. The engine fetches and flushes blocks past the cache and never
touches the mapping. But a user may read or edit a parameter at any moment: through the mapping that
reads or edits the file, and the kernel keeps both ways coherent. See docs/adr/0008.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from onefold.errors import TierError
from onefold.tier.store import PAGE_NBYTES, Allocation, whole_pages

STRIPE_NBYTES = 4 << 20
"""Consecutive bytes on one path: a request large enough for the disk's full rate."""

MAX_STRIPES = 4096
"""Stripes of an extent. Each is a mapping, and a process may have 65,530."""

File = TypeVar("File", bound="BlockFile")

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of linux/falloc.h
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def set_direct(fd: int, wanted: bool) -> bool:
    """Turn O_DIRECT of a file on or off; return the new state.

    Some file systems cannot bypass the page cache.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (_O_DIRECT if wanted else 0))
    except OSError:
        return False
    return wanted and bool(_O_DIRECT)


class BlockFile:
    """An open file whose blocks are read and written past the page cache, or given up by it."""

    def __init__(self, path: Path, rank: int, fd: int = -1) -> None:
        """`fd`: the file, open; subclasses open `path`, or a file in it, themselves."""
        self.path = path
        self._rank = rank
        self.fd = fd
        self.is_direct = False
        self.read_nbytes = self.written_nbytes = 0
        self._counting = Lock()  # several threads move blocks

    def read_block(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`, repeating short reads."""
        self._move(os.preadv, offset, into, "read")
        with self._counting:
            self.read_nbytes += len(into)

    def write_block(self, offset: int, source: memoryview) -> None:
        """Write all of `source` at `offset`."""
        self._move(os.pwritev, offset, source, "write")
        with self._counting:
            self.written_nbytes += len(source)

    def _move(self, call: Callable[..., int], offset: int, view: memoryview, verb: str) -> None:
        done = 0
        while done < len(view):
            was_direct = self.is_direct
            try:
                moved = call(self.fd, [view[done:]], offset + done)
                if moved == 0:
                    raise OSError(errno.EIO, f"only {done:,} bytes were moved")
            except OSError as error:
                if error.errno == errno.EINVAL and was_direct:
                    # this file system opens with O_DIRECT, but does not transfer with it
                    self.is_direct = set_direct(self.fd, False)
                    continue
                wanted = f"to {verb} {len(view):,} bytes at offset {offset:,}"
                raise self._failed(wanted, error, offset, len(view)) from error
            if moved % PAGE_NBYTES and done + moved < len(view) and self.is_direct:
                moved -= moved % PAGE_NBYTES  # O_DIRECT continues at a whole page
                if moved == 0:
                    self.is_direct = set_direct(self.fd, False)
            done += moved
        if not self.is_direct and sys.platform == "linux":
            with suppress(OSError):
                os.posix_fadvise(self.fd, offset, len(view), os.POSIX_FADV_DONTNEED)

    def _failed(
        self, wanted: str, error: OSError, offset: int | None = None, nbytes: int | None = None
    ) -> TierError:
        code = errno.errorcode.get(error.errno or 0, "unknown error")
        refusal = TierError(
            f"disk tier at {self.path}: {wanted}",
            f"{code} ({error.strerror or error})",
            where=f"rank {self._rank}",
            hint=_HINTS.get(error.errno or 0, "look at the disk and its mount (dmesg, mount)"),
        )
        return refusal.at(error, str(self.path), offset, nbytes)

    def close(self) -> None:
        """Free the space."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_over():  # the system closes it then
            self.close()


class SwapFile(BlockFile):
    """One unlinked file in a folder. Extents take its end; blocks bypass the page cache."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank)
        self._nbytes = self._reserved = 0
        try:
            fd, name = tempfile.mkstemp(prefix="onefold-", suffix=".swap", dir=folder)
        except OSError as error:
            raise self._failed("a new file there", error) from error
        os.unlink(name)
        self.fd = fd
        self.is_direct = set_direct(fd, True)

    def reserve(self, nbytes: int) -> None:
        """Allocate `nbytes` on the disk now, beyond the extents."""
        start = self._nbytes
        was_direct = self.is_direct
        try:
            # systems without fallocate write single bytes instead
            self.is_direct = set_direct(self.fd, False)
            if sys.platform == "linux":
                os.posix_fallocate(self.fd, start, nbytes)
            else:  # the length alone: a full disk is met by a write
                os.ftruncate(self.fd, start + nbytes)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self.fd, start)
            self._reserved = start
            raise self._failed(f"room for {nbytes:,} bytes", error, start, nbytes) from error
        finally:
            self.is_direct = set_direct(self.fd, was_direct)
        self._reserved = start + nbytes

    def punch(self, offset: int, nbytes: int) -> None:
        """Give the bytes of an extent back to the file system, where it can free them."""
        fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
        if fallocate is not None:
            number = ctypes.c_long
            fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, number(offset), number(nbytes))

    def extend(self, nbytes: int) -> int:
        """Give `nbytes` to an extent, reserving more if needed; return the offset of the first."""
        start = self._nbytes
        if start + nbytes > self._reserved:
            self.reserve(nbytes)
        self._nbytes += nbytes
        return start


_HINTS = {
    errno.ENOSPC: "free space there, name another path as well, or offload less (fraction=)",
    errno.ENOENT: "create the folder first, on every machine",
    errno.ENOTDIR: "name a folder, not a file",
    errno.EACCES: "name a folder that this user may write to",
    errno.EPERM: "name a folder that this user may write to",
    errno.EROFS: "the file system is mounted read-only: name another path",
    errno.EIO: "the disk failed: the last checkpoint loads, on another path",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
}


@dataclass(frozen=True, slots=True)
class Stripe(Generic[File]):
    """Consecutive bytes of a buffer in one file."""

    file: File
    offset: int  # in the file
    start: int  # in the buffer
    nbytes: int


def parts_of(
    stripes: Sequence[Stripe[File]], first: int, nbytes: int
) -> Iterator[tuple[File, int, slice]]:
    """Yield each file with some of `nbytes` from byte `first`: the offset there, and which."""
    for stripe in stripes:
        low, high = max(first, stripe.start), min(first + nbytes, stripe.start + stripe.nbytes)
        if low < high:
            yield stripe.file, stripe.offset + low - stripe.start, slice(low - first, high - first)


class Extent(Allocation):
    """One flat buffer on disk. See `Far`."""

    __slots__ = ("__weakref__", "_itemsize", "_mapping", "_stripes")

    def __init__(self, numel: int, dtype: torch.dtype, stripes: list[Stripe[SwapFile]]) -> None:
        self._stripes = stripes
        self._itemsize = dtype.itemsize
        self._mapping = MappedFile(stripes)
        super().__init__(self._mapping.tensor(numel, dtype))

    @property
    def far(self) -> Extent:
        return self

    def fetch(self, start: int, into: Tensor) -> None:
        for file, offset, view in self._parts_of_flat(start, into):
            file.read_block(offset, view)

    def flush(self, start: int, source: Tensor) -> None:
        for file, offset, view in self._parts_of_flat(start, source):
            file.write_block(offset, view)

    def _parts_of_flat(
        self, start: int, flat: Tensor
    ) -> Iterator[tuple[SwapFile, int, memoryview]]:
        """Yield the place of each part of `flat`, up to its last whole page as in every extent."""
        view, first = page_view(flat), start * self._itemsize
        for file, offset, part in parts_of(self._stripes, first, len(view)):
            yield file, offset, view[part]

    def forget(self) -> None:
        self._mapping.forget()

    def discard(self) -> None:
        for stripe in self._stripes:
            stripe.file.punch(stripe.offset, stripe.nbytes)


def page_view(flat: Tensor) -> memoryview:
    """Return the bytes of a flat tensor in CPU memory, up to the end of their last page."""
    nbytes = whole_pages(flat.nbytes)
    return memoryview((ctypes.c_char * nbytes).from_address(flat.data_ptr())).cast("B")


class MappedFile:
    """Stripes of files, mapped one after another; unmapped with the last view."""

    def __init__(self, stripes: Sequence[Stripe[SwapFile]]) -> None:
        self.nbytes = sum(stripe.nbytes for stripe in stripes)
        libc = ctypes.CDLL(None, use_errno=True)
        self._mmap, self._munmap, self._madvise = libc.mmap, libc.munmap, libc.madvise
        address, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._mmap.restype = address
        self._mmap.argtypes = [address, length, number, number, number, ctypes.c_long]
        self._munmap.argtypes = [address, length]
        self._madvise.argtypes = [address, length, number]
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address = self._map(None, self.nbytes, anonymous, -1, 0)
        for stripe in stripes:
            at, flags = self.address + stripe.start, mmap.MAP_SHARED | _MAP_FIXED
            self._map(at, stripe.nbytes, flags, stripe.file.fd, stripe.offset)

    def _map(self, address: int | None, nbytes: int, flags: int, fd: int, offset: int) -> int:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = self._mmap(address, nbytes, access, flags, fd, offset)
        if mapped is None or mapped == _MAP_FAILED:
            code = ctypes.get_errno()
            hint = "raise the limits of this process (vm.max_map_count, ulimit -v)"
            wanted = f"to map {nbytes:,} bytes of a file"
            raise TierError(wanted, os.strerror(code), hint=hint)
        return mapped

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor [numel] over the mapping, which lives as long as any view of it."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        view = (ctypes.c_char * self.nbytes).from_address(self.address)
        view.owner = self  # type: ignore[attr-defined] - ctypes arrays take attributes
        return torch.frombuffer(view, dtype=dtype, count=numel)

    def forget(self) -> None:
        """Unmap the pages that were read; the file keeps edits."""
        self._madvise(self.address, self.nbytes, mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        with suppress(AttributeError):  # of a mapping that could not be made
            self._munmap(self.address, self.nbytes)


_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


class DiskStore:
    """Buffers in this rank's own files, on one or several paths."""

    name = "disk"
    is_far = True

    def __init__(self, paths: Sequence[Path], rank: int, nbytes: int = 0) -> None:
        """Create and unlink a file on each path, and reserve `nbytes` on all of them together.

        Raises `TierError` if the system refuses.
        """
        self.device = torch.device("cpu")
        self.files = [SwapFile(path, rank) for path in paths]
        share = -(-nbytes // len(paths))
        for file in self.files:
            if share:
                file.reserve(whole_pages(share))
        self._next = rank % len(paths)  # where the first stripe of the next extent goes

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> Extent:
        """Allocate a flat tensor [numel] of zeros, with its space on disk."""
        whole = whole_pages(max(1, numel) * dtype.itemsize)
        if len(self.files) == 1:
            file = self.files[0]
            return Extent(numel, dtype, [Stripe(file, file.extend(whole), 0, whole)])
        length = max(STRIPE_NBYTES, whole_pages(-(-whole // MAX_STRIPES)))
        stripes: list[Stripe[SwapFile]] = []
        for start in range(0, whole, length):
            file = self.files[self._next % len(self.files)]
            self._next += 1
            nbytes = min(length, whole - start)
            stripes.append(Stripe(file, file.extend(nbytes), start, nbytes))
        return Extent(numel, dtype, stripes)

    @property
    def moved_nbytes(self) -> tuple[int, int]:
        """Bytes that this rank has read from, and written to, all paths."""
        read = sum(file.read_nbytes for file in self.files)
        return read, sum(file.written_nbytes for file in self.files)
