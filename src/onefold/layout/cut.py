"""Decide which rank holds which piece of each parameter: the only place that does.

A cut divides one dimension of a parameter into a range for each rank.

    even       by rows, where torch.chunk cuts: plain DTensor(Shard(0))
    balanced   by another dimension, where rows would leave some rank above 1.05 of the mean
    weighted   in proportion to one integer weight per rank; a rank of weight 0 holds nothing

Memory stays in the parameter's own order. A parameter that is cut by dimension d is a stack of
*slabs*, one for each index into the dimensions before d; each slab is contiguous and cut alike:

    [2, 3, c] over 3 ranks by dimension 1     slab 0: | 0 | 1 | 2 |    slab 1: | 0 | 1 | 2 |

A cut by rows has one slab. A parameter without dimensions is replicated: every rank holds it.
`cut_of` is a pure function and cached, so engine, planner and reports see the same bounds.
See docs/adr/0015-one-owner-of-cuts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from onefold.layout.ranges import Range, Ranges, Shares

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor, one of each per dimension."""

MAX_IMBALANCE = 1.05
"""A cut by rows is kept while no rank holds more than this multiple of its fair share."""

MIN_RANK_NUMEL = 1024
"""Parameters with fewer elements per rank are cut by rows: balancing them would save no memory
worth the messages. It is the least that [8, 128, 64] leaves to each of 64 ranks."""

MAX_SLABS = 256
"""Most slabs of one parameter: each of them is a part of every message of its own."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The range of one dimension that each rank holds of a parameter."""

    shape: tuple[int, ...]
    dim: int
    ranges: Ranges  # per rank: indices into the dimension; (0, 1) if replicated

    @property
    def is_replicated(self) -> bool:
        """True for a parameter without dimensions, which every rank holds."""
        return not self.shape

    @property
    def num_slabs(self) -> int:
        """How many contiguous parts the parameter has, each of them cut alike."""
        return prod(self.shape[: self.dim])

    @property
    def slab_numel(self) -> int:
        """Elements of one slab over all ranks."""
        return prod(self.shape[self.dim :])

    @property
    def slab_ranges(self) -> Ranges:
        """Per rank: its elements of one slab, counted from the slab's start."""
        return self.ranges.scaled(prod(self.shape[self.dim + 1 :]))

    def spans(self, rank: int) -> list[Range]:
        """The rank's elements of the parameter: a range in each slab, in order."""
        start, stop = self.slab_ranges[rank]
        firsts = range(0, self.num_slabs * self.slab_numel, self.slab_numel or 1)
        return [(first + start, first + stop) for first in firsts] or [(0, 0)]

    def piece_numel(self, rank: int) -> int:
        """Elements that the rank holds."""
        return prod(self.piece_shape(rank))

    def piece_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the rank's piece: the parameter's, but for the dimension that is cut."""
        return self.box(rank)[1]

    def box(self, rank: int) -> Box:
        """Offsets and sizes of the rank's piece in the parameter, as checkpoints list them."""
        if self.is_replicated:
            return (), ()
        start, stop = self.ranges[rank]
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        offsets = (*(0,) * len(before), start, *(0,) * len(after))
        return offsets, (*before, stop - start, *after)

    def own_view(self, full: Tensor, rank: int) -> Tensor:
        """The rank's piece of `full` [shape, or flat], as a view of its memory if it can be."""
        if self.is_replicated:
            return full.reshape(())
        start, stop = self.ranges[rank]
        return full.reshape(self.shape).narrow(self.dim, start, stop - start)


def spans_of(box: Box, shape: tuple[int, ...]) -> list[Range]:
    """The elements of a box in a tensor of `shape`, as ranges in memory order.

    >>> spans_of(((0, 2), (2, 1)), (2, 4))
    [(2, 3), (6, 7)]
    """
    offsets, sizes = box
    if not prod(sizes):
        return []
    whole = len(shape)  # dimensions from here on are whole in the box
    while whole and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    if not whole:
        return [(0, prod(shape))]
    numel = prod(shape[whole:])
    length = sizes[whole - 1] * numel
    starts = [0]
    for dim in range(whole):
        step = prod(shape[dim + 1 :])
        last = 1 if dim == whole - 1 else sizes[dim]
        starts = [begin + (offsets[dim] + i) * step for begin in starts for i in range(last)]
    return [(start, start + length) for start in starts]


@lru_cache(maxsize=4096)  # blocks are alike, and the planner repeats calls for every strategy
def cut_of(
    shape: tuple[int, ...], world_size: int, shares: Shares = None, *, by_rows: bool = False
) -> Cut:
    """Cut a parameter of `shape` over `world_size` ranks.

    Args:
        shape: the parameter's.
        world_size: number of ranks.
        shares: one weight per rank, in rank order; None cuts evenly.
        by_rows: keep dimension 0 however unbalanced it is.
    """
    if not shape:
        return Cut((), 0, Ranges.alike(1, world_size))
    dim = 0
    if not by_rows and prod(shape) >= MIN_RANK_NUMEL * world_size:
        dim = _balanced_dim(shape, world_size, shares)
    return Cut(shape, dim, Ranges.over(shape[dim], world_size, shares))


def imbalance_of(extent: int, world_size: int, shares: Shares = None) -> float:
    """The most that a rank holds of a dimension, as a multiple of its fair share."""
    ranges = Ranges.over(extent, world_size, shares)
    if shares is None:
        return ranges.longest * world_size / extent if extent else 1.0
    fair = extent / sum(shares)
    pairs: Sequence[tuple[int, int]] = list(zip(ranges.lengths, shares, strict=True))
    return max((length / (fair * weight) for length, weight in pairs if weight), default=1.0)


def _balanced_dim(shape: tuple[int, ...], world_size: int, shares: Shares) -> int:
    """The first dimension that is balanced; if none is, the one that is most nearly."""
    dims = [dim for dim in range(len(shape)) if prod(shape[:dim]) <= MAX_SLABS]
    imbalances = [imbalance_of(shape[dim], world_size, shares) for dim in dims]
    balanced = (
        dim for dim, imbalance in zip(dims, imbalances, strict=True) if imbalance <= MAX_IMBALANCE
    )
    return next(balanced, imbalances.index(min(imbalances)))
