"""Host work of a step of one rank: plain PyTorch with autocast, and Onefold, in one run.

One rank has nothing to gather or to reduce, so all above plain PyTorch is overhead, and on a fast
device it is the time of the step. Blocks are narrow: next to nothing but host work is left.

    python benchmarks/one_rank.py                      24 blocks of 6 parameters
    python benchmarks/one_rank.py --to FILE            write the figures to a JSON file, too
    PYTHONPATH=OTHER/src python benchmarks/one_rank.py the same, of another checkout

Rounds interleave the contestants. Printed are medians of the thread's CPU time by part of a step,
and Python calls (`sys.setprofile`) of a whole step; plain PyTorch's AdamW is its fused one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from argparse import RawDescriptionHelpFormatter as RawText
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from contest.results import provenance
from torch import Tensor, nn

import onefold
from tests.support.calls import CallCounter

PARTS = ("forward", "backward", "step", "zero_grad")


def tower(num_blocks: int, width: int) -> nn.Module:
    """Blocks of six parameters between an embedding and a head."""

    def block() -> nn.Module:
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        return nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    torch.manual_seed(0)
    blocks = nn.Sequential(*(block() for _ in range(num_blocks)))
    return nn.Sequential(nn.Embedding(64, width), blocks, nn.Linear(width, 64))


@dataclass
class Contestant:
    """A model, its optimizer, and the dtype of autocast around its forward, if there is one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    autocast: bool = False

    def parts(self) -> dict[str, Callable[[], object]]:
        """The parts of a step, in order."""
        x, losses = torch.arange(8).view(2, 4), list[Tensor]()

        def forward() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                losses.append(self.model(x).float().square().mean())

        return dict(zip(PARTS, (forward, lambda: losses.pop().backward(), self.optimizer.step,
                                self.optimizer.zero_grad), strict=True))  # fmt: skip


def contestants(num_blocks: int, width: int) -> dict[str, Contestant]:
    """Plain PyTorch, and Onefold's stages, in fp32 and in bf16."""
    found: dict[str, Contestant] = {}
    for precision in (None, "bf16"):
        name = precision or "fp32"
        model = tower(num_blocks, width)
        fused = torch.optim.AdamW(model.parameters(), fused=True)
        found[f"plain, {name}"] = Contestant(model, fused, autocast=precision is not None)
        for stage in (0, 2, 3):
            model = tower(num_blocks, width)
            optimizer = torch.optim.AdamW(model.parameters())
            onefold.shard(model, optimizer, stage=stage, precision=precision)
            found[f"stage {stage}, {name}"] = Contestant(model, optimizer)
    return found


def measure(num_blocks: int, width: int, rounds: int) -> dict[str, dict[str, float]]:
    """By contestant: microseconds of each part of a step, and of all; calls of a whole step."""
    steps = {name: each.parts() for name, each in contestants(num_blocks, width).items()}
    times = {name: {part: list[float]() for part in PARTS} for name in steps}
    for number in range(rounds + 3):
        for name, parts in steps.items():
            for part, act in parts.items():
                begun = time.thread_time()
                act()
                if number >= 3:
                    times[name][part].append(1e6 * (time.thread_time() - begun))
    rows: dict[str, dict[str, float]] = {}
    for name, parts in steps.items():
        row = {part: statistics.median(taken) for part, taken in times[name].items()}
        row["all"] = statistics.median(map(sum, zip(*times[name].values(), strict=True)))
        row["calls"] = CallCounter().of(lambda: [act() for act in parts.values()]).num_within()  # noqa: B023
        rows[name] = row
    return rows


def main() -> None:
    """Print a line for each contestant, and write them to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawText)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--to", type=Path, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.blocks, options.width, options.rounds)
    for name, row in rows.items():
        plain = rows["plain, " + name.rpartition(" ")[2]]
        parts = "  ".join(f"{part} {row[part] / 1e3:6.2f}" for part in PARTS)
        ratios = f"{row['all'] / plain['all']:5.2f} of plain's"
        calls = f"{row['calls']:,.0f} calls, {row['calls'] / plain['calls']:.2f}"
        print(f"{name:14s} {row['all'] / 1e3:7.2f} ms {ratios}   {calls:22s} {parts}")
    if options.to:
        rounded = {name: {k: round(v) for k, v in row.items()} for name, row in rows.items()}
        options.to.write_text(json.dumps(provenance() | {"microseconds": rounded}, indent=1) + "\n")


if __name__ == "__main__":
    main()
