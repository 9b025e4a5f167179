"""Messages with pieces as they are, or in chunks of one size: from how many ranks on?

    python benchmarks/few_ranks.py                             3 to 20 ranks, 10 minutes
    python benchmarks/few_ranks.py --ranks 3,8 --rounds 1

Ranks are gloo processes of one thread. Rows do not divide by them. Both ways take turns, with fresh
ranks each time; ratios are those of medians, of a step's wall time and of a rank's CPU seconds.
What `message_plan.FEW_RANKS` says was read off this table.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from contest.results import RESULTS, provenance
from contest.world import run_ranks
from torch import nn

import onefold
from onefold.layout import message_plan

WARMUP, STEPS, BLOCKS = 3, 9, 6
WAYS = {"as they are": 1 << 30, "of one size": 0}
"""Up to how many ranks pieces travel as they are."""


def block(width: int) -> nn.Module:
    """Two matrices, as of a transformer's block."""
    first, last = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return nn.Sequential(nn.LayerNorm(width), first, nn.GELU(), last)


def measure(rank: int, width: int, few_ranks: int) -> dict[str, float]:
    """One rank's turn: milliseconds of a step, of the wall (median) and of its CPU (mean)."""
    torch.set_num_threads(1)
    message_plan.FEW_RANKS = few_ranks
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = nn.Sequential(*[block(width) for _ in range(BLOCKS)])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    onefold.shard(module, optimizer, stage=3)
    batch, walls, cpus = torch.randn(2, width) + rank, list[float](), list[float]()
    for _ in range(WARMUP + STEPS):
        dist.barrier()
        begun, cpu = time.perf_counter(), time.process_time()
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        walls.append(time.perf_counter() - begun)
        cpus.append(time.process_time() - cpu)
    return {"wall": 1e3 * median(walls[WARMUP:]), "cpu": 1e3 * mean(cpus[WARMUP:])}


def row_of(world_size: int, width: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of pieces as they are, and how many times as much chunks of one size take."""
    runs: dict[str, list[list[dict[str, float]]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in [*WAYS][:: -1 if number % 2 else 1]:
            runs[way].append(run_ranks(world_size, measure, width, WAYS[way]))

    def of(way: str, what: str) -> float:
        return median(mean(rank[what] for rank in ranks) for ranks in runs[way])

    few, one_size = WAYS
    return {
        "ranks": world_size, "width": width, "piece_nbytes": 16 * width**2 // world_size,
        "wall_ms": round(of(few, "wall"), 1), "cpu_ms": round(of(few, "cpu"), 2),
        "of_one_size/as_they_are": {
            what: round(of(one_size, what) / of(few, what), 2) for what in ("wall", "cpu")
        },
    }  # fmt: skip


def main() -> None:
    """Print a row for each width and number of ranks, and write them to `results`."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", default="3,4,6,8,12,16,20")
    parser.add_argument("--widths", default="60,250")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    for width in map(int, options.widths.split(",")):
        for world_size in map(int, options.ranks.split(",")):
            rows.append(row_of(world_size, width, options.rounds))
            print(rows[-1], flush=True)
    path = options.results / f"{date.today():%Y-%m-%d}-few-ranks.json"
    path.write_text(json.dumps(provenance() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
