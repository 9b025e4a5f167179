"""The cost of each message of a unit: rings or straight, one hop or two, exact or quantized.

The cost of quantization was not measured: the bytes that torch's passes over fp32 move on a GPU are
counted in wire/codec.py, and divided by the machine's rate for memory. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from onefold.errors import ConfigError
from onefold.planner.machines import Machine

if TYPE_CHECKING:
    from onefold.recipe import Recipe


# the run around it: facts besides its recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The job, the dtypes of messages, and the system that runs it. `ConfigError` for bad numbers.

    Args:
        accumulate: micro-batches of a step.
        recompute: share of forward's work that backward repeats, 0 to 1.
        prefetch: units gathered ahead.
        dtype: dtype of matrix products.
        weight_itemsize: bytes of an element of an exact message of weights.
        grad_itemsize: bytes of an element of an exact message of gradients.
        ranks_per_host: ranks that share a host's network cards; 0: `Recipe.local_world_size`.
        share: of all states, the part that this rank holds; None: as much as every other.
        uses_rings: another library than Onefold runs it: all messages are exact and go round rings,
            and a second hop follows the first by itself.
    """

    accumulate: int = 1
    recompute: float = 0.0
    prefetch: int = 1
    dtype: str = "bf16"
    weight_itemsize: int = 2
    grad_itemsize: int = 2
    ranks_per_host: int = 0
    share: float | None = None
    uses_rings: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.accumulate >= 1, "accumulate of at least 1", self.accumulate),
            (self.prefetch >= 0, "prefetch of at least 0", self.prefetch),
            (0 <= self.recompute <= 1, "recompute between 0 and 1", self.recompute),
            (0 <= (self.share or 0) <= 1, "share between 0 and 1", self.share),
            (self.ranks_per_host >= 0, "ranks_per_host of at least 0", self.ranks_per_host),
        )
        for holds, what, got in checks:
            if not holds:
                hint = "Conditions() is one micro-batch in bf16"
                raise ConfigError(what, repr(got), hint=hint)

    def waits_for_hops(self, recipe: Recipe) -> bool:
        """Return True where a second hop begins only once the host has seen the first one land.

        Onefold's messages on one host and one axis, and those of other libraries, have no such hop.
        """
        is_local = recipe.world_size <= self.near(recipe)
        is_plain = is_local and recipe.wire.is_plain
        return recipe.is_sharded and not self.uses_rings and not is_plain

    def own_share(self, recipe: Recipe) -> float:
        """Return the part of all states that this rank holds."""
        return 1.0 / recipe.rest_world if self.share is None else self.share

    def near(self, recipe: Recipe) -> int:
        """Return the number of ranks of a host."""
        return self.ranks_per_host or recipe.local_world_size

    @property
    def itemsize(self) -> int:
        """Bytes of an element of activations."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def state_nbytes(self) -> int:
        """Bytes per element that Adam moves.

        Master, two moments and gradient in fp32 are read, the first three are written, and so is a
        weight that is narrower. From disk (docs/concepts/memory.md) it is all but the gradient.
        """
        return 16 + 12 + (self.weight_itemsize if self.weight_itemsize < 4 else 0)


# links


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """The `ranks` of a collective, `local_world_size` of which share a node."""

    ranks: int
    local_world_size: int


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


def gather_cost(
    nbytes: float, group: LinkGroup, machine: Machine, *, is_straight: bool = False
) -> Cost:
    """Return the cost of an all-gather to `nbytes` on every rank, or of a reduce-scatter from them.

    In a ring every rank sends (n-1)/n of the bytes inside its node. (k-1)/k of them enter each of
    the k nodes, over as many network cards as the group has ranks there. The slower of the two
    counts. A ring has n-1 hops, k of them between nodes. Where every rank sends its piece straight
    to every other one (`is_straight`), a piece enters a node once for each of its ranks.
    """
    ranks, link = group.ranks, machine.efficiency.link
    nodes = -(-ranks // group.local_world_size)
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


# the memory of a host


HOST_SHARE = 0.8
"""The share of a data sheet's host memory bandwidth that long copies reach: a typical figure."""


@dataclass(frozen=True, slots=True)
class HostRates:
    """Bytes per second of one of the ranks that use their host at the same time.

    `link`: one direction between device and host. `cores`: what this rank's cores read and write.
    `memory`: its share of the memory of the host, which copies and cores use.
    """

    link: float
    cores: float
    memory: float

    @staticmethod
    def shared_by(machine: Machine, ranks: int) -> HostRates:
        """Divide the cores of a host and the bandwidth of its memory among `ranks`.

        Ranks fewer than NUMA nodes have one each: Linux gives a process memory where it runs.
        """
        memory = machine.host_memory_rate * HOST_SHARE / max(ranks, machine.numa_nodes)
        cores = machine.cpu_rate * machine.ranks_per_node / ranks
        return HostRates(min(machine.host_rate, memory), cores, memory)

    def copied(self, nbytes: float) -> float:
        """Return the seconds of a copy of so many bytes in one direction."""
        return nbytes / self.link

    def streamed(self, nbytes: float) -> float:
        """Return the seconds of so many bytes in both directions at once."""
        return max(nbytes / self.link, 2 * nbytes / self.memory)

    def stepped(self, nbytes: float, copied: float) -> float:
        """Return the seconds in which cores move `nbytes`, next to copies of `copied` bytes."""
        return max(nbytes / self.cores, (nbytes + copied) / self.memory)


# messages of a unit


class Coding(NamedTuple):
    """The cost of writing a message, and of adding one to a sum."""

    encode: float
    add: float


GPU_NBYTES: Mapping[str, Coding] = MappingProxyType(
    {
        "int8": Coding(41, 25), "int4": Coding(52, 46),
        "int8+h": Coding(125, 101), "int4+h": Coding(136, 122),
    }
)  # fmt: skip
"""Bytes that passes over one element read and write."""


def seconds_of(codec: str, machine: Machine) -> Coding:
    """Return the seconds per element on `machine`; 0 for exact messages."""
    if codec not in GPU_NBYTES:
        return Coding(0.0, 0.0)
    rate = machine.memory_rate * machine.efficiency.memory
    return Coding(*(nbytes / rate for nbytes in GPU_NBYTES[codec]))


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

    On one axis each rank sends its sums straight to every other, while gathers go round a ring.
    """
    near, wire, ranks = conditions.near(recipe), recipe.wire, recipe.world_size
    weight, grad = conditions.weight_itemsize, conditions.grad_itemsize
    is_ring = not conditions.waits_for_hops(recipe)
    gather, reduce = (
        partial(_quantized_cost, machine=machine, is_reduced=way) for way in (False, True)
    )
    if recipe.reduces_in_hops and not conditions.uses_rings:
        inside, between = LinkGroup(near, near), LinkGroup(-(-ranks // near), 1)
        costs = UnitCosts(
            gather=gather(numel, (_EXACT, weight), LinkGroup(ranks, near)),
            reduce=reduce(numel, (wire.gradients_inside, grad), inside),
            spread=gather(numel, (_EXACT, grad), LinkGroup(ranks, near)),
            second_hop=reduce(numel / near, (wire.gradients_between, grad), between),
        )
        if not recipe.has_hops:
            return costs
        return replace(
            costs,
            gather=gather(numel, (wire.weights_inside, weight), inside),
            cross=gather(numel / near, (wire.weights_between, weight), between),
        )
    shard = LinkGroup(recipe.shard_world, min(recipe.shard_world, near))
    copies = LinkGroup(  # of the same shard
        recipe.world_size // recipe.shard_world, max(1, near // recipe.shard_world)
    )
    goes_straight = not is_ring and not recipe.has_axes
    weights, gradients, means = _EXACT, _EXACT, _EXACT
    if not is_ring:
        means = wire.gradients_between
        weights, gradients = wire.weights_inside, wire.gradients_inside
        if goes_straight:
            weights, gradients = wire.weights_between, wire.gradients_between
    own = numel / shard.ranks
    reduced = reduce(own, (means, grad), copies, is_straight=not is_ring)
    shared = gather(own, (means, grad), copies, is_straight=not is_ring)
    return UnitCosts(
        gather=gather(numel, (weights, weight), shard),
        reduce=reduce(numel, (gradients, grad), shard, is_straight=goes_straight),
        spread=gather(numel, (_EXACT, grad), shard),
        replica=reduced.then(shared),
    )


Form = tuple[str, int]
"""The word of a wire, and the bytes of an element of an exact message."""
_EXACT = ""


@lru_cache(maxsize=64)
def _message(form: Form) -> tuple[str, float]:
    """Return the codec ("" if exact), and the bytes of an element."""
    from onefold.wire.codec import codec_of  # the simulator is imported without torch
    from onefold.wire_config import DIFFERENCE, EXACT

    word, itemsize = form
    codec = word.removesuffix(DIFFERENCE)
    if codec in (_EXACT, EXACT):
        return _EXACT, itemsize
    group = codec_of(codec).group
    return codec, codec_of(codec).nbytes(group) / group


def _quantized_cost(
    numel: float,
    form: Form,
    group: LinkGroup,
    *,
    machine: Machine,
    is_reduced: bool = False,
    is_straight: bool = False,
) -> Cost:
    """Return the cost of a message and of its quantization.

    To gather, each rank quantizes its own rows once, and reads all messages, its own too. To
    reduce, it writes a message for every other rank, and reads one from each.
    """
    codec, nbytes = _message(form)
    cost = gather_cost(numel * nbytes, group, machine, is_straight=is_straight)
    codec_seconds, others = seconds_of(codec, machine), numel * (group.ranks - 1) / group.ranks
    written, read = (others, others) if is_reduced else (numel / group.ranks, numel)
    if not cost.seconds:
        return cost
    return replace(cost, encode=written * codec_seconds.encode, decode=read * codec_seconds.add)
