"""Streams that run beside one another, the links they share, and how long compute waits.

All times are seconds. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from onefold.planner.link_costs import Cost


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """The work of one stream from `start` to `end`; `nbytes` that this rank sends."""

    stream: str
    unit: str
    what: str
    start: float
    end: float
    nbytes: float = 0.0


class Streams:
    """The streams of one rank, filled in the order in which its host fills them."""

    def __init__(self, contention: float) -> None:
        self.now = 0.0  # the end of the compute stream
        self.spans: list[PlannedSpan] = []
        self.parts: dict[str, float] = {}  # the compute stream's time, by cause
        self._rate = 1.0 - contention
        self._free: dict[str, float] = {}  # when a stream or a link is free again
        self._collectives: list[tuple[float, float]] = []  # collectives that may still run

    def begin_step(self) -> float:
        """Forget the spans of the step before, and return the time."""
        self.spans.clear()
        self.parts.clear()
        return self.now

    def collective(self, stream: str, unit: str, what: str, cost: Cost, ready: float) -> float:
        """Put a collective on its stream once that and its links are free; return when it ends."""
        if cost.seconds == 0:
            return ready
        keys = (stream, *cost.links)
        ready = max(ready, self._free.get(stream, 0.0)) + cost.encode
        start = max(ready, *(self._free.get(key, 0.0) for key in keys))
        end = start + cost.seconds
        for key in cost.links:
            self._free[key] = end
        self._free[stream] = end + cost.decode
        self._collectives.append((start, end))
        self.spans.append(PlannedSpan(stream, unit, what, start, end, cost.nbytes))
        return end + cost.decode

    def move(self, stream: str, unit: str, what: str, seconds: float, ready: float) -> float:
        """Put a copy or a background step on its stream, and return when it ends."""
        if seconds == 0:
            return ready
        start = max(ready, self._free.get(stream, 0.0))
        end = self._free[stream] = start + seconds
        self.spans.append(PlannedSpan(stream, unit, what, start, end))
        return end

    def wait(self, until: float, cause: str) -> None:
        """Stall compute; `cause` is the part of the step that the wait counts for."""
        if until > self.now:
            self._count(cause, until - self.now)
            self.now = until

    def compute(self, unit: str, what: str, parts: dict[str, float]) -> None:
        """Run work on the compute stream, slower while a collective runs beside it."""
        seconds = sum(parts.values())
        if seconds == 0:
            return
        start = self.now
        lost = self._lost(start, seconds) if self._rate < 1 else 0.0
        self.now = start + seconds + lost
        for part, own in {**parts, "contention": lost}.items():
            self._count(part, own)
        self.spans.append(PlannedSpan("compute", unit, what, start, self.now))

    def _lost(self, start: float, seconds: float) -> float:
        """Return the time that work of `seconds` loses beside the collectives under way."""
        self._collectives = sorted(span for span in self._collectives if span[1] > start)
        now, left, lost = start, seconds, 0.0
        for begin, end in self._collectives:
            alone = max(0.0, begin - now)
            if alone >= left:
                break
            now, left = now + alone, left - alone
            window = max(0.0, end - now)
            beside = min(left, window * self._rate)  # of `left`, done while the collective runs
            took = window if beside < left else beside / self._rate
            lost += took - beside
            now, left = now + took, left - beside
        return lost

    def _count(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds
