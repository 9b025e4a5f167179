"""Describe a mesh of two axes, nodes and local ranks, and the part of a node that a rank holds.

    rank = node * local_world_size + local_rank     4 ranks:   node 0: 0 1   node 1: 2 3

Two hops cut parameters by rows over all ranks in rank order. A node's ranks own a range of rows:

    a parameter     | 0 | 1 | 2 | 3 |
    inter-node hop  ranks of one local rank, (0, 2) and (1, 3), send each other their pieces
    intra-node hop  local rank 0 now has pieces 0 and 2, local rank 1 has 1 and 3: together all

Two hops gather the parameter; the same hops in reverse reduce its gradient. Nodes exchange each
element once, however many ranks they have. The pieces of a local rank after the first hop are its
share of the *node buffer*. Sources: MiCS, arXiv 2205.00119, section 3.2; ZeRO++, arXiv 2306.10209,
section 3.2. See docs/adr/0013.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onefold.layout.ranges import Ranges
from onefold.layout.rows import PIECE_NUMEL, Slot, round_up


@dataclass(frozen=True, slots=True)
class Axes:
    """One rank of a mesh of `nodes` x `local_world_size` ranks."""

    nodes: int
    local_world_size: int
    rank: int

    @property
    def node(self) -> int:
        """The node of the rank."""
        return self.rank // self.local_world_size

    @property
    def local_rank(self) -> int:
        """The rank's number inside its node."""
        return self.rank % self.local_world_size

    def between(self, slot: Slot) -> Slot:
        """The region of the inter-node hop: the pieces of this local rank in every node."""
        return _part(slot, slot.pieces[self.local_rank :: self.local_world_size])

    def inside(self, slot: Slot) -> list[Slot]:
        """The regions of the intra-node hop: each node's rows, cut over its local ranks."""
        return [
            _part(slot, slot.pieces[first : first + self.local_world_size])
            for first in range(0, self.nodes * self.local_world_size, self.local_world_size)
        ]


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Where a share of a node's buffer keeps each parameter: a piece of every node's rows.

    A replicated parameter lies there once. `spans`: per slot, [start, stop) for each node.
    """

    slots: tuple[Slot, ...]
    axes: Axes
    spans: tuple[Ranges, ...]
    numel: int

    @staticmethod
    def build(slots: Sequence[Slot], axes: Axes) -> NodeLayout:
        """Lay out the pieces of this local rank, parameter by parameter."""
        spans: list[Ranges] = []
        end = 0
        for slot in slots:
            pieces = slot.pieces[:1] if slot.replicated else axes.between(slot).pieces
            spans.append(pieces.joined(end))
            end = round_up(spans[-1][-1][1], PIECE_NUMEL)
        return NodeLayout(tuple(slots), axes, tuple(spans), end)

    def region(self, index: int) -> tuple[int, int]:
        """[start, stop) of one parameter in the buffer."""
        return self.spans[index][0][0], self.spans[index][-1][1]

    def between(self) -> list[list[Slot]]:
        """Each parameter's region of the inter-node hop: a piece of it for every node."""
        return [[self._between(index, slot)] for index, slot in enumerate(self.slots)]

    def _between(self, index: int, slot: Slot) -> Slot:
        if slot.replicated:
            return _part(slot, slot.pieces[: self.axes.nodes])
        first = self.region(index)[0]
        return replace(_part(slot, self.spans[index].moved(-first)), full_offset=first)

    def inside(self) -> list[list[Slot]]:
        """Each parameter's regions of the intra-node hop: each node's rows, counted from 0."""
        return [self._inside(slot) for slot in self.slots]

    def _inside(self, slot: Slot) -> list[Slot]:
        if slot.replicated:
            return [_part(slot, slot.pieces[: self.axes.local_world_size])]
        nodes = [part.pieces for part in self.axes.inside(slot)]
        return [_part(slot, pieces.moved(-pieces[0][0])) for pieces in nodes]


def _part(slot: Slot, pieces: Ranges) -> Slot:
    """Some pieces of a parameter, as a region of a message."""
    return Slot(slot.fqn, slot.shape, slot.full_offset, pieces, num_slabs=slot.num_slabs)
