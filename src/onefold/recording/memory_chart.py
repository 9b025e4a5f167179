"""Bytes over one step, stacked by kind: a panel for each tier, phases marked, the plan drawn in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onefold.recording.chart_axes import (
    WIDTH,
    byte_ticks,
    chart,
    levels,
    line,
    percent,
    stretched,
    text,
    time_axis,
)
from onefold.recording.html_tables import Cells, keyed, table
from onefold.recording.kinds import KINDS, TIERS, css_name, ordered, tiers_of
from onefold.recording.markup import Markup, bytes_text, el, seconds_text, together
from onefold.recording.step_record import Memory, StepRecord

ROOM = 36
"""Pixels between the highest point and the names of phases, for the words beside it."""

MAX_COLUMNS = 900
"""Moments that are drawn. Of more, those of one column are one: the one at which most is held."""

HEAD, FOOT = 26, 22  # pixels above the plot for names of phases, and below for the axis
HEIGHTS = (300, 130)  # of the first panel's plot, and of others


@dataclass(frozen=True, slots=True)
class Panel:
    """One tier's stack: `layers[i]` is [bytes at each of `times`] of series `indices[i]`."""

    tier: str
    indices: tuple[int, ...]
    times: tuple[float, ...]
    layers: tuple[tuple[int, ...], ...]

    @property
    def totals(self) -> list[int]:
        """What the stack's upper edge shows."""
        return [sum(column) for column in zip(*self.layers, strict=True)]


def panels(record: StepRecord) -> list[Panel]:
    """A panel for each tier in which something is held."""
    found: list[Panel] = []
    for tier in tiers_of(record.series):
        memory = record.memory
        indices = [i for i in ordered(record.series, tier) if any(memory.nbytes[i])]
        if indices:
            found.append(_thinned(tier, indices, memory, record.seconds))
    return found


def _thinned(tier: str, indices: Sequence[int], memory: Memory, seconds: float) -> Panel:
    columns = list(zip(*(memory.nbytes[i] for i in indices), strict=True))
    times = list(memory.times)
    if len(times) > MAX_COLUMNS:
        best: dict[int, int] = {}
        for moment, time in enumerate(times):
            place = int(time / seconds * MAX_COLUMNS)
            if place not in best or sum(columns[moment]) >= sum(columns[best[place]]):
                best[place] = moment
        chosen = sorted(best.values())
        times, columns = [times[m] for m in chosen], [columns[m] for m in chosen]
    layers = tuple(zip(*columns, strict=True))
    return Panel(tier, tuple(indices), tuple(times), layers)


def memory_charts(record: StepRecord, plan: Mapping[str, Any] | None) -> Markup:
    """Every panel, the legend, and the numbers behind them."""
    parts: list[Markup] = []
    for number, panel in enumerate(panels(record)):
        predicted = predicted_line(record, plan) if number == 0 else []
        figure = _panel_chart(record, panel, HEIGHTS[min(number, 1)], predicted)
        caption = el("figcaption", {}, TIERS.get(panel.tier, f"In {panel.tier}"))
        readout = el("p", {"class": "readout", "aria-hidden": "true"}, "")
        data = el("script", {"type": "application/json"}, _data(record, panel))
        parts.append(el("figure", {"class": "memory"}, caption, figure, readout, data))
    return together(*parts, legend(record, bool(predicted_line(record, plan))))


def _panel_chart(
    record: StepRecord, panel: Panel, height: int, predicted: Sequence[tuple[float, float, int]]
) -> Markup:
    totals = panel.totals
    peak = max(totals)
    at = panel.times[totals.index(peak)]
    highest = max([peak, *(nbytes for _, _, nbytes in predicted), 1])
    top = highest * (1 + ROOM / height)
    marks = byte_ticks(top * 0.97)
    share = at / record.seconds
    anchor = "end" if share > 0.6 else "start"
    y = HEAD + height * (1 - peak / top)
    told = f"highest {bytes_text(peak)} at {seconds_text(at)} of {seconds_text(record.seconds)}"
    parts = [
        *_phases(record, height),
        stretched(HEAD, height, *_areas(record, panel, height, top)),
        *levels(marks, [bytes_text(mark) for mark in marks], top, (HEAD, height)),
        *_prediction(record, predicted, height, top),
        el("circle", {"cx": percent(share), "cy": y, "r": 3.5, "class": "peak"}),
        text(share, y - 8, f"highest {bytes_text(peak)}", "mark", anchor=anchor),
        line((0, 1), (HEAD + height, HEAD + height), "base"),
        *time_axis(record.seconds, HEAD + height),
        el("line", {"x1": 0, "x2": 0, "y1": HEAD, "y2": HEAD + height, "class": "cursor"}),
    ]
    title = f"Bytes held over one step: {TIERS.get(panel.tier, panel.tier)}"
    return chart(title, told, HEAD + height + FOOT, *parts)


def _phases(record: StepRecord, height: int) -> list[Markup]:
    parts: list[Markup] = []
    for span in record.spans:
        if span.stream == "phase":
            start, stop = span.start / record.seconds, span.stop / record.seconds
            parts += [
                el(
                    "rect",
                    {
                        "x": percent(start), "width": percent(stop - start), "y": 0,
                        "height": HEAD + height, "class": f"phase {span.verb}",
                    },
                    el("title", {}, f"{span.verb}: {seconds_text(span.stop - span.start)}"),
                ),
                line((start, start), (0, HEAD + height), "bound"),
            ]  # fmt: skip
            if stop - start > 0.01 * len(span.verb):
                parts.append(text((start + stop) / 2, 16, span.verb, "phasename", anchor="middle"))
    return parts


def _areas(record: StepRecord, panel: Panel, height: int, top: float) -> list[Markup]:
    """One closed path for each layer, on the ones below it."""
    scale = height / top
    xs = [round(WIDTH * min(1.0, time / record.seconds), 1) for time in panel.times]
    below = [0.0] * len(xs)
    parts: list[Markup] = []
    for index, layer in zip(panel.indices, panel.layers, strict=True):
        above = [base + nbytes for base, nbytes in zip(below, layer, strict=True)]
        kind = record.series[index].kind
        lower = _steps(xs, [height - scale * value for value in below])
        upper = _steps(xs, [height - scale * value for value in above])
        back = [f"{x:g},{y:g}" for x, y in reversed(lower)]
        path = "M" + "L".join([f"{x:g},{y:g}" for x, y in upper] + back) + "Z"
        name = f"area {css_name(kind, KINDS)}"
        told = f"{KINDS.get(kind, kind)}: at most {bytes_text(max(layer))}"
        parts.append(el("path", {"d": path, "class": name}, el("title", {}, told)))
        below = above
    return parts


def _steps(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of a line that stays level up to the next moment; runs of one height are one."""
    corners: list[tuple[float, float]] = []
    for number, (x, y) in enumerate(zip(xs, ys, strict=True)):
        y = round(y, 1)
        if corners and corners[-1][1] == y:
            continue
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((0.0 if number == 0 else x, y))
    corners.append((float(WIDTH), corners[-1][1]))
    return corners


# the plan


def predicted_line(
    record: StepRecord, plan: Mapping[str, Any] | None
) -> list[tuple[float, float, int]]:
    """(start, stop, bytes) of every entry of the plan's timeline that the record has a span for.

    Entries name a phase and a unit; one without a unit stands for the whole phase.
    """
    timeline: Sequence[Mapping[str, Any]] = ((plan or {}).get("predicted") or {}).get(
        "timeline"
    ) or []
    left = list(record.spans)
    found: list[tuple[float, float, int]] = []
    for entry in timeline:
        phase, unit = str(entry["phase"]), str(entry.get("unit") or "")
        stream = "compute" if unit else "phase"
        for span in left:
            if (span.stream, span.verb, span.unit) == (stream, phase, unit):
                nbytes = sum(int(n) for n in entry["nbytes_by_kind"].values())
                found.append((span.start, span.stop, nbytes))
                left.remove(span)
                break
    return sorted(found)


def _prediction(
    record: StepRecord, predicted: Sequence[tuple[float, float, int]], height: int, top: float
) -> list[Markup]:
    if not predicted:
        return []
    points: list[str] = []
    for start, stop, nbytes in predicted:
        y = height * (1 - nbytes / top)
        points += [f"{WIDTH * at / record.seconds:.1f},{y:.1f}" for at in (start, stop)]
    path = "M" + "L".join(points)
    told = el("title", {}, "what the plan predicted")
    return [
        stretched(HEAD, height, el("path", {"d": path, "class": "halo"}),
                  el("path", {"d": path, "class": "predicted"}, told))
    ]  # fmt: skip


# the numbers


def legend(record: StepRecord, is_predicted: bool) -> Markup:
    """Every series with its colour, by tier: at its own highest, at the tier's, and at the end."""
    memory, tiers = record.memory, panels(record)
    rows: list[Cells] = []
    for panel in tiers:
        sums = memory.totals_of(record.indices(panel.tier))
        moment = sums.index(max(sums))
        where = "" if panel.tier == "device" else f", on {panel.tier}"
        for index in reversed(panel.indices):
            kind, held = record.series[index].kind, memory.nbytes[index]
            name = keyed(css_name(kind, KINDS), KINDS.get(kind, kind) + where)
            rows.append((name, *_moments(held, moment)))
        place = TIERS.get(panel.tier, panel.tier).lower().replace("cpu", "CPU")
        is_alone = len(tiers) == 1
        words = "together" if is_alone else f"together, {place}"
        rows.append((el("b", {}, words), *(el("b", {}, each) for each in _moments(sums, moment))))
    drawn = table(
        ("kind", "highest", "at the peak", "at the end"), rows, is_legend=True, minor=(2,)
    )
    note = el("p", {"class": "note"}, keyed("dashes", "what the plan predicted"))
    return together(drawn, *([note] if is_predicted else []))


def _moments(held: Sequence[int], moment: int) -> list[str]:
    return [bytes_text(nbytes) for nbytes in (max(held), held[moment], held[-1])]


def _data(record: StepRecord, panel: Panel) -> Markup:
    """What the page's script reads under the pointer; `<` cannot occur in it."""
    names = [KINDS.get(record.series[i].kind, record.series[i].kind) for i in panel.indices]
    told = {
        "seconds": record.seconds,
        "names": names,
        "times": [round(time, 7) for time in panel.times],
        "layers": panel.layers,
    }
    words = json.dumps(told, separators=(",", ":"))
    return Markup(words.replace("<", "\\u003c").replace("&", "\\u0026").replace(">", "\\u003e"))
