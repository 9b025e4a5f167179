"""Pack the regions of one message that share it, and unpack them (layout/message_plan.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from onefold.layout.message_plan import MessagePlan
from onefold.layout.ranges import Ranges
from onefold.wire.padded import PaddedChunks


class MessageLayout(MessagePlan):
    """The plan of a message, and how it is packed: made once, used for every transfer."""

    @cached_property
    def chunks(self) -> TightChunks | PaddedChunks:
        """The part of each rank in the message that regions share."""
        return PaddedChunks(self) if self.is_wide else TightChunks(self)


class TightChunks:
    """Chunks of few ranks: pieces of medium regions, then all elements of small ones, no padding.

    The index of small regions lists their elements (rank by rank, region by region) as positions
    counted from each region's offset: in one flat buffer, or, for separate tensors, in the small
    ones laid end to end.
    """

    _index: Tensor | None = None
    _rank_index: Sequence[Tensor] = ()
    _others_index: Tensor | None = None

    def __init__(self, plan: MessagePlan) -> None:
        self._plan = plan
        small, medium = (
            [*zip(*(plan.pieces[index].lengths for index in these), strict=True)]
            or [()] * plan.world_size
            for these in (plan.small, plan.medium)
        )
        self._small_numels = [*map(list[int], small)]
        self._chunk_numels = [[*m, sum(s)] for m, s in zip(medium, small, strict=True)]
        self.numels = [*map(sum, self._chunk_numels)]
        self.spans = Ranges.ending_at([*accumulate(self.numels, initial=0)])
        self._small_spans = Ranges.ending_at([*accumulate(map(sum, small), initial=0)])

    def pack_own(self, packed: Tensor, full: Tensor, rows: Sequence[Tensor | None] = ()) -> None:
        """Copy own pieces of the flat `full`, or own `rows` of all regions, to the own chunk."""
        plan, rank = self._plan, self._plan.rank
        chunk = packed[slice(*self.spans[rank])]
        if rows:
            own = cast("list[Tensor]", rows)
            if own[0].dtype == chunk.dtype:
                torch.cat(own, out=chunk)
            else:
                torch._foreach_copy_(chunk.split_with_sizes(self._small_numels[rank]), own)
            return
        *medium, small = self._parts(rank, packed)
        if medium:
            pieces = [full[slice(*plan.spans[index][rank])] for index in plan.medium]
            torch._foreach_copy_(medium, pieces)
        torch.index_select(full, 0, self._index_of(rank, full.device), out=small)

    def pack_small(self, partials: Sequence[Tensor]) -> Tensor:
        """The message of flat `partials` where all regions that share it are small."""
        whole = torch.cat([partials[index] for index in self._plan.small])
        return whole.index_select(0, self._index_on(whole.device))

    def pack(self, packed: Tensor, partials: Sequence[Tensor]) -> None:
        """Copy the pieces of flat `partials` to the chunks of their ranks."""
        plan, ranks = self._plan, range(self._plan.world_size)
        *medium, small = zip(*(self._parts(rank, packed) for rank in ranks), strict=True)
        into = [room for rooms in medium for room in rooms]
        pieces = [
            partials[index][start:stop]
            for index in plan.medium
            for start, stop in plan.pieces[index]
        ]
        if plan.small:
            chosen = self.pack_small(partials)
            into += small
            pieces += [chosen[start:stop] for start, stop in self._small_spans]
        torch._foreach_copy_(into, pieces)

    def unpack(self, full: Tensor, packed: Tensor) -> None:
        """Copy the chunks of all other ranks to their regions of the flat `full`."""
        plan = self._plan
        if not plan.medium:
            full.index_copy_(0, self._index_on(full.device), packed)
            return
        others = [rank for rank in range(plan.world_size) if rank != plan.rank]
        chunks = [self._parts(rank, packed) for rank in others]
        places = [full[slice(*plan.spans[index][rank])] for rank in others for index in plan.medium]
        if places:
            torch._foreach_copy_(places, [piece for chunk in chunks for piece in chunk[:-1]])
        if plan.small and chunks:
            small = torch.cat([chunk[-1] for chunk in chunks])
            full.index_copy_(0, self._index_of_others(full.device), small)

    def split_medium(self, messages: Sequence[Tensor]) -> tuple[list[Any], Sequence[Tensor]]:
        """The own pieces in every rank's message: of each medium region, and of all small ones."""
        if not self._plan.medium:
            return [], messages
        numels = self._chunk_numels[self._plan.rank]
        parts = zip(*(message.split_with_sizes(numels) for message in messages), strict=True)
        *medium, small = parts
        return medium, small

    def split_small(self, own: Tensor) -> Sequence[Tensor]:
        """The own piece of each small region, in a tensor of all of them."""
        return own.split_with_sizes(self._small_numels[self._plan.rank])

    def _parts(self, rank: int, packed: Tensor) -> list[Tensor]:
        """A rank's pieces of medium regions, then all of small ones."""
        chunk = packed[slice(*self.spans[rank])]
        if not self._plan.medium:
            return [chunk]
        return list(chunk.split_with_sizes(self._chunk_numels[rank]))

    def _index_on(self, device: torch.device) -> Tensor:
        """int64 [elements of small regions]: the source position of each."""
        if self._index is None or self._index.device != device:
            plan = self._plan
            spans = [
                torch.arange(*plan.spans[index][rank])
                for rank in range(plan.world_size)
                for index in plan.small
            ]
            index = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
            self._index = index.to(device)
            self._rank_index = [self._index[start:stop] for start, stop in self._small_spans]
        return self._index

    def _index_of(self, rank: int, device: torch.device) -> Tensor:
        """The part of the index that is one rank's."""
        self._index_on(device)
        return self._rank_index[rank]

    def _index_of_others(self, device: torch.device) -> Tensor:
        """The index without this rank's part."""
        if self._others_index is None or self._others_index.device != device:
            plan = self._plan
            others = [self._index_of(r, device) for r in range(plan.world_size) if r != plan.rank]
            self._others_index = torch.cat(others)
        return self._others_index
