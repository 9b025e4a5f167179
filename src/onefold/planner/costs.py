"""What each collective of a unit costs under a run: rings or straight, one hop or two, coded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onefold.planner.coding import seconds_of
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
from onefold.planner.run import Element, Run, Travel


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Weights are gathered, after a hop between nodes where they `cross` in one. Gradients are
    reduced; at stage 0 the mean is `spread`; between nodes sums `settle`, or those of a `replica`.
    """

    gather: Cost
    reduce: Cost
    spread: Cost = NO_COST
    replica: Cost = NO_COST
    cross: Cost = NO_COST
    settle: Cost = NO_COST


def costs_of(numel: int, run: Run, machine: Machine) -> UnitCosts:
    """Of one unit of `numel` parameters."""
    if run.travel is not None and run.stage > 0:
        return _travelling(numel, run, run.travel, machine)
    shard = sharding_group(run.copy_ranks, run.ranks_per_node)
    copies = replica_group(run.world_size, run.copy_ranks, run.ranks_per_node)
    grads = numel * run.grad_itemsize
    return UnitCosts(
        gather=gather_cost(numel * run.weight_itemsize, shard, machine),
        reduce=reduce_cost(grads, shard, machine),
        spread=gather_cost(grads, shard, machine),
        replica=all_reduce_cost(grads / shard.ranks, copies, machine),
    )


def _travelling(numel: int, run: Run, travel: Travel, machine: Machine) -> UnitCosts:
    near, nodes = run.ranks_per_node, -(-run.world_size // run.ranks_per_node)
    if run.hops is None:
        shard = sharding_group(run.copy_ranks, near)
        copies = replica_group(run.world_size, run.copy_ranks, near)
        part = numel / shard.ranks
        between = travel.gradients_between
        return UnitCosts(
            gather=_gather(numel, travel.weights, shard, machine, travel.gathers_straight),
            reduce=_reduce(numel, travel.gradients, shard, machine, travel.sends_straight),
            replica=sum_of(
                _reduce(part, between, copies, machine, True),
                _gather(part, between, copies, machine, True),
            ),
        )
    inside, between = LinkGroup(near, near), LinkGroup(nodes, 1)
    return UnitCosts(
        gather=_gather(numel, travel.weights, inside, machine, False),
        reduce=_reduce(numel, travel.gradients, inside, machine, False),
        cross=_gather(numel / near, travel.weights_between, between, machine, False),
        settle=_reduce(numel / near, travel.gradients_between, between, machine, False),
    )


def _gather(
    numel: float, element: Element, group: LinkGroup, machine: Machine, is_straight: bool
) -> Cost:
    """Own rows are coded once; everyone reads all messages, its own too."""
    cost = gather_cost(numel * element.itemsize, group, machine, is_straight=is_straight)
    coding = seconds_of(element.codec, machine)
    if not cost.seconds:
        return cost
    return replace(cost, encode=numel / group.ranks * coding.encode, decode=numel * coding.add)


def _reduce(
    numel: float, element: Element, group: LinkGroup, machine: Machine, is_straight: bool
) -> Cost:
    """A message for every other rank, and one from each."""
    cost = reduce_cost(numel * element.itemsize, group, machine, is_straight=is_straight)
    coding, others = seconds_of(element.codec, machine), numel * (group.ranks - 1) / group.ranks
    if not cost.seconds:
        return cost
    return replace(cost, encode=others * coding.encode, decode=others * coding.add)
