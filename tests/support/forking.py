"""Before a fork: let threads that have ended be gone.

A thread that is over for Python still gives back what libraries keep for each thread, under their
locks. A process that is forked meanwhile has these locked for good, and spins in its first matrix
product (MKL; three of four children within a hundred tries beside busy cores, none of 1,600 so).
On a full machine a thread may wait for long until it can end: it is runnable then.

The team of OpenMP goes too. A fork has none of its threads, and would wait for them in its first
loop of several threads: launches of one rank, which has all cores, hung in CI.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from pathlib import Path

import torch

HANG_S = 300.0
"""A wait in a test that takes longer is a hang: minutes, as other work may fill the machine."""

TASKS = Path("/proc/self/task")
SOFT = 1
"""Of omp_pause_resource_t: threads end, settings stay."""
PATIENCE_S, RUNNABLE_S, POLL_S = 0.5, 20.0, 0.002

_staying: set[int] = (
    set()
)  # threads that Python does not know and that do not end: pools of libraries


def spare_collector() -> None:
    """Let the collector skip all objects that exist: it would scan them, and so copy their pages.

    It runs less often, too: a step of a rank makes thousands of objects, and 8 % of the CPU seconds
    of three files went to the collector.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def await_ended_threads() -> None:
    """Return when no thread of this process is about to end, or none has run for `PATIENCE_S`."""
    if sys.platform != "linux":
        return
    _end_openmp_threads()
    begun = last_ran = time.monotonic()
    while ending := _ending():
        now = time.monotonic()
        if now < begun + RUNNABLE_S and any(map(_is_runnable, ending)):
            last_ran = now
        if now > last_ran + PATIENCE_S:
            _staying.update(ending)
            return
        time.sleep(POLL_S)


def _end_openmp_threads() -> None:
    """End this thread's team of OpenMP: a fork would wait for it in its first parallel loop."""
    for library in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        ctypes.CDLL(str(library)).omp_pause_resource_all(SOFT)


def _ending() -> set[int]:
    alive = {thread.native_id for thread in threading.enumerate()}
    return {int(task.name) for task in TASKS.iterdir()} - alive - _staying


def _is_runnable(thread: int) -> bool:
    """True if the thread runs or waits for a core, not for something else."""
    try:
        stat = (TASKS / str(thread) / "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "R"
