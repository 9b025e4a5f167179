"""Host time of the engine per unit, forward + backward, compared with FSDP2's, in one run.

Small layers and fake process groups leave next to nothing but host work. Rounds interleave the
engines and the plain module; printed are medians of (sharded - plain) / units, in CPU time of the
thread, and of the time to shard a module.

    python benchmarks/host_overhead.py                                    8 rows, 1 and 8 ranks
    python benchmarks/host_overhead.py --ranks 8,512,2048 --rows even,uneven
    python benchmarks/host_overhead.py --ranks 8,512,2048 --memory        what a rank keeps

Even rows divide by the ranks; of uneven ones, the last ranks have none: 1,000 on 512, as a
vocabulary of 50,257 has on most clusters.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import multiprocessing
import os
import statistics
import time
import warnings
from argparse import RawDescriptionHelpFormatter as RawText
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from contest.results import provenance
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import onefold


class Done(dist.Work):
    """Nothing to wait for."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Idle(dist.ProcessGroup):
    """Rank 0 of many, whose collectives of tensors do nothing.

    torch's fake group copies or splits a piece for every rank: at 2,048 ranks some milliseconds a
    collective, of which a real group has none.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg]

    def nothing(self, *_: object, **__: object) -> Done:
        return Done()

    _allgather_base = all_gather_single = _reduce_scatter_base = reduce_scatter_single = nothing
    alltoall_base = all_to_all_single = broadcast = allreduce = nothing

    def allgather(  # type: ignore[override]
        self, out: list[list[torch.Tensor]], own: list[torch.Tensor], *_: object
    ) -> Done:
        """Of objects, before the first step: all ranks say what this one says."""
        for piece in out[0]:
            piece.copy_(own[0])
        return Done()

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return "idle"


def begin(ranks: int) -> None:
    """Start the default group."""
    if "IDLE" not in dir(dist.Backend):
        dist.Backend.register_backend("idle", lambda *facts: Idle(facts[2]), devices=["cpu"])
    dist.init_process_group("idle", store=FakeStore(), rank=0, world_size=ranks)


class Block(nn.Module):
    """Two parameters a layer, next to no arithmetic."""

    def __init__(self, num_linears: int, num_rows: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, num_rows) for _ in range(num_linears))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)[:, :8]
        return x


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self, num_units: int, num_linears: int, num_rows: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(num_linears, num_rows) for _ in range(num_units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def seconds(module: nn.Module, x: torch.Tensor) -> float:
    """One forward and backward; gradients are cleared outside the clock."""
    start = time.thread_time()
    module(x).sum().backward()
    elapsed = time.thread_time() - start
    module.zero_grad()
    return elapsed


def measure(num_units: int, num_linears: int, rounds: int, num_rows: int = 8) -> dict[str, float]:
    """Milliseconds per unit above the plain module, for each engine."""
    plain = Stack(num_units, num_linears, num_rows)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fsdp = copy.deepcopy(plain)
    for layer in fsdp.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(fsdp, mesh=mesh)
    contestants: dict[str, nn.Module] = {"plain": plain, "fsdp2": fsdp}
    for stage in (3, 2, 0):
        contestants[f"onefold {stage}"] = onefold.shard(copy.deepcopy(plain), stage=stage)
    x = torch.ones(1, 8)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 3):
        for name, module in contestants.items():
            elapsed = seconds(module, x)
            if number >= 3:
                times[name].append(elapsed)
    base = statistics.median(times["plain"])
    return {
        name: 1e3 * (statistics.median(values) - base) / num_units
        for name, values in times.items()
        if name != "plain"
    }


def measure_sharding(num_units: int, rounds: int) -> dict[str, float]:
    """Milliseconds to shard a module whose units have 12 parameters, for each engine."""
    groups_of = {"fsdp2": 1, "onefold, 1 optimizer group": 1, "onefold, 2": 2}
    times: dict[str, list[float]] = {name: [] for name in groups_of}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for number in range(rounds + 1):
        for name, num_groups in groups_of.items():
            module = Stack(num_units, 6)
            parameters = list(module.parameters())
            groups = [{"params": parameters[first::num_groups]} for first in range(num_groups)]
            optimizer = torch.optim.AdamW(groups)
            start = time.perf_counter()
            if name == "fsdp2":
                for part in (*module.layers, module):
                    fully_shard(part, mesh=mesh)
            else:
                onefold.shard(module, optimizer, stage=3)
            if number:  # the first one probes the class of the optimizer
                times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(taken) for name, taken in times.items()}


def words(text: str) -> list[str]:
    """Words with commas between."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Numbers with commas between."""
    return [*map(int, words(text))]


def rows_of(kind: str, ranks: int) -> int:
    """Rows of a weight: the least multiple of the ranks from 1,024 on, or as little less than two
    rows a rank as 1,000 is less than 1,024.
    """
    return max(1024, ranks) if kind == "even" else max(1000, 2 * ranks * 1000 // 1024)


def resident() -> float:
    """Resident memory of the process in MiB, with freed blocks given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def grown(engine: str, num_rows: int) -> float:
    """MiB that a rank keeps of 288 sharded parameters after two steps; run in a process alone.

    A model of one unit goes first, so that code which is loaded once does not count.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def run(num_units: int) -> nn.Module:
        module = Stack(num_units, 6, num_rows)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if engine == "fsdp2":
            for part in (*module.layers, module):
                fully_shard(part, mesh=mesh)
        else:
            onefold.shard(module, optimizer, stage=3 if engine.endswith("3") else 2)
        for _ in range(2):
            seconds(module, torch.ones(1, 8))
        return module

    kept = [run(1)]
    before = resident()
    kept.append(run(24))
    return resident() - before


def in_fork(ranks: int, act: Callable[[], float]) -> float:
    """The result of `act` in a new process that is rank 0 of a fake group."""

    def child() -> None:
        begin(ranks)
        there.send(act())
        os._exit(0)

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=child)
    process.start()
    result: float = here.recv()
    process.join()
    return result


def by_ranks(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By ranks and kind of rows: milliseconds a unit of each engine, or MiB that a rank keeps."""
    results: dict[str, dict[str, float]] = {}
    for ranks, kind in product(options.ranks, options.rows):
        num_rows = rows_of(kind, ranks)
        name = f"{ranks} ranks, {num_rows} rows ({kind})"
        if options.memory:
            results[name] = {
                engine: in_fork(ranks, partial(grown, engine, num_rows))
                for engine in ("fsdp2", "onefold 3", "onefold 2")
            }
            continue
        begin(ranks)
        results[name] = measure(options.units, 6, options.rounds, num_rows)
        dist.destroy_process_group()
    return results


def small(options: argparse.Namespace) -> tuple[dict[str, dict[str, float]], ...]:
    """Units of 2 and of 12 parameters with 8 rows on 1 and 8 ranks, and the time to shard them."""
    results, sharding = {}, {}
    for world_size in (1, 8):
        begin(world_size)
        for linears in (1, 6):
            name = f"units of {2 * linears} parameters, {world_size} ranks"
            results[name] = measure(options.units, linears, options.rounds)
        name = f"to shard {options.units * 12} parameters, {world_size} ranks"
        sharding[name] = measure_sharding(options.units, 1 + options.rounds // 3)
        dist.destroy_process_group()
    return results, sharding


def main() -> None:
    """Print a line for each size, and write them to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawText)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=numbers, default=[], help="such as 8,512,2048")
    parser.add_argument("--rows", type=words, default=["even", "uneven"], help="even,uneven")
    parser.add_argument("--memory", action="store_true", help="MiB in place of milliseconds")
    parser.add_argument("--to", type=Path, help="add to this JSON file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = (by_ranks(options),) if options.ranks else small(options)
    for unit, table in zip(("MiB" if options.memory else "ms", "ms"), found, strict=False):
        for size, by_engine in table.items():
            cells = "   ".join(f"{name} {value:7.3f} {unit}" for name, value in by_engine.items())
            print(f"{size:38s} {cells}")
    if options.to:
        kept = json.loads(options.to.read_text()) if options.to.exists() else provenance()
        kept["MiB" if options.memory else "ms"] = {
            k: v for table in found for k, v in table.items()
        }
        options.to.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
