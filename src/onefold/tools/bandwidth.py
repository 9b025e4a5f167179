"""Measure how fast this machine moves bytes, and how much of that speed the engine reaches.

A measurement is a list of `BandwidthRow`s. `in_rounds` runs the rows in turn, round after round: a
machine that slows down slows every row alike. A rate is the median of its rounds, and names the
rate that is its ceiling. Disks and links have files of their own beside this one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import onefold
from onefold.config import Offload
from onefold.engine.blocks import BLOCK_NUMEL
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError, expected
from onefold.host import MIB, free_host_nbytes, in_bytes, usable_cores, versions

MOST_ROUNDS, LEAST_ROUNDS = 7, 3
"""Odd numbers, so that the median is one of the rounds."""

ADAM_NBYTES = 28
"""Bytes moved per parameter by a step in memory: AdamW reads gradient, weight and two moments and
writes the last three. In bf16 the narrow gradient and weight make up for the master."""

ROW = 1024
"""Elements in a row of the stepped module: one page of fp32, so that no block is padded."""

UNIT_NUMEL = 4 * BLOCK_NUMEL
"""Elements of a unit. As in training, blocks of the next unit follow while this one ends."""

LR = 1e-9
"""A learning rate so small that any number of steps leaves the weights in place."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The user's flags."""

    seconds: float  # for all rounds together, about
    nbytes: int | None = None  # state on the paths, or one tensor; None: to suit the seconds
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """One kind of traffic, in bytes per second: the median round, the slowest and the fastest."""

    group: str  # for people: "read"
    way: str  # "plain loop"
    bytes_per_s: float
    lowest: float
    highest: float
    parameters_per_s: float | None  # of an optimizer's step
    of: str  # name of the rate that is its ceiling; empty: none
    share: float | None  # of that ceiling


@dataclass(frozen=True, slots=True)
class PathFacts:
    """A measured folder."""

    path: str
    is_direct: bool  # O_DIRECT: requests bypass the page cache
    is_memory: bool  # tmpfs


@dataclass(frozen=True, slots=True)
class Wear:
    """Bytes that steps move on disk, as the swap files count them."""

    read_per_parameter: float  # and step
    written_per_parameter: float
    written_per_day: float  # by steps without a pause


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """The result of `onefold bench`."""

    target: str
    nbytes: int  # state on the paths (disk), one fp32 tensor (cpu), a gathered buffer (link)
    parameters: int | None  # stepped by the engine
    threads: int  # of every row except the engine's step
    engine_threads: int | None  # the engine's workers; the waiting thread steps as well
    rounds: int
    seconds: float  # spent in the rounds
    rates: dict[str, Rate]
    ranks: int | None = None
    backend: str | None = None
    paths: list[PathFacts] = field(default_factory=list)
    wear: Wear | None = None
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=versions)

    @staticmethod
    def from_rank(fields: dict[str, Any]) -> Bandwidths:
        """Rebuild a rank's result from JSON. Ranks measure neither paths nor wear."""
        rates = {name: Rate(**rate) for name, rate in fields["rates"].items()}
        return Bandwidths(**{**fields, "rates": rates})


def require(is_met: bool, wanted: str, got: str, hint: str) -> None:
    """Raise `ConfigError` unless a condition is met."""
    if not is_met:
        raise ConfigError(expected(wanted, got, hint=hint))


def check_memory(nbytes: int) -> None:
    """Refuse tensors that do not fit into this host's free memory."""
    free = free_host_nbytes()
    wanted = f"{in_bytes(nbytes)} of free memory"
    require(nbytes <= free, wanted, in_bytes(free), "a smaller --mib")


# rounds


@dataclass(frozen=True, slots=True)
class BandwidthRow:
    """One row: `action` moves `nbytes`; `finish` waits for work that the action left behind."""

    name: str
    group: str
    way: str
    nbytes: int
    action: Callable[[], object]
    of: str = ""
    parameters: int = 0  # stepped by one action
    finish: Callable[[], object] = lambda: None

    def seconds(self, count: int) -> float:
        """Time `count` actions."""
        begun = time.perf_counter()
        for _ in range(count):
            self.action()
        self.finish()
        return time.perf_counter() - begun


def in_rounds(
    rows: Sequence[BandwidthRow],
    seconds: float,
    agree: Callable[[list[int]], list[int]] = lambda counts: counts,
) -> tuple[dict[str, Rate], int, float]:
    """Return rates by name, the number of rounds, and the seconds that the rounds took.

    The first two actions of each row are warm-up. `agree` gives all ranks the same counts.
    """
    for row in rows:
        row.seconds(1)
    once = [row.seconds(1) for row in rows]
    wanted = seconds / MOST_ROUNDS / len(rows)
    counts = [max(1, int(wanted / max(each, 1e-6))) for each in once]
    a_round = sum(count * each for count, each in zip(counts, once, strict=True))
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / max(a_round, 1e-6)))) | 1
    *counts, rounds = agree([*counts, rounds])
    found: dict[str, list[float]] = {row.name: [] for row in rows}
    begun = time.perf_counter()
    for _ in range(rounds):
        for row, count in zip(rows, counts, strict=True):
            found[row.name].append(row.nbytes * count / row.seconds(count))
    took = time.perf_counter() - begun
    return {row.name: _rate(row, found) for row in rows}, rounds, took


def _rate(row: BandwidthRow, found: dict[str, list[float]]) -> Rate:
    own = found[row.name]
    middle = median(own)
    steps = middle * row.parameters / row.nbytes if row.parameters else None
    share = middle / median(found[row.of]) if row.of else None
    return Rate(row.group, row.way, middle, min(own), max(own), steps, row.of, share)


# the engine's step


class Flat(nn.Module):
    """A unit of one weight [rows, ROW] that computes nothing."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel // ROW, ROW, dtype=dtype))


class Stepped:
    """A module whose optimizer the engine steps off the device, as in training."""

    def __init__(self, numel: int, dtype: torch.dtype, offload: Offload | str) -> None:
        self.numel = numel
        full, rest = divmod(numel, UNIT_NUMEL)
        numels = [UNIT_NUMEL] * full + [rest] * (rest > 0)
        self.module = nn.ModuleList([Flat(each, dtype) for each in numels])
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LR)
        with warnings.catch_warnings():  # a note of the report says the same
            warnings.filterwarnings("ignore", message="the disk tier at .* lies in memory")
            onefold.shard(self.module, self.optimizer, units=list(self.module), offload=offload)
        for parameter in self.module.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.units = engine_of(self.module).units
        self.tiers = self.units[0].context.tiers

    def row(self, name: str, way: str, nbytes: int, of: str) -> BandwidthRow:
        """Return the row of a step that moves `nbytes` per parameter."""
        moved = nbytes * self.numel
        return BandwidthRow(name, "AdamW", way, moved, self.step, of, self.numel, self.finish)

    def step(self) -> None:
        """Begin a step. Each unit follows in the background, after its last one."""
        self.optimizer.step()

    def finish(self) -> None:
        """Wait until every unit is stepped and back in its tier. Raises `TierError`."""
        for unit in self.units:
            unit.wait_step()


def thread_notes(threads: int, engine_threads: int) -> Iterator[str]:
    """Warn if a share compares different numbers of threads."""
    if threads != engine_threads:
        yield (
            f"the engine steps with its own {engine_threads} threads, all else here has "
            f"{threads}: shares compare the two"
        )


# cpu

LEAST_TENSOR_NBYTES, MOST_TENSOR_NBYTES = 4 * MIB, 64 * MIB

NUM_TENSORS = 15
"""fp32 tensors alive at once: three are copied and added, and three optimizers hold four each."""

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def measure_cpu(ask: Ask) -> Bandwidths:
    """Measure memory, torch's fused AdamW on one tensor, and the engine's steps on the CPU."""
    threads = ask.threads or usable_cores()
    # a round moves about 100 bytes for each element, at some 5 GB/s or more
    suits = min(MOST_TENSOR_NBYTES, int(ask.seconds * 3e7), free_host_nbytes() // NUM_TENSORS // 2)
    nbytes = ask.nbytes or max(LEAST_TENSOR_NBYTES, suits)
    check_memory(NUM_TENSORS * nbytes)
    numel = max(1, nbytes // 4 // ROW) * ROW
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        narrow = Stepped(numel, torch.bfloat16, "optimizer")
        wide = Stepped(numel, torch.float32, "optimizer")
        rows = [
            *_plain_rows(numel),
            wide.row("step_fp32", "engine, fp32", ADAM_NBYTES, "adamw"),
            narrow.row("step_bf16", "engine, bf16", ADAM_NBYTES, "adamw"),
        ]
        rates, rounds, seconds = in_rounds(rows, ask.seconds)
    finally:
        torch.set_num_threads(before)
    engine_threads = wide.tiers.steppers.num_threads
    notes = [*thread_notes(threads, engine_threads), *_cache_notes(4 * nbytes)]
    return Bandwidths(
        "cpu", 4 * numel, numel, threads, engine_threads, rounds, seconds, rates, notes=notes
    )


def _plain_rows(numel: int) -> list[BandwidthRow]:
    a, b, c = (torch.randn(numel) for _ in range(3))
    parameter = nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel)
    step = torch.optim.AdamW([parameter], lr=LR, fused=True).step
    return [
        BandwidthRow("copy", "memory", "copy", 8 * numel, lambda: a.copy_(b)),
        BandwidthRow(
            "triad", "memory", "a = b + 3 c", 12 * numel, lambda: torch.add(b, c, alpha=3, out=a)
        ),
        BandwidthRow("adamw", "AdamW", "torch", ADAM_NBYTES * numel, step, parameters=numel),
    ]


def _cache_notes(nbytes: int) -> Iterator[str]:
    """Warn if all tensors of an optimizer fit into the last cache, where its size is known."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    largest = max((int(size[:-1]) * 1024 for size in sizes if size[:-1].isdigit()), default=0)
    if nbytes <= 2 * largest:
        yield (
            f"{in_bytes(nbytes)} of state may stay in a cache of {in_bytes(largest)}: these are "
            "not rates of memory, raise --mib"
        )
