"""What all units of one sharded module share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from onefold.layout.axes import Axes
from onefold.ledger import Ledger
from onefold.tier.scratch import Scratch
from onefold.tier.slots import SlotPool
from onefold.tier.step_device import StepDevice
from onefold.tier.store import Store
from onefold.tier.workers import Workers
from onefold.wire.collectives import Group
from onefold.wire.transport import Transport


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where state rests that has left the device, and what brings it back."""

    weight: Store  # weights at rest
    state: Store  # masters and moments of the units that are offloaded
    slots: SlotPool
    fetchers: Workers  # bring own rows of weights
    steppers: Workers  # step units in blocks
    workplace: StepDevice  # where they do
    scratch: Scratch | None = None  # where activations go


@dataclass(frozen=True, slots=True)
class Hops:
    """Two hops in place of one: inside the node and between nodes (layout/axes.py)."""

    axes: Axes
    gather_between: Transport
    gather_inside: Transport
    reduce_inside: Transport
    reduce_between: Transport
    keeps_weights: bool  # a second shard of weights rests inside the node
    keeps_gradients: bool  # and sums of micro-batches


@dataclass(frozen=True, slots=True)
class Routes:
    """The ways that state travels.

    `transport` is exact, over the ranks among which resting state is cut; `group` is everyone who
    trains, replicas too. Weights go by `gather` and gradients by `reduce`, or both by `hops`;
    `replicas` joins ranks of other nodes that hold the same state.
    """

    group: Group
    transport: Transport
    gather: Transport
    reduce: Transport
    hops: Hops | None = None
    replicas: Transport | None = None
    sends_differences: bool = False  # of weights, to what every rank has read before
    feeds_back: bool = False  # what coded gradients round off

    @property
    def rounds_gradients(self) -> bool:
        """True if gradients are coded on some link: what is not finite is told to all ranks."""
        return any(transport.is_coded for transport in self.reducers)

    @property
    def reducers(self) -> list[Transport]:
        """All transports that reduce gradients."""
        hops = self.hops
        found = [self.transport, self.reduce, self.replicas]
        found += [hops.reduce_inside, hops.reduce_between] if hops else []
        return [transport for transport in dict.fromkeys(found) if transport is not None]

    def rest(self) -> None:
        """No message follows for now: every transport frees what it kept for the next."""
        hops = self.hops
        gathers = [self.gather, *([hops.gather_inside, hops.gather_between] if hops else [])]
        for transport in dict.fromkeys([*self.reducers, *gathers]):
            transport.rest()


@dataclass(frozen=True, slots=True)
class Context:
    """What all units of one sharded module share: where state rests and how it travels."""

    routes: Routes
    store: Store  # whole weights, gradients, and what is not offloaded: the device that computes
    ledger: Ledger
    mesh: DeviceMesh | None  # None: faces are plain tensors
    is_sharded: bool  # weights, masters, moments and grads rest as shards
    compute: torch.dtype | None
    master: torch.dtype
    tiers: Tiers

    @property
    def transport(self) -> Transport:
        """Exact messages over the ranks among which resting state is cut."""
        return self.routes.transport

    @property
    def rank(self) -> int:
        return self.transport.group.rank

    @property
    def where(self) -> str:
        """This rank as messages name it: its number among all who train, replicas too."""
        return self.named(self.rank)

    def named(self, rank: int) -> str:
        """One of the ranks among which resting state is cut, as messages name it."""
        return f"rank {self.routes.group.rank - self.rank + rank}"  # a node's are neighbours

    @property
    def world_size(self) -> int:
        return self.transport.group.world_size

    @property
    def rests_near(self) -> bool:
        """True if weights at rest lie where they are computed with."""
        weights = self.tiers.weight
        return not weights.is_far and weights.device == self.store.device

    @property
    def rest_world(self) -> int:
        """Over how many ranks resting state is cut."""
        return self.world_size if self.is_sharded else 1

    @property
    def rest_rank(self) -> int:
        return self.rank if self.is_sharded else 0
