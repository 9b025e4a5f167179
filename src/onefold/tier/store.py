"""The seam between the engine and memory: a tier that gives and takes flat buffers."""

from __future__ import annotations

from typing import Protocol

import torch


class Store(Protocol):
    """One tier. `name` is the word in the ledger; buffers are flat and uninitialised."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor [numel]. Raises `TierError` when the tier has no room."""
        ...
