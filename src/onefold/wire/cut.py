"""How the regions of one message are cut over the ranks, and which regions share a message.

large    apart | travels from and to where it lies
medium   packed | rank 0: its pieces, one behind the other | rank 1: ...
small    packed behind them, element by element
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from onefold.layout.rows import Slot
from onefold.wire.collectives import Group
from onefold.wire.exchange import PACK_NBYTES

SHARE_NBYTES = 2 << 20
"""Regions with fewer bytes in all share a message, too, except on NCCL: gloo wakes a thread for
each message. On 2 cores a step of 3 M parameters takes 3-7 % less of 2 ranks, 8-14 % less of 4."""


class Size(Enum):
    """How a region travels, see the module."""

    SMALL = auto()
    MEDIUM = auto()
    LARGE = auto()


def size_of(
    numels: Sequence[int], itemsize: int, *, is_replicated: bool, is_nccl: bool, num_slabs: int = 1
) -> Size:
    """Classify a region whose pieces have `numels` elements, by rank. The planner calls it, too.

    A region that is one of `num_slabs` is small if all of them are: an index costs 8 bytes for
    each element.
    """
    nbytes = max(numels) * itemsize
    if is_replicated or nbytes * num_slabs < PACK_NBYTES:
        return Size.SMALL
    shares = not is_nccl and sum(numels) * itemsize <= SHARE_NBYTES
    return Size.MEDIUM if shares or nbytes < PACK_NBYTES else Size.LARGE


class MessageLayout:
    """How the regions of one message are cut over the ranks: made once, used for every transfer.

    `large` regions travel from and to where they lie. The others share one message, which has for
    each rank its pieces of the `medium` ones, copied piece by piece, then those of the `small`
    ones: `packed_index` lists their elements (rank by rank, region by region) as positions counted
    from each region's offset: in one flat buffer (`offsets`), or, for separate tensors, in the
    small ones laid end to end. Only reductions have replicated regions, sent to every rank. Regions
    without a name carry no state: tags and flags, counted as `control`. `name` is that of the unit
    or parameter, for observers.
    """

    def __init__(
        self, slots: Sequence[Slot], offsets: Sequence[int] | None, group: Group, itemsize: int,
        name: str = "",
    ) -> None:  # fmt: skip
        self.name = name
        ranks = range(group.world_size)
        self.numels = [[slot.piece_numel(rank) for rank in ranks] for slot in slots]
        self.is_replicated = [slot.replicated and group.world_size > 1 for slot in slots]
        is_nccl = group.is_nccl
        sizes = [
            size_of(
                numels,
                itemsize,
                is_replicated=replicated,
                is_nccl=is_nccl,
                num_slabs=slot.num_slabs,
            )
            for numels, replicated, slot in zip(self.numels, self.is_replicated, slots, strict=True)
        ]
        self.small, self.medium, self.large = (
            [index for index, size in enumerate(sizes) if size is wanted] for wanted in Size
        )
        self.pieces = [slot.pieces for slot in slots]
        lengths = [
            slot.pieces[-1][1] if size is Size.SMALL else 0
            for slot, size in zip(slots, sizes, strict=True)
        ]
        starts = offsets if offsets is not None else [0, *accumulate(lengths)][:-1]
        self.spans = [
            [(offset + start, offset + stop) for start, stop in slot.pieces]
            for slot, offset in zip(slots, starts, strict=True)
        ]
        small, medium = (
            [[self.numels[index][rank] for index in these] for rank in ranks]
            for these in (self.small, self.medium)
        )
        self.small_spans = list(pairwise(accumulate(map(sum, small), initial=0)))
        self.packed_numels = [sum(small[rank]) + sum(medium[rank]) for rank in ranks]
        self.packed_spans = list(pairwise(accumulate(self.packed_numels, initial=0)))
        own = group.rank
        self.own_small_numels = small[own]
        self.chunk_numels = [[*medium[rank], sum(small[rank])] for rank in ranks]
        self.is_matrix = [bool(slot.fqn) and len(slot.shape) > 1 for slot in slots]
        counted = [
            numels
            for numels, slot, replicated in zip(self.numels, slots, self.is_replicated, strict=True)
            if slot.fqn and not replicated
        ]
        self.sharded_numel = sum(map(sum, counted))
        self.own_numel = sum(numels[own] for numels in counted)
        self.control_numel = sum(numels[own] for numels in self.numels) - self.own_numel
        self._index: Tensor | None = None
        self._rank_index: list[Tensor] = []

    def packed_index(self, device: torch.device) -> Tensor:
        """int64 [elements of the packed message]: the source position of each."""
        if self._index is None or self._index.device != device:
            spans = [
                torch.arange(*self.spans[index][rank])
                for rank in range(len(self.packed_numels))
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
    for rank in range(len(cut.packed_numels)):
        if rank != own:
            chunk = RankChunk(cut, rank, packed)
            places = [full[slice(*cut.spans[index][rank])] for index in cut.medium]
            torch._foreach_copy_(places, chunk.medium)
            full.index_copy_(0, chunk.index, chunk.small)
