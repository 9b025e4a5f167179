"""CPU memory for state that has left an accelerator: one arena of exact size, registered once."""

from __future__ import annotations

import mmap
import warnings
from typing import Any

import torch
from torch import Tensor

from onefold.errors import TierError
from onefold.tier.store import Allocation, whole_pages


class PageLocked(mmap.mmap):
    """Host memory that unregisters itself from the CUDA driver before it is unmapped."""

    registered_at = 0

    def register(self, flat: Tensor) -> int:
        """Lock the pages of `flat` [uint8], which is a part of this memory; return CUDA's error."""
        if not torch.cuda.is_available():
            return 0
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
        if code == 0:
            self.registered_at = flat.data_ptr()
        return code

    def __del__(self) -> None:
        if self.registered_at:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self.registered_at)


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


def _map(nbytes: int) -> Tensor:
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = PageLocked(-1, whole_pages(max(1, nbytes)), flags)
    except (OSError, ValueError) as error:
        wanted = f"{nbytes:,} bytes of CPU memory for offloaded states"
        hint = 'offload="disk:PATH", a smaller fraction, or more ranks'
        raise TierError(wanted, str(error), hint=hint) from error
    arena = torch.frombuffer(mapping, dtype=torch.uint8)
    code = mapping.register(arena)
    if code:
        warnings.warn(
            f"{arena.nbytes:,} bytes of CPU memory could not be page-locked (CUDA error {code}): "
            "copies to the device will wait for the host; raise `ulimit -l`",
            stacklevel=5,
        )
    return arena
