"""The tier of compute: tensors that kernels use in place."""

from __future__ import annotations

import torch

from onefold.errors import TierError
from onefold.tier.pages import PAGES_NBYTES, PagePool, Pages, mover
from onefold.tier.store import Allocation


class Resizable(Allocation):
    """Bytes of torch's allocator. The storage object outlives them."""

    __slots__ = ("_nbytes",)

    is_mapped = False

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(torch.empty(numel, dtype=dtype, device=device))
        self._nbytes = self.tensor.nbytes

    def release(self) -> None:
        self.tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        self.tensor.untyped_storage().resize_(self._nbytes)


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

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> Allocation:
        """Allocate a flat, uninitialised tensor [numel] on the device.

        A brief tensor comes from the heap: while backward fills it, activations free heap blocks
        that the process cannot return to the system, but can use.
        """
        is_large = numel * dtype.itemsize >= PAGES_NBYTES or self._is_read_into
        is_paged = is_large and not is_brief
        try:
            if self._pool is not None and is_paged:
                return Pages(numel, dtype, self._pool)
            return Resizable(numel, dtype, self.device)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError, and the system's own
            # the caller's message names the request and gives a hint (unit/buffer.py)
            raise TierError(f"{self.device}: {str(error).splitlines()[0]}") from error
