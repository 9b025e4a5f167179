"""A call: one forward of a module, as a schedule follows it into backward."""

from __future__ import annotations

from weakref import WeakSet


class Call:
    """One forward of a module that uses a unit, from its start until backward is through with it.

    `walk` tells the forwards of the root apart. The executor alone uses `edits`: a number that
    shows that weights have changed since.
    """

    __slots__ = ("__weakref__", "edits", "finished", "is_begun", "started", "unit", "walk")

    def __init__(self, unit: int, started: int, walk: int = 0) -> None:
        self.unit = unit
        self.started = self.finished = started
        self.walk = walk
        self.is_begun = False  # backward has reached it
        self.edits = 0


class OpenCalls:
    """The calls that backward will reach, by unit.

    A backward may reach the calls of several forwards of the root, as of siamese networks. Where a
    pipeline drives, each backward is that of one forward, and others wait for theirs.
    """

    def __init__(self, num_units: int) -> None:
        self._calls: list[WeakSet[Call]] = [WeakSet() for _ in range(num_units)]
        self.walk = 0  # the forward of the root that runs, or whose backward runs
        self.are_more_to_come = False  # in layered order: calls of any unit may follow

    def grow(self, num_units: int) -> None:
        """More units came."""
        self._calls += [WeakSet() for _ in range(num_units)]

    def add(self, call: Call) -> None:
        """Backward will reach a call."""
        self._calls[call.unit].add(call)

    def close(self, call: Call) -> None:
        """Backward is through with a call."""
        self._calls[call.unit].discard(call)

    def has(self, unit: int, *, apart: bool) -> bool:
        """True if this backward will reach the unit; `apart`: it is that of one forward."""
        calls = self._calls[unit]
        if self.are_more_to_come:
            return True
        return any(call.walk == self.walk for call in calls) if apart else bool(calls)

    def end(self, *, apart: bool) -> None:
        """A backward is over: it will reach no further call."""
        for calls in self._calls:
            kept = [call for call in calls if apart and call.walk != self.walk]
            calls.clear()
            calls.update(kept)
