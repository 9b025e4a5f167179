"""A simulated step as text: one line a stream, time from left to right."""

from __future__ import annotations

from onefold.planner.clock_executor import PlannedSpan
from onefold.planner.simulate import StepTime

ORDER = (
    "fetch", "cross", "gather", "compute", "reduce", "second_hop", "replica", "flush", "disk",
    "cpu", "publish",
)  # fmt: skip
MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def drawn(step: StepTime, *, width: int = 84) -> list[str]:
    """Lines of `width` columns over the step's seconds; a unit is a digit, waiting is blank.

    The optimizer's step is `s`. What goes on after the step is cut off.
    """
    names = list(dict.fromkeys(span.unit for span in step.spans if span.what == "forward"))
    marks = {name: MARKS[index % len(MARKS)] for index, name in enumerate(names)}
    lines = []
    for stream in ORDER:
        spans = [span for span in step.spans if span.stream == stream]
        if spans:
            lines.append(f"{stream:<8}{_line(spans, marks, step.seconds, width)}".rstrip())
    return lines


def _line(spans: list[PlannedSpan], marks: dict[str, str], seconds: float, width: int) -> str:
    columns = [" "] * width
    for span in spans:
        first, last = (round(at / seconds * width) for at in (span.start, span.end))
        first = min(first, width - 1)  # the shortest span is one column wide
        for column in range(max(first, 0), min(max(last, first + 1), width)):
            columns[column] = marks.get(span.unit, "s")
    return "".join(columns)
