"""Plan how the regions of one message travel, from shapes and ranks. No torch here.

    few ranks, or shares     large    apart, from and to where it lies
                             medium   in one message | pieces of rank 0 | pieces of rank 1 | ...
                             small    in it as well, behind those, element by element
    many ranks               large    apart, if pieces are equal: one collective in place
                             counted  apart, if padding would cost too much: one, with counts
                             medium   in one message of equal chunks, each piece in room for the
                                      longest: | rank 0 | rank 1 | ...

How many collectives a message takes does not depend on the number of ranks, above `FEW_RANKS`, nor
does what is kept of it. See docs/adr/0001 and 0038.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from onefold.layout.ranges import Ranges
from onefold.layout.rows import Slot

PACK_NBYTES = 64 * 1024
"""Regions whose pieces are smaller share one message: its copy costs less than its latency.

Measured on 2 cores, gloo: a transformer block as 4 large regions and one packed message gathers in
9.0 ms (2 ranks), as one contiguous message in 9.5 ms, packed and copied out whole in 10.4 ms.
"""

SHARE_NBYTES = 2 << 20
"""Regions with fewer bytes in all share a message, too, except on NCCL: gloo wakes a thread for
each message. On 2 cores a step of 3 M parameters takes 3-7 % less of 2 ranks, 8-14 % less of 4."""

FEW_RANKS = 16
"""Messages of more ranks have chunks of one size; those of fewer have no padding.

On gloo and 2 cores, with rows that do not divide, chunks of one size take 0.93-1.32 of the time at
3 to 8 ranks, 1.00-1.09 at 12 and 0.95-0.98 at 16 (benchmarks/few_ranks.py).
"""

ALIGN_NBYTES = 16
"""Parts of a quantized message start at multiples of it: a codec reads them as wider numbers."""

MOST_PADDING = 0.06
"""Of the elements of a message, for pieces that are shorter than the longest."""


class Size(Enum):
    """How a region travels, see the module."""

    SMALL = auto()
    MEDIUM = auto()
    LARGE = auto()


class MessageRanks(Protocol):
    """The ranks that exchange a message, and the one that plans it."""

    @property
    def world_size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def is_nccl(self) -> bool: ...
    @property
    def packs(self) -> bool: ...


class MessagePlan:
    """How the regions of one message are cut over the ranks, and what one of them sends.

    Only reductions have replicated regions, sent to every rank. `name` is that of the unit or
    parameter, for observers. All lists have an element a region; none has an element a rank, but
    `lengths`, where ranks are few or have shares.
    """

    def __init__(
        self, slots: Sequence[Slot], offsets: Sequence[int] | None, group: MessageRanks,
        itemsize: int, name: str = "",
    ) -> None:  # fmt: skip
        self.name = name
        self.itemsize = itemsize
        self.rank, self.world_size = group.rank, group.world_size
        self.pieces = [slot.pieces for slot in slots]
        self.is_replicated = [slot.replicated and group.world_size > 1 for slot in slots]
        self.is_matrix = [bool(slot.fqn) and len(slot.shape) > 1 for slot in slots]
        self.is_wide = group.world_size > FEW_RANKS and not any(p.prefix for p in self.pieces)
        self.lengths = [] if self.is_wide else [pieces.lengths for pieces in self.pieces]
        self.numels, self.longest, self.own_numels = self._totals()
        is_nccl, packs = group.is_nccl, group.packs  # the first asks torch for its backends
        sizes = [
            self._size(index, slot.num_slabs, is_nccl=is_nccl, packs=packs)
            for index, slot in enumerate(slots)
        ]
        self.small, self.medium, self.large = (
            [index for index, size in enumerate(sizes) if size is wanted] for wanted in Size
        )
        self.counted = self._counted() if self.is_wide else []
        self.medium = [index for index in self.medium if index not in self.counted]
        self._offsets = offsets
        pairs = zip(slots, self.is_replicated, strict=True)
        state = [i for i, (slot, is_one) in enumerate(pairs) if slot.fqn and not is_one]
        self._sharded_numel = sum([self.numels[index] for index in state])
        self.own_numel = sum([self.own_numels[index] for index in state])
        self.numel = sum(self.numels)
        self.identity = (name, itemsize, self.numel)
        """Tells the message from others: the same on every rank."""

    def _totals(self) -> tuple[list[int], list[int], list[int]]:
        """Of each region: elements, those of the longest piece, and those of this rank's."""
        if self.is_wide:
            pieces, rank = self.pieces, self.rank
            return (
                [p.numel for p in pieces],
                [p.most for p in pieces],
                [p.length(rank) for p in pieces],
            )
        tables = self.lengths
        return [*map(sum, tables)], [*map(max, tables)], [table[self.rank] for table in tables]

    def _size(self, index: int, num_slabs: int, *, is_nccl: bool, packs: bool) -> Size:
        """Classify a region.

        A region that is one of `num_slabs` is small if all of them are: an index costs 8 bytes for
        each element.
        """
        nbytes = self.longest[index] * self.itemsize
        if self.is_wide:
            is_large = not packs and nbytes >= PACK_NBYTES and self.pieces[index].common > 0
            return Size.LARGE if is_large else Size.MEDIUM
        if self.is_replicated[index] or nbytes * num_slabs < PACK_NBYTES:
            return Size.SMALL
        is_few = self.numels[index] * self.itemsize <= SHARE_NBYTES
        shares = packs or (not is_nccl and is_few)
        return Size.MEDIUM if shares or nbytes < PACK_NBYTES else Size.LARGE

    def _counted(self) -> list[int]:
        """The regions that pad the shared message most, as many as it has too much padding."""
        numels = {index: self.numels[index] for index in self.medium}
        padded = {index: self.longest[index] * self.world_size - numels[index] for index in numels}
        counted, left = list[int](), sum(numels.values())
        for index in sorted(padded, key=lambda index: -padded[index]):
            if sum(padded.values()) <= MOST_PADDING * left:
                break
            if self.longest[index] * self.itemsize < PACK_NBYTES:
                continue  # a message of its own would cost more than the padding
            if not self.pieces[index].is_joined:
                continue  # the rows of one place of every node: others lie between them
            counted.append(index)
            left -= numels[index]
            del padded[index]
        return counted

    def piece_numels(self, index: int) -> Sequence[int]:
        """Elements of each rank's piece of a region; none where many have pieces of one size."""
        if self.is_wide:
            return self.pieces[index].lengths if index in self.counted else ()
        return self.lengths[index]

    # elements that this rank sends

    @cached_property
    def gather_numel(self) -> int:
        """Own rows, to all others."""
        return self.own_numel * (self.world_size - 1)

    @cached_property
    def reduce_numel(self) -> int:
        """The rows of all others, to each its own."""
        return self._sharded_numel - self.own_numel

    @cached_property
    def control_numel(self) -> int:
        """Flags, and replicated gradients, to all others."""
        return (sum(self.own_numels) - self.own_numel) * (self.world_size - 1)

    @cached_property
    def gather_padding(self) -> int:
        """What is behind own rows, to all others."""
        own = sum(self.own_numels[index] for index in self._shared)
        return (self.chunk_numel - own) * (self.world_size - 1)

    @cached_property
    def reduce_padding(self) -> int:
        """What is behind the rows of all others, to each its own."""
        own = sum(self.own_numels[index] for index in self._shared)
        return self.packed_numel - self.chunk_numel - (self._shared_numel - own)

    # where elements lie

    @property
    def _shared(self) -> list[int]:
        return [*self.medium, *self.small]

    @property
    def _shared_numel(self) -> int:
        return sum([self.numels[index] for index in self._shared])

    @cached_property
    def chunk_numel(self) -> int:
        """Elements of this rank's part of the message that regions share."""
        numels = self.longest if self.is_wide else self.own_numels
        return sum(numels[index] for index in self._shared)

    @cached_property
    def packed_numel(self) -> int:
        """Elements of the message that regions share."""
        return self.chunk_numel * self.world_size if self.is_wide else self._shared_numel

    @cached_property
    def spans(self) -> list[Ranges]:
        """[start, stop) of each region and rank: from the offsets, or in small regions, joined."""
        is_small = set(self.small)
        ends = (
            pieces[-1][1] if index in is_small else 0 for index, pieces in enumerate(self.pieces)
        )
        starts = [0, *accumulate(ends)][:-1] if self._offsets is None else self._offsets
        return [pieces.moved(offset) for pieces, offset in zip(self.pieces, starts, strict=True)]
