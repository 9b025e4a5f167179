"""Parse arguments: one line for a mistake, and values checked with their flag's name."""

from __future__ import annotations

import argparse
import sys
from math import inf, isfinite
from typing import Any, NoReturn

from onefold.errors import ConfigError, expected

SubParsers = Any
"""The result of `add_subparsers`, whose class is private to argparse."""


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would print its usage and exit."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(**options)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit after help or a version, which raises `BrokenPipeError` if nobody reads it."""
        sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            expected(f"arguments as in `{self.prog} --help`", message, hint="see the flags there")
        )


def one_line(error: BaseException) -> str:
    """Return a message with its hint in brackets, on one line."""
    text, _, hint = str(error).partition("\nhint: ")
    line = " ".join(text.split())
    return f"{line} (hint: {' '.join(hint.split())})" if hint else line


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which every command has."""
    parser.set_defaults(json=False)  # so that help does not show a default
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS,
                        help="print one JSON object instead, progress to stderr")  # fmt: skip


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
