"""Measure the rates of this machine: memory, disks, links, products and the host's own calls.

All who print or use a rate measure it here, by one method. A `RateRow` is one action. `in_rounds`
runs the rows in turn: two rounds of warm-up, then an odd number of rounds. A rate is the median of
its rounds. So a machine that slows down slows all rows, and neither a burst nor a pause counts.

    copy        bytes that torch's threads read and write in memory
    adam        28 bytes a parameter: AdamW reads gradient, weight and two moments, writes three
    products    operations of matrix products
    read, write, mixed   bytes to and from reserved blocks of files, past the page cache
    durable     bytes of a new file, written through the page cache and then forced to the disk
    h2d, d2h, both       bytes one way between page-locked memory and an accelerator
    exchange    bytes that a rank receives in a bare exchange
    gather, reduce_scatter   the same, as units do it
    launch      one small operation of torch: on an accelerator, until its kernel is queued
    call        one call of a Python function
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from onefold.engine.blocks import BLOCK_NUMEL
from onefold.layout.ledger import Ledger
from onefold.layout.rows import Layout
from onefold.text import format_rate, format_seconds
from onefold.tier import accelerator
from onefold.tier.disk import BlockFile
from onefold.tier.host import MIB, free_host_nbytes
from onefold.tier.slots import host_room
from onefold.tier.store import PAGE_NBYTES
from onefold.tier.workers import NUM_DISK_STEPPERS, Workers
from onefold.wire.collectives import Group
from onefold.wire.message_cut import MessageLayout
from onefold.wire.transport import Reduction, Transport

LEAST_ROUNDS, MOST_ROUNDS = 3, 99
"""Odd numbers, so that the median is one of the rounds."""

ADAM_NBYTES = 28
"""Bytes of memory traffic of an AdamW step, per fp32 parameter. In bf16 the narrow gradient and
weight make up for the master."""

REQUEST_NBYTES = 4 * BLOCK_NUMEL
"""Bytes of one read or write: a step's block of fp32 state."""

DISK_NBYTES, DURABLE_NBYTES, CROSSING_NBYTES = 128 * MIB, 64 * MIB, 64 * MIB
LINK_NBYTES = {"cpu": 8 * MIB, "cuda": 64 * MIB}
"""Bytes that each two ranks exchange."""
WIDTHS = {"cpu": 512, "cuda": 4096}
"""Rows of the square matrices of a product."""
MOST_CORES = 16
"""Cores that step. More would be bound by memory, and need more than some hosts have."""
CALLS = 1000
"""Launches, or calls, of one action."""
WAYS = ("h2d", "d2h", "both")
NUM_REGIONS, ROW = 4, 1024
"""Weights in a message: the large ones of a transformer block; elements of their rows."""

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class RateRow:
    """`action` moves, or does, `amount`; `finish` waits for work that the action left behind."""

    name: str
    amount: int
    action: Callable[[], object]
    unit: str = "B"  # "B", "FLOP" or "call"
    finish: Callable[[], object] = lambda: None

    def seconds(self) -> float:
        """Time one action."""
        begun = time.perf_counter()
        self.action()
        self.finish()
        return time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class Rate:
    """An amount per second: the median of some rounds, the lowest and the highest."""

    per_s: float
    lowest: float
    highest: float
    unit: str
    rounds: int

    def __str__(self) -> str:
        return described(self.per_s, self.unit)


def described(per_s: float, unit: str) -> str:
    """Describe an amount per second: "12.3 GB/s", "94.0 GFLOP/s"; of calls, the time of one."""
    if unit == "call":
        return format_seconds(1 / per_s)
    return format_rate(per_s).replace("B", unit)


def in_rounds(
    rows: Sequence[RateRow], seconds: float = 0.0, agree: Callable[[int], int] = lambda n: n
) -> dict[str, Rate]:
    """Return the rates of rows by name, measured for about `seconds`, in three rounds at least.

    `agree` gives all ranks the same number of rounds.
    """
    for row in rows:
        row.seconds()
    once = sum(row.seconds() for row in rows)
    rounds = agree(min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / max(once, 1e-6)))) | 1)
    found: dict[str, list[float]] = {row.name: [] for row in rows}
    for _ in range(rounds):
        for row in rows:
            found[row.name].append(row.amount / max(row.seconds(), 1e-9))
    return {
        row.name: Rate(median(own), min(own), max(own), row.unit, rounds)
        for row, own in zip(rows, found.values(), strict=True)
    }


def waiter(device: torch.device) -> Callable[[], object]:
    """Return a function that waits until a device has done its work."""
    return lambda: accelerator.synchronize(device)


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "cuda"


# memory and compute


def beyond_caches() -> int:
    """Return bytes that no cache holds: twice the largest, if memory has room for them."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    largest = max((int(size[:-1]) * 1024 for size in sizes if size[:-1].isdigit()), default=0)
    return min(max(128 * MIB, 2 * largest), free_host_nbytes() // 16)


def copy(device: torch.device) -> RateRow:
    """A copy from memory to memory of a device."""
    source = torch.ones(beyond_caches() // 2, dtype=torch.uint8, device=device)
    act = partial(torch.empty_like(source).copy_, source)
    return RateRow("copy", 2 * source.nbytes, act, finish=waiter(device))


def products(device: torch.device) -> RateRow:
    """Matrix products: in fp32 on the CPU, in bf16 on an accelerator."""
    width, dtype = WIDTHS[_kind(device)], torch.float32
    if device.type != "cpu":
        dtype = torch.bfloat16
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    act = partial(torch.mm, left, right)
    return RateRow("products", 2 * width**3, act, "FLOP", waiter(device))


def adam(cores: tuple[int, ...]) -> RateRow:
    """AdamW in fp32: each core but the main thread's steps parameters of its own."""
    cores = cores[1:][:MOST_CORES] or cores
    workers = Workers(len(cores), "onefold-measure", cores)
    numel = beyond_caches() // 16 // len(cores)
    streams = [[torch.zeros(numel) for _ in range(4)] for _ in cores]
    count = torch.ones(())

    def step(own: list[torch.Tensor]) -> None:
        p, g, m, v = ([stream] for stream in own)
        torch._fused_adamw_(
            p, g, m, v, [], [count], lr=1e-9, beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8,
            amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip

    def act() -> None:
        for task in [workers.give(partial(step, own)) for own in streams]:
            task.wait()

    return RateRow("adam", ADAM_NBYTES * numel * len(cores), act)


def launch() -> RateRow:
    """A small operation of torch: with an accelerator, until its kernel is queued."""
    fill = torch.zeros(1, device=accelerator.kind() or "cpu").zero_

    def act() -> None:
        for _ in range(CALLS):
            fill()

    return RateRow("launch", CALLS, act, "call")


def call() -> RateRow:
    """A call of a Python function that does nothing."""

    def nothing() -> None: ...

    def act() -> None:
        for _ in range(CALLS):
            nothing()

    return RateRow("call", CALLS, act, "call")


# disks


def blocks_of(files: Sequence[BlockFile], name: str) -> RateRow:
    """`read`, `write` or `mixed`, half of each: the first blocks of files, the files in turn.

    Threads move them as in a step from disk. Written numbers are random, as a drive may compress
    zeros, and valid weights and moments.
    """
    wants_read: Callable[[int], bool] = {
        "read": lambda _: True, "write": lambda _: False, "mixed": lambda number: number % 2 == 0,
    }[name]  # fmt: skip
    requests = sorted(
        (at, index, min(REQUEST_NBYTES, size - at) // PAGE_NBYTES * PAGE_NBYTES)
        for index, size in enumerate(os.fstat(file.fd).st_size for file in files)
        for at in range(0, size, REQUEST_NBYTES)
    )[: -(-DISK_NBYTES // REQUEST_NBYTES)]
    nbytes = NUM_DISK_STEPPERS * REQUEST_NBYTES
    memory = host_room(nbytes, Ledger()).tensor(nbytes // 4, torch.float32).uniform_()
    views = [part.numpy().data.cast("B") for part in memory.chunk(NUM_DISK_STEPPERS)]

    def work(waiting: Iterator[tuple[int, int, int]], view: memoryview) -> None:
        for at, index, length in waiting:  # each free thread takes the next
            file = files[index]
            move = file.read_block if wants_read(at // REQUEST_NBYTES) else file.write_block
            move(at, view[:length])

    def act() -> None:
        with ThreadPoolExecutor(NUM_DISK_STEPPERS) as pool:
            list(pool.map(partial(work, iter(requests)), views))

    return RateRow(name, sum(length for *_, length in requests), act)


def durable(folder: str | Path) -> RateRow:
    """A new file, written and on the disk itself, as a checkpoint is in the end."""
    block = os.urandom(min(8 * MIB, DURABLE_NBYTES))
    number = DURABLE_NBYTES // len(block)

    def act() -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(number):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    return RateRow("durable", number * len(block), act)


# links


def crossing(device: torch.device, name: str) -> RateRow:
    """Copies between page-locked memory and a device: `h2d`, `d2h`, or `both` at once."""
    numel = CROSSING_NBYTES // 4
    near = [torch.zeros(numel, device=device) for _ in range(2)]
    far = [accelerator.pinned(numel, torch.float32).zero_() for _ in range(2)]
    lanes = [nullcontext() if device.type == "cpu" else accelerator.new(device) for _ in range(2)]
    ways = [(near[0], far[0], lanes[0])] * (name != "d2h")
    ways += [(far[1], near[1], lanes[1])] * (name != "h2d")

    def act() -> None:
        for target, source, lane in ways:
            with lane:
                target.copy_(source, non_blocking=True)

    finish = waiter(device)
    finish()  # the zeros are there before another stream reads or writes them
    return RateRow(name, 4 * numel, act, finish=finish)


def exchange(group: Group, device: torch.device, peers: Sequence[int]) -> RateRow:
    """A bare exchange of `LINK_NBYTES` with each of `peers`, none of them this rank. A collective.

    Ranks without a partner take part, too.
    """
    nbytes = LINK_NBYTES[_kind(device)]
    numels = [nbytes if rank in peers else 0 for rank in range(group.world_size)]
    sent = torch.zeros(sum(numels), dtype=torch.uint8, device=device)
    act = partial(group.all_to_all, torch.empty_like(sent), sent, numels, numels)
    return RateRow("exchange", sum(numels), lambda: act().wait(), finish=waiter(device))


def unit_messages(transport: Transport, device: torch.device) -> list[RateRow]:
    """`gather` and `reduce_scatter` of a unit as the engine does them. Collectives."""
    group = transport.group
    rows = max(1, LINK_NBYTES[_kind(device)] // 4 // ROW // NUM_REGIONS) * group.world_size
    regions = [(str(index), (rows, ROW)) for index in range(NUM_REGIONS)]
    slots = Layout.build(regions, group.world_size).slots
    full = torch.zeros(NUM_REGIONS * rows * ROW, device=device)
    cut = MessageLayout(slots, [slot.full_offset for slot in slots], group, 4)
    spread = MessageLayout(slots, None, group, 4)
    partials = [full[slot.full_offset :][: slot.numel] for slot in slots]
    out = [torch.zeros(slot.piece_numel(group.rank), device=device) for slot in slots]
    reduction = Reduction(partials, spread, out, [True] * len(out), "reduce")
    received = full.nbytes // group.world_size * (group.world_size - 1)
    acts: dict[str, Callable[[], object]] = {
        "gather": lambda: transport.gather(full, cut, "gather").wait(),
        "reduce_scatter": lambda: transport.reduce_scatter(reduction).wait(),
    }
    finish = waiter(device)
    return [RateRow(name, received, act, finish=finish) for name, act in acts.items()]
