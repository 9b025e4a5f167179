"""Pack the regions of one message that share it, and unpack them (layout/message_plan.py)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, cast
from weakref import WeakValueDictionary

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

    Small regions lie in one flat buffer, or, of separate tensors, end to end: see `SmallIndex`.
    """

    _index: SmallIndex | None = None

    def __init__(self, plan: MessagePlan) -> None:
        self._plan = plan
        small, medium = (
            [*zip(*[plan.lengths[index] for index in these], strict=True)] or [()] * plan.world_size
            for these in (plan.small, plan.medium)
        )
        self._small_numels = [*map(list[int], small)]
        self._chunk_numels = [[*m, sum(s)] for m, s in zip(medium, small, strict=True)]
        self.numels = [*map(sum, self._chunk_numels)]
        self.spans = Ranges.ending_at([*accumulate(self.numels, initial=0)])
        self._chunks = [slice(*span) for span in self.spans]
        self._small_spans = Ranges.ending_at([*accumulate(map(sum, small), initial=0)])

    def pack_own(self, packed: Tensor, full: Tensor, rows: Sequence[Tensor | None] = ()) -> None:
        """Copy own pieces of the flat `full`, or own `rows` of all regions, to the own chunk."""
        plan, rank = self._plan, self._plan.rank
        chunk = packed[self._chunks[rank]]
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
        torch.index_select(full, 0, self._index_on(full.device).own, out=small)

    def pack_small(self, partials: Sequence[Tensor]) -> Tensor:
        """The message of flat `partials` where all regions that share it are small."""
        whole = torch.cat([partials[index] for index in self._plan.small])
        return whole.index_select(0, self._index_on(whole.device).positions)

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
            full.index_copy_(0, self._index_on(full.device).positions, packed)
            return
        others = [rank for rank in range(plan.world_size) if rank != plan.rank]
        chunks = [self._parts(rank, packed) for rank in others]
        places = [full[slice(*plan.spans[index][rank])] for rank in others for index in plan.medium]
        if places:
            torch._foreach_copy_(places, [piece for chunk in chunks for piece in chunk[:-1]])
        if plan.small and chunks:
            small = torch.cat([chunk[-1] for chunk in chunks])
            full.index_copy_(0, self._index_on(full.device).others, small)

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
        chunk = packed[self._chunks[rank]]
        if not self._plan.medium:
            return [chunk]
        return list(chunk.split_with_sizes(self._chunk_numels[rank]))

    def _index_on(self, device: torch.device) -> SmallIndex:
        """The positions of small regions, which units of one shape share."""
        plan, index = self._plan, self._index
        if index is None or index.positions.device != device:
            spans = tuple(plan.spans[index] for index in plan.small)
            key = (device, plan.world_size, plan.rank, spans)
            index = self._index = _INDEXES.get(key) or SmallIndex(*key)
            _INDEXES[key] = index
        return index


class SmallIndex:
    """Where the elements of small regions lie, counted from each region's offset.

    positions: int64 [elements], rank by rank, region by region.
    own: those of this rank.
    """

    def __init__(
        self, device: torch.device, world_size: int, rank: int, spans: Sequence[Ranges]
    ) -> None:
        by_rank = [*zip(*spans, strict=True)] or [()] * world_size
        of_ranks = [torch.arange(*span) for spans in by_rank for span in spans]
        numels = [sum([stop - start for start, stop in spans]) for spans in by_rank]
        start = sum(numels[:rank])
        self._span = start, stop = start, start + numels[rank]
        self.positions = torch.cat([torch.empty(0, dtype=torch.int64), *of_ranks]).to(device)
        self.own = self.positions[start:stop]

    @cached_property
    def others(self) -> Tensor:
        """The positions without this rank's."""
        start, stop = self._span
        return torch.cat([self.positions[:start], self.positions[stop:]])


_INDEXES = WeakValueDictionary[Hashable, SmallIndex]()
"""Of all units that are in use: an index takes 8 bytes an element."""
