"""Choose the processor that steps states in CPU memory, by measuring which is faster.

    the CPU      its cores read and write 28 bytes of an element in place; the gradient crosses the
                 link before, and the new weight after
    the device   12 bytes of an element cross the link, and 12 come back at the same time

Ranks of a host share its memory and links, so all measure at once, as they will step.
"""

import timeit
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from onefold.config import Offload
from onefold.tier import accelerator
from onefold.tier.host import cores_of
from onefold.tier.step_device import STREAMED_NBYTES
from onefold.tier.workers import Workers
from onefold.wire.collectives import Group
from onefold.wire.ranks import local_place

CPU_NBYTES, CROSSING_NBYTES = 28, 8
"""Bytes of an fp32 element: gradient in, master and moments in and out; and over the link."""
PIECE_NUMEL = 4 << 20
"""Elements that each core steps, and that cross the link: 64 MiB of streams exceed the caches."""
MOST_CORES = 16
"""Cores that are measured. More would be bound by memory, and need more than some hosts have."""
REPEATS = 4
"""Runs, of which the best counts: the first one touches its memory for the first time."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of one rank: Adam on its cores, and its link each way with both in use."""

    cpu: float
    link: float

    @property
    def by_cpu(self) -> float:
        """Elements a second that the cores step."""
        return 1 / (CPU_NBYTES / self.cpu + CROSSING_NBYTES / self.link)

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

    A collective of half a second where both are possible.
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


def measured(device: torch.device, cores: tuple[int, ...]) -> Rates | None:
    """Measure the rates of this rank, the best of some runs; None where memory is short."""
    try:
        return Rates(_cpu_rate(cores[1:][:MOST_CORES] or cores), _link_rate(device))
    except (RuntimeError, MemoryError):  # torch's own are RuntimeErrors
        return None


def slowest(mine: Rates | None, group: Group) -> Rates | None:
    """Return the lowest rates of all ranks; None if one rank has none. A collective."""
    rates = [rank for rank in group.gather(mine) if rank is not None]
    if len(rates) < group.world_size:
        return None
    return Rates(min(rank.cpu for rank in rates), min(rank.link for rank in rates))


def _cpu_rate(cores: tuple[int, ...]) -> float:
    workers = Workers(len(cores), "onefold-measure", cores)
    streams = [[torch.zeros(PIECE_NUMEL) for _ in range(4)] for _ in cores]
    count = torch.ones(())

    def step(own: list[torch.Tensor]) -> None:
        p, g, m, v = ([stream] for stream in own)
        torch._fused_adamw_(
            p, g, m, v, [], [count], lr=1e-9, beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8,
            amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip

    def all_step() -> None:
        for task in [workers.give(lambda own=own: step(own)) for own in streams]:
            task.finish()

    return len(cores) * PIECE_NUMEL * CPU_NBYTES / _fastest(all_step)


def _link_rate(device: torch.device) -> float:
    """Measure both directions at once, from and to page-locked memory."""
    is_device = device.type != "cpu"
    near = [torch.zeros(PIECE_NUMEL, device=device) for _ in range(2)]
    far = [accelerator.pinned(PIECE_NUMEL, torch.float32).zero_() for _ in range(2)]
    if not is_device:
        return near[0].nbytes / _fastest(lambda: (near[0].copy_(far[0]), far[1].copy_(near[1])))
    streams = [accelerator.new(device) for _ in range(2)]
    for stream in streams:  # behind the zeros
        stream.wait_stream(accelerator.current(device))

    def both() -> None:
        with streams[0]:
            near[0].copy_(far[0], non_blocking=True)
        with streams[1]:
            far[1].copy_(near[1], non_blocking=True)
        for stream in streams:
            stream.synchronize()

    return near[0].nbytes / _fastest(both)


def _fastest(action: Callable[[], object]) -> float:
    return min(timeit.repeat(action, number=1, repeat=REPEATS))
