"""How much of a step from a slow tier hides behind compute: one job, settled at once or later.

The tier is a disk that charges time for every byte, so that a step of the optimizer lasts about as
long as a forward, whatever the disk of this machine can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any
from unittest import mock

from torch import nn

import onefold
from contest.case import Case, batches, build_model, loss_of
from contest.engines import adamw
from contest.swapping import begin, wait_step
from onefold import Offload
from onefold.tier.disk import DiskStore, SwapFile

CLIP = 1.0
SWAPPED_NBYTES = 16
"""Bytes an element that a step moves: two fp32 moments in and out. Weights stay near."""
WARMUP_STEPS = 3


class Charge:
    """A device that moves one byte after another, at a rate: requests queue for it."""

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self._free_at = 0.0
        self._lock = Lock()

    def pay(self, start: float, nbytes: int) -> None:
        """Sleep until a request of `start` (seconds, `perf_counter`) would be done."""
        with self._lock:
            self._free_at = max(self._free_at, start) + nbytes * self.seconds_per_byte
            done = self._free_at
        time.sleep(max(0.0, done - time.perf_counter()))


class ChargedFile(SwapFile):
    """A file of a slow disk."""

    charge: Charge

    def read_block(self, offset: int, into: memoryview) -> None:
        start = time.perf_counter()
        super().read_block(offset, into)
        self.charge.pay(start, len(into))

    def write_block(self, offset: int, source: memoryview) -> None:
        start = time.perf_counter()
        super().write_block(offset, source)
        self.charge.pay(start, len(source))


def charged(charge: Charge) -> Callable[[Sequence[Path], int, int], DiskStore]:
    """What stands in for `DiskStore`."""

    def build(paths: Sequence[Path], rank: int, nbytes: int = 0) -> DiskStore:
        store = DiskStore(paths, rank, nbytes)
        for file in store.files:
            file.__class__ = ChargedFile
            file.charge = charge  # type: ignore[attr-defined]
        return store

    return build


class Job:
    """The job in one of its variants; all of them see the same batches."""

    def __init__(
        self, case: Case, rank: int, *, offload: Offload | None, is_clipped: bool,
        is_settled: bool = False,
    ) -> None:  # fmt: skip
        self._case, self._rank = case, rank
        self._is_clipped, self._is_settled = is_clipped, is_settled
        self.module = build_model(case)
        self._optimizer = adamw(self.module)
        onefold.shard(self.module, self._optimizer, stage=3, offload=offload)
        self.losses: list[float] = []
        self.forward: list[float] = []  # seconds of each step's
        self.settled: list[float] = []  # seconds from `step()` until all is stepped

    def step(self) -> None:
        """One step of training."""
        ((tokens, targets),) = batches(self._case, self._rank, len(self.losses))
        start = time.perf_counter()
        loss = loss_of(self.module(tokens), targets)
        self.forward.append(time.perf_counter() - start)
        loss.backward()
        if self._is_clipped:
            nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        start = time.perf_counter()
        self._optimizer.step()
        if self._is_settled:
            wait_step(self.module)
            self.settled.append(time.perf_counter() - start)
        self._optimizer.zero_grad()
        self.losses.append(loss.item())

    def run(self, steps: int) -> float:
        """Seconds a step, of steps that follow another: what that left undone is theirs."""
        self.step()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = (time.perf_counter() - start) / steps
        wait_step(self.module)
        return seconds


def hide(
    rank: int, ranks: int, threads: int, size: str, steps: int, rounds: int, folder: str
) -> dict[str, Any]:
    """Seconds a step of every variant, round by round; whether their losses are the same bits.

    The tier's rate is set anew in each round, by the forwards before it.
    """
    begin(ranks, threads)
    case, charge = Case(size, ranks=ranks), Charge()
    later = Offload(optimizer="disk", disk=folder)
    early = Offload(optimizer="disk", disk=folder, step_in_backward=True)
    with mock.patch("onefold.compose.tiers.DiskStore", charged(charge)):
        jobs = {
            "device, clipped": Job(case, rank, offload=None, is_clipped=True),
            "settled, clipped": Job(case, rank, offload=later, is_clipped=True, is_settled=True),
            "overlapped, clipped": Job(case, rank, offload=later, is_clipped=True),
            "device": Job(case, rank, offload=None, is_clipped=False),
            "in backward": Job(case, rank, offload=early, is_clipped=False),
        }
    for job in jobs.values():
        job.run(WARMUP_STEPS)
    device, settled = jobs["device, clipped"], jobs["settled, clipped"]
    numel = sum(p.numel() for p in device.module.parameters()) // ranks
    unslowed = median(settled.settled[1:])
    near = (device, settled, jobs["device"])  # nothing runs beside their forwards
    found: list[dict[str, float]] = []
    for number in range(rounds):
        forward = median(seconds for job in near for seconds in job.forward[-steps:])
        charge.seconds_per_byte = forward / (SWAPPED_NBYTES * numel)
        device.forward.clear()
        settled.settled.clear()
        names = list(jobs)
        order = names[number % len(names) :] + names[: number % len(names)]
        found.append({name: jobs[name].run(steps) for name in order})
        found[-1] |= {"forward": median(device.forward), "optimizer": median(settled.settled)}
    clipped, others = list(jobs.values())[:3], list(jobs.values())[3:]
    return {
        "rounds": found, "numel": numel, "threads": threads,
        "unslowed_optimizer": unslowed, "variants": list(jobs),
        "losses": device.losses,
        "same_losses": all(len({tuple(job.losses) for job in same}) == 1
                           for same in (clipped, others)),
    }  # fmt: skip
