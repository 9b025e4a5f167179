"""What one unit sends: the messages of one gather and one reduction, to the byte.

    one axis    gather                                      reduce; at stage 0 -> settle (means)
    two hops    cross (between nodes) -> gather (inside)    reduce (inside) -> settle (between)
    replicas    gather (inside)                             reduce (inside) -> settle, share

All figures are those of rank 0, whose pieces are the longest, by the rules of layout/axes.py (who
sends which rows), wire/cut.py (what shares a message) and wire/coded.py (how long one is).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from onefold.layout.cut import Cut, cut_of, parts_of
from onefold.layout.rows import PIECE_NUMEL, round_up
from onefold.recipe import Member
from onefold.wire.codec import Codec, codec_of
from onefold.wire.coded import ALIGN_NBYTES
from onefold.wire.cut import Size, size_of
from onefold.wire_config import DIFFERENCE, EXACT, Wire


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """One collective: bytes that this rank sends, and what it holds for it in the meantime.

    `buffers`: each one that it fills or packs: coded messages, those that regions share, and what a
    reduction receives. On the CPU they are kept for the next message; `owed`: elements that this
    rank sends coded.
    """

    sent: int = 0
    buffers: tuple[int, ...] = ()
    owed: int = 0


NOTHING = PlannedMessage()


@dataclass(frozen=True, slots=True)
class UnitMessages:
    """See the module. `second`, `sums`: elements that a rank keeps of its node's buffer, for
    weights (with a tag of every node) and for gradients.
    """

    gather: PlannedMessage = NOTHING
    cross: PlannedMessage = NOTHING
    reduce: PlannedMessage = NOTHING
    second_hop: PlannedMessage = NOTHING
    share: PlannedMessage = NOTHING
    second: int = 0
    sums: int = 0

    @property
    def owed(self) -> int:
        """Elements of gradients that are fed back, if they are (unit/reduction.py)."""
        return self.reduce.owed + self.second_hop.owed + self.share.owed


def messages_of(
    members: Sequence[Member],
    ranks: int,
    local_world_size: int,
    wire: Wire,
    *,
    is_nccl: bool = False,
) -> UnitMessages:
    """The messages of a unit over `ranks`, in nodes of `local_world_size` ranks; 0: one axis.

    With `secondary="optimizer"` nodes are replicas.
    """
    alike = tuple(replace(member, fqn="") for member in members)
    return _messages_of(alike, ranks, local_world_size, wire, is_nccl)


def spread_of(members: Sequence[Member], ranks: int, *, is_nccl: bool = False) -> UnitMessages:
    """At stage 0: gradients are reduced, and their means gathered in the parameters' own dtype."""
    trained = [member for member in members if member.requires_grad]
    regions = _slabs(trained, ranks, is_nccl)
    reduce = messages_of(members, ranks, 0, Wire(), is_nccl=is_nccl).reduce
    return UnitMessages(reduce=reduce, second_hop=_gather(regions, 0, EXACT, members[0].itemsize))


@lru_cache(maxsize=256)  # blocks are alike, and ways to train are many
def _messages_of(
    members: tuple[Member, ...], ranks: int, local_world_size: int, wire: Wire, is_nccl: bool
) -> UnitMessages:
    if not local_world_size:
        words = wire.weights_between, wire.gradients_between
        return _one_axis(members, ranks, words, is_nccl)
    if wire.secondary == "optimizer":
        words = wire.weights_inside, wire.gradients_inside
        inside = _one_axis(members, local_world_size, words, is_nccl)
        return _with_replicas(
            inside, members, (local_world_size, ranks // local_world_size), wire, is_nccl
        )
    return _two_hops(members, ranks, local_world_size, wire, is_nccl)


@dataclass(frozen=True, slots=True)
class _Region:
    """One parameter, or a part of it, as the ranks of a group have it."""

    numels: tuple[int, ...]  # by rank of the group
    is_replicated: bool
    is_matrix: bool
    is_trained: bool
    is_nccl: bool
    num_slabs: int = 1  # of the parameter of which this is one

    @staticmethod
    def of(member: Member, numels: Sequence[int], is_nccl: bool, num_slabs: int = 1) -> _Region:
        shape, is_trained = member.shape, member.requires_grad
        return _Region(tuple(numels), not shape, len(shape) > 1, is_trained, is_nccl, num_slabs)

    def size(self, itemsize: int) -> Size:
        """How it travels if it is not coded."""
        return size_of(
            self.numels, itemsize, is_replicated=self.is_replicated, is_nccl=self.is_nccl,
            num_slabs=self.num_slabs,
        )  # fmt: skip


@lru_cache(maxsize=1024)  # of few shapes, for hundreds of ranks, again for every way to train
def _numels(cut: Cut) -> tuple[int, ...]:
    """Elements of one slab by rank."""
    return tuple(stop - start for start, stop in cut.slab_ranges)


def _slabs(
    members: Iterable[Member], ranks: int, is_nccl: bool, *, by_rows: bool = False
) -> list[_Region]:
    """The parameters as one-hop messages have them: a region for each slab."""
    found: list[_Region] = []
    for member in members:
        cut = cut_of(member.shape, ranks, by_rows=by_rows)
        region = _Region.of(member, _numels(cut), is_nccl, cut.num_slabs)
        found += [region] * cut.num_slabs
    return found


def _one_axis(
    members: tuple[Member, ...], ranks: int, words: tuple[str, str], is_nccl: bool,
    *, by_rows: bool = False,
) -> UnitMessages:  # fmt: skip
    """`words`: the wires of weights and of gradients."""
    if ranks == 1:
        return UnitMessages()
    first, (weights, gradients) = members[0], words
    regions = _slabs(members, ranks, is_nccl, by_rows=by_rows)
    flags = 1 + sum(member.requires_grad for member in members)
    return UnitMessages(
        gather=_gather(regions, 1, weights if first.is_floating else EXACT, first.compute_itemsize),
        reduce=_reduce(regions, flags, gradients, first.compute_itemsize),
    )


def _with_replicas(
    inside: UnitMessages, members: tuple[Member, ...], mesh: tuple[int, int], wire: Wire,
    is_nccl: bool,
) -> UnitMessages:  # fmt: skip
    """Own rows of a node's mean: each node's part of them is averaged, then all gather them."""
    local_world_size, nodes = mesh
    regions = []
    for member in members:
        own = cut_of(member.shape, local_world_size).piece_numel(0)
        parts = [stop - start for start, stop in parts_of(own, nodes)]
        parts = parts if member.shape else [1] * nodes
        regions.append(_Region.of(member, parts, is_nccl))
    trained = [region for region in regions if region.is_trained]
    itemsize, word = members[0].compute_itemsize, wire.gradients_between
    wide = itemsize if word == EXACT else members[0].itemsize  # of means: they are rounded once
    return replace(
        inside,
        second_hop=_reduce(regions, 1 + len(trained), word, itemsize),
        share=_gather(trained, 0, word, wide),
    )


def _two_hops(
    members: tuple[Member, ...], ranks: int, local_world_size: int, wire: Wire, is_nccl: bool
) -> UnitMessages:
    if not members[0].is_floating:
        return _one_axis(members, ranks, (EXACT, EXACT), is_nccl, by_rows=True)
    nodes, itemsize = ranks // local_world_size, members[0].compute_itemsize
    near: list[_Region] = []  # every node's stretch of rows, cut over its ranks
    far: list[_Region] = []  # this place's piece of every node's rows
    kept = 0
    for member in members:
        pieces = _numels(cut_of(member.shape, ranks, by_rows=True))
        own = pieces[::local_world_size]
        far.append(_Region.of(member, own, is_nccl))
        starts = range(0, ranks, local_world_size) if member.shape else (0,)
        near += [_Region.of(member, pieces[at : at + local_world_size], is_nccl) for at in starts]
        kept += round_up(sum(own) if member.shape else 1, PIECE_NUMEL)
    flags = 1 + sum(region.is_trained for region in far)
    return UnitMessages(
        gather=_gather(near, nodes, wire.weights_inside, itemsize),
        cross=_gather(far, 1, wire.weights_between, itemsize),
        reduce=_reduce(near, flags, wire.gradients_inside, itemsize),
        second_hop=_reduce(far, flags, wire.gradients_between, itemsize),
        second=kept + nodes,
        sums=kept,
    )


def _gather(regions: Iterable[_Region], tags: int, word: str, itemsize: int) -> PlannedMessage:
    """Own rows to all others; `tags` elements of each rank ride along."""
    sharded = [region for region in regions if not region.is_replicated]
    ranks = len(sharded[0].numels) if sharded else 1
    if word == EXACT:
        sent = sum(region.numels[0] for region in sharded) * itemsize * (ranks - 1)
        return PlannedMessage(sent, _shared(sharded, tags, itemsize))
    codec = codec_of(word.removesuffix(DIFFERENCE))
    rest = tags * round_up(itemsize, ALIGN_NBYTES)
    parcels = [each + rest for each in _parcels(sharded, codec, itemsize)]
    owed = sum(region.numels[0] for region in sharded if region.is_matrix)
    staged = sum(parcels)
    if word.endswith(DIFFERENCE):  # the first message is exact: differences refer to it
        staged = max((staged, *_shared(sharded, tags, itemsize)))
    return PlannedMessage(parcels[0] * (ranks - 1), (staged,), owed) if sharded else NOTHING


def _reduce(regions: Iterable[_Region], flags: int, word: str, itemsize: int) -> PlannedMessage:
    """To each rank its rows of everyone's gradients; flags go whole to every rank."""
    trained = [region for region in regions if region.is_trained]
    if not trained:
        return NOTHING
    ranks = len(trained[0].numels)
    if word != EXACT:
        rest = round_up(flags * itemsize, ALIGN_NBYTES)
        parcels = [each + rest for each in _parcels(trained, codec_of(word), itemsize)]
        sent = sum(parcels[1:])
        owed = sum(sum(region.numels[1:]) for region in trained if region.is_matrix)
        return PlannedMessage(sent, (sent, (ranks - 1) * parcels[0]), owed)
    sharded = [region for region in trained if not region.is_replicated]
    sent = sum(sum(region.numels[1:]) for region in sharded) * itemsize
    apart = [region.numels[0] for region in sharded if region.size(itemsize) is Size.LARGE]
    packed = sum(region.numels[0] for region in trained) - sum(apart) + flags
    each = itemsize * (ranks if ranks > 2 else 1)  # of two, the own part does not travel
    received = [numel * each for numel in (*apart, packed)]
    return PlannedMessage(sent, (*received, *_shared(trained, flags, itemsize)))


def _shared(regions: Sequence[_Region], extra: int, itemsize: int) -> tuple[int, ...]:
    """Bytes of the message that regions share, none if no medium ones do: `extra` elements for each
    rank ride along.
    """
    packed = [region for region in regions if region.size(itemsize) is not Size.LARGE]
    if all(region.size(itemsize) is Size.SMALL for region in packed):
        return ()
    ranks = len(packed[0].numels)
    return ((sum(sum(region.numels) for region in packed) + extra * ranks) * itemsize,)


def _parcels(regions: Sequence[_Region], codec: Codec, itemsize: int) -> list[int]:
    """Bytes of the coded message of each rank: matrices are coded, all else is as it is."""
    lengths: list[int] = []
    for rank in range(len(regions[0].numels) if regions else 0):
        parts = Counter((region.numels[rank], region.is_matrix) for region in regions)
        lengths.append(
            sum(
                count * round_up(codec.nbytes(n) if coded else n * itemsize, ALIGN_NBYTES)
                for (n, coded), count in parts.items()
            )
        )
    return lengths
