"""Pack the regions of one message that share it, and unpack them (layout/messages.py)."""

from collections.abc import Sequence
from typing import cast

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
    _others_index: Tensor | None = None

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

    def others_index(self, device: torch.device) -> Tensor:
        """`packed_index` without this rank's part."""
        if self._others_index is None or self._others_index.device != device:
            others = [self.rank_index(r, device) for r in range(self.world_size) if r != self.rank]
            self._others_index = torch.cat(others)
        return self._others_index


class RankChunk:
    """One rank's part of a packed message: its pieces of medium regions, then of small ones."""

    def __init__(self, cut: MessageLayout, rank: int, packed: Tensor) -> None:
        start, stop = cut.packed_spans[rank]
        self.small, self.medium = packed[start:stop], list[Tensor]()
        if cut.medium:
            *self.medium, self.small = self.small.split_with_sizes(cut.chunk_numels[rank])


def pack_own(
    cut: MessageLayout, packed: Tensor, full: Tensor, rows: Sequence[Tensor | None] = ()
) -> None:
    """Copy this rank's pieces of the flat `full`, or its `rows` of all regions, to its chunk."""
    if rows:
        start, stop = cut.packed_spans[cut.rank]
        chunk, own = packed[start:stop], cast("list[Tensor]", rows)
        if own[0].dtype == chunk.dtype:
            torch.cat(own, out=chunk)
        else:
            torch._foreach_copy_(chunk.split_with_sizes(cut.small_numels[cut.rank]), own)
        return
    chunk, rank = RankChunk(cut, cut.rank, packed), cut.rank
    if cut.medium:
        pieces = [full[slice(*cut.spans[index][rank])] for index in cut.medium]
        torch._foreach_copy_(chunk.medium, pieces)
    torch.index_select(full, 0, cut.rank_index(rank, full.device), out=chunk.small)


def pack(cut: MessageLayout, packed: Tensor, partials: Sequence[Tensor], small: Tensor) -> None:
    """Copy pieces of medium `partials`, and the elements of `small` laid end to end, to chunks."""
    chunks = [RankChunk(cut, rank, packed) for rank in range(cut.world_size)]
    into = [room for chunk in chunks for room in chunk.medium]
    pieces = [
        partials[index][slice(*cut.pieces[index][rank])]
        for rank in range(cut.world_size)
        for index in cut.medium
    ]
    if cut.small:
        chosen = small.index_select(0, cut.packed_index(small.device))
        into += [chunk.small for chunk in chunks]
        pieces += [chosen[start:stop] for start, stop in cut.small_spans]
    torch._foreach_copy_(into, pieces)


def unpack(full: Tensor, cut: MessageLayout, packed: Tensor) -> None:
    """Copy the chunks of all other ranks to their regions of the flat `full`."""
    if not cut.medium:
        full.index_copy_(0, cut.packed_index(full.device), packed)
        return
    others = [rank for rank in range(cut.world_size) if rank != cut.rank]
    chunks = [RankChunk(cut, rank, packed) for rank in others]
    places = [full[slice(*cut.spans[index][rank])] for rank in others for index in cut.medium]
    if places:
        torch._foreach_copy_(places, [piece for chunk in chunks for piece in chunk.medium])
    if cut.small and chunks:
        small = torch.cat([chunk.small for chunk in chunks])
        full.index_copy_(0, cut.others_index(full.device), small)
