"""Describe this machine: memory, disk, link, backends, and limits that would bite."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """A setting of the system, and the remedy if it would bite."""

    name: str
    value: str
    hint: str  # empty: it does not bite


@dataclass(frozen=True, slots=True)
class HostReport:
    """One host; bytes, and bytes per second."""

    versions: dict[str, str]
    system: str
    cores: int
    threads: int
    memory_total: int
    memory_free: int
    copy_per_s: float  # of a copy from memory to memory, read and write counted once
    disk_folder: str
    disk_free: int
    disk_write_per_s: float  # to the disk itself, fsync included
    backends: dict[str, bool]
    gpus: list[str]
    limits: list[Limit]


def describe(folder: str | None = None) -> HostReport:
    """Measure this host in about two seconds. Writes a file to `folder`, or to TMPDIR."""
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
        copy_per_s=_measure_copy(),
        disk_folder=folder,
        disk_free=disk_free,
        disk_write_per_s=measure_disk(folder) if disk_free > 2 * DISK_NBYTES else 0.0,
        backends={
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
        },
        gpus=[_gpu(index) for index in range(torch.cuda.device_count())],
        limits=list(_limits(total, disk_free)),
    )


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {in_bytes(properties.total_memory)}"


def _measure_copy() -> float:
    """Return bytes per second of copying a block larger than any cache, with torch's threads."""
    source = torch.zeros(COPY_NBYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return COPY_NBYTES / min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=5))


def measure_link(world: World) -> dict[str, Any]:
    """Gather one flat buffer, each rank broadcasting its piece into place; a collective.

    `received_per_s` counts the bytes that a rank receives in a second, of a buffer of `nbytes`.
    """
    group, world_size = world.group, world.world_size
    full = torch.zeros(LINK_NBYTES // 4, device=world.device)
    pieces = full.chunk(world_size)

    def gather() -> None:
        works = [group.broadcast(piece, rank) for rank, piece in enumerate(pieces)]
        for work in works:
            work.wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    gather()
    seconds = min(timeit.repeat(gather, number=1, repeat=8))
    return {
        "backend": "nccl" if group.is_nccl else "gloo",
        "world_size": world_size,
        "nbytes": full.nbytes,
        "received_per_s": (full.nbytes - pieces[world.rank].nbytes) / seconds,
    }


def _limits(memory_total: int, disk_free: int) -> Iterator[Limit]:
    """Yield every limit that is known to bite, with a hint where it does."""

    def limit(name: str, value: str, bites: bool, hint: str) -> Limit:
        return Limit(name, value, hint if bites else "")

    none, cores = resource.RLIM_INFINITY, usable_cores()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if locked == none else in_bytes(locked)
    bites = torch.cuda.is_available() and locked != none and locked < 64 * MIB
    hint = "GPU ranks pin memory: raise it with `ulimit -l unlimited`"
    yield limit("locked memory (ulimit -l)", shown, bites, hint)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if files == none else str(files)
    hint = "each rank opens a socket to every other: raise it with `ulimit -n 65536`"
    yield limit("open files (ulimit -n)", shown, files != none and files < 1024, hint)
    if Path("/dev/shm").is_dir():
        total = shutil.disk_usage("/dev/shm").total
        hint = "NCCL and data loaders use it: start the container with --shm-size=8g"
        yield limit("/dev/shm", in_bytes(total), total < GIB, hint)
    text = os.environ.get("OMP_NUM_THREADS", "")
    hint = f"one thread for each rank leaves cores idle: set it to {cores} / ranks, or unset it"
    if is_too_many := text.isdigit() and int(text) > cores:
        hint = f"more threads than the {cores} cores of this process: unset it"
    bites = is_too_many or (text == "1" and cores > 4)
    yield limit("OMP_NUM_THREADS", text or "not set", bites, hint)
    parts = _CGROUP_CPU.read_text().split() if _CGROUP_CPU.exists() else ["max"]
    if parts[0].isdigit() and len(parts) == 2:
        quota = int(parts[0]) / int(parts[1])
        hint = f"fewer than the {cores} cores that are seen: set OMP_NUM_THREADS"
        yield limit("CPU quota", f"{quota:.1f} cores", quota < cores, hint)
    found = kernel()
    hint = "steps of bf16 weights on the CPU take longer: install where there is a C compiler (cc)"
    yield limit("C kernel of AdamW", found.name if found else "none", found is None, hint)
    hint = "checkpoints need 12 bytes per parameter"
    yield limit("disk free", in_bytes(disk_free), disk_free < 10 * GIB, hint)
    hint = "training needs 16 bytes per parameter"
    yield limit("memory", in_bytes(memory_total), memory_total < 4 * GIB, hint)
