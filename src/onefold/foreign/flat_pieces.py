"""Parameters whose elements are ranges of flat tensors, in files of `torch.save`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from onefold.checkpoint.listing import Extents, Piece, Place, SavedTensor
from onefold.foreign.torch_files import StoredTensor
from onefold.layout.cut import Box


class FlatRun(NamedTuple):
    """Elements of a parameter that follow each other in a file: `numel` from byte `start` on."""

    numel: int
    file: str
    start: int


def run_of(flat: StoredTensor, file: str, first: int, numel: int) -> FlatRun:
    """Return the elements of a flat tensor from number `first` on. Raises `ValueError`."""
    if len(flat.sizes) != 1 or flat.strides != (1,):
        raise ValueError(f"a partition of shape {list(flat.sizes)} in {file!r}")
    if first < 0 or numel < 0 or first + numel > flat.sizes[0]:
        got = f"{flat.sizes[0]} elements of a partition in {file!r}"
        raise ValueError(f"{got}, where elements {first} to {first + numel} are wanted")
    return FlatRun(numel, file, flat.start + first * flat.dtype.itemsize)


def boxes_between(shape: Extents, first: int, stop: int) -> Iterator[Box]:
    """Yield boxes that hold the elements [first, stop) of a tensor, each contiguous, in order.

    >>> list(boxes_between((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if first >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    up, down, own = -(-first // row), stop // row, first // row
    if own == (stop - 1) // row and up >= down:  # a part of one row
        for offsets, sizes in boxes_between(shape[1:], first - own * row, stop - own * row):
            yield (own, *offsets), (1, *sizes)
        return
    if first < up * row:
        yield from boxes_between(shape, first, up * row)
    if up < down:
        yield (up, *(0 for _ in shape[1:])), (down - up, *shape[1:])
    if down * row < stop:
        yield from boxes_between(shape, down * row, stop)


def joined_runs(
    name: str, shape: Extents, dtype: torch.dtype, runs: Sequence[FlatRun]
) -> SavedTensor:
    """Return the tensor of `shape` and `name` that runs make up, one after the other.

    Raises `ValueError` where they hold more or fewer elements.
    """
    if sum(run.numel for run in runs) != prod(shape):
        got = f"{sum(run.numel for run in runs)} elements"
        raise ValueError(f"{got} for {name[:80]!r} of shape {list(shape)}")
    pieces, first = list[Piece](), 0
    for run in runs:
        start = run.start
        for offsets, sizes in boxes_between(shape, first, first + run.numel):
            place = Place(run.file, start, prod(sizes) * dtype.itemsize)
            pieces.append(Piece(offsets, sizes, place))
            start += place.length
        first += run.numel
    return SavedTensor(shape, dtype, tuple(pieces))
