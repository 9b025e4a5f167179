"""What this machine has, measured: memory, disk, link, backends, and limits that would bite."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
import timeit
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from onefold.engine.adam_kernel import kernel
from onefold.host import (
    DISK_NBYTES,
    GIB,
    MIB,
    in_bytes,
    measure_disk,
    memory_nbytes,
    usable_cores,
    versions,
)
from onefold.mesh.world import World

COPY_NBYTES = 128 * MIB
LINK_NBYTES = 32 * MIB

_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Limit:
    """A setting of the system, and what to do if it would bite."""

    name: str
    value: str
    hint: str  # empty: it does not bite


@dataclass(frozen=True, slots=True)
class GatherRate:
    """How fast whole weights are gathered: each rank broadcasts its piece into place."""

    backend: str
    world_size: int
    nbytes: int  # of the gathered buffer
    received_per_s: float  # bytes that a rank receives in a second


@dataclass(frozen=True, slots=True)
class HostReport:
    """What one host has; bytes, and bytes per second."""

    versions: dict[str, str]
    system: str
    cores: int
    threads: int
    memory_total: int
    memory_free: int
    copy_per_s: float  # of a copy from memory to memory, read and write counted once
    disk_folder: str
    disk_free: int
    disk_write_per_s: float  # to the disk itself: fsync is waited for
    backends: dict[str, bool]
    gpus: list[str]
    limits: list[Limit]


def describe(folder: str | None = None) -> HostReport:
    """Look at this host and measure it, in about two seconds; writes to `folder`, or TMPDIR."""
    folder = folder or tempfile.gettempdir()
    total, free = memory_nbytes()
    disk_free = shutil.disk_usage(folder).free
    return HostReport(
        versions=versions(),
        system=f"{platform.system()} {platform.machine()}",
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        memory_total=total,
        memory_free=free,
        copy_per_s=measure_copy(),
        disk_folder=folder,
        disk_free=disk_free,
        disk_write_per_s=measure_disk(folder) if disk_free > 2 * DISK_NBYTES else 0.0,
        backends={
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
        },
        gpus=[_gpu(index) for index in range(torch.cuda.device_count())],
        limits=find_limits(total, disk_free),
    )


def measure_copy() -> float:
    """Bytes per second of copying a block that no cache holds, with torch's threads."""
    source = torch.zeros(COPY_NBYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return COPY_NBYTES / min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=5))


def measure_link(world: World) -> GatherRate:
    """Gather one flat buffer as units do; a collective."""
    group, world_size = world.group, world.world_size
    whole = torch.zeros(LINK_NBYTES // 4, device=world.device)
    pieces = whole.chunk(world_size)

    def gather() -> None:
        works = [group.broadcast(piece, rank) for rank, piece in enumerate(pieces)]
        for work in works:
            work.wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    gather()
    received = whole.nbytes - pieces[world.rank].nbytes
    seconds = min(timeit.repeat(gather, number=1, repeat=8))
    backend = "nccl" if group.is_nccl else "gloo"
    return GatherRate(backend, world_size, whole.nbytes, received / seconds)


def find_limits(memory_total: int, disk_free: int) -> list[Limit]:
    """Every limit that is known to bite, with a hint where it does."""
    return [
        *_process_limits(),
        *_shared_memory(),
        _threads(),
        *_cpu_quota(),
        _kernel(),
        Limit(
            "disk free",
            in_bytes(disk_free),
            "checkpoints need 12 bytes per parameter" if disk_free < 10 * GIB else "",
        ),
        Limit(
            "memory",
            in_bytes(memory_total),
            "training needs 16 bytes per parameter" if memory_total < 4 * GIB else "",
        ),
    ]


def _process_limits() -> Iterable[Limit]:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_small = locked != resource.RLIM_INFINITY and locked < 64 * MIB
    bites = is_small and torch.cuda.is_available()
    hint = "GPU ranks pin memory: raise it with `ulimit -l unlimited`"
    yield Limit("locked memory (ulimit -l)", _amount(locked), hint if bites else "")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    hint = "each rank opens a socket to every other: raise it with `ulimit -n 65536`"
    shown = "unlimited" if files == resource.RLIM_INFINITY else str(files)
    bites = files != resource.RLIM_INFINITY and files < 1024
    yield Limit("open files (ulimit -n)", shown, hint if bites else "")


def _shared_memory() -> Iterable[Limit]:
    if Path("/dev/shm").is_dir():
        total = shutil.disk_usage("/dev/shm").total
        hint = "NCCL and data loaders use it: start the container with --shm-size=8g"
        yield Limit("/dev/shm", in_bytes(total), hint if total < GIB else "")


def _threads() -> Limit:
    text, cores = os.environ.get("OMP_NUM_THREADS", ""), usable_cores()
    hint = ""
    if text.isdigit() and int(text) > cores:
        hint = f"more threads than the {cores} cores of this process: unset it"
    elif text == "1" and cores > 4:
        hint = f"one thread for each rank leaves cores idle: set it to {cores} / ranks, or unset it"
    return Limit("OMP_NUM_THREADS", text or "not set", hint)


def _cpu_quota() -> Iterable[Limit]:
    parts = _CGROUP_CPU.read_text().split() if _CGROUP_CPU.exists() else ["max"]
    if parts[0].isdigit() and len(parts) == 2:
        quota = int(parts[0]) / int(parts[1])
        hint = f"fewer than the {usable_cores()} cores that are seen: set OMP_NUM_THREADS"
        yield Limit("CPU quota", f"{quota:.1f} cores", hint if quota < usable_cores() else "")


def _kernel() -> Limit:
    found = kernel()
    if found is not None:
        return Limit("C kernel of AdamW", found.name, "")
    hint = "steps of bf16 weights on the CPU take longer: install where there is a C compiler (cc)"
    return Limit("C kernel of AdamW", "none", hint)


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {in_bytes(properties.total_memory)}"


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else in_bytes(limit)
