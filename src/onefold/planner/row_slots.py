"""Slots through which rows of weights on disk reach unsharded weights, as a plan counts them."""

from collections.abc import Callable
from typing import Any, cast

from onefold.layout.rows import round_up
from onefold.recipe import Recipe
from onefold.tier.slots import SlotPool
from onefold.tier.store import PAGE_NBYTES

Count = Callable[[str, int, str], None]
"""Add bytes of a kind in a tier."""


class RowSlots:
    """The engine's pool, with slots that are only counted: as many as are taken at a time."""

    def __init__(self, recipe: Recipe, count: Count) -> None:
        self.pool = SlotPool(cast("Any", lambda nbytes: _Slot(nbytes, count)))
        self._are_read = recipe.offload.parameters == "disk" and not recipe.reads_directly
        self._taken: dict[int, Any] = {}  # by unit

    def fetch(self, unit: int, nbytes: int) -> None:
        """Rows of a unit are wanted, and take a slot if they have none."""
        if self._are_read and unit not in self._taken:
            self._taken[unit] = self.pool.take_slot(nbytes)

    def give(self, unit: int) -> None:
        """Rows of a unit have left their slot, if they had one."""
        if unit in self._taken:
            self.pool.give(self._taken.pop(unit))

    def give_all(self) -> None:
        """Rows that were not used leave their slots, too."""
        for unit in list(self._taken):
            self.give(unit)


class _Slot:
    """Stands for a `Room` of tier/slots.py: bytes that are counted while it lives."""

    leaving = None  # no copies

    def __init__(self, nbytes: int, count: Count) -> None:
        self.nbytes = round_up(max(1, nbytes), PAGE_NBYTES)
        self._count = count
        count("staging", self.nbytes, "cpu")

    def __del__(self) -> None:
        self._count("staging", -self.nbytes, "cpu")
