"""A mosaic's boxes hold the elements that torch's operations would put there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onefold.checkpoint.mosaics import Mosaic, Move, NotBoxes


def read(move: Move, sources: dict[str, Tensor]) -> Tensor:
    index = tuple(slice(first, first + n) for first, n in zip(*move.origin, strict=True))
    return move.shaped(sources[move.source][index])


def place(out: Tensor, move: Move, values: Tensor) -> None:
    out[tuple(slice(first, first + n) for first, n in zip(*move.box, strict=True))] = values


def whole(mosaic: Mosaic, sources: dict[str, Tensor]) -> Tensor:
    out = torch.full(tuple(mosaic.shape), torch.nan)
    for move in mosaic.moves():
        place(out, move, read(move, sources))
    return out


SOURCES = {
    "a": torch.arange(4 * 6 * 8.0).reshape(4, 6, 8),
    "b": -torch.arange(4 * 6 * 8.0).reshape(4, 6, 8),
    "w": torch.arange(16 * 8.0).reshape(16, 8) + 0.5,
}
MOSAICS = {name: Mosaic.blank(name, value.shape, value.dtype) for name, value in SOURCES.items()}

CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "fuse experts": lambda d: torch.cat([torch.stack(list(d["a"])), d["b"]], 1).transpose(1, 2),
    "split them": lambda d: torch.cat([d["a"], d["b"]], 1).chunk(2, dim=1)[1][3],
    "interleave": lambda d: torch.stack([d["a"], d["b"]], 2).flatten(1, 2),
    "rotary halves": lambda d: d["w"].view(4, 2, 2, 8).transpose(1, 2).reshape(16, 8),
    "every second": lambda d: d["a"][:, ::2].mT.contiguous(),
    "flatten": lambda d: torch.cat([d["a"], d["b"]], 2).permute(2, 0, 1).reshape(-1, 6),
    "backwards": lambda d: torch.stack(list(d["w"].unbind(0))[::-1]).view(2, 8, 8).squeeze(),
    "flipped": lambda d: d["w"].flip(0, 1),
    "in fp16": lambda d: d["a"].to(torch.float16).unsqueeze(0),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_conversion_moves_the_elements_that_torch_moves(convert):
    mosaic, wanted = convert(MOSAICS), convert(SOURCES)
    assert mosaic.shape == wanted.shape
    assert mosaic.dtype == wanted.dtype
    assert torch.equal(whole(mosaic, SOURCES), wanted.float())


def some_box(shape: Any, draw: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    firsts = [draw.randrange(size) for size in shape]
    return tuple(firsts), tuple(
        draw.randint(1, size - first) for size, first in zip(shape, firsts, strict=True)
    )


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_any_box_of_a_result_is_read_from_its_own_elements_alone(convert):
    draw = random.Random(1)
    mosaic, wanted = convert(MOSAICS), convert(SOURCES).float()
    for _ in range(20):
        box = some_box(mosaic.shape, draw)
        firsts, lengths = box
        out, numel = torch.full(lengths, torch.nan), 0
        for each in mosaic.moves():
            move = each.within(box)
            if move is not None:
                values = read(move, SOURCES)
                numel += values.numel()
                moved = tuple(a - b for a, b in zip(move.box[0], firsts, strict=True))
                place(out, Move((moved, move.box[1]), move.source, move.origin, move.dims), values)
        index = tuple(slice(first, first + n) for first, n in zip(*box, strict=True))
        assert torch.equal(out, wanted[index])
        assert numel == out.numel(), "each element is read once"


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_rows_of_sources_are_written_to_the_places_that_a_result_has_them(convert):
    """Each rank writes its rows of every source; together they write the result once."""
    mosaic, wanted = convert(MOSAICS), convert(SOURCES).float()
    out, times = torch.full(tuple(mosaic.shape), torch.nan), torch.zeros(tuple(mosaic.shape))
    for first, stop in ((0, 1), (1, 3), (3, 16)):  # of three ranks
        for each in mosaic.moves():
            shape = SOURCES[each.source].shape
            rows = max(0, min(stop, shape[0]) - first)
            own = ((first, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            move = each.of_rows(own) if rows else None
            if move is not None:
                place(out, move, read(move, SOURCES))
                index = tuple(slice(a, a + n) for a, n in zip(*move.box, strict=True))
                times[index] += 1
    assert torch.equal(out, wanted)
    assert bool((times == 1).all())


def test_an_operation_that_computes_is_refused():
    for compute in (
        lambda t: t + 1,
        lambda t: t.sum(0),
        lambda t: torch.cat([t, torch.ones(1, 6, 8)]),
    ):
        with pytest.raises(NotBoxes):
            compute(MOSAICS["a"])
