"""Measure the rates of this machine: memory, disks, copies to a device, products.

A measurement is a table of `BandwidthRow`s: a name, the bytes that an action moves, the action.
`in_rounds` runs the rows in turn, round after round, so a machine that slows down slows all rows. A
rate is the median of its rounds. It may name another rate as its ceiling.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

import torch

from onefold.engine.blocks import BLOCK_NUMEL
from onefold.layout.ledger import Ledger
from onefold.tier import accelerator
from onefold.tier.disk import BlockFile
from onefold.tier.host import MIB, versions
from onefold.tier.slots import host_room
from onefold.tier.workers import NUM_FETCHERS

LEAST_ROUNDS, MOST_ROUNDS = 3, 99
"""Odd numbers, so that the median is one of the rounds."""

REQUEST_NBYTES = 4 * BLOCK_NUMEL
"""Bytes of one read or write: a step's block of fp32 state."""

READ_NBYTES, READ_S = 512 * MIB, 0.5
"""`disk_rate` reads so many bytes, or for so long."""

Measured = dict[str, Any]
"""A result, in the form of the JSON of `onefold bench`: `in_rounds` says which keys all have."""

Request = tuple[int, BlockFile, int]
"""Where in which file a read or write begins, and its bytes."""


@dataclass(frozen=True, slots=True)
class BandwidthRow:
    """One row: `action` moves `nbytes`; `finish` waits for work that the action left behind."""

    name: str
    nbytes: int
    action: Callable[[], object]
    of: str = ""
    parameters: int = 0  # stepped by one action
    finish: Callable[[], object] = lambda: None

    def seconds(self) -> float:
        """Time one action."""
        begun = time.perf_counter()
        self.action()
        self.finish()
        return time.perf_counter() - begun


def in_rounds(
    rows: Sequence[BandwidthRow],
    seconds: float,
    agree: Callable[[int], int] = lambda rounds: rounds,
) -> Measured:
    """Return the number of rounds, their seconds, the rates by name, and this machine's versions.

    Two rounds of warm-up come first. `agree` gives all ranks the same number of rounds.
    """
    for row in rows:
        row.seconds()
    once = sum(row.seconds() for row in rows)
    rounds = agree(min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / max(once, 1e-6)))) | 1)
    samples: dict[str, list[float]] = {row.name: [] for row in rows}
    begun = time.perf_counter()
    for _ in range(rounds):
        for row in rows:
            samples[row.name].append(row.nbytes / row.seconds())
    took = time.perf_counter() - begun
    rates = {row.name: _rate(row, samples) for row in rows}
    return {"rounds": rounds, "seconds": took, "rates": rates, "versions": versions()}


def _rate(row: BandwidthRow, samples: dict[str, list[float]]) -> dict[str, Any]:
    own = samples[row.name]
    middle = median(own)
    return {
        "bytes_per_s": middle,
        "lowest": min(own),
        "highest": max(own),
        "parameters_per_s": middle * row.parameters / row.nbytes if row.parameters else None,
        "of": row.of,
        "share": middle / median(samples[row.of]) if row.of else None,
    }


def highest_rate(name: str, amount: int, action: Callable[[], object]) -> float:
    """Return the highest of a few rates: a busy machine only makes them lower."""
    return in_rounds([BandwidthRow(name, amount, action)], 0.0)["rates"][name]["highest"]


def waiter(device: torch.device) -> Callable[[], object]:
    """Return a function that waits until a device has done its work."""
    return lambda: accelerator.synchronize(device)


# disks


def requests_of(files: Sequence[BlockFile]) -> list[Request]:
    """Cut files into requests, in the order of their offsets: the files in turn."""
    sizes = [os.fstat(file.fd).st_size for file in files]
    requests = [
        (at, file, min(REQUEST_NBYTES, size - at))
        for file, size in zip(files, sizes, strict=True)
        for at in range(0, size, REQUEST_NBYTES)
    ]
    return sorted(requests, key=lambda request: request[0])


def request_views(threads: int) -> list[memoryview]:
    """Return memory for one request of each thread.

    Its numbers are random, as a drive may compress zeros, and valid weights and moments.
    """
    room = host_room(threads * REQUEST_NBYTES, Ledger())
    memory = room.tensor(threads * REQUEST_NBYTES // 4, torch.float32).uniform_()
    return [part.numpy().data.cast("B") for part in memory.chunk(threads)]


def move_all(
    pool: ThreadPoolExecutor, requests: Sequence[Request], views: Sequence[memoryview],
    reads: Callable[[int], bool], until: float = inf,
) -> int:  # fmt: skip
    """Read or write until the requests are done, or the clock shows `until`; return the bytes.

    Each free thread takes the next request. `reads` gets its number in its file.
    """
    waiting: Iterator[Request] = iter(requests)

    def work(view: memoryview) -> int:
        moved = 0
        for at, file, length in waiting:
            (file.read if reads(at // REQUEST_NBYTES) else file.write)(at, view[:length])
            moved += length
            if time.perf_counter() > until:
                break
        return moved

    return sum(pool.map(work, views))


def disk_rate(files: Sequence[BlockFile]) -> float:
    """Return bytes per second of reading files in order, past the page cache, as the engine."""
    threads = NUM_FETCHERS + 1
    requests = requests_of(files)[: READ_NBYTES // REQUEST_NBYTES]
    with ThreadPoolExecutor(threads) as pool:
        views, begun = request_views(threads), time.perf_counter()
        nbytes = move_all(pool, requests, views, lambda _: True, begun + READ_S)
        return nbytes / max(1e-9, time.perf_counter() - begun)
