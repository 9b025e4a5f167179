"""Parse arguments: one line for a mistake, and values checked with their flag's name."""

from __future__ import annotations

import argparse
import sys
from math import inf, isfinite
from textwrap import wrap
from typing import Any, NoReturn

from onefold.errors import ConfigError, expected

SubParsers = Any
"""The result of `add_subparsers`, whose class is private to argparse."""


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_none = action.default is None or action.default is False
        return action.help if has_none else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would print its usage and exit."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(**options, allow_abbrev=False)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit after help or a version, which raises `BrokenPipeError` if nobody reads it."""
        sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        hint = "see the flags there"
        raise ConfigError(expected(f"arguments as in `{self.prog} --help`", message, hint=hint))


def one_line(error: BaseException) -> str:
    """Return a message with its hint in brackets, on one line."""
    text, _, hint = str(error).partition("\nhint: ")
    line = " ".join(text.split())
    return f"{line} (hint: {' '.join(hint.split())})" if hint else line


def wrapped(text: str) -> list[str]:
    """Break a text into lines of at most 100 columns."""
    return wrap(text, 100, subsequent_indent="  ")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which every command has."""
    help_text = "print one JSON object instead, progress to stderr"
    parser.add_argument("--json", action="store_true", help=help_text)


def whole(flag: str, text: str, *, least: int) -> int:
    """Parse a whole number of at least `least`."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise _refused(flag, f"a whole number of at least {least}", text)
    return number


def real(flag: str, text: str, *, above: float = -inf, least: float = -inf) -> float:
    """Parse a finite number above `above`, or of at least `least`."""
    try:
        number = float(text)
    except ValueError:
        number = inf
    if not isfinite(number) or number <= above or number < least:
        bound = f"above {above:g}" if above > -inf else f"of at least {least:g}"
        raise _refused(flag, f"a number {bound}", text)
    return number


def share(flag: str, text: str) -> float:
    """Parse a number from 0 to 1."""
    number = real(flag, text, least=0)
    if number > 1:
        raise _refused(flag, "a number from 0 to 1", text)
    return number


def word_or_number(text: str) -> int | str:
    """Return the number that `text` spells, or the text."""
    return int(text) if text.isdecimal() else text


def _refused(flag: str, meaning: str, text: str) -> ConfigError:
    return ConfigError(expected(f"{flag} to be {meaning}", repr(text), hint=f"pass {flag} NUMBER"))
