"""The data of a page's charts. The page's script draws them, so nothing here knows of pixels."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite, log10
from statistics import median
from typing import Any

from onefold.recording.perfetto import rows
from onefold.recording.run_report import MemoryPlan, Training
from onefold.recording.step_record import SpanLine, StepRecord
from onefold.recording.words import (
    KINDS,
    STREAMS,
    TIERS,
    VERBS,
    colour_class,
    format_bytes,
    format_count,
    format_loss,
    format_seconds,
    known_first,
)

MAX_COLUMNS = 900
"""Moments that a memory chart shows: the highest of each column."""

MAX_SPANS = 4000
"""Spans that the timeline shows. It leaves out the shortest."""

MAX_POINTS = 400
"""Steps that a curve shows. Of more steps it shows averages."""

NESTED_VERBS = ("wait", "wait_step", "unpack", "average")
"""Verbs of the training thread that may lie inside a unit's compute: low bars in its row."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: its caption, a description for screen readers, and the script's data."""

    kind: str  # "memory", "timeline" or "curve"
    title: str
    description: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MemoryStack:
    """Bytes of one tier over time: `layers[i][t]` is kind i at `times[t]`, from the bottom up."""

    tier: str
    kinds: tuple[str, ...]
    times: tuple[float, ...]
    layers: tuple[tuple[int, ...], ...]

    @property
    def totals(self) -> list[int]:
        """The upper edge of the stack."""
        return [sum(column) for column in zip(*self.layers, strict=True)]

    @property
    def peak_index(self) -> int:
        """The first moment at which the stack is highest."""
        totals = self.totals
        return totals.index(max(totals))

    def thinned(self, seconds: float) -> MemoryStack:
        """Keep the highest moment of each of MAX_COLUMNS equal intervals."""
        if len(self.times) <= MAX_COLUMNS:
            return self
        totals, highest = self.totals, dict[int, int]()
        for moment, time in enumerate(self.times):
            column = int(time / seconds * MAX_COLUMNS)
            if totals[moment] >= totals[highest.setdefault(column, moment)]:
                highest[column] = moment
        kept = sorted(highest.values())
        times = tuple(self.times[moment] for moment in kept)
        layers = tuple(tuple(layer[moment] for moment in kept) for layer in self.layers)
        return MemoryStack(self.tier, self.kinds, times, layers)


def memory_stacks(record: StepRecord) -> list[MemoryStack]:
    """Stack the kinds of each tier that holds anything."""
    memory = record.memory
    found: list[MemoryStack] = []
    for tier in known_first((series.tier for series in record.series), TIERS):
        used = {record.series[i].kind: memory.nbytes[i] for i in record.indices(tier)
                if any(memory.nbytes[i])}  # fmt: skip
        kinds = known_first(used, KINDS)
        if kinds:
            layers = tuple(used[kind] for kind in kinds)
            found.append(MemoryStack(tier, tuple(kinds), memory.times, layers))
    return found


def memory_charts(record: StepRecord, plan: MemoryPlan | None) -> list[Chart]:
    """A chart for each tier; the plan's line is in the first."""
    charts: list[Chart] = []
    for stack in memory_stacks(record):
        drawn = stack.thinned(record.seconds)
        at = drawn.times[drawn.peak_index]
        peak = format_bytes(max(drawn.totals))
        data = {
            "seconds": record.seconds,
            "phases": [[s.verb, s.start, s.stop] for s in record.spans if s.stream == "phase"],
            "names": [KINDS.get(kind, kind) for kind in drawn.kinds],
            "colours": [colour_class(kind) for kind in drawn.kinds],
            "times": drawn.times,
            "layers": drawn.layers,
            "predicted": [] if charts else predicted_line(record, plan),
        }
        where = f"{format_seconds(at)} of {format_seconds(record.seconds)}"
        title = TIERS.get(stack.tier, stack.tier)
        charts.append(Chart("memory", title, f"peak {peak} at {where}", data))
    return charts


def predicted_line(record: StepRecord, plan: MemoryPlan | None) -> list[tuple[float, float, int]]:
    """Return (start, stop, bytes) for each moment of the plan with a span in the record.

    A moment names a phase and a unit; a moment of no unit stands for the whole phase.
    """
    spans: dict[tuple[str, str, str], deque[SpanLine]] = defaultdict(deque)
    for span in record.spans:
        spans[span.stream, span.verb, span.unit].append(span)
    found: list[tuple[float, float, int]] = []
    for moment in plan.timeline if plan else ():
        matching = spans["compute" if moment.unit else "phase", moment.phase, moment.unit]
        if matching:
            span = matching.popleft()
            found.append((span.start, span.stop, sum(moment.nbytes_by_kind.values())))
    return sorted(found)


def timeline_chart(record: StepRecord) -> Chart:
    """A row for each stream, and further rows where spans of a stream overlap."""
    longest = sorted(record.spans, key=lambda span: span.start - span.stop)[:MAX_SPANS]
    lanes = rows(longest)
    data = {
        "seconds": record.seconds,
        "lanes": [
            {
                # further rows of a known stream have no name
                "name": STREAMS.get(name, "" if name.partition(" ")[0] in STREAMS else name),
                "bars": [_bar(span) for span in lane],
            }
            for name, lane in lanes
        ],
    }
    size = f"{len(record.spans)} spans in {len(lanes)} rows over {format_seconds(record.seconds)}"
    return Chart("timeline", "All streams", size, data)


def _bar(span: SpanLine) -> list[Any]:
    """[start, stop, colour, label, is it low, tooltip]."""
    tooltip = f"{VERBS.get(span.verb, span.verb)} {span.unit}".strip()
    tooltip += f": {format_seconds(span.stop - span.start)} from {format_seconds(span.start)}"
    tooltip += f", {format_bytes(span.nbytes)}" if span.nbytes else ""
    label = span.verb if span.stream == "phase" else span.unit
    is_low = span.verb in NESTED_VERBS
    return [span.start, span.stop, colour_class(span.verb), label, is_low, tooltip]


def training_charts(training: Training) -> list[Chart]:
    """Loss and tokens per second over the steps of a run."""
    losses = [loss for loss in training.losses if loss is not None and isfinite(loss)]
    ends = f"from {format_loss(losses[0])} to {format_loss(losses[-1])}" if losses else "no numbers"
    charts = [_curve("Loss, nats per token", ends, training.losses, training.first_step)]
    if training.seconds:
        speeds = training.speeds
        middle = f"median {format_count(median(speeds))}"
        charts.append(_curve("Tokens per second, all ranks", middle, speeds, training.first_step))
    return charts


def _curve(title: str, text: str, values: Sequence[float | None], first: int) -> Chart:
    data = {"first": first + 1, "last": first + len(values), "points": averaged(values)}
    return Chart("curve", title, text, data)


def averaged(values: Sequence[float | None]) -> list[tuple[float, float]]:
    """Return (index, finite value), averaged over powers of ten to at most MAX_POINTS."""
    width = 10 ** ceil(log10(max(1.0, len(values) / MAX_POINTS)))
    found: list[tuple[float, float]] = []
    for start in range(0, len(values), width):
        part = [y for y in values[start : start + width] if y is not None and isfinite(y)]
        if part:
            found.append((start + (len(part) - 1) / 2, sum(part) / len(part)))
    return found
