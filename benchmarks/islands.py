"""Islands behind a slow link, beside data parallelism over it: the same data, seeds and tokens.

    python benchmarks/islands.py                 2 islands x 2 ranks, 20 Mbit/s between them
    python benchmarks/islands.py --steps 300     a shorter run

Hosts are network namespaces (benchmarks/hosts.py; root and iproute2), one for each island. A
byte-level GPT trains on the standard library's source. Data parallelism sends 2 bytes a parameter
and step for each byte that an island sends in 30 steps. Its loss does not depend on the link, so it
is taken from a run without a limit; its time is that of a few steps over the slow link, times all
steps. Islands run whole over the slow link. The result file has bytes of the ledger, which must be
the closed form, and of the hosts' interfaces, headers included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest.results import RESULTS, provenance, rounded
from convergence import loss_of
from hosts import Hosts, HostsError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import onefold
from onefold.models.gpt import GPT, PRESETS
from onefold.train.corpus import Windows, open_corpus, own_rows

ISLANDS, RANKS, EVERY = 2, 2, 30
RATE = "20mbit"
ROWS, SEQ, HELD_OUT_ROWS = 16, 64, 512
TIMED_STEPS = 6


def averaging(anchors: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer optimizer that takes over the mean of the islands."""
    return torch.optim.SGD(anchors, lr=1.0)


SCHEMES = {
    "islands, exact": {"every": EVERY},
    "islands, the mean alone": {"every": EVERY, "outer": averaging},
    "islands, int4 with feedback": {"every": EVERY, "codec": "int4"},
    "islands, 3 fragments, 2 steps later": {
        "every": onefold.Periods(EVERY, fragments=3, delay=2, keep=0.5)
    },
}
DATA_PARALLEL = "data parallel"


# the worker: one rank


def work(scheme: str, steps: int, model: str, seed: int) -> None:
    """Train, and print what rank 0 and the hosts found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ISLANDS, RANKS), mesh_dim_names=("island", "rank"))
    found = trained(scheme, mesh, steps, model, seed)
    if dist.get_rank() == 0:
        print(json.dumps({"scheme": scheme, **found}), flush=True)
    dist.destroy_process_group()


def trained(scheme: str, mesh: DeviceMesh, steps: int, model: str, seed: int) -> dict[str, Any]:
    """One run: seconds, bytes, and the held-out loss at its end."""
    torch.manual_seed(seed)
    preset = PRESETS[model]
    module = GPT(preset, SEQ)
    numel = sum(p.numel() for p in module.parameters())
    matrices = sum(p.numel() for p in module.parameters() if p.dim() > 1)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=preset.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    islands = None
    if scheme in SCHEMES:
        onefold.shard(module, optimizer, mesh=mesh["rank"])
        islands = onefold.islands(module, optimizer, mesh=mesh, **SCHEMES[scheme])
    else:
        onefold.shard(module, optimizer, stage=1, mesh=mesh)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = own_rows(ROWS, rank, world_size)
    corpus = open_corpus(None, SEQ)
    windows = Windows(corpus.train, rows=ROWS, seq=SEQ, seed=seed, own=own)
    dist.barrier()
    sent, begun = own_interface(), time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / 25) * 0.5
            group["lr"] = preset.lr * warm * (1 + cos(pi * (step + 1) / steps))
        loss_of(module, next(windows)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if islands is not None:
            islands.step()
    if islands is not None:
        islands.finish()
    dist.barrier()
    seconds, sent = time.monotonic() - begun, own_interface() - sent
    traffic = onefold.report(module).traffic.get("islands")
    rounds = 0 if islands is None else islands.num_rounds
    return {
        "seconds": seconds, "steps": steps, "numel": numel, "matrices": matrices,
        "held_out": held_out(module, corpus.held_out, own_rows(HELD_OUT_ROWS, rank, world_size)),
        "interface_nbytes": int(total(sent) / RANKS),  # ranks of one host read the same counter
        "ledger_nbytes": int(total(traffic.sent_nbytes if traffic else 0)), "rounds": rounds,
    }  # fmt: skip


def held_out(module: nn.Module, text: Any, own: range) -> float:
    """Nats a byte on held-out text, the mean over all ranks."""
    rows = next(Windows(text, rows=HELD_OUT_ROWS, seq=SEQ, seed=0, own=own))
    with torch.no_grad():
        mean = torch.stack([loss_of(module, part) for part in rows.split(16)]).mean()
    return total(mean.item()) / dist.get_world_size()


def total(value: float) -> float:
    """The sum over all ranks."""
    summed = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(summed)
    return summed.item()


def own_interface() -> int:
    """Bytes that this host's `eth0` has sent."""
    rows = dict(line.split(":", 1) for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    return next(int(row.split()[8]) for name, row in rows.items() if name.strip() == "eth0")


# the driver


def run(scheme: str, steps: int, rate: str | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run on fresh hosts."""
    lines: list[dict[str, Any]] = []

    def note(line: str) -> None:
        if line.startswith("{"):
            lines.append(rounded(json.loads(line)))

    command = (
        __file__, "--worker", scheme, "--steps", str(steps), "--model", arguments.model,
        "--seed", str(arguments.seed),
    )  # fmt: skip
    with Hosts(ISLANDS, rate) as hosts:
        ended = hosts.torchrun(*command, ranks=RANKS, timeout_s=3000, on_line=note)
    failed = [host for host in ended if host.code]
    if failed:
        sys.exit(f"islands: a host ended with {failed[0].code}:\n{failed[0].err}")
    found = {**lines[0], "rate": rate}
    told = f"held-out {found['held_out']:.4f}, {found['seconds']:.1f} s for {steps} steps"
    print(f"{scheme:38s} {rate or 'no limit':9s} {told}", flush=True)
    return found


def main() -> int:
    """Run every scheme; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--model", default="tiny", choices=PRESETS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.steps, arguments.model, arguments.seed)
        return 0
    about = provenance()
    path = arguments.results / f"{about['date']}-islands.json"
    try:
        slow = run(DATA_PARALLEL, TIMED_STEPS, RATE, arguments)
        fast = run(DATA_PARALLEL, arguments.steps, None, arguments)
        runs = [run(scheme, arguments.steps, RATE, arguments) for scheme in arguments.schemes]
    except HostsError as error:
        print(f"islands: {error}", file=sys.stderr)
        return 2
    found = {**about, "every": EVERY, "slow": slow, "fast": fast, "runs": runs}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found)))
    return 0


def table(found: dict[str, Any]) -> list[str]:
    """Loss and time beside data parallelism, bytes beside the closed form."""
    slow, fast = found["slow"], found["fast"]
    parallel_seconds = slow["seconds"] / slow["steps"] * fast["steps"]
    lines = [
        "| scheme | held-out loss | beside data parallel | seconds | of its time | bytes sent |",
        "|---|---|---|---|---|---|",
        f"| {DATA_PARALLEL} | {fast['held_out']:.4f} | | {parallel_seconds:.0f} | | |",
    ]
    for each in found["runs"]:
        gap = each["held_out"] / fast["held_out"] - 1
        share = each["seconds"] / parallel_seconds
        lines.append(
            f"| {each['scheme']} | {each['held_out']:.4f} | {gap:+.2%} | {each['seconds']:.0f} "
            f"| {share:.3f} | {each['ledger_nbytes']:,.0f} ({described(each)}) |"
        )
    return lines


def described(run: dict[str, Any]) -> str:
    """The closed form of an exact run's bytes: each island sends 4 bytes a parameter and round."""
    numels: Sequence[int] = (run["numel"], run["matrices"])
    exact = 4 * ISLANDS * numels[0] * run["rounds"]
    if "int4" in run["scheme"]:
        return f"{run['ledger_nbytes'] / exact:.3f} of exact"
    whole = run["rounds"] * 1.0 if "fragments" not in run["scheme"] else run["rounds"] / 3
    return f"closed form {4 * ISLANDS * numels[0] * whole:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
