"""A stock Trainer with `onefold.hf.Callback` trains as the same Trainer under DDP."""

from __future__ import annotations

import copy
import inspect
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback

import onefold
import onefold.hf
from tests.adapters.test_huggingface import gpt2, t5
from tests.support.programs.drawing import draw_trainer
from tests.support.programs.gloo import run_gloo_ranks
from tests.support.programs.judging import Judge, Verdict
from tests.support.ranks import seeded
from tests.support.rows import again_but
from tests.support.trainers import arguments, llama, logs, on_ranks, rows, trainer_of, weights
from tests.support.zoo import STAGES_AT

pytestmark = pytest.mark.process
LOSS, WEIGHT = 1e-6, 5e-5
"""Allowed differences from DDP: of losses and norms, and of weights by the largest of a tensor."""

PRECISE = {"loss": 1e-12, "weight": 1e-9, "smallest": 1e-3}
"""The same in fp64, where AdamW does not make a step of rounding: biases of keys have no gradient.

They stay near 1e-15, so a difference is compared with at least `smallest`.
"""


class Mine(onefold.hf.TrainerMixin, Trainer):
    pass


def assert_as(
    found: Any, wanted: Any, loss: float = LOSS, weight: float = WEIGHT, smallest: float = 0.0
) -> None:
    """Two runs' logs and weights agree."""
    assert len(found[0]) == len(wanted[0]) > 0
    np.testing.assert_allclose(found[0], wanted[0], rtol=loss)
    for name, value in wanted[1].items():
        most = float((found[1][name] - value).abs().max())
        assert most <= weight * max(smallest, float(value.abs().max())), name


def _train(folder: Path, *callbacks: Any, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    trainer = trainer_of(folder, *callbacks, **options)
    trainer.train()
    return logs(trainer), weights(trainer.model)


def _stages(rank: int, folder: Path, reentrant: bool) -> None:
    options = {
        "gradient_accumulation_steps": 2, "warmup_steps": 2, "max_grad_norm": 0.3,
        "gradient_checkpointing": True, "lr_scheduler_type": "cosine",
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }  # fmt: skip
    wanted = _train(folder, **options)
    for stage in STAGES_AT[dist.get_world_size()]:
        assert_as(_train(folder, onefold.hf.Callback(stage=stage), **options), wanted)


@again_but("3-False")
@pytest.mark.parametrize(("world_size", "reentrant"), [(2, True), (3, False)])
def test_every_stage_trains_as_ddp(world_size, reentrant, tmp_path):
    """Accumulation, clipping, warm-up, recompute, token-weighted loss, an uneven last batch."""
    on_ranks(world_size, _stages, tmp_path, reentrant)


def _reductions(rank: int, folder: Path) -> None:
    for stage, times in ((1, 1), (2, 2)):
        trainer = trainer_of(
            folder, onefold.hf.Callback(stage=stage), gradient_accumulation_steps=2, max_steps=1
        )
        trainer.train()
        report = onefold.report(trainer.model)
        assert report.last_step["reduce_scatter"].calls == times * len(report.units)


def test_stage_1_reduces_once_a_step_of_a_trainer_and_stage_2_each_micro_batch(tmp_path):
    on_ranks(2, _reductions, tmp_path)


# other models and arguments


def _precise_llama() -> nn.Module:
    return llama().double()


def _precise_gpt2() -> nn.Module:
    return gpt2().double()


def _classifier() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=44, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


class Net(nn.Module):
    """A module that is no transformers model, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 40)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.embed(input_ids).flatten(0, 1)))
        loss = nn.functional.cross_entropy(logits, labels.flatten().clamp(min=0))
        return {"loss": loss, "logits": logits.view(*input_ids.shape, 40)}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(rows(30))


def _labelled() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": i % 3} for i, row in enumerate(rows(13))]


def _accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


OTHERS: dict[str, dict[str, Any]] = {
    "a classifier, evaluated": {
        "build": _classifier, "data": _labelled(), "eval_strategy": "steps", "eval_steps": 2,
        "options": {"eval_dataset": _labelled()[:7], "compute_metrics": _accuracy},
    },
    "a head tied to its embedding, smooth labels": {
        "build": _precise_gpt2, "label_smoothing_factor": 0.1,
    },
    "a plain module": {"build": Net, "dataloader_drop_last": True},
    "rows of a stream, whole matrices stepped": {"data": Stream(), "optim": "adafactor"},
    "no clipping": {"max_grad_norm": 0.0, "average_tokens_across_devices": False},
    "an epoch that ends in the middle of a step": {
        "data": rows(7), "gradient_accumulation_steps": 4, "num_train_epochs": 2, "max_steps": -1,
    },
    "bf16": {"build": llama, "bf16": True, "gradient_checkpointing": True},
}  # fmt: skip


def _others(rank: int, folder: Path) -> None:
    kinds: list[list[Any]] = [[], [onefold.hf.Callback(stage=3)]]
    for name, options in OTHERS.items():
        runs = []
        for callbacks in kinds:
            trainer = trainer_of(folder, *callbacks, **{"build": _precise_llama} | options)
            trainer.train()
            evaluated = [
                e[key]
                for e in trainer.state.log_history
                for key in ("eval_loss", "eval_accuracy")
                if key in e
            ]
            runs.append((logs(trainer), weights(trainer.model), evaluated))
        bounds: dict[str, float] = {} if name == "bf16" else PRECISE
        try:
            assert_as(runs[1], runs[0], **bounds)
            np.testing.assert_allclose(runs[1][2], runs[0][2], rtol=bounds.get("loss", LOSS))
        except AssertionError as error:
            error.add_note(name)
            raise


def test_other_models_and_arguments_train_as_ddp(tmp_path):
    on_ranks(2, _others, tmp_path)


def _generate(rank: int, folder: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    pairs = [
        {
            "input_ids": torch.randint(2, 40, (6,), generator=generator),
            "labels": torch.randint(2, 40, (3,), generator=generator),
        }
        for _ in range(5)
    ]

    def trainer(*callbacks: Any) -> Any:
        options = arguments(folder).to_dict() | {
            "predict_with_generate": True, "generation_max_length": 6, "max_steps": 2,
        }  # fmt: skip
        made = Seq2SeqTrainer(
            model=seeded(t5), args=Seq2SeqTrainingArguments(**options), train_dataset=pairs,
            callbacks=list(callbacks),
        )  # fmt: skip
        # of the tokens that come up after training: one rank's rows end before the other's
        made.model.generation_config.eos_token_id = 36 if rank else 17
        return made

    before, plain, sharded = trainer(), trainer(), trainer(onefold.hf.Callback(stage=3))
    wanted = before.predict(pairs).predictions
    np.testing.assert_array_equal(sharded.predict(pairs).predictions, wanted)
    for each in (plain, sharded):  # accelerate leaves DDP out where a prediction came before
        each.train()
    np.testing.assert_allclose(logs(sharded), logs(plain), rtol=LOSS)
    wanted = plain.predict(pairs).predictions
    assert len({tuple(row) for row in wanted.tolist()}) > 1
    np.testing.assert_array_equal(sharded.predict(pairs).predictions, wanted)


def test_predictions_are_generated_as_under_ddp_before_and_after_training(tmp_path):
    on_ranks(2, _generate, tmp_path)


# a model's other ways to a Trainer


def _ways(rank: int, folder: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = seeded(_precise_llama)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: Any, *callbacks: Any, kind: type = Trainer) -> Any:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        options = {"optimizers": (optimizer, schedule)}
        trainer = trainer_of(folder, *callbacks, model=model, options=options, kind=kind)
        trainer.train()
        return logs(trainer), weights(model)

    wanted = train(*build())
    assert_as(train(*build(), onefold.hf.Callback(stage=2)), wanted, **PRECISE)
    model, optimizer = build()
    onefold.shard(model, optimizer, stage=2)
    assert_as(train(model, optimizer, onefold.hf.Callback()), wanted, **PRECISE)
    model, optimizer = build()
    onefold.shard(model, stage=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert_as(train(model, optimizer, kind=Mine), wanted, **PRECISE)

    # two trainers, one after the other, and one that trains twice
    runs = []
    for callbacks in ([], [onefold.hf.Callback(stage=3)]):
        model = seeded(_precise_llama)
        trainer_of(folder, *callbacks, model=model).train()
        again = trainer_of(folder, *callbacks, model=model)
        again.train()
        again.train()
        runs.append((logs(again), weights(model)))
    assert_as(runs[1], runs[0], **PRECISE)

    # a Trainer that builds its model
    kept = []
    for kind, callbacks in ((Trainer, []), (Mine, [onefold.hf.Callback(stage=3)])):
        trainer = kind(
            model_init=lambda: seeded(_precise_llama), args=arguments(folder), train_dataset=rows(),
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train()
        kept.append((logs(trainer), weights(trainer.model)))
    assert_as(kept[1], kept[0], **PRECISE)


@pytest.mark.again(
    "tests/adapters/test_hf_trainer.py::test_other_models_and_arguments_train_as_ddp"
)
def test_optimizers_sharded_models_and_models_that_a_trainer_builds_train(tmp_path):
    on_ranks(2, _ways, tmp_path)


# flags


class Stop(TrainerCallback):
    """Stops after step 2, as one rank alone decides."""

    def __init__(self, event: str) -> None:
        self._event = event

    def _stop(self, state: Any, control: Any) -> None:
        if state.is_world_process_zero and state.global_step == 2:
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._event == "step":
            self._stop(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._event == "evaluate":
            self._stop(state, control)


def _stop_early(rank: int, folder: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "options": {"eval_dataset": rows(5)}}
    for event in ("step", "evaluate"):
        for kind, order in ((Trainer, 1), (Mine, -1)):
            callbacks = [Stop(event), onefold.hf.Callback(stage=3)][::order]
            trainer = trainer_of(folder, *callbacks, kind=kind, **options)
            trainer.train()
            assert trainer.state.global_step == 2
    dist.barrier()
    trainer = trainer_of(folder, onefold.hf.Callback(stage=3), Stop("evaluate"), **options)
    try:
        trainer.train()
    except onefold.OnefoldError as error:
        (folder / f"stopped {rank}").write_text(str(error))
        raise  # which ends the process, and with it the others' wait in torch


def test_a_stop_that_one_rank_decides_stops_all_of_them_or_is_named(tmp_path):
    with pytest.raises(ProcessRaisedException):
        on_ranks(2, _stop_early, tmp_path)
    text = (tmp_path / "stopped 0").read_text()
    assert "rank 0" in text
    assert "rank 1" in text
    assert "hint:" in text


# an error on one rank


class Fails(TrainerCallback):
    """Comes after the callback of Onefold."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.get_rank() == 1 and state.global_step == 2:
            raise ValueError("a bad callback")


class BadLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if dist.get_rank() == 1 and self.state.global_step == 1:
            raise ValueError("a bad loss")
        return loss


class BadRows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if dist.get_rank() == 1 and index >= 0:
            raise ValueError("a bad row")
        return rows()[0]


FAILURES: dict[str, dict[str, Any]] = {
    "a bad loss": {"kind": BadLoss},
    "a bad row": {"kind": Mine, "data": BadRows()},
    "a bad callback": {"kind": Mine},
    "saved on rank 0 alone": {"kind": Trainer},
}


def _fail(rank: int, folder: Path, name: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the parent, once the first rank has ended
    callbacks = [onefold.hf.Callback(stage=3)] + [Fails()] * (name == "a bad callback")
    trainer = trainer_of(folder, *callbacks, **FAILURES[name])
    try:
        if name == "saved on rank 0 alone":
            trainer.save_model(str(folder / "out"))  # Trainer itself saves on rank 0
            dist.barrier()
        trainer.train()
    except Exception as error:
        (folder / f"ended {rank}").write_text(f"{time.time()} {type(error).__name__}: {error}")
        raise


@again_but("a bad loss-2", "a bad row-3", "saved on rank 0 alone-2")
@pytest.mark.parametrize(("name", "world_size"), [*zip(FAILURES, (2, 3, 2, 2), strict=True)])
def test_an_error_on_one_rank_ends_the_others_within_seconds_by_name(name, world_size, tmp_path):
    with pytest.raises(ProcessRaisedException):
        on_ranks(world_size, _fail, tmp_path, name)
    ended = {path.name: path.read_text() for path in tmp_path.glob("ended *")}
    times = [float(text.split()[0]) for text in ended.values()]
    assert max(times) - min(times) < 30
    assert "hint:" in ended["ended 0"]
    if name == "saved on rank 0 alone":
        assert "StateError: expected every rank in save_pretrained" in ended["ended 0"]
        assert "TrainerMixin" in ended["ended 0"]
    else:
        assert f"ValueError: {name}" in ended["ended 1"]
        assert "WireError" in ended["ended 0"]
        in_gather = "the other ranks" if name == "a bad row" else "got rank 1 ended"
        assert in_gather in ended["ended 0"], "Accelerate's own gather names no rank"


# bad input


def _refusals(rank: int, folder: Path) -> None:
    peft = pytest.importorskip("peft")

    def build(*callbacks: Any, **options: Any) -> Any:
        return trainer_of(folder, *(callbacks or [onefold.hf.Callback()]), **options)

    def spread() -> None:
        model = llama()
        model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
        build(model=model)

    def resize() -> None:
        build().model.resize_token_embeddings(50)

    def two_choices() -> None:
        model = build(onefold.hf.Callback(stage=1)).model
        build(onefold.hf.Callback(stage=3), model=model)

    def other_choices() -> None:
        build(onefold.hf.Callback(stage=1), model=onefold.shard(llama(), stage=2))

    def before_peft() -> None:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters())
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        build(model=model, options={"optimizers": (optimizer, None)})

    def of_another() -> None:
        optimizer = torch.optim.AdamW(llama().parameters())
        build(options={"optimizers": (optimizer, None)})

    def built_anew() -> None:
        Trainer(
            model_init=lambda: seeded(llama), args=arguments(folder), train_dataset=rows(),
            callbacks=[onefold.hf.Callback()],
        ).train()  # fmt: skip

    def too_late() -> None:
        trainer = Trainer(model=seeded(llama), args=arguments(folder), train_dataset=rows())
        trainer.add_callback(onefold.hf.Callback())
        trainer.train()

    def without_callback() -> None:
        Trainer(model=onefold.shard(llama()), args=arguments(folder), train_dataset=rows()).train()

    found: dict[str, Callable[[], Any]] = {
        "torch_compile=True": lambda: build(torch_compile=True),
        "bf16_full_eval=True": lambda: build(bf16_full_eval=True),
        "auto_find_batch_size=True": lambda: build(auto_find_batch_size=True),
        "save_on_each_node=True": lambda: build(save_on_each_node=True),
        "bf16=True in TrainingArguments": lambda: build(
            onefold.hf.Callback(precision="fp16"), bf16=True
        ),
        "stage to be 0, 1, 2, 3": lambda: build(onefold.hf.Callback(stage=4)),  # type: ignore[arg-type]
        "DistributedDataParallel": lambda: build(
            model=nn.parallel.DistributedDataParallel(llama())
        ),
        'device_map="auto"': spread,
        "resize_token_embeddings before": resize,
        "copy a module before onefold.shard": lambda: copy.deepcopy(build().model),
        "got stage=3": two_choices,
        "stage 2": other_choices,
        "after the last change of the model": before_peft,
        "tensors that the model does not have": of_another,
        "model_init": built_anew,
        "add_callback": too_late,
        "callbacks=[onefold.hf.Callback()]": without_callback,
    }
    for text, act in found.items():
        with pytest.raises(onefold.OnefoldError) as caught:
            act()
        assert text in str(caught.value)
        assert "hint:" in str(caught.value)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(onefold.ConfigError, match="use_cpu"):
        patch.setenv("WORLD_SIZE", "4")
        build()
    with pytest.raises(onefold.ConfigError, match=r"scaler decides on each rank alone"):
        from onefold.adapters.hf.conflicts import autocast_of

        autocast_of("fp16", None)


def test_what_cannot_be_right_is_refused_by_name_on_every_rank(tmp_path):
    on_ranks(2, _refusals, tmp_path)


# names that are not public


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_save_optimizer_and_scheduler", ["self", "output_dir"]),
        ("_load_optimizer_and_scheduler", ["self", "checkpoint"]),
        ("_load_from_checkpoint", ["self", "resume_from_checkpoint", "model"]),
        ("_load_best_model", ["self"]),
        ("save_model", ["self", "output_dir", "_internal_call"]),
        ("call_model_init", ["self", "trial"]),
    ],
)
def test_the_methods_that_the_mixin_overrides_are_those_of_trainer(name, arguments):
    """If this fails, transformers has renamed a method or argument: see adapters/hf/trainer.py."""
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == arguments


def test_a_trainer_tells_its_callbacks_all_that_the_callback_reads():
    """If this fails, transformers calls callbacks otherwise: see adapters/hf/trainer.py."""
    told = inspect.getsource(transformers.trainer_callback.CallbackHandler.call_event)
    assert "model=self.model" in told
    assert "optimizer=self.optimizer" in told
    assert "on_init_end" in inspect.getsource(Trainer.__init__)


def test_a_drawn_program_trains_and_resumes_from_disk_as_a_plain_trainer():
    """Three ranks at stage 2; `benchmarks/programs.py --trainer` runs others."""
    drawn = draw_trainer(23)
    assert "resumes=True, mixes=True" in drawn.legs[0].operations[0]
    assert Judge(run_gloo_ranks).judge(drawn) == Verdict("right")
