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
import socket
import time
from datetime import date
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from contest.results import RESULTS, provenance
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


def be_rank(rank: int, world_size: int, port: int, width: int, few_ranks: int, out: int) -> None:
    """Train; rank 0 writes the median step and the mean CPU time of a step, in ms."""
    torch.set_num_threads(1)
    message_plan.FEW_RANKS = few_ranks
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
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
    mean = torch.tensor(sum(cpus[WARMUP:]) / STEPS / world_size, dtype=torch.float64)
    dist.all_reduce(mean)
    if rank == 0:
        os.write(out, f"{1e3 * median(walls[WARMUP:])} {1e3 * mean.item()}".encode())
    dist.barrier()


def one_run(world_size: int, width: int, few_ranks: int) -> tuple[float, ...]:
    """The two numbers of fresh ranks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    read, write = os.pipe()
    ranks = list[int]()
    for rank in range(world_size):
        ranks.append(os.fork())
        if not ranks[-1]:
            try:
                be_rank(rank, world_size, port, width, few_ranks, write)
            finally:
                os._exit(0)
    os.close(write)
    for pid in ranks:
        os.waitpid(pid, 0)
    with os.fdopen(read) as lines:
        return tuple(map(float, lines.read().split()))


def row_of(world_size: int, width: int, rounds: int) -> dict[str, Any]:
    """Medians of both ways, and their ratios."""
    runs: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in [*WAYS][:: -1 if number % 2 else 1]:
            runs[way].append(one_run(world_size, width, WAYS[way]))
    (wall, cpu), (other_wall, other_cpu) = (
        [median(values) for values in zip(*runs[way], strict=True)] for way in WAYS
    )
    numel = 8 * width**2 + 7 * width
    return {
        "ranks": world_size, "width": width, "piece_nbytes": 16 * width**2 // world_size,
        "unit_numel": numel, "wall_ms": round(wall, 1), "cpu_ms": round(cpu, 2),
        "of_one_size/as_they_are": {
            "wall": round(other_wall / wall, 2), "cpu": round(other_cpu / cpu, 2)
        },
    }  # fmt: skip


def main() -> None:
    """Print a row for each width and number of ranks, and write them to `results`."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", default="3,4,6,8,12,16,20")
    parser.add_argument("--widths", default="60,250")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    for width in map(int, options.widths.split(",")):
        for world_size in map(int, options.ranks.split(",")):
            rows.append(row_of(world_size, width, options.rounds))
            print(rows[-1], flush=True)
    path = RESULTS / f"{date.today():%Y-%m-%d}-few-ranks.json"
    path.write_text(json.dumps(provenance() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
