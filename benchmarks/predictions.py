"""Peaks that `onefold.report` predicts against measured ones, on ten architectures of transformers.

    python benchmarks/predictions.py                 every case; writes results and table

Cases: stages 1-3 on two ranks, plain, with LoRA, and under Trainer, 20 steps of two micro-batches
each. Ranks are processes. The bytes are those of the report: weights, gradients, states and buffers
of messages. For a peak that is more than 5 % off, the table has the line of the report.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from contest.results import RESULTS, provenance

import onefold

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.recording.test_predictions import MODELS, batch, built, trained, with_adapters
from tests.support.hf_ranks import run_forks
from tests.support.ranks import seeded

DOCS = Path(__file__).parent.parent / "docs" / "measurements" / "memory.md"
BEGIN, END = "<!-- predictions: begin -->", "<!-- predictions: end -->"
KINDS = ("plain", "LoRA", "Trainer")
WORLD, STEPS, NEAR = 2, 20, 0.05


def outcome(report: onefold.Report) -> dict[str, Any]:
    """Return predicted and measured bytes of all kinds together, and what the report says."""
    return {
        "predicted": report.predicted["all"],
        "measured": report.memory_peak,
        "off": report.differing(),
        "verdict": report.verdict,
    }


def in_a_loop(rank: int, name: str, stage: int, has_adapters: bool, steps: int) -> onefold.Report:
    """Train in a plain loop."""
    model = seeded(lambda: built(name))
    model = with_adapters(model) if has_adapters else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    onefold.shard(model, optimizer, stage=stage)
    return trained(model, name, rank, optimizer, steps=steps)


def under_trainer(rank: int, name: str, stage: int, folder: str, steps: int) -> onefold.Report:
    """Train with Trainer, which builds its optimizer late and saves as it goes."""
    from onefold.hf import Callback
    from tests.support.trainers import trainer_of

    rows = [{k: v[0] for k, v in batch(name, torch.Generator()).items()} for _ in range(16)]
    trainer = trainer_of(
        Path(folder), Callback(stage=stage), build=lambda: built(name), data=rows,
        gradient_accumulation_steps=2, save_strategy="steps", save_steps=steps // 2,
        max_steps=steps,
    )  # fmt: skip
    trainer.train()
    return onefold.report(trainer.model)


def reports(steps: int) -> Iterator[tuple[dict[str, Any], onefold.Report]]:
    """Run every case for some steps; rank 0's report of each."""
    for kind in KINDS:
        for name in MODELS:
            for stage in (1, 2, 3):
                case = {"kind": kind, "model": name, "stage": stage}
                if kind == "Trainer":
                    with tempfile.TemporaryDirectory() as folder:
                        yield case, run_forks(WORLD, under_trainer, name, stage, folder, steps)[0]
                else:
                    has_adapters = kind == "LoRA"
                    yield case, run_forks(WORLD, in_a_loop, name, stage, has_adapters, steps)[0]


def measured() -> list[dict[str, Any]]:
    """Run every case."""
    rows = []
    for case, report in reports(STEPS):
        rows.append({**case, **outcome(report)})
        print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the page."""
    lines = [
        "| how it trains | cases | predicted / measured | peak within 5 % | no warning |",
        "|---|---|---|---|---|",
    ]
    for kind in (*KINDS, "all"):
        own = [row for row in rows if kind in (row["kind"], "all")]
        ratios = sorted(row["predicted"] / row["measured"] for row in own)
        near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
        whole = sum(not row["off"] for row in own)
        lines.append(
            f"| {kind} | {len(own)} | {ratios[0]:.3f} - {ratios[-1]:.3f} | {near} | {whole} |"
        )
    far = [row for row in rows if abs(row["predicted"] / row["measured"] - 1) > NEAR]
    for row in far:
        ratio = row["predicted"] / row["measured"]
        said = f"{row['model']}, stage {row['stage']}, {row['kind']}: {ratio:.3f}."
        lines += ["", f'{said} The report: "{row["verdict"]}".']
    return lines


def main() -> None:
    """Run, and write the results and the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no-page", action="store_true", help="print the table alone")
    arguments = parser.parse_args()
    rows = measured()
    lines = table(rows)
    print("\n".join(lines))
    if arguments.no_page:
        return
    target = RESULTS / f"{date.today()}-predictions.json"
    target.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")
    head, _, tail = DOCS.read_text().partition(BEGIN)
    DOCS.write_text(head + BEGIN + "\n" + "\n".join(lines) + "\n" + END + tail.partition(END)[2])


if __name__ == "__main__":
    main()
