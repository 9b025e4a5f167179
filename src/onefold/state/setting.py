"""What all units of one sharded module share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from onefold.ledger import Ledger
from onefold.tier.store import Store
from onefold.wire.transport import Transport


@dataclass(frozen=True, slots=True)
class Setting:
    """What all units of one sharded module share: where state rests and how it travels."""

    transport: Transport
    store: Store
    ledger: Ledger
    mesh: DeviceMesh | None  # None: faces are plain tensors
    is_sharded: bool  # weights, masters, moments and grads rest as shards
    compute: torch.dtype | None
    master: torch.dtype

    @property
    def rank(self) -> int:
        return self.transport.group.rank

    @property
    def world_size(self) -> int:
        return self.transport.group.world_size

    @property
    def rest_world(self) -> int:
        """Over how many ranks resting state is cut."""
        return self.world_size if self.is_sharded else 1

    @property
    def rest_rank(self) -> int:
        return self.rank if self.is_sharded else 0
