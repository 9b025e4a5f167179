"""In which order units are used, remembered per phase, so that the next gather can start early.

A wrong guess costs one gather that nobody waited for; it never changes a result and resets nothing.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import Generic, TypeVar

U = TypeVar("U")


class Phase(StrEnum):
    """Which walk over the units is under way; each has an order of its own."""

    FORWARD = "forward"
    EVALUATION = "evaluation"
    BACKWARD = "backward"  # recompute belongs to it: it uses units in backward's order


class Schedule(Generic[U]):
    """Successors of each unit per phase, learned from the last walk."""

    def __init__(self, units: list[U]) -> None:
        forward = dict(pairwise(units))
        backward = {after: before for before, after in forward.items()}
        self._after: dict[Phase, dict[U, U]] = {
            Phase.FORWARD: dict(forward),
            Phase.EVALUATION: dict(forward),
            Phase.BACKWARD: backward,
        }
        self._last: dict[Phase, U | None] = dict.fromkeys(Phase)

    def begin(self, phase: Phase) -> None:
        """A new walk starts; its first unit has no predecessor."""
        self._last[phase] = None

    def enter(self, unit: U, phase: Phase) -> U | None:
        """Note that `unit` is used now; the unit that was used next last time, if any."""
        last = self._last[phase]
        if last is unit:
            return None
        if last is not None:
            self._after[phase][last] = unit
            if phase is Phase.FORWARD:
                self._after[Phase.BACKWARD].setdefault(unit, last)
        self._last[phase] = unit
        return self._after[phase].get(unit)

    def after(self, unit: U | None, phase: Phase) -> U | None:
        """The unit that was used after `unit` last time, if any."""
        return None if unit is None else self._after[phase].get(unit)
