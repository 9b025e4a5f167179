"""Memory of `onefold finetune` for a Llama of 1.1 billion parameters, on 2 ranks of this machine.

    python benchmarks/finetune.py [--folder DIR] [--steps 3] [--seq 128]

The model has random weights, which its folder holds in bf16: ranks read their own rows and train in
fp32. DIR needs 8 GB of disk; the machine needs 21 GB of free memory. Compared are, for the rank
that holds most: the ledger's peak with the plan's, and with own shards and two units; and the
resident peak with the ledger's, activations and what the imports take. Writes
`benchmarks/results/DATE-finetune.json`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from contest.results import append_run
from printed_plans import in_memory

import onefold
from onefold.planner.memory import forecast
from onefold.recording.report import UPPER_BOUNDS

RANKS = 2
SIZES = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "vocab_size": 32_000,
    "dtype": "bfloat16",
}  # fmt: skip
MAKE = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(LlamaConfig.from_pretrained(sys.argv[1]))
model.save_pretrained(sys.argv[1], max_shard_size="500MB")
"""
IMPORT = """
import resource
import onefold.app.finetune.tuning, onefold.app.finetune.model, onefold.hf
import datasets, peft, transformers, trl
from trl import SFTTrainer
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def output_of(*command: str) -> str:
    """What a command of this Python prints."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def made(folder: Path) -> Path:
    """Make the model, a tokenizer and rows, as examples/finetune.sh does with a small model."""
    examples = Path(__file__).parents[1] / "examples"
    output_of(str(examples / "finetune_model.py"), str(folder))
    model = folder / "model"
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | SIZES))
    output_of("-c", MAKE, str(model))
    return model


def planned(model: Path, steps: argparse.Namespace, recompute: bool) -> tuple[int, int]:
    """The planned peak of the engine's own bytes, and that with activations."""
    plan = onefold.plan(
        str(model / "config.json"), ranks=RANKS, stage=3, seq=steps.seq, dtype="fp32",
        offload="none", recompute=recompute,
    )  # fmt: skip
    row = plan.taken
    found = forecast(plan.search.trace_of(row.rows), row.forecast.recipe, has_timeline=True)
    return max(sum(in_memory(at.held).values()) for at in found.timeline), found.memory_nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="default: a temporary one")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seq", type=int, default=128)
    asked = parser.parse_args()
    imports = int(output_of("-c", IMPORT))
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        folder = Path(place)
        model = made(folder)
        tuned = json.loads(output_of(
            "-m", "onefold", "finetune", "--json", "--model", str(model), "--data",
            str(folder / "chats.jsonl"), "--out", str(folder / "tuned"), "--steps",
            str(asked.steps), "--seq", str(asked.seq), "--ranks", str(RANKS), "--stage", "3",
            "--offload", "none", "--held-out", "0.002", "--sample", "4", "--packing",
        ))  # fmt: skip
        way = tuned["way"]
        own, whole = planned(model, asked, way["recompute"])
    ranks = tuned["memory"]
    most = max(ranks, key=lambda rank: rank["total_peak"])
    numel, resident = tuned["num_parameters"], max(rank["resident_peak"] for rank in ranks)
    unit = 4 * SIZES["vocab_size"] * SIZES["hidden_size"]  # the largest: an embedding
    activations = whole - own
    row: dict[str, Any] = {
        "way": way["line"], "parameters": numel, "torch": torch.__version__,
        "upper_bounds": [*UPPER_BOUNDS],
        "ledger": most["total_peak"], "planned": own,
        "planned / ledger": own / most["total_peak"],
        "shards and two units": 16 * numel // RANKS + 2 * 2 * unit,
        "ledger / shards and two units": most["total_peak"] / (16 * numel // RANKS + 4 * unit),
        "planned with activations": whole, "activations": activations, "imports": imports,
        "resident": resident,
        "resident / ledger, activations and imports":
            resident / (most["total_peak"] + activations + imports),
        "peak by kind": most["peak"], "losses": tuned["losses"],
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    append_run(f"{date.today().isoformat()}-finetune.json", row)


if __name__ == "__main__":
    main()
