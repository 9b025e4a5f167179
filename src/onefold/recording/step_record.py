"""One step of one rank as a frozen value: its spans, and its bytes over time.

Times are seconds since the step began. Bytes are recorded as changes, so they are exact: a series
holds `nbytes` from one change to its next.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

TORCH = "torch"
"""The series beside the ledger's kinds: activations and temporaries in torch's allocator."""


@dataclass(frozen=True, slots=True)
class SpanLine:
    """Work with a start and an end. `stream` is a value of `onefold.layout.observer.Stream`."""

    stream: str
    verb: str
    unit: str  # empty for work of no unit
    start: float
    stop: float
    nbytes: int  # sent, fetched or flushed


@dataclass(frozen=True, slots=True)
class Series:
    """Bytes of one kind in one tier."""

    kind: str  # of `onefold.layout.ledger.Kind`, or TORCH
    tier: str


@dataclass(frozen=True, slots=True)
class Change:
    """From `time` on, a series holds `nbytes`."""

    time: float
    series: int  # its index
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sent:
    """Calls of one collective, and the bytes that this rank sent with them."""

    calls: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of every series at the moments at which any of them changed.

    Series s holds `nbytes[s][i]` bytes from `times[i]` on.
    """

    times: tuple[float, ...]
    nbytes: tuple[tuple[int, ...], ...]

    def totals_of(self, indices: Iterable[int]) -> list[int]:
        """Sum some series at each moment."""
        return [sum(column) for column in zip(*(self.nbytes[i] for i in indices), strict=True)]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One recorded step of one rank. `spans` and `changes` are ordered by their start.

    Raises `ValueError` for a duration that is not positive or a change of an unknown series.
    """

    rank: int
    world_size: int
    began_at: float  # seconds since 1970, on this rank's clock
    seconds: float
    spans: tuple[SpanLine, ...]
    series: tuple[Series, ...]
    changes: tuple[Change, ...]
    sent: dict[str, Sent]  # by collective
    modules: dict[str, int] = field(default_factory=dict[str, int])  # activations, by module

    def __post_init__(self) -> None:
        if not (isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"a step of {self.seconds} seconds")
        if any(not 0 <= change.series < len(self.series) for change in self.changes):
            raise ValueError("a change of an unknown series")

    @property
    def memory(self) -> Memory:
        """Bytes over time, in a form to compute with. Changes of one moment are merged."""
        now = [0] * len(self.series)
        columns: dict[float, tuple[int, ...]] = {}
        for change in self.changes:
            now[change.series] = change.nbytes
            columns[change.time] = tuple(now)
        nbytes = tuple(zip(*columns.values(), strict=True)) or ((),) * len(self.series)
        return Memory(tuple(columns), nbytes)

    @property
    def peaks(self) -> dict[str, int]:
        """The peak of all series together, by tier."""
        memory = self.memory
        tiers = dict.fromkeys(series.tier for series in self.series)
        return {tier: max(memory.totals_of(self.indices(tier)), default=0) for tier in tiers}

    def indices(self, tier: str) -> list[int]:
        """Return the indices of a tier's series."""
        return [index for index, series in enumerate(self.series) if series.tier == tier]

    def total(self, stream: str, verb: str | None = None) -> float:
        """Sum the seconds of a stream's spans; overlaps count once."""
        chosen = [s for s in self.spans if s.stream == stream and verb in (None, s.verb)]
        return total_seconds(chosen)

    def actions(self) -> str:
        """List the spans of each unit in order, one line a unit, as text for bug reports."""
        verbs: dict[str, list[str]] = {}
        for span in self.spans:
            if span.unit:
                verbs.setdefault(span.unit, []).append(span.verb)
        return "\n".join(f"{unit}: {' '.join(of_unit)}" for unit, of_unit in verbs.items())


def total_seconds(spans: Iterable[SpanLine]) -> float:
    """Sum the seconds of spans; overlaps count once."""
    return sum(stop - start for start, stop in union((span.start, span.stop) for span in spans))


def union(intervals: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Merge intervals that overlap or touch; in order."""
    merged: tuple[float, float] | None = None
    for start, stop in sorted(intervals):
        if merged is None:
            merged = start, stop
        elif start <= merged[1]:
            merged = merged[0], max(merged[1], stop)
        else:
            yield merged
            merged = start, stop
    if merged is not None:
        yield merged


def idle_seconds(record: StepRecord) -> dict[str, float]:
    """Sum the seconds of the training thread that are neither compute nor waits, by their place.

    Together with busy and waiting seconds they are the step.
    """
    phases = [s for s in record.spans if s.stream == "phase"]
    steps = [s for s in phases if s.verb == "step"]  # no unit computes in a step
    busy = [s for s in record.spans if s.stream == "compute"] + steps
    covered = list(union((s.start, s.stop) for s in busy))
    edges = {0.0, record.seconds, *(t for s in phases for t in (s.start, s.stop))}
    edges |= {t for stretch in covered for t in stretch}
    seconds: dict[str, float] = {}
    ordered, number = sorted(edge for edge in edges if 0 <= edge <= record.seconds), 0
    for start, stop in pairwise(ordered):
        while number < len(covered) and covered[number][1] <= start:
            number += 1
        if number == len(covered) or covered[number][0] >= stop:
            place = _place(phases, (start + stop) / 2)
            seconds[place] = seconds.get(place, 0.0) + stop - start
    return seconds


def _place(phases: list[SpanLine], moment: float) -> str:
    """Name the phase of a moment, or the phases before and after it."""
    inside = next((s.verb for s in phases if s.start <= moment < s.stop), None)
    if inside is not None:
        return f"in {inside}"
    before = max((s for s in phases if s.stop <= moment), key=lambda s: s.stop, default=None)
    after = min((s for s in phases if s.start > moment), key=lambda s: s.start, default=None)
    if before is None:
        return "before" if after else "outside"
    return f"{before.verb} to {after.verb}" if after else "after"


# words for people, on the page of a report and in the terminal

KINDS = {
    "weight": "weights at rest",
    "master": "fp32 master weights",
    "optimizer": "optimizer states",
    "ema": "moving averages of weights",
    "anchor": "anchors of islands",
    "grad": "gradients, reduced",
    "partial_grad": "gradients, not yet reduced",
    "feedback": "error feedback of quantized gradients",
    "secondary": "secondary weight shards of the node",
    "unsharded": "unsharded weights, gathered",
    "activation": "activations, offloaded",
    "kv_cache": "keys and values of past tokens",
    "staging": "staging slots of offload tiers",
    "wire": "buffers of collectives",
    TORCH: "activations and temporaries (torch)",
}
"""Kinds of bytes from the bottom of the stack up: states, gradients, short-lived buffers."""

TIERS = {"device": "device memory", "cpu": "CPU memory", "disk": "disk"}

VERBS = {
    "forward": "forward",
    "recompute": "forward again (recompute)",
    "backward": "backward",
    "wait": "waiting for a collective",
    "wait_step": "waiting for a background step",
    "unpack": "unpacking gathered weights",
    "average": "averaging received gradients",
    "gather": "gather of weights",
    "reduce_scatter": "reduce-scatter of gradients",
    "fetch": "fetch from an offload tier",
    "flush": "flush to an offload tier",
    "step": "optimizer step",
}

STREAMS = {
    "phase": "phase",
    "compute": "compute",
    "gather": "gather weights",
    "reduce": "reduce gradients",
    "tier": "fetch and flush (offload)",
    "background": "optimizer steps in the background",
}

IDLE = {
    "before": "before the first forward: data, your code",
    "in forward": "in forward, between units: modules outside of units, Python",
    "forward to backward": "from forward to backward: the loss",
    "in backward": "in backward, between units: autograd, Python",
    "backward to forward": "from backward to the next forward: data, your code",
    "backward to step": "from backward to the step: clipping, your code",
    "after": "after the step: your code",
    "outside": "outside of forward, backward and step",
}

COLLECTIVES = {
    "gather": "weights (gather)",
    "reduce_scatter": "gradients (reduce-scatter)",
    "gather padding": "behind short pieces of weights",
    "reduce_scatter padding": "behind short pieces of gradients",
    "control": "flags and 0-dim parameters",
    "whole_matrix": "matrices of matrix optimizers",
    "optimizer_sum": "sums over all elements (Prodigy, D-Adaptation)",
}


def known_first(words: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the distinct words: known ones in the order of `known`, then the others."""
    distinct = dict.fromkeys(words)
    first = [word for word in known if word in distinct]
    return first + [word for word in distinct if word not in first]
