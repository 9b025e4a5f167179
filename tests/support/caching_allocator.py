"""Play allocations on the rules of CUDA's caching allocator: rounding, segments, splits and merges.

Requests are rounded to 512 bytes. Those up to 1 MiB come from segments of 2 MiB, those below 10 MiB
from segments of 20 MiB, larger ones from segments of their own, rounded to 2 MiB. The smallest free
block that fits is taken, and split where enough is left. Neighbours that are free merge.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 1 << 20


def round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


@dataclass(eq=False)
class Block:
    start: int
    nbytes: int
    is_small: bool
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.nbytes, self.start


class CachingAllocator:
    """Addresses of blocks; bytes reserved, and their peak; bytes allocated, and their peak."""

    def __init__(self) -> None:
        self.reserved = self.allocated = self.peak = 0
        self._end = 0
        self._free: dict[bool, list[tuple[tuple[int, int], int]]] = {True: [], False: []}
        self._blocks: dict[int, Block] = {}  # by start

    def allocate(self, nbytes: int) -> int:
        """Return the address of a block of at least `nbytes`."""
        nbytes = round_up(max(nbytes, 1), 512)
        is_small = nbytes <= MIB
        free = self._free[is_small]
        at = bisect_left(free, ((nbytes, 0), 0))
        if at < len(free):
            block = self._blocks[free.pop(at)[1]]
        else:
            block = self._segment(nbytes, is_small)
        block.is_free = False
        left = block.nbytes - nbytes
        if left >= 512 if is_small else left > MIB:
            rest = Block(block.start + nbytes, left, is_small, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.nbytes, block.after = nbytes, rest
            self._put(rest)
        self.allocated += block.nbytes
        self.peak = max(self.peak, self.allocated)
        return block.start

    def free(self, address: int) -> None:
        """Give back a block, merged with its neighbours."""
        block = self._blocks[address]
        self.allocated -= block.nbytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._free[block.is_small].remove((neighbour.key, neighbour.start))
                first, second = sorted((block, neighbour), key=lambda one: one.start)
                del self._blocks[second.start]
                first.nbytes += second.nbytes
                first.after = second.after
                if first.after is not None:
                    first.after.before = first
                block = first
        self._put(block)

    def _put(self, block: Block) -> None:
        block.is_free = True
        self._blocks[block.start] = block
        insort(self._free[block.is_small], (block.key, block.start))

    def _segment(self, nbytes: int, is_small: bool) -> Block:
        if is_small:
            length = 2 * MIB
        else:
            length = 20 * MIB if nbytes < 10 * MIB else round_up(nbytes, 2 * MIB)
        block = Block(self._end, length, is_small)
        self._end += length + 2 * MIB  # segments have no neighbours
        self.reserved += length
        self._blocks[block.start] = block
        return block
