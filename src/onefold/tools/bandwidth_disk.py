"""How fast folders are read and written, and what the engine's step reaches with its state there.

The ceiling is a plain loop of preadv and pwritev over the same bytes of the same file, from as many
threads, in requests of the engine's own length.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from onefold.build.tiers import is_memory
from onefold.config import Offload
from onefold.engine.blocks import BLOCK_NUMEL
from onefold.errors import ConfigError, expected
from onefold.host import MIB, free_host_nbytes, in_bytes, usable_cores
from onefold.ledger import Ledger
from onefold.tier.disk import DiskStore, SwapFile
from onefold.tier.slots import NearSlot
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
    thread_notes,
)  # fmt: skip

REQUEST_NBYTES = BLOCK_NUMEL * 4
"""Of one read or write: what a step's block of fp32 state asks for."""

STATE_NBYTES = 12
"""Of a parameter on disk: fp32 weight, exp_avg, exp_avg_sq. A step reads and writes all of them."""

DAY_S = 24 * 60 * 60

LEAST_STATE_NBYTES, MOST_STATE_NBYTES = 48 * MIB, 768 * MIB
"""Of state on the paths, where the user gives no number: four blocks, so that threads overlap."""

Move = Callable[[int, SwapFile, int, memoryview], None]
"""(number of the request, file, offset, memory): read or write one request."""


class Requests:
    """All bytes of some files, moved in requests of the engine's length from several threads.

    They are the files in which the engine keeps its state, so that where they lie on the disk makes
    no difference. What is written are numbers that are weights and moments just as well.
    """

    def __init__(self, files: Sequence[SwapFile], threads: int) -> None:
        self._num_files = len(files)
        offsets = [
            [(file, at) for at in range(0, os.fstat(file.fd).st_size, REQUEST_NBYTES)]
            for file in files
        ]
        # around the files; what one has more than another is left out
        self._requests = [request for row in zip(*offsets, strict=False) for request in row]
        self._pool = ThreadPoolExecutor(threads, "onefold-bench")
        self._views = [_filled(_slot(REQUEST_NBYTES)) for _ in range(threads)]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def entries(self) -> Iterator[BandwidthRow]:
        """Reads, writes, and half of each: by a plain loop, and by the engine's files."""
        kinds: dict[str, Callable[[int], bool]] = {
            "read": lambda _: True,
            "write": lambda _: False,
            "mixed": lambda index: index // self._num_files % 2 == 0,  # in each file in turn
        }
        nbytes = sum(_nbytes_at(*request) for request in self._requests)
        for group, is_read in kinds.items():
            plain = partial(self._each, _plain_move(is_read))
            own = partial(self._each, _own_move(is_read))
            yield BandwidthRow(f"plain_{group}", group, "plain loop", nbytes, plain)
            yield BandwidthRow(group, group, "engine's files", nbytes, own, f"plain_{group}")

    def _each(self, move: Move) -> None:
        """Move all requests, each on the next thread that is free."""
        left = iter(range(len(self._requests)))  # one thread at a time takes the next

        def work(view: memoryview) -> None:
            for index in left:
                file, offset = self._requests[index]
                move(index, file, offset, view[: _nbytes_at(file, offset)])

        for done in [self._pool.submit(work, view) for view in self._views]:
            done.result()


def _nbytes_at(file: SwapFile, offset: int) -> int:
    """Of the request at `offset`: the last one of a file may be shorter."""
    return min(REQUEST_NBYTES, os.fstat(file.fd).st_size - offset)


def _slot(nbytes: int) -> Tensor:
    """Memory as the engine's blocks pass through it: what suits a disk best."""
    return NearSlot(nbytes, Ledger()).tensor(nbytes // 4, torch.float32)


def _filled(flat: Tensor) -> memoryview:
    """Its bytes: random, as a drive may make short work of zeros; from 0 to 1, as no mean of
    squares is below.
    """
    return flat.uniform_().numpy().data.cast("B")


def _own_move(is_read: Callable[[int], bool]) -> Move:
    def move(index: int, file: SwapFile, offset: int, view: memoryview) -> None:
        (file.read if is_read(index) else file.write)(offset, view)

    return move


def _plain_move(is_read: Callable[[int], bool]) -> Move:
    def move(index: int, file: SwapFile, offset: int, view: memoryview) -> None:
        call = os.preadv if is_read(index) else os.pwritev
        done = 0
        while done < len(view):
            done += call(file.fd, [view[done:]], offset + done)

    return move


def measure_disk(paths: Sequence[Path], ask: Ask) -> Bandwidths:
    """Measure folders. The files there have no names: they are gone when this ends, however."""
    threads = ask.threads or max(usable_cores(), NUM_DISK_STEPPERS)
    check_room(paths, ask.nbytes or LEAST_STATE_NBYTES)
    nbytes = ask.nbytes or _suitable(paths, ask.seconds)
    numel = max(1, nbytes // STATE_NBYTES // ROW) * ROW
    tier = Offload(optimizer="disk", parameters="disk", disk=list(paths))
    stepped = Stepped(numel, torch.float32, tier)
    store = stepped.tiers.state
    assert isinstance(store, DiskStore), "states are asked to rest on disk"
    files = store.files
    stepped.step()  # space that was never written reads as zeros, for which no disk is asked
    stepped.finish()
    for file in files:
        os.fsync(file.fd)  # the first weights came through the page cache
    requests = Requests(files, threads)
    step = BandwidthRow(
        "step", "AdamW", "engine's step", 2 * STATE_NBYTES * numel, stepped.step,
        "plain_mixed", numel, stepped.finish,
    )  # fmt: skip
    try:
        rates, rounds, seconds = in_rounds([*requests.entries(), step], ask.seconds)
    finally:
        requests.close()
    engine_threads = stepped.tiers.steppers.num_threads
    facts = [PathFacts(str(each.folder), each.is_direct, is_memory(each.folder)) for each in files]
    return Bandwidths(
        "disk", STATE_NBYTES * numel, numel, threads, engine_threads, rounds, seconds, rates,
        paths=facts,
        wear=_wear(stepped, store, numel, rates["step"]),
        notes=[*_path_notes(facts), *thread_notes(threads, engine_threads)],
    )  # fmt: skip


def _suitable(paths: Sequence[Path], seconds: float) -> int:
    """Bytes of state that a good number of rounds has time for, by the look of one small file."""
    source = _filled(_slot(REQUEST_NBYTES))
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
        if not path.is_dir():
            got = "a file" if path.exists() else "nothing there"
            hint = "create it first, on the disk to be measured"
            raise ConfigError(expected(f"--path to be a folder: {path}", got, hint=hint))
        if not os.access(path, os.W_OK | os.X_OK):
            hint = "name a folder that this user may write to"
            raise ConfigError(
                expected(f"a folder to write to at {path}", "one that is read-only", hint=hint)
            )
        needed, free = nbytes // len(paths) + 4 * REQUEST_NBYTES, shutil.disk_usage(path).free
        if needed > free:
            hint = "a smaller --mib, or another --path"
            raise ConfigError(
                expected(f"{in_bytes(needed)} of free space at {path}", in_bytes(free), hint=hint)
            )
    check_memory(nbytes)  # gradients, and weights until they are on the disk: two thirds


def _wear(stepped: Stepped, store: DiskStore, numel: int, rate: Rate) -> Wear:
    """Of one more step, as its files count it."""
    before = store.moved_nbytes
    stepped.step()
    stepped.finish()
    read, written = (
        (late - early) / numel for early, late in zip(before, store.moved_nbytes, strict=True)
    )
    return Wear(read, written, written * (rate.parameters_per_s or 0.0) * DAY_S)


def _path_notes(facts: Sequence[PathFacts]) -> Iterator[str]:
    for each in facts:
        if each.is_memory:
            yield (f"{each.path} lies in memory (tmpfs): these are rates of memory, "
                   "name a folder on a disk with --path")  # fmt: skip
        elif not each.is_direct:
            yield (f"{each.path} refuses O_DIRECT: requests go through the page cache, and rates "
                   "may be those of memory")  # fmt: skip
