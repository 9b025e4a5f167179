"""Bytes between nodes and step times of every placement and wire, counted at the sockets.

    python benchmarks/wire.py                          2 hosts x 2 ranks, 100 Mbit/s and 1 Gbit/s
    python benchmarks/wire.py --rates 100mbit --rounds 1 --table

Hosts are network namespaces (benchmarks/hosts.py; root and iproute2). On them torchrun starts this
file as a worker, which trains the same byte-level GPT in bf16 under each scheme, interleaved in
rounds; bytes are those of each host's `eth0` and `lo` in /proc/net/dev, headers included, beside
the formula. The peer is FSDP2 on the same mesh. Writes a dated JSON, and with it (or with
`--table`, from the newest one) the table in docs/measurements/wire.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from contest.results import RESULTS, provenance, rounded, write_block
from hosts import Hosts, HostsError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import onefold
from onefold.planner.models.gpt import GPT, VOCAB, GPTConfig
from onefold.wire.codec import codec_of
from onefold.wire_config import DIFFERENCE, EXACT, PRESETS, Wire

MODEL = GPTConfig(num_layers=6, width=320, num_heads=8, lr=3e-4)
ROWS, SEQ = 2, 64
NODES, RANKS = 2, 2
STEPS = 3
PAGE = Path(__file__).parent.parent / "docs" / "measurements" / "wire.md"
FULL_HOP = Wire(secondary=False)


@dataclass(frozen=True, slots=True)
class Scheme:
    """What is tried: a stage and a wire on two axes; or one axis; or a peer."""

    name: str
    wire: Wire | None = None
    stage: int = 3
    accumulate: int = 1
    is_flat: bool = False
    is_peer: bool = False

    @property
    def nbytes_between(self) -> float | None:
        """Bytes that an element of the model costs between nodes in a step, all nodes together."""
        wire = self.wire or Wire()
        if self.is_flat or self.is_peer:
            return None
        weights = _itemsize(wire.weights_between)
        gradients = _itemsize(wire.gradients_between)
        gathers, reductions = 1, 1
        if self.stage == 3 and wire.secondary is False:
            gathers, reductions = 2 * self.accumulate, self.accumulate
        elif self.stage == 3 and wire.secondary == "weights":
            reductions = self.accumulate
        elif wire.secondary == "optimizer":  # means are reduced, then gathered
            gathers, reductions, weights = 1, 1, gradients
        return (NODES - 1) * (gathers * weights + reductions * gradients)


SCHEMES = [
    Scheme("stage 3, one axis", is_flat=True),
    Scheme("stage 3, two hops", FULL_HOP),
    Scheme("stage 2, two hops", stage=2),
    Scheme("HSDP", Wire(secondary="optimizer")),
    Scheme("hpZ", Wire(secondary="weights")),
    Scheme("HFSDP", Wire()),
    Scheme("HFSDP, qwZ", Wire(weights="int8")),
    Scheme("HFSDP, gradients int8", Wire(gradients=("exact", "int8"))),
    Scheme("zero++", PRESETS["zero++"]),
    Scheme("recommended", PRESETS["recommended"]),
    Scheme("zero++diff", PRESETS["zero++diff"]),
    Scheme("FSDP2 HSDP", is_peer=True),
    Scheme("stage 3, two hops, 8 micro-batches", FULL_HOP, accumulate=8),
    Scheme("hpZ, 8 micro-batches", Wire(secondary="weights"), accumulate=8),
    Scheme("HFSDP, 8 micro-batches", Wire(), accumulate=8),
]


def _itemsize(codec: str) -> float:
    """Bytes of an element in a long message; exact ones travel in bf16 here."""
    if codec == EXACT:
        return 2.0
    return codec_of(codec.removesuffix(DIFFERENCE)).nbytes(1 << 20) / (1 << 20)


# the worker: one rank


def work(rounds: int) -> None:
    """Measure every scheme in turn, round after round; rank 0 prints what all hosts counted."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (NODES, RANKS), mesh_dim_names=("node", "rank"))
    for turn in range(rounds):
        for scheme in SCHEMES:
            if turn and scheme.accumulate > 1:  # of these the bytes are of interest
                continue
            found = measured(scheme, mesh)
            if dist.get_rank() == 0:
                print(json.dumps({"round": turn, "scheme": scheme.name, **found}), flush=True)
    dist.destroy_process_group()


def measured(scheme: Scheme, mesh: DeviceMesh) -> dict[str, Any]:
    """A few steps behind one to warm up: bytes of all hosts, and seconds, in a step."""
    torch.manual_seed(0)
    module = GPT(MODEL, SEQ)
    numel = sum(p.numel() for p in module.parameters())
    step = peer(module, mesh) if scheme.is_peer else ours(scheme, module, mesh)
    step()
    dist.barrier()
    before, begun = counted(), time.monotonic()
    for _ in range(STEPS):
        loss = step()
    dist.barrier()
    seconds = (time.monotonic() - begun) / STEPS
    mine = [after - then for after, then in zip(counted(), before, strict=True)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    hosts = everyone[::RANKS]  # ranks of one host read the same counters
    between, inside = (sum(host[i] for host in hosts) / STEPS for i in range(2))
    return {"numel": numel, "seconds": seconds, "between": between, "inside": inside, "loss": loss}


def counted() -> tuple[int, int]:
    """Bytes that this host's `eth0` and `lo` have sent."""
    rows = dict(line.split(":", 1) for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    sent = {name.strip(): int(row.split()[8]) for name, row in rows.items()}
    return sent["eth0"], sent["lo"]


def ours(scheme: Scheme, module: nn.Module, mesh: DeviceMesh) -> Callable[[], float]:
    """One step of Onefold under a scheme."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=MODEL.lr)
    onefold.shard(
        module, optimizer, stage=scheme.stage, precision="bf16", wire=scheme.wire,
        mesh=None if scheme.is_flat else mesh,
    )  # fmt: skip

    def step() -> float:
        for micro in range(scheme.accumulate):
            is_last = micro + 1 == scheme.accumulate
            with nullcontext() if is_last else onefold.accumulate(module):
                loss = loss_of(module)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def peer(module: nn.Module, mesh: DeviceMesh) -> Callable[[], float]:
    """One step of torch's fully_shard on the same mesh: sharded inside, replicated between."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=MODEL.lr, fused=True)

    def step() -> float:
        loss = loss_of(module)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def loss_of(module: nn.Module) -> torch.Tensor:
    """Cross-entropy of the same random bytes every time; other ones on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
    logits = module(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


# the driver


def main() -> int:
    """Run the worker on the hosts at each rate; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rates", nargs="*", default=["100mbit", "1gbit"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="write the newest result's table")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.rounds)
        return 0
    if arguments.table:
        newest = sorted(arguments.results.glob("*-wire.json"))[-1]
        show(tables(json.loads(newest.read_text())))
        return 0
    about = provenance()
    found: dict[str, Any] = {**about, "rates": {}}
    path = arguments.results / f"{about['date']}-wire.json"
    for rate in arguments.rates:
        rows: list[dict[str, Any]] = []

        def note(line: str, rows: list[dict[str, Any]] = rows, rate: str = rate) -> None:
            if line.startswith("{"):
                rows.append(rounded(json.loads(line)))
                row = rows[-1]
                between = row["between"] / row["numel"]
                told = f"{rate} {row['round']} {row['scheme']:36s} {row['seconds']:.3f} s"
                print(f"{told} {between:.3f} B/param between", flush=True)

        try:
            with Hosts(NODES, rate) as hosts:
                command = (__file__, "--worker", "--rounds", str(arguments.rounds))
                ended = hosts.torchrun(*command, ranks=RANKS, timeout_s=3000, on_line=note)
        except HostsError as error:
            print(f"wire: {error}", file=sys.stderr)
            return 2
        failed = [host for host in ended if host.code]
        if failed:
            print(f"wire: a host ended with {failed[0].code}:\n{failed[0].err}", file=sys.stderr)
            return 1
        found["rates"][rate] = rows
        arguments.results.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    show(tables(found))
    return 0


def show(lines: list[str]) -> None:
    """Print the tables, and put them into the page."""
    print("\n".join(lines))
    write_block(PAGE, "wire", lines)


def tables(found: dict[str, Any]) -> list[str]:
    """Bytes beside the formula, and step times beside those of stage 3 on one axis."""
    rates = found["rates"]
    some = next(iter(rates.values()))
    unit = _of(some, "stage 3, two hops", "between")
    about = f"{found['date']}, commit {found['commit']}, {_rounds(some)} rounds."
    lines = [
        about,
        "",
        "| scheme | between nodes, B/param | formula | off | of stage 3 | inside, B/param |"
        + "".join(f" step at {rate}, s | faster |" for rate in rates),
        "|---|---|---|---|---|---|" + "---|---|" * len(rates),
    ]
    for scheme in SCHEMES:
        between = _of(some, scheme.name, "between")
        formula = scheme.nbytes_between
        cells = [scheme.name, f"{between:.3f}"]
        cells += (
            ["", ""] if formula is None else [f"{formula:.3f}", f"{between / formula - 1:+.1%}"]
        )
        base = _of(some, "stage 3, two hops, 8 micro-batches", "between")
        cells += [f"{between / (base if scheme.accumulate > 1 else unit):.3f}"]
        cells += [f"{_of(some, scheme.name, 'inside'):.2f}"]
        for rows in rates.values():
            seconds = median(row["seconds"] for row in rows if row["scheme"] == scheme.name)
            cells += [f"{seconds:.2f}", _faster(rows, scheme)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _rounds(rows: list[dict[str, Any]]) -> int:
    return 1 + max(row["round"] for row in rows)


def _of(rows: list[dict[str, Any]], scheme: str, what: str) -> float:
    """Bytes a parameter, the median of rounds."""
    return median(row[what] / row["numel"] for row in rows if row["scheme"] == scheme)


def _faster(rows: list[dict[str, Any]], scheme: Scheme) -> str:
    """Times as fast as stage 3 on one axis: the median of ratios inside rounds, and their range."""
    base = "stage 3, two hops, 8 micro-batches" if scheme.accumulate > 1 else "stage 3, one axis"
    by_round: dict[int, dict[str, float]] = {}
    for row in rows:
        by_round.setdefault(row["round"], {})[row["scheme"]] = row["seconds"]
    ratios = [
        r[base] / r[scheme.name] for r in by_round.values() if {base, scheme.name} <= r.keys()
    ]
    return f"{median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"


if __name__ == "__main__":
    sys.exit(main())
