"""Follow a conversion of weights as moves of boxes: any row is found without running it.

A conversion of transformers runs once, on `Mosaic`s: tensors without values that know of which
boxes of which sources they are made. Joining, cutting, transposing and reshaping move boxes;
everything else is refused (`NotBoxes`). The same boxes serve both directions: rows of a result are
read from rows of files, and own rows are written to theirs. See docs/adr/0035.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from onefold.layout.cut import Box

aten = torch.ops.aten


class NotBoxes(Exception):
    """An operation that does more than move boxes."""


@dataclass(frozen=True, slots=True)
class MosaicTile:
    """A box of a mosaic. `view`: what is in it, a view of the source's tensor on `meta`."""

    offsets: tuple[int, ...]
    source: str
    view: Tensor
    base: tuple[int, ...]  # the shape of the source

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.view.shape)


@dataclass(frozen=True, slots=True)
class Move:
    """Equal elements: `box` of the mosaic, and `origin` of the source, its dimensions permuted.

    `dims`: for each dimension of the mosaic that of the source, None where the source has none.
    """

    box: Box
    source: str
    origin: Box
    dims: tuple[int | None, ...]

    def shaped(self, values: Tensor) -> Tensor:
        """Return the values of `origin` in the shape of `box`."""
        kept = [dim for dim in self.dims if dim is not None]
        gone = [dim for dim in range(values.dim()) if dim not in kept]
        moved = values.permute((*kept, *gone)).reshape([values.shape[dim] for dim in kept])
        for at, dim in enumerate(self.dims):
            if dim is None:
                moved = moved.unsqueeze(at)
        return moved

    def within(self, box: Box) -> Move | None:
        """Return the part inside a box of the mosaic; None if there is none."""
        cut = _intersection(self.box, box)
        if cut is None:
            return None
        firsts, lengths = list(self.origin[0]), list(self.origin[1])
        for start, begin, size, dim in zip(cut[0], self.box[0], cut[1], self.dims, strict=True):
            if dim is not None:
                firsts[dim] += start - begin
                lengths[dim] = size
        return Move(cut, self.source, (tuple(firsts), tuple(lengths)), self.dims)

    def of_rows(self, own: Box) -> Move | None:
        """Return the part whose source lies inside a box of the source; None if there is none."""
        cut = _intersection(self.origin, own)
        if cut is None:
            return None
        firsts, lengths = list(self.box[0]), list(self.box[1])
        for at, dim in enumerate(self.dims):
            if dim is not None:
                firsts[at] += cut[0][dim] - self.origin[0][dim]
                lengths[at] = cut[1][dim]
        return Move((tuple(firsts), tuple(lengths)), self.source, cut, self.dims)


def _intersection(one: Box, other: Box) -> Box | None:
    firsts = tuple(map(max, one[0], other[0]))
    ends = zip(*one, *other, strict=True)
    lengths = [min(a + n, b + m) - first for (a, n, b, m), first in zip(ends, firsts, strict=True)]
    return None if any(length <= 0 for length in lengths) else (firsts, tuple(lengths))


class Mosaic(Tensor):
    """A tensor without values, made of tiles."""

    tiles: tuple[MosaicTile, ...]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, tiles: Sequence[MosaicTile]
    ) -> Mosaic:
        made: Mosaic = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(shape), dtype=dtype, device=torch.device("cpu")
        )
        made.tiles = tuple(tiles)
        return made

    @staticmethod
    def blank(name: str, shape: Sequence[int], dtype: torch.dtype) -> Mosaic:
        """Return the mosaic of one source, whole."""
        whole = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return Mosaic(shape, dtype, [MosaicTile((0,) * len(shape), name, whole, tuple(shape))])

    def __repr__(self, **_: Any) -> str:
        return f"Mosaic({list(self.shape)}, {len(self.tiles)} tiles)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        move = MOVES.get(func)
        if move is None:
            raise NotBoxes(f"{func}")
        return move(*args, **(kwargs or {}))

    @property
    def whole_source(self) -> str | None:
        """The source that this is, unchanged; None if it is of several, or moved."""
        if len(self.tiles) != 1:
            return None
        (tile,) = self.tiles
        is_same = tile.sizes == tile.base == tuple(self.shape)
        return tile.source if is_same and tile.view.is_contiguous() else None

    def moves(self) -> Iterator[Move]:
        """Yield what the mosaic is made of, as boxes of sources."""
        for tile in self.tiles:
            yield from _moves(tile)


def _moves(tile: MosaicTile) -> Iterator[Move]:
    """Yield the boxes of a tile: dimensions that step over rows of the source are cut into ones."""
    if not tile.view.numel():
        return
    steps = strides_of(tile.base)
    dims: list[int | None] = []
    start = _unravelled(int(tile.view.storage_offset()), tile.base, steps)
    for at, (size, stride) in enumerate(zip(tile.sizes, tile.view.stride(), strict=True)):
        if size == 1:
            dims.append(None)
            continue
        found = [
            dim for dim, step in enumerate(steps)
            if step == stride and tile.base[dim] > 1 and dim not in dims
            and start[dim] + size <= tile.base[dim]
        ]  # fmt: skip
        if not found:
            for index in range(size):
                offsets = list(tile.offsets)
                offsets[at] += index
                view = tile.view.narrow(at, index, 1)
                yield from _moves(MosaicTile(tuple(offsets), tile.source, view, tile.base))
            return
        dims.append(found[0])
    lengths = [1] * len(tile.base)
    for size, dim in zip(tile.sizes, dims, strict=True):
        if dim is not None:
            lengths[dim] = size
    yield Move((tile.offsets, tile.sizes), tile.source, (start, tuple(lengths)), tuple(dims))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def _unravelled(offset: int, shape: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    return tuple(offset // step % max(1, size) for size, step in zip(shape, steps, strict=True))


# operations, as torch's dispatcher names them


def _mapped(
    mosaic: Mosaic,
    shape: Sequence[int],
    place: Callable[[MosaicTile], tuple[Sequence[int], Tensor]],
) -> Mosaic:
    """Return the mosaic in which each tile has another place and view."""
    tiles = []
    for tile in mosaic.tiles:
        offsets, view = place(tile)
        tiles.append(MosaicTile(tuple(offsets), tile.source, view, tile.base))
    return Mosaic(shape, mosaic.dtype, tiles)


def _permute(mosaic: Mosaic, dims: Sequence[int]) -> Mosaic:
    order = [dim % mosaic.dim() for dim in dims]
    shape = [mosaic.shape[dim] for dim in order]
    return _mapped(
        mosaic, shape, lambda t: ([t.offsets[dim] for dim in order], t.view.permute(order))
    )


def _transpose(mosaic: Mosaic, dim0: int = 0, dim1: int = 1) -> Mosaic:
    order = list(range(mosaic.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(mosaic, order)


def _unsqueeze(mosaic: Mosaic, dim: int) -> Mosaic:
    at = dim % (mosaic.dim() + 1)

    def put(values: Sequence[int], value: int) -> list[int]:
        return [*values[:at], value, *values[at:]]

    return _mapped(
        mosaic, put(tuple(mosaic.shape), 1), lambda t: (put(t.offsets, 0), t.view.unsqueeze(at))
    )


def _squeeze(mosaic: Mosaic, dim: int | Sequence[int] | None = None) -> Mosaic:
    chosen = range(mosaic.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % mosaic.dim() for d in chosen if mosaic.shape[d] == 1}
    kept = [d for d in range(mosaic.dim()) if d not in gone]

    def place(tile: MosaicTile) -> tuple[Sequence[int], Tensor]:
        view = tile.view.squeeze(tuple(gone)) if gone else tile.view
        return [tile.offsets[d] for d in kept], view

    return _mapped(mosaic, [mosaic.shape[d] for d in kept], place)


def _slice(
    mosaic: Mosaic, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Mosaic:
    if step != 1:
        return _strided(mosaic, dim, start, end, step)
    dim %= mosaic.dim()
    first, last, _ = slice(start, end).indices(mosaic.shape[dim])
    shape = list(mosaic.shape)
    shape[dim] = max(0, last - first)
    tiles = []
    for tile in mosaic.tiles:
        begin, stop = max(first, tile.offsets[dim]), min(last, tile.offsets[dim] + tile.sizes[dim])
        if begin < stop:
            offsets = list(tile.offsets)
            view = tile.view.narrow(dim, begin - offsets[dim], stop - begin)
            offsets[dim] = begin - first
            tiles.append(MosaicTile(tuple(offsets), tile.source, view, tile.base))
    return Mosaic(shape, mosaic.dtype, tiles)


def _strided(mosaic: Mosaic, dim: int, start: int | None, end: int | None, step: int) -> Mosaic:
    indices = range(*slice(start, end, step).indices(mosaic.shape[dim]))
    return _cat([_slice(mosaic, dim, index, index + 1) for index in indices], dim)


def _select(mosaic: Mosaic, dim: int, index: int) -> Mosaic:
    at = index % mosaic.shape[dim]
    return _squeeze(_slice(mosaic, dim, at, at + 1), dim)


def _split(mosaic: Mosaic, split_size: int | Sequence[int], dim: int = 0) -> list[Mosaic]:
    total = mosaic.shape[dim]
    if isinstance(split_size, int):
        whole = range(0, total, max(1, split_size)) if total else [0]
        split_size = [min(split_size, total - first) for first in whole]
    parts, first = [], 0
    for size in split_size:
        parts.append(_slice(mosaic, dim, first, first + size))
        first += size
    return parts


def _unbind(mosaic: Mosaic, dim: int = 0) -> list[Mosaic]:
    return [_select(mosaic, dim, index) for index in range(mosaic.shape[dim])]


def _cat(mosaics: Sequence[Tensor], dim: int = 0) -> Mosaic:
    parts = [part for part in mosaics if isinstance(part, Mosaic)]
    if len(parts) != len(mosaics):
        raise NotBoxes("a cat with values")
    dim %= parts[0].dim()
    shape, tiles = list(parts[0].shape), list[MosaicTile]()
    shape[dim] = 0
    for part in parts:
        others = [*part.shape[:dim], *part.shape[dim + 1 :]]
        if others != [*shape[:dim], *shape[dim + 1 :]] or part.dtype != parts[0].dtype:
            raise ValueError(f"tensors of shapes {list(parts[0].shape)} and {list(part.shape)}")
        for tile in part.tiles:
            offsets = list(tile.offsets)
            offsets[dim] += shape[dim]
            tiles.append(MosaicTile(tuple(offsets), tile.source, tile.view, tile.base))
        shape[dim] += part.shape[dim]
    return Mosaic(shape, parts[0].dtype, tiles)


def _stack(mosaics: Sequence[Tensor], dim: int = 0) -> Mosaic:
    parts = [part for part in mosaics if isinstance(part, Mosaic)]
    if len(parts) != len(mosaics):
        raise NotBoxes("a stack with values")
    return _cat([_unsqueeze(part, dim) for part in parts], dim)


def _reshape(mosaic: Mosaic, shape: Sequence[int]) -> Mosaic:
    wanted = list(shape)
    if -1 in wanted:
        known = prod(size for size in wanted if size != -1)
        wanted[wanted.index(-1)] = mosaic.numel() // max(1, known)
    if list(mosaic.shape) == wanted:
        return mosaic
    if len(mosaic.tiles) != 1:
        return _cut_reshape(mosaic, wanted)
    (tile,) = mosaic.tiles
    try:
        view = tile.view.view(wanted)
    except RuntimeError:
        return _cut_reshape(mosaic, wanted)
    return Mosaic(
        wanted, mosaic.dtype, [MosaicTile((0,) * len(wanted), tile.source, view, tile.base)]
    )


def _cut_reshape(mosaic: Mosaic, shape: list[int]) -> Mosaic:
    """Reshape the parts along the first dimension one by one, where they fill whole parts."""
    if not mosaic.numel() or not mosaic.dim() or not shape:
        raise NotBoxes(f"a reshape of {list(mosaic.shape)} to {shape}")
    if mosaic.shape[0] == 1:
        return _reshape(_squeeze(mosaic, 0), shape)
    if shape[0] == 1:
        return _unsqueeze(_reshape(mosaic, shape[1:]), 0)
    rows, wanted = mosaic.shape[0], shape[0]
    if wanted % rows == 0:  # each part becomes one row or several
        parts = [_select(mosaic, 0, index) for index in range(rows)]
        return _cat([_reshape(part, [wanted // rows, *shape[1:]]) for part in parts], 0)
    if rows % wanted == 0:  # several parts become one row
        several = [_slice(mosaic, 0, i, i + rows // wanted) for i in range(0, rows, rows // wanted)]
        return _stack([_reshape(part, shape[1:]) for part in several], 0)
    raise NotBoxes(f"a reshape of {list(mosaic.shape)} to {shape}")


def _same(mosaic: Mosaic, *_: Any, **__: Any) -> Mosaic:
    return Mosaic(mosaic.shape, mosaic.dtype, mosaic.tiles)


def _cast(mosaic: Mosaic, *, dtype: torch.dtype | None = None, **_: Any) -> Mosaic:
    return Mosaic(mosaic.shape, dtype or mosaic.dtype, mosaic.tiles)


def _flip(mosaic: Mosaic, dims: Sequence[int]) -> Mosaic:
    for dim in dims:
        mosaic = _cat(
            [_slice(mosaic, dim, i, i + 1) for i in reversed(range(mosaic.shape[dim]))], dim
        )
    return mosaic


MOVES: dict[Any, Callable[..., Any]] = {
    aten.cat.default: _cat, aten.stack.default: _stack, aten.permute.default: _permute,
    aten.transpose.int: _transpose, aten.t.default: _transpose,
    aten.unsqueeze.default: _unsqueeze, aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze, aten.squeeze.dims: _squeeze, aten.slice.Tensor: _slice,
    aten.select.int: _select, aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split, aten.unbind.int: _unbind,
    aten.view.default: _reshape, aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape, aten.clone.default: _same, aten.detach.default: _same,
    aten.alias.default: _same, aten.lift_fresh.default: _same, aten._to_copy.default: _cast,
    aten.flip.default: _flip,
}  # fmt: skip
"""What each operation does to boxes. All others are refused."""
