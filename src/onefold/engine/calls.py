"""The spans of calls and phases that a recording sees."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from onefold.engine.schedule import Call
from onefold.ledger import Ledger
from onefold.observer import Span, Stream


def in_backward() -> bool:
    """True while autograd runs a graph on this thread, recompute included."""
    return torch._C._current_graph_task_id() != -1


class Marks:
    """Tells the ledger's observer when calls compute, and which phase of a step it is."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._phase: Span | None = None
        self._calls: WeakKeyDictionary[Call, Span] = WeakKeyDictionary()

    def begin(self, phase: str) -> None:
        """A phase begins: "forward", "backward" or "step". One that was left open ends here."""
        self.end()
        if phase == "backward":
            self._ledger.begin_backward()
        if self._ledger.observer is not None:
            self._phase = self._ledger.observer.begin(Stream.PHASE, phase, "")

    def end(self) -> None:
        """The phase is over."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.end()

    def enter(self, call: Call, verb: str, unit: str) -> None:
        """A call's unit is unsharded, and it computes from here on."""
        if self._ledger.observer is not None:
            self._calls[call] = self._ledger.observer.begin(Stream.COMPUTE, verb, unit)

    def leave(self, call: Call) -> None:
        """A call has computed: its forward, or its part of backward."""
        if self._calls:
            begun = self._calls.pop(call, None)
            if begun is not None:
                begun.end()
