"""The dtype of weights in a plan: where it comes from, and what a narrower one would save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold import Precision
from onefold.errors import ConfigError
from onefold.planner.models.gpt import GPT, GPTConfig
from onefold.planner.planning import plan
from onefold.planner.result import Plan
from onefold.text import format_bytes
from tests.support.planned import most_of
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import worlds_in_turn

SEQ = 32
GPUS = {"ranks": 8, "memory": "8GiB"}
LLAMA = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def of_config(folder: Path, **fields: Any) -> str:
    pytest.importorskip("transformers")
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | fields))
    return str(path)


def planned(model: Any, **choices: Any) -> Plan:
    return plan(model, cluster=GPUS, seq=SEQ, **{"stage": 0, "offload": None, **choices})


def weight_nbytes(made: Plan) -> float:
    """Bytes of a weight at rest."""
    return made.taken.forecast.resting["weight", "device"] / made.numel


def said(made: Plan) -> list[str]:
    return [line for line in made.explain() if "weights are counted in" in line]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_weights_have_the_dtype_of_the_configuration(key, tmp_path):
    made = planned(of_config(tmp_path, **{key: "bfloat16"}))
    assert weight_nbytes(made) == pytest.approx(2, rel=0.01)
    assert said(made) == []
    assert "dtype=torch.bfloat16" in made.script


def test_where_the_configuration_names_no_dtype_one_line_says_what_was_assumed(tmp_path):
    path = of_config(tmp_path)
    made, chosen = planned(path), planned(path, dtype="bf16")
    assert weight_nbytes(made) == pytest.approx(4, rel=0.01)
    (line,) = said(made)
    assert "float32, as config.json names no dtype" in line
    assert "--dtype bf16" in line
    assert weight_nbytes(chosen) == pytest.approx(2, rel=0.01)
    assert said(chosen) == []
    assert "--dtype bf16" in chosen.command


def test_a_published_model_whose_dtype_is_not_kept_says_so():
    pytest.importorskip("transformers")
    (line,) = said(plan("llama-8b", cluster={"ranks": 8, "memory": "80GiB"}, seq=8, stage=3))
    assert "float32, as llama-8b.json names no dtype" in line


@worlds_in_turn
@pytest.mark.parametrize(
    ("stage", "offload"), [(0, None), (1, "optimizer"), (3, "optimizer"), (3, "cpu")]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_what_bf16_weights_would_save_is_what_a_plan_with_them_saves(stage, offload, batch):
    choices = {"stage": stage, "offload": offload, "batch": batch, "precision": "bf16"}
    wide, narrow = planned("mini", **choices), planned("mini", **choices, dtype="bf16")
    saved = wide.taken.needs["device"] - narrow.taken.needs["device"]
    offered = wide.bf16_weights
    if saved <= 0.01 * wide.taken.needs["device"]:
        assert offered is None
        return
    assert offered is not None
    assert offered.saved == saved
    assert offered.needs == narrow.taken.needs
    (line,) = [line for line in wide.explain() if "--dtype bf16" in line]
    assert f"{format_bytes(saved)} less" in line
    assert narrow.bf16_weights is None


def test_bf16_weights_save_up_to_two_bytes_a_parameter_at_stage_0():
    made = planned("mini", precision="bf16")
    assert made.bf16_weights is not None
    assert 1.5 * made.numel < made.bf16_weights.saved <= 2 * made.numel


@pytest.mark.parametrize("choices", [
    {"stage": 1, "precision": "bf16"}, {"stage": 3, "precision": "bf16"}, {"precision": "fp32"}, {},
])  # fmt: skip
def test_where_bf16_weights_save_nothing_they_are_not_offered(choices):
    assert planned("mini", **choices).bf16_weights is None


def test_for_a_module_the_offer_is_the_owners_line():
    with torch.device("meta"):
        module = GPT(GPTConfig(num_layers=2, width=64, num_heads=2, lr=1e-3), SEQ)
    assert any("model.bfloat16()" in line for line in planned(module, precision="bf16").explain())
    narrow = planned(module.bfloat16(), precision="bf16")
    assert narrow.bf16_weights is None


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("tiny", "int8"), (torch.nn.Linear(2, 2), "bf16"), (f"{__name__}:planned", "bf16")],
)
def test_a_dtype_that_cannot_be_chosen_is_refused(model, dtype):
    with pytest.raises(ConfigError, match="dtype"):
        planned(model, dtype=dtype)


class Adapted(nn.Module):
    """A frozen block with a layer that trains next to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.requires_grad_(False)
        self.added = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu()) + self.added(x)


def adapted() -> nn.Module:
    blocks = [Adapted() for _ in range(3)]
    return nn.Sequential(nn.Embedding(64, 64).requires_grad_(False), *blocks, nn.Linear(64, 64))


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_a_plan_of_frozen_weights_in_few_bits_is_what_a_run_holds(word, compute):
    """To the byte, but for partial gradients, which may leave earlier than planned."""
    precision = Precision(frozen=word, compute=compute)

    def run(rank: int, stage: int) -> dict[str, int]:
        module = seeded(adapted)
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
        onefold.shard(module, optimizer, stage=stage, precision=precision)
        for _ in range(2):
            module(torch.arange(16).view(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        memory = onefold.report(module).memory
        return {kind: sum(usage.peak for usage in of.values()) for kind, of in memory.items()}

    numel = sum(parameter.numel() for parameter in adapted().parameters())
    for world_size, stage in ((1, 3), (2, 0), (2, 2), (3, 3)):
        made = onefold.plan(
            adapted(), world_size=world_size, seq=8, batch=2, stage=stage, offload="none",
            precision=precision,
        )  # fmt: skip
        assert made.numel == numel
        held = run_ranks(world_size, run, stage)[0]
        for kind, nbytes in held.items():
            planned = most_of(made.taken.forecast, kind)
            assert (planned >= nbytes) if kind == "partial_grad" else (planned == nbytes), kind
