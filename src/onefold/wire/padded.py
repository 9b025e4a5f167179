"""Chunks of one size for many ranks: what regions share, packed and unpacked by strided copies.

    packed  | rank 0: a a a  b b -  | rank 1: a a a  b - -  | ...      -: padding, zeros

A region takes two copies, whatever the number of ranks: one of all pieces that are as long as the
first, one of the piece that is shorter. Nothing is kept but the places of regions in a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from onefold.layout.message_plan import MessagePlan
from onefold.layout.ranges import Ranges

Pair = tuple[Tensor, Tensor]


class PaddedChunks:
    """The chunks of a plan whose regions are cut over many ranks."""

    def __init__(self, plan: MessagePlan) -> None:
        self._plan = plan
        self._numel = plan.chunk_numel
        self.spans = Ranges.over(plan.packed_numel, plan.world_size)
        ends = accumulate((plan.longest[index] for index in plan.medium), initial=0)
        self._places = dict(zip(plan.medium, ends, strict=False))

    @property
    def numels(self) -> list[int]:
        """Elements of each rank's chunk."""
        return [self._numel] * self._plan.world_size

    def pack_own(self, packed: Tensor, full: Tensor, rows: Sequence[Tensor | None] = ()) -> None:
        """Copy own pieces of the flat `full`, or own `rows` of all regions, to the own chunk."""
        plan = self._plan
        chunk = self._matrix(packed)[plan.rank]
        if self._numel > sum(plan.own_numels[index] for index in plan.medium):
            chunk.zero_()
        own = [
            full[slice(*plan.spans[index][plan.rank])] if not rows else rows[index]
            for index in plan.medium
        ]
        torch._foreach_copy_(self.own_parts(chunk), own)

    def pack(self, packed: Tensor, partials: Sequence[Tensor]) -> None:
        """Copy the pieces of flat `partials` to the chunks of their ranks."""
        plan, matrix = self._plan, self._matrix(packed)
        into, pieces = list[Tensor](), list[Tensor]()
        for index in plan.medium:
            place, longest = self._places[index], plan.longest[index]
            full = plan.pieces[index].stack.full
            if full < plan.world_size:
                matrix[full:, place : place + longest].zero_()
            for chunk, piece in self._pairs(matrix, partials[index], index, plan.pieces[index]):
                into.append(chunk)
                pieces.append(piece)
        torch._foreach_copy_(into, pieces)

    def unpack(self, full: Tensor, packed: Tensor) -> None:
        """Copy the chunks of all ranks to their regions of the flat `full`."""
        plan, matrix = self._plan, self._matrix(packed)
        pairs = [
            pair for index in plan.medium
            for pair in self._pairs(matrix, full, index, plan.spans[index])
        ]  # fmt: skip
        torch._foreach_copy_([piece for _, piece in pairs], [chunk for chunk, _ in pairs])

    def own_parts(self, chunk: Tensor) -> list[Tensor]:
        """The part of this rank's chunk that each region has, without padding."""
        plan = self._plan
        return [
            chunk[place : place + plan.own_numels[index]] for index, place in self._places.items()
        ]

    def _matrix(self, packed: Tensor) -> Tensor:
        return packed.view(self._plan.world_size, self._numel)

    def _pairs(self, matrix: Tensor, flat: Tensor, index: int, pieces: Ranges) -> Iterator[Pair]:
        """The pieces of a region in the chunks and in a flat tensor, as views."""
        start, longest, stride, full, short = pieces.stack
        place, offset = self._places[index], flat.storage_offset()
        if full:
            rows = flat.as_strided((full, longest), (stride, 1), offset + start)
            yield matrix[:full, place : place + longest], rows
        if short:
            start = pieces[full][0]
            yield matrix[full, place : place + short], flat[start : start + short]
