"""Lay the parameters of one unit out in its flat buffers.

    full buffer    | a: rank 0 | a: rank 1 |gap| b: rank 0 | b: rank 1 |gap| s |
    shard, rank 0  | a: rank 0 |gap| b: rank 0 | s |gap|
    shard, rank 1  | a: rank 1 |gap| b: rank 1 | s |gap|

Each parameter is one region of the full buffer, in its own memory order; layout/cut.py decides
which piece of it each rank holds. In the shard buffer a piece is one flat slice: one fused
optimizer call, one block on disk, and the local tensor of a DTensor. Pieces may have any length,
also none. A parameter without dimensions is replicated. See docs/adr/0001, 0002 and 0015.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod

from onefold.layout.cut import Cut, cut_of
from onefold.layout.ranges import Range, Ranges, Shares

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
    pieces: Ranges  # per rank: elements of the parameter; none if it has several slabs
    _cut: Cut | None = None
    num_slabs: int = 1  # of the parameter

    @staticmethod
    def placed(fqn: str, cut: Cut, full_offset: int) -> Slot:
        """The slot of a parameter that is cut by `cut`."""
        return Slot(fqn, cut.shape, full_offset, _slot_pieces(cut), cut, cut.num_slabs)

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
        pieces, numel, offset = cut.slab_ranges, cut.slab_numel, self.full_offset
        starts = range(offset, offset + cut.num_slabs * numel, numel)
        return [Slot(self.fqn, self.shape, at, pieces, num_slabs=cut.num_slabs) for at in starts]


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of one unit over all ranks, in the full buffer and in every rank's shard."""

    slots: tuple[Slot, ...]
    world_size: int
    full_numel: int  # with alignment gaps
    _multiple: int  # of elements, at which pieces start in a shard
    _starts: dict[int, tuple[int, ...]] = field(
        default_factory=dict[int, tuple[int, ...]], compare=False, repr=False
    )

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
        for fqn, shape in names_and_shapes:
            cut = cut_of(tuple(shape), world_size, shares, by_rows=by_rows)
            slots.append(Slot.placed(fqn, cut, full_offset))
            full_offset += round_up(prod(shape), ALIGN_NUMEL)
        return Layout(tuple(slots), world_size, full_offset, multiple)

    def starts(self, rank: int) -> tuple[int, ...]:
        """Where each piece of the rank starts in its shard buffer; then the end of that buffer."""
        if rank not in self._starts:
            if self.world_size == 1:
                ends = (*(slot.full_offset for slot in self.slots), self.full_numel)
            else:
                rooms = [_room(slot.cut, rank, self._multiple) for slot in self.slots]
                ends = tuple(accumulate(rooms, initial=0))
            self._starts[rank] = ends
        return self._starts[rank]

    def shard_numel(self, rank: int) -> int:
        """Elements of the rank's shard buffer (in a world of one: the full buffer)."""
        return self.starts(rank)[-1]

    def own_spans(self, rank: int) -> list[Range]:
        """[start, stop) of each slot's piece in the rank's shard buffer."""
        pairs = zip(self.slots, self.starts(rank), strict=False)
        return [(start, start + slot.piece_numel(rank)) for slot, start in pairs]

    def slabs(self) -> list[list[Slot]]:
        """Every slab of each parameter, as regions of a message over one axis."""
        return [slot.slabs() for slot in self.slots]

    def gaps(self, rank: int) -> list[int]:
        """The elements of the rank's shard buffer that belong to no piece."""
        stops = [0, *(stop for _, stop in self.own_spans(rank))]
        pairs = zip(stops, self.starts(rank), strict=True)
        return [element for stop, start in pairs for element in range(stop, start)]

    def span(self, first: int, last: int, rank: int) -> tuple[int, int]:
        """[start, stop) of slots `first` to `last` in the rank's shard buffer, gaps included."""
        starts = self.starts(rank)
        return starts[first], starts[last + 1]


@lru_cache(maxsize=4096)  # blocks are alike
def _slot_pieces(cut: Cut) -> Ranges:
    """`Slot.pieces` of a parameter."""
    return cut.slab_ranges if cut.num_slabs == 1 else cut.slab_ranges[:0]


@lru_cache(maxsize=4096)
def _room(cut: Cut, rank: int, multiple: int) -> int:
    """Elements of the rank's shard that a piece takes."""
    return round_up(cut.piece_numel(rank), multiple)


def split_at(spans: Sequence[Range], numel: int) -> list[int]:
    """Lengths that split `numel` elements at ascending `spans`: gap, span, ..., gap, span, rest.

    `flat.split_with_sizes(split_at(spans, len(flat)))[1::2]` are the spans of a flat tensor.
    """
    bounds = [0, *(bound for span in spans for bound in span), numel]
    return [stop - start for start, stop in pairwise(bounds)]


def round_up(numel: int, multiple: int) -> int:
    """`numel`, or the next multiple above it."""
    return -(-numel // multiple) * multiple
