"""The cost of each collective of a unit: rings or straight messages, one hop or two, coded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from onefold.planner.coding import seconds_of
from onefold.planner.conditions import LONG_NUMEL, Conditions
from onefold.planner.links import (
    NO_COST,
    Cost,
    LinkGroup,
    all_reduce_cost,
    gather_cost,
    reduce_cost,
    replica_group,
    sharding_group,
    sum_of,
)
from onefold.planner.machines import Machine

if TYPE_CHECKING:
    from onefold.recipe import Recipe


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """The seconds and bytes of each message of a unit.

    Weights take `gather`, after `cross` where a hop between nodes comes first. Gradients take
    `reduce`, at stage 0 then `spread` (the mean); between nodes `second_hop`, or `replica`.
    """

    gather: Cost
    reduce: Cost
    spread: Cost = NO_COST
    replica: Cost = NO_COST
    cross: Cost = NO_COST
    second_hop: Cost = NO_COST


@dataclass(frozen=True, slots=True)
class _Coded:
    """The messages of one hop: the bytes of an element, the codec ("" if exact), and their way."""

    nbytes: float
    codec: str = ""
    is_straight: bool = False


@lru_cache(maxsize=64)
def _coded(word: str, itemsize: int, is_straight: bool = False) -> _Coded:
    from onefold.wire.codec import codec_of  # the simulator is imported without torch
    from onefold.wire_config import DIFFERENCE, EXACT

    codec = word.removesuffix(DIFFERENCE)
    if codec == EXACT:
        return _Coded(itemsize, "", is_straight)
    return _Coded(codec_of(codec).nbytes(LONG_NUMEL) / LONG_NUMEL, codec, is_straight)


def costs_of(numel: int, recipe: Recipe, conditions: Conditions, machine: Machine) -> UnitCosts:
    """Compute the costs of one unit of `numel` parameters."""
    near = conditions.near(recipe)
    shard = sharding_group(recipe.shard_world, near)
    copies = replica_group(recipe.world_size, recipe.shard_world, near)
    if conditions.waits_for_hops(recipe):
        if recipe.has_hops:
            return _two_hops(numel, recipe, conditions, machine)
        return _one_hop(numel, recipe, conditions, (shard, copies), machine)
    grads = numel * conditions.grad_itemsize
    return UnitCosts(
        gather=gather_cost(numel * conditions.weight_itemsize, shard, machine),
        reduce=reduce_cost(grads, shard, machine),
        spread=gather_cost(grads, shard, machine),
        replica=all_reduce_cost(grads / shard.ranks, copies, machine),
    )


def _one_hop(
    numel: int, recipe: Recipe, conditions: Conditions, groups: tuple[LinkGroup, LinkGroup],
    machine: Machine,
) -> UnitCosts:  # fmt: skip
    """On one axis each rank sends its pieces straight to every other; GPUs gather in a ring."""
    (shard, copies), is_straight, wire = groups, not recipe.has_axes, recipe.wire
    weights = wire.weights_between if is_straight else wire.weights_inside
    gradients = wire.gradients_between if is_straight else wire.gradients_inside
    gathers_straight = is_straight and recipe.device_type == "cpu"
    part = numel / shard.ranks
    between = _coded(wire.gradients_between, conditions.grad_itemsize, True)
    gather = _coded(weights, conditions.weight_itemsize, gathers_straight)
    reduce = _coded(gradients, conditions.grad_itemsize, is_straight)
    return UnitCosts(
        gather=_gather(numel, gather, shard, machine),
        reduce=_reduce(numel, reduce, shard, machine),
        replica=sum_of(
            _reduce(part, between, copies, machine), _gather(part, between, copies, machine)
        ),
    )


def _two_hops(numel: int, recipe: Recipe, conditions: Conditions, machine: Machine) -> UnitCosts:
    near = conditions.near(recipe)
    nodes = -(-recipe.world_size // near)
    inside, between = LinkGroup(near, near), LinkGroup(nodes, 1)
    wire, weight, grad = recipe.wire, conditions.weight_itemsize, conditions.grad_itemsize
    part = numel / near
    return UnitCosts(
        gather=_gather(numel, _coded(wire.weights_inside, weight), inside, machine),
        reduce=_reduce(numel, _coded(wire.gradients_inside, grad), inside, machine),
        cross=_gather(part, _coded(wire.weights_between, weight), between, machine),
        second_hop=_reduce(part, _coded(wire.gradients_between, grad), between, machine),
    )


def _gather(numel: float, coded: _Coded, group: LinkGroup, machine: Machine) -> Cost:
    """Each rank codes its own rows once, and reads all messages, its own too."""
    cost = gather_cost(numel * coded.nbytes, group, machine, is_straight=coded.is_straight)
    coding = seconds_of(coded.codec, machine)
    if not cost.seconds:
        return cost
    return replace(cost, encode=numel / group.ranks * coding.encode, decode=numel * coding.add)


def _reduce(numel: float, coded: _Coded, group: LinkGroup, machine: Machine) -> Cost:
    """Each rank writes a message for every other rank, and reads one from each."""
    cost = reduce_cost(numel * coded.nbytes, group, machine, is_straight=coded.is_straight)
    coding, others = seconds_of(coded.codec, machine), numel * (group.ranks - 1) / group.ranks
    if not cost.seconds:
        return cost
    return replace(cost, encode=others * coding.encode, decode=others * coding.add)
