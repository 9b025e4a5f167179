"""Which tokens have their rows in which tile of a table (unit/tiles.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

from onefold.tier import accelerator

TileRows = Sequence[tuple[int, int]]
"""The rows of a tile, [start, stop) of each rank."""


def check_rows(tokens: Tensor, num_rows: int) -> None:
    """Raise the IndexError of `F.embedding` for tokens that are no rows; on a device later."""
    if tokens.device.type != "cpu":
        are_rows = ((tokens >= 0) & (tokens < num_rows)).all()
        torch._assert_async(are_rows, "index out of range in self")
        return
    with suppress(RuntimeError):  # of an empty batch
        low, high = (int(bound) for bound in torch.aminmax(tokens))
        if low < 0 or high >= num_rows:
            raise IndexError("index out of range in self")


def found(tokens: Tensor, tile: TileRows) -> Iterator[tuple[Tensor, Tensor]]:
    """For each rank's rows of a tile: positions of their tokens [T], and rows in the tile.

    For the CPU. The host would have to wait for a device.
    """
    first = 0
    for start, stop in tile:
        positions = ((tokens >= start) & (tokens < stop)).nonzero().squeeze(1)
        if len(positions):
            yield positions, tokens[positions] - start + first
        first += stop - start


def places(tokens: Tensor, tiles: Sequence[TileRows]) -> tuple[Tensor, Tensor]:
    """The number of each token's tile, and its row there. No number crosses to the host."""
    starts = [start for start, _ in tiles[0]]
    height = max(stop - start for start, stop in tiles[0])
    numels = [[stop - start for start, stop in tile] for tile in tiles]
    firsts = [first for row in numels for first in accumulate(row[:-1], initial=0)]
    numbers = accelerator.sent([*starts, *firsts], torch.int64, tokens.device)
    owners = torch.bucketize(tokens, numbers[: len(starts)], right=True) - 1
    offsets = tokens - numbers[owners]
    tiles_of = offsets // height
    return tiles_of, numbers[(tiles_of + 1) * len(starts) + owners] + offsets % height
