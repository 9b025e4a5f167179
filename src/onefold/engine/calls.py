"""A call: one forward of a module, as a schedule follows it into backward."""

from __future__ import annotations

from weakref import WeakSet

from onefold.engine.driving import Drive


class Call:
    """One forward of a module that uses a unit, from its start until backward is through with it.

    `walk` tells the forwards of the root apart. The executor alone uses `edits`: a number that
    shows that weights have changed since.
    """

    __slots__ = ("__weakref__", "edits", "finished", "started", "unit", "walk")

    def __init__(self, unit: int, started: int, walk: int = 0) -> None:
        self.unit = unit
        self.started = self.finished = started
        self.walk = walk
        self.edits = 0

    def finish(self, clock: int) -> None:
        """The forward is over."""
        self.finished = clock

    def note_edits(self, edits: int) -> None:
        """Weights have been edited so often when the forward begins."""
        self.edits = edits


class OpenCalls:
    """The calls that backward will reach, by unit.

    A backward may reach the calls of several forwards of the root, as of siamese networks. Where a
    pipeline drives, each backward is that of one forward, and others wait for theirs.
    """

    def __init__(self, num_units: int) -> None:
        self._calls: list[WeakSet[Call]] = [WeakSet() for _ in range(num_units)]
        self._begun: list[Call] = []  # backward has reached them, and is not through with them
        self.walk = 0  # the forward of the root that runs, or whose backward runs

    def grow(self, num_units: int) -> None:
        """More units came."""
        self._calls += [WeakSet() for _ in range(num_units)]

    def add(self, call: Call) -> None:
        """Backward will reach a call."""
        self._calls[call.unit].add(call)

    def begin_walk(self, clock: int) -> None:
        """A forward of the root starts."""
        self.walk = clock

    def reach(self, call: Call) -> list[Call]:
        """Backward reaches a call; return the calls that it is through with, for `close`."""
        self.walk = call.walk
        return [other for other in self._begun if other.started > call.finished]

    def begin(self, call: Call) -> None:
        """Backward begins with a call."""
        self._begun.append(call)

    def begun_units(self) -> set[int]:
        """Units of calls that backward has reached, and is not through with."""
        return {call.unit for call in self._begun}

    def has_begun(self, call: Call) -> bool:
        """True if backward has reached the call, and is not through with it."""
        return call in self._begun

    def close(self, call: Call) -> None:
        """Backward is through with a call."""
        self._begun.remove(call)
        self._calls[call.unit].discard(call)

    def has(self, unit: int, driven: Drive) -> bool:
        """True if this backward will reach the unit."""
        calls = [c for c in self._calls[unit] if not driven.walks_apart or c.walk == self.walk]
        return driven.more_to_come or bool(calls)

    def end(self, driven: Drive) -> list[Call]:
        """A backward is over: it reaches no further call. Return those that it was not through."""
        for calls in self._calls:
            kept = [call for call in calls if driven.walks_apart and call.walk != self.walk]
            calls.clear()
            calls.update(kept)
        ended, self._begun = self._begun, []
        return ended
