"""Measure this machine's CPU ranks for a plan: reads of memory and of a disk, and products."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from onefold.app.generate.meter import REQUEST_NBYTES, disk_rate
from onefold.layout.ledger import Ledger
from onefold.planner.machines import Efficiency, Link, Machine
from onefold.tier.disk import SwapFile, page_view
from onefold.tier.slots import host_room

DISK_NBYTES = 96 << 20
SIDE = 2048
"""Rows and columns of the measured matrix: larger than the CPU's caches."""
ROUNDS = 3
KERNEL_SECONDS = 5e-6


def this_machine(ranks: int, folders: list[str]) -> Machine:
    """Return the rates of one of `ranks` that work at the same time; it takes a second.

    Args:
        ranks: processes that share memory, cores and disks.
        folders: of the disk tier; empty: the disk is not measured.
    """
    matrix, vector = torch.randn(SIDE, SIDE), torch.randn(SIDE)
    square = torch.randn(SIDE // 2, SIDE // 2)
    memory = matrix.nbytes / _seconds(lambda: matrix @ vector)
    flops = 2 * len(square) ** 3 / _seconds(lambda: square @ square)
    disk = sum(_disk_rate(Path(folder)) for folder in folders) or 1.0
    exact = Efficiency(1.0, 1.0, memory=1.0, reduce=1.0, optimizer=1.0)
    peaks = {"fp32": flops / ranks, "bf16": flops / ranks, "fp16": flops / ranks}
    return Machine(
        "this machine", peaks, memory / ranks, 0.0, Link(memory / 4 / ranks, 0.0),
        Link(memory / 4 / ranks, 0.0), exact, ranks_per_node=ranks, host_rate=memory / ranks,
        cpu_rate=memory / ranks, disk_rate=disk / ranks, kernel_seconds=KERNEL_SECONDS,
        launches_hide=False,
    )  # fmt: skip


def _seconds(action: Callable[[], object]) -> float:
    """The shortest of some rounds: a busy machine only makes them longer."""
    action()
    found: list[float] = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        action()
        found.append(time.perf_counter() - begun)
    return max(1e-9, min(found))


def _disk_rate(folder: Path) -> float:
    """Write a file that is gone at once, and read it."""
    file = SwapFile(folder, 0)
    room = host_room(REQUEST_NBYTES, Ledger())  # it lives as long as its pages are written
    block = page_view(room.tensor(REQUEST_NBYTES, torch.uint8))
    for offset in range(0, DISK_NBYTES, REQUEST_NBYTES):
        file.write(offset, block)
    try:
        return disk_rate([file])
    finally:
        file.close()
