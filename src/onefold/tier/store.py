"""The seam between the engine and memory: a tier that gives and takes flat buffers."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor

from onefold.layout.rows import round_up


class Allocation(Protocol):
    """The bytes behind one flat tensor, which may be given back and asked for again.

    Views of `tensor` stay valid over that; their values do not.
    """

    @property
    def tensor(self) -> Tensor: ...

    @property
    def far(self) -> Far | None:
        """How blocks of it are moved; None where `tensor` itself may be computed on."""
        ...

    @property
    def is_mapped(self) -> bool:
        """True if the bytes were had from the system itself, not from torch's allocator."""
        ...

    def release(self) -> None:
        """Give the bytes back. Nothing may read or write them until `restore`."""
        ...

    def restore(self) -> None:
        """Have the bytes again, uninitialised."""
        ...


class Far(Protocol):
    """Bytes of a tier that nobody computes on: blocks of them are fetched and flushed.

    `Allocation.tensor` shows them all the same, slowly: that is for users, who read and edit
    parameters whenever they like. Whoever fetches and flushes sees to it that nobody does so at the
    same time. Positions are in elements and multiples of `GRAIN_NUMEL`, memory is page-aligned.
    """

    def fetch(self, start: int, into: Tensor) -> None:
        """Fill `into` [numel] from element `start`. Blocks; raises `TierError`."""
        ...

    def flush(self, start: int, source: Tensor) -> None:
        """Write `source` [numel] from element `start`. Blocks; raises `TierError`."""
        ...

    def forget(self) -> None:
        """Let go of memory in which `Allocation.tensor` was read or edited; edits are kept."""
        ...


PAGE_NBYTES = max(4096, mmap.PAGESIZE)
"""What far bytes are aligned to, and buffers rounded up to: O_DIRECT asks for no more."""


def whole_pages(nbytes: int) -> int:
    """`nbytes`, or the next number above it that fills whole pages."""
    return round_up(nbytes, PAGE_NBYTES)


GRAIN_NUMEL = PAGE_NBYTES
"""Blocks of far bytes start at multiples of this many elements: whole pages in every dtype."""


class Store(Protocol):
    """One tier. `name` is the word in the ledger; buffers are flat and uninitialised."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_far(self) -> bool:
        """True if nobody computes on its bytes: they are fetched and flushed block by block."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> Allocation:
        """A flat tensor [numel]. Raises `TierError` when the tier has no room.

        `is_brief` says that it will not outlive the step, and may lie where activations lie.
        """
        ...
