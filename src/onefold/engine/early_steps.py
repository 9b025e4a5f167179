"""Steps inside backward: a unit is stepped once its gradient is reduced, and the gradient goes.

So gradients never rest, and the step hides behind backward as well as behind the next forward
(the active gradient offloading of LoHan, arXiv 2403.06504). It is only right where nothing looks at
all gradients first, which is why the user has to ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from weakref import ReferenceType

from onefold.errors import StateError, TierError, expected
from onefold.unit.gradient import UnitGradient
from onefold.unit.unit import Unit

MAX_PENDING = 2
"""Units whose steps may be under way while backward goes on: each holds its gradient until then,
and where the tier is slower than backward they would otherwise come to be all."""


class EarlyStepper(Protocol):
    """An optimizer's binding, as steps in backward know it."""

    def step_early(self, unit: Unit) -> None:
        """Begin to step what the optimizer holds of a unit."""
        ...


class EarlyOwner(Protocol):
    """The engine, as steps in backward know it."""

    @property
    def steppers(self) -> Iterable[EarlyStepper]: ...

    is_accumulating: bool

    def is_through(self, unit: Unit) -> bool: ...


class EarlySteps:
    """Which units have been stepped since the optimizer's last step, and which are about to be."""

    def __init__(self, owner: ReferenceType[EarlyOwner], *, is_active: bool) -> None:
        self._owner = owner
        self._is_active = is_active
        self._waiting: list[UnitGradient] = []
        self._stepped: list[UnitGradient] = []
        self._is_torn = False

    def note_reduced(self, gradient: UnitGradient) -> None:
        """A gradient is there; its unit is stepped when backward will not come back to it."""
        owner = self._owner()
        if self._is_active and owner is not None and not owner.is_accumulating:
            self._waiting.append(gradient)
            self.run()

    def run(self) -> None:
        """Step those units that backward is through with."""
        owner = self._owner()
        if owner is None:
            return
        for gradient in [each for each in self._waiting if owner.is_through(each.unit)]:
            self._waiting.remove(gradient)
            steppers = list(owner.steppers)
            is_wanted = gradient.unit.steps_in_blocks and not gradient.is_unused
            if steppers and is_wanted:  # what stays on the device is stepped there, after backward
                if len(self._stepped) >= MAX_PENDING:
                    self._stepped[-MAX_PENDING].unit.await_step()
                gradient.unit.await_step()
                gradient.unit.refresh_master()
                for stepper in steppers:
                    stepper.step_early(gradient.unit)
                gradient.spend()
                self._stepped.append(gradient)

    def abort(self) -> None:
        """Backward failed: what it has stepped cannot be taken back."""
        self._waiting.clear()
        self._is_torn = self._is_torn or bool(self._stepped)
        self.end()

    def check_whole(self, rank: int, failures: Iterable[TierError | None]) -> None:
        """Raise `StateError` if a backward failed after it had stepped some of the units.

        Or the failure of a tier that was the reason, which stays.
        """
        if self._is_torn:
            for failure in failures:
                if failure is not None:
                    raise failure
            raise StateError(
                expected(
                    "a backward that ran to its end, as it steps units on its way",
                    "one that failed: some weights are stepped and others are not",
                    where=f"rank {rank}",
                    hint="load the last checkpoint with onefold.load",
                )
            )

    def end(self) -> set[Unit]:
        """The optimizer's step: gradients show again. Returns the units that were stepped."""
        for gradient in self._stepped:
            gradient.is_spent = False
        stepped = {gradient.unit for gradient in self._stepped}
        self._stepped.clear()
        return stepped

    def mend(self) -> None:
        """All weights were loaded anew."""
        self._is_torn = False
