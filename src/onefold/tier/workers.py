"""Run tasks on background threads. A thread that waits for an unstarted task runs it itself.

A worker computes on one thread and is bound to this rank's cores, which the workers share. So
neither a launcher's OMP_NUM_THREADS=1 nor a kernel's own thread team sets the speed of a step.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Barrier, Event, Lock

import torch

from onefold.tier import accelerator

NUM_FETCHERS = 2
"""Threads that fetch weights: of the next unit, and of the unit behind it."""

NUM_DISK_STEPPERS = 4
"""Threads that step blocks of state on disk: most of them wait for the disk."""

NUM_DISK_SLOTS = NUM_DISK_STEPPERS + 1
"""Slots for blocks of state on disk: one a thread that steps, and one for a thread that waits."""


class Task:
    """A function that runs once: on a worker, or on the first thread that waits for it."""

    __slots__ = ("_claim", "_done", "_work", "error")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._claim = Lock()
        self._done = Event()
        self.error: BaseException | None = None  # of the work, once it is done

    def run_once(self) -> None:
        """Run the function, unless another thread has begun it."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            assert self._work is not None, "an unclaimed task has its function"
            with torch.no_grad():
                self._work()
        except BaseException as error:  # for the thread that waits
            self.error = error
            if not isinstance(error, Exception):
                raise  # Ctrl-C, on the main thread
        finally:
            self._work = None
            self._done.set()

    def is_completed(self) -> bool:
        """True when `wait` would not block."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when the function has ended, running it if no thread has; raise its error."""
        self.await_end()
        if self.error is not None:
            raise self.error

    def await_end(self) -> None:
        """Like `wait`, without raising the error."""
        self.run_once()
        self._done.wait()


class Workers:
    """A fixed number of threads, which run tasks in order."""

    def __init__(
        self,
        num_threads: int,
        name: str,
        cores: tuple[int, ...] = (),
        *,
        device: torch.device | None = None,
    ) -> None:
        """`cores`: of this rank; none: any. `device`: the accelerator that the tasks use."""
        self.num_threads = num_threads
        self._name = name
        self._cores = cores
        self._device = device
        self._pool: ThreadPoolExecutor | None = None

    def give(self, work: Callable[[], None]) -> Task:
        """Submit a task."""
        if self._pool is None:
            self._pool = self._start_threads()
        task = Task(work)
        self._pool.submit(task.run_once)
        return task

    def _start_threads(self) -> ThreadPoolExecutor:
        """Start every thread with one compute thread each.

        torch sets that number for future threads as well, so it is restored here.
        """
        num_threads = torch.get_num_threads()
        all_started = Barrier(self.num_threads + 1)

        def begin() -> None:
            accelerator.use(self._device)  # else what locks pages starts the host's first device
            if self._cores and sys.platform == "linux":
                with suppress(OSError):
                    os.sched_setaffinity(0, self._cores)
            torch.get_num_threads()  # torch initialises the number of a new thread here
            torch.set_num_threads(1)
            all_started.wait()

        pool = ThreadPoolExecutor(self.num_threads, self._name)
        for _ in range(self.num_threads):
            pool.submit(begin)
        all_started.wait()
        torch.set_num_threads(num_threads)
        return pool

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run kernels inside the block on this thread alone."""
    num_threads = torch.get_num_threads()
    if num_threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if num_threads > 1:
            torch.set_num_threads(num_threads)
