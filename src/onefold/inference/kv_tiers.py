"""What the layers of one KV cache share: budgets, files, threads, slots and one read-ahead.

Full blocks of tokens go to the first tier with room, and stay there: the computing device, then
page-locked CPU memory (accelerators only), then files. Blocks lie one after another in *runs*,
which double up to `RUN_NBYTES`, so that a layer's blocks are read in few large requests.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onefold.errors import StateError, TierError
from onefold.layout.ledger import Kind, Ledger
from onefold.tier.area import Lease
from onefold.tier.disk import SwapFile
from onefold.tier.scratch import PIECE_NBYTES, DiskScratch, HostScratch, Scratch, Transfer
from onefold.tier.slots import Room, SlotPool, device_room
from onefold.tier.workers import Workers

RUN_NBYTES = 2 * PIECE_NBYTES
"""Bytes of the longest run of blocks: two disk requests, which are under way at the same time."""

NUM_READERS = 4
"""Threads that read and write blocks: requests that the disk has at a time."""


@dataclass(slots=True)
class BlockRun:
    """Blocks of one layer, one after another in one tier.

    `rows` holds, for each sequence of the batch now, its row when the blocks were written; None if
    that is the same row.
    """

    tier: str
    place: Room | Lease
    scratch: Scratch | None  # None: on the computing device
    batch: int  # rows that were written
    capacity: int  # blocks
    filled: int = 0
    rows: tuple[int, ...] | None = None

    def fill(self, count: int) -> None:
        """So many more blocks are written (negative: dropped)."""
        self.filled += count

    def select(self, rows: Sequence[int]) -> None:
        """Let sequence i of a new batch continue sequence `rows[i]`."""
        self.rows = tuple(rows if self.rows is None else (self.rows[row] for row in rows))

    @property
    def block_nbytes(self) -> int:
        return self.place.nbytes // self.capacity

    @property
    def wanted_nbytes(self) -> int:
        """Bytes of a slot for this run, which stays long enough while the run fills."""
        return self.place.nbytes if self.is_open else self.filled * self.block_nbytes

    @property
    def is_open(self) -> bool:
        """True if the next block may follow here."""
        return self.filled < self.capacity and self.rows is None


class FarRead:
    """The far blocks of one layer, on their way into one slot on the computing device."""

    def __init__(self, runs: Sequence[BlockRun], slots: SlotPool) -> None:
        self._slots = slots
        self._slot = slots.take_slot(sum(run.wanted_nbytes for run in runs))
        self._arriving: list[tuple[Tensor, Transfer]] = []
        at = 0
        for run in runs:
            assert run.scratch is not None
            assert isinstance(run.place, Lease)
            into = self._slot.tensor(run.filled * run.block_nbytes, torch.uint8, at)
            self._arriving.append((into, run.scratch.read_into(run.place, into)))
            at += into.nbytes

    def arrived(self) -> Iterator[Tensor]:
        """Wait for each run in turn; yield its bytes. Raises `TierError`."""
        for into, transfer in self._arriving:
            transfer.wait()
            yield into

    def end(self) -> None:
        """Give the slot back, when no transfer writes to it."""
        arriving, self._arriving = self._arriving, []
        for _, transfer in arriving:
            transfer.abandon()
        for _, transfer in arriving:
            with suppress(TierError):  # of bytes that nobody wants
                transfer.wait()
        if arriving:
            self._slots.give(self._slot)

    def __del__(self) -> None:
        for _, transfer in self._arriving:
            transfer.abandon()


class KVTiers:
    """Budgets, files, threads, slots and the read-ahead of one cache.

    Args:
        budget: bytes of blocks on the computing device.
        cpu_budget: bytes of blocks in CPU memory: page-locked, if an accelerator computes.
        paths: folders of the disk tier, whose bandwidths add; none: no disk tier.
        rank: for messages.
        num_layers: among which budgets are divided evenly; 0: not known, the first come has all.
    """

    def __init__(
        self, budget: int, cpu_budget: int, paths: Sequence[Path], rank: int, num_layers: int
    ) -> None:
        self.ledger = Ledger()
        self._num_layers = num_layers
        self._budget, self._cpu_budget = budget, cpu_budget
        self._paths, self._rank = paths, rank
        self._ahead: tuple[int, FarRead] | None = None
        self._closed_nbytes = 0, 0  # read from, and written to, files before the last `close`
        self._begin_empty()

    def _begin_empty(self) -> None:
        self.device: torch.device | None = None
        self.slots = SlotPool.on_host(self.ledger)
        self.files = [SwapFile(path, self._rank) for path in self._paths]
        self._disk: DiskScratch | None = None
        self._budgets: list[tuple[str, int, Scratch | None]] = []

    def open(self, device: torch.device) -> None:
        """Begin to serve the computing device; again is nothing."""
        if self.device == device:
            return
        if self.device is not None:
            wanted = f"keys and values on {self.device}, as those before"
            hint = "a cache serves one device; reset() it before another model uses it"
            raise StateError(wanted, f"some on {device}", hint=hint)
        self.device, ledger, on_host = device, self.ledger, self.slots
        if device.type == "cpu":  # both budgets are of the same memory
            self._budgets = [("cpu", self._budget + self._cpu_budget, None)]
        else:
            self.slots = SlotPool(lambda nbytes: device_room(nbytes, device, ledger))
            self._budgets = [("device", self._budget, None)]
            if self._cpu_budget:
                host = HostScratch(device, ledger, Kind.CACHE)
                self._budgets.append((host.name, self._cpu_budget, host))
        if self.files:
            workers = Workers(NUM_READERS, "onefold-kv", device=device)
            self._disk = DiskScratch(self.files, workers, on_host, device, ledger, Kind.CACHE)

    def close(self, num_layers: int) -> None:
        """Free the files' space; start anew with this many layers, which hold no runs now."""
        self._num_layers = num_layers
        self.drop_ahead()
        self._closed_nbytes = self.moved_nbytes
        self._begin_empty()

    @property
    def moved_nbytes(self) -> tuple[int, int]:
        """Bytes read from, and written to, all files since the beginning."""
        read, written = self._closed_nbytes
        read += sum(file.read_nbytes for file in self.files)
        return read, written + sum(file.written_nbytes for file in self.files)

    def new_run(
        self, held: Sequence[BlockRun], batch: int, block_nbytes: int, wanted: int
    ) -> BlockRun:
        """Take room for at most `wanted` blocks of a layer that has the runs `held`."""
        for tier, budget, scratch in self._budgets:
            usage = self.ledger.usage.get((Kind.CACHE, tier))
            left = budget - (usage.now if usage else 0)
            if self._num_layers:
                own = sum(run.place.nbytes for run in held if run.tier == tier)
                left = min(left, budget // self._num_layers - own)
            count = min(wanted, left // block_nbytes)
            if count > 0 and scratch is None:
                room = self.room(count * block_nbytes, Kind.CACHE)
                return BlockRun(tier, room, None, batch, count)
            if count > 0 and scratch is not None:
                lease = scratch.lease_place(count * block_nbytes)
                return BlockRun(tier, lease, scratch, batch, count)
        if self._disk is None:
            raise TierError(
                f"room for {block_nbytes:,} more bytes of keys and values",
                "budgets that are used up, and no disk tier",
                where=f"rank {self._rank}",
                hint="a larger budget=, or disk=PATH",
            )
        lease = self._disk.lease_place(wanted * block_nbytes)
        return BlockRun("disk", lease, self._disk, batch, wanted)

    def room(self, nbytes: int, kind: Kind) -> Room:
        """Allocate memory of the computing device, counted in the ledger."""
        try:
            flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            wanted = f"{nbytes:,} bytes on {self.device} for keys and values"
            hint = "a smaller budget=, or a smaller batch"
            raise TierError(wanted, str(error).splitlines()[0], hint=hint) from error
        return Room(flat, self._budgets[0][0], self.ledger, kind)

    def read_ahead(self, layer: int, runs: Sequence[BlockRun]) -> None:
        """Begin to read a layer's far blocks, unless that has begun."""
        far = [run for run in runs if run.scratch is not None]
        if self._ahead is not None and self._ahead[0] == layer:
            return
        self.drop_ahead()
        if far:
            self._ahead = layer, FarRead(far, self.slots)

    def arriving(self, layer: int, runs: Sequence[BlockRun]) -> FarRead | None:
        """Return the transfer of a layer's far blocks, for the caller to end; None without any."""
        self.read_ahead(layer, runs)
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead else None

    def drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].end()
