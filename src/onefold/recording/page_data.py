"""The data that the page of a report draws: chosen and bounded, so that the page stays small."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import ceil, isfinite, log10
from statistics import median
from typing import Any

from onefold.errors import ConfigError
from onefold.recording.run_report import Fact, RankLine, RunReport, StepView, Training
from onefold.recording.step_record import (
    COLLECTIVES,
    IDLE,
    KINDS,
    STREAMS,
    TIERS,
    VERBS,
    SpanLine,
    StepRecord,
    idle_seconds,
    known_first,
    total_seconds,
)
from onefold.text import starred

FIRST, OTHER = (900, 4000), (160, 400)
"""Moments of a memory chart (the highest of each column, and the last), and spans of a timeline
(the longest): for the step that opens first, and for each further step."""

MAX_POINTS = 400
"""Steps that a curve shows. Of more steps it shows averages."""

MAX_UNITS = 60
"""Units in the table: the first ones."""

WORDS = {
    "kinds": KINDS, "tiers": TIERS, "verbs": VERBS, "collectives": COLLECTIVES, "idle": IDLE,
}  # fmt: skip

MAX_MODULES = 40
"""Modules in the table of activations: the largest ones."""


def contents(
    report: RunReport, against: RunReport | None = None, profiles: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the data that the template's script reads; `against` is compared with the report."""
    data = report.as_json()
    return {
        **data,
        "diagnosis": report.diagnosis,
        "opens": report.opens,
        "units": data["units"][:MAX_UNITS],
        "num_units": len(report.units),
        "predicted": {number: predicted_line(report, number) for number in (0, report.opens)},
        "training": None if report.training is None else _curves(report.training),
        "words": WORDS,
        "profiles": [*profiles],
        "compared": None if against is None else _compared(against, report),
    }


def report_of(
    records: Sequence[StepRecord], *, about: Mapping[str, Fact], recorded: int | None = None,
    resident: Sequence[int] = (), others: Sequence[StepView] = (), **members: Any,
) -> RunReport:  # fmt: skip
    """Report on one record a rank, of which the page opens one, and on `others`.

    `resident` is the peak of each rank's process in bytes, where it is known.
    """
    known = [*resident, *[0] * len(records)]
    shares = [RankLine.from_record(record).wait_share for record in records]
    wide = (0, shares.index(max(shares)))  # see `RunReport.opens`
    own = [
        view_of(record, recorded, FIRST if number in wide else OTHER, known[number])
        for number, record in enumerate(records)
    ]
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    views, size = (*own, *others), records[0].world_size
    return RunReport(dict(about), views, size, written_at=now, **members)


def view_of(
    record: StepRecord, recorded: int | None, most: tuple[int, int] = OTHER,
    resident_peak_nbytes: int = 0,
) -> StepView:  # fmt: skip
    """Return the sums of one step of one rank, and what the page draws of it."""
    columns, spans = most
    return StepView(
        recorded=recorded,
        line=RankLine.from_record(record, resident_peak_nbytes),
        sent={name: {"calls": s.calls, "nbytes": s.nbytes} for name, s in record.sent.items()},
        memory=tuple(memory_stacks(record, columns)),
        lanes=tuple(lanes(record, spans)),
        times=tuple(times_by_verb(record)),
        idle=idle_seconds(record),
        modules=tuple(grouped_modules(record.modules)),
    )


def grouped_modules(modules: Mapping[str, int]) -> list[list[Any]]:
    """Return [name, modules, bytes], largest first; names that differ in numbers alone are one."""
    groups: dict[str, list[int]] = defaultdict(list)
    for name, nbytes in modules.items():
        if nbytes > 0:
            groups[starred(name) or "the model itself"].append(nbytes)
    rows = [[name, len(sizes), sum(sizes)] for name, sizes in groups.items()]
    return sorted(rows, key=lambda row: -row[2])[:MAX_MODULES]


def memory_stacks(record: StepRecord, columns: int) -> list[dict[str, Any]]:
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
        kept = _highest_moments(memory.times, totals, record.seconds, columns)
        stacks.append({
            "tier": tier,
            "kinds": kinds,
            "times": [round(memory.times[moment], 7) for moment in kept],
            "layers": [[used[kind][moment] for moment in kept] for kind in kinds],
            "peaks": [max(used[kind]) for kind in kinds],
        })  # fmt: skip
    return stacks


def _highest_moments(
    times: Sequence[float], totals: Sequence[int], seconds: float, columns: int
) -> Sequence[int]:
    """Return all moments, or of many the highest in each of the columns, and the last."""
    if len(times) <= columns:
        return range(len(times))
    highest = dict[int, int]()
    for moment, time in enumerate(times):
        column = int(time / seconds * columns)
        if totals[moment] >= totals[highest.setdefault(column, moment)]:
            highest[column] = moment
    return sorted({*highest.values(), len(times) - 1})


def predicted_line(report: RunReport, number: int) -> list[tuple[float, float, int]]:
    """Return (start, stop, bytes) for each moment of the plan with a span in a view, by number.

    A moment names a phase and a unit; a moment of no unit stands for the whole phase. The bytes are
    those of rank 0, on any rank.
    """
    spans: dict[tuple[str, str, str], deque[tuple[float, float]]] = defaultdict(deque)
    bars = [(bar, lane["stream"]) for lane in report.views[number].lanes for bar in lane["spans"]]
    for (verb, unit, start, stop, _), stream in sorted(bars, key=lambda bar: bar[0][2]):
        spans[stream, verb, unit].append((start, stop))
    line: list[tuple[float, float, int]] = []
    for moment in report.plan.predicted.timeline if report.plan else ():
        matching = spans["compute" if moment.unit else "phase", moment.phase, moment.unit]
        if matching:
            line.append((*matching.popleft(), sum(moment.nbytes_by_kind.values())))
    return sorted(line)


def lanes(record: StepRecord, most: int) -> list[dict[str, Any]]:
    """Return a row for each stream, and further rows where spans of a stream overlap."""
    longest = sorted(record.spans, key=lambda span: span.start - span.stop)[:most]
    lanes: list[dict[str, Any]] = []
    for name, spans in rows(longest):
        stream, _, number = name.partition(" ")
        label = f"{STREAMS.get(stream, stream)} {number}".strip()
        bars = [[s.verb, s.unit, round(s.start, 7), round(s.stop, 7), s.nbytes] for s in spans]
        lanes.append({"name": label, "stream": stream, "spans": bars})
    return lanes


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
        "peaks": averaged(training.peaks),
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


# two runs


def compared_rows(first: RunReport, second: RunReport) -> list[tuple[str, str, float, float]]:
    """Return (name, unit, value of the first run, of the second); units: s, B, share, nats, 1/s.

    Raises `ConfigError` for runs of different models.
    """
    sizes = [sum(unit.numel for unit in report.units) for report in (first, second)]
    if all(sizes) and sizes[0] != sizes[1]:
        got = " and ".join(f"{r.title} ({size:,d} parameters)"
                           for r, size in zip((first, second), sizes, strict=True))  # fmt: skip
        hint = "bytes and times of different models do not compare; report each alone"
        raise ConfigError("two runs of one model", got, hint=hint)
    values = [_figures(report) for report in (first, second)]
    names = values[0] | values[1]  # those of the first run come first
    return [
        (name, unit, values[0].get((name, unit), 0.0), values[1].get((name, unit), 0.0))
        for name, unit in names
    ]


def _figures(report: RunReport) -> dict[tuple[str, str], float]:
    """Return the figures of a run by name and unit; memory and time are those of the worst rank."""
    lines = report.ranks
    figures: dict[tuple[str, str], float] = {
        ("recorded step", "s"): max(line.seconds for line in lines),
        ("waiting, the rank that waits longest", "share"): max(line.wait_share for line in lines),
        ("sent by a rank", "B"): max(line.sent_nbytes for line in lines),
    }
    for tier in known_first((tier for line in lines for tier in line.peak_by_tier), TIERS):
        most = max(line.peak_by_tier.get(tier, 0) for line in lines)
        figures[f"peak, {TIERS.get(tier, tier)}", "B"] = most
    for kind in known_first((kind for line in lines for kind in line.peak_by_kind), KINDS):
        most = max(line.peak_by_kind.get(kind, 0) for line in lines)
        figures |= {(f"peak of {KINDS.get(kind, kind)}", "B"): most} if most else {}
    for row in report.views[0].times:
        verb, stream, seconds = str(row[0]), row[1], row[3]
        where = ", in the background" if stream == "background" else ""
        figures[VERBS.get(verb, verb) + where, "s"] = seconds
    if report.training is not None:
        figures |= {("tokens per second, median", "1/s"): median(report.training.speeds or [0.0])}
        last = report.training.losses[-1:] or (None,)
        figures |= {} if last[0] is None else {("last loss", "nats"): last[0]}
    return figures


def _compared(first: RunReport, second: RunReport) -> dict[str, Any]:
    facts = {**first.about, **second.about}
    differing = {name: [str(r.about.get(name, "")) for r in (first, second)] for name in facts
                 if first.about.get(name) != second.about.get(name)}  # fmt: skip
    return {
        "titles": [first.title, second.title],
        "differing": differing,
        "rows": compared_rows(first, second),
        "training": None if first.training is None else _curves(first.training),
    }
