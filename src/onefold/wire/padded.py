"""Chunks of one size for many ranks: what regions share, packed and unpacked by strided copies.

    packed  | rank 0: a a a  b b -  | rank 1: a a a  b - -  | ...      -: padding, zeros

A region takes two copies, whatever the number of ranks: one of all pieces that are as long as the
first, one of the piece that is shorter. Nothing is kept but the places of regions in a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.layout.message_plan import MessagePlan
from onefold.layout.ranges import Ranges, Stack


class RegionPlace(NamedTuple):
    """Where the pieces of a region lie in chunks, and in a flat tensor."""

    region: int
    chunk: int  # the first element in every chunk
    pieces: Stack
    short: int  # the first element of the piece that is shorter


class PaddedChunks:
    """The chunks of a plan whose regions are cut over many ranks."""

    numels = ()
    """Elements of each rank's chunk, where they differ."""

    def __init__(self, plan: MessagePlan) -> None:
        self._plan = plan
        self._numel = plan.chunk_numel
        self.spans = Ranges.over(plan.packed_numel, plan.world_size)
        self._starts = [*accumulate((plan.longest[index] for index in plan.medium), initial=0)][:-1]
        own = sum(plan.own_numels[index] for index in plan.medium)
        self._has_padding = self._numel > own

    @cached_property
    def _of_pieces(self) -> list[RegionPlace]:
        return self._places_of(self._plan.pieces)

    @cached_property
    def _of_spans(self) -> list[RegionPlace]:
        return self._places_of(self._plan.spans)

    @cached_property
    def _own_spans(self) -> list[tuple[int, slice]]:
        plan = self._plan
        return [(index, slice(*plan.spans[index][plan.rank])) for index in plan.medium]

    def _places_of(self, ranges: Sequence[Ranges]) -> list[RegionPlace]:
        places = list[RegionPlace]()
        for index, chunk in zip(self._plan.medium, self._starts, strict=True):
            stack = ranges[index].stack
            short = ranges[index][stack.full][0] if stack.short else 0
            places.append(RegionPlace(index, chunk, stack, short))
        return places

    def pack_own(self, packed: Tensor, full: Tensor, rows: Sequence[Tensor | None] = ()) -> None:
        """Copy own pieces of the flat `full`, or own `rows` of all regions, to the own chunk."""
        start = self._plan.rank * self._numel
        chunk = packed[start : start + self._numel]
        if self._has_padding:
            chunk.zero_()
        if rows:
            own = [row for index, _ in self._own_spans if (row := rows[index]) is not None]
        else:
            own = [full[span] for _, span in self._own_spans]
        torch._foreach_copy_(self.own_parts(chunk), own)

    def pack(self, packed: Tensor, partials: Sequence[Tensor]) -> None:
        """Copy the pieces of flat `partials` to the chunks of their ranks."""
        matrix = packed.view(self._plan.world_size, self._numel)
        for _, chunk, (_, longest, _, full, _), _ in self._of_pieces:
            if full < self._plan.world_size:
                matrix[full:, chunk : chunk + longest].zero_()
        chunks, pieces = self._views(matrix, partials, self._of_pieces)
        torch._foreach_copy_(chunks, pieces)

    def unpack(self, full: Tensor, packed: Tensor) -> None:
        """Copy the chunks of all ranks to their regions of the flat `full`."""
        matrix = packed.view(self._plan.world_size, self._numel)
        chunks, pieces = self._views(matrix, full, self._of_spans)
        torch._foreach_copy_(pieces, chunks)

    def own_parts(self, chunk: Tensor) -> list[Tensor]:
        """The part of this rank's chunk that each region has, without padding."""
        numels = self._plan.own_numels
        return [
            chunk[start : start + numels[index]]
            for index, start in zip(self._plan.medium, self._starts, strict=True)
        ]

    def _views(
        self, matrix: Tensor, flats: Sequence[Tensor] | Tensor, places: Sequence[RegionPlace]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The pieces of all regions: in the chunks, and in `flats`, one tensor or one a region."""
        chunks, pieces = list[Tensor](), list[Tensor]()
        for region, chunk, (start, longest, stride, full, short), short_start in places:
            flat = flats if isinstance(flats, Tensor) else flats[region]
            if full:
                offset = flat.storage_offset() + start
                chunks.append(matrix[:full, chunk : chunk + longest])
                pieces.append(flat.as_strided((full, longest), (stride, 1), offset))
            if short:
                chunks.append(matrix[full, chunk : chunk + short])
                pieces.append(flat[short_start : short_start + short])
        return chunks, pieces
