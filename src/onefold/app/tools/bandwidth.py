"""Measure how fast this machine moves bytes, and how much of that speed the engine reaches."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold.app.measure import (
    REQUEST_NBYTES,
    BandwidthRow,
    Measured,
    in_rounds,
    move_all,
    request_views,
    requests_of,
    waiter,
)
from onefold.compose.tiers import is_memory
from onefold.config import Offload
from onefold.engine.blocks import BLOCK_NUMEL
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError
from onefold.layout.rows import Layout
from onefold.text import format_bytes
from onefold.tier import accelerator
from onefold.tier.cpu import HostStore
from onefold.tier.disk import BlockFile, DiskStore, SwapFile
from onefold.tier.host import MIB, free_host_nbytes, usable_cores
from onefold.tier.workers import NUM_DISK_STEPPERS
from onefold.wire.message_cut import MessageLayout
from onefold.wire.transport import Reduction
from onefold.wire.world import World

ROW = 1024
"""Elements in a row of a measured weight: one page of fp32, so no block is padded."""

UNIT_ROWS = 4 * BLOCK_NUMEL // ROW
"""Rows of a stepped unit. As in training, blocks of the next unit follow while this one ends."""

ADAM_NBYTES = 28
"""Bytes moved per parameter by a step in memory: AdamW reads gradient, weight and two moments and
writes the last three. In bf16 the narrow gradient and weight make up for the master."""

STATE_NBYTES = 12
"""Bytes on disk per parameter: fp32 weight, exp_avg, exp_avg_sq. A step reads and writes all."""

CPU_NBYTES, DISK_NBYTES, LINK_NBYTES = 64 * MIB, 96 * MIB, 32 * MIB
"""Bytes of one tensor, of the state on disk, and of a gathered buffer, where `--mib` is absent."""

CPU_TENSORS, LINK_TENSORS = 14, 6
"""Tensors of the measured size that are alive at once: in the process, and in each rank."""

NUM_REGIONS = 4
"""Weights in a message: the large ones of a transformer block."""

LR = 1e-9
"""A learning rate so small that any number of steps leaves the weights in place."""

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

DAY_S = 24 * 60 * 60


@dataclass(frozen=True, slots=True)
class Ask:
    """The user's flags."""

    seconds: float  # for all rounds together, about
    nbytes: int | None = None
    threads: int | None = None


# the engine's step


class Stepped:
    """A module whose optimizer the engine steps off the device, as in training."""

    def __init__(self, rows: int, dtype: torch.dtype, offload: Offload | str) -> None:
        self.numel = rows * ROW
        self.module = nn.ModuleList(
            nn.Linear(ROW, min(UNIT_ROWS, rows - start), bias=False, dtype=dtype)
            for start in range(0, rows, UNIT_ROWS)
        )
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LR)
        with warnings.catch_warnings():  # a note of the result says the same
            warnings.filterwarnings("ignore", message="the disk tier at .* lies in memory")
            onefold.shard(self.module, self.optimizer, units=list(self.module), offload=offload)
        for parameter in self.module.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.units = engine_of(self.module).units
        self.tiers = self.units[0].context.tiers

    def row(self, name: str, nbytes: int, of: str) -> BandwidthRow:
        """Return the row of a step that moves `nbytes` per parameter."""
        step, finish = self.optimizer.step, self.finish
        return BandwidthRow(name, nbytes * self.numel, step, of, self.numel, finish)

    def finish(self) -> None:
        """Wait until every unit is stepped and back in its tier. Raises `TierError`."""
        for unit in self.units:
            unit.wait_step()


# cpu


def measure_cpu(ask: Ask) -> Measured:
    """Measure a copy in memory, torch's fused AdamW, and the engine's steps on the CPU."""
    threads = ask.threads or usable_cores()
    nbytes = ask.nbytes or min(CPU_NBYTES, free_host_nbytes() // CPU_TENSORS // 2)
    check_memory(CPU_TENSORS * nbytes)
    rows = max(1, nbytes // 4 // ROW)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wide = Stepped(rows, torch.float32, "optimizer")
        narrow = Stepped(rows, torch.bfloat16, "optimizer")
        numel, source = wide.numel, torch.randn(wide.numel)
        parameter = nn.Parameter(source.clone())
        parameter.grad = torch.randn(numel)
        step = torch.optim.AdamW([parameter], lr=LR, fused=True).step
        table = [
            BandwidthRow("copy", 8 * numel, partial(torch.empty(numel).copy_, source)),
            BandwidthRow("adamw", ADAM_NBYTES * numel, step, parameters=numel),
            wide.row("step_fp32", ADAM_NBYTES, "adamw"),
            narrow.row("step_bf16", ADAM_NBYTES, "adamw"),
        ]
        measured = in_rounds(table, ask.seconds)
    finally:
        torch.set_num_threads(before)
    engine_threads = wide.tiers.steppers.num_threads
    return {"target": "cpu", "nbytes": 4 * numel, "parameters": numel, "threads": threads,
            "engine_threads": engine_threads, "notes": list(_cache_notes(16 * numel)),
            **measured}  # fmt: skip


def _cache_notes(nbytes: int) -> Iterator[str]:
    """Warn if all tensors of an optimizer fit into the last cache, where its size is known."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    largest = max((int(size[:-1]) * 1024 for size in sizes if size[:-1].isdigit()), default=0)
    if nbytes <= 2 * largest:
        yield (
            f"{format_bytes(nbytes)} of state may stay in a cache of {format_bytes(largest)}: "
            "these are not rates of memory, raise --mib"
        )


def check_memory(nbytes: int) -> None:
    """Refuse tensors that do not fit into this host's free memory."""
    free = free_host_nbytes()
    wanted = f"{format_bytes(nbytes)} of free memory"
    _require(nbytes <= free, wanted, format_bytes(free), "a smaller --mib")


def _require(is_met: bool, wanted: str, got: str, hint: str) -> None:
    if not is_met:
        raise ConfigError(wanted, got, hint=hint)


# disk


def measure_disk(paths: Sequence[Path], ask: Ask) -> Measured:
    """Measure folders. The files there have no names: they vanish with this process."""
    threads = ask.threads or max(usable_cores(), NUM_DISK_STEPPERS)
    nbytes = ask.nbytes or DISK_NBYTES
    _check_room(paths, nbytes)
    tier = Offload(optimizer="disk", parameters="disk", disk=list(paths))
    stepped = Stepped(max(1, nbytes // STATE_NBYTES // ROW), torch.float32, tier)
    store = stepped.tiers.state
    assert isinstance(store, DiskStore), "the optimizer's states are on disk"
    before = 0, 0
    for _ in range(2):  # blocks that no step has written read as zeros without a request
        before = store.moved_nbytes
        stepped.optimizer.step()
        stepped.finish()
    both = zip(before, store.moved_nbytes, strict=True)
    read, written = ((late - early) / stepped.numel for early, late in both)
    for file in store.files:
        os.fsync(file.fd)  # the first weights went through the page cache
    with ThreadPoolExecutor(threads, "onefold-bench") as pool:
        step = stepped.row("step", 2 * STATE_NBYTES, "mixed")
        measured = in_rounds([*_request_rows(store.files, pool, threads), step], ask.seconds)
    per_day = written * measured["rates"]["step"]["parameters_per_s"] * DAY_S
    return {
        "target": "disk",
        "nbytes": STATE_NBYTES * stepped.numel,
        "parameters": stepped.numel,
        "threads": threads,
        "engine_threads": stepped.tiers.steppers.num_threads,
        "paths": [{"path": str(file.path), "is_direct": file.is_direct,
                   "is_memory": is_memory(file.path)} for file in store.files],
        "wear": {"read_per_parameter": read, "written_per_parameter": written,
                 "written_per_day": per_day},
        "notes": list(_path_notes(store.files)),
        **measured,
    }  # fmt: skip


def _request_rows(
    files: Sequence[BlockFile], pool: ThreadPoolExecutor, threads: int
) -> Iterator[BandwidthRow]:
    """Yield reads, writes, and half of each, of the files in which the engine keeps its state."""
    requests, views = requests_of(files), request_views(threads)
    nbytes = sum(length for _, _, length in requests)
    shares: dict[str, Callable[[int], bool]] = {
        "read": lambda _: True, "write": lambda _: False, "mixed": lambda at: at % 2 == 0,
    }  # fmt: skip
    for name, reads in shares.items():
        yield BandwidthRow(name, nbytes, partial(move_all, pool, requests, views, reads))


def _check_room(paths: Sequence[Path], nbytes: int) -> None:
    """Refuse folders that cannot hold `nbytes` of state."""
    for path in paths:
        got = "a file" if path.exists() else "nothing there"
        hint = "create it first, on the disk to be measured"
        _require(path.is_dir(), f"--path to be a folder: {path}", got, hint)
        hint = "name a folder that this user may write to"
        can_write = os.access(path, os.W_OK | os.X_OK)
        _require(can_write, f"a folder to write to at {path}", "one that is read-only", hint)
        needed, free = nbytes // len(paths) + 4 * REQUEST_NBYTES, shutil.disk_usage(path).free
        wanted = f"{format_bytes(needed)} of free space at {path}"
        _require(needed <= free, wanted, format_bytes(free), "a smaller --mib, or another --path")
    check_memory(nbytes)  # gradients, and weights until they are on the disk: two thirds


def _path_notes(files: Sequence[SwapFile]) -> Iterator[str]:
    for file in files:
        if is_memory(file.path):
            yield f"{file.path} lies in memory (tmpfs): name a folder on a disk with --path"
        elif not file.is_direct:
            yield f"{file.path} refuses O_DIRECT: rates may be those of the page cache"


# links


def measure_link(world: World, ask: Ask) -> Measured:
    """Measure gathers and reductions as units do them; a collective.

    A rate counts the bytes that one rank receives. Its ceiling is a bare exchange of as many bytes.
    """
    hint = "run it without torchrun, which starts two, or with more processes"
    _require(world.world_size > 1, "at least 2 ranks with a link between them", "1", hint)
    threads = ask.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    rows = max(1, (ask.nbytes or LINK_NBYTES) // 4 // ROW // NUM_REGIONS // world.world_size)
    shape = (rows * world.world_size, ROW)
    layout = Layout.build([(str(index), shape) for index in range(NUM_REGIONS)], world.world_size)
    measured = in_rounds(
        list(_link_rows(world, layout)), ask.seconds, lambda rounds: max(world.group.gather(rounds))
    )
    backend = "nccl" if world.group.is_nccl else "gloo"
    return {"target": "link", "nbytes": 4 * layout.full_numel, "threads": threads,
            "ranks": world.world_size, "backend": backend, "notes": [], **measured}  # fmt: skip


def _link_rows(world: World, layout: Layout) -> Iterator[BandwidthRow]:
    group, rank, world_size = world.group, world.rank, world.world_size
    zeros = partial(torch.zeros, device=world.device)
    probe = onefold.shard(nn.Linear(1, 1, device=world.device), mesh=group.handle)
    transport = engine_of(probe).context.transport
    full = zeros(layout.full_numel)
    received = len(full) // world_size * (world_size - 1)
    others = [0 if peer == rank else len(full) // world_size for peer in range(world_size)]
    arriving = zeros(received)
    cut = MessageLayout(layout.slots, [slot.full_offset for slot in layout.slots], group, 4)
    spread = MessageLayout(layout.slots, None, group, 4)
    partials = [full[slot.full_offset :][: slot.numel] for slot in layout.slots]
    out = [zeros(slot.piece_numel(rank)) for slot in layout.slots]
    reduction = Reduction(partials, spread, out, [True] * len(out), "reduce")
    ways: dict[str, Callable[[], object]] = {
        "exchange": lambda: group.all_to_all(arriving, full[:received], others, others).wait(),
        "gather": lambda: transport.gather(full, cut, "gather").wait(),
        "reduce_scatter": lambda: transport.reduce_scatter(reduction).wait(),
    }
    for name, action in ways.items():
        of = "" if name == "exchange" else "exchange"
        yield BandwidthRow(name, 4 * received, action, of, finish=waiter(world.device))


def measure_copies(ask: Ask) -> dict[str, Any]:
    """Return the rates of copies between page-locked memory and a GPU, if there is one."""
    kind = accelerator.kind()
    if kind is None:
        return {}
    gpu = torch.zeros((ask.nbytes or LINK_NBYTES) // 4, device=kind)
    host = HostStore(gpu.nbytes).allocate(len(gpu), torch.float32).tensor.zero_()
    ways = {"h2d": (gpu, host), "d2h": (host, gpu)}
    table = [
        BandwidthRow(
            f"{name}_pinned", gpu.nbytes, partial(target.copy_, source, non_blocking=True),
            finish=waiter(gpu.device),
        )
        for name, (target, source) in ways.items()
    ]  # fmt: skip
    return in_rounds(table, ask.seconds)["rates"]
