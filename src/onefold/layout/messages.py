"""Plan the messages of a unit from shapes and ranks: regions, flags and hops. No torch here.

    one axis    gather                                  reduce; at stage 0, gather the means
    two hops    gather between nodes, then inside       reduce inside, then between nodes
    replicas    gather                                  reduce, reduce between nodes, gather means

unit/ sends these messages, planner/message_counts.py counts them. A message consists of regions.
Each is a contiguous part of a parameter, cut over the ranks of a group. Regions without a name
carry no state:

    failures    behind weights that a tier brings, from each rank: whether it could read its rows
    uses        behind gradients, to every rank: whether this rank used each parameter

`MessagePlan` says which regions of an exact message travel together:

    large    apart | travels from and to where it lies
    medium   packed | rank 0: its pieces, one behind the other | rank 1: ...
    small    packed behind them, element by element

`QuantizedMessages` says where each part of a quantized message lies. Sizes that decide about
messages are written here alone: wire/ and planner/ import them. See docs/adr/0001.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from onefold.layout.ranges import Range, Ranges
from onefold.layout.rows import Layout, Slot, round_up, split_at
from onefold.layout.two_axes import Axes, NodeLayout

PACK_NBYTES = 64 * 1024
"""Regions whose pieces are smaller share one message: its copy costs less than its latency.

Measured on 2 cores, gloo: a transformer block as 4 large regions and one packed message gathers in
9.0 ms (2 ranks), as one contiguous message in 9.5 ms, packed and copied out whole in 10.4 ms.
"""

SHARE_NBYTES = 2 << 20
"""Regions with fewer bytes in all share a message, too, except on NCCL: gloo wakes a thread for
each message. On 2 cores a step of 3 M parameters takes 3-7 % less of 2 ranks, 8-14 % less of 4."""

ALIGN_NBYTES = 16
"""Parts of a quantized message start at multiples of it: a codec reads them as wider numbers."""


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
        else [Slot(slot.fqn, slot.shape, 0, Ranges.nearly_equal(slot.piece_numel(rank), replicas))]
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


# one message


class Size(Enum):
    """How a region travels, see the module."""

    SMALL = auto()
    MEDIUM = auto()
    LARGE = auto()


class MessageRanks(Protocol):
    """The ranks that exchange a message, and the one that plans it."""

    @property
    def world_size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def is_nccl(self) -> bool: ...
    @property
    def packs(self) -> bool: ...


class MessagePlan:
    """How the regions of one message are cut over the ranks, and what one of them sends.

    The regions that are not `large` share one message, which has for each rank its pieces of the
    `medium` ones, copied piece by piece, then those of the `small` ones. Only reductions have
    replicated regions, sent to every rank. `name` is that of the unit or parameter, for observers.
    """

    def __init__(
        self, slots: Sequence[Slot], offsets: Sequence[int] | None, group: MessageRanks,
        itemsize: int, name: str = "",
    ) -> None:  # fmt: skip
        self.name = name
        self.itemsize = itemsize
        self.rank, self.world_size = group.rank, group.world_size
        self.pieces = [slot.pieces for slot in slots]
        self.numels = [pieces.lengths for pieces in self.pieces]
        self.is_replicated = [slot.replicated and group.world_size > 1 for slot in slots]
        self.is_matrix = [bool(slot.fqn) and len(slot.shape) > 1 for slot in slots]
        is_nccl, packs = group.is_nccl, group.packs  # the first asks torch for its backends
        sizes = [
            self._size(index, slot.num_slabs, is_nccl=is_nccl, packs=packs)
            for index, slot in enumerate(slots)
        ]
        self.small, self.medium, self.large = (
            [index for index, size in enumerate(sizes) if size is wanted] for wanted in Size
        )
        self._offsets = offsets
        self.small_numels, self._medium_numels = (
            [[self.numels[index][rank] for index in these] for rank in range(self.world_size)]
            for these in (self.small, self.medium)
        )
        self.packed_numels = [
            sum(small) + sum(medium)
            for small, medium in zip(self.small_numels, self._medium_numels, strict=True)
        ]
        state = [
            numels
            for numels, slot, replicated in zip(self.numels, slots, self.is_replicated, strict=True)
            if slot.fqn and not replicated
        ]
        self._sharded_numel = sum(map(sum, state))
        self.own_numel = sum(numels[self.rank] for numels in state)
        self.numel = sum(map(sum, self.numels))
        self.identity = (name, itemsize, self.numel)
        """Tells the message from others: the same on every rank."""

    def _size(self, index: int, num_slabs: int, *, is_nccl: bool, packs: bool) -> Size:
        """Classify a region.

        A region that is one of `num_slabs` is small if all of them are: an index costs 8 bytes for
        each element.
        """
        numels = self.numels[index]
        nbytes = max(numels) * self.itemsize
        if self.is_replicated[index] or nbytes * num_slabs < PACK_NBYTES:
            return Size.SMALL
        shares = packs or (not is_nccl and sum(numels) * self.itemsize <= SHARE_NBYTES)
        return Size.MEDIUM if shares or nbytes < PACK_NBYTES else Size.LARGE

    # elements that this rank sends

    @cached_property
    def gather_numel(self) -> int:
        """Own rows, to all others."""
        return self.own_numel * (self.world_size - 1)

    @cached_property
    def reduce_numel(self) -> int:
        """The rows of all others, to each its own."""
        return self._sharded_numel - self.own_numel

    @cached_property
    def control_numel(self) -> int:
        """Flags, and replicated gradients, to all others."""
        own = sum(numels[self.rank] for numels in self.numels)
        return (own - self.own_numel) * (self.world_size - 1)

    # where elements lie

    @cached_property
    def spans(self) -> list[list[Range]]:
        """[start, stop) of each region and rank: from the offsets, or in small regions, joined."""
        is_small = set(self.small)
        ends = (
            pieces[-1][1] if index in is_small else 0 for index, pieces in enumerate(self.pieces)
        )
        starts = [0, *accumulate(ends)][:-1] if self._offsets is None else self._offsets
        return [
            [(offset + start, offset + stop) for start, stop in pieces]
            for pieces, offset in zip(self.pieces, starts, strict=True)
        ]

    @cached_property
    def packed_numel(self) -> int:
        """Elements of the message that regions share."""
        return sum(self.packed_numels)

    @cached_property
    def packed_spans(self) -> list[Range]:
        """Each rank's part of the message that regions share."""
        return list(pairwise(accumulate(self.packed_numels, initial=0)))

    @cached_property
    def small_spans(self) -> list[Range]:
        """Each rank's part of all small regions, laid end to end."""
        return list(pairwise(accumulate(map(sum, self.small_numels), initial=0)))

    @cached_property
    def chunk_numels(self) -> list[list[int]]:
        """By rank: its elements of each medium region, then of all small ones."""
        pairs = zip(self._medium_numels, self.small_numels, strict=True)
        return [[*medium, sum(small)] for medium, small in pairs]


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
        ranks = range(plan.world_size)
        self._by_rank = [tuple(numels[rank] for numels in plan.numels) for rank in ranks]
        self._places = {  # most ranks have the same lengths
            numels: self._placed(numels, nbytes_of, itemsize) for numels in set(self._by_rank)
        }
        self.numels = [self._places[numels][-1][1] for numels in self._by_rank]
        self.own_nbytes = self.numels[plan.rank]
        if is_reduced:
            self.numels[plan.rank] = 0
        self.spans = list(pairwise(accumulate(self.numels, initial=0)))
        self.nbytes = self.spans[-1][1]

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
