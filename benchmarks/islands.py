"""Islands behind a slow link, beside data parallelism over it: the same data, seeds and tokens.

    python benchmarks/islands.py                 all parts: about 10 minutes on two idle cores
    python benchmarks/islands.py --parts loss    held-out losses alone: needs no root

2 islands of 2 ranks train a byte-level GPT on the standard library's source. They go on from a
model that has been trained before, as in the paper of DiLoCo, with one schedule for all schemes: a
short warm-up, then a cosine to zero. Parts:

loss    Whole runs without a slow link, which does not change a loss.
time    Some steps with 20 Mbit/s between the islands, which are network namespaces
        (benchmarks/hosts.py; root and iproute2), twice and in turn. The same steps without a limit
        must end at the same losses, to the last bit.

The result file has bytes of the ledger, which must be the closed form. A run of all parts writes
the tables of docs/guides/islands.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest.results import RESULTS, provenance, rounded, write_block
from convergence import loss_of
from hosts import Hosts, HostsError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import onefold
from onefold.app.train.corpus import Windows, open_corpus, own_rows
from onefold.planner.models.gpt import GPT, PRESETS

ISLANDS, RANKS, EVERY = 2, 2, 30
RATE = "20mbit"
ROWS, SEQ, HELD_OUT_ROWS, WARM_UP = 16, 64, 2048, 25
PARALLEL, BEFORE = "data parallel", "before"
FRAGMENTS, DELAY = 3, 6
PAGE = Path(__file__).parent.parent / "docs" / "guides" / "islands.md"

Options = dict[str, Any]


def averaging(anchors: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer optimizer that takes over the mean of the islands."""
    return torch.optim.SGD(anchors, lr=1.0)


SCHEMES: dict[str, Options] = {
    "islands, exact": {"every": EVERY, "outer": averaging},
    "islands, int4 with feedback": {"every": EVERY, "outer": averaging, "codec": "int4"},
    f"islands, {FRAGMENTS} fragments, {DELAY} steps later": {
        "every": onefold.islands.Periods(EVERY, fragments=FRAGMENTS, delay=DELAY, keep=0.5),
        "outer": averaging,
    },
}
TIMED = {PARALLEL: (2, 8), **dict.fromkeys(SCHEMES, (EVERY, 2 * EVERY))}
"""Steps before the clock starts, and on it: whole periods."""


# one rank


class Trainer:
    """Trains runs, one after another, in a world of ranks."""

    def __init__(self, model: str, seed: int, mesh: DeviceMesh) -> None:
        self.preset, self.seed, self.mesh = PRESETS[model], seed, mesh
        self.corpus = open_corpus(None, SEQ)
        self.start: dict[str, Tensor] | None = None

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model as runs begin with it, and its optimizer."""
        torch.manual_seed(self.seed)
        module = GPT(self.preset, SEQ)
        if self.start is not None:
            module.load_state_dict(self.start)
        options: Options = {"betas": (0.9, 0.95), "weight_decay": 0.1}
        return module, torch.optim.AdamW(module.parameters(), lr=self.preset.lr, **options)

    def batches(self, number: int, *, seed: int) -> Iterator[Tensor]:
        """This rank's rows of each batch of all islands."""
        own = own_rows(ROWS, number, ISLANDS * RANKS)
        return Windows(self.corpus.train, rows=ROWS, seq=SEQ, seed=seed, own=own)

    def before(self, steps: int) -> None:
        """Train the model that all runs begin with: data parallel, at a constant learning rate."""
        module, optimizer = self.build()
        onefold.shard(module, optimizer, stage=1, mesh=self.mesh)
        batches = self.batches(dist.get_rank(), seed=self.seed)
        for step in range(steps):
            train(module, optimizer, next(batches), self.preset.lr * warm(step))
        self.start = onefold.full_state_dict(module, rank0_only=False)

    def run(self, scheme: str, steps: int, lr: float, timed: tuple[int, int]) -> Options:
        """One run: held-out loss at its end, bytes, and seconds of the steps on the clock."""
        module, optimizer = self.build()
        islands = None
        if scheme in SCHEMES:
            onefold.shard(module, optimizer, mesh=self.mesh["rank"])
            islands = onefold.islands(module, optimizer, mesh=self.mesh, **SCHEMES[scheme])
        else:
            onefold.shard(module, optimizer, stage=1, mesh=self.mesh)
        batches, begun, seconds = self.batches(dist.get_rank(), seed=self.seed + 1), 0.0, 0.0
        waited = 0.0
        for step in range(steps):
            if step == timed[0]:
                begun, waited = time.monotonic(), islands.waited_s if islands else 0.0
            now = lr * warm(step) * 0.5 * (1 + cos(pi * (step + 1) / steps))
            train(module, optimizer, next(batches), now)
            if islands is not None:
                islands.step()
            if step + 1 == sum(timed):
                seconds = time.monotonic() - begun
                waited = (islands.waited_s if islands else 0.0) - waited
        if islands is not None:
            islands.finish()
        traffic = onefold.report(module).traffic.get("islands")
        return {
            "seconds": seconds / timed[1], "waited": waited / timed[1], "steps": steps,
            "numel": sum(p.numel() for p in GPT(self.preset, SEQ).parameters()),
            "held_out": self.held_out(module), "lr": lr,
            "nbytes": int(total(traffic.sent_nbytes if traffic else 0)),
            "rounds": 0 if islands is None else islands.num_rounds,
        }  # fmt: skip

    def held_out(self, module: nn.Module) -> float:
        """Nats a byte on held-out text, the mean over all ranks."""
        own = own_rows(HELD_OUT_ROWS, dist.get_rank(), dist.get_world_size())
        rows = next(Windows(self.corpus.held_out, rows=HELD_OUT_ROWS, seq=SEQ, seed=0, own=own))
        with torch.no_grad():
            mean = torch.stack([loss_of(module, part) for part in rows.split(64)]).mean()
        return total(mean.item()) / dist.get_world_size()


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor, lr: float) -> float:
    """One step on this rank's rows; their loss."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = loss_of(module, rows)
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def warm(step: int) -> float:
    """The share of the learning rate that the first steps have."""
    return min(1.0, (step + 1) / WARM_UP)


def total(value: float) -> float:
    """The sum over all ranks."""
    summed = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(summed)
    return summed.item()


def work(jobs: list[Options], arguments: argparse.Namespace) -> None:
    """Train jobs one after another, and tell what rank 0 found of each."""
    mesh = init_device_mesh("cpu", (ISLANDS, RANKS), mesh_dim_names=("island", "rank"))
    trainer = Trainer(arguments.model, arguments.seed, mesh)
    for job in jobs:
        if job["scheme"] == BEFORE:
            trainer.before(job["steps"])
            continue
        found = trainer.run(**job)
        if dist.get_rank() == 0:
            print(json.dumps({"scheme": job["scheme"], **found}), flush=True)


# the driver


def torchrun(jobs: list[Options], rate: str | None, arguments: argparse.Namespace) -> list[Options]:
    """Train jobs in one world of ranks: of this host without a rate, or of hosts behind links."""
    found: list[Options] = []

    def note(line: str) -> None:
        if line.startswith("{"):
            found.append({**json.loads(line), "rate": rate})
            one = found[-1]
            told = f"held-out {one['held_out']:.5f}, {one['seconds']:.4f} s a step"
            print(f"{one['scheme']:38s} {rate or 'no limit':9s} {told}", flush=True)

    command = worker(arguments, jobs=json.dumps(jobs))
    if rate is not None:
        with Hosts(ISLANDS, rate) as hosts:
            ended = hosts.torchrun(*command, ranks=RANKS, timeout_s=1800, on_line=note)
        failed = [host.err for host in ended if host.code]
    else:
        launch = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ISLANDS * RANKS), *command]
        pipe, env = subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(launch, stdout=pipe, text=True, env=env) as process:
            for line in process.stdout or ():
                note(line)
        failed = [f"exit code {process.returncode}"] if process.returncode else []
    if failed:
        sys.exit(f"islands: a host failed:\n{failed[0]}")
    return found


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def worker(arguments: argparse.Namespace, **options: str) -> list[str]:
    """This file as a worker."""
    same = {"model": arguments.model, "seed": str(arguments.seed), "lr": str(arguments.lr)}
    pairs = {**same, **options}.items()
    return [__file__, *(word for name, value in pairs for word in (f"--{name}", value))]


def measure_losses(arguments: argparse.Namespace) -> list[Options]:
    """Whole runs of all schemes, from the model that was trained before."""
    steps = arguments.steps
    jobs: list[Options] = [
        {"scheme": each, "steps": steps, "lr": arguments.lr, "timed": (EVERY, steps - EVERY)}
        for each in (PARALLEL, *SCHEMES)
    ]
    jobs.insert(0, {"scheme": BEFORE, "steps": arguments.before})
    return torchrun(jobs, None, arguments)


def measure_times(arguments: argparse.Namespace) -> list[Options]:
    """A few steps of all schemes, twice behind links and once without."""
    jobs: list[Options] = [
        {"scheme": each, "steps": sum(timed) + (0 if each == PARALLEL else 1), "timed": timed}
        for each, timed in TIMED.items()
    ]
    jobs = [{**job, "lr": arguments.lr} for job in jobs]
    return torchrun(2 * jobs, RATE, arguments) + torchrun(jobs, None, arguments)


def main() -> int:
    """Run the parts; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--before", type=int, default=2000, help="steps of the first model")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, help="peak learning rate; the preset's by default")
    parser.add_argument("--model", default="tiny", choices=PRESETS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.lr = arguments.lr or PRESETS[arguments.model].lr
    if arguments.jobs:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        work(json.loads(arguments.jobs), arguments)
        dist.destroy_process_group()
        return 0
    about, lines = provenance(), list[str]()
    path = arguments.results / f"{about['date']}-islands.json"
    found: Options = {**about, "job": {k: v for k, v in vars(arguments).items() if k in JOB}}
    for name in arguments.parts:
        try:
            measured = PART[name][0](arguments)
        except HostsError as error:
            print(f"islands: {name}: {error}", file=sys.stderr)
            return 2
        shown = PART[name][1](measured)
        lines += [*shown, ""]
        found[name] = {"lines": shown, "measured": rounded(measured)}
        path.write_text(json.dumps(found) + "\n")
        print("\n".join(shown), flush=True)
    if arguments.parts == PARTS and arguments.results == RESULTS:
        told = [f"{about['date']}, commit {about['commit']}: {arguments.before} steps before, then"]
        told.append(f"{arguments.steps} of each scheme, of {ROWS * SEQ:,} bytes.")
        write_block(PAGE, "islands", [*told, "", *lines[:-1]])
    return 0


# tables


def show_losses(runs: list[Options]) -> list[str]:
    """Held-out losses beside data parallelism, bytes beside the closed form."""
    parallel, *others = runs
    lines = [
        "| scheme | held-out loss | against data parallel | against exact | bytes sent |",
        "|---|---|---|---|---|",
        f"| {PARALLEL} | {parallel['held_out']:.4f} | | | |",
    ]
    for each in others:
        gap = each["held_out"] / parallel["held_out"] - 1
        exact = each["held_out"] / others[0]["held_out"] - 1
        exact_nbytes = 4 * ISLANDS * each["numel"] * each["rounds"]
        if "fragments" in each["scheme"]:
            exact_nbytes //= FRAGMENTS
        form = f"closed form {exact_nbytes:,}"
        if "int4" in each["scheme"]:
            form = f"{each['nbytes'] / exact_nbytes:.3f} of exact"
        lines.append(
            f"| {each['scheme']} | {each['held_out']:.4f} | {gap:+.2%} | {exact:+.2%} "
            f"| {each['nbytes']:,} ({form}) |"
        )
    return lines


def seconds_of(run: Options) -> float:
    """Seconds a step."""
    return run["seconds"]


def show_times(runs: list[Options]) -> list[str]:
    """Seconds a step beside data parallelism, and whether the link changes a loss.

    Of two runs behind links the faster one counts, of all schemes alike.
    """
    lines = [
        "| scheme | s a step | waited for messages | without a limit | of data parallel | losses |",
        "|---|---|---|---|---|---|",
    ]
    slow = {each["scheme"]: [r for r in runs if r["scheme"] == each["scheme"]] for each in runs}
    best = {k: min((r for r in v if r["rate"]), key=seconds_of) for k, v in slow.items()}
    parallel = best[PARALLEL]["seconds"]
    for scheme, each in slow.items():
        seconds, waited = best[scheme]["seconds"], best[scheme]["waited"]
        free = next(r["seconds"] for r in each if not r["rate"])
        same = len({r["held_out"] for r in each}) == 1
        lines.append(
            f"| {scheme} | {seconds:.4f} | {waited:.4f} | {free:.4f} | {seconds / parallel:.3f} "
            f"| {'equal, to the last bit' if same else 'DIFFERENT'} |"
        )
    return lines


JOB = ("before", "steps", "lr", "model", "seed")
PART = {
    "loss": (measure_losses, show_losses),
    "time": (measure_times, show_times),
}
PARTS = list(PART)

if __name__ == "__main__":
    sys.exit(main())
