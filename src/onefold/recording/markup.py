"""Elements as text that is escaped by construction, and numbers with their units."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from math import isfinite

KIB = 1024


class Markup(str):
    """Text that is markup already. Everything else is escaped where it becomes part of an element.

    So a parameter may be called `<script>`, and no caller has to remember that.
    """

    __slots__ = ()


Child = str | Iterable[str]
Attribute = str | int | float | None


def el(name: str, attributes: dict[str, Attribute] | None = None, *children: Child) -> Markup:
    """An element, well-formed as XML too. Attributes that are None are left out."""
    told = "".join(
        f' {key}="{escape(_attribute(value))}"'
        for key, value in (attributes or {}).items()
        if value is not None
    )
    inside = together(*children)
    if not inside and name in _VOID:
        return Markup(f"<{name}{told}/>")
    return Markup(f"<{name}{told}>{inside}</{name}>")


_VOID = frozenset(
    ("meta", "link", "br", "col", "rect", "line", "path", "circle")  # HTML's own, and SVG's shapes
)


def together(*children: Child) -> Markup:
    """Children one after another; plain text is escaped."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(escape(child, quote=False))
        else:
            parts.append(together(*child))
    return Markup("".join(parts))


def _attribute(value: Attribute) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


# numbers


def bytes_text(nbytes: float) -> str:
    """Bytes in the largest binary unit that leaves a whole part: `12.3 MiB`."""
    amount, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    unit = units.pop(0)
    while abs(amount) >= 0.9995 * KIB and units:
        amount, unit = amount / KIB, units.pop(0)
    return f"{amount:,.0f} {unit}" if unit == "bytes" else f"{_digits(amount)} {unit}"


def seconds_text(seconds: float) -> str:
    """A duration in the unit that suits it: `12.3 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e6)} \N{MICRO SIGN}s" if seconds else "0 ms"


def share_text(share: float) -> str:
    """A share of one, in per cent."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def count_text(count: float) -> str:
    """A whole number in groups of three, or a short one with its letter."""
    if count < 1e5:
        return f"{count:,.0f}"
    for factor, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{_digits(count / factor)} {letter}"
    return f"{count:,.0f}"


def number_text(value: float) -> str:
    """A loss; a dash where there is none."""
    return f"{value:.3f}" if isfinite(value) else "\N{EN DASH}"


def _digits(amount: float) -> str:
    """Three digits, no more."""
    size = abs(amount)
    return f"{amount:,.0f}" if size >= 99.95 else f"{amount:.1f}" if size >= 9.995 else (
        f"{amount:.2f}"
    )  # fmt: skip
