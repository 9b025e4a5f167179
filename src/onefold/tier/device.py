"""The tier of compute: tensors that kernels use in place.

Where the CPU computes, host memory is mapped in pages, and the pages of released buffers move to
the next buffers. On an accelerator, bytes of released buffers move on in a ring.

glibc keeps freed blocks below 32 MB in its heap, where other blocks fragment it: buffers that come
and go stay resident for good. Our own pages do not. But the system clears a page that it gets back,
with a fault for each 4 KiB, which costs more than filling it. So the pages of a released buffer
move (`mremap`) to the next buffer of its length. Addresses stay, and with them the views that
autograd saved.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from contextlib import suppress

import torch

from onefold.compat import NAMES
from onefold.errors import TierError
from onefold.tier import accelerator
from onefold.tier.store import Allocation, whole_pages

PAGES_NBYTES = 1 << 20
"""Smaller buffers come from the heap: they would not fill pages."""

MAX_SPARE = 2
"""Released buffers whose pages are kept: as many as units that are unsharded at once."""

MAX_SLOTS = 4
"""Free slots of a ring: more than units that are unsharded at once, where units follow in order."""

MOST_TIMES = 2
"""A buffer takes no slot more than so many times its size: a table's, for a block."""

START_NBYTES, NUM_STARTS = 17 * 64, 16
"""Buffers begin at different distances from a page's start, in whole cache lines. Streams at equal
distances would evict each other from the same few places of the cache."""

SECTOR_NBYTES = 512
"""Where disks may read into memory: buffers that files are read into begin at whole sectors. All of
them at the start of a page, a token took 5 % longer."""

_GRAIN_NBYTES = 1 << 21
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4

Move = Callable[[int, int, int], bool]
"""(from, to, nbytes): moves the pages of one mapping into another; False if that fails."""


def mover() -> Move | None:
    """Return how this system moves pages; None if it cannot (then the heap is used)."""
    if sys.platform != "linux":
        return None
    try:
        mremap = ctypes.CDLL(None, use_errno=True).mremap
    except (OSError, AttributeError):
        return None
    mremap.restype = ctypes.c_void_p
    address, length = ctypes.c_void_p, ctypes.c_size_t
    mremap.argtypes = [address, length, length, ctypes.c_int, address]
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP

    def move(source: int, target: int, nbytes: int) -> bool:
        return mremap(source, nbytes, nbytes, flags, target) == target

    return move


class Pages(Allocation):
    """A private anonymous mapping with a flat tensor over it; unmapped with the last view."""

    __slots__ = ("_mapping", "_pool", "address", "mapped_nbytes")

    def __init__(self, numel: int, dtype: torch.dtype, pool: PagePool) -> None:
        # lengths are rounded up, so that buffers of nearly equal length share pages: an address
        # that is never touched costs nothing
        start = pool.next_start()
        nbytes = start + whole_pages(numel * dtype.itemsize)  # reads end with a page
        self.mapped_nbytes = -(-nbytes // _GRAIN_NBYTES) * _GRAIN_NBYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, self.mapped_nbytes, flags)
        self._pool = pool
        super().__init__(torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=start))
        self.address = self.tensor.data_ptr() - start
        if pool.is_read_into:
            self._ask_for_huge_pages(start + self.tensor.nbytes)

    def _ask_for_huge_pages(self, nbytes: int) -> None:
        """Ask for huge pages where the tensor fills them: kernels read weights that stay faster."""
        first = -self.address % _GRAIN_NBYTES
        full = (nbytes - first) // _GRAIN_NBYTES * _GRAIN_NBYTES
        if full > 0:
            with suppress(OSError):  # a system without them
                self._mapping.madvise(mmap.MADV_HUGEPAGE, first, full)

    def release(self) -> None:
        """Return the pages to the pool; a read now returns zeros or other values."""
        self._pool.give(self)

    def restore(self) -> None:
        self._pool.restore_pages(self)

    def drop(self) -> None:
        """Return the pages to the system."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


class PagePool:
    """Pages of released buffers, for the next buffers. Each sharded module has its own pool."""

    def __init__(self, move: Move, *, is_read_into: bool = False) -> None:
        """`is_read_into`: every buffer begins with a sector."""
        self._move = move
        self.is_read_into = is_read_into
        self._step = START_NBYTES // 64 * SECTOR_NBYTES if is_read_into else START_NBYTES
        self._num_starts = 0
        self._spare: list[Pages] = []  # oldest first; each still has its pages

    def next_start(self) -> int:
        """Return the byte at which the next buffer begins in its mapping."""
        self._num_starts += 1
        return self._num_starts % NUM_STARTS * self._step

    def give(self, pages: Pages) -> None:
        """Keep the pages of a released buffer, and drop those of an older one."""
        self._spare.append(pages)
        if len(self._spare) > MAX_SPARE:
            self._spare.pop(0).drop()

    def restore_pages(self, pages: Pages) -> None:
        """Restore a buffer's own pages, or move the pages of a buffer of its length."""
        if pages in self._spare:
            self._spare.remove(pages)
            return
        for spare in self._spare:
            if spare.mapped_nbytes == pages.mapped_nbytes:
                self._spare.remove(spare)
                if not self._move(spare.address, pages.address, pages.mapped_nbytes):
                    spare.drop()
                return
        if self._spare:  # unusable pages must not add to the pages in use
            self._spare.pop(0).drop()


class Resizable(Allocation):
    """Bytes of torch's allocator. The storage object outlives them."""

    __slots__ = ("_nbytes",)

    is_mapped = False

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(torch.empty(numel, dtype=dtype, device=device))
        self._nbytes = self.tensor.nbytes

    def release(self) -> None:
        self._resize(0)

    def restore(self) -> None:
        self._resize(self._nbytes)

    def _resize(self, nbytes: int) -> None:
        """Keep bytes that others hold as well: `Tensor.numpy()` shares them for good."""
        storage = self.tensor.untyped_storage()
        if storage.resizable():
            storage.resize_(nbytes)


class InRing(Resizable):
    """Bytes of a ring's slot: they have the same address whenever the same units are held."""

    __slots__ = ("_home", "_place", "_ring")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, ring: Ring) -> None:
        super().__init__(numel, dtype, device)
        self._ring = ring
        self._home: RingSlot | None = None  # the first slot that it had
        self._place: RingSlot | None = None

    def release(self) -> None:
        place, self._place = self._place, None
        if place is None:  # the first bytes, of a unit that is being built
            super().release()
        else:
            self._ring.give(self.tensor.untyped_storage(), place)

    def restore(self) -> None:
        self._place = self._ring.take_ring_slot(
            self.tensor.untyped_storage(), self._nbytes, self._home
        )
        if self._home is None or not self._home.nbytes:
            self._home = self._place


class RingSlot:
    """Memory for one unit's buffer at a time; `spare` has its bytes while it is free.

    A slot that is given up has 0 bytes.
    """

    __slots__ = ("behind", "nbytes", "spare")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.spare = torch.UntypedStorage(0, device=device)
        self.behind: accelerator.Stream | None = None  # the stream that used it last


class Ring:
    """Memory of unsharded weights on a device, which goes from unit to unit (docs/adr/0028).

    A storage gives its bytes to a slot, and takes a slot's, without a copy: views stay valid. Each
    buffer returns to the first slot that it had, if that is free. So in every step of one order the
    same weights have the same addresses, as CUDA graphs and registered memory need.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[RingSlot] = []  # oldest first

    def take_ring_slot(
        self, storage: torch.UntypedStorage, nbytes: int, home: RingSlot | None
    ) -> RingSlot:
        """Give `storage` the bytes of a free slot, or new ones: at least `nbytes`."""
        fitting = [slot for slot in self._free if nbytes <= slot.nbytes <= MOST_TIMES * nbytes]
        if not fitting:
            return self._make(storage, nbytes)
        slot = home if home in fitting else min(fitting, key=lambda slot: slot.nbytes)
        self._free.remove(slot)
        stream = accelerator.current(self._device)
        if slot.behind is not None and slot.behind != stream:
            stream.wait_stream(slot.behind)
        _swap(storage, slot.spare)
        return slot

    def _make(self, storage: torch.UntypedStorage, nbytes: int) -> RingSlot:
        try:
            storage.resize_(nbytes)
        except torch.OutOfMemoryError:
            if not self._free:
                raise
            self._give_up(len(self._free))  # slots of other sizes
            storage.resize_(nbytes)
        return RingSlot(nbytes, self._device)

    def give(self, storage: torch.UntypedStorage, slot: RingSlot) -> None:
        """Keep the bytes of a storage in its slot; free those of an older slot."""
        _swap(storage, slot.spare)
        slot.behind = accelerator.current(self._device)
        self._free.append(slot)
        self._give_up(len(self._free) - MAX_SLOTS)

    def _give_up(self, number: int) -> None:
        for _ in range(number):
            slot = self._free.pop(0)
            slot.spare.resize_(0)
            slot.nbytes = 0


def _swap(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    getattr(one, NAMES.swap)(other)


class DeviceStore:
    """Buffers in the memory of the computing device, which may be the CPU.

    `name` is another tier's where both share that memory: "cpu", if the CPU computes.
    """

    is_far = False

    def __init__(
        self, device: torch.device, name: str = "device", *, is_read_into: bool = False
    ) -> None:
        """`is_read_into`: tensors begin with a sector, and whole pages of memory are theirs."""
        self.name = name
        self.device = device
        self._is_read_into = is_read_into
        move = mover() if device.type == "cpu" else None
        self._pool = PagePool(move, is_read_into=is_read_into) if move else None
        self._ring = Ring(device) if device.type != "cpu" and NAMES.swap else None

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> Allocation:
        """Allocate a flat, uninitialised tensor [numel] on the device.

        A brief tensor comes from the heap: while backward fills it, activations free heap blocks
        that the process cannot return to the system, but can use.
        """
        is_large = numel * dtype.itemsize >= PAGES_NBYTES or (self._is_read_into and numel > 0)
        is_paged = is_large and not is_brief
        try:
            if self._pool is not None and is_paged:
                return Pages(numel, dtype, self._pool)
            if self._ring is not None and not is_brief:
                return InRing(numel, dtype, self.device, self._ring)
            return Resizable(numel, dtype, self.device)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError, and the system's own
            # the caller's message names the request and gives a hint (unit/buffer.py)
            raise TierError(f"{self.device}: {str(error).splitlines()[0]}") from error


def return_free_memory() -> None:
    """Have glibc return free heap pages to the system; without glibc this does nothing.

    It keeps free blocks below 32 MB where long-lived blocks lie between them.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def map_blocks(nbytes: int) -> None:
    """Have glibc map blocks of `nbytes` and more: freed ones return to the system at once.

    It holds for the whole process, so only a command asks for it. Without glibc this does nothing.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, nbytes)
