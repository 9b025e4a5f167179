"""A call: one forward of a module, as a schedule follows it into backward."""

from __future__ import annotations


class Call:
    """One forward of a module that uses a unit, from its start until backward is through with it.

    The executor alone uses `edits`: a number that shows that weights have changed since.
    """

    __slots__ = ("__weakref__", "edits", "finished", "is_begun", "started", "unit")

    def __init__(self, unit: int, started: int) -> None:
        self.unit = unit
        self.started = self.finished = started
        self.is_begun = False  # backward has reached it
        self.edits = 0
