"""Which tokens have their rows in which tile of a table (unit/tiles.py)."""

from collections.abc import Sequence
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


def read_rows(values: Tensor, tile: Tensor, is_here: Tensor, rows: Tensor) -> Tensor:
    """`values` [T, C] with `rows` of a `tile` [R, C] for the tokens that are there.

    The CPU reads those rows alone. The host would have to wait for a device to count them.
    """
    if values.device.type != "cpu":
        return torch.where(is_here.unsqueeze(1), tile[rows * is_here], values)
    positions = is_here.nonzero().squeeze(1)
    return values.index_copy_(0, positions, tile[rows[positions]])


def sum_rows(values: Tensor, num_rows: int, is_here: Tensor, rows: Tensor) -> Tensor:
    """The sums of `values` [T, C] over the tokens of each row of a tile: [num_rows, C]."""
    sums = values.new_zeros(num_rows + 1, values.shape[1])
    if values.device.type != "cpu":  # the last row takes the values of other tiles
        return sums.index_add_(0, torch.where(is_here, rows, num_rows), values)[:-1]
    positions = is_here.nonzero().squeeze(1)
    return sums[:-1].index_add_(0, rows[positions], values[positions])
