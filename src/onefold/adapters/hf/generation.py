"""Keep weights unsharded while a Seq2SeqTrainer generates its predictions.

A stock Trainer announces no start of an evaluation. It announces the step before it, and each batch
of predictions: weights are kept from the first of these on, until the evaluation is over.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from onefold.api import generating


class PredictedGenerations:
    """The weights that are kept for `Seq2SeqTrainingArguments(predict_with_generate=True)`."""

    def __init__(self) -> None:
        self._kept: ExitStack | None = None

    def begin(self, model: nn.Module, args: Any) -> None:
        """Keep weights that fit, if predictions are generated. A collective, the first time."""
        if self._kept is None and getattr(args, "predict_with_generate", False):
            self._kept = ExitStack()
            self._kept.enter_context(generating(model))

    def end(self) -> None:
        """Free them: the evaluation is over, or training goes on after one that has failed."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
