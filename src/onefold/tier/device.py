"""The tier of compute: tensors that kernels can use at once."""

from __future__ import annotations

import torch

from onefold.errors import TierError


class DeviceStore:
    """Buffers in the memory of the device that computes (which may be the CPU)."""

    name = "device"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, uninitialised tensor [numel] on the device."""
        try:
            return torch.empty(numel, dtype=dtype, device=self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError, and the CPU allocator's own
            raise TierError(
                f"expected room for {numel * dtype.itemsize:,} bytes on {self.device}, "
                f"got: {str(error).splitlines()[0]}\n"
                "hint: a higher stage, smaller micro-batches or activation recompute hold less"
            ) from error
