"""How a model is to be trained: everything besides the model that memory and time depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from onefold.config import Offload, Precision
from onefold.layout.rows import ALIGN_NUMEL, PIECE_NUMEL, round_up
from onefold.planner.trace import Member, UnitTrace

ADAM_MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to train. `num_moments` are optimizer states per element, in the stepped dtype."""

    stage: int
    world_size: int
    ranks_per_host: int = 1
    accumulate: int = 1
    precision: Precision = field(default_factory=Precision)
    offload: Offload = field(default_factory=Offload)
    device_type: str = "cpu"
    num_moments: int = ADAM_MOMENTS
    itemsize: int = 4  # of the parameters' own dtype, where nothing is said of compute

    @property
    def is_sharded(self) -> bool:
        """True where masters and moments are cut over several ranks."""
        return self.stage > 0 and self.world_size > 1

    @property
    def rest_world(self) -> int:
        """Over how many ranks weights are cut where they rest."""
        return self.world_size if self.stage > 0 else 1

    @property
    def rests_after_forward(self) -> bool:
        """True where whole weights are freed between forward and backward."""
        return self.stage == 3 and (self.world_size > 1 or self.offload.parameters != "device")


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """What one unit holds on rank 0, whose pieces are the longest."""

    numel: int
    rest_numel: int  # in the shard buffer, with gaps
    weight: int
    master: int
    moments: int
    whole: int  # gathered, or cast; 0 where weights compute from where they rest
    grad: int  # reduced
    partials: tuple[int, ...]  # per member; 0 where it needs no gradient
    received: tuple[int, ...]  # each buffer of one reduction
    gather_sent: int  # bytes this rank sends in one gather; at stage 0 of mean gradients
    reduce_sent: int  # and in one reduction

    @property
    def states(self) -> int:
        """Masters and moments."""
        return self.master + self.moments


SMALL_NBYTES = 64 * 1024
"""Pieces below it share one message (wire/transport.py)."""


def unit_bytes(unit: UnitTrace, setup: Setup) -> UnitBytes:
    """The closed forms of docs/memory.md for one unit."""
    members = unit.members
    first = members[0]
    world, rest_world = setup.world_size, setup.rest_world
    own = [piece_numel(member.shape, world) for member in members]
    numels = [prod(member.shape) for member in members]
    full_numel = sum(round_up(numel, ALIGN_NUMEL) for numel in numels)
    rest = full_numel if rest_world == 1 else sum(round_up(n, PIECE_NUMEL) for n in own)
    computes = first.compute_itemsize
    is_narrow = first.is_floating and setup.precision.master.itemsize > first.itemsize
    stepped = setup.precision.master.itemsize if is_narrow else first.itemsize
    rests_near = setup.offload.parameters == "device" or (
        setup.offload.parameters == "cpu" and setup.device_type == "cpu"
    )
    casts = any(member.itemsize != member.compute_itemsize for member in members)
    is_resident = rest_world == 1 and not casts and rests_near
    tiers = (setup.offload.parameters, setup.offload.optimizer)
    is_elsewhere = setup.device_type != "cpu" and tiers[0] != tiers[1]
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
        numel=sum(numels),
        rest_numel=rest,
        weight=rest * first.itemsize,
        master=rest * stepped if is_narrow or is_elsewhere else 0,
        moments=moments_numel * stepped * setup.num_moments if any(trained) else 0,
        whole=0 if is_resident else (full_numel + (world if rest_world > 1 else 0)) * computes,
        grad=grad_numel * first.itemsize if any(trained) else 0,
        partials=tuple(
            numel * computes if is_trained else 0
            for numel, is_trained in zip(numels, trained, strict=True)
        ),
        received=_received(members, own, setup),
        gather_sent=_sent(members, own, world) * (computes if setup.stage else first.itemsize),
        reduce_sent=_sent_by_reduction(members, numels, own, world) * computes,
    )


def piece_numel(shape: tuple[int, ...], world_size: int) -> int:
    """Elements of the rows that `torch.chunk` gives the first rank; one of a 0-dim parameter."""
    if not shape:
        return 1
    return min(-(-shape[0] // world_size), shape[0]) * prod(shape[1:])


def _received(members: tuple[Member, ...], own: list[int], setup: Setup) -> tuple[int, ...]:
    """Bytes of each buffer that one reduction fills: one a large region, one for all small ones.

    Between two ranks the own part does not travel.
    """
    world = setup.world_size
    large: list[int] = []
    small = 1  # a tag, beside a flag for each parameter
    for n, member in zip(own, members, strict=True):
        if not member.requires_grad:
            continue
        if member.shape and n * member.compute_itemsize >= SMALL_NBYTES:
            large.append(n)
            small += 1
        else:
            small += n + 1
    if world == 1 or small == 1:
        return ()
    each = members[0].compute_itemsize * (world if world > 2 else 1)
    return tuple(n * each for n in (*large, small))


def _sent(members: tuple[Member, ...], own: list[int], world: int) -> int:
    return sum(n for n, member in zip(own, members, strict=True) if member.shape) * (world - 1)


def _sent_by_reduction(
    members: tuple[Member, ...], numels: list[int], own: list[int], world: int
) -> int:
    if world == 1:
        return 0
    trained = zip(members, numels, own, strict=True)
    return sum(n - piece for member, n, piece in trained if member.shape and member.requires_grad)
