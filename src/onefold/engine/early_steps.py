"""Decide when offloaded units are stepped in a backward, and how many at a time. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onefold.engine.actions import Action, Verb

MAX_PENDING = 2
"""Units whose background steps may be under way during backward: each holds its gradient until its
step is over. Where the tier is slower than backward, all units would otherwise pile up."""


class EarlySteps:
    """Steps reduced units once backward is through with them."""

    def __init__(self) -> None:
        self._due: list[int] = []  # reduced; stepped once backward is through with them
        self._stepped: list[int] = []  # since the optimizer's last step

    def __bool__(self) -> bool:
        return bool(self._stepped)

    def step(
        self, units: Iterable[int], is_through: Callable[[int], bool], out: list[Action]
    ) -> None:
        """Note reduced `units`, and step all with which backward is through."""
        self._due += units
        for unit in [each for each in self._due if is_through(each)]:
            self._due.remove(unit)
            if len(self._stepped) >= MAX_PENDING:
                out.append((Verb.WAIT_STEP, self._stepped[-MAX_PENDING]))
            self._stepped.append(unit)
            out.append((Verb.STEP, unit))

    def take(self) -> set[int]:
        """The optimizer's step begins: return the units that were stepped already."""
        stepped, self._stepped = set(self._stepped), []
        return stepped

    def skip(self, unit: int) -> None:
        """A step was not necessary: no rank has a gradient for the unit."""
        if unit in self._stepped:
            self._stepped.remove(unit)

    def forget(self) -> None:
        """Backward has failed."""
        self._due.clear()
        self._stepped.clear()
