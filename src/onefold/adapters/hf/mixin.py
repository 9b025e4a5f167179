"""Save and resume a sharded Trainer by its own methods, on all ranks together."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from onefold.adapters.hf import events
from onefold.adapters.hf.callback import Callback
from onefold.adapters.hf.run_state import FOLDER, RunState
from onefold.adapters.hf.whole_weights import WholeWeights, is_peft
from onefold.checkpoint.agreement import together
from onefold.checkpoint.load import load
from onefold.engine.registry import engine_of, is_sharded

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


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
            callback.prepare(self._module, self.args, optimizer)
        self.add_callback(callback)  # the last one: it joins the flags that others set
        callback.leave_saves()
        self._onefold = callback

    @property
    def _module(self) -> nn.Module:
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
        self._whole_weights().take()
        together(engine_of(self._module).group, lambda: save(output_dir, _internal_call))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        run, save = self._onefold.run, super()._save_optimizer_and_scheduler
        close = run is None
        if run is None:  # outside of train()
            run = RunState(self._module, self.optimizer)
        run.stage(Path(output_dir).parent, self.state.global_step)
        together(engine_of(self._module).group, lambda: save(output_dir))
        run.publish(Path(output_dir))
        if close:
            run.close()

    def _whole_weights(self) -> WholeWeights:
        return self._onefold.whole(self._module, self.args)

    # resume

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """See `Trainer.train`. True resumes from the newest checkpoint that is complete."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest(Path(str(self.args.output_dir))) or True
        with events.name_lost_ranks(engine_of(self._module)):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        has_state = (Path(resume_from_checkpoint) / FOLDER).is_dir()
        if not has_state or is_peft(self._module) or not is_sharded(self._module):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        # read once more with the optimizer, when that exists; here for what comes before
        load(Path(resume_from_checkpoint) / FOLDER, self._module)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        run = RunState(self._module, self.optimizer)
        mark = run.take_mark()
        if mark is not None and checkpoint is not None:
            run.resume(mark, iter([Path(checkpoint) / FOLDER]))
        run.close()

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint)) / FOLDER
        if best.is_dir() and not is_peft(self._module):
            load(best, self._module)
        else:
            super()._load_best_model()


def _newest(directory: Path) -> str | None:
    """Return the newest complete checkpoint; warn about those that are passed over."""
    passed_over: list[str] = []
    folders = directory.iterdir() if directory.is_dir() else iter(())
    numbered = [(int(m[1]), p) for p in folders if (m := _CHECKPOINT.fullmatch(p.name))]
    for _, path in sorted(numbered, reverse=True):
        if _is_complete(path):
            if passed_over:
                names = ", ".join(passed_over)
                warnings.warn(
                    f"resume from {path.name}: the save of {names} was interrupted", stacklevel=3
                )
            return str(path)
        passed_over.append(path.name)
    return None


def _is_complete(path: Path) -> bool:
    """True if Trainer wrote its state, its last act, into the folder."""
    try:
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (path / FOLDER).is_dir() or not (path / "optimizer.pt").exists()
