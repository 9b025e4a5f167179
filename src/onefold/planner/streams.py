"""Streams that run beside one another, the links they share, and how long compute waits."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.planner.links import Cost


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """What one stream does from `start` to `end`, in seconds; `nbytes` that this rank sends."""

    stream: str
    unit: str
    what: str
    start: float
    end: float
    nbytes: float = 0.0


class Streams:
    """One rank's streams, filled in the order in which the host would."""

    def __init__(self, contention: float) -> None:
        self.now = 0.0  # the end of the compute stream
        self.spans: list[PlannedSpan] = []
        self.parts: dict[str, float] = {}  # where the compute stream's time went
        self._rate = 1.0 - contention
        self._free: dict[str, float] = {}  # when a stream or a link is free again
        self._talking: list[tuple[float, float]] = []  # collectives that may still run

    def begin_step(self) -> float:
        """Forget what is recorded, not what is under way; the time it is."""
        self.spans.clear()
        self.parts.clear()
        return self.now

    def collective(self, stream: str, unit: str, what: str, cost: Cost, ready: float) -> float:
        """Put a collective on its stream, as soon as that and its links are free; when it ends."""
        if cost.seconds == 0:
            return ready
        keys = (stream, *cost.links)
        ready = max(ready, self._free.get(stream, 0.0)) + cost.encode
        start = max(ready, *(self._free.get(key, 0.0) for key in keys))
        end = start + cost.seconds
        for key in cost.links:
            self._free[key] = end
        self._free[stream] = end + cost.decode
        self._talking.append((start, end))
        self.spans.append(PlannedSpan(stream, unit, what, start, end, cost.nbytes))
        return end + cost.decode

    def move(self, stream: str, unit: str, what: str, seconds: float, ready: float) -> float:
        """Put a copy or a background step on its stream; when it ends."""
        if seconds == 0:
            return ready
        start = max(ready, self._free.get(stream, 0.0))
        end = self._free[stream] = start + seconds
        self.spans.append(PlannedSpan(stream, unit, what, start, end))
        return end

    def wait(self, until: float, cause: str) -> None:
        """Stall compute."""
        if until > self.now:
            self._spend(cause, until - self.now)
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
            self._spend(part, own)
        self.spans.append(PlannedSpan("compute", unit, what, start, self.now))

    def _lost(self, start: float, seconds: float) -> float:
        """What `seconds` of work from `start` on lose beside collectives that are under way."""
        self._talking = sorted(span for span in self._talking if span[1] > start)
        now, left, lost = start, seconds, 0.0
        for begin, end in self._talking:
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

    def _spend(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds
