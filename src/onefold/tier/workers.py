"""Threads that do work in the background, and a kind of work that whoever needs it may do itself.

A worker runs torch's kernels on one thread each, as several of them share the cores that this rank
may use; and it is bound to those. So neither a launcher's OMP_NUM_THREADS=1 nor a kernel's own team
of threads decides how fast a step goes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Barrier, Event, Lock

import torch

NUM_FETCHERS = 2
"""Threads that bring weights near: the next unit's, and the one's behind it."""

NUM_DISK_STEPPERS = 4
"""Threads that step blocks of far state: most of them wait for the disk."""


class Task:
    """Work that runs once: on a worker, or on the first thread that waits for it."""

    __slots__ = ("_claim", "_done", "_work", "error")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._claim = Lock()
        self._done = Event()
        self.error: BaseException | None = None  # of the work, once it is done

    def run(self) -> None:
        """Do the work, unless somebody does or did."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            assert self._work is not None, "unclaimed work is still there"
            with torch.no_grad():
                self._work()
        except BaseException as error:  # for whoever waits, on whichever thread
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
        """Return when the work is done, doing it if nobody has begun; raises what it raised."""
        self.finish()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Like `wait`, for whoever has no use for the result, or for what it raised."""
        self.run()
        self._done.wait()


class Workers:
    """A fixed number of threads that run tasks in the order in which they were given."""

    def __init__(self, num_threads: int, name: str, cores: tuple[int, ...] = ()) -> None:
        self.num_threads = num_threads
        self._name = name
        self._cores = cores
        self._pool: ThreadPoolExecutor | None = None

    def give(self, work: Callable[[], None]) -> Task:
        """Have `work` done soon."""
        if self._pool is None:
            self._pool = self._start()
        task = Task(work)
        self._pool.submit(task.run)
        return task

    def _start(self) -> ThreadPoolExecutor:
        """Start every thread now: each is to compute alone, which torch sets for a thread only
        together with a number for threads to come, so that is set back here.
        """
        num_threads = torch.get_num_threads()
        all_started = Barrier(self.num_threads + 1)

        def settle() -> None:
            if self._cores and sys.platform == "linux":
                with suppress(OSError):
                    os.sched_setaffinity(0, self._cores)
            torch.get_num_threads()  # torch's own setting of a new thread must not come later
            torch.set_num_threads(1)
            all_started.wait()

        pool = ThreadPoolExecutor(self.num_threads, self._name)
        for _ in range(self.num_threads):
            pool.submit(settle)
        all_started.wait()
        torch.set_num_threads(num_threads)
        return pool

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let kernels that are called inside compute on this thread alone."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
