"""Kills a rank of three at any moment of seven kinds of work, and looks at how the others end.

`benchmarks/kills.py` does so a hundred times. Each life forks the ranks anew. They train, save,
load, evaluate, generate, move rows, or train with state on a disk, over and over. SIGKILL comes to
one of them at any time in their work. Every other rank must raise a `WireError` whose first
sentence names that rank, and its process must be gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import onefold
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ports import free_port
from tests.support.ranks import seeded

RANKS = 3
HANG_S = 120.0
Work = Iterator[None]


class End(NamedTuple):
    """How one rank has ended: seconds after the signal, and the first line of its error."""

    seconds: float
    error: str


def _sharded(folder: Path, stage: int = 3, offload: str | None = None) -> tuple[nn.Module, ...]:
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=stage, offload=offload)  # type: ignore[arg-type]
    return module, optimizer  # type: ignore[return-value]


def train(folder: Path, offload: str | None = None) -> Work:
    module, optimizer = _sharded(folder, offload=offload)
    batch = token_batches(1)[0].chunk(RANKS)[dist.get_rank()]
    while True:
        next_token_loss(module, batch).backward()
        optimizer.step()  # type: ignore[operator]
        optimizer.zero_grad()
        yield


def disk(folder: Path) -> Work:
    return train(folder, f"disk:{folder}")


def evaluate(folder: Path) -> Work:
    module, _ = _sharded(folder)
    while True:
        with torch.no_grad():
            module(token_batches(1)[0])
        yield


def generate(folder: Path) -> Work:
    module = onefold.stream(seeded(Model), budget=20_000)
    tokens = token_batches(1)[0][:1, :4]
    while True:
        tokens = torch.cat([tokens, module(tokens)[:, -1:].argmax(-1)], 1)[:, -4:]
        yield


def save(folder: Path) -> Work:
    module, optimizer = _sharded(folder)
    for number in count():
        onefold.save(folder / f"runs/step-{number:06d}", module, optimizer, keep=1)  # type: ignore[arg-type]
        yield


def load(folder: Path) -> Work:
    module, optimizer = _sharded(folder)
    onefold.save(folder / "first", module, optimizer)  # type: ignore[arg-type]
    while True:
        onefold.load(folder / "first", module, optimizer)  # type: ignore[arg-type]
        yield


def reshare(folder: Path) -> Work:
    module, _ = _sharded(folder)
    while True:
        onefold.mixed.reshare(module, [1, 2, 1])
        onefold.mixed.reshare(module, [2, 1, 1])
        yield


WORKS: dict[str, Callable[[Path], Work]] = {
    work.__name__: work for work in (train, save, load, evaluate, generate, reshare, disk)
}


def _rank(rank: int, port: int, work: Callable[[Path], Work], folder: Path) -> None:
    """Work until another rank is killed; then leave the error, and end as a script does."""
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    limit, url = timedelta(seconds=HANG_S), f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", url, limit, rank=rank, world_size=RANKS)
    try:
        for _ in work(folder):
            (folder / f"works-{rank}").touch()
    except BaseException as error:
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        (folder / f"error-{rank}").write_text(line)


def kill_once(work: str, victim: int, delay: float) -> dict[int, End]:
    """One life: how each rank that was not killed has ended."""
    port = free_port()
    folder, ranks = Path(tempfile.mkdtemp()), dict[int, int]()
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(HANG_S))
            _rank(rank, port, WORKS[work], folder)
            sys.exit()
        ranks[pid] = rank
    while len(list(folder.glob("works-*"))) < RANKS:
        if errors := list(folder.glob("error-*")):
            raise RuntimeError(f"{work} before a kill: {errors[0].read_text()}")
        time.sleep(0.01)
    time.sleep(delay)
    begun = time.monotonic()
    os.kill(next(pid for pid, rank in ranks.items() if rank == victim), signal.SIGKILL)
    ends = dict[int, End]()
    while ranks:
        pid, status = os.wait()
        rank, seconds = ranks.pop(pid), time.monotonic() - begun
        text = f"no error, exit code {os.waitstatus_to_exitcode(status)}"
        with suppress(FileNotFoundError):
            text = (folder / f"error-{rank}").read_text()
        ends[rank] = End(seconds, text)
    shutil.rmtree(folder)
    del ends[victim]
    return ends


def is_right(end: End, victim: int) -> bool:
    """True for an error that names the rank that was killed."""
    return end.error.startswith("WireError: ") and f"got rank {victim} ended" in end.error
