"""Parameters whose elements are ranges of flat tensors, in files of `torch.save`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onefold.checkpoint.checked_files import BlockReader, FileRecord
from onefold.checkpoint.listing import (
    MODEL,
    Extents,
    Keys,
    Listing,
    Piece,
    PieceFile,
    Place,
    SavedTensor,
    Wanted,
)
from onefold.checkpoint.safetensors import bytes_of
from onefold.foreign.archives import extent_of, strides_of
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


@dataclass(frozen=True, slots=True)
class FlatStore:
    """See `PieceStore`. Objects are values, in which a file and a tensor stand for the tensor.

    `strided`: the places of tensors that are no rows, with their strides.
    """

    folder: Path
    files: dict[str, FileRecord]
    strided: dict[Place, Extents] = field(default_factory=dict)

    @contextmanager
    def open_file(self, file: str, wanted: Sequence[Wanted]) -> Iterator[PieceFile]:
        """See `PieceStore`."""
        ranges = [
            w.piece.place.range if w.piece.place in self.strided else _range_of(w) for w in wanted
        ]
        with BlockReader(self.folder / file, self.files[file], ranges) as reader:
            yield _FlatFile(reader, self.strided)

    def read_object(self, listed: Any) -> Any:
        """See `PieceStore`."""
        if isinstance(listed, dict):
            return {key: self.read_object(part) for key, part in listed.items()}
        if isinstance(listed, list | tuple) and not isinstance(listed, Located):
            return type(listed)(self.read_object(part) for part in listed)
        if not isinstance(listed, Located):
            return listed
        saved = listed.tensor
        out = torch.empty(saved.shape, dtype=saved.dtype)
        for piece in saved.pieces:
            wanted = Wanted(piece, saved.dtype, 0, out.numel())
            with self.open_file(piece.place.file, [wanted]) as file:
                file.read_elements(wanted, bytes_of(out))
        return out


class Located(NamedTuple):
    """A tensor inside an object."""

    tensor: SavedTensor


@dataclass(frozen=True, slots=True)
class _FlatFile:
    """See `PieceFile`."""

    reader: BlockReader
    strided: Mapping[Place, Extents]

    def read_elements(self, wanted: Wanted, out: memoryview) -> None:
        place, dtype = wanted.piece.place, wanted.dtype
        if place not in self.strided:
            self.reader.read_into(place.start + wanted.first * dtype.itemsize, out)
            return
        sizes, strides = wanted.piece.sizes, self.strided[place]
        whole = torch.empty(place.length // dtype.itemsize, dtype=dtype)
        self.reader.read_into(place.start, bytes_of(whole))
        elements = whole.as_strided(sizes, strides).reshape(-1)
        out[:] = bytes_of(elements[wanted.first : wanted.first + wanted.numel].contiguous())


def _range_of(wanted: Wanted) -> tuple[int, int]:
    start = wanted.piece.place.start + wanted.first * wanted.dtype.itemsize
    return start, start + wanted.numel * wanted.dtype.itemsize


@dataclass(slots=True)
class ListingDraft:
    """A listing in the making, whose names follow from their keys."""

    store: FlatStore
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Keys] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def add(self, keys: Keys, value: Any, file: str = "") -> None:
        """Add a tensor, or else an object of `file`. Raises `ValueError` for a name twice."""
        name = ".".join(map(str, keys))
        if name in self.paths:
            raise ValueError(f"{name[:80]!r} twice")
        self.paths[name] = keys
        if isinstance(value, StoredTensor):
            value = self.whole(value, file)
        if isinstance(value, SavedTensor):
            self.tensors[name] = value
        else:
            self.objects[name] = self._located(value, file)

    def whole(self, stored: StoredTensor, file: str) -> SavedTensor:
        """Return a tensor of a file as one piece."""
        sizes, strides = stored.sizes, stored.strides
        extent = extent_of(sizes, strides)
        if extent < prod(sizes):
            raise ValueError(f"a tensor of {list(sizes)} in {extent} elements of {file!r}")
        length = extent * stored.dtype.itemsize
        place = Place(file, stored.start, length)
        piece = Piece((0,) * len(sizes), sizes, place)
        is_rows = all(
            s == 1 or a == b for s, a, b in zip(sizes, strides, strides_of(sizes), strict=True)
        )
        if prod(sizes) and not is_rows:
            self.store.strided[place] = strides
        return SavedTensor(sizes, stored.dtype, (piece,) if prod(sizes) else ())

    def _located(self, value: Any, file: str) -> Any:
        if isinstance(value, StoredTensor):
            return Located(self.whole(value, file))
        if isinstance(value, dict):
            return {key: self._located(part, file) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._located(part, file) for part in value)
        return value

    def tie(self, shared: Mapping[str, str]) -> None:
        """Give tied weights their other names. Raises `ValueError` for a name of nothing."""
        for alias, name in shared.items():
            first = self.tensors.get(f"{MODEL}.{name}")
            if first is None or alias in shared.values():
                raise ValueError(f"{str(alias)[:80]!r} as another name of {str(name)[:80]!r}")
            self.add((MODEL, alias), first)
            self.aliases[alias] = name

    def listing(self) -> Listing:
        """Return what was added."""
        return Listing(self.tensors, self.objects, self.paths, self.aliases)
