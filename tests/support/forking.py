"""Before a fork: let threads that have ended be gone.

A thread that is over for Python still gives back what libraries keep for each thread, under their
locks. A process that is forked meanwhile has these locked for good, and spins in its first matrix
product (MKL; three of four children within a hundred tries beside busy cores, none of 1,600 so).
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

HANG_S = 300.0
"""A wait in a test that takes longer is a hang: minutes, as other work may fill the machine."""

TASKS = Path("/proc/self/task")
PATIENCE_S, POLL_S = 0.5, 0.002

_staying: set[int] = (
    set()
)  # threads that Python does not know and that do not end: pools of libraries


def await_ended_threads() -> None:
    """Return when no thread of this process is about to end, or has been for `PATIENCE_S`."""
    if sys.platform != "linux":
        return
    deadline = time.monotonic() + PATIENCE_S
    while ending := _ending():
        if time.monotonic() > deadline:
            _staying.update(ending)
            return
        time.sleep(POLL_S)


def _ending() -> set[int]:
    alive = {thread.native_id for thread in threading.enumerate()}
    return {int(task.name) for task in TASKS.iterdir()} - alive - _staying
