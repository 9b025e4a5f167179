"""Muon sharded over two ranks: results, bytes and CPU seconds, against plain Muon and AdamW.

    python benchmarks/muon.py                        writes a result, and the table of its page
    python benchmarks/muon.py --model tiny --no-page

Matrices of the byte GPT's blocks go to `torch.optim.Muon`, the rest to AdamW. Every run sees the
same rows: two ranks take half of each batch. One thread a rank. A step's seconds are those of the
CPU, of the slower rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from contest.results import RESULTS, provenance, rounded, write_block
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import onefold
from onefold.planner.models.loader import build_model

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "muon.md"
ROWS, SEQ, RANKS = 8, 128, 2
SKIPPED = 2  # steps in which states and buffers are made


def optimizers(model: nn.Module, *, uses_muon: bool) -> list[torch.optim.Optimizer]:
    """AdamW on all parameters, or Muon on the matrices of blocks and AdamW on the rest."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = uses_muon and parameter.ndim == 2 and name.startswith("blocks.")
        (matrices if is_matrix else others).append(parameter)
    muon = [torch.optim.Muon(matrices, lr=1e-3)] if matrices else []
    return [*muon, torch.optim.AdamW(others, lr=1e-3)]


def train(rank: int, ranks: int, case: dict[str, Any], stage: int | None) -> dict[str, Any]:
    """Train; return losses, CPU seconds of a step, and bytes of this rank's states and messages."""
    torch.manual_seed(0)
    model = build_model(case["model"], SEQ, is_cut=True)
    chosen = optimizers(model, uses_muon=case["uses_muon"])
    if stage is not None:
        onefold.shard(model, chosen, stage=stage)  # pyright: ignore[reportArgumentType]
    draw = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(case["steps"]):
        rows = (torch.randint(0, 64, (ROWS, SEQ + 1), generator=draw).cumsum(1) % 251)[rank::ranks]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        start = time.process_time()
        for optimizer in chosen:
            optimizer.step()
        seconds.append(time.process_time() - start)
        model.zero_grad()
        losses.append(loss.item())
    sent = {} if stage is None else onefold.report(model).last_step
    return {
        "losses": losses, "step_s": statistics.median(seconds[SKIPPED:]),
        "state_nbytes": sum(map(state_nbytes, chosen)),
        "sent": {name: traffic.sent_nbytes for name, traffic in sent.items()},
    }  # fmt: skip


def state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's states on this rank."""
    values = (value for state in optimizer.state.values() for value in state.values())
    local = (value.to_local() if isinstance(value, DTensor) else value for value in values)
    return sum(value.nbytes for value in local if isinstance(value, torch.Tensor))


def one_rank(rank: int, address: str, case: dict[str, Any], stage: int, results: Any) -> None:
    """A process of `sharded`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    results.put((rank, train(rank, RANKS, case, stage)))
    torch.distributed.destroy_process_group()


def sharded(case: dict[str, Any], stage: int) -> list[dict[str, Any]]:
    """Train on two processes."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/store"
        context = mp.spawn(one_rank, (address, case, stage, results), nprocs=RANKS, join=False)
        found = dict(results.get() for _ in range(RANKS))
        while not context.join():
            pass
    return [found[rank] for rank in range(RANKS)]


def row(name: str, ranks: list[dict[str, Any]], plain: dict[str, Any]) -> list[str]:
    """A row of the table: the fuller and slower rank, and the losses' distance from one process."""
    means = [sum(pair) / len(ranks) for pair in zip(*(r["losses"] for r in ranks), strict=True)]
    distance = max(abs(a - b) for a, b in zip(means, plain["losses"], strict=True))
    sent = {way: max(r["sent"].get(way, 0) for r in ranks) for way in WAYS}
    return [
        name, "-" if ranks[0] is plain else f"{distance:.0e}",
        f"{max(r['state_nbytes'] for r in ranks) / 1e6:.1f}",
        *(f"{sent[way] / 1e6:.1f}" if sent[way] else "-" for way in WAYS),
        f"{1e3 * max(r['step_s'] for r in ranks):.0f}",
    ]  # fmt: skip


WAYS = ("gather", "reduce_scatter", "whole_matrix")
HEAD = (
    "run", "losses differ by", "states, MB", "gathers, MB", "reductions, MB", "Muon's step, MB",
    "step, CPU ms",
)  # fmt: skip


def main() -> None:
    """Run all cases; write the result and the page's table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--no-page", action="store_true")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    cases, rows = {}, []
    for name in ("Muon", "AdamW"):
        case = {"model": flags.model, "steps": flags.steps, "uses_muon": name == "Muon"}
        plain = train(0, 1, case, None)
        runs = {f"{name}, one process": [plain]}
        runs |= {f"{name}, 2 ranks, stage {stage}": sharded(case, stage) for stage in (1, 3)}
        cases |= runs
        rows += [row(run, ranks, plain) for run, ranks in runs.items()]
    about = provenance()
    lines = [
        f"{about['date']}, a byte GPT `{flags.model}`, {flags.steps} steps, fp32, gloo, one thread "
        "a rank, by `benchmarks/muon.py`. Bytes are of one rank and step.",
        "", *("| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *rows)),
    ]  # fmt: skip
    print("\n".join(lines))
    if not flags.no_page:
        path = RESULTS / f"{about['date']}-muon.json"
        path.write_text(json.dumps(rounded({**about, "runs": cases}), indent=1) + "\n")
        write_block(PAGE, "muon", lines)


if __name__ == "__main__":
    main()
