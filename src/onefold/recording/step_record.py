"""One step of one rank, as a frozen value: what it held, and what was under way, over time.

Times are seconds since the step began. Bytes are told as changes, so that they are exact: from a
change on, a series holds so much, up to its next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

TORCH = "torch"
"""The series beside the ledger's kinds: activations and temporaries, which torch itself holds."""


@dataclass(frozen=True, slots=True)
class SpanLine:
    """Something that was under way. `stream` is a word of `onefold.observer.Stream`."""

    stream: str
    verb: str
    unit: str  # empty where it is of no unit
    start: float
    stop: float
    nbytes: int  # that it sent, fetched or flushed


@dataclass(frozen=True, slots=True)
class Series:
    """Bytes of one kind in one tier."""

    kind: str  # of `onefold.ledger.Kind`, or TORCH
    tier: str


@dataclass(frozen=True, slots=True)
class Change:
    """From `time` on, a series holds `nbytes`."""

    time: float
    series: int  # its index
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank sent with one kind of collective."""

    calls: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One recorded step of one rank. `spans` and `changes` are ordered by their start."""

    rank: int
    world_size: int
    began_at: float  # seconds since 1970, on this rank's clock
    seconds: float
    spans: tuple[SpanLine, ...]
    series: tuple[Series, ...]
    changes: tuple[Change, ...]
    sent: dict[str, Sent]  # by collective

    @property
    def memory(self) -> Memory:
        """Bytes over time, in a form to compute with."""
        return Memory.of(self)

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes that were held at once, by tier."""
        memory, found = self.memory, dict[str, int]()
        for tier in dict.fromkeys(series.tier for series in self.series):
            found[tier] = max(memory.totals_of(self.indices(tier)), default=0)
        return found

    def indices(self, tier: str) -> list[int]:
        """Which series are of a tier."""
        return [index for index, series in enumerate(self.series) if series.tier == tier]

    def total(self, stream: str, verb: str | None = None) -> float:
        """Seconds in which something was under way on a stream; overlaps count once."""
        chosen = [s for s in self.spans if s.stream == stream and verb in (None, s.verb)]
        return sum(stop - start for start, stop in union((s.start, s.stop) for s in chosen))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of every series at the moments at which any of them changed.

    `nbytes[s][i]` is what series s holds from `times[i]` on; the first moment is 0.
    """

    times: tuple[float, ...]
    nbytes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(record: StepRecord) -> Memory:
        """Changes of one moment are one; what is held before the first change is in it."""
        now = [0] * len(record.series)
        times: list[float] = []
        columns: list[tuple[int, ...]] = []
        for change in record.changes:
            now[change.series] = change.nbytes
            if times and change.time == times[-1]:
                columns[-1] = tuple(now)
            else:
                times.append(change.time)
                columns.append(tuple(now))
        held = tuple(zip(*columns, strict=True)) or tuple(() for _ in record.series)
        return Memory(tuple(times), held)

    def totals_of(self, indices: Iterable[int]) -> list[int]:
        """The sum of some series at each moment."""
        chosen = [self.nbytes[index] for index in indices]
        return [sum(column) for column in zip(*chosen, strict=True)]


def union(intervals: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The same stretches without overlaps, in order."""
    held: tuple[float, float] | None = None
    for start, stop in sorted(intervals):
        if held is None:
            held = start, stop
        elif start <= held[1]:
            held = held[0], max(held[1], stop)
        else:
            yield held
            held = start, stop
    if held is not None:
        yield held
