"""Fill the page of a report: `page.html` with tables, and the charts' data as JSON.

The page is one file that loads nothing (its own content policy forbids it). Its script draws the
charts. Numbers are in tables, so readers without the script have them too.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from statistics import median

from onefold.recording.charts import (
    Chart,
    memory_charts,
    memory_stacks,
    timeline_chart,
    training_charts,
)
from onefold.recording.report import UnitLine
from onefold.recording.run_report import Fact, PlanLines, RankLine, RunReport
from onefold.recording.step_record import Sent, SpanLine, StepRecord, total_seconds
from onefold.recording.words import (
    COLLECTIVES,
    KINDS,
    TIERS,
    VERBS,
    colour_class,
    format_bytes,
    format_count,
    format_loss,
    format_seconds,
    format_share,
    known_first,
)

MAX_UNITS = 60
"""Units in the table: the first ones."""


def page(report: RunReport) -> str:
    """Return the whole document."""
    step, training, own = report.step, report.training, report.ranks[0]
    predicted = None if report.plan is None else report.plan.predicted
    charts = [*memory_charts(step, predicted), timeline_chart(step)]
    charts += training_charts(training) if training is not None and training.losses else []
    figures: dict[str, str] = defaultdict(str)
    for chart in charts:
        figures[chart.kind] += _figure(chart)
    contents = {
        "title": escape(str(report.about.get("model", "one training step"))),
        "subtitle": escape(_subtitle(report)),
        "figures": _figures(report),
        "memory": figures["memory"] + _memory_table(step),
        "timeline": figures["timeline"] + _time_table(step),
        "training": figures["curve"],
        "sent": _sent_table(step.rank, step.sent),
        "ranks": _rank_table(report.ranks) if len(report.ranks) > 1 else "",
        "plan": "" if report.plan is None else _plan_tables(report.plan, own),
        "units": _unit_table(report.units),
        "facts": _facts(report),
        "written": escape(f"Written {report.written_at}. " if report.written_at else ""),
        "charts": _script_data([{"kind": chart.kind, **chart.data} for chart in charts]),
    }
    return _fill((files("onefold.recording") / "page.html").read_text("utf-8"), contents)


def _fill(template: str, contents: Mapping[str, str]) -> str:
    """Put contents in place of `{{name}}`. Sections without content are left out."""
    kept = re.sub(
        r'<section id="(\w+)">.*?</section>\n',
        lambda section: section[0] if contents[section[1]] else "",
        template, flags=re.DOTALL,
    )  # fmt: skip
    return re.sub(r"\{\{(\w+)\}\}", lambda name: contents[name[1]], kept)


def _script_data(data: object) -> str:
    """JSON that may stand in a script element: no `<` ends it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


# elements


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row's heading and its cells, which are plain text."""

    name: str
    cells: Sequence[str]
    key: str = ""  # the CSS class of its colour
    share: float | None = None  # the length of its bar
    is_sum: bool = False


def _table(head: Sequence[str], rows: Sequence[TableRow]) -> str:
    columns = "".join(f'<th scope="col">{escape(word)}</th>' for word in head)
    body = "".join(_row(row) for row in rows)
    return (
        f'<div class="wide"><table><thead><tr>{columns}</tr></thead>\n<tbody>\n{body}</tbody>'
        "</table></div>\n"
    )


def _row(row: TableRow) -> str:
    key = f'<span class="key {row.key}"></span>' if row.key else ""
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
    if row.share is not None:
        bar = f'<progress value="{row.share:.4f}" aria-hidden="true"></progress>'
        cells += f'<td class="bars">{bar}</td>'
    name = f'<th scope="row">{key}{escape(row.name)}</th>'
    return f'<tr class="{"sum" if row.is_sum else "line"}">{name}{cells}</tr>\n'


def _figure(chart: Chart) -> str:
    """An empty chart with its caption. The script draws the charts in their order."""
    title, description = escape(chart.title), escape(chart.description)
    return (
        f'<figure class="{chart.kind}">\n'
        f'<figcaption>{title} <span class="quiet">{description}</span></figcaption>\n'
        f'<svg class="chart" role="img" aria-label="{title}: {description}">'
        f"<title>{title}</title><desc>{description}</desc></svg>\n"
        '<p class="readout" aria-hidden="true"></p>\n</figure>\n'
    )


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>\n'


# sections


def _subtitle(report: RunReport) -> str:
    about, ranks = report.about, report.step.world_size
    words = [
        f"stage {about['stage']}" if "stage" in about else "",
        "1 rank" if ranks == 1 else f"{ranks:,d} ranks",
        f"{format_count(float(about['parameters']))} parameters" if "parameters" in about else "",
    ]
    return ", ".join(word for word in words if word)


def _figures(report: RunReport) -> str:
    """The large numbers at the top: name, value, note."""
    step, training, own = report.step, report.training, report.ranks[0]
    number = "" if report.recorded is None else f"number {report.recorded:,d}, "
    figures = [("recorded step", format_seconds(step.seconds), f"{number}rank {step.rank}")]
    if training is not None and training.losses:
        if training.seconds:
            speed = format_count(median(training.speeds))
            figures.append(("speed", speed, "tokens per second, median"))
        held_out = format_loss(training.held_out)
        note = "" if held_out == format_loss(None) else f", held out {held_out}"
        last = format_loss(training.losses[-1])
        figures.append(("last loss", last, f"nats per token{note}"))
    peak = max(line.peak_nbytes for line in report.ranks)
    waiting = format_share(own.wait_s / step.seconds)
    figures += [
        ("peak bytes", format_bytes(peak), "on the device, highest rank"),
        ("sent in the step", format_bytes(own.sent_nbytes), f"by rank {own.rank}"),
        ("waiting", waiting, "of the step, the training thread"),
    ]
    return "\n".join(
        f'<div><dt>{name}</dt><dd>{escape(value)}</dd><dd class="quiet">{note}</dd></div>'
        for name, value, note in figures
    )


def _memory_table(record: StepRecord) -> str:
    """Each kind with its own peak, its bytes at the tier's peak, and at the end."""
    stacks, rows = memory_stacks(record), list[TableRow]()
    for stack in stacks:
        peak = stack.peak_index

        def cells(nbytes: Sequence[int], peak: int = peak) -> list[str]:
            return [format_bytes(each) for each in (max(nbytes), nbytes[peak], nbytes[-1])]

        tier = TIERS.get(stack.tier, stack.tier)
        where = "" if stack.tier == "device" else f", {tier}"
        rows += [
            TableRow(KINDS.get(kind, kind) + where, cells(layer), colour_class(kind))
            for kind, layer in zip(reversed(stack.kinds), reversed(stack.layers), strict=True)
        ]
        rows.append(TableRow(f"all kinds, {tier}", cells(stack.totals), is_sum=True))
    return _table(("kind", "peak", "at the tier's peak", "at the end"), rows) if rows else ""


def _time_table(record: StepRecord) -> str:
    """Seconds and bytes by stream and verb."""
    groups: dict[tuple[str, str], list[SpanLine]] = defaultdict(list)
    for span in record.spans:
        if span.stream != "phase" or span.verb == "step":
            groups[span.verb, span.stream].append(span)
    order = known_first((verb for verb, _ in groups), VERBS)
    rows: list[TableRow] = []
    for verb, stream in sorted(groups, key=lambda key: order.index(key[0])):
        spans = groups[verb, stream]
        seconds, nbytes = total_seconds(spans), sum(span.nbytes for span in spans)
        name = VERBS.get(verb, verb) + (", in the background" if stream == "background" else "")
        cells = (
            f"{len(spans):,d}", format_seconds(seconds), format_share(seconds / record.seconds),
            format_bytes(nbytes) if nbytes else "",
        )  # fmt: skip
        rows.append(TableRow(name, cells, colour_class(verb)))
    return _table(("verb", "spans", "time", "of the step", "bytes"), rows) if rows else ""


def _sent_table(rank: int, sent: Mapping[str, Sent]) -> str:
    if not sent:
        return _note("Nothing: a world of one sends nothing.")
    top = max(1, *(each.nbytes for each in sent.values()))
    rows = [
        TableRow(COLLECTIVES.get(name, name), (f"{each.calls:,d}", format_bytes(each.nbytes)),
                 share=each.nbytes / top)
        for name, each in sent.items()
    ]  # fmt: skip
    calls, nbytes = (sum(c.calls for c in sent.values()), sum(c.nbytes for c in sent.values()))
    cells = f"{calls:,d}", format_bytes(nbytes)
    rows.append(TableRow("all collectives", cells, share=0.0, is_sum=True))
    note = _note(f"In the recorded step, by rank {rank}.")
    return note + _table(("collective", "calls", "bytes", ""), rows)


def _rank_table(ranks: Sequence[RankLine]) -> str:
    rows = [
        TableRow(f"rank {line.rank}", (
            format_seconds(line.seconds), format_seconds(line.compute_s),
            format_seconds(line.wait_s), format_bytes(line.peak_nbytes),
            format_bytes(line.sent_nbytes),
            format_bytes(line.resident_peak_nbytes) if line.resident_peak_nbytes else "",
        ))
        for line in ranks
    ]  # fmt: skip
    head = ("rank", "step", "busy", "waiting", "peak bytes", "sent", "process, resident peak")
    return _table(head, rows)


def _unit_table(units: Sequence[UnitLine]) -> str:
    if not units:
        return ""
    top = max(1, *(unit.nbytes for unit in units))
    rows = [
        TableRow(unit.name, (f"{unit.num_parameters:,d}", format_count(unit.numel),
                             format_bytes(unit.nbytes)), share=unit.nbytes / top)
        for unit in units[:MAX_UNITS]
    ]  # fmt: skip
    more = len(units) - len(rows)
    table = _table(("unit", "parameters", "elements", "bytes, unsharded", ""), rows)
    return table + (_note(f"and {more:,d} more") if more else "")


def _plan_tables(plan: PlanLines, own: RankLine) -> str:
    """The chosen stage, and predicted beside measured bytes."""
    text = "" if plan.stage is None else _note(f"Chosen: stage {plan.stage}.")
    expected = plan.predicted
    if expected.by_kind:
        rows = [
            TableRow(KINDS.get(kind, kind), (format_bytes(expected.by_kind.get(kind, 0)),
                                             format_bytes(own.peak_by_kind.get(kind, 0))))
            for kind in known_first([*own.peak_by_kind, *expected.by_kind], KINDS)
        ]  # fmt: skip
        if expected.peak_nbytes is not None:
            peaks = format_bytes(expected.peak_nbytes), format_bytes(own.peak_nbytes)
            rows.append(TableRow("all kinds, at the peak", peaks, is_sum=True))
        text += _table(("peak by kind", "predicted", "measured"), rows)
    return text


def _facts(report: RunReport) -> str:
    """Lists of names and values: the run, the machine, the versions."""
    groups = {"run": report.about, "machine": report.machine, "versions": report.versions}
    return "\n".join(
        f"<div><h3>{name}</h3><dl>\n{''.join(_fact(*fact) for fact in facts.items())}</dl></div>"
        for name, facts in groups.items()
        if facts
    )


def _fact(name: str, value: Fact) -> str:
    text = value if isinstance(value, str) else f"{value:,}"
    if isinstance(value, int) and name.endswith("nbytes"):
        text = format_bytes(value)
    words = name.removesuffix("_nbytes").replace("_", " ")
    return f"<dt>{escape(words)}</dt><dd>{escape(text)}</dd>\n"
