"""How a model is to be trained: everything besides the model that memory and time depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from onefold.config import Offload, Precision
from onefold.layout.rows import ALIGN_NUMEL, PIECE_NUMEL, round_up
from onefold.planner.messages import UnitMessages, messages_of, pieces_of, spread_of
from onefold.planner.trace import Member, UnitTrace
from onefold.wire_config import Wire

ADAM_MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to train. `num_moments` are optimizer states per element, in the stepped dtype.

    `neighbours`: the ranks of a node on a mesh of two axes; 0 where there is one axis. `wire` is
    one that `onefold.shard` takes at this stage (wiring.py).
    """

    stage: int
    world_size: int
    ranks_per_host: int = 1
    accumulate: int = 1
    precision: Precision = field(default_factory=Precision)
    offload: Offload = field(default_factory=Offload)
    device_type: str = "cpu"
    num_moments: int = ADAM_MOMENTS
    itemsize: int = 4  # of the parameters' own dtype, where nothing is said of compute
    neighbours: int = 0
    wire: Wire = field(default_factory=Wire)

    @property
    def is_sharded(self) -> bool:
        """True where masters and moments are cut over several ranks."""
        return self.stage > 0 and self.world_size > 1

    @property
    def are_replicas(self) -> bool:
        """True where each node holds all states among its ranks (HSDP)."""
        return self.stage > 0 and self.neighbours > 0 and self.wire.secondary == "optimizer"

    @property
    def has_hops(self) -> bool:
        """True where weights and gradients cross between nodes in a hop of its own."""
        return self.stage > 0 and self.neighbours > 0 and not self.are_replicas

    @property
    def keeps_weights(self) -> bool:
        """True where a second shard of weights rests inside the node."""
        return self.has_hops and bool(self.wire.kept(is_whole=self.stage < 3))

    @property
    def keeps_sums(self) -> bool:
        """True where nodes talk about gradients once a step, not once a micro-batch."""
        kept = self.has_hops and self.wire.kept(is_whole=self.stage < 3) == "gradients"
        return kept or self.are_replicas

    @property
    def where(self) -> str:
        """What a report adds to the names of collectives that do not leave the node."""
        return " inside" if self.stage > 0 and self.neighbours else ""

    @property
    def shard_world(self) -> int:
        """Over how many ranks one copy of the states is cut: all, or those of a node."""
        return self.neighbours if self.are_replicas else self.world_size

    @property
    def rest_world(self) -> int:
        """Over how many ranks weights are cut where they rest."""
        return self.shard_world if self.stage > 0 else 1

    @property
    def shards_states(self) -> bool:
        """True where the stage shards masters and moments."""
        return self.stage > 0

    @property
    def shards_parameters(self) -> bool:
        """True where parameters rest as shards between forward and backward, too."""
        return self.stage == 3

    @property
    def sums_rest(self) -> bool:
        """True where gradients of micro-batches rest on their rank until the last one."""
        return self.stage < 3

    @property
    def rests_near(self) -> bool:
        """True where weights at rest lie in the memory that computes."""
        tier = self.offload.parameters
        return tier == "device" or (tier == "cpu" and self.device_type == "cpu")

    @property
    def steps_in_backward(self) -> bool:
        """True where offloaded units are stepped as soon as they are reduced."""
        return self.offload.step_in_backward


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """What one unit holds on rank 0, whose pieces are the longest."""

    name: str
    numel: int
    rest_numel: int  # in the shard buffer, with gaps
    weight: int
    master: int
    has_master: bool  # wherever states are; else only off the device, where weights are on it
    moments: int
    whole: int  # gathered, or cast; 0 where weights compute from where they rest
    grad: int  # reduced
    partials: tuple[int, ...]  # per member; 0 where it needs no gradient
    second: int  # weights at rest for the node
    sums: int  # gradients that are summed inside the node
    feedback: int  # what coded gradients have rounded off
    messages: UnitMessages

    @property
    def states(self) -> int:
        """Masters and moments."""
        return self.master + self.moments


def unit_bytes(unit: UnitTrace, setup: Setup) -> UnitBytes:
    """The closed forms of docs/memory.md for one unit."""
    members = unit.members
    first = members[0]
    world, rest_world = setup.shard_world, setup.rest_world
    own = [pieces_of(member.shape, world)[0] for member in members]
    numels = [prod(member.shape) for member in members]
    full_numel = sum(round_up(numel, ALIGN_NUMEL) for numel in numels)
    rest = full_numel if rest_world == 1 else sum(round_up(n, PIECE_NUMEL) for n in own)
    computes = first.compute_itemsize
    is_narrow = first.is_floating and setup.precision.master.itemsize > first.itemsize
    stepped = setup.precision.master.itemsize if is_narrow else first.itemsize
    rests_near = setup.rests_near
    casts = any(member.itemsize != member.compute_itemsize for member in members)
    is_resident = rest_world == 1 and not casts and rests_near
    tiers = (setup.offload.parameters, setup.offload.optimizer)
    is_elsewhere = setup.device_type != "cpu" and (tiers[0] == "device") != (tiers[1] == "device")
    messages = _messages(members, setup)
    trained = [member.requires_grad for member in members]
    of_trained = [n for n, is_trained in zip(numels, trained, strict=True) if is_trained]
    grad_numel = rest if world > 1 else sum(of_trained)
    moments_numel = rest
    if setup.offload.optimizer == "device" and rests_near:  # the optimizer's own
        step = 1 if world == 1 else ALIGN_NUMEL if rest_world == 1 else PIECE_NUMEL
        pieces = numels if rest_world == 1 else own
        moments_numel = sum(
            round_up(n, step) for n, is_trained in zip(pieces, trained, strict=True) if is_trained
        )
    return UnitBytes(
        name=unit.name,
        numel=sum(numels),
        rest_numel=rest,
        weight=rest * first.itemsize,
        master=rest * stepped if is_narrow or is_elsewhere else 0,
        has_master=is_narrow,
        moments=moments_numel * stepped * setup.num_moments if any(trained) else 0,
        whole=0 if is_resident else (full_numel + (world if rest_world > 1 else 0)) * computes,
        grad=grad_numel * first.itemsize if any(trained) else 0,
        partials=tuple(
            numel * computes if is_trained else 0
            for numel, is_trained in zip(numels, trained, strict=True)
        ),
        second=messages.second * computes if setup.keeps_weights else 0,
        sums=messages.sums * first.itemsize if any(trained) else 0,
        feedback=4 * messages.owed if setup.wire.feedback else 0,
        messages=messages,
    )


def _messages(members: tuple[Member, ...], setup: Setup) -> UnitMessages:
    world, is_nccl = setup.world_size, setup.device_type != "cpu"
    if setup.stage == 0:
        return spread_of(members, world, is_nccl=is_nccl)
    return messages_of(members, world, setup.neighbours, setup.wire, is_nccl=is_nccl)
