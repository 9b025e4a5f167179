"""What "auto" means where a module is sharded: the stage, and how much state leaves the device.

Nobody has seen a batch then, so a share of the free memory is left for activations; everything else
is the forecast of an engine without any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onefold.config import Offload, Precision, offload_of, placements_of
from onefold.errors import ConfigError
from onefold.host import free_host_nbytes
from onefold.layout.units import UnitPlan
from onefold.planner.estimate import estimated
from onefold.planner.memory import Forecast, forecast
from onefold.planner.setup import Setup
from onefold.planner.sizes import told
from onefold.planner.strategies import OFFLOADS, WAYS
from onefold.planner.trace import Trace
from onefold.wire.collectives import Group
from onefold.wire_config import Wire

ACTIVATIONS_SHARE = 0.25
"""Of the device's free memory, left for activations and messages where nobody has seen a batch."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be sharded, over which ranks. `num_moments`: states per element that its
    optimizers keep. `neighbours`: ranks of a node, where there are two axes.
    """

    plans: Sequence[UnitPlan]
    precision: Precision
    offload: Offload
    num_moments: int
    device: torch.device  # that computes
    stage: int = 3
    world_size: int = 1
    neighbours: int = 0
    wire: Wire = field(default_factory=Wire)

    @property
    def setup(self) -> Setup:
        """The same as a forecast wants it."""
        return Setup(
            stage=self.stage,
            world_size=self.world_size,
            neighbours=self.neighbours,
            wire=self.wire,
            precision=self.precision,
            offload=self.offload,
            device_type=self.device.type,
            num_moments=self.num_moments,
        )


def free_nbytes(device: torch.device, local_world_size: int) -> int:
    """Bytes that this rank may still take of the memory that computes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_nbytes() // local_world_size


def without_activations(subject: Subject) -> Forecast:
    """What an engine holds of itself."""
    return forecast(estimated(subject.plans, 0, subject.precision), subject.setup)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an engine should hold of itself; it keeps numbers only, no parameter."""

    bare: Trace
    setup: Setup

    @staticmethod
    def of(subject: Subject) -> Expectation:
        """Of a module that is about to be sharded."""
        return Expectation(estimated(subject.plans, 0, subject.precision), subject.setup)

    def peaks(self, *, accumulates: bool) -> dict[str, int]:
        """The most bytes of each kind in CPU and device memory, and of all at a time ("all")."""
        found = forecast(self.bare, replace(self.setup, accumulate=2 if accumulates else 1))
        kinds: dict[str, int] = {}
        for (kind, tier), nbytes in found.most.items():
            if tier != "disk":
                kinds[kind] = kinds.get(kind, 0) + nbytes
        return kinds | {"all": found.peaks["device"] + found.peaks.get("cpu", 0)}

    def smallest_change(self, shortage: int) -> str:
        """Of all ways to train, the one nearest to this that holds `shortage` bytes less."""
        now = forecast(self.bare, self.setup).memory_nbytes
        for stage, name in WAYS:
            offload = OFFLOADS[name]
            setup = replace(self.setup, stage=stage, offload=offload)
            is_more = stage >= self.setup.stage and (stage, offload) != (
                self.setup.stage, self.setup.offload)  # fmt: skip
            if not is_more:
                continue
            saved = now - forecast(self.bare, setup).memory_nbytes
            if saved >= shortage:
                word = "disk:PATH" if name == "disk" else name
                asked = f', offload="{word}"' if name != "none" else ""
                return f"stage={stage}{asked} holds {told(saved)} less"
        return "smaller micro-batches, recompute or more ranks: states alone cannot give as much"


def lowest_stage(
    subject: Subject, offload: object, wire_at: Callable[[int], Wire], group: Group,
    local_world_size: int,
) -> tuple[int, str]:  # fmt: skip
    """The lowest stage whose states fit on every rank of `group`, and why. A collective.

    `offload`: what was asked for; `wire_at`: the wire as a stage has it. Stages that do not have
    such tiers, or no such wire, are passed over.
    """
    free = free_nbytes(subject.device, local_world_size)
    if group.world_size > 1:
        everyone: list[Any] = group.all_gather_object(free)
        free = min(everyone)
    room, told_before = (1 - ACTIVATIONS_SHARE) * free, ""
    for stage in range(4):
        try:
            chosen = offload_of(offload, placements_of(stage))
            wire = wire_at(stage)
        except ConfigError:  # tiers, or a wire, that this stage does not have
            continue
        asked = replace(subject, offload=chosen, stage=stage, wire=wire)
        need = without_activations(asked).memory_nbytes
        if need <= room:
            return stage, f"{told_before}stage {stage} holds {told(need)} of {told(free)} free"
        told_before = f"stage {stage} would hold {told(need)}, "
    hint = "offload more, or take more ranks"
    return 3, f"{told_before}of {told(free)} free, and no stage holds less: {hint}"


def least_fraction(subject: Subject, states: int, local_world_size: int) -> tuple[float, str]:
    """The smallest share of `states`, bytes, that must leave the device, and why.

    What may stay is stepped at the device's own bandwidth and waits for nothing, so no more leaves
    than must.
    """
    free = free_nbytes(subject.device, local_world_size)
    bare = replace(subject, offload=Offload(), num_moments=0)
    others = without_activations(bare).memory_nbytes
    room = (1 - ACTIVATIONS_SHARE) * free - others
    share = 1 - max(0.0, min(1.0, room / max(1, states)))
    why = (
        f"of {states:,} bytes of optimizer state {max(0, int(room)):,} have room on the "
        f"device ({free:,} bytes are free)"
    )
    return share, why
