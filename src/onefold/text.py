"""Lay out text for a terminal of 80 columns; write and read bytes as people do. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isfinite
from textwrap import wrap
from typing import Any

from onefold.errors import ConfigError, expected

WIDTH = 80

BINARY_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))

UNITS = {"B": 1} | {
    f"{prefix}{middle}B": base**power
    for power, prefix in enumerate("KMGTP", 1)
    for middle, base in (("", 1000), ("i", 1024))
}
_SHORT = {prefix.lower(): 1024**power for power, prefix in enumerate("KMGTP", 1)}
"""A bare "G" is a GiB, as for SLURM, Docker and `dd`."""
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


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


def parse_nbytes(flag: str, text: str) -> int:
    """Return the bytes of a text with a unit; `ConfigError` names the flag."""
    found = _PATTERN.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()} | _SHORT
    factor = units.get(found[2].lower()) if found else None
    nbytes = int(float(found[1]) * factor) if found and factor else 0
    if nbytes < 1:
        wanted = f"{flag} to be a number above 0 with a unit: {', '.join(UNITS)}"
        raise ConfigError(expected(wanted, repr(text), hint=f"{flag} 80GiB"))
    return nbytes


def format_bytes(nbytes: float) -> str:
    """Write bytes with three digits or so, in binary units."""
    sign, rest = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if rest < 1024 or unit == "TiB":
            digits = 0 if unit == "B" or rest >= 100 else 1 if rest >= 10 else 2
            return f"{sign}{rest:.{digits}f} {unit}"
        rest /= 1024
    raise AssertionError("every number has a unit")
