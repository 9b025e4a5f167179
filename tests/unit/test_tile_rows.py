"""Which tokens have their rows in which tile: as counted row by row."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from onefold.unit.tile_rows import TileRows, places, read_rows, sum_rows

HEIGHT = 3


def tiles_of(shares: list[int]) -> list[TileRows]:
    """Tiles of ranks with so many rows: `HEIGHT` of each rank, as long as it has some."""
    spans = list(pairwise(accumulate(shares, initial=0)))
    return [
        [(min(a + done, b), min(a + done + HEIGHT, b)) for a, b in spans]
        for done in range(0, max(shares), HEIGHT)
    ]


@pytest.mark.parametrize("shares", [[7, 5], [0, 7, 0, 5], [3, 0], [0, 4], [4, 4, 1], [8]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tokens_are_read_and_summed_tile_by_tile_as_in_one_table(shares, dtype):
    """Uneven ranks, and ranks without rows; tokens of both dtypes that F.embedding takes."""
    generator = torch.Generator().manual_seed(0)
    num_rows, tiles = sum(shares), tiles_of(shares)
    tokens = torch.randint(num_rows, (40,), dtype=dtype, generator=generator)
    table, grads = (torch.randn(n, 5, generator=generator) for n in (num_rows, 40))
    numbers, rows = places(tokens, tiles)
    read, sums = torch.empty(40, 5), torch.zeros(num_rows, 5)
    for number, tile in enumerate(tiles):
        rows_here = torch.cat([torch.arange(*span) for span in tile])
        read = read_rows(read, table[rows_here], numbers == number, rows)
        sums[rows_here] = sum_rows(grads, len(rows_here), numbers == number, rows)
    assert torch.equal(read, table[tokens])
    assert torch.equal(sums, torch.zeros(num_rows, 5).index_add_(0, tokens, grads))
