"""Shard the model of a stock `Trainer`: the one line, `callbacks=[onefold.hf.Callback(stage=3)]`.

on_init_end      shard, once PEFT and the Trainer are done with the model; mark it as prepared
on_train_begin   load the sharded state of a checkpoint that Trainer resumes from
on_step_end      agree on flags; if a save follows: bring whole weights to rank 0, save shards
on_save          move these shards into the checkpoint that Trainer has made
on_log           add the gradient noise scale, if `onefold.measure_noise` was called
on_train_end     bring whole weights to rank 0, for `trainer.save_model()`
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from onefold.adapters.hf import events
from onefold.adapters.hf.autocast import run_under_autocast
from onefold.adapters.hf.conflicts import refuse_other_engines
from onefold.adapters.hf.generation import PredictedGenerations
from onefold.adapters.hf.prepared import mark_prepared
from onefold.adapters.hf.run_state import ResumeWithOnefoldCallback, RunState, folders_of
from onefold.adapters.hf.training_arguments import (
    autocast_of,
    check_arguments,
    check_optimizer,
)
from onefold.adapters.hf.whole_weights import WholeWeights
from onefold.adapters.versions import warn_if_untested
from onefold.api import shard
from onefold.config import OffloadChoice, PrecisionChoice, StageChoice, offload_of, precision_of
from onefold.engine.registry import engine_of, is_sharded
from onefold.errors import ConfigError, StateError
from onefold.layout.units import UnitChoice
from onefold.wire_config import WireChoice

CHOICES = "_onefold_hf_choices"
"""The attribute of a module that holds the choices of the callback that has sharded it."""


@dataclass(frozen=True, slots=True)
class CallbackChoices:
    """The arguments of `Callback`."""

    stage: StageChoice = 3
    precision: PrecisionChoice = None
    offload: OffloadChoice = None
    wire: WireChoice = None
    units: UnitChoice = None

    def check(self, model: nn.Module) -> None:
        """Raise `ConfigError` if the model was sharded with other choices."""
        found = model.__dict__.get(CHOICES)
        if found is not None:
            got, is_same = str(found), found == self
        else:
            recipe = engine_of(model).recipe
            got = f"stage {recipe.stage.number}, {recipe.precision}, {recipe.offload}"
            mine, its = offload_of(self.offload), recipe.offload
            is_same = self == CallbackChoices() or (
                self.stage in ("auto", recipe.stage.number)
                and precision_of(self.precision) == recipe.precision
                and (mine.optimizer, mine.parameters) == (its.optimizer, its.parameters)
            )
        if not is_same:
            raise ConfigError(
                f"the choices with which the model was sharded, {got}",
                str(self),
                hint="give onefold.hf.Callback the same choices, or a model that is not "
                "sharded yet",
            )


class Callback(TrainerCallback):
    """Train a stock `Trainer`'s model, or a TRL trainer's, sharded over the ranks.

    The model is sharded at the end of the Trainer's `__init__`, when PEFT has wrapped it. Losses,
    clipping, accumulation, evaluation and prediction are those of the same Trainer under DDP.

    `TrainingArguments(bf16=True)` is honoured as a DDP run honours it: forward runs under
    `torch.autocast`, weights and gradients are fp32. Autocast keeps bf16 copies of weights until
    backward; `precision="bf16"` computes in bf16 without them, and steps fp32 masters. `fp16=True`
    is refused.

    Checkpoints: Trainer saves on rank 0 alone, so every rank sends its shards before each save and
    at the end of training. `checkpoint-N/` opens with `from_pretrained`, and resumes at any world
    size, stage and tier. `onefold.hf.TrainerMixin` brings weights to rank 0 only where they are
    saved, reads each rank's own rows, and passes over checkpoints that are not complete.

    Args:
        stage: as in `onefold.shard`.
        precision: as in `onefold.shard`; None follows `TrainingArguments`.
        offload: as in `onefold.shard`.
        wire: as in `onefold.shard`.
        units: as in `onefold.shard`.

    Raises:
        ConfigError: on every rank, when the Trainer is built: arguments, a model or an optimizer
            that sharding cannot honour.
        StateError: on every rank, in training: a rank has left the others.

    Example:
        >>> trainer = Trainer(model=model, args=args, callbacks=[onefold.hf.Callback(stage=3)])
        >>> trainer.train()
    """

    def __init__(
        self,
        stage: StageChoice = 3,
        precision: PrecisionChoice = None,
        offload: OffloadChoice = None,
        wire: WireChoice = None,
        units: UnitChoice = None,
    ) -> None:
        warn_if_untested("transformers", "accelerate")
        ResumeWithOnefoldCallback.allow()
        self.choices = CallbackChoices(stage, precision, offload, wire, units)
        self._saves_by_event = True  # False: `TrainerMixin` saves
        self._run: RunState | None = None  # while training
        self._generations = PredictedGenerations()

    def leave_saves(self) -> None:
        """Save nothing at events: `TrainerMixin` does."""
        self._saves_by_event = False

    # the model

    def prepare(
        self, model: nn.Module, args: TrainingArguments, optimizer: Optimizer | None = None
    ) -> None:
        """Shard the model unless it is sharded already, and mark it as prepared. A collective."""
        state: Any = AcceleratorState()
        refuse_other_engines(state, args)
        check_arguments(args)
        choices, is_new = self.choices, not is_sharded(model)
        autocast = autocast_of(state.mixed_precision, choices.precision)
        if not is_new:
            choices.check(model)
        check_optimizer(model, optimizer)
        if is_new:
            shard(
                model, optimizer, stage=choices.stage, units=choices.units,
                precision=choices.precision, offload=choices.offload, wire=choices.wire,
            )  # fmt: skip
            model.__dict__[CHOICES] = choices
            if autocast is not None:
                run_under_autocast(model, state.device.type, autocast, {})
        mark_prepared(model)
        self.whole(model, args)

    def whole(self, model: nn.Module, args: TrainingArguments) -> WholeWeights:
        """The model's weights as rank 0 can have them whole."""
        return WholeWeights.of(model, Path(str(args.output_dir)))

    # events

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Shard the model."""
        self.prepare(kwargs["model"], args, kwargs.get("optimizer"))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load the sharded state of the checkpoint to resume from, if there is one."""
        model = kwargs["model"]
        _refuse_unsharded(model)
        events.agree(engine_of(model), events.TRAIN_BEGIN, state.global_step, control)
        if self._run is not None:  # of a training that an exception has ended
            self._run.close()
        self._run = RunState(model, kwargs["optimizer"])
        mark = self._run.take_mark()
        if mark is not None:
            given = args.resume_from_checkpoint, args.output_dir, mark["folder"]
            self._run.resume(mark, folders_of(*given))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find a rank that has left the loop."""
        self._generations.end()
        events.agree(engine_of(kwargs["model"]), events.STEP_BEGIN, state.global_step, control)
        self.whole(kwargs["model"], args).drop_if_stale()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Agree on flags; make a save ready."""
        self._before_save(events.STEP_END, args, state, control, kwargs["model"])
        self._before_evaluation(args, control, kwargs["model"])

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Agree on flags; make a save ready."""
        self._before_save(events.EPOCH_END, args, state, control, kwargs["model"])
        self._before_evaluation(args, control, kwargs["model"])

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep weights for the next batch, if predictions are generated."""
        self._generations.begin(kwargs["model"], args)

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Free weights that were kept for predictions."""
        self._generations.end()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """In training: agree on flags; make the save of a new best model ready."""
        self._generations.end()
        if self._run is None:
            return
        if args.save_strategy == SaveStrategy.BEST:
            control.should_save |= _is_best(args, state, kwargs.get("metrics") or {})
        self._before_save(events.EVALUATE, args, state, control, kwargs["model"])

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the sharded state into the checkpoint."""
        events.agree(engine_of(kwargs["model"]), events.SAVE, state.global_step, control)
        if self._run is not None and self._saves_by_event:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            self._run.publish(folder)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the gradient noise scale, in batches of a step, to the logs of a training step."""
        noise = engine_of(kwargs["model"]).hands.noise
        logs: dict[str, float] = kwargs["logs"]
        if noise is not None and noise.batches is not None and "loss" in logs:
            found = {
                "gradient_noise_scale": noise.batches,
                "suggested_accumulation": noise.suggested_microbatches,
            }
            logs.update(found)
            state.log_history[-1].update(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Bring whole weights to rank 0: `save_model` runs there alone."""
        model = kwargs["model"]
        events.agree(engine_of(model), events.TRAIN_END, state.global_step, control)
        if self._saves_by_event:
            self.whole(model, args).take()
        if self._run is not None:
            self._run.close()
            self._run = None

    def _before_save(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        model: nn.Module,
    ) -> None:  # fmt: skip
        engine = engine_of(model)
        events.agree(engine, event, state.global_step, control)
        if control.should_save and self._saves_by_event and self._run is not None:
            self.whole(model, args).take()
            if not args.save_only_model and not self._run.is_staged:
                self._run.stage(Path(str(args.output_dir)), state.global_step)

    def _before_evaluation(
        self, args: TrainingArguments, control: TrainerControl, model: nn.Module
    ) -> None:
        if control.should_evaluate:
            self._generations.begin(model, args)

    @property
    def run(self) -> RunState | None:
        """The state of the run, while training."""
        return self._run


def _is_best(args: TrainingArguments, state: TrainerState, metrics: dict[str, float]) -> bool:
    """True if Trainer is about to find these metrics the best."""
    name = str(args.metric_for_best_model)
    value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
    if value is None:
        return False
    if state.best_metric is None:
        return True
    return value > state.best_metric if args.greater_is_better else value < state.best_metric


def _refuse_unsharded(model: nn.Module) -> None:
    """Raise `StateError` for a model that the Trainer has built anew."""
    if not is_sharded(model):
        raise StateError(
            "the model that onefold.hf.Callback has sharded",
            f"another {type(model).__name__}, as Trainer(model_init=...) builds in train()",
            hint="pass Trainer(model=...), or derive the trainer from onefold.hf.TrainerMixin, "
            "which shards each model that model_init builds",
        )
