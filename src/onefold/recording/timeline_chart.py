"""What was under way over one step: a row for each stream, and the same as a table."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.recording.chart_axes import chart, line, percent, text, ticks, time_axis
from onefold.recording.html_tables import Cells, keyed, table
from onefold.recording.kinds import STREAMS, VERBS, css_name
from onefold.recording.markup import Attribute, Markup, bytes_text, el, seconds_text, share_text
from onefold.recording.perfetto import rows as lanes_of
from onefold.recording.step_record import SpanLine, StepRecord, union

PITCH, BAR, LOW = 32, 22, 7  # pixels: of a row, its bars, and those of which one lies on another

LETTER = 6.4 / 640
"""Share of the width of a narrow desktop window that a letter takes."""

BACKGROUND = "background"

ON_OTHERS = ("wait", "await_step", "unpack", "average")
"""Verbs of the training thread that may lie inside a unit's compute."""

MAX_SPANS = 4000
"""Of more, the shortest are not drawn."""


def timeline(record: StepRecord) -> Markup:
    """The rows over one time axis."""
    spans = record.spans
    if len(spans) > MAX_SPANS:
        spans = tuple(sorted(spans, key=lambda span: span.start - span.stop)[:MAX_SPANS])
    lanes = lanes_of(spans)
    height = PITCH * len(lanes)
    parts: list[Markup] = []
    for tick in ticks(record.seconds * 1e3, 5)[1:]:
        share = tick / (record.seconds * 1e3)
        parts.append(line((share, share), (0, height), "grid"))
    for number, (name, lane) in enumerate(lanes):
        y = number * PITCH + (PITCH - BAR) / 2
        words = STREAMS.get(name, "" if name.partition(" ")[0] in STREAMS else name)
        lane_name: dict[str, Attribute] = {"x": -8, "y": y + 15, "class": "lane"}
        parts.append(el("text", {**lane_name, "text-anchor": "end"}, words))
        for span in lane:
            parts += _bar(record, span, y)
    title = "Timeline of one step"
    told = f"{len(record.spans)} spans in {len(lanes)} rows over {seconds_text(record.seconds)}"
    parts += [line((0, 1), (height, height), "base"), *time_axis(record.seconds, height)]
    return el("figure", {"class": "timeline"}, chart(title, told, height + 22, *parts))


def _bar(record: StepRecord, span: SpanLine, y: float) -> list[Markup]:
    start, width = span.start / record.seconds, (span.stop - span.start) / record.seconds
    told = f"{VERBS.get(span.verb, span.verb)} {span.unit}".strip()
    told += f": {seconds_text(span.stop - span.start)} from {seconds_text(span.start)}"
    told += f", {bytes_text(span.nbytes)}" if span.nbytes else ""
    low = BAR - LOW if span.verb in ON_OTHERS else 0
    name = f"phase-{css_name(span.verb, VERBS)}" if span.stream == "phase" else css_name(
        span.verb, VERBS
    )  # fmt: skip
    shape = el(
        "rect",
        {
            "x": percent(start), "width": percent(width), "y": y + low,
            "height": BAR - low, "class": f"bar {name}",
        },
        el("title", {}, told),
    )  # fmt: skip
    words = span.verb if span.stream == "phase" else span.unit
    if low or width < LETTER * (len(words) + 1.5):
        return [shape]
    return [
        shape,
        text(start + width / 2, y + 14, words, f"barname on-{span.verb}", anchor="middle"),
    ]


def where_time_went(record: StepRecord) -> Markup:
    """By stream and verb: how often, how long, how much."""
    verbs: dict[tuple[str, str], list[SpanLine]] = {}
    for span in record.spans:
        if span.stream != "phase":
            verbs.setdefault((span.stream, span.verb), []).append(span)
    phases = [span for span in record.spans if span.stream == "phase" and span.verb == "step"]
    if phases:
        verbs["compute", "step"] = phases
    order = list(VERBS)
    keys = sorted(verbs, key=lambda key: order.index(key[1]) if key[1] in VERBS else len(order))
    head = ("what", "times", "time", "of the step", "bytes")
    rows = [_row(record, verb, verbs[stream, verb]) for stream, verb in keys]
    return table(head, rows, is_legend=True, minor=(1,))


def _row(record: StepRecord, verb: str, spans: Sequence[SpanLine]) -> Cells:
    seconds = sum(stop - start for start, stop in union((s.start, s.stop) for s in spans))
    nbytes = sum(span.nbytes for span in spans)
    words = VERBS.get(verb, verb) + (", in the background" if spans[0].stream == BACKGROUND else "")
    return (
        keyed(css_name(verb, VERBS), words), f"{len(spans):,d}", seconds_text(seconds),
        share_text(seconds / record.seconds), bytes_text(nbytes) if nbytes else "",
    )  # fmt: skip
