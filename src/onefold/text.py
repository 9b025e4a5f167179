"""Text for people: bytes, rates, seconds, shares, tables and commands. No other file formats these.

Text is laid out for 80 columns. `show` prints it as it is into files and pipes; a terminal gets
tables drawn by rich, in the width that it has.
"""

import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import chain
from math import isfinite
from textwrap import wrap
from typing import Any, TextIO

from onefold.errors import ConfigError

WIDTH, NARROWEST, WIDEST = 80, 50, 200
FIRST_CELL = 24
"""A first cell of a table that is longer gets a line of its own where 80 columns are too few."""

NAME = 16
"""Letters of a name in a first cell that a terminal keeps on one line at least."""

BINARY_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
SIZE_UNITS = {"B": 1} | {
    f"{prefix}{middle}B": base**power
    for power, prefix in enumerate("KMGTP", 1)
    for middle, base in (("", 1000), ("i", 1024))
}
_SHORT = {prefix.lower(): 1024**power for power, prefix in enumerate("KMGTP", 1)}
"""A bare "G" is a GiB, as for SLURM, Docker and `dd`."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def format_bytes(nbytes: float) -> str:
    """Write bytes of memory or disk with three digits, in a binary unit: "12.3 MiB"."""
    return _in_largest_unit(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def exact_bytes(nbytes: int) -> str:
    """Write bytes as `parse_nbytes` reads them back: "12MiB"."""
    return f"{nbytes >> 20}MiB" if nbytes % 2**20 == 0 else f"{nbytes}B"


def format_rate(nbytes_per_s: float) -> str:
    """Write bytes a second of a memory, disk or network, in decimal units: "12.3 GB/s"."""
    return _in_largest_unit(nbytes_per_s, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def format_flops(flops_per_s: float) -> str:
    """Write a rate of computing, in decimal units: "12.3 TFLOP/s"."""
    units = ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s")
    return _in_largest_unit(flops_per_s, 1000, units)


def format_seconds(seconds: float) -> str:
    """Write a duration with three digits: "12.3 ms"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e6)} us" if seconds else "0 ms"


def format_share(share: float) -> str:
    """Write a share of one as a percentage: "50 %", "12.5 %"."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def three_digits(number: float) -> str:
    """Write a number with at least three digits: "1.23", "12.3", "1,234"."""
    size = abs(number)
    return f"{number:,.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def _in_largest_unit(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while abs(number) >= 0.9995 * base and power + 1 < len(units):
        number, power = number / base, power + 1
    return f"{three_digits(number) if power else f'{number:,.0f}'} {units[power]}"


def parse_nbytes(flag: str, text: str) -> int:
    """Return the bytes of a text with a unit; `ConfigError` names the flag."""
    match = _SIZE.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in SIZE_UNITS.items()} | _SHORT
    factor = units.get(match[2].lower()) if match else None
    nbytes = int(float(match[1]) * factor) if match and factor else 0
    if nbytes < 1:
        wanted = f"{flag} to be a number above 0 with a unit: {', '.join(SIZE_UNITS)}"
        hint = f"{flag} 80GiB" if flag[:1] == "-" else f'{flag}="80GiB"'
        raise ConfigError(wanted, repr(text), hint=hint)
    return nbytes


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """Break a text into lines of at most 80 columns; `indent` begins all but the first."""
    return wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]


class Table(str):
    """The aligned lines of a table as one text, which keeps the cells for a terminal."""

    __slots__ = ("rows", "sides")
    rows: Sequence[Sequence[str]]
    sides: str


def columns(rows: Sequence[Sequence[str]], sides: str) -> list[Table]:
    """Return one `Table`, with cells two spaces apart; none without rows.

    Args:
        rows: lines of cells, all of one length; the first line is the heading.
        sides: "<" or ">" for each column; the last one holds for all further columns.
    """
    if not rows:
        return []
    sides = sides.ljust(len(rows[0]), sides[-1])
    others = [max(map(len, column)) for column in zip(*rows, strict=True)][1:]
    room = max(WIDTH - sum(others) - 2 * len(others), FIRST_CELL)
    widths = [max(len(row[0]) for row in rows if len(row[0]) <= room), *others]
    lines: list[str] = []
    for first, *rest in rows:
        lines += [first] if len(first) > room else []
        cells = ["" if len(first) > room else first, *rest]
        aligned = (f"{c:{s}{w}}" for c, s, w in zip(cells, sides, widths, strict=True))
        lines.append("  ".join(aligned).rstrip())
    table = Table("\n".join(lines))
    table.rows, table.sides = rows, sides
    return [table]


def show(parts: Iterable[str], stream: TextIO) -> None:
    """Print lines and tables: as they are, or drawn in the width of a terminal."""
    if not stream.isatty():
        print(*parts, sep="\n", file=stream, flush=True)
        return
    from rich.console import Console

    width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
    console = Console(file=stream, width=width, markup=False, emoji=False, highlight=False)
    for part in parts:
        if isinstance(part, Table):
            console.print(_drawn(part.rows, part.sides, width))
        else:  # indented lines are commands and code, which people copy: they stay one line
            console.print(part, soft_wrap=part.startswith("  "))


def _drawn(rows: Sequence[Sequence[str]], sides: str, width: int) -> Any:
    """Draw a table whose words stay whole; where that takes too much room, each row as a block."""
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    head, *cells = rows
    full = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = [" ".join(column).split(" ") for column in zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in words]
    widths[0] = min(widths[0], NAME)
    room = width - sum(widths) - 2 * (len(widths) - 1)
    if room < 0 and len(head) > 2:
        blocks = chain.from_iterable([*zip(head, row, strict=True), ("", "")] for row in cells)
        return _drawn([("", ""), *blocks][:-1], "<<", width)
    widths[-1] += min(room, 0)  # of two columns: a longer word breaks
    room = max(room, 0)
    for index in sorted(range(len(full)), key=lambda i: full[i] - widths[i]):  # numbers first
        more = min(room, full[index] - widths[index])
        widths[index], room = widths[index] + more, room - more
    drawn = Drawn(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False,
                  show_header=any(head))  # fmt: skip
    for name, side, wide in zip(head, sides, widths, strict=True):
        justify = "right" if side == ">" else "left"
        drawn.add_column(Text(name), justify=justify, overflow="fold", width=wide)
    for row in cells:
        drawn.add_row(*map(Text, row))
    return drawn


def starred(name: str) -> str:
    """Replace the numbers in a dotted name: "blocks.0.up" is "blocks.*.up"."""
    return _NUMBER.sub("*", name)


def counted(number: int, word: str) -> str:
    """Write a number and its word: "1 rank", "2,000 ranks"."""
    return f"{number:,d} {word}" if number == 1 else f"{number:,d} {word}s"


def common_unit(largest: float) -> tuple[str, int]:
    """Return the unit for a table of bytes, and its bytes: at least 10 of it, or KiB."""
    return next((unit for unit in BINARY_UNITS if largest >= 10 * unit[1]), BINARY_UNITS[-1])


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


def finite(value: Any, digits: int | None = None) -> Any:
    """Replace numbers that JSON cannot spell by None; `digits` rounds the others."""
    if isinstance(value, float):
        if digits is not None and isfinite(value):
            return round(value, digits)
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(part, digits) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part, digits) for part in value]
    return value
