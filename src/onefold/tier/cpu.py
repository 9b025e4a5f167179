"""CPU memory for state that has left an accelerator: one arena, and a stream of copies from it."""

import mmap
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from onefold.errors import TierError
from onefold.tier import accelerator
from onefold.tier.store import Allocation, whole_pages


class PageLocked(mmap.mmap):
    """Host memory that unregisters itself from the CUDA driver before it is unmapped."""

    registered_at = 0

    def register(self, flat: Tensor) -> int:
        """Lock the pages of `flat` [uint8], which is a part of this memory; return CUDA's error."""
        if not accelerator.locks_mapped_pages():
            return 0
        code = accelerator.lock_pages(flat)
        if code == 0:
            self.registered_at = flat.data_ptr()
        return code

    def __del__(self) -> None:
        if self.registered_at:
            accelerator.unlock_pages(self.registered_at)


class HostStore:
    """Buffers in one arena of page-locked memory, so that copies to the device run asynchronously.

    torch's own pinned allocations round up to a power of two, and each registers anew, which
    stalls the device's queues. This is one mapping of exactly the planned size.
    """

    name = "cpu"
    is_far = False

    def __init__(self, nbytes: int) -> None:
        """Map and register `nbytes`. If registering fails, warn and use pageable memory."""
        self.device = torch.device("cpu")
        self._used = 0
        self._arena = _map(nbytes)

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> Allocation:
        """Allocate the next flat tensor [numel], in a further arena if the plan was short."""
        nbytes = whole_pages(numel * dtype.itemsize)
        if self._used + nbytes > self._arena.nbytes:
            self._arena, self._used = _map(nbytes), 0
        start, self._used = self._used, self._used + nbytes
        return Allocation(self._arena[start : start + numel * dtype.itemsize].view(dtype))


def page_locked(nbytes: int, alignment: int = mmap.PAGESIZE) -> tuple[Tensor, int]:
    """Map whole pages [nbytes or more, uint8], and lock them where there is an accelerator.

    Returns them with CUDA's error, 0 if there was none. Alignment above a page asks for huge pages.
    Raises `OSError`, `ValueError`, `MemoryError` or `RuntimeError` where there is no such memory.
    """
    nbytes = whole_pages(max(1, nbytes))
    if accelerator.kind() is None or accelerator.locks_mapped_pages():
        flags, spare = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, alignment - mmap.PAGESIZE
        mapping = PageLocked(-1, nbytes + spare, flags)
        if spare:
            with suppress(OSError, AttributeError):  # another system
                mapping.madvise(mmap.MADV_HUGEPAGE)
        flat, lock = torch.frombuffer(mapping, dtype=torch.uint8), mapping.register
    else:  # torch's allocator locks what it makes
        flat, lock = accelerator.pinned(nbytes + alignment, torch.uint8), lambda _: 0
    start = -flat.data_ptr() % alignment
    pages = flat[start : start + nbytes]
    return pages, lock(pages)


def _map(nbytes: int) -> Tensor:
    try:
        arena, code = page_locked(nbytes)
    except (OSError, ValueError, MemoryError, RuntimeError) as error:
        wanted = f"{nbytes:,} bytes of CPU memory for offloaded states"
        hint = 'offload="disk:PATH", a smaller fraction, or more ranks'
        raise TierError(wanted, str(error), hint=hint) from error
    if code:
        warnings.warn(
            f"{arena.nbytes:,} bytes of CPU memory could not be page-locked (CUDA error {code}): "
            "copies to the device will wait for the host; raise `ulimit -l`",
            stacklevel=5,
        )
    return arena


class CopyStream:
    """A stream for copies of weights to an accelerator; a context in which they and messages begin.

    The stream starts behind all that computes by then, as it fills memory that was in use. Copies
    of page-locked memory run while the device computes and the host goes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = accelerator.new(device)
        self._kept: list[Tensor] = []
        self._under_way = deque[tuple[accelerator.Event, list[Tensor]]]()  # keep their memory

    def __enter__(self) -> None:
        self._stream.wait_stream(accelerator.current(self._stream.device))
        self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)

    def copy(self, into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Begin to copy each source; nobody may change it before the copies have ended."""
        torch._foreach_copy_(list(into), list(sources), non_blocking=True)
        self._kept += [*into, *sources]

    def mark(self) -> accelerator.Event:
        """Return the event with which all copies that have begun end."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        with self._stream:
            event = accelerator.record(self._stream.device)
        self._under_way.append((event, self._kept))
        self._kept = []
        return event

    def follow(self, copied: accelerator.Event) -> None:
        """Have this thread's stream wait for copies that end with an event; the host goes on."""
        accelerator.wait(copied, self._stream.device)

    def __del__(self) -> None:
        for event, _ in self._under_way:  # the model goes while weights of its next use arrive
            event.synchronize()
