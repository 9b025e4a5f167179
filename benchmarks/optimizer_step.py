"""AdamW on flat shards: GB/s beside torch, DeepSpeedCPUAdam and this machine's memory.

    python benchmarks/optimizer_step.py             1 rank of 1 and of 2 threads, 2 ranks of 1
    python benchmarks/optimizer_step.py --ranks 2 --numel 4

An element of AdamW moves 28 bytes: weight and two moments in and out and the gradient in (fp32), or
master and moments in and out, a bf16 gradient in and a bf16 weight out. Whatever more a contestant
moves is its own loss: GB/s count these 28. Rounds interleave all contestants; with several ranks
all of them step at once, and a round's time is their mean. The ratio of a round is to torch's fused
fp32 AdamW on one flat tensor. Torch's and DeepSpeed's tensors lie staggered in one allocation: at
equal distances from a multiple of 4 KiB their streams evict each other and the kernels lose up to
half. Onefold's are where its engine puts them: its rows time `optimizer.step()` of a sharded
module.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contest.results import RESULTS, provenance, rounded
from rich.console import Console
from rich.table import Table
from torch import nn

import onefold
from onefold.engine import blocked_adam as adam

CASES = [(1, 1), (1, 2), (2, 1)]  # ranks, threads each
BASE = "torch fused, fp32, one flat tensor"
STAGGER = 16656  # elements between streams: neither their pages nor their lines coincide
NUM_LAYERS = 8
COLUMNS = 1024
OPTIONS = {"lr": 1e-4, "weight_decay": 0.01}

Contestant = tuple[int, Callable[[], object]]
"""Bytes it has to move per element, and one run of it."""


class Streams:
    """What AdamW reads and writes, each [numel], staggered in one allocation."""

    def __init__(self, numel: int) -> None:
        memory = torch.zeros(6 * (numel + STAGGER))
        cut = [memory[i * (numel + STAGGER) :][:numel] for i in range(6)]
        self.p, self.g, self.m, self.v = cut[:4]
        self.narrow_g, self.narrow_w = (part.view(torch.bfloat16)[:numel] for part in cut[4:])
        self.p.normal_(0, 0.02)
        self.narrow_g.normal_(0, 0.01)
        self.g.copy_(self.narrow_g)
        self.v.fill_(1e-4)


def ceilings(numel: int) -> dict[str, Contestant]:
    """What this machine's memory gives to plain passes over as many elements."""
    s = Streams(numel)
    return {
        "fill_": (4, lambda: s.p.fill_(1.0)),
        "copy_": (8, lambda: s.p.copy_(s.g)),
        "triad, add(out=)": (12, lambda: torch.add(s.g, s.m, alpha=2.0, out=s.p)),
        "scale in place, mul_": (8, lambda: s.p.mul_(0.999)),
    }


def between_casts(s: Streams, step: Callable[[], object]) -> Callable[[], None]:
    """A step in fp32 that takes a bf16 gradient and leaves a bf16 weight."""

    @torch.no_grad()
    def run() -> None:
        s.g.copy_(s.narrow_g)
        step()
        s.narrow_w.copy_(s.p)

    return run


def torch_steps(numel: int) -> dict[str, Contestant]:
    """Torch's implementations on one flat tensor, on parameters of a model, and beside casts."""
    s = Streams(numel)

    def stepper(cuts: list[int], **options: bool) -> torch.optim.Optimizer:
        parameters = [nn.Parameter(part) for part in s.p.split(cuts)]
        optimizer = torch.optim.AdamW(parameters, **OPTIONS, **options)
        for p, g, m, v in zip(parameters, *(x.split(cuts) for x in (s.g, s.m, s.v)), strict=True):
            p.grad = g
            state = {"step": torch.tensor(10.0), "exp_avg": m, "exp_avg_sq": v}
            optimizer.state[p] = state
        return optimizer

    whole, pieces = [numel], [numel // (12 * NUM_LAYERS)] * 12 * NUM_LAYERS
    pieces.append(numel - sum(pieces))
    fused = stepper(whole, fused=True)

    return {
        BASE: (28, fused.step),
        "torch fused, fp32, a model's parameters": (28, stepper(pieces, fused=True).step),
        "torch foreach, fp32, one flat tensor": (28, stepper(whole, foreach=True).step),
        "torch foreach, fp32, a model's parameters": (28, stepper(pieces, foreach=True).step),
        "torch fused between casts, bf16": (28, between_casts(s, fused.step)),
    }


def deepspeed_steps(numel: int) -> dict[str, Contestant]:
    """DeepSpeedCPUAdam; its kernel knows no fp32 master beside bf16, so casts come around it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    s = Streams(numel)
    parameter = nn.Parameter(s.p)
    parameter.grad = s.g
    optimizer = DeepSpeedCPUAdam([parameter], **OPTIONS)
    optimizer.state[parameter] = {"step": 10, "exp_avg": s.m, "exp_avg_sq": s.v}

    return {
        "DeepSpeedCPUAdam, fp32": (28, optimizer.step),
        "DeepSpeedCPUAdam between casts, bf16": (28, between_casts(s, optimizer.step)),
    }


def sharded_layers(
    numel: int, dtype: torch.dtype, *, stage: int, offload: object = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers with gradients, a unit each: every rank's shards have `numel` elements together."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rows = numel * world_size // (NUM_LAYERS * COLUMNS)
    layers = [nn.Linear(COLUMNS, rows, bias=False, dtype=dtype) for _ in range(NUM_LAYERS)]
    module = nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIONS)
    onefold.shard(module, optimizer, stage=stage, offload=offload)
    x = torch.randn(1, COLUMNS, dtype=dtype)
    torch.stack([layer(x).float().mean() for layer in module]).sum().backward()
    return module, optimizer


def onefold_steps(numel: int) -> dict[str, Contestant]:
    """The engine's step, with the C kernel if that was compiled here, and without it."""

    def stepper(dtype: torch.dtype) -> Callable[[], object]:
        _, optimizer = sharded_layers(numel, dtype, stage=2)
        optimizer.step()  # makes the moments
        return optimizer.step

    wide, narrow = stepper(torch.float32), stepper(torch.bfloat16)
    found: dict[str, Contestant] = {"onefold, fp32": (28, wide), "onefold, bf16": (28, narrow)}
    if adam.kernel() is not None:
        found["onefold, fp32, torch's kernels"] = (28, without_kernel(wide))
        found["onefold, bf16, torch's kernels"] = (28, without_kernel(narrow))
    return found


def without_kernel(step: Callable[[], object]) -> Callable[[], object]:
    """The same step as where there was no C compiler."""

    def run() -> object:
        with mock.patch.object(adam, "kernel", return_value=None):
            return step()

    return run


def contestants(numel: int, rank: int) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Everyone who can run here, and why DeepSpeed cannot if it cannot."""
    found = ceilings(numel) | torch_steps(numel)
    theirs, missing = deepspeed_steps_or_why(numel, rank)
    return found | theirs | onefold_steps(numel), missing


def deepspeed_steps_or_why(numel: int, rank: int) -> tuple[dict[str, Contestant], dict[str, str]]:
    """DeepSpeed's steps if they can be had here, and why not otherwise. Every rank calls it."""
    found: dict[str, Contestant] = {}
    missing: dict[str, str] = {}
    if rank > 0:  # DeepSpeed compiles on the first rank, and the others find it done
        _barrier()
    try:
        found = deepspeed_steps(numel)
    except (ImportError, RuntimeError) as error:
        missing["DeepSpeedCPUAdam"] = str(error).strip().splitlines()[-1]
    if rank == 0:
        _barrier()
    return found, missing


def measure(
    rank: int, ranks: int, threads: int, numel: int, rounds: int, port: int, queue: Any
) -> None:
    """One rank: seconds of every contestant in every round."""
    torch.set_num_threads(threads)
    if ranks > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", address, rank=rank, world_size=ranks)
    found, missing = contestants(numel, rank)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(-2, rounds):
        for name, (_, run) in found.items():
            _barrier()
            start = time.perf_counter()
            run()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    queue.put((rank, seconds, {name: nbytes for name, (nbytes, _) in found.items()}, missing))
    _barrier()


def run_case(ranks: int, threads: int, numel: int, rounds: int) -> dict[str, Any]:
    """All rounds of one number of ranks and threads."""
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (ranks, threads, numel, rounds, port, queue)
    processes = mp.spawn(measure, arguments, nprocs=ranks, join=False)
    found = []
    while len(found) < ranks:
        if queue.empty():
            processes.join(timeout=0.2)  # raises what a rank raised, and ends the others
        else:
            found.append(queue.get())
    processes.join()
    results = sorted(found, key=lambda result: result[0])
    _, _, nbytes, missing = results[0]
    seconds = {
        name: [statistics.mean(times) for times in zip(*(r[1][name] for r in results), strict=True)]
        for name in nbytes
    }
    return {
        "ranks": ranks, "threads": threads, "numel": numel, "missing": missing,
        "nbytes": nbytes, "seconds": seconds,
    }  # fmt: skip


def show(console: Console, case: dict[str, Any]) -> None:
    """The table of one case."""
    title = f"{case['ranks']} rank(s) of {case['threads']} thread(s), "
    table = Table("contestant", "GB/s", "to fused fp32", "spread", title=title + _mi(case["numel"]))
    base = case["seconds"][BASE]
    for name, seconds in case["seconds"].items():
        nbytes = case["nbytes"][name] * case["numel"]
        rate = f"{nbytes / statistics.median(seconds) / 1e9:.1f}"
        if case["nbytes"][name] != case["nbytes"][BASE]:
            table.add_row(name, rate)
            continue
        ratios = sorted(b / s for b, s in zip(base, seconds, strict=True))
        quarter = len(ratios) // 4
        spread = f"{ratios[quarter]:.2f} - {ratios[-1 - quarter]:.2f}"
        table.add_row(name, rate, f"{statistics.median(ratios):.2f}", spread)
    console.print(table)
    for name, why in case["missing"].items():
        console.print(f"{name}: left out: {why}", markup=False)


def _mi(numel: int) -> str:
    return f"{numel / 2**20:g} Mi elements a rank"


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    """Run the cases, print their tables, write one result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=32, help="Mi elements a rank")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    chosen = CASES if options.ranks is None else [(options.ranks, options.threads)]
    console = Console(width=None if sys.stdout.isatty() else 100)
    cases = []
    for ranks, threads in chosen:
        case = run_case(ranks, threads, options.numel << 20, options.rounds)
        cases.append(case)
        show(console, case)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{date.today().isoformat()}-optimizer-step.json"
    path.write_text(json.dumps(provenance() | rounded({"cases": cases}), indent=1) + "\n")
    console.print(f"written: {path.name}")


if __name__ == "__main__":
    main()
