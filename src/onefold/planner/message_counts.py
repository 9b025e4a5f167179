"""Count one unit's bytes at rest under a recipe, and its messages to the byte.

    one axis    gather                                    reduce; at stage 0 -> second_hop (means)
    two hops    cross (between nodes) -> gather (inside)  reduce (inside) -> second_hop (between)
    hosts       gather                                    the same; at stage 0 -> share (means)
    replicas    gather (inside)                           reduce (inside) -> second_hop -> share

All numbers are those of one rank: of rank 0, whose pieces are the longest, unless another is
requested. Ranks of unequal shares talk on one axis. layout/messages.py plans the messages; here
their bytes are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

import torch

from onefold.layout.flat import UnitBytes, unit_bytes
from onefold.layout.message_plan import MessagePlan
from onefold.layout.messages import (
    GatherPlan,
    NodeParts,
    Parts,
    QuantizedMessages,
    Regions,
    gather_inside,
    gathered,
    own_part_travels,
    parts_of_replicas,
    reduce_message,
)
from onefold.layout.ranges import Shares
from onefold.layout.rows import Layout
from onefold.layout.two_axes import Axes, NodeLayout
from onefold.planner.work import UnitWork
from onefold.recipe import Member, Recipe
from onefold.wire.codec import codec_of
from onefold.wire_config import DIFFERENCE, EXACT


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """One collective: the bytes that this rank sends, and its buffers until the message is read.

    `buffers`: quantized messages, messages that regions share, and buffers that a reduction
    receives into. `owed`: elements that this rank sends quantized. `padding`: bytes that this rank
    sends besides, behind pieces that are shorter than the longest.
    """

    sent: int = 0
    buffers: tuple[int, ...] = ()
    owed: int = 0
    padding: int = 0


NOTHING = PlannedMessage()


@dataclass(frozen=True, slots=True)
class UnitMessages:
    """The messages of one unit, see the module.

    `second`, `sums`: elements that a rank keeps of its node's buffer, for weights (with flags) and
    for gradients.
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
    """One unit on one rank: bytes at rest, and messages."""

    name: str
    dtype: torch.dtype  # of weights at rest
    second: int  # weights that rest for the node
    sums: int  # gradients that are summed inside the node
    feedback: int  # residuals of quantized gradients
    messages: UnitMessages
    data_ranks: int = 0  # of a mesh of its own; 0: it travels among all ranks


def planned_unit(unit: UnitWork, recipe: Recipe, rank: int | None = None) -> PlannedUnit:
    """Compute the bytes and messages of a unit; `rank` as in `unit_bytes`."""
    recipe = recipe.on(unit.data_ranks)
    at = None if unit.data_ranks else rank
    first, held = unit.members[0], unit_bytes(unit.members, recipe, at)
    members = tuple(replace(member, fqn="") for member in unit.members)
    sent = _messages_of(members, replace(recipe, units=()), at)
    owed = sent.reduce.owed + sent.second_hop.owed + sent.share.owed
    is_trained = any(member.requires_grad for member in members)
    return PlannedUnit(
        **{item.name: getattr(held, item.name) for item in fields(held)},
        name=unit.name,
        dtype=first.dtype,
        second=sent.second * first.compute_itemsize if recipe.keeps_weights else 0,
        sums=sent.sums * first.itemsize if is_trained else 0,
        feedback=4 * owed if recipe.wire.feedback else 0,
        messages=sent,
        data_ranks=unit.data_ranks,
    )


class _Group(NamedTuple):
    """The ranks of one message, and the requested rank (`MessageRanks`)."""

    world_size: int
    rank: int
    is_nccl: bool
    packs: bool = False


def _group(recipe: Recipe, world_size: int, rank: int = 0) -> _Group:
    """Return the ranks of one hop."""
    return _Group(world_size, rank, recipe.device_type != "cpu")


@lru_cache(maxsize=256)
def _layout(
    shapes: tuple[tuple[int, ...], ...], world_size: int, shares: Shares, *, by_rows: bool
) -> Layout:
    named = [(str(index), shape) for index, shape in enumerate(shapes)]
    return Layout.build(named, world_size, shares, by_rows=by_rows)


@lru_cache(maxsize=256)  # blocks are alike, and a plan tries many recipes
def _messages_of(members: tuple[Member, ...], recipe: Recipe, rank: int | None) -> UnitMessages:
    """`recipe`: without its units. `rank`: see `planned_unit`."""
    shapes, wire = tuple(member.shape for member in members), recipe.wire
    shares, is_cut = recipe.shares if recipe.is_sharded else None, recipe.is_sharded
    if rank is None or not is_cut:
        rank = shares.index(max(shares)) if shares else 0
    layout = _layout(shapes, recipe.shard_world, shares, by_rows=recipe.has_hops)
    is_floating = members[0].is_floating
    if recipe.are_replicas:
        return _replicas(members, layout, recipe)
    if recipe.has_hops and is_floating:
        return _two_hops(members, layout, recipe)
    is_exact = recipe.has_hops or not is_cut
    words = (EXACT, EXACT) if is_exact else (wire.weights_between, wire.gradients_between)
    group = _group(recipe, recipe.world_size, rank)
    sent = _one_axis(members, layout, group, words, recipe.num_flags)
    crosses = recipe.reduces_in_hops and is_floating
    if crosses:
        sent = replace(_reduced_in_hops(members, layout, recipe), gather=sent.gather)
    if is_cut:
        return sent
    slabs = (slab for slabs in _trained(members, layout.slabs()) for slab in slabs)
    means = gathered((slab, slab.full_offset) for slab in slabs)
    spread = _gather(means, group, EXACT, members[0].itemsize)
    sent = replace(sent, gather=NOTHING)
    return replace(sent, share=spread) if crosses else replace(sent, second_hop=spread)


def _trained(members: Sequence[Member], parts: Parts) -> Parts:
    return list(compress(parts, (member.requires_grad for member in members)))


def _one_axis(
    members: tuple[Member, ...], layout: Layout, group: _Group, words: tuple[str, str],
    num_flags: int,
) -> UnitMessages:  # fmt: skip
    """`words`: the codecs of weights and of gradients; `num_flags`: behind weights."""
    first, (weights, gradients) = members[0], words
    word, itemsize = weights if first.is_floating else EXACT, first.compute_itemsize
    regions = GatherPlan.on_one_axis(layout, group.rank, num_flags).regions
    return UnitMessages(
        gather=_gather(regions, group, word, itemsize),
        reduce=_reduce(members, layout.slabs(), group, gradients),
    )


def _replicas(members: tuple[Member, ...], layout: Layout, recipe: Recipe) -> UnitMessages:
    """Nodes are replicas: each averages a part of own rows of a node's mean, then all gather."""
    near, wire, word = recipe.local_world_size, recipe.wire, recipe.wire.gradients_between
    inside, between = _group(recipe, near), _group(recipe, recipe.world_size // near)
    parts = parts_of_replicas(layout, inside.rank, between.world_size)
    means = gathered((part, 0) for (part,) in _trained(members, parts))
    first = members[0]  # means that are quantized are rounded once
    itemsize = first.compute_itemsize if word == EXACT else first.itemsize
    words = wire.weights_inside, wire.gradients_inside
    return replace(
        _one_axis(members, layout, inside, words, recipe.num_flags),
        second_hop=_reduce(members, parts, between, word),
        share=_gather(means, between, word, itemsize),
    )


def _two_hops(members: tuple[Member, ...], layout: Layout, recipe: Recipe) -> UnitMessages:
    """Weights cross between nodes and are gathered inside; gradients take the way back."""
    near, wire, itemsize = recipe.local_world_size, recipe.wire, members[0].compute_itemsize
    inside, between = _group(recipe, near), _group(recipe, recipe.world_size // near)
    node = NodeLayout.build(layout.slots, Axes(between.world_size, near, inside.rank))
    has_flags = recipe.flags_failures
    cross = GatherPlan.between(layout, node, keeps=False, has_flags=has_flags).regions
    near_regions = gather_inside(layout, node, has_flags=has_flags)
    return replace(
        _reduced_in_hops(members, layout, recipe),
        gather=_gather(near_regions, inside, wire.weights_inside, itemsize),
        cross=_gather(cross, between, wire.weights_between, itemsize),
        second=node.numel + (between.world_size if has_flags else 0),
    )


def _reduced_in_hops(members: tuple[Member, ...], layout: Layout, recipe: Recipe) -> UnitMessages:
    """Gradients are summed inside a node, then between nodes."""
    near, wire = recipe.local_world_size, recipe.wire
    inside, between = _group(recipe, near), _group(recipe, recipe.world_size // near)
    node = NodeParts.from_slabs(layout.slabs(), Axes(between.world_size, near, inside.rank))
    return UnitMessages(
        reduce=_reduce(members, node.inside, inside, wire.gradients_inside),
        second_hop=_reduce(members, node.between, between, wire.gradients_between),
        sums=node.numel,
    )


def _gather(regions: Regions, group: _Group, word: str, itemsize: int) -> PlannedMessage:
    """Send own rows to all others. A quantized message counts its flags, an exact one does not."""
    if group.world_size == 1:
        return NOTHING
    plan = MessagePlan(*regions, group, itemsize)
    shared = (plan.packed_numel * itemsize,) if plan.medium else ()
    if word == EXACT:
        padding = plan.gather_padding * itemsize
        return PlannedMessage(plan.gather_numel * itemsize, shared, padding=padding)
    codec = codec_of(word.removesuffix(DIFFERENCE))
    messages = QuantizedMessages(plan, plan.pieces, codec.nbytes, itemsize)
    owed = sum(compress(plan.own_numels, plan.is_matrix))
    starts_exact = word.endswith(DIFFERENCE)  # the first message: differences refer to it
    staged = max((messages.nbytes, *shared)) if starts_exact else messages.nbytes
    return PlannedMessage(messages.gather_nbytes, (staged,), owed, messages.gather_padding)


def _reduce(members: tuple[Member, ...], parts: Parts, group: _Group, word: str) -> PlannedMessage:
    """Send each rank its rows of the gradients of all; every rank gets all flags."""
    trained, itemsize, ranks = _trained(members, parts), members[0].compute_itemsize, group[0]
    if not trained or ranks == 1:
        return NOTHING
    plan = MessagePlan(*reduce_message(trained, ranks), group, itemsize)
    if word != EXACT:
        nbytes_of = codec_of(word).nbytes
        messages = QuantizedMessages(plan, plan.pieces, nbytes_of, itemsize, is_reduced=True)
        matrices = compress(zip(plan.numels, plan.own_numels, strict=True), plan.is_matrix)
        owed = sum(numel - own for numel, own in matrices)
        buffers = messages.nbytes, messages.received_nbytes
        return PlannedMessage(messages.reduce_nbytes, buffers, owed, messages.reduce_padding)
    shared = (plan.packed_numel,) if plan.medium else ()
    apart = (plan.own_numels[index] for index in (*plan.large, *plan.counted))
    own = [*apart, plan.chunk_numel]
    received = [numel * (ranks if own_part_travels(ranks) else 1) for numel in own]
    buffers = tuple(numel * itemsize for numel in (*received, *shared))
    padding = plan.reduce_padding * itemsize
    return PlannedMessage(plan.reduce_numel * itemsize, buffers, padding=padding)
