"""CPU memory for state that has left an accelerator: one arena, exact in size, registered once."""

from __future__ import annotations

import mmap
import warnings
from typing import Any

import torch
from torch import Tensor

from onefold.errors import TierError, expected
from onefold.tier.store import whole_pages


class HostAllocation:
    """A flat tensor in the arena. It stays: what rests on the host does so until the end."""

    __slots__ = ("tensor",)

    far = None  # the host computes on it
    is_mapped = True

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def release(self) -> None:
        """What rests on the host keeps its place."""

    def restore(self) -> None:
        """See `release`."""


class _Arena(mmap.mmap):
    """Host memory that a driver may have registered: it is told before the memory goes."""

    registered_at = 0

    def __del__(self) -> None:
        if self.registered_at:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self.registered_at)


class HostStore:
    """Buffers in one arena of page-locked memory, so that copies to the device run by themselves.

    torch's own pinned allocations round up to a power of two, and each registers anew, which
    stalls the device's queues; this is one mapping of exactly what was planned.
    """

    name = "cpu"
    is_far = False

    def __init__(self, nbytes: int) -> None:
        """Map, and register, `nbytes`. Where that is refused: pageable, with a warning."""
        self.device = torch.device("cpu")
        self._used = 0
        self._arena = self._map(nbytes)

    @staticmethod
    def _map(nbytes: int) -> Tensor:
        whole = whole_pages(max(1, nbytes))
        try:
            mapping = _Arena(-1, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise TierError(
                expected(
                    f"{nbytes:,} bytes of CPU memory for offloaded states", str(error),
                    hint='offload="disk:PATH", a smaller fraction, or more ranks',
                )
            ) from error  # fmt: skip
        arena = torch.frombuffer(mapping, dtype=torch.uint8)
        HostStore._pin(mapping, arena)
        return arena

    @staticmethod
    def _pin(mapping: _Arena, arena: Tensor) -> None:
        if not torch.cuda.is_available():
            return
        runtime: Any = torch.cuda.cudart()
        refused = runtime.cudaHostRegister(arena.data_ptr(), arena.nbytes, 0)
        if int(refused) == 0:
            mapping.registered_at = arena.data_ptr()
        else:
            warnings.warn(
                f"{arena.nbytes:,} bytes of CPU memory could not be page-locked (CUDA error "
                f"{int(refused)}): copies to the device will wait for the host; raise "
                "`ulimit -l`",
                stacklevel=6,
            )

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> HostAllocation:
        """The next flat tensor [numel] of the arena, or of a further one if the plan was short."""
        nbytes = whole_pages(numel * dtype.itemsize)
        if self._used + nbytes > self._arena.nbytes:
            self._arena, self._used = self._map(nbytes), 0
        start, self._used = self._used, self._used + nbytes
        flat = self._arena[start : start + numel * dtype.itemsize].view(dtype)
        return HostAllocation(flat)
