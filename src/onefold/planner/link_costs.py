"""The cost of a collective on two classes of links: inside a node and between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.planner.machines import Machine


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """The `ranks` of a collective, `local_world_size` of which share a node."""

    ranks: int
    local_world_size: int

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return -(-self.ranks // self.local_world_size)


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds of one collective, bytes that one rank sends, and the links it keeps busy.

    `encode` and `decode` are seconds before and after it, in which no link is busy.
    """

    seconds: float
    nbytes: float
    links: tuple[str, ...]
    encode: float = 0.0
    decode: float = 0.0

    def then(self, other: Cost) -> Cost:
        """Return the cost of this collective and another one behind it."""
        return Cost(
            self.seconds + other.seconds, self.nbytes + other.nbytes, self.links or other.links,
            self.encode + other.encode, self.decode + other.decode,
        )  # fmt: skip


NO_COST = Cost(0.0, 0.0, ())


def replica_group(world_size: int, shard_ranks: int, ranks_per_node: int) -> LinkGroup:
    """Return the ranks of all copies that hold the same shard."""
    return LinkGroup(world_size // shard_ranks, max(1, ranks_per_node // shard_ranks))


def gather_cost(
    nbytes: float, group: LinkGroup, machine: Machine, *, speed: float = 1.0,
    is_straight: bool = False,
) -> Cost:  # fmt: skip
    """Return the cost of an all-gather to `nbytes` on every rank, or of a reduce-scatter from them.

    In a ring every rank sends (n-1)/n of the bytes inside its node. (k-1)/k of them enter each of
    the k nodes, over as many network cards as the group has ranks there. The slower of the two
    counts. A ring has n-1 hops, k of them between nodes. Where every rank sends its piece straight
    to every other one (`is_straight`), a piece enters a node once for each of its ranks. `speed` is
    a factor of the rate of both links.
    """
    ranks, nodes, link = group.ranks, group.nodes, machine.efficiency.link * speed
    if ranks == 1 or nbytes == 0:
        return NO_COST
    sent = nbytes * (ranks - 1) / ranks
    inside = outside = 0.0
    links: tuple[str, ...] = ()
    crossings = min(nodes, ranks - 1) if nodes > 1 else 0
    if group.local_world_size > 1:
        inside = sent / (machine.inside.nbytes_per_second * link)
        links += ("inside",)
    if nodes > 1:
        cards = 1 if is_straight else group.local_world_size
        entering = nbytes * (nodes - 1) / nodes / cards
        outside = entering / (machine.outside.nbytes_per_second * link)
        links += ("outside",)
    hops = (ranks - 1 - crossings) * machine.inside.latency + crossings * machine.outside.latency
    return Cost(hops + max(inside, outside), sent, links)


def reduce_cost(
    nbytes: float, group: LinkGroup, machine: Machine, *, is_straight: bool = False
) -> Cost:
    """Return the cost of a reduce-scatter from `nbytes` on every rank, at its own speed."""
    speed = machine.efficiency.reduce
    return gather_cost(nbytes, group, machine, speed=speed, is_straight=is_straight)
