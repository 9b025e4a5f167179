"""Add numbers to a Trainer's logs, before the callbacks that report them are called.

Trainer puts callbacks of its integrations (W&B, TensorBoard, MLflow) before those of the user, and
each callback gets the same dictionary in turn. So numbers come from a callback at the front.
"""

import sys
from typing import Any

from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args
from transformers.trainer_callback import CallbackHandler

from onefold.api import report
from onefold.engine.registry import engine_of, is_sharded
from onefold.recording.meter import Meter

PREFIX = "onefold_"


class Numbers(TrainerCallback):
    """Adds memory, bytes sent, waits and tokens a second."""

    @staticmethod
    def lead(handler: CallbackHandler | None) -> None:
        """Stand before all callbacks that report."""
        if handler is not None and not any(isinstance(c, Numbers) for c in handler.callbacks):
            handler.callbacks.insert(0, Numbers())

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Start to measure."""
        if is_sharded(kwargs["model"]):
            Meter.on_engine(engine_of(kwargs["model"]))

    def on_log(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Add numbers to the logs of a training step."""
        model, logs = kwargs["model"], kwargs["logs"]
        if "loss" not in logs or not is_sharded(model):
            return
        numbers: dict[str, Any] = {
            PREFIX + name: number for name, number in report(model).scalars().items()
        }
        logs.update(numbers)
        state.log_history[-1].update(numbers)


def calling_handler() -> CallbackHandler | None:
    """Return the handler that calls a callback now: events do not name it."""
    frame = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler):
            return handler
        frame = frame.f_back
    return None
