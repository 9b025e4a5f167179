"""Loss and tokens per second over a run, as two lines."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log10
from statistics import median

from onefold.recording.chart_axes import WIDTH, chart, levels, line, stretched, text, ticks
from onefold.recording.markup import Markup, count_text, el, number_text
from onefold.recording.run_report import Training

HEIGHT, HEAD, FOOT = 150, 8, 22
MAX_POINTS = 400
"""Of more steps, neighbours are averaged."""


def training_charts(training: Training) -> Markup:
    """Both, side by side where there is room."""
    losses = training.losses
    shown = [loss for loss in losses if isfinite(loss)]
    told = f"from {number_text(shown[0])} to {number_text(shown[-1])}" if shown else "no numbers"
    charts = [_curve("Loss, nats per token", told, losses, training.first_step, 2)]
    speeds = [training.tokens_per_step / max(s, 1e-9) for s in training.seconds]
    if speeds:
        told = f"median {count_text(median(speeds))}"
        charts.append(_curve("Tokens per second, all ranks", told, speeds, training.first_step, 0))
    return el("div", {"class": "pair"}, *charts)


def _curve(title: str, told: str, values: Sequence[float], first: int, digits: int) -> Markup:
    points = [(x, y) for x, y in _averaged(values) if isfinite(y)]
    top = 1.08 * max([y for _, y in points] or [1.0])
    low = min([y for _, y in points] or [0.0])
    top = top if top > 0 else 1.0
    marks = [tick for tick in ticks(top, 3) if tick < top * 0.97]
    words = [count_text(mark) if digits == 0 else f"{mark:g}" for mark in marks]
    last = max(1, len(values) - 1)
    path = "M" + "L".join(
        f"{WIDTH * x / last:.1f},{HEIGHT * (1 - max(0.0, y) / top):.1f}" for x, y in points
    )
    if len(points) == 1:
        path += f"L{WIDTH},{HEIGHT * (1 - max(0.0, points[0][1]) / top):.1f}"
    bottom = HEAD + HEIGHT
    parts = [
        *levels(marks, words, top, (HEAD, HEIGHT)),
        *([stretched(HEAD, HEIGHT, el("path", {"d": path, "class": "curve"}))] if points else []),
        line((0, 1), (bottom, bottom), "base"),
        text(0, bottom + 16, f"step {first + 1:,d}", "axis"),
        text(1, bottom + 16, f"{first + len(values):,d}", "axis", anchor="end"),
    ]
    if low < 0:
        parts.append(text(0.5, bottom - 6, "values below 0 lie on the base", "axis"))
    caption = el("figcaption", {}, title, " ", el("span", {"class": "quiet"}, told))
    return el("figure", {}, caption, chart(title, told, bottom + FOOT, *parts))


def _averaged(values: Sequence[float]) -> list[tuple[float, float]]:
    """(step, value), at most MAX_POINTS of them."""
    width = 10 ** max(0, round(log10(max(1.0, len(values) / MAX_POINTS)) + 0.499))
    if width == 1:
        return [(float(x), y) for x, y in enumerate(values)]
    found: list[tuple[float, float]] = []
    for start in range(0, len(values), width):
        part = [y for y in values[start : start + width] if isfinite(y)]
        if part:
            found.append((start + (len(part) - 1) / 2, sum(part) / len(part)))
    return found
