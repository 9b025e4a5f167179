"""Who steps states that rest in CPU memory, where that was left open: what is faster, measured.

    by the CPU      its cores read and write 28 bytes of an element where they lie
    by the device   12 bytes of it cross the link, and 12 come back at the same time

Ranks of a host share its memory and links, so all measure at once, as they will step. Part of the
composition root; `api` alone calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from onefold.config import Offload
from onefold.environment import local_place
from onefold.tier.workers import Workers, cores_of
from onefold.wire.collectives import Group

CPU_NBYTES, STREAMED_NBYTES = 28, 12
"""Of an fp32 element: gradient in, master and moments in and out; master and moments one way."""
PIECE_NUMEL = 4 << 20
"""Elements that each core steps, and that cross the link: 64 MiB of streams, past the caches."""
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of one rank: of its cores' Adam, and of its link each way, both in use."""

    cpu: float
    link: float

    @property
    def favours_device(self) -> bool:
        """True if states are stepped sooner on the device."""
        return STREAMED_NBYTES / self.link < CPU_NBYTES / self.cpu

    def told(self) -> str:
        """What was chosen, and why."""
        by_cpu, streamed = self.cpu / CPU_NBYTES / 1e9, self.link / STREAMED_NBYTES / 1e9
        who = "streamed to the device" if self.favours_device else "stepped by the CPU"
        return (
            f"states in CPU memory are {who}: {by_cpu:.2f} billion parameters a second by the "
            f"cores, {streamed:.2f} through the device"
        )


def stepper_of(offload: Offload, device: torch.device, group: Group) -> tuple[Offload, str]:
    """`offload` with "cpu" or "device" for `step`, the same on every rank, and why.

    A collective of half a second, where there is something to choose; else as it was.
    """
    if offload.step != "auto" or offload.optimizer != "cpu":
        return offload, ""
    if device.type == "cpu":
        return replace(offload, step="cpu"), ""
    rates = slowest(measured(device, cores_of(*local_place(group))), group)
    return replace(offload, step="device" if rates.favours_device else "cpu"), rates.told()


def measured(device: torch.device, cores: tuple[int, ...]) -> Rates:
    """What this rank reaches now, the best of some tries."""
    return Rates(_cpu_rate(cores), _link_rate(device))


def slowest(mine: Rates, group: Group) -> Rates:
    """Of all ranks, as all wait for the slowest; a collective."""
    if group.world_size == 1:
        return mine
    everyone = group.all_gather_object((mine.cpu, mine.link))
    cpu, link = zip(*everyone, strict=True)  # type: ignore[arg-type]
    return Rates(min(cpu), min(link))


def _cpu_rate(cores: tuple[int, ...]) -> float:
    workers = Workers(len(cores), "onefold-measure", cores)
    streams = [[torch.zeros(PIECE_NUMEL) for _ in range(4)] for _ in cores]
    count = torch.zeros(())

    def step(own: list[torch.Tensor]) -> None:
        p, g, m, v = ([each] for each in own)
        torch._fused_adamw_(
            p, g, m, v, [], [count], lr=1e-9, beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8,
            amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip

    def all_step() -> None:
        for task in [workers.give(lambda own=own: step(own)) for own in streams]:
            task.finish()

    return len(cores) * PIECE_NUMEL * CPU_NBYTES / _fastest(all_step)


def _link_rate(device: torch.device) -> float:
    """Both directions at once, from and to page-locked memory."""
    is_cuda = device.type == "cuda"
    near = [torch.zeros(PIECE_NUMEL, device=device) for _ in range(2)]
    far = [torch.zeros(PIECE_NUMEL, pin_memory=is_cuda) for _ in range(2)]
    if not is_cuda:
        return near[0].nbytes / _fastest(lambda: (near[0].copy_(far[0]), far[1].copy_(near[1])))
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            near[0].copy_(far[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            far[1].copy_(near[1], non_blocking=True)
        for stream in streams:
            stream.synchronize()

    return near[0].nbytes / _fastest(both)


def _fastest(action: Callable[[], object]) -> float:
    """Seconds of the fastest call, after one that does not count."""
    action()
    found = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        action()
        found.append(time.perf_counter() - begun)
    return min(found)
