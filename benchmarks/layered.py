"""A step of many micro-batches over a slow link: layered order, other orders, and FSDP2.

    python benchmarks/layered.py                      two hosts at 200 Mbit/s, 20 minutes
    python benchmarks/layered.py --rate 1gbit --microbatches 4 --rounds 2

The hosts are network namespaces of this machine (benchmarks/hosts.py), one rank each. Every engine
trains the same GPT at stage 3, fp32, with recompute. Reported for each, from the rounds' medians:
seconds a step, bytes that a rank's ledger counted, and bytes that its interface sent, headers
included. FSDP2 frees weights after forward; "fsdp2 no sync" keeps unsharded gradients until the
last micro-batch. Then one rank trains with parameters on disk, and the bytes that it reads in a
step are divided by the bytes of the weights. The result goes to
`benchmarks/results/DATE-layered.json`. Exit code 2 where namespaces cannot be made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest.results import RESULTS, provenance, rounded
from hosts import INTERFACE, Hosts, HostsError
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from onefold.planner.models.gpt import GPT, PRESETS, VOCAB

ENGINES = ("onefold layers", "onefold keep", "onefold plain", "fsdp2 reshard", "fsdp2 no sync")
TARGET = 5.0
"""How many times faster than FSDP2 with resharding a step is to be."""

WARM_UP = 1
TIMEOUT_S = 1800


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy of the next byte."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(options: argparse.Namespace) -> GPT:
    """The model with the same values on every rank."""
    torch.manual_seed(0)
    model = GPT(PRESETS[options.model], options.tokens)
    model.recomputes = True
    return model


def stepper(
    engine: str, options: argparse.Namespace
) -> tuple[Callable[[list[Tensor]], Tensor], Any]:
    """A function that runs the micro-batches of one step and the optimizer, and the module."""
    model = build(options)
    if engine.startswith("fsdp2"):
        return _fsdp2(model, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder = options.disk
    offload = onefold.Offload(parameters="disk", disk=folder) if folder else None
    onefold.shard(model, optimizer, stage=3, offload=offload)
    order: Any = engine.split()[1]

    def step(batches: list[Tensor]) -> Tensor:
        loss = onefold.accumulate_layers(model, batches, loss_of, order=order)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model


def _fsdp2(model: GPT, engine: str) -> tuple[Callable[[list[Tensor]], Tensor], nn.Module]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    sharded: Any = fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batches: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for number, tokens in enumerate(batches):
            if engine == "fsdp2 no sync":
                sharded.set_requires_gradient_sync(number + 1 == len(batches))
            loss = loss_of(model(tokens), tokens) / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, model


def run_rank(options: argparse.Namespace) -> None:
    """One rank of one engine; rank 0 prints a line of JSON."""
    torch.set_num_threads(1)
    is_alone = "RANK" not in os.environ
    if not is_alone:
        dist.init_process_group("gloo")
    rank = 0 if is_alone else dist.get_rank()
    step, module = stepper(options.engine, options)
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (options.rows, options.tokens)
    meet: Callable[[], Any] = (lambda: None) if is_alone else dist.barrier
    seconds, losses, sent, read = [], [], [], []
    for number in range(WARM_UP + options.steps):
        batches = [
            torch.randint(VOCAB, shape, generator=generator) for _ in range(options.microbatches)
        ]
        meet()
        before, began = (_sent_nbytes(), _read_nbytes()), time.perf_counter()
        loss = step(batches)
        meet()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
            sent.append(_sent_nbytes() - before[0])
            read.append(_read_nbytes() - before[1])
        losses.append(loss.item())
    found = {
        "seconds": seconds, "losses": losses, "interface_nbytes": statistics.median(sent),
        "read_nbytes": statistics.median(read),
        "weight_nbytes": sum(p.numel() for p in module.parameters()) * 4,
    }  # fmt: skip
    if options.engine.startswith("onefold"):
        report = onefold.report(module)
        traffic = report.last_step.values()
        found["ledger_nbytes"] = sum(each.sent_nbytes for each in traffic)
        found["notes"] = list(report.notes)
    if rank == 0:
        print("found " + json.dumps(found), flush=True)
    if not is_alone:
        dist.destroy_process_group()


def _sent_nbytes() -> int:
    """Bytes that this host's interface has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, row = line.partition(":")
        if name.strip() == INTERFACE:
            return int(row.split()[8])
    return 0


def _read_nbytes() -> int:
    """Bytes that this process has read from files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].split()[1])


def _arguments(engine: str, options: argparse.Namespace) -> list[str]:
    names = ("model", "rows", "tokens", "microbatches", "steps")
    pairs = [(f"--{name}", str(getattr(options, name))) for name in names]
    return [__file__, "--engine", engine, *(word for pair in pairs for word in pair)]


def _found(out: str) -> dict[str, Any]:
    lines = [line for line in out.splitlines() if line.startswith("found ")]
    if not lines:
        raise SystemExit(f"a rank ended without a result:\n{out}")
    return json.loads(lines[-1].removeprefix("found "))


def over_a_link(engine: str, options: argparse.Namespace) -> dict[str, Any]:
    """One engine on two hosts."""
    with Hosts(2, rate=options.rate) as hosts:
        ended = hosts.torchrun(*_arguments(engine, options), ranks=1, timeout_s=TIMEOUT_S)
    if any(each.code for each in ended):
        raise SystemExit("\n".join(each.err[-2000:] for each in ended))
    return _found(ended[0].out)


def from_disk(engine: str, options: argparse.Namespace) -> dict[str, Any]:
    """One engine on one rank, with parameters on disk."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        command = [sys.executable, *_arguments(engine, options), "--disk", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return _found(done.stdout)


def summed_up(rounds: list[dict[str, Any]], disk: dict[str, Any]) -> dict[str, Any]:
    """Medians by engine, ratios inside a round, and reads per weight."""
    engines: dict[str, Any] = {}
    for engine in rounds[0]:
        runs = [each[engine] for each in rounds]
        first = runs[0]
        engines[engine] = {
            "seconds": statistics.median(second for run in runs for second in run["seconds"]),
            "interface_nbytes": first["interface_nbytes"],
            "ledger_nbytes": first.get("ledger_nbytes"),
            "of_weights": first["interface_nbytes"] / (first["weight_nbytes"] / 2),
        }
    faster = {
        engine: statistics.median(
            statistics.median(each[engine]["seconds"])
            / statistics.median(each["onefold layers"]["seconds"])
            for each in rounds
        )
        for engine in rounds[0]
    }
    reads = {engine: run["read_nbytes"] / run["weight_nbytes"] for engine, run in disk.items()}
    return {"engines": engines, "times_faster_than": faster, "disk_reads_per_weight": reads}


def show(summary: dict[str, Any]) -> None:
    """Print a table and the verdict."""
    table = Table("engine", "s a step", "layers is x faster", "sent of own half of the weights")
    for engine, one in summary["engines"].items():
        ratio = summary["times_faster_than"][engine]
        table.add_row(engine, f"{one['seconds']:.2f}", f"{ratio:.2f}", f"{one['of_weights']:.2f}")
    console = Console()
    console.print(table)
    for engine, reads in summary["disk_reads_per_weight"].items():
        console.print(f"{engine}: {reads:.2f} disk reads per weight and step")


def main() -> int:
    """Run all engines in turns, then the disk."""
    options = parser().parse_args()
    if options.engine:
        run_rank(options)
        return 0
    rounds: list[dict[str, Any]] = []
    engines = options.engines.split(",")
    try:
        for number in range(options.rounds):
            turns = engines[number % len(engines) :] + engines[: number % len(engines)]
            found = {engine: over_a_link(engine, options) for engine in turns}
            rounds.append({engine: found[engine] for engine in engines})
    except HostsError as why:
        print(why, file=sys.stderr)
        return 2
    disk = {each: from_disk(each, options) for each in ("onefold layers", "onefold plain")}
    summary = summed_up(rounds, disk)
    show(summary)
    chosen = {
        name: getattr(options, name)
        for name in ("model", "rows", "tokens", "microbatches", "steps", "rate")
    }
    result = {**provenance(), "case": chosen, **summary, "rounds": rounds, "disk": disk}
    path = options.results / f"{date.today().isoformat()}-layered.json"
    path.write_text(json.dumps(rounded(result), indent=1) + "\n")
    return int(summary["times_faster_than"].get("fsdp2 reshard", TARGET) < TARGET)


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--model", default="mini", choices=PRESETS)
    found.add_argument("--rows", type=int, default=1)
    found.add_argument("--tokens", type=int, default=64)
    found.add_argument("--microbatches", type=int, default=8)
    found.add_argument("--steps", type=int, default=2)
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--rate", default="200mbit")
    found.add_argument("--engines", default=",".join(ENGINES))
    found.add_argument("--folder", default=None, help="where weights rest on disk")
    found.add_argument("--results", type=Path, default=RESULTS)
    found.add_argument("--engine", default="", help=argparse.SUPPRESS)
    found.add_argument("--disk", default="", help=argparse.SUPPRESS)
    return found


if __name__ == "__main__":
    sys.exit(main())
