"""From a choice of tiers to the objects behind it: stores, threads, and a budget that is checked.

Part of the composition root; `api` alone calls it.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from onefold.config import Offload, Precision
from onefold.engine.optimizer import steps_elements
from onefold.engine.policy import last_units
from onefold.engine.rules import moments_after_first_step, rule_of
from onefold.errors import TierError, expected
from onefold.host import cores_of, free_host_nbytes
from onefold.layout.rows import Layout
from onefold.layout.units import UnitPlan
from onefold.ledger import Ledger
from onefold.mesh.ranks import Ranks, local_place
from onefold.planner.auto import Subject, least_fraction
from onefold.tier.cpu import HostStore
from onefold.tier.device import DeviceStore
from onefold.tier.disk import DiskStore, SwapFile
from onefold.tier.scratch import DiskScratch, HostScratch, Scratch
from onefold.tier.slots import SlotPool
from onefold.tier.step_device import NUM_STREAMS, DeviceStep, HostStep, StepDevice
from onefold.tier.store import Store, whole_pages
from onefold.tier.workers import NUM_DISK_STEPPERS, NUM_FETCHERS, Workers
from onefold.unit.context import Tiers
from onefold.wire.collectives import Group
from onefold.wire_config import Wire

T = TypeVar("T")

LOG = logging.getLogger(__name__)

NUM_MOVERS = 4
"""Threads that write and read activations: requests that the disk has at a time."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be offloaded: the choice, and what it is about."""

    offload: Offload
    precision: Precision
    plans: Sequence[UnitPlan]
    optimizers: Sequence[Optimizer]
    device: torch.device  # that computes
    stage: int = 3
    ranks: Ranks = field(default_factory=lambda: Ranks(Group.of(None)))
    wire: Wire = field(default_factory=Wire)

    @property
    def shards(self) -> Group:
        """The ranks over which resting state is cut."""
        return self.ranks.shards(are_replicas=self.wire.secondary == "optimizer")

    @property
    def subject(self) -> Subject:
        """What of it a forecast needs."""
        largest = sorted(self.plans, key=lambda plan: plan.numel)[-1:]  # none without parameters
        num_moments = sum(len(moments_of(p, p.dtype, self.optimizers)) for p in largest)
        axes = self.ranks.axes
        return Subject(
            self.plans, self.precision, self.offload, num_moments, self.device, self.stage,
            self.ranks.everyone.world_size, axes.neighbours if axes else 0, self.wire,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of this rank's resting state by tier; `states` are masters and moments in any."""

    device: int
    cpu: int
    disk: int
    states: int


@dataclass(frozen=True, slots=True)
class Offloading:
    """What a wish has come to: tiers, which units' states are in them, and a line for people."""

    tiers: Tiers
    chosen: list[bool]
    told: str


def offloaded_units(wish: Wish, fraction: float) -> list[bool]:
    """Which units' states leave the device: the last ones, up to `fraction` of all elements."""
    if wish.offload.optimizer == "device":
        return [False] * len(wish.plans)
    return last_units([plan.numel for plan in wish.plans], fraction)


def budget_of(wish: Wish, chosen: Sequence[bool]) -> Budget:
    """What resting state will need on this rank, whole pages for each buffer."""
    offload, precision = wish.offload, wish.precision
    group = wish.shards
    needs, all_states = {"device": 0, "cpu": 0, "disk": 0}, 0
    for plan, is_chosen in zip(wish.plans, chosen, strict=True):
        shapes = [(owned.fqn, tuple(owned.parameter.shape)) for owned in plan.members]
        numel = max(1, Layout.build(shapes, group.world_size).shard_numels[group.rank])
        is_narrow = plan.dtype.is_floating_point and precision.master.itemsize > plan.dtype.itemsize
        stepped = precision.master if is_narrow else plan.dtype
        is_copied = is_chosen and wish.device.type != "cpu" and offload.parameters == "device"
        states = [stepped] if is_narrow or is_copied else []
        states += moments_of(plan, stepped, wish.optimizers).values()
        needs[offload.parameters] += whole_pages(numel * plan.dtype.itemsize)
        nbytes = sum(whole_pages(numel * each.itemsize) for each in states)
        needs[offload.optimizer if is_chosen else "device"] += nbytes
        all_states += nbytes
    return Budget(**needs, states=all_states)


def moments_of(
    plan: UnitPlan, stepped: torch.dtype, optimizers: Sequence[Optimizer]
) -> dict[str, torch.dtype]:
    """The states by name that the optimizers will keep for each element of a unit."""
    members = {id(owned.parameter) for owned in plan.members}
    found: dict[str, torch.dtype] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if steps_elements(optimizer) and any(id(p) in members for p in group["params"]):
                found |= moments_after_first_step(rule_of(optimizer, group), stepped)
    return found


def check_budget(budget: Budget, offload: Offload, group: Group, local_world_size: int) -> None:
    """Raise `TierError` if a tier has no room for it; warn if a path of the disk tier is memory."""
    where = f"rank {group.rank}"
    free = free_host_nbytes() // local_world_size
    if budget.cpu > free:
        raise TierError(
            expected(
                f"{budget.cpu:,} bytes of CPU memory for offloaded states",
                f"{free:,} free for each of {local_world_size} ranks here",
                where=where,
                hint='offload="disk:PATH", a smaller fraction, or more ranks',
            )
        )
    paths = offload.paths if budget.disk or offload.activations == "disk" else []
    for path in paths:
        if not path.is_dir():
            raise TierError(
                expected(
                    f"a folder at {path} for the disk tier",
                    "a file" if path.exists() else "nothing there",
                    where=where,
                    hint="create it first, on every machine, on a fast local disk",
                )
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise TierError(
                expected(
                    f"a folder to write to at {path}", "one that is read-only", where=where,
                    hint="name a folder that this user may write to",
                )
            )  # fmt: skip
        if is_memory(path):
            warnings.warn(
                f"the disk tier at {path} lies in memory (tmpfs): what is offloaded there stays in "
                "memory; name a folder on a disk",
                stacklevel=5,
            )
        each, free = budget.disk // len(paths), shutil.disk_usage(path).free // local_world_size
        if each > free:
            raise TierError(
                expected(
                    f"{each:,} bytes of disk at {path} for offloaded states",
                    f"{free:,} free for each of {local_world_size} ranks here",
                    where=where,
                    hint="free space there, name another path as well, or offload less (fraction=)",
                )
            )


def is_memory(path: Path) -> bool:
    """True if the path lies on a file system that keeps files in memory."""
    kinds = {}
    try:
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            kinds[mount.replace("\\040", " ")] = kind
    except (OSError, ValueError):
        return False
    inside = [mount for mount in kinds if path.resolve().is_relative_to(mount)]
    return bool(inside) and kinds[max(inside, key=len)] in ("tmpfs", "ramfs")


def offload_together(wish: Wish, store: DeviceStore, ledger: Ledger, group: Group) -> Offloading:
    """Check the budget and take the files; if that fails on a rank, `TierError` on all.

    A collective, where anything is offloaded.
    """
    offload, local = wish.offload, local_place(group)
    if offload == Offload():
        chosen = [False] * len(wish.plans)
        tiers = _build(offload, store, ledger, group, Budget(0, 0, 0, 0), local)
        return Offloading(tiers, chosen, "")
    fraction, why = _agreed_fraction(wish, group, local[1])
    chosen = offloaded_units(wish, fraction)
    budget = budget_of(wish, chosen)
    # all look at what is free before any takes of it
    _together(group, lambda: check_budget(budget, offload, group, local[1]))
    told = _told(wish, budget, chosen, why)
    LOG.info("rank %d: %s", group.rank, told)
    tiers = _together(group, lambda: _build(offload, store, ledger, group, budget, local))
    return Offloading(tiers, chosen, told)


def _together(group: Group, body: Callable[[], T]) -> T:
    """What `body` gives; if it raises `TierError` on one rank, that is raised on all."""
    results: list[T] = []
    problem = None
    try:
        results.append(body())
    except TierError as error:
        problem = error
    if group.world_size > 1:
        texts = group.all_gather_object(str(problem) if problem else None)
        if problem is None and any(texts):
            problem = TierError(str(next(text for text in texts if text)))
    if problem is not None:
        raise problem
    return results[0]


def _agreed_fraction(wish: Wish, group: Group, local_world_size: int) -> tuple[float, str]:
    """The share that leaves, the same on every rank: that of the rank with the least room."""
    fraction = wish.offload.fraction
    if fraction != "auto":
        return float(fraction), ""
    states = budget_of(wish, [False] * len(wish.plans)).states
    mine = least_fraction(wish.subject, states, local_world_size)
    everyone: list[Any] = group.all_gather_object(mine) if group.world_size > 1 else [mine]
    return max(everyone)


def _told(wish: Wish, budget: Budget, chosen: Sequence[bool], why: str) -> str:
    plans = zip(wish.plans, chosen, strict=True)
    away = sum(plan.numel for plan, is_chosen in plans if is_chosen)
    share = away / max(1, sum(plan.numel for plan in wish.plans))
    rest = {"on the device": budget.device, "in CPU memory": budget.cpu, "on disk": budget.disk}
    tiers = [f"{nbytes:,} bytes {where}" for where, nbytes in rest.items() if nbytes]
    line = f"{', '.join(tiers)}; {share:.0%} of the optimizer state is off the device"
    return f"{line}: {why}" if why else line


def _build(
    offload: Offload, store: DeviceStore, ledger: Ledger, group: Group, budget: Budget,
    local: tuple[int, int],
) -> Tiers:  # fmt: skip
    cores = cores_of(*local)
    stores: dict[str, Store] = {"device": store}
    tiers = (offload.optimizer, offload.parameters)
    if "cpu" in tiers:
        on_cpu = store.device.type == "cpu"
        stores["cpu"] = DeviceStore(store.device, "cpu") if on_cpu else HostStore(budget.cpu)
    if "disk" in tiers:
        stores["disk"] = DiskStore(offload.paths, group.rank, budget.disk)
    is_far = any(each.is_far for each in stores.values())
    num_near = max(1, len(cores) - 1)  # and whoever waits
    num_steppers = max(num_near, NUM_DISK_STEPPERS) if is_far else num_near
    slots = SlotPool.on_host(ledger)
    workplace: StepDevice = HostStep(slots)
    if offload.step == "device":
        workplace, num_steppers = DeviceStep(store.device, ledger), NUM_STREAMS - 1
    return Tiers(
        weight=stores[offload.parameters],
        state=stores[offload.optimizer],
        slots=slots,
        fetchers=Workers(NUM_FETCHERS, "onefold-fetch"),
        steppers=Workers(num_steppers, "onefold-step", cores),
        workplace=workplace,
        scratch=_scratch(offload, store.device, slots, ledger, group, cores),
    )


def _scratch(
    offload: Offload, device: torch.device, slots: SlotPool, ledger: Ledger, group: Group,
    cores: tuple[int, ...],
) -> Scratch | None:  # fmt: skip
    """Where activations go; None if they stay, or would only move within the same memory."""
    if offload.activations == "disk":
        files = [SwapFile(path, group.rank) for path in offload.paths]
        workers = Workers(NUM_MOVERS, "onefold-activation", cores)
        return DiskScratch(files, workers, slots, device, ledger)
    if offload.activations == "cpu" and device.type != "cpu":
        return HostScratch(device, ledger)
    return None
