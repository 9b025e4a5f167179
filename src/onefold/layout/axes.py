"""A mesh of two axes: nodes, and the ranks of each; what a rank holds for its node.

    rank = node * neighbours + place          4 ranks:   node 0: 0 1   node 1: 2 3

Rows are cut over all ranks in rank order, so a node's ranks own a stretch of neighbouring rows:

    a parameter     | 0 | 1 | 2 | 3 |
    between nodes   ranks of one place, (0, 2) and (1, 3), tell each other their pieces
    inside a node   then place 0 has pieces 0 and 2, place 1 has 1 and 3: together all of them

Hence two hops make a whole of rows, and the same two in reverse a sum of gradients: nodes exchange
each element once, however many ranks they have. What a place has after the first hop is its share
of the *node buffer*. Source: MiCS, arXiv 2205.00119, section 3.2; ZeRO++, arXiv 2306.10209, 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from onefold.layout.rows import PIECE_NUMEL, Slot, round_up


@dataclass(frozen=True, slots=True)
class Axes:
    """`nodes` x `neighbours` ranks, and which of them is meant."""

    nodes: int
    neighbours: int
    rank: int

    @property
    def node(self) -> int:
        """The node of the rank."""
        return self.rank // self.neighbours

    @property
    def place(self) -> int:
        """The rank's number inside its node."""
        return self.rank % self.neighbours

    def between(self, slot: Slot) -> Slot:
        """The pieces of this place in every node: what the hop between nodes carries."""
        return replace(slot, pieces=slot.pieces[self.place :: self.neighbours], shard_offsets=())

    def inside(self, slot: Slot) -> list[Slot]:
        """For every node its stretch of rows, cut over the places: what the hop inside carries."""
        return [
            replace(slot, pieces=slot.pieces[first : first + self.neighbours], shard_offsets=())
            for first in range(0, self.nodes * self.neighbours, self.neighbours)
        ]

    def stretches(self, slot: Slot) -> list[tuple[int, int]]:
        """[start, stop) of every node's rows, in elements of the parameter."""
        return [(part.pieces[0][0], part.pieces[-1][1]) for part in self.inside(slot)]


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Where a rank's share of its node's buffer keeps each parameter: a piece of every node's rows.

    A parameter without rows is there once. `spans`: per slot, [start, stop) for each node.
    """

    slots: tuple[Slot, ...]
    axes: Axes
    spans: tuple[tuple[tuple[int, int], ...], ...]
    numel: int

    @staticmethod
    def build(slots: Sequence[Slot], axes: Axes) -> NodeLayout:
        """Lay out the pieces of this rank's place, parameter by parameter."""
        spans: list[tuple[tuple[int, int], ...]] = []
        end = 0
        for slot in slots:
            pieces = slot.pieces[:1] if slot.replicated else axes.between(slot).pieces
            ends = [end]
            for start, stop in pieces:
                ends.append(ends[-1] + stop - start)
            spans.append(tuple(pairwise(ends)))
            end = round_up(ends[-1], PIECE_NUMEL)
        return NodeLayout(tuple(slots), axes, tuple(spans), end)

    def region(self, index: int) -> tuple[int, int]:
        """[start, stop) of one parameter in the buffer."""
        return self.spans[index][0][0], self.spans[index][-1][1]

    def own(self, index: int) -> tuple[int, int]:
        """[start, stop) of this rank's own rows of one parameter in the buffer."""
        spans = self.spans[index]
        return spans[0 if self.slots[index].replicated else self.axes.node]

    def between(self, index: int) -> Slot:
        """One parameter's region as the hop between nodes sees it: a piece of it for every node."""
        slot, first = self.slots[index], self.region(index)[0]
        if slot.replicated:
            return replace(slot, pieces=slot.pieces[: self.axes.nodes], shard_offsets=())
        pieces = tuple((start - first, stop - first) for start, stop in self.spans[index])
        return replace(slot, full_offset=first, pieces=pieces, shard_offsets=())

    def inside(self, index: int) -> list[Slot]:
        """One parameter as the hop inside sees it: each node's rows by themselves, from 0."""
        slot = self.slots[index]
        if slot.replicated:
            return [replace(slot, pieces=slot.pieces[: self.axes.neighbours], shard_offsets=())]
        parts = self.axes.inside(slot)
        starts = [part.pieces[0][0] for part in parts]
        return [
            replace(part, pieces=tuple((a - start, b - start) for a, b in part.pieces))
            for part, start in zip(parts, starts, strict=True)
        ]
