"""What a collective costs on two classes of links: inside a node and between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.planner.machines import Machine


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """`ranks` that talk, `local_world_size` of which share a node."""

    ranks: int
    local_world_size: int

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return -(-self.ranks // self.local_world_size)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one collective: seconds, bytes that one rank sends, and the links it keeps busy.

    `encode` and `decode` are seconds before and after it, in which no link is busy.
    """

    seconds: float
    nbytes: float
    links: tuple[str, ...]
    encode: float = 0.0
    decode: float = 0.0


def sharding_group(shard_ranks: int, ranks_per_node: int) -> LinkGroup:
    """The `shard_ranks` that hold one copy together: neighbours first."""
    return LinkGroup(shard_ranks, min(shard_ranks, ranks_per_node))


def replica_group(world_size: int, shard_ranks: int, ranks_per_node: int) -> LinkGroup:
    """The ranks of all copies that hold the same shard."""
    return LinkGroup(world_size // shard_ranks, max(1, ranks_per_node // shard_ranks))


NO_COST = Cost(0.0, 0.0, ())


def gather_cost(
    nbytes: float,
    group: LinkGroup,
    machine: Machine,
    *,
    speed: float = 1.0,
    is_straight: bool = False,
) -> Cost:
    """An all-gather to `nbytes` on every rank, or a reduce-scatter from them, by rings.

    Every rank sends (n-1)/n of the bytes inside its node. (k-1)/k of them enter each of the k
    nodes, over as many network cards as the group has ranks there. The slower of the two counts.
    A ring has n-1 hops, k of them between nodes. `speed` multiplies that of both links. Where
    every rank sends its piece straight to every other one (`is_straight`), it crosses between
    nodes once for each of them, and not once a node.
    """
    ranks, nodes, link = group.ranks, group.nodes, machine.efficiency.link * speed
    if ranks == 1 or nbytes == 0:
        return NO_COST
    sent = nbytes * (ranks - 1) / ranks
    inside = outside = 0.0
    links: tuple[str, ...] = ()
    crossings = nodes if nodes > 1 else 0
    if group.local_world_size > 1:
        inside = sent / (machine.inside.nbytes_per_second * link)
        links += ("inside",)
    if nodes > 1:
        cards = 1 if is_straight else group.local_world_size
        entering = nbytes * (nodes - 1) / nodes / cards
        outside = entering / (machine.outside.nbytes_per_second * link)
        links += ("outside",)
    hops = (ranks - 1 - min(crossings, ranks - 1)) * machine.inside.latency
    hops += min(crossings, ranks - 1) * machine.outside.latency
    return Cost(hops + max(inside, outside), sent, links)


def reduce_cost(
    nbytes: float, group: LinkGroup, machine: Machine, *, is_straight: bool = False
) -> Cost:
    """A reduce-scatter from `nbytes` on every rank, at its own speed."""
    speed = machine.efficiency.reduce
    return gather_cost(nbytes, group, machine, speed=speed, is_straight=is_straight)


def all_reduce_cost(nbytes: float, group: LinkGroup, machine: Machine) -> Cost:
    """A reduce-scatter and an all-gather."""
    first, second = reduce_cost(nbytes, group, machine), gather_cost(nbytes, group, machine)
    return sum_of(first, second)


def sum_of(first: Cost, second: Cost) -> Cost:
    """Two collectives, one behind the other."""
    return Cost(
        first.seconds + second.seconds, first.nbytes + second.nbytes, first.links or second.links,
        first.encode + second.encode, first.decode + second.decode,
    )  # fmt: skip
