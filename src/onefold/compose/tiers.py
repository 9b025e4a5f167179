"""From a recipe to tiers: stores, threads, and a budget that is checked first."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from onefold.config import Offload
from onefold.engine.behaviour import behaviour_of, moments_of_group
from onefold.errors import TierError
from onefold.fit.bounds import RankMemory
from onefold.layout.flat import stepped_itemsize, unit_bytes
from onefold.layout.ledger import Ledger
from onefold.layout.units import UnitPlan
from onefold.recipe import Recipe
from onefold.text import format_share
from onefold.tier.cpu import CopyStream, HostStore
from onefold.tier.device import DeviceStore
from onefold.tier.disk import DiskStore, SwapFile
from onefold.tier.files import FileStore
from onefold.tier.host import cores_of
from onefold.tier.scratch import DiskScratch, HostScratch, Scratch
from onefold.tier.slots import SlotPool
from onefold.tier.step_device import NUM_STREAMS, DeviceStep, HostStep, StepDevice
from onefold.tier.store import Store, whole_pages
from onefold.tier.workers import NUM_DISK_STEPPERS, NUM_FETCHERS, Workers
from onefold.unit.context import Tiers
from onefold.wire.collectives import Group
from onefold.wire.ranks import local_place
from onefold.wire.together import together

NUM_MOVERS = 4
"""Threads that write and read activations, so requests that the disk has at a time."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of this rank's resting state by tier; `states`: masters and moments in all tiers."""

    device: int
    cpu: int
    disk: int
    states: int


def budget_of(
    recipe: Recipe, plans: Sequence[UnitPlan], optimizers: Sequence[Optimizer], rank: int
) -> Budget:
    """Compute the bytes of resting state on this rank, whole pages for each buffer.

    They are 0 where nothing is offloaded, or all of it lies in files that exist: then nobody checks
    them.

    Args:
        recipe: the resolved choices, with a unit for each of `plans`.
        plans: the units, for the states that their optimizers keep.
        optimizers: those of the module.
        rank: position among the ranks that hold one copy of the states.
    """
    offload = recipe.offload
    if offload == Offload() or recipe.reads_files:
        return Budget(0, 0, 0, 0)
    copies = recipe.device_type != "cpu" and offload.parameters == "device"
    needs, all_states = {"device": 0, "cpu": 0, "disk": 0}, 0
    in_tiers = elementwise(optimizers)
    for unit, plan in zip(recipe.units, plans, strict=True):
        here = None if unit.ranks else rank  # a mesh of its own: at most
        held = unit_bytes(unit.members, recipe.on(unit.ranks), here, is_tiled=unit.tile_nbytes > 0)
        numel = max(1, held.rest_numel)
        itemsize, _ = stepped_itemsize(unit.members[0], recipe)
        has_master = held.has_master or (unit.is_offloaded and copies and plan.is_trained)
        states = [itemsize] if has_master else []
        stepped = recipe.precision.master if held.has_master else plan.dtype
        states += [moment.itemsize for moment in moments_of(plan, stepped, in_tiers).values()]
        needs[offload.parameters] += whole_pages(numel * plan.dtype.itemsize)
        nbytes = sum(whole_pages(numel * itemsize) for itemsize in states)
        needs[offload.optimizer if unit.is_offloaded else "device"] += nbytes
        all_states += nbytes
    return Budget(**needs, states=all_states)


def elementwise(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers whose states have an element for each of a parameter's."""
    behaviours = [(optimizer, behaviour_of(optimizer)) for optimizer in optimizers]
    return [
        optimizer for optimizer, known in behaviours if known.adds or known.kind == "elementwise"
    ]


def moments_of(
    plan: UnitPlan, stepped: torch.dtype, optimizers: Sequence[Optimizer]
) -> dict[str, torch.dtype]:
    """Return the states that `elementwise` optimizers will keep for each element of a unit."""
    members = {id(owned.parameter) for owned in plan.members if owned.parameter.requires_grad}
    moments: dict[str, torch.dtype] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(id(p) in members for p in group["params"]):
                moments |= moments_of_group(optimizer, group, stepped)
    return moments


def check_budget(budget: Budget, offload: Offload, memory: RankMemory) -> None:
    """Raise `TierError` if a tier lacks room; warn if a path of the disk tier lies in memory."""
    where, ranks = f"rank {memory.group.rank}", memory.local_world_size
    free = memory.free("cpu")
    if budget.cpu > free:
        wanted = f"{budget.cpu:,} bytes of CPU memory for offloaded states"
        got = f"{free:,} free for each of {ranks} ranks here"
        hint = 'offload="disk:PATH", a smaller fraction, or more ranks'
        raise TierError(wanted, got, where=where, hint=hint)
    paths = offload.paths if budget.disk or offload.activations == "disk" else []
    for path in paths:
        if not path.is_dir():
            got = "a file" if path.exists() else "nothing there"
            hint = "create it first, on every machine, on a fast local disk"
            raise TierError(f"a folder at {path} for the disk tier", got, where=where, hint=hint)
        if not os.access(path, os.W_OK | os.X_OK):
            got = "one that is read-only"
            hint = "name a folder that this user may write to"
            raise TierError(f"a folder to write to at {path}", got, where=where, hint=hint)
        if is_memory(path):
            warnings.warn(
                f"the disk tier at {path} lies in memory (tmpfs): what is offloaded there stays in "
                "memory; name a folder on a disk",
                stacklevel=7,
            )
        share, free = budget.disk // len(paths), memory.free("disk", [path])
        if share > free:
            wanted = f"{share:,} bytes of disk at {path} for offloaded states"
            got = f"{free:,} free for each of {ranks} ranks here"
            hint = "free space there, name another path as well, or offload less (fraction=)"
            raise TierError(wanted, got, where=where, hint=hint)


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


def build_tiers(
    recipe: Recipe, budget: Budget, store: DeviceStore, ledger: Ledger, group: Group, *,
    is_agreed: bool,
) -> Tiers:  # fmt: skip
    """Check the budget and take the files; if one rank fails, raise `TierError` on all.

    A collective, where anything is offloaded on some rank: `is_agreed` then.
    """
    offload, local = recipe.offload, local_place(group)
    if not is_agreed:
        return _build(recipe, store, ledger, group, budget, local)
    # every rank looks at the free memory before any rank takes of it
    if not recipe.reads_files:
        memory = RankMemory(store.device, local[1], group)
        together(group, lambda: check_budget(budget, offload, memory), TierError)
    return together(group, lambda: _build(recipe, store, ledger, group, budget, local), TierError)


def describe(recipe: Recipe, budget: Budget, why_fraction: str) -> str:
    """Describe for people where the state of a rank rests; empty where all is on the device."""
    if recipe.offload == Offload():
        return ""
    rest = {"on the device": budget.device, "in CPU memory": budget.cpu, "on disk": budget.disk}
    tiers = [f"{nbytes:,} bytes {where}" for where, nbytes in rest.items() if nbytes]
    if recipe.inference is not None:
        num_kept = sum(unit.stays for unit in recipe.units)
        where = ["in the files of the checkpoint"] if recipe.reads_files else tiers
        return f"{', '.join(where)}; {num_kept} of {len(recipe.units)} units stay in device memory"
    away = sum(unit.numel for unit in recipe.units if unit.is_offloaded)
    share = away / max(1, sum(unit.numel for unit in recipe.units))
    line = f"{', '.join(tiers)}; {format_share(share)} of the optimizer state is off the device"
    return f"{line}: {why_fraction}" if why_fraction else line


def _build(
    recipe: Recipe, store: DeviceStore, ledger: Ledger, group: Group, budget: Budget,
    local: tuple[int, int],
) -> Tiers:  # fmt: skip
    offload, cores = recipe.offload, cores_of(*local)
    stores: dict[str, Store] = {"device": store}
    tiers = (offload.optimizer, offload.parameters)
    if "cpu" in tiers:
        on_cpu = store.device.type == "cpu"
        stores["cpu"] = DeviceStore(store.device, "cpu") if on_cpu else HostStore(budget.cpu)
    slots = SlotPool.on_host(ledger)
    if recipe.reads_files:
        stores["disk"] = FileStore(group.rank, slots)
    elif "disk" in tiers:
        stores["disk"] = DiskStore(offload.paths, group.rank, budget.disk)
    is_far = any(tier.is_far for tier in stores.values())
    num_near = max(1, len(cores) - 1)  # and whoever waits
    num_steppers = max(num_near, NUM_DISK_STEPPERS) if is_far else num_near
    step_device: StepDevice = HostStep(SlotPool.on_host(ledger), store.device)
    if offload.step == "device":
        step_device, num_steppers = DeviceStep(store.device, ledger), NUM_STREAMS
    return Tiers(
        weight=stores[offload.parameters],
        state=stores[offload.optimizer],
        slots=slots,
        fetchers=Workers(NUM_FETCHERS, "onefold-fetch", device=store.device),
        steppers=Workers(num_steppers, "onefold-step", cores, device=store.device),
        step_device=step_device,
        scratch=_scratch(offload, store.device, slots, ledger, group, cores),
        copies=copies_for(store.device) if offload.parameters != "device" else None,
    )


def copies_for(device: torch.device) -> CopyStream | None:
    """A stream for copies of weights to an accelerator; the CPU has none."""
    return CopyStream(device) if device.type != "cpu" else None


def _scratch(
    offload: Offload, device: torch.device, slots: SlotPool, ledger: Ledger, group: Group,
    cores: tuple[int, ...],
) -> Scratch | None:  # fmt: skip
    """Make the store of activations; None if they stay, or would move within the same memory."""
    if offload.activations == "disk":
        files = [SwapFile(path, group.rank) for path in offload.paths]
        workers = Workers(NUM_MOVERS, "onefold-activation", cores, device=device)
        return DiskScratch(files, workers, slots, device, ledger)
    if offload.activations == "cpu" and device.type != "cpu":
        return HostScratch(device, ledger)
    return None
