"""Write the flags of every command into docs/reference/cli.md.

python docs/tools/cli_page.py            write them
python docs/tools/cli_page.py --check    exit 1 if the page says something else
"""

from __future__ import annotations

import argparse
import html
import sys
from pathlib import Path

from made_files import write_or_check

from onefold.app.cli.main import _parser

PAGE = Path(__file__).parent.parent / "reference" / "cli.md"
BEGIN, END = "<!-- flags: begin -->", "<!-- flags: end -->"
NOT_SHOWN = ("-h", "--json")


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    (group,) = _parser()._subparsers._group_actions  # argparse has no public way
    return dict(group.choices)


def spelled(action: argparse.Action) -> str:
    """A flag with its argument, or a positional argument."""
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    if action.choices is not None and not action.option_strings:
        name = " | ".join(map(str, action.choices))
    if action.option_strings and action.nargs != 0:
        name += f" {action.metavar or action.dest.upper()}"
    return f"<code>{html.escape(name).replace('|', '&#124;')}</code>"  # `|` would end the cell


def section(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """One command: its description and a table of flags."""
    about = " ".join((parser.description or "").split("\n\n")[0].split())
    lines = [f"## onefold {name}", "", about, "", "| argument | meaning |", "|---|---|"]
    formatter = parser._get_formatter()  # which adds the defaults
    for action in parser._actions:
        if not set(NOT_SHOWN) & set(action.option_strings):
            shown = formatter._get_help_string(action) or ""
            told = shown % {"default": action.default}
            lines.append(f"| {spelled(action)} | {told} |".replace("\n", " "))
    return [*lines, ""]


def filled(text: str) -> str:
    """The page with its flags made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [line for name, parser in commands().items() for line in section(name, parser)]
    return "\n".join([before + BEGIN, *lines[:-1], END]) + after


def main(arguments: list[str]) -> int:
    """Write or check the page."""
    return write_or_check({PAGE: filled(PAGE.read_text())}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
