"""Laws of text for people: one number looks the same wherever it is printed, pipes stay plain."""

from __future__ import annotations

import ast
import io
import re

from hypothesis import given
from hypothesis import strategies as st

from onefold.text import (
    Table,
    columns,
    exact_bytes,
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    parse_nbytes,
    show,
)
from tests.support.sources import FILES, PACKAGE, nodes_of

UNIT = re.compile(r"^ ?([KMGT]i?B\b|ms\b|us\b|%)")
ROWS = [("batch", "memory"), ("1", "12.3 MiB"), ("2,000", "1.00 GiB")]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def formats_itself(text: ast.JoinedStr) -> bool:
    """Whether a unit follows a formatted number, or its format is a percentage."""
    for value, after in zip(text.values, [*text.values[1:], None], strict=True):
        if not isinstance(value, ast.FormattedValue) or value.format_spec is None:
            continue
        unit = after.value if isinstance(after, ast.Constant) else ""
        if UNIT.match(str(unit)) or ast.unparse(value.format_spec).endswith("%'"):
            return True
    return False


def test_no_other_file_formats_bytes_rates_short_times_or_percentages():
    ours = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        if path.name != "text.py"
        for node in nodes_of(path)
        if isinstance(node, ast.JoinedStr) and formats_itself(node)
    ]
    assert ours == []


def test_the_law_of_formats_sees():
    for text in (
        "f'{n / 2**20:.1f} MiB'", "f'{n:.0f}GB/s'", "f'{s:.3g} ms'", "f'{x:.0%} of'", "f'{x:.1f} %'"
    ):  # fmt: skip
        assert formats_itself(ast.parse(text, mode="eval").body), text


def test_one_number_has_one_text():
    sizes = (0, 1023, 1024, 1536, 1023.7 * 1024, 2**20, 5.25 * 2**30, 2**50, -(2**20))
    assert [format_bytes(n) for n in sizes] == [
        "0 B", "1,023 B", "1.00 KiB", "1.50 KiB", "1.00 MiB", "1.00 MiB", "5.25 GiB", "1,024 TiB",
        "-1.00 MiB",
    ]  # fmt: skip
    assert [format_rate(n) for n in (0, 999, 1e3, 2.5e9, 4e14)] == [
        "0 B/s", "999 B/s", "1.00 kB/s", "2.50 GB/s", "400 TB/s",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (0, 2.5e-6, 0.0123, 1.5, 100)] == [
        "0 ms", "2.50 us", "12.3 ms", "1.50 s", "100 s",
    ]  # fmt: skip
    assert [format_share(s) for s in (0, 0.017, 0.125, 0.5, 1)] == [
        "0 %", "1.7 %", "12.5 %", "50 %", "100 %",
    ]  # fmt: skip


@given(st.integers(1, 2**50))
def test_exact_bytes_are_read_back(nbytes):
    assert parse_nbytes("--mem", exact_bytes(nbytes)) == nbytes


def test_pipes_get_plain_lines_and_a_text_that_no_terminal_changes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    pipe = io.StringIO()
    show(["heading", *columns(ROWS, ">")], pipe)
    assert pipe.getvalue() == "heading\nbatch    memory\n    1  12.3 MiB\n2,000  1.00 GiB\n"


def test_a_terminal_gets_tables_and_lines_in_its_width(monkeypatch):
    rows = [("name", "text"), ("first", "[bold] " + "word " * 60), ("second", "w" * 300)]
    rule, wrong = "\N{BOX DRAWINGS LIGHT HORIZONTAL}", []
    for has, width in ((20, 50), (66, 66), (120, 120), (500, 200)):
        monkeypatch.setenv("COLUMNS", str(has))
        terminal = Terminal()
        show(["a heading of [red]words " * 20, *columns(rows, "<")], terminal)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
        found = {
            "width": max(len(line.rstrip()) for line in lines) in range(width - 12, width + 1),
            "rule": {rule} in [{*line.strip()} for line in lines],
            "words": "[red]words" in lines[0] and "[bold]" in "".join(lines),
        }
        wrong += [f"{has} columns: {what}" for what, holds in found.items() if not holds]
    assert wrong == []


def test_a_terminal_gets_a_command_in_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    terminal, command = Terminal(), "  onefold train " + "--flag value " * 5 + "--last 1"
    show([command], terminal)
    assert terminal.getvalue() == f"{command}\n"


def test_a_name_that_is_too_long_for_a_pipe_has_a_line_of_its_own():
    (table,) = columns([("name", "bytes"), ("n" * 90, "1"), ("short", "22")], "<>")
    assert isinstance(table, Table)
    assert table.splitlines() == ["name   bytes", "n" * 90, "           1", "short     22"]
    assert columns([], "<") == []
