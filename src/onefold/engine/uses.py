"""Count the modules that use each unit in the forward that runs. No torch here."""

from __future__ import annotations

from collections.abc import Hashable


class ModuleUses:
    """For each unit: how many of its modules run, and which have run."""

    def __init__(self, num_units: int) -> None:
        self._running = [0] * num_units
        self._over: list[set[Hashable]] = [set() for _ in range(num_units)]

    def grow(self, num_units: int) -> None:
        """More units came."""
        self._running += [0] * num_units
        self._over += [set() for _ in range(num_units)]

    def begin(self) -> None:
        """A forward of the root starts, or is over: no module runs."""
        self._running = [0] * len(self._running)
        for over in self._over:
            over.clear()

    def enter(self, unit: int) -> None:
        """A module that uses the unit starts."""
        self._running[unit] += 1

    def leave(self, unit: int) -> bool:
        """A module is over; return True if no other one that uses the unit runs."""
        self._running[unit] -= 1
        return self._running[unit] <= 0

    def note(self, unit: int, module: Hashable, num_modules: int) -> bool:
        """Note that a module has run (None: it failed); return True if all have."""
        over = self._over[unit]
        if module is not None:
            over.add(module)
        are_over = len(over) >= num_modules
        if are_over:
            over.clear()
        return are_over

    def is_running(self, unit: int) -> bool:
        """True if a module that uses the unit runs."""
        return bool(self._running[unit])

    def is_between(self, unit: int) -> bool:
        """True if either none of the unit's modules has run or all have, and none runs."""
        return self._running[unit] == 0 and not self._over[unit]
