"""Write and read the files of a report: `report.json`, `index.html` made from it, `trace.json`.

The page is one static template, `page.html`, with the report's data in it. The template loads
nothing; its own content policy forbids it. Its script draws the charts and tables. This module
chooses and bounds the data, so the page of a long step or run stays small.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from math import ceil, isfinite, log10
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

from onefold.errors import ConfigError, OnefoldError
from onefold.recording.run_report import FORMAT, RunReport, Training
from onefold.recording.step_record import (
    COLLECTIVES,
    KINDS,
    STREAMS,
    TIERS,
    VERBS,
    SpanLine,
    StepRecord,
    known_first,
    total_seconds,
)

DATA, TRACE, PAGE = "report.json", "trace.json", "index.html"

MAX_COLUMNS = 900
"""Moments that a memory chart shows: the highest of each column, and the last."""

MAX_SPANS = 4000
"""Spans that the timeline shows. It leaves out the shortest."""

MAX_POINTS = 400
"""Steps that a curve shows. Of more steps it shows averages."""

MAX_UNITS = 60
"""Units in the table: the first ones."""


def page(report: RunReport) -> str:
    """Return the whole document."""
    data = json.dumps(contents(report), separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")  # no `<` ends the script element
    filled = {"title": escape(report.title), "data": data}
    template = (files("onefold.recording") / "page.html").read_text("utf-8")
    return re.sub(r"\{\{(title|data)\}\}", lambda name: filled[name[1]], template)


def contents(report: RunReport) -> dict[str, Any]:
    """Return the data that the template's script reads."""
    plain, step = report.as_json(), report.step
    names = ("about", "recorded", "ranks", "machine", "versions", "plan", "written_at", "stage0")
    return {
        **{name: plain[name] for name in names},
        "step": {name: plain["step"][name] for name in ("rank", "world_size", "seconds", "sent")},
        "diagnosis": report.diagnosis,
        "units": plain["units"][:MAX_UNITS],
        "num_units": len(report.units),
        "phases": [[s.verb, s.start, s.stop] for s in step.spans if s.stream == "phase"],
        "memory": memory_stacks(step),
        "predicted": predicted_line(report),
        "lanes": lanes(step),
        "times": times_by_verb(step),
        "training": None if report.training is None else _curves(report.training),
        "words": {"kinds": KINDS, "tiers": TIERS, "verbs": VERBS, "collectives": COLLECTIVES},
    }


def memory_stacks(record: StepRecord) -> list[dict[str, Any]]:
    """Stack the kinds of each tier that holds anything.

    `layers[i][t]` is the bytes of kind i at `times[t]`, from the bottom up; `peaks` has the peak of
    each kind.
    """
    memory, stacks = record.memory, list[dict[str, Any]]()
    for tier in known_first((series.tier for series in record.series), TIERS):
        used = {record.series[i].kind: memory.nbytes[i] for i in record.indices(tier)
                if any(memory.nbytes[i])}  # fmt: skip
        if not used:
            continue
        kinds = known_first(used, KINDS)
        totals = [sum(column) for column in zip(*used.values(), strict=True)]
        kept = _highest_moments(memory.times, totals, record.seconds)
        stacks.append({
            "tier": tier,
            "kinds": kinds,
            "times": [round(memory.times[moment], 7) for moment in kept],
            "layers": [[used[kind][moment] for moment in kept] for kind in kinds],
            "peaks": [max(used[kind]) for kind in kinds],
        })  # fmt: skip
    return stacks


def _highest_moments(
    times: Sequence[float], totals: Sequence[int], seconds: float
) -> Sequence[int]:
    """Return all moments, or of many the highest in each of MAX_COLUMNS intervals and the last."""
    if len(times) <= MAX_COLUMNS:
        return range(len(times))
    highest = dict[int, int]()
    for moment, time in enumerate(times):
        column = int(time / seconds * MAX_COLUMNS)
        if totals[moment] >= totals[highest.setdefault(column, moment)]:
            highest[column] = moment
    return sorted({*highest.values(), len(times) - 1})


def predicted_line(report: RunReport) -> list[tuple[float, float, int]]:
    """Return (start, stop, bytes) for each moment of the plan with a span in the record.

    A moment names a phase and a unit; a moment of no unit stands for the whole phase.
    """
    spans: dict[tuple[str, str, str], deque[SpanLine]] = defaultdict(deque)
    for span in report.step.spans:
        spans[span.stream, span.verb, span.unit].append(span)
    line: list[tuple[float, float, int]] = []
    for moment in report.plan.predicted.timeline if report.plan else ():
        matching = spans["compute" if moment.unit else "phase", moment.phase, moment.unit]
        if matching:
            span = matching.popleft()
            line.append((span.start, span.stop, sum(moment.nbytes_by_kind.values())))
    return sorted(line)


def lanes(record: StepRecord) -> list[dict[str, Any]]:
    """Return a row for each stream, and further rows where spans of a stream overlap."""
    longest = sorted(record.spans, key=lambda span: span.start - span.stop)[:MAX_SPANS]
    lanes: list[dict[str, Any]] = []
    for name, spans in rows(longest):
        stream, _, number = name.partition(" ")
        label = f"{STREAMS.get(stream, stream)} {number}".strip()
        bars = [[s.verb, s.unit, round(s.start, 7), round(s.stop, 7), s.nbytes] for s in spans]
        lanes.append({"name": label, "stream": stream, "spans": bars})
    return lanes


def times_by_verb(record: StepRecord) -> list[tuple[str, str, int, float, int]]:
    """Return (verb, stream, spans, seconds, bytes); overlaps count once."""
    groups: dict[tuple[str, str], list[SpanLine]] = defaultdict(list)
    for span in record.spans:
        if span.stream != "phase" or span.verb == "step":
            groups[span.verb, span.stream].append(span)
    return [
        (verb, stream, len(spans), total_seconds(spans), sum(span.nbytes for span in spans))
        for known in known_first((verb for verb, _ in groups), VERBS)
        for (verb, stream), spans in groups.items()
        if verb == known
    ]


def _curves(training: Training) -> dict[str, Any]:
    losses, speeds = training.losses, training.speeds
    held_out, last = training.held_out, losses[-1] if losses else None
    return {
        "first": training.first_step + 1,
        "last": training.first_step + len(losses),
        "losses": averaged(losses),
        "last_loss": last if last is not None and isfinite(last) else None,
        "held_out": held_out if held_out is not None and isfinite(held_out) else None,
        "speeds": averaged(speeds),
        "median_speed": median(speeds) if speeds else None,
    }


def averaged(values: Sequence[float | None]) -> list[tuple[float, float]]:
    """Return (index, finite value), averaged over powers of ten to at most MAX_POINTS."""
    width = 10 ** ceil(log10(max(1.0, len(values) / MAX_POINTS)))
    points: list[tuple[float, float]] = []
    for start in range(0, len(values), width):
        part = [y for y in values[start : start + width] if y is not None and isfinite(y)]
        if part:
            points.append((start + (len(part) - 1) / 2, sum(part) / len(part)))
    return points


# the trace


def rows(spans: Sequence[SpanLine]) -> list[tuple[str, list[SpanLine]]]:
    """Arrange spans in rows, named after their stream; unknown streams come last.

    Spans of a row are disjoint or nested.
    """
    by_stream: dict[str, list[list[SpanLine]]] = {stream: [] for stream in STREAMS}
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        lanes = by_stream.setdefault(span.stream, [])
        lane = next((lane for lane in lanes if _fits(span, lane)), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(span)
    return [
        (stream if number == 0 else f"{stream} {number + 1}", lane)
        for stream, lanes in by_stream.items()
        for number, lane in enumerate(lanes)
    ]


def _fits(span: SpanLine, lane: Sequence[SpanLine]) -> bool:
    """True if every earlier span of the lane is over by now, or contains this one."""
    return all(other.stop <= span.start or other.stop >= span.stop for other in lane)


def chrome_trace(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the JSON object of a trace file, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    Each rank is a process and each row a thread. Spans of a stream that overlap without nesting get
    rows of their own, as the format requires. Bytes are counters. Times are microseconds since the
    first rank began. Source: "Trace Event Format", Google.
    """
    events: list[dict[str, Any]] = []
    first = min((record.began_at for record in records), default=0.0)
    for record in records:
        shift = record.began_at - first
        events.append(_name("process_name", record.rank, 0, f"rank {record.rank}"))
        for tid, (name, spans) in enumerate(rows(record.spans), start=1):
            events.append(_name("thread_name", record.rank, tid, name))
            events += [
                {
                    "ph": "X", "pid": record.rank, "tid": tid, "cat": span.stream,
                    "name": f"{span.verb} {span.unit}".strip(),
                    "ts": _microseconds(shift + span.start),
                    "dur": _microseconds(span.stop - span.start),
                    "args": {"unit": span.unit, "nbytes": span.nbytes},
                }
                for span in spans
            ]  # fmt: skip
        events += _counters(record, shift)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _counters(record: StepRecord, shift: float) -> list[dict[str, Any]]:
    memory = record.memory
    names = [f"{series.kind} ({series.tier})" for series in record.series]
    return [
        {
            "ph": "C", "pid": record.rank, "tid": 0, "name": "bytes held",
            "ts": _microseconds(shift + time), "args": dict(zip(names, nbytes, strict=True)),
        }
        for time, nbytes in zip(memory.times, zip(*memory.nbytes, strict=True), strict=True)
    ]  # fmt: skip


def _name(event: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": event, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# files


def prepare(directory: str | os.PathLike[str], purpose: str = "a report") -> Path:
    """Make the directory, and write to it. Raises `ConfigError` if that cannot be done."""
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        got = f"{str(path)!r}: {error.strerror or error}"
        hint = "name a folder that exists or can be made"
        raise ConfigError(f"a directory to write {purpose} to", got, hint=hint) from error
    return path


def write(
    directory: str | os.PathLike[str], report: RunReport, records: Sequence[StepRecord]
) -> Path:
    """Write all three files; return the page's path. The trace has the `records` of all ranks."""
    path = prepare(directory)
    data = report.as_json()
    _write_text(path / DATA, json.dumps(data, allow_nan=False))
    _write_text(path / TRACE, json.dumps(chrome_trace(records)))
    return draw(path, RunReport.parse(data))  # as `onefold report` will draw it


def draw(directory: Path, report: RunReport) -> Path:
    """Write the page alone and return its path."""
    target = directory / PAGE
    _write_text(target, page(report))
    return target


def read(directory: str | os.PathLike[str]) -> RunReport:
    """Read the report of a directory. Raises `ConfigError` if it is absent or damaged."""
    path = Path(directory) / DATA
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        number = int(data["format"])
        if number <= FORMAT:
            return RunReport.parse(data)
    except OSError as error:
        raise _refused(f"{DATA} in {str(directory)!r}", error.strerror or str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise _refused(f"an undamaged {str(path)!r}", reason) from error
    wanted = f"a report of format {FORMAT} or older in {str(path)!r}"
    hint = "read it with the version of onefold that wrote it, or a newer one"
    raise ConfigError(wanted, f"format {number}", hint=hint)


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        got, hint = str(error.strerror or error), "free space there, or name another directory"
        raise OnefoldError(f"to write {str(path)!r}", got, hint=hint) from error


def _refused(wanted: str, got: str) -> ConfigError:
    hint = "`onefold train --report DIR` writes one"
    return ConfigError(wanted, got, hint=hint)
