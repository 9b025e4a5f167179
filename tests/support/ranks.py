"""Ranks for tests: threads of this process (fast, default) or real gloo processes (marked).

torch's threaded process group is private to torch's own tests; only this file touches it.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import inspect
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.support import meeting as meeting  # takes the place of torch's
from tests.support.forking import HANG_S, await_ended_threads, spare_collector
from tests.support.older_torch import leave_thread, prepare_threads

prepare_threads()

WARM = (
    "pytest",
    "tests.sim.counting",
    "tests.sim.ranks",
    "tests.support.composed",
    "onefold.api",
    "onefold.resume",
    "onefold.checkpoint.save",
    "torch._dynamo",
    "torch._refs",
)
"""What ranks import, up to eight seconds of a core each. One list for all tests of a worker: a
server of forks reads the first that it gets, and no later one."""

WARM_OWN = [name for name in WARM if name.startswith("onefold.")]
"""What forks would each import: a first step took 0.89 CPU seconds of two ranks, then 0.36. A start
itself, with its group and end, takes 0.045 a rank, so no case keeps the ranks of another."""

MEMORY = Path("/dev/shm")
"""Where ranks meet: every look at a store of files on a disk reads and locks one."""

HANGS_AFTER = 0.8  # of the time that messages are waited for: a rank then shows where it is
_GENERATOR = threading.RLock()


def run_ranks(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `body(rank, *args)` on `world_size` ranks, each a thread; their results in rank order.

    The first exception of any rank is raised, with the rank in a note.
    """
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []
    with _threaded_world():
        store = dist.HashStore()

        def run(rank: int) -> None:
            torch.set_num_threads(1)  # a new thread would take over the setting only later
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            try:
                results[rank] = body(rank, *args)
            except BaseException as error:
                failures.append((rank, error))
                threaded.ProcessLocalGroup.exception_handle(error)
            finally:
                dist.destroy_process_group()
                leave_thread()

        threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + HANG_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    real = [f for f in failures if not isinstance(f[1], SystemExit)] or failures
    if real:
        rank, error = real[0]
        error.add_note(f"raised on rank {rank} of {world_size}")
        raise error
    if stuck:
        frames = sys._current_frames()
        where = "".join(traceback.format_stack(frames[threads[stuck[0]].ident])[-4:])
        raise TimeoutError(f"ranks {stuck} still run after {HANG_S:g} s:\n{where}")
    return results


@contextmanager
def _threaded_world() -> Iterator[None]:
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


def seeded(build: Callable[..., Any], *args: Any, seed: int = 0) -> Any:
    """`build(*args)` with the global generator seeded; threads share it, so one at a time."""
    with _GENERATOR:
        if torch.cuda.is_available():
            torch.manual_seed(seed)
        else:  # what the line above does here, but for the stack that it formats for a GPU to come
            torch.default_generator.manual_seed(seed)
        return build(*args)


def every_rank(
    world_size: int | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorate a test that takes its rank first: each of `world_size` threads runs it.

    None: as many as the test's own argument `world_size` says.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_each_rank(**arguments: Any) -> None:
            number = arguments["world_size"] if world_size is None else world_size
            run_ranks(number, functools.partial(test, **arguments))

        signature = inspect.signature(test)
        _, *own = signature.parameters.values()
        on_each_rank.__signature__ = signature.replace(parameters=own)  # what pytest provides
        return on_each_rank

    return decorate


def run_processes(
    world_size: int,
    body: Callable[..., None],
    *args: Any,
    timeout_s: float = HANG_S,
    start_method: str = "fork",
) -> None:
    """Call the module-level `body(rank, *args)` in `world_size` gloo processes.

    "fork" starts in no time; "spawn" gives processes with a heap of their own; "forkserver" forks
    all of them from a process that has imported what they use and has no other thread.
    """
    if start_method == "fork":
        for name in WARM_OWN:
            importlib.import_module(name)
        await_ended_threads()
    elif start_method == "forkserver":
        mp.set_forkserver_preload(list(WARM))
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        mp.start_processes(
            _process,
            (world_size, f"file://{folder}/store", timeout_s, body, args),
            nprocs=world_size,
            start_method=start_method,
        )


def shorten_timeout(seconds: float) -> None:
    """Let later collectives of this process fail after `seconds` without an answer.

    Call it when all ranks have started: how long a start takes is up to the machine.
    """
    handle = dist.group.WORLD
    assert handle is not None, "ranks have started"
    handle._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))


def _process(
    rank: int, world_size: int, url: str, timeout_s: float, body: Callable[..., None], args: Any
) -> None:
    spare_collector()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", url, timedelta(seconds=timeout_s), rank=rank, world_size=world_size
    )
    faulthandler.dump_traceback_later(HANGS_AFTER * timeout_s, file=sys.__stderr__)
    try:
        body(rank, *args)
        dist.barrier()
    finally:
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()
