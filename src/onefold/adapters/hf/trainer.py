"""Let a sharded model train in a `Trainer`: `onefold.hf.Callback`, and `onefold.hf.TrainerMixin`.

The one line for a stock Trainer is `callbacks=[onefold.hf.Callback(stage=3)]`. Its events:

    on_init_end      shard, once PEFT and the Trainer are done with the model; mark it as prepared
    on_train_begin   load the sharded state of a checkpoint that Trainer resumes from; give ranks
                     with equal generators, which drop the same elements, seeds of their own
    on_step_end      agree on flags; if a save follows: whole weights to rank 0, save shards
    on_save          move these shards into the checkpoint that Trainer has made
    on_train_end     bring whole weights to rank 0, for `trainer.save_model()`

Logs get the numbers of `adapters/hf/logs.py`. The mixin saves and resumes by the Trainer's own
methods instead, on all ranks together.
"""

from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.state import AcceleratorState
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args
from transformers.trainer_utils import SaveStrategy

from onefold.adapters.hf import events
from onefold.adapters.hf.conflicts import (
    autocast_of,
    check_arguments,
    check_optimizer,
    refuse_other_engines,
)
from onefold.adapters.hf.logs import Numbers, calling_handler
from onefold.adapters.hf.saving import (
    FOLDER,
    ResumeWithOnefoldCallback,
    RunState,
    WholeWeights,
    folders_of,
    is_peft,
    newest,
)
from onefold.adapters.hf.wrap import mark_prepared, run_under_autocast
from onefold.api import shard
from onefold.checkpoint.agreement import together
from onefold.config import OffloadChoice, PrecisionChoice, StageChoice, offload_of, precision_of
from onefold.engine.first_batch import seed_ranks
from onefold.engine.registry import engine_of, is_sharded
from onefold.errors import ConfigError, StateError
from onefold.inference.stream import generating
from onefold.layout.units import UnitChoice
from onefold.recording.third_step import ThirdStep
from onefold.resume import load
from onefold.versions import warn_if_untested
from onefold.wire_config import WireChoice

CHOICES = "_onefold_choices"
"""The attribute of a model that holds the choices with which a `Callback` has sharded it."""


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
        record: a folder for a page about the third step, as `onefold.record` writes it; rank 0
            records and writes. None records nothing.

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
        record: str | PathLike[str] | None = None,
    ) -> None:
        warn_if_untested("transformers", "accelerate")
        ResumeWithOnefoldCallback.allow()
        self.choices: dict[str, Any] = dict(
            stage=stage, precision=precision, offload=offload, wire=wire, units=units
        )
        self._recorded = ThirdStep(record)
        self._saves_by_event = True  # False: `TrainerMixin` saves
        self.run: RunState | None = None  # while training
        self._generation: ExitStack | None = None  # holds the weights that are kept for it

    # the model

    def prepare(self, model: nn.Module, args: Args, optimizer: Optimizer | None = None) -> None:
        """Shard the model unless it is sharded already, and mark it as prepared. A collective."""
        state: Any = AcceleratorState()
        refuse_other_engines(state, args)
        check_arguments(args)
        is_new = not is_sharded(model)
        autocast = autocast_of(state.mixed_precision, self.choices["precision"])
        if not is_new:
            _check_choices(model, self.choices)
        check_optimizer(model, optimizer)
        if is_new:
            shard(model, optimizer, **self.choices)
            model.__dict__[CHOICES] = self.choices
            if autocast is not None:
                run_under_autocast(model, state.device.type, autocast, {})
        mark_prepared(model)
        self.whole(model, args)

    def whole(self, model: nn.Module, args: Args) -> WholeWeights:
        """The model's weights as rank 0 can have them whole."""
        return WholeWeights.from_folder(model, Path(str(args.output_dir)))

    # events

    def on_init_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        self.prepare(kwargs["model"], args, kwargs.get("optimizer"))
        Numbers.lead(calling_handler())

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Load the sharded state of the checkpoint to resume from, if there is one."""
        model = kwargs["model"]
        _refuse_unsharded(model)
        events.agree(engine_of(model), "the beginning of training", state.global_step, control)
        seed_ranks(model, engine_of(model).group)
        self._end_run()  # of a training that an exception has ended
        self.run = RunState(model, kwargs["optimizer"])
        mark = self.run.take_mark()
        if mark is not None:
            folders = folders_of(args.resume_from_checkpoint, args.output_dir, mark["folder"])
            self.run.resume(mark, folders)

    def on_step_begin(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Find a rank that has left the loop."""
        model = kwargs["model"]
        self._end_generation()
        events.agree(engine_of(model), "the beginning of a step", state.global_step, control)
        self.whole(model, args).drop_if_stale()
        self._recorded.begin(model, state.global_step, state.max_steps)

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        self._recorded.end()
        self._make_ready("the end of a step", args, state, control, kwargs["model"])

    def on_epoch_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        self._make_ready("the end of an epoch", args, state, control, kwargs["model"])

    def on_prediction_step(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Keep weights for the next batch, if predictions are generated."""
        self._begin_generation(kwargs["model"], args)

    def on_predict(self, *_: Any, **__: Any) -> None:
        """Free weights that were kept for predictions."""
        self._end_generation()

    def on_evaluate(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """In training: agree on flags; make the save of a new best model ready."""
        self._end_generation()
        if self.run is None:
            return
        if args.save_strategy == SaveStrategy.BEST:
            control.should_save |= _is_best(args, state, kwargs.get("metrics") or {})
        self._make_ready("the end of an evaluation", args, state, control, kwargs["model"])

    def on_save(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Move the sharded state into the checkpoint."""
        engine = engine_of(kwargs["model"])
        events.agree(engine, "the end of a save", state.global_step, control)
        if self.run is not None and self._saves_by_event:
            self.run.publish(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Bring whole weights to rank 0: `save_model` runs there alone."""
        model = kwargs["model"]
        events.agree(engine_of(model), "the end of training", state.global_step, control)
        if self._saves_by_event:
            self.whole(model, args).bring()
        self._end_run()

    def _end_run(self) -> None:
        self._recorded.close()
        run, self.run = self.run, None
        if run is not None:
            run.close()

    def _make_ready(
        self, event: str, args: Args, state: State, control: Control, model: nn.Module
    ) -> None:
        """Agree on flags; send what a save or an evaluation that follows needs."""
        events.agree(engine_of(model), event, state.global_step, control)
        if control.should_save and self._saves_by_event and self.run is not None:
            self.whole(model, args).bring()
            if not args.save_only_model and self.run.staged is None:
                self.run.stage(Path(str(args.output_dir)), state.global_step)
        if control.should_evaluate:
            self._begin_generation(model, args)

    # A stock Trainer announces no start of an evaluation. It announces the step before it, and each
    # batch of predictions: weights are kept from the first of these until the evaluation is over.

    def _begin_generation(self, model: nn.Module, args: Args) -> None:
        """Keep weights that fit, if predictions are generated. A collective, the first time."""
        if self._generation is None and getattr(args, "predict_with_generate", False):
            self._generation = ExitStack()
            self._generation.enter_context(generating(model))

    def _end_generation(self) -> None:
        """Free them: the evaluation is over, or training goes on after one that has failed."""
        kept, self._generation = self._generation, None
        if kept is not None:
            kept.close()


def _is_best(args: Args, state: State, metrics: dict[str, float]) -> bool:
    """True if Trainer is about to find these metrics the best."""
    name = str(args.metric_for_best_model)
    value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
    if value is None:
        return False
    if state.best_metric is None:
        return True
    return value > state.best_metric if args.greater_is_better else value < state.best_metric


def _check_choices(model: nn.Module, choices: dict[str, Any]) -> None:
    """Raise `ConfigError` if a model was sharded with other choices, by a callback or a script."""
    known = model.__dict__.get(CHOICES)
    if known is not None:
        got, is_same = _described_choices(known), known == choices
    else:
        recipe = engine_of(model).recipe
        got = f"stage {recipe.stage.number}, {recipe.precision}, {recipe.offload}"
        mine, its = offload_of(choices["offload"]), recipe.offload
        is_same = choices["stage"] in ("auto", recipe.stage.number)
        is_same &= precision_of(choices["precision"]) == recipe.precision
        is_same &= (mine.optimizer, mine.parameters) == (its.optimizer, its.parameters)
        is_same |= choices == {**dict.fromkeys(choices), "stage": 3}  # of `Callback()`
    if not is_same:
        hint = "choose the same, or pass a model that is not sharded yet"
        wanted = f"the choices with which the model was sharded, {got}"
        raise ConfigError(wanted, _described_choices(choices), hint=hint)


def _described_choices(choices: dict[str, Any]) -> str:
    set_ones = {name: choice for name, choice in choices.items() if choice is not None}
    return ", ".join(f"{name}={choice!r}" for name, choice in set_ones.items())


def _refuse_unsharded(model: nn.Module) -> None:
    """Raise `StateError` for a model that the Trainer has built anew."""
    if not is_sharded(model):
        got = f"another {type(model).__name__}, as Trainer(model_init=...) builds in train(), "
        got += "or one that add_callback came too late for"
        hint = "pass Trainer(model=..., callbacks=[onefold.hf.Callback(...)]), or derive the "
        hint += "trainer from onefold.hf.TrainerMixin, which shards all that model_init builds"
        raise StateError("the model that onefold.hf.Callback has sharded", got, hint=hint)


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class TrainerMixin(_Base):
    """Let a Trainer save and resume its sharded model: `class Mine(TrainerMixin, SFTTrainer)`.

    `save_model` is a collective and may be called at any time. `checkpoint-N/` opens with
    `from_pretrained`, and resumes at any world size, stage and tier: each rank reads its own rows.
    Adapters are saved without their base. `train(resume_from_checkpoint=True)` passes over
    checkpoints whose save was interrupted. Models of `model_init` are sharded, too.

    The choices are those of the `onefold.hf.Callback` among the Trainer's callbacks. Without one,
    the model is sharded at stage 3, or left as `onefold.shard` has sharded it.

    Example:
        >>> class Mine(onefold.hf.TrainerMixin, Trainer): ...
        >>> trainer = Mine(model=model, args=args, callbacks=[onefold.hf.Callback(stage=3)])
        >>> trainer.train(resume_from_checkpoint=True)
        >>> trainer.save_model("out")
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        callback = self.pop_callback(Callback)
        if not isinstance(callback, Callback):
            callback = Callback()
            optimizer: Any = self.optimizer
            callback.prepare(self._own_model, self.args, optimizer)
        Numbers.lead(self.callback_handler)
        self.add_callback(callback)  # the last one: it joins the flags that others set
        callback._saves_by_event = False
        self._onefold = callback

    @property
    def _own_model(self) -> nn.Module:
        model: Any = self.model
        return model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Build a model with `model_init`; shard it, but for that of `__init__`."""
        model = super().call_model_init(trial)
        callback: Callback | None = self.__dict__.get("_onefold")
        if callback is not None:
            callback.prepare(model, self.args)
        return model

    # save

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as `from_pretrained` reads it. A collective."""
        save = super().save_model
        self._onefold.whole(self._own_model, self.args).bring()
        together(engine_of(self._own_model).group, lambda: save(output_dir, _internal_call))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        run, save = self._onefold.run, super()._save_optimizer_and_scheduler
        close = run is None
        if run is None:  # outside of train()
            run = RunState(self._own_model, self.optimizer)
        run.stage(Path(output_dir).parent, self.state.global_step)
        together(engine_of(self._own_model).group, lambda: save(output_dir))
        run.publish(Path(output_dir))
        if close:
            run.close()

    # resume

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """See `Trainer.train`. True resumes from the newest checkpoint that is complete."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest(Path(str(self.args.output_dir))) or True
        with events.name_lost_ranks(engine_of(self._own_model)):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        has_state = (Path(resume_from_checkpoint) / FOLDER).is_dir()
        if not has_state or is_peft(self._own_model) or not is_sharded(self._own_model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        # read once more with the optimizer, when that exists; here for what comes before
        load(Path(resume_from_checkpoint) / FOLDER, self._own_model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        run = RunState(self._own_model, self.optimizer)
        mark = run.take_mark()
        if mark is not None and checkpoint is not None:
            run.resume(mark, iter([Path(checkpoint) / FOLDER]))
        run.close()

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint)) / FOLDER
        if best.is_dir() and not is_peft(self._own_model):
            load(best, self._own_model)
        else:
            super()._load_best_model()
