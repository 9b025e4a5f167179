"""One run of one engine: fresh ranks, a few steps, and what they cost.

Ranks are forked from a server that has imported torch but run nothing, so that each run starts with
a clean heap a moment after the one before.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from contest.case import WARMUP_STEPS, Case, batches, build_model, touch_libraries
from contest.engines import Engine, everyone
from contest.summary import Round

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "onefold.api",
    "contest.engines",
]


@dataclass(slots=True)
class Rank:
    """What one rank measured. Seconds and bytes are per step of the measured window."""

    losses: list[float] = field(default_factory=list)  # of every step, the warm-up too
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0  # user + system, all threads
    num_faults: float = 0.0  # pages the kernel had to find: a cost that does not vary with load
    sent_nbytes: float = 0.0  # of all ranks together, headers included; rank 0 knows
    peak_nbytes: int = 0  # resident set above the imports
    resident_nbytes: int = 0  # the same after the last step
    host_peak_nbytes: int = 0  # of the whole process in host memory, imports too
    numel: int = 0
    ledger: dict[str, int] = field(default_factory=dict)


class RunError(RuntimeError):
    """An engine failed; the message is the first rank's traceback."""


def one_round(
    engines: Iterable[str],
    failed: dict[str, str],
    run_one: Callable[[str], list[dict[str, Any]]],
    console: Console,
) -> Round:
    """A run of every engine that has not failed yet; a failure is told, and the others go on."""
    found: Round = {}
    for name in engines:
        if name in failed:
            continue
        try:
            found[name] = run_one(name)
        except RunError as error:
            failed[name] = str(error)
            console.print(f"{name} failed, the others go on:\n{error}", markup=False)
    return found


def run(
    case: Case, engine: str, *, folder: str = "", timeout: float = 600.0
) -> list[dict[str, Any]]:
    """Train with fresh ranks and return what each measured, as plain dicts in rank order.

    `folder` is where the engines that offload to disk may write.
    """
    return run_ranks(case.ranks, _train, case, engine, folder, timeout=timeout)


def run_ranks(
    ranks: int, body: Callable[..., dict[str, Any]], *arguments: Any, timeout: float = 600.0
) -> list[dict[str, Any]]:
    """Call `body(rank, *arguments)` in fresh processes that know each other's addresses."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = _free_port()
    started = []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        place = (rank, ranks, port)
        process = context.Process(target=_main, args=(place, theirs, body, arguments))
        process.start()
        theirs.close()
        started.append((process, mine))
    try:
        return _collect([mine for _, mine in started], time.monotonic() + timeout)
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[dict[str, Any]]:
    found: dict[Connection, dict[str, Any]] = {}
    while len(found) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in found]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RunError("no result within the time limit")
        for pipe in ready:
            try:
                result = pipe.recv()
            except EOFError:
                raise RunError("a rank ended without a result") from None
            if isinstance(result, str):
                raise RunError(result)
            found[pipe] = result
    return [found[pipe] for pipe in pipes]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _main(
    place: tuple[int, int, int],
    pipe: Connection,
    body: Callable[..., dict[str, Any]],
    arguments: tuple[Any, ...],
) -> None:
    rank, ranks, port = place
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    _silence()
    _end_with_reader(pipe)
    try:
        pipe.send(body(rank, *arguments))
    except Exception:
        pipe.send(traceback.format_exc())
    pipe.close()
    os._exit(0)  # libraries that are still talking at exit would be waited for


def _end_with_reader(pipe: Connection) -> None:
    """Have this rank end when nobody is left to read its pipe, as after a SIGKILL.

    The server that ranks are forked from lives as long as they do, so parents tell nothing.
    """

    def watch() -> None:
        poller = select.poll()
        poller.register(pipe.fileno(), 0)  # nothing but errors
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _silence() -> None:
    """Ranks report through their pipe; what libraries print would tear the table."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _train(rank: int, case: Case, engine: str, folder: str) -> dict[str, Any]:
    if case.device == "cuda":
        os.environ |= {"LOCAL_RANK": "0", "ONEFOLD_SHARE_DEVICES": "1"}  # all ranks share one
    if case.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    return asdict(_measure(case, everyone(folder)[engine], rank))


def _measure(case: Case, chosen: Engine, rank: int) -> Rank:
    if case.threads:  # else as many as torch thinks best
        torch.set_num_threads(case.threads)
    if chosen.package == "deepspeed":
        __import__("deepspeed").init_distributed(dist_backend=case.backend)
    elif case.ranks > 1:
        dist.init_process_group(case.backend)
    touch_libraries(case)
    gc.collect()
    memory = Memory(case.device)
    model = build_model(case)
    result = Rank(numel=sum(p.numel() for p in model.parameters()))
    contestant = chosen.build(case, model)
    for block in model.blocks if case.compiled else ():
        block.compile()
    for step in range(WARMUP_STEPS):
        result.losses.append(contestant.step(batches(case, rank, step)))
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # whole models are made there, before they are cut
    window = Window(case)
    for step in range(WARMUP_STEPS, WARMUP_STEPS + case.num_steps):
        result.losses.append(contestant.step(batches(case, rank, step)))
    window.close(result, case.num_steps)
    result.peak_nbytes, result.resident_nbytes = memory.peak(), memory.now()
    result.host_peak_nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if contestant.ledger is not None:
        result.ledger = contestant.ledger()
    return result


class Window:
    """Clocks and counters over the measured steps, from a barrier to a barrier."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._barrier()
        self._sent = loopback_nbytes()
        self._cpu, self._faults = _used()
        self._wall = time.perf_counter()

    def close(self, result: Rank, num_steps: int) -> None:
        """Note what a step took."""
        if self._case.device == "cuda":
            torch.cuda.synchronize()
        cpu, faults = _used()
        self._barrier()
        result.wall_seconds = (time.perf_counter() - self._wall) / num_steps
        result.cpu_seconds = (cpu - self._cpu) / num_steps
        result.num_faults = (faults - self._faults) / num_steps
        result.sent_nbytes = (loopback_nbytes() - self._sent) / num_steps

    def _barrier(self) -> None:
        if self._case.device == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()


class Memory:
    """Resident bytes above those at its making; on a GPU the allocator's own."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        self._before = _status("VmRSS")

    def now(self) -> int:
        """Bytes held."""
        return (torch.cuda.memory_allocated() if self._is_cuda else _status("VmRSS")) - self._before

    def peak(self) -> int:
        """Most bytes held since the making, as the kernel (the allocator) kept count."""
        most = torch.cuda.max_memory_allocated() if self._is_cuda else _status("VmHWM")
        return most - self._before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise RunError(f"/proc/self/status does not tell {name}")


def _used() -> tuple[float, int]:
    """CPU-seconds of all threads, and page faults."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_minflt


def loopback_nbytes() -> int:
    """Bytes that have gone over the loopback device: what gloo sends between local ranks."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])
    return 0
