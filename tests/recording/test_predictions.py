"""What `print(onefold.report(model))` predicts, on models as users have them: within 5 %."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.support.hf_ranks import run_forks
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # PEFT's call
]

TOKENS = 512
DECODER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
GROUPED = {**DECODER, "num_key_value_heads": 2}
ENCODER_DECODER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "max_position_embeddings": 64, "decoder_start_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_layer": 4, "n_embd": 128, "n_head": 4}),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "Qwen3ForCausalLM": (
        "Qwen3Config", {**GROUPED, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, "head_dim": 16}),
    "MixtralForCausalLM": (
        "MixtralConfig", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "OPTForCausalLM": (
        "OPTConfig",
        {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4, "num_heads": 4,
         "decoder_start_token_id": 0},
    ),
    "BartForConditionalGeneration": ("BartConfig", ENCODER_DECODER),
    "BertForMaskedLM": ("BertConfig", {**DECODER, "max_position_embeddings": 64}),
    "ViTForImageClassification": (
        "ViTConfig", {**DECODER, "image_size": 8, "patch_size": 4, "num_labels": 3},
    ),
}  # fmt: skip
"""Ten architectures, by class: tied heads, a shared encoder and decoder embedding, experts."""


def built(name: str) -> nn.Module:
    config, sizes = MODELS[name]
    if not name.startswith("ViT"):
        sizes = {**sizes, "vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 1}
        sizes["pad_token_id"] = 1
    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


def batch(name: str, generator: torch.Generator) -> dict[str, Tensor]:
    if name.startswith("ViT"):
        images = torch.randn(2, 3, 8, 8, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([0, 1])}
    words = torch.randint(2, TOKENS, (2, 32), generator=generator)
    return {"input_ids": words, "labels": words}


def with_adapters(model: nn.Module) -> nn.Module:
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    parts = [(n, p) for n, p in model.named_modules() if isinstance(p, kinds)]
    names = sorted({n.split(".")[-1] for n, p in parts if TOKENS not in p.weight.shape})
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names[:3]))


def trained(
    model: nn.Module, name: str, rank: int, optimizer: Any = None, *, steps: int = 3
) -> onefold.Report:
    """Steps of two micro-batches."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        with onefold.accumulate(model):
            model(**batch(name, generator)).loss.backward()
        model(**batch(name, generator)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return onefold.report(model)


@again_but(
    "GPT2LMHeadModel-0-2", "Gemma2ForCausalLM-1-3", "OPTForCausalLM-2-3",
    "T5ForConditionalGeneration-3-2", "ViTForImageClassification-0-3",
)  # fmt: skip
@worlds_in_turn
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_an_optimizer_that_came_after_shard_holds_what_was_predicted(
    name, stage, world_size
):
    def body(rank: int) -> None:
        model = onefold.shard(seeded(lambda: built(name)), stage=stage)
        optimizer = torch.optim.AdamW(model.parameters())
        report = trained(model, name, rank, optimizer)
        assert report.predicted["optimizer"] == report.nbytes("optimizer") > 0
        assert report.differing() == {}

    run_ranks(world_size, body)


@again_but(
    "GPT2LMHeadModel-0-2", "Gemma2ForCausalLM-1-3", "OPTForCausalLM-2-3",
    "T5ForConditionalGeneration-3-2", "ViTForImageClassification-0-3",
)  # fmt: skip
@worlds_in_turn
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_adapters_that_were_merged_inside_unsharded_hold_what_was_predicted(
    name, stage, world_size
):
    def body(rank: int) -> None:
        model = with_adapters(seeded(lambda: built(name)))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        onefold.shard(model, optimizer, stage=stage)
        assert trained(model, name, rank, optimizer).differing() == {}
        with onefold.unsharded(model, writeback=True):
            model.merge_adapter()
            model.unmerge_adapter()
        assert onefold.report(model).differing() == {}

    run_ranks(world_size, body)


@again_but(
    "{'stage': 0}-grads kept-1", "{'stage': 1}-grads cleared-1", "{'stage': 2}-grads cleared-3",
    "{'stage': 3}-grads kept-1", "{'stage': 3}-grads cleared-2",
    "{'stage': 1, 'offload': 'optimizer'}-grads kept-3",
    "{'stage': 1, 'offload': 'optimizer'}-grads cleared-1",
)  # fmt: skip
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("clears", [False, True], ids=["grads kept", "grads cleared"])
@pytest.mark.parametrize("sharding", [
    {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 1, "offload": "optimizer"},
], ids=str)  # fmt: skip
def test_weights_shown_after_a_step_hold_what_was_predicted(sharding, clears, world_size):
    """Cleared gradients are freed first, so `unsharded` needs no room for both."""

    def body(rank: int) -> None:
        model = seeded(lambda: built("GPT2LMHeadModel"))
        optimizer = torch.optim.AdamW(model.parameters())
        onefold.shard(model, optimizer, **sharding)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch("GPT2LMHeadModel", generator)).loss.backward()
            optimizer.step()
        if clears:
            optimizer.zero_grad()
        with onefold.unsharded(model):
            pass
        report = onefold.report(model)
        assert report.differing() == {}
        if world_size == 1:  # weights, two moments, gradients until they are cleared, and the copy
            copies = 4 if clears else 5
            assert report.memory_peak == pytest.approx(copies * report.nbytes("weight"), rel=0.01)

    run_ranks(world_size, body)


def test_a_report_says_why_a_run_holds_less_than_predicted():
    """After one step, the peak is yet to come; later, fast messages leave buffers unused."""

    def body(rank: int) -> None:
        model = seeded(lambda: built("GPT2LMHeadModel"))
        optimizer = torch.optim.AdamW(model.parameters())
        onefold.shard(model, optimizer, stage=3)
        model(**batch("GPT2LMHeadModel", torch.Generator().manual_seed(rank))).loss.backward()
        optimizer.step()
        report = onefold.report(model)
        early = "held [0-9.]+ MiB: the first backward runs without optimizer states"
        assert re.search(early, report.verdict)
        peak = report.memory_peak
        held = {kind: tiers["device"].peak for kind, tiers in report.memory.items()}
        apart = replace(report, steps=2, predicted={**held, "all": peak + held["wire"]})
        assert apart.verdict.endswith(
            ": kinds peaked at different moments, as messages ended early"
        )
        wire = {"wire": 2 * held["wire"]}
        late = replace(report, steps=2, predicted={**apart.predicted, **wire})
        assert ": wire needed less, as messages ended before the next ones began" in late.verdict

    run_ranks(2, body)


@again_but(
    "GPT2LMHeadModel", "Gemma2ForCausalLM", "T5ForConditionalGeneration",
    "ViTForImageClassification",
)  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_two_backwards_without_a_word_to_the_module_hold_what_was_predicted(name):
    """Accelerate accumulates so on one rank, and many a loop does."""

    def body(rank: int, stage: int, precision: Any = None) -> None:
        model = seeded(lambda: built(name))
        optimizer = torch.optim.AdamW(model.parameters())
        onefold.shard(model, optimizer, stage=stage, precision=precision)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            for _ in range(2):
                model(**batch(name, generator)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        report = onefold.report(model)
        assert report.differing() == {}
        assert "more than 5 %" not in report.verdict

    run_ranks(1, body, 3)
    run_ranks(2, body, 3, "bf16")
    run_ranks(3, body, 2)


@again_but("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_saving_and_generating_hold_what_was_predicted(stage, tmp_path):
    def body(rank: int) -> None:
        model = seeded(lambda: built("GPT2LMHeadModel"))
        optimizer = torch.optim.AdamW(model.parameters())
        onefold.shard(model, optimizer, stage=stage)
        trained(model, "GPT2LMHeadModel", rank, optimizer)
        onefold.save(tmp_path / "saved", model, optimizer)
        onefold.full_state_dict(model)
        inputs = batch("GPT2LMHeadModel", torch.Generator())
        with onefold.generating(model), torch.no_grad():
            model(**inputs)
        assert onefold.report(model).differing() == {}

    run_ranks(2, body)


@again_but("3")
@pytest.mark.process
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_under_trainer_a_model_holds_what_was_predicted(stage, tmp_path):
    """Trainer builds its optimizer after the callback has sharded, and saves as it goes."""
    assert run_forks(2, _under_trainer, [*MODELS][:1], stage, tmp_path) == [{}, {}]


def _under_trainer(rank: int, names: list[str], stage: int, folder: Path) -> dict[str, Any]:
    from onefold.hf import Callback
    from tests.support.trainers import trainer_of

    differing: dict[str, Any] = {}
    for name in names:
        build: Callable[[], nn.Module] = lambda name=name: built(name)
        rows = [{k: v[0] for k, v in batch(name, torch.Generator()).items()} for _ in range(16)]
        trainer = trainer_of(
            folder / name, Callback(stage=stage), build=build, data=rows,
            gradient_accumulation_steps=2, save_strategy="steps", save_steps=2,
        )  # fmt: skip
        trainer.train()
        trainer.save_model(str(folder / name / "model"))
        differing |= {name: off} if (off := onefold.report(trainer.model).differing()) else {}
    return differing
