"""Lay the parameters of one unit out in its flat buffers.

    full buffer    | a: rank 0 | a: rank 1 |gap| b: rank 0 | b: rank 1 |gap| s |
    shard, rank 0  | a: rank 0 |gap| b: rank 0 | s |gap|
    shard, rank 1  | a: rank 1 |gap| b: rank 1 | s |gap|

Each parameter is one region of the full buffer, in its own memory order; layout/cut.py decides
which piece of it each rank holds. In the shard buffer a piece is one flat slice: one fused
optimizer call, one block on disk, and the local tensor of a DTensor. Pieces may have any length,
also none. A parameter without dimensions is replicated. See docs/adr/0001 and 0015.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from operator import add

from onefold.layout.cut import Cut, Range, Shares, cut_of

ALIGN_NUMEL = 64
"""Regions of the full buffer start at multiples of this many elements.

Matrix kernels may choose another code path for memory that is not aligned to a cache line, so
without it the same weights could give other bits at another place in a buffer.
"""

PIECE_NUMEL = 16
"""Pieces in a shard buffer start at multiples of this many elements (64 bytes in fp32).

torch's fused kernels step the last `numel % vector width` elements of a tensor in scalar code,
which now and then rounds the other way. Were pieces packed tightly, which elements are last would
depend on the cut, and stages would differ in the last bit.
"""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies: its region in the full buffer, each rank's piece of it.

    Also one region of a message: then it has no cut, and `pieces` are all there is.
    """

    fqn: str
    shape: tuple[int, ...]
    full_offset: int
    pieces: tuple[Range, ...]  # per rank: elements of the parameter; none if it has several slabs
    shard_offsets: tuple[int, ...]  # per rank: where the piece starts in that rank's shard buffer
    _cut: Cut | None = None
    num_slabs: int = 1  # of the parameter

    @staticmethod
    def placed(fqn: str, cut: Cut, full_offset: int, shard_offsets: tuple[int, ...]) -> Slot:
        """The slot of a parameter that is cut by `cut`."""
        return Slot(
            fqn, cut.shape, full_offset, _slot_pieces(cut), shard_offsets, cut, cut.num_slabs
        )

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def replicated(self) -> bool:
        """True for a parameter without dimensions, which every rank holds."""
        return not self.shape

    @property
    def cut(self) -> Cut:
        assert self._cut is not None, "a region of a message has no shape to view"
        return self._cut

    def piece_numel(self, rank: int) -> int:
        """Elements that the rank holds."""
        if self._cut is not None:
            return self._cut.piece_numel(rank)
        start, stop = self.pieces[rank]
        return stop - start

    def slabs(self) -> list[Slot]:
        """Each contiguous part of the parameter, as a region of a message."""
        cut = self.cut
        if cut.num_slabs == 1:
            return [self]
        ranks = range(len(cut.ranges))
        numels = [stop - start for start, stop in cut.slab_ranges]
        return [
            Slot(
                self.fqn, self.shape, self.full_offset + slab * cut.slab_numel, cut.slab_ranges,
                tuple(self.shard_offsets[rank] + slab * numels[rank] for rank in ranks),
                num_slabs=cut.num_slabs,
            )
            for slab in range(cut.num_slabs)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of one unit over all ranks, in the full buffer and in every rank's shard."""

    slots: tuple[Slot, ...]
    world_size: int
    full_numel: int  # with alignment gaps
    shard_numels: tuple[int, ...]  # per rank (in a world of one: the full buffer)

    @staticmethod
    def build(
        names_and_shapes: Sequence[tuple[str, Sequence[int]]], world_size: int,
        shares: Shares = None, *, by_rows: bool = False, has_gaps: bool = True,
    ) -> Layout:  # fmt: skip
        """Lay out parameters in the given order over `world_size` ranks; see `cut_of`.

        In a world of one the shard is the full buffer, gaps and all, so that weights can compute
        from where they rest. Without `has_gaps`, pieces of other shards that no optimizer steps
        lie side by side.
        """
        slots: list[Slot] = []
        full_offset, multiple = 0, PIECE_NUMEL if has_gaps else 1
        shard_ends = [0] * world_size
        for fqn, shape in names_and_shapes:
            cut = cut_of(tuple(shape), world_size, shares, by_rows=by_rows)
            slots.append(Slot.placed(fqn, cut, full_offset, tuple(shard_ends)))
            shard_ends = list(map(add, shard_ends, _rooms(cut, multiple)))
            full_offset += round_up(prod(shape), ALIGN_NUMEL)
            if world_size == 1:
                shard_ends = [full_offset]
        return Layout(tuple(slots), world_size, full_offset, tuple(shard_ends))

    def slabs(self) -> list[list[Slot]]:
        """Every slab of each parameter, as regions of a message over one axis."""
        return [slot.slabs() for slot in self.slots]

    def gaps(self, rank: int) -> list[int]:
        """The elements of the rank's shard buffer that belong to no piece."""
        starts = [slot.shard_offsets[rank] for slot in self.slots]
        stops = [slot.shard_offsets[rank] + slot.piece_numel(rank) for slot in self.slots]
        return [
            element
            for stop, start in zip([0, *stops], [*starts, self.shard_numels[rank]], strict=True)
            for element in range(stop, start)
        ]

    def span(self, first: int, last: int, rank: int) -> tuple[int, int]:
        """[start, stop) of slots `first` to `last` in the rank's shard buffer, gaps included."""
        after = self.slots[last + 1 :]
        stop = after[0].shard_offsets[rank] if after else self.shard_numels[rank]
        return self.slots[first].shard_offsets[rank], stop


@lru_cache(maxsize=4096)  # blocks are alike
def _slot_pieces(cut: Cut) -> tuple[Range, ...]:
    """`Slot.pieces` of a parameter."""
    return cut.slab_ranges if cut.num_slabs == 1 else ()


@lru_cache(maxsize=4096)
def _rooms(cut: Cut, multiple: int) -> tuple[int, ...]:
    """Elements of each rank's shard that a piece takes."""
    return tuple(round_up(cut.piece_numel(rank), multiple) for rank in range(len(cut.ranges)))


def split_at(spans: Sequence[Range], numel: int) -> list[int]:
    """Lengths that split `numel` elements at ascending `spans`: gap, span, ..., gap, span, rest.

    `flat.split_with_sizes(split_at(spans, len(flat)))[1::2]` are the spans of a flat tensor.
    """
    bounds = [0, *(bound for span in spans for bound in span), numel]
    return [stop - start for start, stop in pairwise(bounds)]


def round_up(numel: int, multiple: int) -> int:
    """`numel`, or the next multiple above it."""
    return -(-numel // multiple) * multiple
