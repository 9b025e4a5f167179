"""One unit under a recipe: its bytes at rest, and its messages to the byte.

    one axis    gather                                    reduce; at stage 0 -> second_hop (means)
    two hops    cross (between nodes) -> gather (inside)  reduce (inside) -> second_hop (between)
    replicas    gather (inside)                           reduce (inside) -> second_hop -> share

All numbers are those of rank 0, whose pieces are the longest. layout/axes.py decides which rank
sends which rows, wire/cut.py which regions share a message, wire/coded.py how long a coded one is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from onefold.layout.cut import Cut, cut_of, parts_of
from onefold.layout.flat import UnitBytes, unit_bytes
from onefold.layout.rows import PIECE_NUMEL, round_up
from onefold.planner.work import UnitWork
from onefold.recipe import Member, Recipe
from onefold.wire.codec import Codec, codec_of
from onefold.wire.coded import ALIGN_NBYTES
from onefold.wire.cut import Size, size_of
from onefold.wire_config import DIFFERENCE, EXACT, Wire


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """One collective: the bytes that this rank sends, and its buffers until the message is read.

    `buffers`: coded messages, messages that regions share, and buffers that a reduction receives
    into. `owed`: elements that this rank sends coded.
    """

    sent: int = 0
    buffers: tuple[int, ...] = ()
    owed: int = 0


NOTHING = PlannedMessage()


@dataclass(frozen=True, slots=True)
class UnitMessages:
    """The messages of one unit, see the module.

    `second`, `sums`: elements that a rank keeps of its node's buffer, for weights (with a tag of
    every node) and for gradients.
    """

    gather: PlannedMessage = NOTHING
    cross: PlannedMessage = NOTHING
    reduce: PlannedMessage = NOTHING
    second_hop: PlannedMessage = NOTHING
    share: PlannedMessage = NOTHING
    second: int = 0
    sums: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUnit(UnitBytes):
    """One unit on rank 0: bytes at rest, and messages."""

    name: str
    second: int  # weights that rest for the node
    sums: int  # gradients that are summed inside the node
    feedback: int  # residuals of coded gradients
    messages: UnitMessages
    data_ranks: int = 0  # of a mesh of its own; 0: it travels among all ranks


def planned_unit(unit: UnitWork, recipe: Recipe, rank: int | None = None) -> PlannedUnit:
    """Compute the bytes and messages of a unit; `rank` as in `unit_bytes`."""
    recipe = recipe.on(unit.data_ranks)
    at = None if unit.data_ranks else rank
    first, found = unit.members[0], unit_bytes(unit.members, recipe, at)
    mesh = recipe.world_size, recipe.local_world_size if recipe.has_axes else 0
    members = tuple(replace(member, fqn="") for member in unit.members)
    is_nccl = recipe.device_type != "cpu"
    if recipe.is_sharded:
        sent = _messages_of(members, mesh, recipe.wire, is_nccl)
    else:
        sent = _all_reduce(members, recipe.world_size, is_nccl)
    owed = sent.reduce.owed + sent.second_hop.owed + sent.share.owed
    is_trained = any(member.requires_grad for member in members)
    return PlannedUnit(
        **{each.name: getattr(found, each.name) for each in fields(found)},
        name=unit.name,
        second=sent.second * first.compute_itemsize if recipe.keeps_weights else 0,
        sums=sent.sums * first.itemsize if is_trained else 0,
        feedback=4 * owed if recipe.wire.feedback else 0,
        messages=sent,
        data_ranks=unit.data_ranks,
    )


@lru_cache(maxsize=256)  # blocks are alike, and a plan tries many recipes
def _messages_of(
    members: tuple[Member, ...], mesh: tuple[int, int], wire: Wire, is_nccl: bool
) -> UnitMessages:
    """`mesh`: all ranks, and the ranks of a node; 0: one axis."""
    ranks, near = mesh
    if not near:
        return _one_axis(members, ranks, (wire.weights_between, wire.gradients_between), is_nccl)
    if wire.secondary == "optimizer":
        return _replicas(members, mesh, wire, is_nccl)
    if not members[0].is_floating:
        return _one_axis(members, ranks, (EXACT, EXACT), is_nccl, by_rows=True)
    return _two_hops(members, mesh, wire, is_nccl)


@dataclass(frozen=True, slots=True)
class _Region:
    """A parameter, or a part of it, cut over the ranks of a group."""

    member: Member
    numels: tuple[int, ...]  # by rank of the group
    is_nccl: bool
    num_slabs: int = 1  # of the parameter

    @property
    def is_trained(self) -> bool:
        return self.member.requires_grad

    @property
    def is_replicated(self) -> bool:
        return not self.member.shape

    @property
    def is_matrix(self) -> bool:
        return len(self.member.shape) > 1

    def size(self, itemsize: int) -> Size:
        """Return how the region travels if it is not coded."""
        return size_of(
            self.numels, itemsize, is_replicated=self.is_replicated, is_nccl=self.is_nccl,
            num_slabs=self.num_slabs,
        )  # fmt: skip


@lru_cache(maxsize=1024)  # few shapes, hundreds of ranks, many recipes
def _numels(cut: Cut) -> tuple[int, ...]:
    """Return the elements of one slab, by rank."""
    return tuple(stop - start for start, stop in cut.slab_ranges)


def _slabs(
    members: Iterable[Member], ranks: int, is_nccl: bool, *, by_rows: bool = False
) -> list[_Region]:
    """Return the regions of one-hop messages: one for each slab of a parameter."""
    found: list[_Region] = []
    for member in members:
        cut = cut_of(member.shape, ranks, by_rows=by_rows)
        region = _Region(member, _numels(cut), is_nccl, cut.num_slabs)
        found += [region] * cut.num_slabs
    return found


def _one_axis(
    members: tuple[Member, ...], ranks: int, words: tuple[str, str], is_nccl: bool,
    *, by_rows: bool = False,
) -> UnitMessages:  # fmt: skip
    """`words`: the codecs of weights and of gradients."""
    if ranks == 1:
        return UnitMessages()
    first, (weights, gradients) = members[0], words
    regions = _slabs(members, ranks, is_nccl, by_rows=by_rows)
    flags = 1 + sum(member.requires_grad for member in members)
    return UnitMessages(
        gather=_gather(regions, 1, weights if first.is_floating else EXACT, first.compute_itemsize),
        reduce=_reduce(regions, flags, gradients, first.compute_itemsize),
    )


def _all_reduce(members: tuple[Member, ...], ranks: int, is_nccl: bool) -> UnitMessages:
    """Stage 0: gradients are reduced, and their means gathered in the parameters' own dtype."""
    reduce = _messages_of(members, (ranks, 0), Wire(), is_nccl).reduce
    regions = _slabs([each for each in members if each.requires_grad], ranks, is_nccl)
    return UnitMessages(reduce=reduce, second_hop=_gather(regions, 0, EXACT, members[0].itemsize))


def _replicas(
    members: tuple[Member, ...], mesh: tuple[int, int], wire: Wire, is_nccl: bool
) -> UnitMessages:
    """Nodes are replicas: each averages a part of own rows of a node's mean, then all gather."""
    ranks, near = mesh
    nodes = ranks // near
    inside = _one_axis(members, near, (wire.weights_inside, wire.gradients_inside), is_nccl)
    regions = []
    for member in members:
        own = cut_of(member.shape, near).piece_numel(0)
        parts = [stop - start for start, stop in parts_of(own, nodes)]
        parts = parts if member.shape else [1] * nodes
        regions.append(_Region(member, tuple(parts), is_nccl))
    trained = [region for region in regions if region.is_trained]
    itemsize, word = members[0].compute_itemsize, wire.gradients_between
    wide = itemsize if word == EXACT else members[0].itemsize  # of means: they are rounded once
    return replace(
        inside,
        second_hop=_reduce(regions, 1 + len(trained), word, itemsize),
        share=_gather(trained, 0, word, wide),
    )


def _two_hops(
    members: tuple[Member, ...], mesh: tuple[int, int], wire: Wire, is_nccl: bool
) -> UnitMessages:
    """Weights cross between nodes and are gathered inside; gradients take the way back."""
    ranks, local_world_size = mesh
    nodes, itemsize = ranks // local_world_size, members[0].compute_itemsize
    near: list[_Region] = []  # every node's range of rows, cut over its ranks
    far: list[_Region] = []  # this local rank's piece of every node's rows
    kept = 0
    for member in members:
        pieces = _numels(cut_of(member.shape, ranks, by_rows=True))
        own = pieces[::local_world_size]
        far.append(_Region(member, own, is_nccl))
        starts = range(0, ranks, local_world_size) if member.shape else (0,)
        near += [_Region(member, pieces[at : at + local_world_size], is_nccl) for at in starts]
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


def _gather(regions: Sequence[_Region], tags: int, word: str, itemsize: int) -> PlannedMessage:
    """Send own rows to all others, with `tags` more elements of each rank.

    A coded message counts its tags, an exact one does not.
    """
    sharded = [region for region in regions if not region.is_replicated]
    ranks = len(regions[0].numels) if regions else 1
    if word == EXACT:
        sent = sum(region.numels[0] for region in sharded) * itemsize * (ranks - 1)
        return PlannedMessage(sent, _shared(sharded, tags, itemsize))
    codec = codec_of(word.removesuffix(DIFFERENCE))
    rest = tags * round_up(itemsize, ALIGN_NBYTES)
    lengths = [each + rest for each in _coded_nbytes(sharded, codec, itemsize)] or [rest] * ranks
    owed = sum(region.numels[0] for region in sharded if region.is_matrix)
    staged = sum(lengths)
    if word.endswith(DIFFERENCE):  # the first message is exact: differences refer to it
        staged = max((staged, *_shared(sharded, tags, itemsize)))
    return PlannedMessage(lengths[0] * (ranks - 1), (staged,), owed)


def _reduce(regions: Iterable[_Region], flags: int, word: str, itemsize: int) -> PlannedMessage:
    """Send each rank its rows of the gradients of all; every rank gets all flags."""
    trained = [region for region in regions if region.is_trained]
    if not trained:
        return NOTHING
    ranks = len(trained[0].numels)
    if word != EXACT:
        rest = round_up(flags * itemsize, ALIGN_NBYTES)
        lengths = [each + rest for each in _coded_nbytes(trained, codec_of(word), itemsize)]
        sent = sum(lengths[1:])
        owed = sum(sum(region.numels[1:]) for region in trained if region.is_matrix)
        return PlannedMessage(sent, (sent, (ranks - 1) * lengths[0]), owed)
    sharded = [region for region in trained if not region.is_replicated]
    sent = sum(sum(region.numels[1:]) for region in sharded) * itemsize
    apart = [region.numels[0] for region in sharded if region.size(itemsize) is Size.LARGE]
    packed = sum(region.numels[0] for region in trained) - sum(apart) + flags
    each = itemsize * (ranks if ranks > 2 else 1)  # of two, the own part does not travel
    received = [numel * each for numel in (*apart, packed)]
    return PlannedMessage(sent, (*received, *_shared(trained, flags, itemsize)))


def _shared(regions: Sequence[_Region], extra: int, itemsize: int) -> tuple[int, ...]:
    """Return the bytes of the message that regions share; empty where only small ones do.

    `extra` elements for each rank travel with it.
    """
    packed = [region for region in regions if region.size(itemsize) is not Size.LARGE]
    if all(region.size(itemsize) is Size.SMALL for region in packed):
        return ()
    ranks = len(packed[0].numels)
    return ((sum(sum(region.numels) for region in packed) + extra * ranks) * itemsize,)


def _coded_nbytes(regions: Sequence[_Region], codec: Codec, itemsize: int) -> list[int]:
    """Return the bytes of each rank's coded message: only matrices are coded."""
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
