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
from functools import cached_property, partial
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


class Strided(NamedTuple):
    """Where the pieces of some ranks lie: of one length, at equal distances."""

    start: int
    numel: int
    stride: int

    def after(self, count: int) -> Strided:
        """The pieces behind the first ones."""
        return Strided(self.start + count * self.stride, self.numel, self.stride)


class Part(NamedTuple):
    """One region's pieces for some ranks, which a codec takes by one call."""

    region: int
    is_quantized: bool
    ranks: range
    place: Strided  # in bytes of the messages of all ranks
    rows: Strided  # in elements of the full buffer, or of the region's flat partial

    def of(self, ranks: range) -> Part:
        """The pieces of some of the ranks."""
        passed = ranks.start - self.ranks.start
        places = self.place.after(passed), self.rows.after(passed)
        return Part(self.region, self.is_quantized, ranks, *places)


@dataclass(frozen=True)
class Section:
    """The messages that one collective sends, one behind the other."""

    rank: int
    spans: Ranges  # of every rank's message, in bytes of the buffer that all sections share
    own_nbytes: int  # of each message that this rank receives
    num_whole: int  # messages from the first one on without padding
    make_parts: Callable[[], list[Part]]
    sizes: Sequence[int] = ()  # of every rank's message, where they differ
    is_counted: bool = False  # they differ, and are too many for a list

    @property
    def numels(self) -> Sequence[int]:
        """Bytes of each message; none where all are alike."""
        return self.spans.lengths if self.is_counted else self.sizes

    @cached_property
    def parts(self) -> list[Part]:
        """The pieces of all ranks."""
        return self.make_parts()

    @cached_property
    def own(self) -> list[Part]:
        """This rank's pieces."""
        only = range(self.rank, self.rank + 1)
        return [part.of(only) for part in self.parts if self.rank in part.ranks]

    @cached_property
    def others(self) -> list[Part]:
        """The pieces of all other ranks: those before this rank, and those behind it."""
        return [
            part.of(ranks)
            for part in self.parts
            for ranks in (
                range(part.ranks.start, min(part.ranks.stop, self.rank)),
                range(max(part.ranks.start, self.rank + 1), part.ranks.stop),
            )
            if ranks
        ]


class QuantizedMessages:
    """The messages of all ranks in one buffer: only matrices are quantized.

    few ranks, or shares    one section: | rank 0: a b | rank 1: a b | ... as long as they are; a
                            reduction leaves out the own message
    many ranks              one section of equal chunks, each piece in room for the longest, and one
                            for each region that the plan counts: | a | a | ... as long as they are

    Of many ranks nothing is kept but two pieces of each region: the longest and the shorter one.
    `rows`: spans by region and rank. `nbytes_of` is that of a codec; exact elements have
    `itemsize` bytes.
    """

    def __init__(
        self, plan: MessagePlan, rows: Sequence[Ranges], nbytes_of: Callable[[int], int],
        itemsize: int, *, is_reduced: bool = False,
    ) -> None:  # fmt: skip
        self._plan, self._rows, self._itemsize, self._nbytes_of = plan, rows, itemsize, nbytes_of
        self._all_nbytes, sections = self._wide() if plan.is_wide else self._few(is_reduced)
        self.sections = [section for section in sections if section.spans.extent]
        self.nbytes = max([section.spans[-1][1] for section in self.sections], default=0)
        self._held = sum([section.spans.length(plan.rank) for section in self.sections])
        self._own_nbytes = self._placed(range(len(rows)), plan.own_numels)[-1]

    # bytes that this rank sends

    @property
    def gather_nbytes(self) -> int:
        """Its own message, to all others."""
        return self._own_nbytes * (self._plan.world_size - 1)

    @property
    def gather_padding(self) -> int:
        """What is behind its own pieces, to all others."""
        return (self._held - self._own_nbytes) * (self._plan.world_size - 1)

    @property
    def reduce_nbytes(self) -> int:
        """The messages of all others."""
        return self._all_nbytes - self._own_nbytes

    @property
    def reduce_padding(self) -> int:
        """What is behind the pieces of all others."""
        return self.nbytes - self._held - self.reduce_nbytes

    @property
    def received_nbytes(self) -> int:
        """What a reduction receives; of many ranks, with a place for the own message."""
        others = sum([section.own_nbytes for section in self.sections])
        return others * (self._plan.world_size - 1) + self._held

    # where pieces lie

    def _nbytes(self, region: int, numel: int) -> int:
        return self._nbytes_of(numel) if self._plan.is_matrix[region] else numel * self._itemsize

    def _placed(self, regions: Iterable[int], numels: Iterable[int]) -> list[int]:
        """Where the pieces of some regions begin in a message; then the end of the message."""
        nbytes = map(self._nbytes, regions, numels)
        return [*accumulate((round_up(one, ALIGN_NBYTES) for one in nbytes), initial=0)]

    def _part(self, region: int, ranks: range, start: int, stride: int, rows: Strided) -> Part:
        place = Strided(start, self._nbytes(region, rows.numel), stride)
        return Part(region, self._plan.is_matrix[region], ranks, place, rows)

    def _few(self, is_reduced: bool) -> tuple[int, list[Section]]:
        """The bytes of all messages, and the one section of few ranks."""
        plan, regions = self._plan, range(len(self._rows))
        by_rank = [*zip(*plan.lengths, strict=True)] or [()] * plan.world_size
        places = {  # most ranks have the same lengths
            numels: self._placed(regions, numels) for numels in set(by_rank)
        }
        sizes = [places[numels][-1] for numels in by_rank]
        own, nbytes = sizes[plan.rank], sum(sizes)
        if is_reduced:
            sizes[plan.rank] = 0
        spans = Ranges.ending_at([*accumulate(sizes, initial=0)])

        def parts() -> list[Part]:
            return [
                self._part(
                    region, range(rank, rank + 1), spans[rank][0] + places[numels][region], 0,
                    Strided(self._rows[region][rank][0], numels[region], 0),
                )
                for rank, numels in enumerate(by_rank)
                for region in regions
                if numels[region]
            ]  # fmt: skip

        return nbytes, [Section(plan.rank, spans, own, plan.world_size, parts, sizes)]

    def _wide(self) -> tuple[int, list[Section]]:
        """The same of many ranks."""
        plan, ranks = self._plan, self._plan.world_size
        shared = [index for index in range(len(self._rows)) if index not in plan.counted]
        starts = self._placed(shared, [plan.longest[index] for index in shared])
        stacks, chunk = [pieces.stack for pieces in plan.pieces], starts[-1]
        whole = min([stacks[index].full for index in shared], default=ranks)

        def parts() -> list[Part]:
            pairs = zip(shared, starts, strict=False)
            return [part for pair in pairs for part in self._stacked(*pair, chunk)]

        sections = [Section(plan.rank, Ranges.over(chunk * ranks, ranks), chunk, whole, parts)]
        end, nbytes = chunk * ranks, 0
        for index, stack in enumerate(stacks):
            long, short = (
                self._placed([index], [n])[-1] for n in (plan.longest[index], stack.short)
            )
            extent = stack.full * long + short
            nbytes += extent
            if index in plan.counted:
                spans = Ranges(extent, range(ranks), long, shift=end)
                pieces = partial(self._stacked, index, end, long)
                own = spans.length(plan.rank)
                sections.append(Section(plan.rank, spans, own, ranks, pieces, is_counted=True))
                end += extent
        return nbytes, sections

    def _stacked(self, region: int, start: int, stride: int) -> list[Part]:
        """A region's pieces as long as the first, then the one that is shorter."""
        spans = self._rows[region]
        first, longest, step, full, short = spans.stack
        parts = list[Part]()
        if full and longest:
            rows = Strided(first, longest, step)
            parts.append(self._part(region, range(full), start, stride, rows))
        if short:
            rows, behind = Strided(spans[full][0], short, 0), start + full * stride
            parts.append(self._part(region, range(full, full + 1), behind, 0, rows))
        return parts
