"""Predicted beside measured memory: models x stages x precision x accumulation x tiers x ranks.

    python benchmarks/memory.py                 every case; writes its results
    python benchmarks/memory.py --only llama    the cases whose names have that in them

Measured is what a rank really holds in its third step: everything that operations of torch make,
from the first moment to the last (planner/storages.py on real tensors), and what the ledger has
counted for buffers that torch does not make. The prediction has seen neither: it comes from a copy
of the module without values, and from the closed forms.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contest.results import RESULTS, provenance
from memory_cases import BATCH, MODELS, Case

import onefold
from onefold.config import Offload, offload_of, precision_of, stage_of
from onefold.engine.registry import engine_of
from onefold.planner.memory import forecast
from onefold.planner.storages import Storages
from onefold.planner.trace import default_loss, trace
from onefold.recipe import Recipe

DOCS = Path(__file__).parent.parent / "docs" / "measurements" / "memory.md"
BEGIN, END = "<!-- memory: begin -->", "<!-- memory: end -->"
NUM_WORST = 8

BY_TORCH = ("wire", "partial_grad", "activation")
"""Kinds whose bytes operations of torch make, and a watch of them sees."""


class Measured(Storages):
    """Everything that is held, by torch and by the engine, at every operation."""

    def __init__(self, ledger: Any, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self._ledger = ledger
        self._kinds = kinds
        self.most = 0
        self.held: dict[str, int] = {}

    def outside(self) -> int:
        usage = self._ledger.usage
        return sum(
            u.now for (kind, tier), u in usage.items() if kind in self._kinds and tier != "disk"
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        total = self.now + self.outside()
        if total > self.most:
            self.most = total
            self.held = {str(k): u.now for (k, _), u in self._ledger.usage.items() if u.now}
            self.held["torch"] = self.now
        return out


def cases() -> list[Case]:
    """At least 30 combinations of models and settings, at 1, 2 and 4 ranks."""
    found = [Case(model, stage, 2) for model in MODELS for stage in range(4)]
    found += [Case(model, 3, ranks) for model in MODELS for ranks in (1, 4)]
    found += [
        Case(model, stage, 2, "bf16") for model in MODELS if model != "conv" for stage in (1, 3)
    ]
    found += [
        Case(model, stage, 2, None, 3) for model in ("gpt", "llama", "conv") for stage in range(4)
    ]
    found += [Case(model, 3, 2, recompute=True) for model in MODELS if MODELS[model].recompute]
    found += [Case("gpt", stage, 2, "bf16", 2, True) for stage in range(4)]
    for model in ("gpt", "bert"):
        found += [Case(model, stage, 2, offload="optimizer") for stage in (1, 3)]
        found += [Case(model, 3, 2, offload="cpu"), Case(model, 3, 2, offload="disk")]
        found += [Case(model, 3, 2, "bf16", offload="disk")]
    return found


def _job(case: Case, folder: str) -> tuple[torch.nn.Module, Offload]:
    torch.manual_seed(0)
    made = MODELS[case.model]
    module = made.build().train()
    if case.recompute:
        assert made.recompute is not None, "no recompute for this model"
        made.recompute(module)
    choice = f"disk:{folder}" if case.offload == "disk" else case.offload
    return module, offload_of(choice)


def measure(case: Case, folder: str, steps: int = 3) -> dict[str, Any]:
    """What this rank holds in the last of a few steps."""
    module, offload = _job(case, folder)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    onefold.shard(module, optimizer, stage=case.stage, precision=case.precision, offload=offload)
    ledger = engine_of(module).ledger
    inside = BY_TORCH + (("grad",) if case.ranks == 1 else ())  # autograd makes a lone rank's
    kinds = tuple(k for k in ("weight", "master", "optimizer", "unsharded", "grad", "staging",
                              *BY_TORCH) if k not in inside)  # fmt: skip
    live = None
    for step in range(steps):
        live = Measured(ledger, kinds) if step == steps - 1 else None
        inputs = MODELS[case.model].inputs(BATCH)
        with live or nullcontext():
            for micro in range(case.accumulate):
                is_last = micro + 1 == case.accumulate
                with nullcontext() if is_last else onefold.accumulate(module):
                    outputs = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
                    loss = default_loss(outputs)
                    del outputs
                    loss.backward()
                    del loss
            optimizer.step()
            optimizer.zero_grad()
    report = onefold.report(module)
    assert live is not None, "no step was measured"
    batch = sum(t.nbytes for t in (inputs.values() if isinstance(inputs, dict) else inputs))
    buffers = sum(b.nbytes for b in module.buffers())
    return {"measured": live.most + batch + buffers, "at_peak": live.held,
            "rest": {kind: report.nbytes(kind) for kind in ("weight", "master", "optimizer")},
            "sent": {k: t.sent_nbytes for k, t in report.last_step.items()}}  # fmt: skip


def predict(case: Case, folder: str) -> dict[str, Any]:
    """The same from a copy without values."""
    module, offload = _job(case, folder)
    chosen = precision_of(case.precision)
    seen = trace(module, MODELS[case.model].inputs(BATCH), precision=chosen)
    recipe = Recipe(
        stage=stage_of(case.stage), world_size=case.ranks, precision=chosen, offload=offload
    )
    found = forecast(seen, recipe, accumulate=case.accumulate)
    held: dict[str, int] = {}
    for (kind, tier), nbytes in found.peak.held.items():
        if tier != "disk":
            held[kind] = held.get(kind, 0) + nbytes
    rest = {kind: sum(n for (k, _), n in found.resting.items() if k == kind)
            for kind in ("weight", "master", "optimizer")}  # fmt: skip
    return {"predicted": found.memory_nbytes, "phase": f"{found.peak.phase} {found.peak.unit}",
            "at_peak": held, "rest": rest,
            "sent": found.sent}  # fmt: skip


def _rank(rank: int, case: Case, port: int, folder: str, file: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}  # fmt: skip
    if case.ranks > 1:
        dist.init_process_group("gloo")
    found = measure(case, folder)
    if rank == 0:
        Path(file).write_text(json.dumps(found))
    if case.ranks > 1:
        dist.destroy_process_group()


def run(case: Case) -> dict[str, Any]:
    """Measured by ranks of their own, predicted here."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port, file = free.getsockname()[1], f"{folder}/rank0.json"
        free.close()
        mp.start_processes(_rank, (case, port, folder, file), case.ranks, start_method="fork")
        measured = json.loads(Path(file).read_text())
        predicted = predict(case, folder)
    ratio = predicted["predicted"] / measured["measured"]
    return {"case": str(case), "ratio": ratio, "measured": measured, "predicted": predicted}


def page(results: list[dict[str, Any]]) -> list[str]:
    """The table of docs/measurements/memory.md: errors by model, and the largest errors."""
    lines = [
        f"{len(results)} runs; predicted / measured, median [lowest - highest], and runs that are "
        "within 5 %:", "",
        "| model | runs | predicted / measured | within 5 % |", "|---|---|---|---|",
    ]  # fmt: skip
    for model in MODELS:
        ratios = sorted(r["ratio"] for r in results if r["model"] == model)
        inside = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
        spread = f"{median(ratios):.3f} [{ratios[0]:.3f} - {ratios[-1]:.3f}]"
        lines.append(f"| {model} | {len(ratios)} | {spread} | {inside} |")
    worst = sorted(results, key=lambda r: -abs(r["ratio"] - 1))[:NUM_WORST]
    lines += [
        "",
        "The furthest off:",
        "",
        "| run | measured | predicted / measured |",
        "|---|---|---|",
    ]
    lines += [
        f"| {r['case']} | {r['measured'] / 2**20:.1f} MiB | {r['ratio']:.3f} |" for r in worst
    ]
    exact = sum(r["is_exact"] for r in results)
    lines += ["", f"States at rest (weights, masters, moments) equal to the byte: {exact} of "
              f"{len(results)} runs."]  # fmt: skip
    return lines


def filled(text: str, results: list[dict[str, Any]]) -> str:
    """docs/measurements/memory.md with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join((before + BEGIN, *page(results), END + after))


def newest(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The runs of the newest result file."""
    return json.loads(sorted(folder.glob("*-memory.json"))[-1].read_text())["runs"]


def told(found: dict[str, Any], case: Case) -> dict[str, Any]:
    """A run as it is kept."""
    measured, predicted = found["measured"], found["predicted"]
    return {
        "case": str(case), "model": case.model, "ratio": round(found["ratio"], 4),
        "measured": measured["measured"], "predicted": predicted["predicted"],
        "is_exact": measured["rest"] == predicted["rest"],
        "measured_by_kind": measured["at_peak"], "predicted_by_kind": predicted["at_peak"],
    }  # fmt: skip


def main() -> int:
    """Run the cases, print each, write the results and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="only write the page again")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = newest() if asked.page else []
    for case in [] if asked.page else cases():
        if asked.only in str(case):
            runs.append(told(run(case), case))
            print(f"{runs[-1]['ratio']:.3f} {runs[-1]['measured'] / 2**20:8.1f} MiB  {case}",
                  flush=True)  # fmt: skip
    if not asked.only and not asked.page:
        path = asked.results / f"{date.today().isoformat()}-memory.json"
        path.write_text(json.dumps({**provenance(), "runs": runs}, indent=1) + "\n")
    if not asked.only and asked.results == RESULTS:
        DOCS.write_text(filled(DOCS.read_text(), runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
