"""Measure the passes of a streamed module: their number, seconds, and the bytes of each."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.layout.ledger import Ledger
from onefold.tier.disk import BlockFile, DiskStore, page_view
from onefold.tier.files import FileStore
from onefold.tier.slots import host_room
from onefold.tier.workers import NUM_FETCHERS

WARM_PASSES = 3
"""Passes that are not measured: the first reads units that stay, the next ones learn the order."""

REQUEST_NBYTES = 4 << 20
"""Bytes of one read: as the engine's own."""

RATE_NBYTES, RATE_S = 512 << 20, 0.5
"""A measurement of the disk reads so many bytes, or for so long."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Forwards of the whole module. Bytes and seconds are means over those after the warm-up."""

    number: int
    seconds: float  # of a pass
    nbytes: int  # that this rank read from its tier in a pass
    is_warm: bool  # False: too few passes; then the first ones count


class PassMeter:
    """Counts the forwards of a module, and the bytes that its disk tier reads."""

    def __init__(self, module: nn.Module) -> None:
        self._engine = engine_of(module)
        self.number = 0
        self.first_s = 0.0  # when the first pass was over
        self.begun_s = time.perf_counter()
        self._from = (0, self.begun_s, self._read())
        module.register_forward_hook(lambda *_: self._passed())

    def _passed(self) -> None:
        self.number += 1
        if self.number == 1:
            self.first_s = time.perf_counter()
        if self.number == WARM_PASSES:
            self._from = (self.number, time.perf_counter(), self._read())

    def passes(self) -> Passes:
        """Return the means, once the last pass is over."""
        now, read = time.perf_counter(), self._read()
        first, begun, before = self._from
        if first == self.number:  # no pass since
            first, begun, before = 0, self.begun_s, 0
        number = max(1, self.number - first)
        return Passes(
            self.number, (now - begun) / number, round((read - before) / number), first > 0
        )

    def _read(self) -> int:
        """Bytes read so far, those of the next pass that are under way included."""
        for unit in self._engine.units:
            unit.await_reads()
        return sum(file.read_nbytes for file in files_of(self._engine))


def files_of(engine: Engine) -> Sequence[BlockFile]:
    """Return the files in which this rank's weights rest; none without a disk tier."""
    store = engine.context.tiers.weight
    return store.files if isinstance(store, DiskStore | FileStore) else []


def disk_rate(files: Sequence[BlockFile]) -> float:
    """Return bytes per second of reading files in order, past the page cache, as the engine."""
    rooms = [host_room(REQUEST_NBYTES, Ledger()) for _ in range(NUM_FETCHERS + 1)]
    sizes = [os.fstat(file.fd).st_size for file in files]
    requests = [
        (file, offset, min(REQUEST_NBYTES, size - offset))
        for file, size in zip(files, sizes, strict=True)
        for offset in range(0, size, REQUEST_NBYTES)
    ]
    requests = requests[: max(1, RATE_NBYTES // REQUEST_NBYTES)]
    begun, deadline = time.perf_counter(), time.perf_counter() + RATE_S

    def read(worker: int) -> int:
        into, done = page_view(rooms[worker].tensor(REQUEST_NBYTES, torch.uint8)), 0
        for file, offset, length in requests[worker :: len(rooms)]:
            file.read(offset, into[:length])
            done += length
            if time.perf_counter() > deadline:
                break
        return done

    with ThreadPoolExecutor(len(rooms)) as pool:
        nbytes = sum(pool.map(read, range(len(rooms))))
    return nbytes / max(1e-9, time.perf_counter() - begun)


def copy_rate(device: torch.device) -> float:
    """Return bytes per second of copies from page-locked memory to an accelerator."""
    near: Any = torch.empty(RATE_NBYTES // 4, dtype=torch.uint8, device=device)
    far = torch.empty(RATE_NBYTES // 4, dtype=torch.uint8, pin_memory=True)
    near.copy_(far, non_blocking=True)
    torch.accelerator.synchronize(device)
    begun = time.perf_counter()
    for _ in range(4):
        near.copy_(far, non_blocking=True)
    torch.accelerator.synchronize(device)
    return RATE_NBYTES / max(1e-9, time.perf_counter() - begun)
