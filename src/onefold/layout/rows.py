"""How the parameters of one unit lie in its flat buffers, and which rows each rank owns.

    full buffer    | a: rank 0 | a: rank 1 |gap| b: rank 0 | b: rank 1 |gap| s |
    shard, rank 0  | a: rank 0 |gap| b: rank 0 | s |gap|
    shard, rank 1  | a: rank 1 |gap| b: rank 1 | s |gap|

Each parameter is one region of the full buffer, cut by rows as `torch.chunk` cuts: so a rank's
piece is at once a flat slice (one fused optimizer call, one message) and the local tensor of a
plain `DTensor(Shard(0))`. A parameter without rows (0-dim) is replicated: every rank owns it whole.
Pieces may have any length, also none; nothing assumes that they are equal. See docs/adr/0001.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

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


def row_bounds(num_rows: int, world_size: int) -> tuple[int, ...]:
    """The `world_size + 1` row numbers at which `torch.chunk` cuts `num_rows` rows."""
    per_rank = -(-num_rows // world_size)
    return tuple(min(rank * per_rank, num_rows) for rank in range(world_size + 1))


@lru_cache(maxsize=1024)  # a plan asks for few shapes, hundreds of ranks, many ways to train
def piece_numels(shape: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    """Elements that each rank owns of a parameter; 1 of one without rows."""
    return tuple(stop - start for start, stop in _pieces(shape, world_size))


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies: its region in the full buffer, each rank's piece of it."""

    fqn: str
    shape: tuple[int, ...]
    full_offset: int
    pieces: tuple[tuple[int, int], ...]  # per rank: [start, stop) in elements of the parameter
    shard_offsets: tuple[int, ...]  # per rank: where the piece starts in that rank's shard buffer

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def replicated(self) -> bool:
        """True for a parameter without rows, which every rank holds whole."""
        return not self.shape

    def piece_numel(self, rank: int) -> int:
        start, stop = self.pieces[rank]
        return stop - start

    def rows(self, rank: int) -> tuple[int, int]:
        """[start, stop) of the rows that the rank owns; (0, 1) of a parameter without rows."""
        if self.replicated:
            return (0, 1)
        bounds = row_bounds(self.shape[0], len(self.pieces))
        return bounds[rank], bounds[rank + 1]

    def piece_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the rank's rows: the parameter's, but for the first dimension."""
        if self.replicated:
            return ()
        row_numel = prod(self.shape[1:])
        if row_numel == 0:
            start, stop = self.rows(rank)
            return (stop - start, *self.shape[1:])
        return (self.piece_numel(rank) // row_numel, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of one unit over `world_size` ranks."""

    slots: tuple[Slot, ...]
    world_size: int
    full_numel: int  # with alignment gaps
    shard_numels: tuple[int, ...]  # per rank (in a world of one: the full buffer)

    @staticmethod
    def build(names_and_shapes: Sequence[tuple[str, Sequence[int]]], world_size: int) -> Layout:
        """Lay out parameters in the given order over `world_size` ranks.

        In a world of one the shard is the full buffer, gaps and all, so that weights can compute
        from where they rest.
        """
        slots: list[Slot] = []
        full_offset = 0
        shard_ends = [0] * world_size
        for fqn, shape in names_and_shapes:
            pieces = _pieces(tuple(shape), world_size)
            slots.append(Slot(fqn, tuple(shape), full_offset, pieces, tuple(shard_ends)))
            shard_ends = [
                end + round_up(stop - start, PIECE_NUMEL)
                for end, (start, stop) in zip(shard_ends, pieces, strict=True)
            ]
            full_offset += round_up(prod(shape), ALIGN_NUMEL)
            if world_size == 1:
                shard_ends = [full_offset]
        return Layout(tuple(slots), world_size, full_offset, tuple(shard_ends))

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


def round_up(numel: int, multiple: int) -> int:
    """`numel`, or the next multiple above it."""
    return -(-numel // multiple) * multiple


def _pieces(shape: tuple[int, ...], world_size: int) -> tuple[tuple[int, int], ...]:
    if not shape:
        return ((0, 1),) * world_size
    row_numel = prod(shape[1:])
    bounds = [row * row_numel for row in row_bounds(shape[0], world_size)]
    return tuple(pairwise(bounds))
