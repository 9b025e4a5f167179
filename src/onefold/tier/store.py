"""The seam between the engine and memory: a tier that gives and takes flat buffers."""

from __future__ import annotations

from typing import Protocol

import torch


class Allocation(Protocol):
    """The bytes behind one flat tensor, which may be given back and asked for again.

    Views of `tensor` stay valid over that; their values do not.
    """

    @property
    def tensor(self) -> torch.Tensor: ...

    def release(self) -> None:
        """Give the bytes back. Nothing may read or write them until `restore`."""
        ...

    def restore(self) -> None:
        """Have the bytes again, uninitialised."""
        ...


class Store(Protocol):
    """One tier. `name` is the word in the ledger; buffers are flat and uninitialised."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> Allocation:
        """A flat tensor [numel]. Raises `TierError` when the tier has no room.

        `is_brief` says that it will not outlive the step, and may lie where activations lie.
        """
        ...
