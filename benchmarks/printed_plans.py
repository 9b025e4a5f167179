"""The script that a plan prints, run as printed: the ledger's peak against the planned one.

    python benchmarks/printed_plans.py               40 cases; writes results and table
    python benchmarks/printed_plans.py --held-out    40 others, which no change was made for
    python benchmarks/printed_plans.py --only 7 12   some of them; prints them
    python benchmarks/printed_plans.py --folder DIR  goes on with the rows of a run before

Cases are drawn, not chosen: a model, ranks, dtype, precision, tokens, micro-batches, recompute, and
the way whose memory the ranks have. The plan then chooses stage and offload for that memory. Ranks
are gloo processes, one thread each. They run the printed lines word for word, but for the folder of
`disk:PATH`, then 4 steps. Bytes are the engine's own in CPU memory: activations and files are not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import torch
from contest.results import RESULTS, provenance, write_block

import onefold

sys.path.insert(0, str(Path(__file__).parent.parent))

from onefold.planner.byte_executor import ACTIVATION, LOGITS, Holding
from onefold.planner.memory import forecast
from onefold.planner.result import Plan
from onefold.planner.trace import default_loss
from onefold.recording.report import UPPER_BOUNDS
from tests.support.hf_ranks import run_forks

DOCS = Path(__file__).parent.parent / "docs" / "measurements" / "memory.md"
NUM_CASES, STEPS, NEAR, VOCAB = 40, 4, 0.05, 256
OF_TORCH = (ACTIVATION, LOGITS, "batch", "buffer")
"""Kinds that a plan counts and the ledger does not."""
LLAMA = {
    "vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA},
    "llama-bf16": {"model_type": "llama", "torch_dtype": "bfloat16", **LLAMA},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 24, "tie_word_embeddings": True},
    "mixtral": {
        "model_type": "mixtral", **LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 512, "n_embd": 96, "n_layer": 4, "n_head": 4,
        "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0,
    },
}  # fmt: skip
FUNCTIONS = ("bert", "minilm", "vit", "t5", "waves")
MODELS = ("tiny", "mini", *CONFIGS, *FUNCTIONS)


@dataclass(frozen=True, slots=True)
class PrintedCase:
    """What a user asks of `onefold plan`. `memory`: bytes of a rank."""

    model: str
    ranks: int
    seq: int
    batch: int
    accumulate: int = 1
    dtype: str | None = None
    precision: str | None = None
    recompute: bool = False
    offload: str = "auto"
    memory: int = 1 << 40

    @property
    def words(self) -> str:
        """The request in a few words."""
        parts = [self.model, f"{self.ranks} ranks", f"{self.batch} x {self.seq} tokens"]
        parts += [f"{self.accumulate} micro-batches"] * (self.accumulate > 1)
        parts += [f"{self.dtype} weights"] * bool(self.dtype)
        parts += [f"precision {self.precision}"] * bool(self.precision)
        parts += ["recompute"] * self.recompute
        return ", ".join(parts)


def plan_of(case: PrintedCase, folder: str) -> Plan:
    """Plan a case; `folder` receives its configuration."""
    name = case.model
    if name in CONFIGS:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIGS[name]))
        name = str(path)
    elif name in FUNCTIONS:
        name = f"printed_models:{name}"
    return onefold.plan(
        name, cluster={"ranks": case.ranks, "device_type": "cpu", "memory": case.memory},
        seq=case.seq, batch=case.batch, accumulate=case.accumulate, dtype=case.dtype,
        precision=case.precision, recompute=case.recompute, offload=case.offload,
    )  # fmt: skip


def drawn(number: int) -> PrintedCase:
    """Draw what is asked for, and as memory the bytes of one of the ways to train it.

    The same number gives the same case. Models take turns.
    """
    random, model = Random(number), MODELS[number % len(MODELS)]
    is_own = model in FUNCTIONS  # its owner builds it, and recomputes what it likes
    case = PrintedCase(
        model=model,
        ranks=random.choice((1, 2, 2, 3, 4)),
        seq=768 if model == "vit" else random.choice((16, 32, 64, 128)),
        batch=random.choice((1, 2, 4)),
        accumulate=random.choice((1, 1, 2, 3)),
        dtype=None if is_own else random.choice((None, None, "bf16", "fp32")),
        precision=random.choice((None, None, "bf16", "bf16", "fp32")),
        recompute=not is_own and random.random() < 0.4,
        offload=random.choice(("auto", "auto", "auto", "auto", "optimizer", "cpu", "disk")),
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = plan_of(case, folder).rows
    return PrintedCase(**asdict(case) | {"memory": random.choice(rows).needs["device"]})


def train_printed(rank: int, script: str, case: PrintedCase) -> onefold.Report:
    """Run the printed lines on one rank, then some steps; what the ledger has seen."""
    torch.manual_seed(0)
    given: dict[str, Any] = {}
    exec(script, given)
    model, optimizer = given["model"], given["optimizer"]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        for micro in range(case.accumulate):
            is_last = micro + 1 == case.accumulate
            shape = (case.batch, case.seq)
            tokens = torch.randint(0, VOCAB, shape, generator=generator)
            with nullcontext() if is_last else onefold.accumulate(model):
                default_loss(model(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return onefold.report(model)


def in_memory(held: Holding) -> dict[str, int]:
    """Bytes of the engine's own kinds, without files."""
    kinds: dict[str, int] = {}
    for (kind, tier), nbytes in held.items():
        if tier != "disk" and kind not in OF_TORCH:
            kinds[kind] = kinds.get(kind, 0) + nbytes
    return kinds


def compared(made: Plan, report: onefold.Report) -> dict[str, Any]:
    """Compare the planned peak of the engine's own bytes with the ledger's, all and by kind."""
    row = made.taken
    found = forecast(
        made.search.trace_of(row.rows), row.forecast.recipe, accumulate=made.search.accumulate,
        has_timeline=True,
    )  # fmt: skip
    planned = in_memory(found.most)
    ledger = {
        kind: sum(usage.peak for tier, usage in tiers.items() if tier != "disk")
        for kind, tiers in report.memory.items()
    }
    kinds = {
        kind: (planned.get(kind, 0), ledger.get(kind, 0)) for kind in sorted({*planned, *ledger})
    }
    return {
        "stage": row.stage,
        "offload": row.offload,
        "fits": made.fits,
        "planned": max(sum(in_memory(at.held).values()) for at in found.timeline),
        "ledger": report.memory_peak,
        "kinds": {kind: both for kind, both in kinds.items() if any(both)},
    }


def measured(case: PrintedCase) -> dict[str, Any]:
    """Plan a case, run its script on all ranks, and compare rank 0, whose share is largest."""
    with tempfile.TemporaryDirectory() as folder:
        made = plan_of(case, folder)
        script = made.script.replace("disk:PATH", f"disk:{folder}")
        report = run_forks(case.ranks, train_printed, script, case)[0]
    return {**asdict(case), "script": made.script.splitlines()[-1], **compared(made, report)}


def why(row: dict[str, Any]) -> str:
    """Name the kinds whose bytes differ by more than 1 % of all, planned less ledger."""
    differences = {kind: planned - got for kind, (planned, got) in row["kinds"].items()}
    parts = [
        f"{kind}{' (upper bound)' * (kind in UPPER_BOUNDS)} {nbytes / row['ledger']:+.1%}"
        for kind, nbytes in sorted(differences.items(), key=lambda pair: -abs(pair[1]))
        if abs(nbytes) > 0.01 * row["ledger"]
    ]
    return ", ".join(parts)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the page."""
    near = sum(abs(row["planned"] / row["ledger"] - 1) <= NEAR for row in rows)
    lines = [
        f"Planned peaks within 5 % of the ledger's: {near} of {len(rows)}.", "",
        "| plan | stage, offload | planned MiB | ledger MiB | planned / ledger | what differs |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    names = set(PrintedCase.__dataclass_fields__)
    for row in rows:
        words = PrintedCase(**{name: row[name] for name in names}).words
        planned, ledger = row["planned"], row["ledger"]
        lines.append(
            f"| {words} | {row['stage']}, {row['offload']} | {planned / 2**20:.2f} | "
            f"{ledger / 2**20:.2f} | {planned / ledger:.3f} | {why(row)} |"
        )
    return lines


def chosen(numbers: Iterable[int], keep: Path | None) -> Iterator[dict[str, Any]]:
    """Run the cases of these numbers; `keep`: a file that has, and receives, rows."""
    kept = keep.read_text().splitlines() if keep is not None and keep.exists() else []
    rows = {row["number"]: row for row in map(json.loads, kept)}
    for number in numbers:
        row = rows.get(number)
        if row is None:
            row = {"number": number, **measured(drawn(number))}
            line = json.dumps(row)
            print(line, flush=True)
            if keep is not None:
                with keep.open("a") as file:
                    file.write(line + "\n")
        yield row


def main() -> None:
    """Run, and write the results and the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of cases, from 0")
    parser.add_argument("--held-out", action="store_true", help="the next 40 cases")
    parser.add_argument("--folder", type=Path, help="keeps finished rows, for the next call")
    arguments = parser.parse_args()
    first, name = (NUM_CASES, "held-out-plans") if arguments.held_out else (0, "printed-plans")
    importlib.import_module("printed_models")
    keep = None if arguments.folder is None else arguments.folder / "printed-plans.jsonl"
    rows = list(chosen(arguments.only or range(first, first + NUM_CASES), keep))
    lines = table(rows)
    print("\n".join(lines))
    if not arguments.only:
        target = RESULTS / f"{date.today()}-{name}.json"
        target.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")
        write_block(DOCS, name.replace("-", " "), lines)


if __name__ == "__main__":
    main()
