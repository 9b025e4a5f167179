"""Describe this machine: memory, disk, link, backends, and limits that would hurt a run."""

import os
import platform
import resource
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onefold.app.tools.bandwidth import measure_link
from onefold.app.tools.gpu_health import gpu_health, judged_gpus
from onefold.compat import lacks
from onefold.engine.adam_kernel import kernel
from onefold.fit import rates
from onefold.fit.communicators import OF_MORE, OF_TWO
from onefold.fit.rates import Rate, in_rounds
from onefold.text import counted, format_bytes, format_rate
from onefold.tier import accelerator
from onefold.tier.disk import SwapFile
from onefold.tier.host import GIB, MIB, memory_nbytes, usable_cores, versions
from onefold.versions import outside
from onefold.wire.world import World

_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")


OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """A fact about this machine, and the remedy if it hurts a run."""

    name: str
    value: str
    level: str  # OK; WARN: a run may be slow or end early; FAIL: a run cannot start
    remedy: str  # empty at OK


@dataclass(frozen=True, slots=True)
class HostReport:
    """One host; bytes, and bytes per second."""

    versions: dict[str, str]
    system: str
    cores: int
    threads: int
    memory_total: int
    memory_free: int
    disk_folder: str
    disk_free: int
    rates: dict[str, Rate]  # as `fit.rates` names them; those of a full disk are absent
    backends: dict[str, bool]
    gpus: list[str]
    limits: list[Check]


def describe() -> HostReport:
    """Measure this host in a few seconds. Writes a file to TMPDIR."""
    folder = tempfile.gettempdir()
    total, free = memory_nbytes()
    disk_free = shutil.disk_usage(folder).free
    return HostReport(
        versions=versions(),
        system=f"{platform.system()} {platform.machine()}",
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        memory_total=total,
        memory_free=free,
        disk_folder=folder,
        disk_free=disk_free,
        rates=_measured_rates(folder, disk_free),
        backends={
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
        },
        gpus=[_gpu(index) for index in range(accelerator.count())],
        limits=[*_limits(), *_gpu_checks()],
    )


def _gpu(index: int) -> str:
    name, nbytes = accelerator.model(torch.device(accelerator.kind() or "cpu", index))
    return f"{name}, {format_bytes(nbytes)}"


def _measured_rates(folder: str, disk_free: int) -> dict[str, Rate]:
    rows = [rates.copy(torch.device("cpu")), rates.launch(), rates.call()]
    if disk_free > 2 * (rates.DISK_NBYTES + rates.DURABLE_NBYTES):
        file = SwapFile(Path(folder), 0)
        file.reserve(rates.DISK_NBYTES)
        ways = ("write", "read")  # blocks that nobody has written are read without the disk
        rows += [*(rates.blocks_of([file], way) for way in ways), rates.durable(folder)]
    return in_rounds(rows)


def link_facts(world: World) -> dict[str, Any]:
    """Measure the gathers of units between ranks for a second; a collective."""
    backend = "nccl" if world.group.is_nccl else "gloo"
    facts: dict[str, Any] = {"backend": backend, "world_size": world.world_size}
    if world.world_size == 1:
        return {**facts, "rates": {}}
    return {**facts, "rates": measure_link(world, seconds=1.0)["rates"]}


def checks(machine: HostReport, link: dict[str, Any] | None) -> list[Check]:
    """Judge the facts and the link (None: its ranks failed), and add the limits."""
    names = Counter(machine.gpus)
    has_driver = shutil.which("nvidia-smi") is not None
    lacks_nccl = bool(machine.gpus) and not machine.backends["nccl"]
    wire = "not measured: the ranks failed"
    if link is not None:
        wire = f"{link['backend']} between {counted(link['world_size'], 'rank')}, "
        if link["rates"]:
            wire += f"gathers {format_rate(link['rates']['gather']['per_s'])}"
    found, ways = machine.rates, {"read": "reads", "write": "writes", "durable": "durable writes"}
    disk = ", ".join(f"{word} {found[way]}" for way, word in ways.items() if way in found)
    untested = outside("torch", machine.versions["torch"])
    facts = [
        ("versions", ", ".join(f"{name} {number}" for name, number in machine.versions.items()),
         WARN, bool(untested), untested),
        ("system", f"{machine.system}, {machine.cores} cores, {machine.threads} torch threads",
         OK, False, ""),
        ("memory", f"{format_bytes(machine.memory_total)}, "
         f"{format_bytes(machine.memory_free)} free, copies {found['copy']}",
         WARN, machine.memory_total < 4 * GIB,
         "training needs 16 bytes per parameter: take a smaller model, or --offload disk:PATH"),
        ("disk", f"{format_bytes(machine.disk_free)} free: {machine.disk_folder}", WARN,
         machine.disk_free < 10 * GIB,
         "checkpoints need 12 bytes per parameter: free some space, or save to another disk"),
        ("disk rates", disk, OK, False, ""),
        ("host", f"{found['launch']} a launch, {found['call']} a Python call", OK, False, ""),
        ("link", wire, FAIL, link is None,
         "the error of the ranks is above; local ranks meet at 127.0.0.1, which must be reachable"),
        ("backends", ", ".join(f"{name} {'yes' if has else 'no'}"
                               for name, has in machine.backends.items()),
         FAIL, not machine.backends["gloo"] or lacks_nccl,
         "install a build of torch with gloo, and with NCCL for GPUs"),
        ("GPUs", ", ".join(f"{n} x {name}" for name, n in names.items()) or "none",
         WARN, not machine.gpus and has_driver,
         "nvidia-smi is there but torch sees no GPU: install a CUDA build of torch"),
        ("communicators", f"about {format_bytes(OF_TWO)} of a GPU each between two ranks, "
         f"{format_bytes(OF_MORE)} between more" * bool(machine.gpus), OK, False, ""),
    ]  # fmt: skip
    return [*_judged(facts), *machine.limits]


def _judged(table: Sequence[tuple[str, str, str, bool, str]]) -> list[Check]:
    """Read lines of: name, value (empty: there is none), level if it hurts, does it, remedy."""
    return [
        Check(name, value, level if hurts else OK, remedy if hurts else "")
        for name, value, level, hurts, remedy in table
        if value
    ]


def _gpu_checks() -> list[Check]:
    """Judge what the driver says of the GPUs, where it can be asked."""
    found = judged_gpus(gpu_health())
    return _judged([(name, value, WARN, hurts, remedy) for name, value, hurts, remedy in found])


def _limits() -> list[Check]:
    """Judge the limits of the system that are known to hurt."""
    cores, adam = usable_cores(), kernel()
    locked, files = _soft_limit(resource.RLIMIT_MEMLOCK), _soft_limit(resource.RLIMIT_NOFILE)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    too_many = threads.isdigit() and int(threads) > cores
    threads_hint = f"one thread for each rank leaves cores idle: set it to {cores} / ranks"
    if too_many:
        threads_hint = f"more threads than the {cores} cores of this process: unset it"
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else inf
    quota = _cpu_quota()
    return _judged([
        ("limits of this torch", lacks(), WARN, True, "install torch 2.12 or newer"),
        ("locked memory (ulimit -l)", "unlimited" if locked == inf else format_bytes(locked),
         WARN, accelerator.kind() is not None and locked < 64 * MIB,
         "GPU ranks pin memory: raise it with `ulimit -l unlimited`"),
        ("open files (ulimit -n)", "unlimited" if files == inf else f"{files:.0f}",
         WARN, files < 1024,
         "each rank opens a socket to every other: raise it with `ulimit -n 65536`"),
        ("/dev/shm", "" if shared == inf else format_bytes(shared), WARN, shared < GIB,
         "NCCL and data loaders use it: start the container with --shm-size=8g"),
        ("OMP_NUM_THREADS", threads or "not set", WARN,
         too_many or (threads == "1" and cores > 4), threads_hint),
        ("CPU quota", "" if quota == inf else f"{quota:.1f} cores", WARN, quota < cores,
         f"fewer than the {cores} cores that are seen: set OMP_NUM_THREADS"),
        ("C kernel of AdamW", adam.name if adam else "none", WARN, adam is None,
         "bf16 steps on the CPU take longer: install where there is a C compiler (cc)"),
    ])  # fmt: skip


def _soft_limit(number: int) -> float:
    soft = resource.getrlimit(number)[0]
    return inf if soft == resource.RLIM_INFINITY else soft


def _cpu_quota() -> float:
    """Return how many cores this container may use at a time."""
    parts = _CGROUP_CPU.read_text().split() if _CGROUP_CPU.exists() else ["max"]
    return int(parts[0]) / int(parts[1]) if parts[0].isdigit() else inf
