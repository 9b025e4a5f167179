"""Plan the messages of a unit from shapes and ranks: regions, flags and hops. No torch here.

    one axis    gather                                  reduce; at stage 0, gather the means
    two hops    gather between nodes, then inside       reduce inside, then between nodes
    replicas    gather                                  reduce, reduce between nodes, gather means

unit/ sends these messages, planner/message_counts.py counts them. A message consists of regions.
Each is a contiguous part of a parameter, cut over the ranks of a group. Regions without a name
carry no state:

    failures    behind weights that a tier brings, from each rank: whether it could read its rows
    uses        behind gradients, to every rank: whether this rank used each parameter

`MessagePlan` (layout/message_plan.py) says which regions of an exact message travel together,
`QuantizedMessages` where each part of a quantized message lies. See docs/adr/0001.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from onefold.layout.message_plan import ALIGN_NBYTES, MessagePlan
from onefold.layout.ranges import Range, Ranges
from onefold.layout.rows import Layout, Slot, round_up, split_at
from onefold.layout.two_axes import Axes, NodeLayout


class Regions(NamedTuple):
    """The regions of one message: at `offsets` of one flat buffer, or (None) separate tensors."""

    slots: Sequence[Slot]
    offsets: Sequence[int] | None = None


def flags_of(world_size: int) -> Slot:
    """The region of a message in which each rank has one element; it carries no state."""
    return Slot("", (world_size,), 0, Ranges.over(world_size, world_size))


# weights


def gathered(regions: Iterable[tuple[Slot, int]]) -> Regions:
    """A message of a flat buffer: regions with their offsets, but for the replicated ones."""
    sharded = [(slot, offset) for slot, offset in regions if not slot.replicated]
    return Regions([slot for slot, _ in sharded], [offset for _, offset in sharded])


def gather_inside(layout: Layout, node: NodeLayout, *, has_flags: bool) -> Regions:
    """The hop inside the node: the rows and the flags of every node, cut over its ranks."""
    regions = [(slot, slot.full_offset) for slot in layout.slots if not slot.replicated]
    regions += [(flags_of(layout.world_size), layout.full_numel)] * has_flags
    return gathered((part, offset) for slot, offset in regions for part in node.axes.inside(slot))


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """One hop's message of weights: where the own rows of a rank lie in it."""

    regions: Regions
    message: list[int]  # splits the buffer at own rows (`split_at`), up to the flags
    shard: list[int]  # splits the shard at the same rows
    num_flags: int  # the last elements of the buffer
    quantized: list[int]  # numbers of the rows that a quantizing transport quantizes
    exact: list[int]  # numbers of the other rows

    @staticmethod
    def on_one_axis(layout: Layout, rank: int, num_flags: int) -> GatherPlan:
        """All slabs of a unit, and a flag of each rank behind them, or none."""
        regions, places = list[tuple[Slot, int]](), list[Range]()
        for slabs, (start, stop) in zip(layout.slabs(), layout.own_spans(rank), strict=True):
            numel = (stop - start) // len(slabs)
            for number, slab in enumerate(slabs):
                regions.append((slab, slab.full_offset))
                places.append((start + number * numel, start + (number + 1) * numel))
        flags = [flags_of(num_flags)] if num_flags else []
        return _gather_plan(layout, (rank, rank), places, regions, layout.full_numel, flags)

    @staticmethod
    def between(layout: Layout, node: NodeLayout, *, keeps: bool, has_flags: bool) -> GatherPlan:
        """The hop between nodes: into the secondary shard if the node `keeps` one."""
        axes, slots = node.axes, layout.slots
        if keeps:
            regions = [(part, node.region(i)[0]) for i, (part,) in enumerate(node.between())]
            flags, numel = flags_of(axes.nodes), node.numel
        else:
            regions = [(axes.between(slot), slot.full_offset) for slot in slots]
            flags, numel = axes.between(flags_of(layout.world_size)), layout.full_numel
        ranks, places = (axes.rank, axes.node), layout.own_spans(axes.rank)
        return _gather_plan(layout, ranks, places, regions, numel, [flags] * has_flags)


def _gather_plan(
    layout: Layout, ranks: tuple[int, int], in_shard: list[Range],
    regions: list[tuple[Slot, int]], numel: int, flags: list[Slot],
) -> GatherPlan:  # fmt: skip
    """`ranks`: among all and in the group; own rows `in_shard`; their regions, with offsets."""
    rank, own = ranks
    in_message = [
        (offset + slot.pieces[own][0], offset + slot.pieces[own][1]) for slot, offset in regions
    ]
    num_flags = sum(flag.shape[0] for flag in flags)
    return GatherPlan(
        gathered([*regions, *((flag, numel) for flag in flags)]),
        split_at(in_message, numel + num_flags),
        split_at(in_shard, layout.shard_numel(rank)),
        num_flags,
        [number for number, (slot, _) in enumerate(regions) if not slot.replicated],
        [number for number, (slot, _) in enumerate(regions) if slot.replicated],
    )


def node_rows(layout: Layout, node: NodeLayout) -> tuple[list[Range], list[Range]]:
    """The rows of a secondary shard, in order: in the full buffer, and in the secondary shard."""
    pieces = [
        (slot.full_offset, slot.pieces[:1] if slot.replicated else node.axes.between(slot).pieces)
        for slot in layout.slots
    ]
    in_full = [(offset + start, offset + stop) for offset, own in pieces for start, stop in own]
    return in_full, [span for spans in node.spans for span in spans]


# gradients

Parts = list[list[Slot]]
"""The regions of each parameter in one hop: `Layout.slabs`, `NodeLayout.inside` and `between`."""


class NodeParts(NamedTuple):
    """The regions of each parameter in the hop inside a node, and in that between nodes.

    `spans`: of each parameter, [start, stop) in the node's buffer of every region inside.
    """

    numel: int  # of this rank's share of the node's buffer
    spans: list[list[Range]]
    inside: Parts
    between: Parts

    @staticmethod
    def from_slabs(slabs: Parts, axes: Axes) -> NodeParts:
        """Cut the contiguous parts of each parameter over the ranks of nodes."""
        node = NodeLayout.build([slab for parts in slabs for slab in parts], axes)
        ends = list(accumulate(map(len, slabs), initial=0))
        own = [range(*pair) for pair in pairwise(ends)]
        inside, between = node.inside(), node.between()
        return NodeParts(
            node.numel,
            [[span for index in these for span in node.spans[index]] for these in own],
            [[part for index in these for part in inside[index]] for these in own],
            [[part for index in these for part in between[index]] for these in own],
        )


def parts_of_replicas(layout: Layout, rank: int, replicas: int) -> Parts:
    """The hop between replicas: the own rows of a rank, cut by elements over the replicas."""
    return [
        [Slot(slot.fqn, (), 0, Ranges.alike(1, replicas))]
        if slot.replicated
        else [Slot(slot.fqn, slot.shape, 0, Ranges.over(slot.piece_numel(rank), replicas))]
        for slot in layout.slots
    ]


def reduce_message(parameters: Parts, world_size: int) -> Regions:
    """The gradients of some parameters, and a flag of each behind them."""
    flags = Slot("", (), 0, Ranges.alike(len(parameters), world_size))
    return Regions([*(part for parts in parameters for part in parts), flags])


def own_part_travels(world_size: int) -> bool:
    """True if a reduction sends a rank its own part, too.

    Between two ranks it does not travel, as the rest lies together; with more ranks the rest would
    be two collectives instead of one. A rank alone sends nothing else.
    """
    return world_size != 2


# quantized messages


class Part(NamedTuple):
    """One region's part of a message."""

    region: int
    is_quantized: bool
    place: slice  # in bytes of the message
    rows: slice  # in elements of the full buffer, or of the region's flat partial


class QuantizedMessages:
    """The messages of all ranks, one behind the other in one buffer: only matrices are quantized.

    `rows`: spans by region and rank. `nbytes_of` is that of a codec; exact elements have
    `itemsize` bytes. A reduction leaves out the own message.
    """

    def __init__(
        self, plan: MessagePlan, rows: Sequence[Sequence[Range]], nbytes_of: Callable[[int], int],
        itemsize: int, *, is_reduced: bool = False,
    ) -> None:  # fmt: skip
        self._rows = rows
        self._is_quantized = plan.is_matrix
        lengths = [pieces.lengths for pieces in plan.pieces]
        self._by_rank = [tuple([own[rank] for own in lengths]) for rank in range(plan.world_size)]
        self._places = {  # most ranks have the same lengths
            numels: self._placed(numels, nbytes_of, itemsize) for numels in set(self._by_rank)
        }
        self.numels = [self._places[numels][-1][1] for numels in self._by_rank]
        self.own_nbytes = self.numels[plan.rank]
        if is_reduced:
            self.numels[plan.rank] = 0
        self.spans = Ranges.ending_at([*accumulate(self.numels, initial=0)])
        self.nbytes = self.spans.extent

    def _placed(
        self, numels: Sequence[int], nbytes_of: Callable[[int], int], itemsize: int
    ) -> list[Range]:
        """Where each region lies in a message, in bytes; then the end of the message."""
        places, end = list[Range](), 0
        for numel, is_quantized in zip(numels, self._is_quantized, strict=True):
            nbytes = nbytes_of(numel) if is_quantized else numel * itemsize
            places.append((end, end + nbytes))
            end = round_up(end + nbytes, ALIGN_NBYTES)
        return [*places, (end, end)]

    @cached_property
    def parts(self) -> list[list[Part]]:
        """By rank: a part for each region of which it has elements."""
        return [
            [
                Part(
                    region,
                    self._is_quantized[region],
                    slice(*place),
                    slice(*self._rows[region][rank]),
                )
                for region, place in enumerate(self._places[numels][:-1])
                if place[0] < place[1]
            ]
            for rank, numels in enumerate(self._by_rank)
        ]
