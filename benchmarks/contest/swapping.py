"""Optimizer steps of offloaded states on one rank: how fast, how many bytes, in how much memory.

The disk's own rate is measured by fio in the same round, with the requests of the engine: 4 MiB,
past the page cache, half of them reads, from as many threads as the engine's ranks have together.
"""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which
from typing import Any

import optimizer_step
import torch
import torch.distributed as dist
from torch import nn

import onefold
from contest.bounds import Transfer, disk_counts, fio_transfer
from contest.world import Memory
from onefold import Offload
from onefold.engine.adam_kernel import kernel
from onefold.engine.registry import engine_of

WARMUP_STEPS = 2
REQUEST_NBYTES = 4 << 20


def wait_step(module: nn.Module) -> None:
    """Wait for the step that runs in the background."""
    for unit in engine_of(module).units:
        unit.wait_step()


def begin(ranks: int, threads: int) -> None:
    """Join the other ranks; compute with so many threads."""
    torch.set_num_threads(threads)
    if ranks > 1:
        dist.init_process_group("gloo")


def barrier() -> None:
    """Wait for the other ranks, where there are some."""
    if dist.is_initialized():
        dist.barrier()


def touch_libraries(offload: Offload, stage: int) -> None:
    """Step a module of tiny layers: what torch loads with the first step is not measured."""
    numel = 8 * optimizer_step.NUM_LAYERS * optimizer_step.COLUMNS
    module, optimizer = optimizer_step.sharded_layers(
        numel, torch.float32, stage=stage, offload=offload
    )
    optimizer.step()
    wait_step(module)
    del module, optimizer
    gc.collect()


def fio(folder: Path, threads: int, nbytes: int) -> Transfer:
    """Move `nbytes`, a half each way, with fio."""
    each = -(-nbytes // threads // REQUEST_NBYTES) * REQUEST_NBYTES
    options = {
        "name": "onefold-fio", "directory": folder, "rw": "rw", "rwmixread": 50, "bs": "4m",
        "direct": 1, "ioengine": "psync", "numjobs": threads, "size": each,
        "output-format": "json",
    }  # fmt: skip
    command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run([*command, "--group_reporting"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"fio: {done.stderr.strip() or done.stdout.strip()}")
    return fio_transfer(done.stdout)


def plain_transfer(folder: Path, threads: int, nbytes: int) -> Transfer:
    """The same without fio: each thread reads and writes a file of its own in turn."""
    count = max(1, nbytes // threads // REQUEST_NBYTES // 2)

    def work(number: int) -> int:
        room = mmap.mmap(-1, REQUEST_NBYTES)  # aligned, as O_DIRECT wants it
        fd = os.open(folder / f"onefold-plain-{number}", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            for at in range(count):
                offset = at * REQUEST_NBYTES
                if is_filled and os.preadv(fd, [room], offset) != REQUEST_NBYTES:
                    raise OSError(f"a short read in {folder}")
                if os.pwritev(fd, [room], offset) != REQUEST_NBYTES:
                    raise OSError(f"a short write in {folder}")
        finally:
            os.close(fd)
        return 2 * count * REQUEST_NBYTES

    with ThreadPoolExecutor(threads) as pool:
        is_filled = (folder / "onefold-plain-0").exists()
        list(pool.map(work, range(threads)))
        is_filled = True
        start = time.perf_counter()
        moved = sum(pool.map(work, range(threads)))
        return Transfer(moved, time.perf_counter() - start)


def the_disks_own(folder: Path, threads: int, nbytes: int) -> Transfer:
    """The rate to be reached."""
    return (fio if which("fio") else plain_transfer)(folder, threads, nbytes)


def step_from_disk(
    rank: int, ranks: int, numel: int, steps: int, rounds: int, folder: str
) -> dict[str, Any]:
    """Rounds of steps from disk and of the disk alone, in turn; `numel` elements on each rank."""
    begin(ranks, 1)
    offload = Offload(optimizer="disk", parameters="disk", disk=folder)
    touch_libraries(offload, 3)
    module, optimizer = optimizer_step.sharded_layers(
        numel, torch.float32, stage=3, offload=offload
    )
    memory = Memory("cpu")
    threads = ranks * engine_of(module).context.tiers.steppers.num_threads
    nbytes = 24 * numel * ranks * steps

    def engine() -> dict[str, Any]:
        before = disk_counts(Path("/proc/self/io").read_text())
        barrier()
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.step()
            wait_step(module)
        seconds = time.perf_counter() - start
        barrier()
        after = disk_counts(Path("/proc/self/io").read_text())
        read, written = (b - a for a, b in zip(before, after, strict=True))
        return {"seconds": seconds, "read_nbytes": read, "written_nbytes": written}

    def disk() -> dict[str, Any]:
        barrier()
        found = {}
        if rank == 0:
            found["disk_rate"] = the_disks_own(Path(folder), threads, nbytes).rate
        barrier()
        return found

    for _ in range(WARMUP_STEPS):
        engine()
    disk()  # lays out its files
    found = []
    for number in range(rounds):
        turns = (engine, disk) if number % 2 == 0 else (disk, engine)
        found.append({key: value for turn in turns for key, value in turn().items()})
    return {
        "rounds": found, "threads": threads, "units": len(engine_of(module).units),
        "resident": memory.peak(), "slots": slots_of(module),
    }  # fmt: skip


def slots_of(module: nn.Module) -> int:
    """Most bytes of near memory through which far bytes have passed."""
    tiers = onefold.report(module).memory.get("staging", {})
    return sum(usage.peak for usage in tiers.values())


def step_in_memory(rank: int, ranks: int, threads: int, numel: int, rounds: int) -> dict[str, Any]:
    """Seconds of every contestant in every round, `numel` elements on each rank."""
    begin(ranks, threads)
    base = optimizer_step.BASE
    found = {base: optimizer_step.torch_steps(numel)[base]}
    theirs, missing = optimizer_step.deepspeed_steps_or_why(numel, rank)
    found |= theirs
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        step = stepper(numel, dtype)
        found[f"onefold offloaded, {name}"] = (28, step)
        if kernel() is not None:
            other = (28, optimizer_step.without_kernel(step))
            found[f"onefold offloaded, {name}, torch's kernels"] = other
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(-WARMUP_STEPS, rounds):
        for name, (_, run) in found.items():
            barrier()
            start = time.perf_counter()
            run()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds, "missing": missing}


def stepper(numel: int, dtype: torch.dtype) -> Callable[[], None]:
    """A step of states in CPU memory, until it is over."""
    module, optimizer = optimizer_step.sharded_layers(numel, dtype, stage=2, offload="optimizer")

    def run() -> None:
        optimizer.step()
        wait_step(module)

    return run


def memory_of_steps(
    rank: int, ranks: int, tier: str, dtype: str, numel: int, folder: str
) -> dict[str, Any]:
    """Resident bytes of some steps, beside what the ledger knows of."""
    begin(ranks, 1)
    offload = Offload(optimizer=tier, disk=folder)
    touch_libraries(offload, 2)
    memory = Memory("cpu")
    module, optimizer = optimizer_step.sharded_layers(
        numel, getattr(torch, dtype), stage=2, offload=offload
    )
    optimizer.step()  # touches every page
    wait_step(module)
    Memory("cpu")  # the peak starts again from here: building a module is not what is measured
    for _ in range(WARMUP_STEPS):
        optimizer.step()
        wait_step(module)
    held = sum(
        usage.now
        for kind, tiers in onefold.report(module).memory.items()
        for where, usage in tiers.items()
        if where != "disk" and kind != "staging"
    )
    resident = memory.peak()
    return {
        "resident": resident, "held": held, "beyond": resident - held, "slots": slots_of(module),
    }  # fmt: skip
