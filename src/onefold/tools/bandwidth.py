"""How fast this machine moves bytes, and how much of that the engine's own parts reach: on the CPU.

Every rate stands beside its ceiling. What is compared runs in turn, round after round, so that a
machine that gets slower does so for all; a rate is the median of its rounds. Disks and links have
files of their own beside this one.
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
"""Odd, so that the median is a round that was."""

ADAM_NBYTES = 28
"""Moved per parameter by a step in memory: grad, weight and two moments read, the last three
written; in bf16 with masters the narrow grad and weight make up for the master."""

ROW = 1024
"""Elements of a row of the module that is stepped: one page of fp32, so that no block is padded."""

LR = 1e-9
"""So small that weights stay where they are, however long this goes on."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the user left open or not."""

    seconds: float  # about how long all rounds take together
    nbytes: int | None = None  # state on the paths, or one tensor; None: what suits the seconds
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """One kind of traffic. Bytes per second, of the median round and of the outermost ones."""

    group: str  # for people: "read"
    way: str  # and how: "plain loop"
    bytes_per_s: float
    lowest: float
    highest: float
    parameters_per_s: float | None  # of an optimizer's step
    of: str  # name of the rate that is its ceiling; empty: none
    share: float | None  # of that ceiling


@dataclass(frozen=True, slots=True)
class PathFacts:
    """A folder that was measured."""

    path: str
    is_direct: bool  # O_DIRECT: requests go past the page cache
    is_memory: bool  # tmpfs


@dataclass(frozen=True, slots=True)
class Wear:
    """What steps on disk cost the disk; bytes, counted by the swap files."""

    read_per_parameter: float  # and step
    written_per_parameter: float
    written_per_day: float  # by steps without a pause


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """What `onefold bench` found."""

    target: str
    nbytes: int  # state on the paths (disk), one fp32 tensor (cpu), a gathered buffer (link)
    parameters: int | None  # stepped by the engine
    threads: int  # of everything but the engine's step
    engine_threads: int | None  # its workers; whoever waits for them steps as well
    rounds: int
    seconds: float  # that the rounds took
    rates: dict[str, Rate]
    ranks: int | None = None
    backend: str | None = None
    paths: list[PathFacts] = field(default_factory=list)
    wear: Wear | None = None
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=versions)

    @staticmethod
    def of_rank(told: dict[str, Any]) -> Bandwidths:
        """The same from the JSON that a rank left; paths and wear no rank has."""
        return Bandwidths(**{**told, "rates": {k: Rate(**v) for k, v in told["rates"].items()}})


# rounds


@dataclass(frozen=True, slots=True)
class BandwidthRow:
    """One entry of the rounds: `action` moves `nbytes`; `finish` waits for what it left behind."""

    name: str
    group: str
    way: str
    nbytes: int
    action: Callable[[], object]
    of: str = ""
    parameters: int = 0  # stepped by one action
    finish: Callable[[], object] = lambda: None

    def seconds(self, count: int) -> float:
        """Of so many actions."""
        begun = time.perf_counter()
        for _ in range(count):
            self.action()
        self.finish()
        return time.perf_counter() - begun


def in_rounds(
    entries: Sequence[BandwidthRow],
    seconds: float,
    agree: Callable[[list[int]], list[int]] = lambda counts: counts,
) -> tuple[dict[str, Rate], int, float]:
    """Rates by name, the number of rounds, and the seconds that they took.

    The first two actions of each are warm-up. `agree` gives all ranks the same counts.
    """
    for each in entries:
        each.seconds(1)
    once = [each.seconds(1) for each in entries]
    wanted = seconds / MOST_ROUNDS / len(entries)
    counts = [max(1, int(wanted / max(each, 1e-6))) for each in once]
    a_round = sum(count * each for count, each in zip(counts, once, strict=True))
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / max(a_round, 1e-6)))) | 1
    *counts, rounds = agree([*counts, rounds])
    found: dict[str, list[float]] = {each.name: [] for each in entries}
    begun = time.perf_counter()
    for _ in range(rounds):
        for each, count in zip(entries, counts, strict=True):
            found[each.name].append(each.nbytes * count / each.seconds(count))
    return _rates(entries, found), rounds, time.perf_counter() - begun


def _rates(entries: Sequence[BandwidthRow], found: dict[str, list[float]]) -> dict[str, Rate]:
    middle = {name: median(values) for name, values in found.items()}
    return {
        each.name: Rate(
            group=each.group,
            way=each.way,
            bytes_per_s=middle[each.name],
            lowest=min(found[each.name]),
            highest=max(found[each.name]),
            parameters_per_s=(
                middle[each.name] * each.parameters / each.nbytes if each.parameters else None
            ),
            of=each.of,
            share=middle[each.name] / middle[each.of] if each.of else None,
        )
        for each in entries
    }


# the engine's step


class Flat(nn.Module):
    """A unit of one weight [rows, ROW] that nobody computes with."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel // ROW, ROW, dtype=dtype))


UNIT_NUMEL = 4 * BLOCK_NUMEL
"""Elements of a unit: as in training, the next one's blocks follow while these end."""


class Stepped:
    """A module whose optimizer the engine steps off the device, as in training."""

    def __init__(self, numel: int, dtype: torch.dtype, offload: Offload | str) -> None:
        whole, rest = divmod(numel, UNIT_NUMEL)
        numels = [UNIT_NUMEL] * whole + [rest] * (rest > 0)
        self.module = nn.ModuleList([Flat(each, dtype) for each in numels])
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LR)
        with warnings.catch_warnings():
            # told in our own words
            warnings.filterwarnings("ignore", message="the disk tier at .* lies in memory")
            onefold.shard(self.module, self.optimizer, units=list(self.module), offload=offload)
        for parameter in self.module.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.units = engine_of(self.module).units
        self.tiers = self.units[0].setting.tiers

    def step(self) -> None:
        """Begin a step: units go on in the background, each after its last one."""
        self.optimizer.step()

    def finish(self) -> None:
        """Wait until every unit is stepped and back where it rests. Raises `TierError`."""
        for unit in self.units:
            unit.settle()


def check_memory(nbytes: int) -> None:
    """Refuse tensors that this host has no room for."""
    free = free_host_nbytes()
    if nbytes > free:
        hint = "a smaller --mib"
        raise ConfigError(expected(f"{in_bytes(nbytes)} of free memory", in_bytes(free), hint=hint))


def thread_notes(threads: int, engine_threads: int) -> Iterator[str]:
    """A warning if a share compares different numbers of threads."""
    if threads != engine_threads:
        yield (f"the engine steps with its own {engine_threads} threads, all else here has "
               f"{threads}: shares compare the two")  # fmt: skip


# cpu

LEAST_TENSOR_NBYTES, MOST_TENSOR_NBYTES = 4 * MIB, 64 * MIB

TENSORS = 15
"""Tensors of four bytes an element that are alive at once: three are copied and added, and three
optimizers hold four each."""


def measure_cpu(ask: Ask) -> Bandwidths:
    """Measure memory, torch's fused AdamW on one tensor, and the engine's steps on the CPU."""
    threads = ask.threads or usable_cores()
    # a round moves about 100 bytes for each element, at some 5 GB/s or more
    suits = min(MOST_TENSOR_NBYTES, int(ask.seconds * 3e7), free_host_nbytes() // TENSORS // 2)
    nbytes = ask.nbytes or max(LEAST_TENSOR_NBYTES, suits)
    check_memory(TENSORS * nbytes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        numel = max(1, nbytes // 4 // ROW) * ROW
        narrow = Stepped(numel, torch.bfloat16, "optimizer")
        wide = Stepped(numel, torch.float32, "optimizer")
        entries = [*_plain_entries(numel)]
        for name, way, stepped in (
            ("step_fp32", "engine, fp32", wide),
            ("step_bf16", "engine, bf16", narrow),
        ):
            entries.append(
                BandwidthRow(name, "AdamW", way, ADAM_NBYTES * numel, stepped.step, "adamw", numel,
                      stepped.finish)
            )  # fmt: skip
        rates, rounds, seconds = in_rounds(entries, ask.seconds)
    finally:
        torch.set_num_threads(before)
    engine_threads = wide.tiers.steppers.num_threads
    notes = [*thread_notes(threads, engine_threads), *_cache_notes(4 * nbytes)]
    return Bandwidths("cpu", 4 * numel, numel, threads, engine_threads, rounds, seconds, rates,
                      notes=notes)  # fmt: skip


def _plain_entries(numel: int) -> Iterator[BandwidthRow]:
    a, b, c = (torch.randn(numel) for _ in range(3))
    yield BandwidthRow("copy", "memory", "copy", 8 * numel, lambda: a.copy_(b))
    yield BandwidthRow("triad", "memory", "a = b + 3 c", 12 * numel,
                lambda: torch.add(b, c, alpha=3, out=a))  # fmt: skip
    parameter = nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([parameter], lr=LR, fused=True)
    yield BandwidthRow("adamw", "AdamW", "torch", ADAM_NBYTES * numel, optimizer.step,
                parameters=numel)  # fmt: skip


def _cache_notes(nbytes: int) -> Iterator[str]:
    """A warning if all tensors of an optimizer fit into the last cache, as far as it is known."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    largest = max((int(size[:-1]) * 1024 for size in sizes if size[:-1].isdigit()), default=0)
    if nbytes <= 2 * largest:
        yield (f"{in_bytes(nbytes)} of state may stay in a cache of {in_bytes(largest)}: these are "
               "not rates of memory, raise --mib")  # fmt: skip


_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
