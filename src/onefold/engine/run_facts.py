"""The facts about a run that only a report reads; no decision depends on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Peaks = Callable[..., dict[str, int]]
"""Predicts the most bytes by kind; `accumulates`: steps have several micro-batches."""

Subject = TypeVar("Subject")


@dataclass(slots=True)
class RunFacts:
    """The record of one sharded module since `onefold.shard`.

    Attributes:
        description: the choices of the plan, in words.
        notes: exceptions to the plan.
        most_kept: bytes of unsharded weights that `onefold.generating` kept, or more.
        most_backwards: backwards before one step, outside of `accumulate`.
    """

    description: str = ""
    predictions: list[Peaks] = field(default_factory=list[Peaks])
    notes: tuple[str, ...] = ()
    most_kept: int = 0
    most_backwards: int = 0
    _num_backwards: int = 0  # since the last step
    _has_accumulated: bool = False
    _subjects: dict[type, Any] = field(default_factory=dict[type, Any])

    def add_notes(self, *notes: str) -> None:
        """Note exceptions to the plan."""
        self.notes += notes

    def note_kept(self, nbytes: int) -> None:
        """Evaluations keep up to so many bytes of unsharded weights."""
        self.most_kept = max(self.most_kept, nbytes)

    def begin_backward(self, *, is_first: bool) -> None:
        """A backward begins, the `is_first` one since gradients were cleared."""
        if is_first:
            self._num_backwards = 0  # cleared with or without a step

    def end_backward(self, *, accumulates: bool) -> None:
        """A backward is over; `accumulates`: that of a micro-batch that is not the last."""
        self._has_accumulated |= accumulates
        self._num_backwards += not accumulates

    def end_step(self) -> None:
        """The optimizer has stepped."""
        self.most_backwards = max(self.most_backwards, self._num_backwards)
        self._num_backwards = 0

    def predicted_peaks(self) -> dict[str, int]:
        """Return the highest prediction: one for all the shares that the run has had."""
        highest: dict[str, int] = {}
        for predict in self.predictions:
            for kind, nbytes in predict(accumulates=self._has_accumulated).items():
                highest[kind] = max(nbytes, highest.get(kind, 0))
        return highest

    def about(self, subject: type[Subject]) -> Subject:
        """Return the record that another room keeps of the run: the first call makes it."""
        return self._subjects.setdefault(subject, subject())
