"""Phases of a step and calls in them: lanes of messages, and spans for a recording."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from onefold.engine.calls import Call
from onefold.layout.ledger import Ledger
from onefold.layout.observer import Span, Stream
from onefold.wire.lanes import CALL, PhaseNow


class Marks:
    """Tells lanes and observers when a phase of a step runs, and observers when a call computes."""

    def __init__(self, ledger: Ledger, lanes: PhaseNow) -> None:
        self._ledger = ledger
        self._lanes = lanes
        self._phase: Span | None = None
        self._calls: WeakKeyDictionary[Call, Span] = WeakKeyDictionary()

    def begin(self, phase: str, lane: str = CALL) -> None:
        """Begin a phase: "forward", "backward" or "step". End one that was left open."""
        self.end()
        self._lanes.begin(lane)
        if phase == "backward":
            self._ledger.begin_backward()
        if self._ledger.observer is not None:
            self._phase = self._ledger.observer.begin(Stream.PHASE, phase, "")

    def end(self) -> None:
        """End the phase."""
        self._lanes.begin(CALL)
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.end()

    def enter(self, call: Call, verb: str, unit: str) -> None:
        """Begin the compute of a call, whose unit is unsharded now."""
        if self._ledger.observer is not None:
            self._calls[call] = self._ledger.observer.begin(Stream.COMPUTE, verb, unit)

    def leave(self, call: Call) -> None:
        """End the compute of a call: its forward, or its part of backward."""
        if self._calls:
            begun = self._calls.pop(call, None)
            if begun is not None:
                begun.end()
