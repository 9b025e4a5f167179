"""Lay out text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from textwrap import wrap
from typing import Any

WIDTH = 80

BINARY_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """Break a text into lines of at most 80 columns; `indent` begins all but the first."""
    return wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]


def columns(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Align the cells of a table, two spaces apart.

    Args:
        rows: lines of cells, all of one length.
        sides: "<" or ">" for each column; the last one holds for all further columns.
    """
    if not rows:
        return []
    sides = sides.ljust(len(rows[0]), sides[-1])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=False)).rstrip()
        for row in rows
    ]


def counted(number: int, word: str) -> str:
    """Write a number and its word: "1 rank", "2,000 ranks"."""
    return f"{number:,d} {word}" if number == 1 else f"{number:,d} {word}s"


def common_unit(largest: float) -> tuple[str, int]:
    """Return the unit for a table of bytes, and its bytes: at least 10 of it, or KiB."""
    return next((each for each in BINARY_UNITS if largest >= 10 * each[1]), BINARY_UNITS[-1])


def in_unit(nbytes: float, unit: int) -> str:
    """Write bytes in a unit of bytes, with at least three digits; "-" for none."""
    number = nbytes / unit
    digits = 0 if abs(number) >= 1000 else 1 if abs(number) >= 100 else 2
    return f"{number:,.{digits}f}" if nbytes else "-"


def shell_lines(words: Sequence[str], indent: str = "  ") -> list[str]:
    """Break a command behind backslashes, between its words; a word may hold a flag's value."""
    lines, room = [indent], WIDTH - 2
    for word in words:
        if len(lines[-1]) + len(word) > room and lines[-1].strip():
            lines[-1] += "\\"
            lines.append(indent + "    ")
        lines[-1] += f"{word} "
    return [line.rstrip() for line in lines]


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot spell by None."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
