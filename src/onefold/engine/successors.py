"""Remember the order in which each phase uses units, so that the next gather starts early.

A wrong guess costs one unnecessary gather. It never changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import StrEnum
from itertools import pairwise


class Phase(StrEnum):
    """A walk over the units; each phase has an order of its own."""

    FORWARD = "forward"
    EVALUATION = "evaluation"
    BACKWARD = "backward"  # recompute belongs to it: it uses units in backward's order


class Successors:
    """The successor of each unit in each phase, learned from the last walk."""

    def __init__(self, units: Sequence[int], *, is_cyclic: bool = False) -> None:
        """`is_cyclic`: a walk follows the one before without a pause, as tokens do."""
        self._is_cyclic = is_cyclic
        forward = dict(pairwise([*units, *units[:1]] if is_cyclic else units))
        self._after: dict[Phase, dict[int, int]] = {
            Phase.FORWARD: dict(forward),
            Phase.EVALUATION: dict(forward),
            Phase.BACKWARD: {after: before for before, after in forward.items()},
        }
        self._last: dict[Phase, int | None] = dict.fromkeys(Phase)

    def begin(self, phase: Phase) -> None:
        """A new walk starts; its first unit has no predecessor."""
        if not self._is_cyclic:
            self._last[phase] = None

    def enter(
        self, unit: int, phase: Phase, number: int, without: Set[int] = frozenset()
    ) -> list[int]:
        """Note that `unit` is used now; return up to `number` units that the last walk used next.

        None if it was used just before. `without`: units to pass over, as they are there already.
        """
        last = self._last[phase]
        if last == unit:
            return []
        if last is not None:
            self._after[phase][last] = unit
            if phase is Phase.FORWARD:
                self._after[Phase.BACKWARD].setdefault(unit, last)
        self._last[phase] = unit
        found: list[int] = []
        seen, after = {unit}, self._after[phase].get(unit)
        while after is not None and after not in seen and len(found) < number:
            seen.add(after)
            if after not in without:
                found.append(after)
            after = self._after[phase].get(after)
        return found
