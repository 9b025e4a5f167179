"""Host time of the engine per unit, forward + backward, compared with FSDP2's, in one run.

Tiny layers and fake process groups of 1 and of 8 ranks leave nothing but host work. Rounds
interleave the engines and the plain module; printed are medians of (sharded - plain) / units, and
of the time to shard a module.

    python benchmarks/host_overhead.py
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import onefold


class Block(nn.Module):
    """Two parameters, next to no arithmetic."""

    def __init__(self, num_linears: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_linears))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)
        return x


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self, num_units: int, num_linears: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(num_linears) for _ in range(num_units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def seconds(module: nn.Module, x: torch.Tensor) -> float:
    """One forward and backward; gradients are cleared outside the clock."""
    start = time.perf_counter()
    module(x).sum().backward()
    elapsed = time.perf_counter() - start
    module.zero_grad()
    return elapsed


def measure(num_units: int, num_linears: int, rounds: int) -> dict[str, float]:
    """Milliseconds per unit above the plain module, for each engine."""
    plain = Stack(num_units, num_linears)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fsdp = copy.deepcopy(plain)
    for layer in fsdp.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(fsdp, mesh=mesh)
    contestants = {"plain": plain, "fsdp2": fsdp}
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


def main() -> None:
    """Print milliseconds per unit for units of 2 and of 12 parameters on 1 and 8 ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    results, sharding = {}, {}
    for world_size in (1, 8):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        for linears in (1, 6):
            name = f"{2 * linears} parameters, {world_size} ranks"
            results[name] = measure(options.units, linears, options.rounds)
        name = f"{options.units * 12} parameters, {world_size} ranks"
        sharding[name] = measure_sharding(options.units, 1 + options.rounds // 3)
        dist.destroy_process_group()
    if options.json:
        print(json.dumps({**results, "to shard": sharding}))
        return
    for size, by_engine in results.items():
        cells = "   ".join(f"{name} {ms:6.3f} ms" for name, ms in by_engine.items())
        print(f"units of {size:22s} {cells}")
    for size, by_engine in sharding.items():
        cells = "   ".join(f"{name} {ms:4.0f} ms" for name, ms in by_engine.items())
        print(f"to shard {size:22s} {cells}")


if __name__ == "__main__":
    main()
