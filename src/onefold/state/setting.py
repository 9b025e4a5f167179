"""What all units of one sharded module share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from onefold.ledger import Ledger
from onefold.tier.scratch import Scratch
from onefold.tier.slots import SlotPool
from onefold.tier.store import Store
from onefold.tier.workers import Workers
from onefold.wire.transport import Transport


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where state rests that has left the device, and what brings it back."""

    weight: Store  # weights at rest
    state: Store  # masters and moments of the units that are offloaded
    slots: SlotPool
    fetchers: Workers  # bring own rows of weights
    steppers: Workers  # step units in blocks
    scratch: Scratch | None = None  # where activations go


@dataclass(frozen=True, slots=True)
class Setting:
    """What all units of one sharded module share: where state rests and how it travels."""

    transport: Transport
    store: Store  # whole weights, gradients, and what is not offloaded: the device that computes
    ledger: Ledger
    mesh: DeviceMesh | None  # None: faces are plain tensors
    is_sharded: bool  # weights, masters, moments and grads rest as shards
    compute: torch.dtype | None
    master: torch.dtype
    tiers: Tiers

    @property
    def rank(self) -> int:
        return self.transport.group.rank

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
