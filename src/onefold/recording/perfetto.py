"""A step as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process for each rank, one thread for each row: things of a stream that were under way at once
and do not lie in one another get rows of their own, which the format asks for. Bytes held are
counters. Times are microseconds since the first rank began. Source: "Trace Event Format", Google.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.recording.step_record import SpanLine, StepRecord

STREAMS = ("phase", "compute", "gather", "reduce", "tier", "background")
"""In the order of rows; unknown ones come last."""


def rows(spans: Sequence[SpanLine]) -> list[tuple[str, list[SpanLine]]]:
    """Spans by row, named after their stream. In a row spans lie beside or inside one another."""
    by_stream: dict[str, list[list[SpanLine]]] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        taken = by_stream.setdefault(span.stream, [])
        row = next((row for row in taken if _fits(span, row)), None)
        if row is None:
            taken.append([span])
        else:
            row.append(span)
    known = [stream for stream in STREAMS if stream in by_stream]
    order = known + [stream for stream in by_stream if stream not in known]
    return [
        (stream if number == 0 else f"{stream} {number + 1}", row)
        for stream in order
        for number, row in enumerate(by_stream[stream])
    ]


def _fits(span: SpanLine, row: Sequence[SpanLine]) -> bool:
    """True if every span of the row is over by now, or ends no earlier."""
    return all(other.stop <= span.start or other.stop >= span.stop for other in row)


def as_chrome(records: Sequence[StepRecord]) -> dict[str, Any]:
    """The JSON object of a trace file."""
    events: list[dict[str, Any]] = []
    first = min((record.began_at for record in records), default=0.0)
    for record in records:
        shift = record.began_at - first
        events.append(_named("process_name", record.rank, 0, f"rank {record.rank}"))
        for tid, (name, spans) in enumerate(rows(record.spans), start=1):
            events.append(_named("thread_name", record.rank, tid, name))
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
            "ts": _microseconds(shift + time),
            "args": {name: nbytes[moment] for name, nbytes in
                     zip(names, memory.nbytes, strict=True)},
        }
        for moment, time in enumerate(memory.times)
    ]  # fmt: skip


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
