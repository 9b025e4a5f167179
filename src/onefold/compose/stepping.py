"""Choose the processor that steps states in CPU memory, by measuring which is faster.

    the CPU      its cores read and write 28 bytes of an element in place; the gradient crosses the
                 link before, and the new weight after
    the device   12 bytes of an element cross the link, and 12 come back at the same time

Ranks of a host share its memory and links, so all measure at once, as they will step.
"""

from dataclasses import dataclass, replace

import torch

from onefold.config import Offload
from onefold.fit.rates import ADAM_NBYTES, adam, crossing, in_rounds
from onefold.tier.host import cores_of
from onefold.tier.step_device import STREAMED_NBYTES
from onefold.wire.collectives import Group
from onefold.wire.ranks import local_place

CROSSING_NBYTES = 8
"""Bytes of an fp32 element over the link, where the CPU steps: gradient and weight."""


@dataclass(frozen=True, slots=True)
class StepRates:
    """Bytes per second of one rank: Adam on its cores, and its link each way with both in use."""

    cpu: float
    link: float

    @property
    def by_cpu(self) -> float:
        """Elements a second that the cores step."""
        return 1 / (ADAM_NBYTES / self.cpu + CROSSING_NBYTES / self.link)

    @property
    def streamed(self) -> float:
        """Elements a second that are streamed through the device."""
        return self.link / STREAMED_NBYTES

    def describe(self) -> str:
        """Describe the choice, and both rates."""
        who = "streamed to the device" if self.streamed > self.by_cpu else "stepped by the CPU"
        return (
            f"states in CPU memory are {who}: {self.by_cpu / 1e9:.2f} billion parameters a second "
            f"by the cores, {self.streamed / 1e9:.2f} through the device"
        )


def stepper_of(offload: Offload, device: torch.device, group: Group) -> tuple[Offload, str]:
    """Resolve `Offload.step` to "cpu" or "device", the same on every rank, and say why.

    A collective of a second where both are possible.
    """
    if offload.step != "auto" or offload.optimizer != "cpu":
        return offload, ""
    if device.type == "cpu" or not offload.may_stream:
        return replace(offload, step="cpu"), ""
    rates = slowest(measured(device, cores_of(*local_place(group))), group)
    if rates is None:
        return replace(offload, step="cpu"), "states in CPU memory are stepped by the CPU"
    return replace(
        offload, step="device" if rates.streamed > rates.by_cpu else "cpu"
    ), rates.describe()


def measured(device: torch.device, cores: tuple[int, ...]) -> StepRates | None:
    """Measure the rates of this rank; None where memory is short."""
    try:
        found = in_rounds([adam(cores), crossing(device, "both")])
    except (RuntimeError, MemoryError):  # torch's own are RuntimeErrors
        return None
    return StepRates(found["adam"].per_s, found["both"].per_s)


def slowest(mine: StepRates | None, group: Group) -> StepRates | None:
    """Return the lowest rates of all ranks; None if one rank has none. A collective."""
    rates = [rank for rank in group.gather(mine) if rank is not None]
    if len(rates) < group.world_size:
        return None
    return StepRates(min(rank.cpu for rank in rates), min(rank.link for rank in rates))
