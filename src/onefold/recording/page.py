"""`index.html` of a report: one file that needs nothing else, drawn from `report.json` alone.

It is XML as well as HTML, loads nothing (its own content policy forbids it), and is whole without
its script, which only reads the chart under a pointer out loud.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from statistics import median
from typing import Any

from onefold.recording.html_tables import Cells, meter, table
from onefold.recording.kinds import KINDS
from onefold.recording.markup import (
    Markup,
    bytes_text,
    count_text,
    el,
    number_text,
    seconds_text,
    share_text,
    together,
)
from onefold.recording.memory_chart import memory_charts
from onefold.recording.run_report import Fact, RunReport
from onefold.recording.style import SCRIPT, STYLE
from onefold.recording.timeline_chart import timeline, where_time_went
from onefold.recording.training_charts import training_charts

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

MAX_UNITS = 60
"""Units in the table; of more it shows the first ones."""

COLLECTIVES = {
    "gather": "weights (gather)",
    "reduce_scatter": "gradients (reduce-scatter)",
    "control": "flags and numbers that ride along",
    "whole_matrix": "what matrix optimizers exchange",
}


def page(report: RunReport) -> str:
    """The whole document."""
    title = str(report.about.get("model", "onefold"))
    head = el(
        "head", {},
        el("meta", {"charset": "utf-8"}),
        el("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}),
        el("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        el("meta", {"name": "color-scheme", "content": "light dark"}),
        el("link", {"rel": "icon", "href": "data:,"}),
        el("title", {}, f"{title}: onefold report"),
        el("style", {}, Markup(STYLE)),
    )  # fmt: skip
    body = el(
        "body", {},
        el("header", {}, *_heading(report)),
        el("main", {}, *_sections(report)),
        el("footer", {}, *_footer(report)),
        el("script", {}, Markup(SCRIPT)),
    )  # fmt: skip
    return "<!DOCTYPE html>\n" + el("html", {"lang": "en"}, head, body) + "\n"


def _heading(report: RunReport) -> list[Markup]:
    about = report.about
    words = [
        f"stage {about['stage']}" if "stage" in about else "",
        _many(report.step.world_size, "rank"),
        f"{count_text(float(about['parameters']))} parameters" if "parameters" in about else "",
    ]
    return [
        el("p", {"class": "brand"}, "onefold report"),
        el("h1", {}, str(about.get("model", "one training step"))),
        el("p", {"class": "quiet"}, ", ".join(word for word in words if word)),
        el("dl", {"class": "figures"}, *_figures(report)),
    ]


def _figures(report: RunReport) -> list[Markup]:
    step, training = report.step, report.training
    own = report.ranks[0]
    figures = [("recorded step", seconds_text(step.seconds), _which(report))]
    if training is not None and training.losses:
        speeds = [training.tokens_per_step / max(s, 1e-9) for s in training.seconds]
        if speeds:
            figures.append(("speed", count_text(median(speeds)), "tokens per second, median"))
        held_out = number_text(training.held_out)
        note = f", held out {held_out}" if isfinite(training.held_out) else ""
        figures.append(("last loss", number_text(training.losses[-1]), "nats per token" + note))
    highest = max(line.peak_nbytes for line in report.ranks)
    figures += [
        ("held at most", bytes_text(highest), "on the device, by any rank"),
        ("sent in the step", bytes_text(own.sent_nbytes), f"by rank {own.rank}"),
        ("waiting", share_text(own.wait_s / step.seconds), "of the step, by the training thread"),
    ]
    return [
        el("div", {}, el("dt", {}, name), el("dd", {}, value), el("dd", {"class": "quiet"}, note))
        for name, value, note in figures
    ]


def _which(report: RunReport) -> str:
    where = f"rank {report.step.rank}"
    return where if report.recorded is None else f"number {report.recorded:,d}, {where}"


def _sections(report: RunReport) -> list[Markup]:
    step = report.step
    parts = [
        _section(
            "Memory over one step",
            "Every byte that the engine holds, by what it is for, and above it what torch itself "
            "keeps: activations and temporaries, as found where units begin and end.",
            memory_charts(step, report.plan),
        ),
        _section(
            "Timeline of the step",
            "What was under way at the same time. A collective's bar begins where it was asked for "
            "and ends when it was there. The low bars are the training thread waiting, or using "
            "what came.",
            timeline(step), where_time_went(step),
        ),
    ]  # fmt: skip
    if report.training is not None and report.training.losses:
        parts.append(_section("Training", "", training_charts(report.training)))
    parts.append(
        _section("Bytes sent", f"In the recorded step, by rank {step.rank}.", _sent(step.sent))
    )
    if len(report.ranks) > 1:
        parts.append(_section("Ranks", "The recorded step on every rank.", _ranks(report)))
    if report.plan is not None:
        parts.append(_section("Plan", "", *_plan(report)))
    if report.units:
        parts.append(_section("Units", "What travels together, in the order of use.",
                              _units(report)))  # fmt: skip
    return [*parts, _section("Run and machine", "", _facts(report))]


def _section(title: str, told: str, *children: Markup) -> Markup:
    note = [el("p", {"class": "note"}, told)] if told else []
    return el("section", {}, el("h2", {}, title), *note, *children)


def _sent(sent: Mapping[str, Any]) -> Markup:
    if not sent:
        return el("p", {"class": "note"}, "Nothing: a world of one sends nothing.")
    top = max(1, *(each.nbytes for each in sent.values()))
    rows: list[Cells] = [
        (COLLECTIVES.get(name, name), f"{each.calls:,d}", bytes_text(each.nbytes),
         meter(each.nbytes / top))
        for name, each in sent.items()
    ]  # fmt: skip
    total = sum(each.nbytes for each in sent.values())
    rows.append(("together", f"{sum(each.calls for each in sent.values()):,d}",
                 bytes_text(total), ""))  # fmt: skip
    return table(("what", "calls", "bytes", ""), rows, has_sum=True)


def _ranks(report: RunReport) -> Markup:
    rows: list[Cells] = [
        (
            f"rank {line.rank}", seconds_text(line.seconds), seconds_text(line.compute_s),
            seconds_text(line.wait_s), bytes_text(line.peak_nbytes), bytes_text(line.sent_nbytes),
            bytes_text(line.resident_peak_nbytes) if line.resident_peak_nbytes else "",
        )
        for line in report.ranks
    ]  # fmt: skip
    head = ("rank", "step", "busy", "waiting", "held at most", "sent", "process, highest")
    return table(head, rows)


def _units(report: RunReport) -> Markup:
    top = max(1, *(unit.nbytes for unit in report.units))
    shown = report.units[:MAX_UNITS]
    rows: list[Cells] = [
        (unit.name, f"{unit.num_parameters:,d}", count_text(unit.numel), bytes_text(unit.nbytes),
         meter(unit.nbytes / top))
        for unit in shown
    ]  # fmt: skip
    drawn = table(("unit", "parameters", "elements", "bytes, whole", ""), rows)
    if len(shown) == len(report.units):
        return drawn
    more = f"and {len(report.units) - len(shown):,d} more"
    return together(drawn, el("p", {"class": "note"}, more))


def _plan(report: RunReport) -> list[Markup]:
    plan = report.plan or {}
    parts: list[Markup] = []
    if "stage" in plan:
        parts.append(el("p", {"class": "note"}, f"Chosen: stage {plan['stage']}."))
    told = plan.get("table") or []
    if told:
        columns = list(dict.fromkeys(str(key) for row in told for key in row))
        rows: list[Cells] = [[_cell(key, row.get(key)) for key in columns] for row in told]
        parts.append(table([column.replace("_", " ") for column in columns], rows))
    by_kind = (plan.get("predicted") or {}).get("by_kind") or {}
    if by_kind:
        parts.append(_compared(report, by_kind))
    return parts


def _compared(report: RunReport, by_kind: Mapping[str, Any]) -> Markup:
    found = report.ranks[0].peak_by_kind
    kinds = [kind for kind in KINDS if kind in by_kind or kind in found]
    kinds += [kind for kind in by_kind if kind not in KINDS]
    rows: list[Cells] = [
        (KINDS.get(kind, kind), bytes_text(int(by_kind.get(kind, 0))),
         bytes_text(found.get(kind, 0)))
        for kind in kinds
    ]  # fmt: skip
    peak = (report.plan or {}).get("predicted", {}).get("peak_nbytes")
    if peak is not None:
        rows.append(("together, at the peak", bytes_text(int(peak)),
                     bytes_text(report.ranks[0].peak_nbytes)))  # fmt: skip
    return table(("highest by kind", "predicted", "measured"), rows, has_sum=peak is not None)


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        is_bytes, is_time = "bytes" in name, name.endswith("_s") or "seconds" in name
        return bytes_text(value) if is_bytes else seconds_text(value) if is_time else f"{value:,g}"
    return str(value)


def _facts(report: RunReport) -> Markup:
    groups: list[tuple[str, Mapping[str, Fact]]] = [
        ("run", report.about), ("machine", report.machine), ("versions", report.versions),
    ]  # fmt: skip
    lists = [
        el("div", {}, el("h3", {}, name), el("dl", {}, *(
            together(el("dt", {}, _fact_name(key)), el("dd", {}, _fact(key, value)))
            for key, value in facts.items()
        )))
        for name, facts in groups
        if facts
    ]  # fmt: skip
    return el("div", {"class": "facts"}, *lists)


def _fact_name(key: str) -> str:
    return key.removesuffix("_nbytes").replace("_", " ")


def _fact(name: str, value: Fact) -> str:
    if isinstance(value, str):
        return value
    return bytes_text(value) if name.endswith("nbytes") else f"{value:,}"


def _footer(report: RunReport) -> list[Markup]:
    return [
        el("p", {},
           f"Written {report.written_at}. " if report.written_at else "",
           "The same data is in ", el("code", {}, "report.json"), " beside this page; ",
           el("code", {}, "trace.json"), " opens in Perfetto and has every rank."),
    ]  # fmt: skip


def _many(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number:,d} {what}s"
