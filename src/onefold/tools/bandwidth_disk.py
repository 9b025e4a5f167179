"""Measure how fast folders are read and written, and which share a step with its state there has.

The ceiling is a plain loop of preadv and pwritev over the same bytes of the same files, from as
many threads, in requests of the engine's length.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onefold.build.tiers import is_memory
from onefold.config import Offload
from onefold.engine.blocks import BLOCK_NUMEL
from onefold.host import MIB, free_host_nbytes, in_bytes, usable_cores
from onefold.ledger import Ledger
from onefold.tier.disk import DiskStore, SwapFile
from onefold.tier.slots import host_room
from onefold.tier.workers import NUM_DISK_STEPPERS
from onefold.tools.bandwidth import (
    MOST_ROUNDS,
    ROW,
    Ask,
    BandwidthRow,
    Bandwidths,
    PathFacts,
    Rate,
    Stepped,
    Wear,
    check_memory,
    in_rounds,
    require,
    thread_notes,
)  # fmt: skip

REQUEST_NBYTES = BLOCK_NUMEL * 4
"""Bytes of one read or write: a step's block of fp32 state."""

STATE_NBYTES = 12
"""Bytes on disk per parameter: fp32 weight, exp_avg, exp_avg_sq. A step reads and writes all."""

DAY_S = 24 * 60 * 60

LEAST_STATE_NBYTES, MOST_STATE_NBYTES = 48 * MIB, 768 * MIB
"""State on the paths without --mib: at least four blocks, so that threads overlap."""

Move = Callable[[SwapFile, int, memoryview], None]
"""Reads or writes one request at an offset of a file."""


def measure_disk(paths: Sequence[Path], ask: Ask) -> Bandwidths:
    """Measure folders. The files there have no names: they vanish with this process."""
    threads = ask.threads or max(usable_cores(), NUM_DISK_STEPPERS)
    check_room(paths, ask.nbytes or LEAST_STATE_NBYTES)
    nbytes = ask.nbytes or _suitable(paths, ask.seconds)
    numel = max(1, nbytes // STATE_NBYTES // ROW) * ROW
    tier = Offload(optimizer="disk", parameters="disk", disk=list(paths))
    stepped = Stepped(numel, torch.float32, tier)
    store = stepped.tiers.state
    assert isinstance(store, DiskStore), "the optimizer's states are on disk"
    stepped.step()  # space that was never written reads as zeros, without a request to the disk
    stepped.finish()
    for file in store.files:
        os.fsync(file.fd)  # the first weights went through the page cache
    with ThreadPoolExecutor(threads, "onefold-bench") as pool:
        views = [_request_memory() for _ in range(threads)]
        step = stepped.row("step", "engine's step", 2 * STATE_NBYTES, "plain_mixed")
        rows = [*_request_rows(store.files, pool, views), step]
        rates, rounds, seconds = in_rounds(rows, ask.seconds)
    engine_threads = stepped.tiers.steppers.num_threads
    facts = [PathFacts(str(f.folder), f.is_direct, is_memory(f.folder)) for f in store.files]
    return Bandwidths(
        "disk", STATE_NBYTES * numel, numel, threads, engine_threads, rounds, seconds, rates,
        paths=facts,
        wear=_wear(stepped, store, rates["step"]),
        notes=[*_path_notes(facts), *thread_notes(threads, engine_threads)],
    )  # fmt: skip


def _request_rows(
    files: Sequence[SwapFile], pool: ThreadPoolExecutor, views: list[memoryview]
) -> Iterator[BandwidthRow]:
    """Yield reads, writes, and half of each: by a plain loop, and by the engine's files.

    The requests cover the files in which the engine keeps its state: both lie on the same place of
    the disk. The requests write numbers that are valid weights and moments.
    """
    offsets = [range(0, os.fstat(file.fd).st_size, REQUEST_NBYTES) for file in files]
    # the files in turn; requests that only a longer file has are left out
    requests = [
        pair for row in zip(*offsets, strict=False) for pair in zip(files, row, strict=True)
    ]
    lengths = [min(REQUEST_NBYTES, os.fstat(file.fd).st_size - at) for file, at in requests]

    def move_all(read: Move, write: Move, is_read: Callable[[int], bool]) -> None:
        left = iter(range(len(requests)))  # each free thread takes the next request

        def work(view: memoryview) -> None:
            for index in left:
                (read if is_read(index) else write)(*requests[index], view[: lengths[index]])

        list(pool.map(work, views))

    plain_read, plain_write = partial(_plain_move, os.preadv), partial(_plain_move, os.pwritev)
    kinds: dict[str, Callable[[int], bool]] = {
        "read": lambda _: True,
        "write": lambda _: False,
        "mixed": lambda index: index // len(files) % 2 == 0,  # in each file in turn
    }
    for group, is_read in kinds.items():
        plain = partial(move_all, plain_read, plain_write, is_read)
        own = partial(move_all, SwapFile.read, SwapFile.write, is_read)
        yield BandwidthRow(f"plain_{group}", group, "plain loop", sum(lengths), plain)
        yield BandwidthRow(group, group, "engine's files", sum(lengths), own, f"plain_{group}")


def _plain_move(call: Callable[..., int], file: SwapFile, offset: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += call(file.fd, [view[done:]], offset + done)


def _request_memory() -> memoryview:
    """Return memory for one request, in huge pages as the engine's blocks.

    The numbers are random, as a drive may compress zeros, and from 0 to 1, as a mean of squares is.
    """
    flat = host_room(REQUEST_NBYTES, Ledger()).tensor(REQUEST_NBYTES // 4, torch.float32)
    view: Any = flat.uniform_().numpy().data
    return view.cast("B")


def _suitable(paths: Sequence[Path], seconds: float) -> int:
    """Return how many bytes of state suit the seconds, judged by a small file on each path."""
    source = _request_memory()
    moved, begun = 0, time.perf_counter()
    for path in paths:
        file = SwapFile(path, 0)
        for _ in range(4):
            at = file.extend(REQUEST_NBYTES)
            file.write(at, source)
            file.read(at, source)
            moved += 2 * REQUEST_NBYTES
        file.close()
    # a round moves the state eight times, two of them in the step; several threads are faster
    wanted = int(2 * moved / (time.perf_counter() - begun) * seconds / MOST_ROUNDS / 8)
    room = min(shutil.disk_usage(path).free for path in paths) * len(paths) // 4
    most = min(MOST_STATE_NBYTES, room, free_host_nbytes() // 2)
    return max(LEAST_STATE_NBYTES, min(wanted, most))


def check_room(paths: Sequence[Path], nbytes: int) -> None:
    """Refuse folders that cannot hold `nbytes` of state."""
    for path in paths:
        got = "a file" if path.exists() else "nothing there"
        hint = "create it first, on the disk to be measured"
        require(path.is_dir(), f"--path to be a folder: {path}", got, hint)
        can_write, hint = (
            os.access(path, os.W_OK | os.X_OK),
            "name a folder that this user may write to",
        )
        require(can_write, f"a folder to write to at {path}", "one that is read-only", hint)
        needed, free = nbytes // len(paths) + 4 * REQUEST_NBYTES, shutil.disk_usage(path).free
        wanted = f"{in_bytes(needed)} of free space at {path}"
        require(needed <= free, wanted, in_bytes(free), "a smaller --mib, or another --path")
    check_memory(nbytes)  # gradients, and weights until they are on the disk: two thirds


def _wear(stepped: Stepped, store: DiskStore, rate: Rate) -> Wear:
    """Count the bytes of one more step."""
    before = store.moved_nbytes
    stepped.step()
    stepped.finish()
    both = zip(before, store.moved_nbytes, strict=True)
    read, written = ((late - early) / stepped.numel for early, late in both)
    return Wear(read, written, written * (rate.parameters_per_s or 0.0) * DAY_S)


def _path_notes(facts: Sequence[PathFacts]) -> Iterator[str]:
    for each in facts:
        if each.is_memory:
            yield (
                f"{each.path} lies in memory (tmpfs): these are rates of memory, "
                "name a folder on a disk with --path"
            )
        elif not each.is_direct:
            yield (
                f"{each.path} refuses O_DIRECT: requests go through the page cache, and rates "
                "may be those of memory"
            )
