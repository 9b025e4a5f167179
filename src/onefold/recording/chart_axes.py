"""Charts that keep their letters' size on any screen: places across are per cent, heights pixels.

A chart is one SVG as wide as the page. Shapes that are drawn point by point lie in a nested one
that is stretched; lines, bars and words lie beside it, at per cent of the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

from onefold.recording.markup import Attribute, Child, Markup, el

WIDTH = 1000
"""Units across a stretched shape."""


def ticks(top: float, most: int = 5) -> list[float]:
    """Round values from 0 to `top`, at most `most` of them above 0."""
    if top <= 0:
        return [0.0]
    rough = top / most
    power = 10.0 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    return [number * step for number in range(int(top / step * (1 + 1e-9)) + 1)]


def byte_ticks(top: float, most: int = 4) -> list[float]:
    """The same for bytes: round numbers of the binary unit that suits them."""
    unit = 1.0
    while top / unit >= 1024:
        unit *= 1024
    return [tick * unit for tick in ticks(top / unit, most)]


def chart(title: str, told: str, height: int, *children: Child, name: str = "") -> Markup:
    """A chart with what a screen reader says of it."""
    attributes: dict[str, Attribute] = {
        "class": f"chart {name}".strip(), "width": "100%", "height": height, "role": "img",
        "aria-label": f"{title}. {told}",
    }  # fmt: skip
    return el("svg", attributes, el("title", {}, title), el("desc", {}, told), *children)


def stretched(top: int, height: int, *children: Child) -> Markup:
    """Room for shapes in units of WIDTH across and pixels down."""
    return el(
        "svg",
        {
            "x": 0, "y": top, "width": "100%", "height": height,
            "viewBox": f"0 0 {WIDTH} {height}", "preserveAspectRatio": "none",
        },
        *children,
    )  # fmt: skip


def percent(share: float) -> str:
    """A place across."""
    return f"{100 * min(1.0, max(0.0, share)):.3f}".rstrip("0").rstrip(".") + "%"


def text(share: float, y: float, words: str, name: str, *, anchor: str = "start") -> Markup:
    """Words at a place."""
    told: dict[str, Attribute] = {"x": percent(share), "y": y, "class": name}
    return el("text", {**told, "text-anchor": anchor if anchor != "start" else None}, words)


def line(x: tuple[float, float], y: tuple[float, float], name: str) -> Markup:
    """A straight line between shares across and pixels down."""
    return el(
        "line",
        {"x1": percent(x[0]), "x2": percent(x[1]), "y1": y[0], "y2": y[1], "class": name},
    )


def time_axis(seconds: float, y: float) -> list[Markup]:
    """Round milliseconds below a chart."""
    parts: list[Markup] = []
    for tick in ticks(seconds * 1e3, 5):
        share = tick / (seconds * 1e3)
        if share > 0.97:
            continue
        anchor = "start" if share == 0 else "middle"
        parts.append(line((share, share), (y, y + 4), "tick"))
        parts.append(text(share, y + 16, f"{tick:g} ms" if tick else "0", "axis", anchor=anchor))
    return parts


def levels(values: Sequence[float], words: Sequence[str], top: float, box: tuple[int, int]) -> (
    list[Markup]
):  # fmt: skip
    """Grid lines with their value beside them, in a box of (y, height) pixels."""
    y, height = box
    parts: list[Markup] = []
    for value, word in zip(values, words, strict=True):
        if value == 0:
            continue
        at = y + height * (1 - value / top)
        parts.append(line((0, 1), (at, at), "grid"))
        parts.append(
            el("text", {"x": -8, "y": at + 4, "class": "axis", "text-anchor": "end"}, word)
        )
    return parts
