"""The cost of each message of a unit: rings or straight messages, one hop or two, exact or coded.

The cost of coding on the CPU was measured by benchmarks/codec.py (docs/measurements/codecs.md). On
a GPU it was not measured: the bytes that torch's passes over fp32 move are counted in
wire/codec.py, and divided by the machine's rate for memory. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from onefold.planner.conditions import Conditions
from onefold.planner.link_costs import (
    NO_COST,
    Cost,
    LinkGroup,
    gather_cost,
    reduce_cost,
    replica_group,
)
from onefold.planner.machines import Machine

if TYPE_CHECKING:
    from onefold.recipe import Recipe


class Coding(NamedTuple):
    """The cost of writing a message, and of adding one to a sum."""

    encode: float
    add: float


CPU_RATES: Mapping[str, Coding] = MappingProxyType(
    {
        "int8": Coding(17.4, 15.6), "int4": Coding(14.4, 13.5),
        "int8+h": Coding(5.3, 5.9), "int4+h": Coding(5.7, 7.3),
    }
)  # fmt: skip
"""GB/s of fp32 on one core, with the kernel in C where there is one."""

GPU_NBYTES: Mapping[str, Coding] = MappingProxyType(
    {
        "int8": Coding(41, 25), "int4": Coding(52, 46),
        "int8+h": Coding(125, 101), "int4+h": Coding(136, 122),
    }
)  # fmt: skip
"""Bytes that passes over one element read and write."""


def seconds_of(codec: str, machine: Machine) -> Coding:
    """Return the seconds per element on `machine`; 0 for exact messages."""
    if codec not in CPU_RATES:
        return Coding(0.0, 0.0)
    if machine.launches_hide:
        rate = machine.memory_rate * machine.efficiency.memory
        return Coding(*(nbytes / rate for nbytes in GPU_NBYTES[codec]))
    return Coding(*(4 / (rate * 1e9) for rate in CPU_RATES[codec]))


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


def costs_of(numel: int, recipe: Recipe, conditions: Conditions, machine: Machine) -> UnitCosts:
    """Compute the costs of one unit of `numel` parameters.

    On one axis each rank sends its pieces straight to every other, while GPUs gather in a ring.
    """
    near, wire = conditions.near(recipe), recipe.wire
    weight, grad = conditions.weight_itemsize, conditions.grad_itemsize
    is_ring = not conditions.waits_for_hops(recipe)
    if recipe.has_hops and not is_ring:
        inside, between = LinkGroup(near, near), LinkGroup(-(-recipe.world_size // near), 1)
        return UnitCosts(
            gather=_gather(numel, (wire.weights_inside, weight), inside, machine),
            reduce=_reduce(numel, (wire.gradients_inside, grad), inside, machine),
            cross=_gather(numel / near, (wire.weights_between, weight), between, machine),
            second_hop=_reduce(numel / near, (wire.gradients_between, grad), between, machine),
        )
    shard = LinkGroup(recipe.shard_world, min(recipe.shard_world, near))
    copies = replica_group(recipe.world_size, recipe.shard_world, near)
    goes_straight = not is_ring and not recipe.has_axes
    gathers_straight = goes_straight and recipe.device_type == "cpu"
    weights, gradients, means = _EXACT, _EXACT, _EXACT
    if not is_ring:
        means = wire.gradients_between
        weights, gradients = wire.weights_inside, wire.gradients_inside
        if goes_straight:
            weights, gradients = wire.weights_between, wire.gradients_between
    own = numel / shard.ranks
    reduced = _reduce(own, (means, grad), copies, machine, is_straight=not is_ring)
    shared = _gather(own, (means, grad), copies, machine, is_straight=not is_ring)
    return UnitCosts(
        gather=_gather(numel, (weights, weight), shard, machine, is_straight=gathers_straight),
        reduce=_reduce(numel, (gradients, grad), shard, machine, is_straight=goes_straight),
        spread=_gather(numel, (_EXACT, grad), shard, machine),
        replica=reduced.then(shared),
    )


Coded = tuple[str, int]
"""The word of a wire, and the bytes of an element of an exact message."""
_EXACT = ""


@lru_cache(maxsize=64)
def _message(coded: Coded) -> tuple[str, float]:
    """Return the codec ("" if exact), and the bytes of an element."""
    from onefold.wire.codec import codec_of  # the simulator is imported without torch
    from onefold.wire_config import DIFFERENCE, EXACT

    word, itemsize = coded
    codec = word.removesuffix(DIFFERENCE)
    if codec in (_EXACT, EXACT):
        return _EXACT, itemsize
    group = codec_of(codec).group
    return codec, codec_of(codec).nbytes(group) / group


def _gather(
    numel: float, coded: Coded, group: LinkGroup, machine: Machine, *, is_straight: bool = False
) -> Cost:
    """Each rank codes its own rows once, and reads all messages, its own too."""
    codec, nbytes = _message(coded)
    cost = gather_cost(numel * nbytes, group, machine, is_straight=is_straight)
    coding = seconds_of(codec, machine)
    if not cost.seconds:
        return cost
    return replace(cost, encode=numel / group.ranks * coding.encode, decode=numel * coding.add)


def _reduce(
    numel: float, coded: Coded, group: LinkGroup, machine: Machine, *, is_straight: bool = False
) -> Cost:
    """Each rank writes a message for every other rank, and reads one from each."""
    codec, nbytes = _message(coded)
    cost = reduce_cost(numel * nbytes, group, machine, is_straight=is_straight)
    coding, others = seconds_of(codec, machine), numel * (group.ranks - 1) / group.ranks
    if not cost.seconds:
        return cost
    return replace(cost, encode=others * coding.encode, decode=others * coding.add)
