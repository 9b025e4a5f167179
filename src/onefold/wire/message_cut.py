"""Pack the regions of one message that share it, and unpack them (layout/messages.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onefold.layout.messages import MessagePlan


class MessageLayout(MessagePlan):
    """The plan of a message, and the index that packs it: made once, used for every transfer.

    `packed_index` lists the elements of small regions (rank by rank, region by region) as positions
    counted from each region's offset: in one flat buffer (`offsets`), or, for separate tensors, in
    the small ones laid end to end.
    """

    _index: Tensor | None = None
    _rank_index: Sequence[Tensor] = ()

    def packed_index(self, device: torch.device) -> Tensor:
        """int64 [elements of the packed message]: the source position of each."""
        if self._index is None or self._index.device != device:
            spans = [
                torch.arange(*self.spans[index][rank])
                for rank in range(self.world_size)
                for index in self.small
            ]
            index = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
            self._index = index.to(device)
            self._rank_index = [self._index[start:stop] for start, stop in self.small_spans]
        return self._index

    def rank_index(self, rank: int, device: torch.device) -> Tensor:
        """The part of `packed_index` that is one rank's."""
        self.packed_index(device)
        return self._rank_index[rank]


class RankChunk:
    """One rank's part of a packed message: its pieces of medium regions, then of small ones."""

    def __init__(self, cut: MessageLayout, rank: int, packed: Tensor) -> None:
        start, stop = cut.packed_spans[rank]
        self.small, self.medium = packed[start:stop], list[Tensor]()
        if cut.medium:
            *self.medium, self.small = self.small.split_with_sizes(cut.chunk_numels[rank])
        self.index = cut.rank_index(rank, packed.device)

    def fill(self, pieces: list[Tensor], whole: Tensor) -> None:
        """Copy pieces of medium regions, and the elements of `whole` that small ones have."""
        if pieces:
            torch._foreach_copy_(self.medium, pieces)
        torch.index_select(whole, 0, self.index, out=self.small)


def unpack(full: Tensor, cut: MessageLayout, packed: Tensor, own: int) -> None:
    """Copy the chunks of all ranks to their regions of the flat `full`."""
    if not cut.medium:
        full.index_copy_(0, cut.packed_index(full.device), packed)
        return
    for rank in range(cut.world_size):
        if rank != own:
            chunk = RankChunk(cut, rank, packed)
            places = [full[slice(*cut.spans[index][rank])] for index in cut.medium]
            torch._foreach_copy_(places, chunk.medium)
            full.index_copy_(0, chunk.index, chunk.small)
