"""Cut sequences into one piece a rank. Pure lengths: no communication."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""The label of a position without a target, as `cross_entropy` has it."""


@dataclass(frozen=True, slots=True)
class SequencePieces:
    """Equal pieces of `length` positions over `parts` ranks; the last ones end in padding."""

    length: int
    parts: int
    index: int

    @property
    def local(self) -> int:
        """Positions of each piece, padding included."""
        return -(-self.length // self.parts)

    @property
    def padded(self) -> int:
        """Positions of all pieces."""
        return self.local * self.parts

    @property
    def padding(self) -> int:
        """Positions beyond the sequence."""
        return self.padded - self.length

    def cut(self, tensor: Tensor, dim: int, pad: float = 0) -> Tensor:
        """Return this rank's piece of a whole tensor along `dim`, padded with `pad`."""
        start = min(self.index * self.local, self.length)
        stop = min(start + self.local, self.length)
        piece = tensor.narrow(dim, start, stop - start)
        if stop - start == self.local:
            return piece
        shape = list(piece.shape)
        shape[dim] = self.local - (stop - start)
        return torch.cat([piece, piece.new_full(shape, pad)], dim)

    def labels(self, labels: Tensor, *, shift: bool) -> Tensor:
        """Return this rank's piece of whole labels [rows, length], shifted before the cut."""
        if shift:
            beyond = labels.new_full((labels.shape[0], 1), IGNORED)
            labels = torch.cat([labels[:, 1:], beyond], 1)
        return self.cut(labels, 1, IGNORED).contiguous()

    def positions(self, device: torch.device) -> Tensor:
        """Return this rank's global positions, [1, local]; those of padding are 0."""
        return self.cut(torch.arange(self.length, device=device), 0)[None]
