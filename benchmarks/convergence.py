"""What a quantized wire costs in loss: the same training under each, with the same seeds and data.

    python benchmarks/convergence.py            seven runs of three seeds: over an hour on two cores

A byte-level GPT of 5 million parameters (`mini`) on 2 nodes x 2 ranks of gloo processes, on the
standard library's source, stage 3, bf16 compute. Every run of a seed has the same weights to begin
with and sees the same text, so what differs is the wire. Runs that differ by anything drift apart:
how far they do for nothing, the control tells, which is exact and sums in another order. The
learning rate ends at zero and the held-out text is long, both so that drift shows less. Results are
written after every run; an interrupted benchmark keeps them, and goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from dataclasses import dataclass
from itertools import product
from math import cos, pi
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest.results import RESULTS, provenance, rounded, write_block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import onefold
from onefold.app.train.corpus import Windows, open_corpus, own_rows
from onefold.planner.models.gpt import GPT, PRESETS
from onefold.wire_config import PRESETS as WIRES
from onefold.wire_config import Wire

SCHEMES = {
    "exact": WIRES["exact"],
    "control: exact, one axis": None,
    "recommended: differences int8, gradients int8 between": WIRES["recommended"],
    "zero++: both": WIRES["zero++"],
    "differences int4, gradients int8+h, int4+h": WIRES["zero++diff"],
    "qwZ: weights int8": Wire(weights="int8"),
    "qgZ: gradients int8+h inside, int4+h between": Wire(gradients=("int8+h", "int4+h")),
}
SHAPE = (2, 2)
HELD_OUT_ROWS = 1024
PAGE = Path(__file__).parent.parent / "docs" / "measurements" / "wire.md"


@dataclass(frozen=True)
class Job:
    """What every run trains; `rows` of `seq` bytes are a step of all ranks."""

    model: str = "mini"
    steps: int = 240
    rows: int = 32
    seq: int = 64
    lr: float = 1.5e-3
    precision: str | None = "bf16"


def main() -> None:
    """Run what is missing of the newest result file, or begin one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Job.steps)
    parser.add_argument("--model", default=Job.model, choices=PRESETS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    job = Job(arguments.model, arguments.steps)
    about = provenance()
    path = arguments.results / f"{about['date']}-convergence.json"
    found: dict[str, Any] = {**about, "job": vars(job), "runs": []}
    for older in sorted(arguments.results.glob("*-convergence.json")):
        held = json.loads(older.read_text())
        if held["job"] == vars(job):
            path, found = older, held
    done = {(run["scheme"], run["seed"]) for run in found["runs"]}
    for scheme, seed in product(SCHEMES, range(arguments.seeds)):
        if (scheme, seed) in done:
            continue
        begun = time.monotonic()
        run = trained(job, SCHEMES[scheme], seed)
        seconds = time.monotonic() - begun
        found["runs"].append(rounded({"scheme": scheme, "seed": seed, **run, "seconds": seconds}))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{scheme:55s} seed {seed}  held-out {run['held_out']:.4f}  {seconds:.0f} s",
              flush=True)  # fmt: skip
    print(table(found["runs"]))
    told = f"{about['date']}, {job.steps} steps of {job.rows * job.seq} bytes."
    write_block(PAGE, "convergence", [told, "", *table(found["runs"]).splitlines()])


def trained(job: Job, wire: Wire | None, seed: int) -> dict[str, Any]:
    """One run in fresh processes: losses of every 20th step and the held-out loss at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    results = context.SimpleQueue()
    world_size = SHAPE[0] * SHAPE[1]
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, (job, wire, seed), results))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit(f"a rank ended with {[rank.exitcode for rank in ranks]}")
    return results.get()


def _rank(
    rank: int, world_size: int, port: int, what: tuple[Job, Wire | None, int], results: Any
) -> None:
    torch.set_num_threads(1)
    url = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", url, rank=rank, world_size=world_size)
    result = _train(rank, world_size, *what)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()


def _train(rank: int, world_size: int, job: Job, wire: Wire | None, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = GPT(PRESETS[job.model], job.seq)
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1,
    )  # fmt: skip
    mesh = init_device_mesh("cpu", SHAPE) if wire else None
    onefold.shard(module, optimizer, mesh=mesh, precision=job.precision, wire=wire)
    corpus = open_corpus(None, job.seq)
    own = own_rows(job.rows, rank, world_size)
    windows = Windows(corpus.train, rows=job.rows, seq=job.seq, seed=seed, own=own)
    losses: list[float] = []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            share = min(1.0, (step + 1) / 25) * 0.5 * (1 + cos(pi * (step + 1) / job.steps))
            group["lr"] = job.lr * share
        loss = loss_of(module, next(windows))
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            losses.append(_mean(loss.detach()))
    own = own_rows(HELD_OUT_ROWS, rank, world_size)
    rows = next(Windows(corpus.held_out, rows=HELD_OUT_ROWS, seq=job.seq, seed=0, own=own))
    with torch.no_grad():
        held_out = torch.stack([loss_of(module, part) for part in rows.split(16)]).mean()
    sent = {name: each.sent_nbytes for name, each in onefold.report(module).last_step.items()}
    return {
        "losses": losses, "held_out": _mean(held_out), "sent": sent,
        "skipped": onefold.report(module).skipped,
    }  # fmt: skip


def loss_of(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats a byte of rows [R, T + 1]."""
    logits = module(rows[:, :-1]).flatten(0, 1).float()  # in bf16 a loss has three digits
    return F.cross_entropy(logits, rows[:, 1:].flatten())


def _mean(value: torch.Tensor) -> float:
    value = value.clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def table(runs: list[dict[str, Any]]) -> str:
    """Held-out loss by wire: the mean over seeds, its gap to exact runs of the same seeds."""
    exact = {run["seed"]: run["held_out"] for run in runs if run["scheme"] == "exact"}
    spread = max(exact.values()) - min(exact.values())
    lines = ["| wire | held-out loss | gap, mean of seeds | each seed |", "|---|---|---|---|"]
    for scheme in SCHEMES:
        mine = [run for run in runs if run["scheme"] == scheme and run["seed"] in exact]
        if not mine:
            continue
        gaps = [run["held_out"] / exact[run["seed"]] - 1 for run in mine]
        mean = sum(run["held_out"] for run in mine) / len(mine)
        each = ", ".join(f"{gap:+.2%}" for gap in gaps)
        lines.append(f"| {scheme} | {mean:.4f} | {sum(gaps) / len(gaps):+.2%} | {each} |")
    lines.append(f"\nSpread of the exact runs over seeds: {spread / min(exact.values()):.2%}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
