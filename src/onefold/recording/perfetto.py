"""A step as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each rank is a process and each row a thread. Spans of a stream that overlap without nesting get
rows of their own, as the format requires. Bytes are counters. Times are microseconds since the
first rank began. Source: "Trace Event Format", Google.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.recording.step_record import STREAMS, SpanLine, StepRecord


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
    """Return the JSON object of a trace file."""
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
