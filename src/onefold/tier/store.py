"""The seam between the engine and memory: a tier that allocates flat buffers."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor

from onefold.layout.rows import round_up


class Allocation:
    """The bytes of one flat tensor, which keeps its place until the end.

    Subclasses free the bytes in `release`, and allocate them again in `restore`. Views of `tensor`
    stay valid across both; their values do not.
    """

    __slots__ = ("tensor",)

    is_mapped = True
    """True if the bytes come from the system itself, not from torch's allocator."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def far(self) -> Far | None:
        """Moves blocks of a tensor that kernels do not use in place; None where they do."""
        return None

    def release(self) -> None:
        """Free the bytes. Nothing may read or write them until `restore`."""

    def restore(self) -> None:
        """Allocate the bytes again, uninitialised."""

    def discard(self) -> None:
        """Free the place of the values, where that does not end with the last tensor over it."""


class Far(Protocol):
    """Bytes of a tier that no kernel uses in place: blocks of them are fetched and flushed.

    `Allocation.tensor` shows the same bytes, slowly, for users who read and edit parameters. The
    caller of `fetch` and `flush` makes sure that nobody does so meanwhile. Positions are in
    elements, multiples of `GRAIN_NUMEL`. Memory is page-aligned.
    """

    def fetch(self, start: int, into: Tensor) -> None:
        """Fill `into` [numel] from element `start`. Blocks; raises `TierError`."""
        ...

    def flush(self, start: int, source: Tensor) -> None:
        """Write `source` [numel] from element `start`. Blocks; raises `TierError`."""
        ...

    def forget(self) -> None:
        """Free memory in which `Allocation.tensor` was read or edited; edits are kept."""
        ...


PAGE_NBYTES = max(4096, mmap.PAGESIZE)
"""Alignment of disk bytes and of the buffers they pass through, as O_DIRECT asks for."""


def whole_pages(nbytes: int) -> int:
    """Round `nbytes` up to whole pages."""
    return round_up(nbytes, PAGE_NBYTES)


GRAIN_NUMEL = PAGE_NBYTES
"""Blocks of disk bytes start at multiples of this many elements: whole pages in every dtype."""


class Store(Protocol):
    """One tier. `name` is its word in the ledger; buffers are flat and uninitialised."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_far(self) -> bool:
        """True if bytes are fetched and flushed block by block, as no kernel uses them in place."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> Allocation:
        """Allocate a flat tensor [numel]. Raises `TierError` when the tier has no room.

        A brief tensor does not outlive the step, and may share the heap with activations.
        """
        ...
