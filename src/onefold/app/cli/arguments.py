"""Declare commands and their flags; parse them, with one line for a mistake; print a result.

The `type` of a flag is a function of the flag's name, for its message, and of the text.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from math import inf, isfinite
from typing import Any, NoReturn

from onefold.app.cli import config_file
from onefold.errors import ConfigError
from onefold.text import finite, show

SubParsers = Any
"""The result of `add_subparsers`, whose class is private to argparse."""

FlagType = Callable[[str, str], Any]

MAX_HELP_WIDTH = 100

PROFILE = (
    "write a trace of torch.profiler of three steps there for each rank, and on GPUs a memory "
    "snapshot; the page of --report DIR links to them"
)
"""The help of `--profile`."""


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each flag that has one, at most 100 columns wide."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(prog, width=min(columns, MAX_HELP_WIDTH) - 2)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_none = action.default is None or action.default is False
        return action.help if has_none else super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap the paragraphs of a description; indented lines are commands and tables."""
        wrap = partial(super()._fill_text, width=width, indent=indent)
        parts = text.rstrip().split("\n\n")
        return "\n\n".join(part if part[:2] == "  " else wrap(part) for part in parts)


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would print its usage and exit."""

    def __init__(self, *, spellings: Mapping[str, str] | None = None, **options: Any) -> None:
        """`spellings`: flags of other programs, in the words of this command."""
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(**options, allow_abbrev=False)
        self._spellings = spellings or {}

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit after help or a version, which raises `BrokenPipeError` if nobody reads it."""
        sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\nhint: `{self.prog} --help` describes them")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore
        """Parse words, with those of config files before them, and keep all of them as `words`.

        Refuses an unknown flag before argparse misses a value because of it.
        """
        words = list(sys.argv[1:] if args is None else args)
        if config_file.FLAG in self._option_string_actions:
            words = self._with_config_files(words)
        self._refuse_unknown_flags(words)
        namespace, surplus = super().parse_known_args(words, namespace)
        vars(namespace).setdefault("words", words)  # of a command, its own parser's
        return namespace, surplus

    def _with_config_files(self, words: Sequence[str]) -> list[str]:
        paths, others = config_file.split(words)
        by_flag: dict[str, str] = {}
        for path in paths:
            by_flag |= self._words_of_file(path)
        return [*filter(None, by_flag.values()), *others]

    def _words_of_file(self, path: str) -> dict[str, str]:
        """Return the word for each flag in a config file, by the flag's `dest`."""
        flags = {
            name[2:].replace("-", "_"): action
            for name, action in self._option_string_actions.items()
            if name[:2] == "--" and name[2:] not in config_file.ONLY_TYPED
        }
        words: dict[str, str] = {}
        for key, value in config_file.read_config(path).items():
            name = key.replace("-", "_")
            if name not in flags:
                raise self._unknown(key, f"--{name}", flags, path)
            action = flags[name]
            if action.dest in words:
                wanted = f"one key for {action.option_strings[0]}"
                raise ConfigError(wanted, f"{key!r} as well", hint="keep one", where=path)
            try:
                words[action.dest] = config_file.word_of(action, value, self._get_value)
            except ConfigError as error:
                raise config_file.located(error, f"{key} in {path}") from error
        return words

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        for word in words:
            is_flag = (
                word[:1] == "-" and not word[1:2].isdigit() and word != "-" and " " not in word
            )
            if word == "--" or (self._subparsers is not None and not is_flag):
                return  # words of a command are its own parser's
            name = word.partition("=")[0]
            if is_flag and name not in self._option_string_actions:
                raise self._unknown(name, name, self._option_string_actions)

    def _unknown(self, given: str, flag: str, known: Iterable[str], path: str = "") -> ConfigError:
        """Return the error for a flag, or a key of the file `path`, that the command lacks."""
        ours = self._spellings.get(flag)
        hint = f"here it is {ours}" if ours else _did_you_mean(given, known)
        hint = hint or f"`{self.prog} --help` lists the flags"
        return ConfigError(f"a flag of `{self.prog}`", given, hint=hint, where=path)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        parse: Any = action.type
        return parse(action.option_strings[0], arg_string) if parse else arg_string

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        words = [str(choice) for choice in action.choices]
        what = "a command" if action.dest == "command" else action.metavar or action.dest
        hint = _did_you_mean(value, words) or f"`{self.prog} --help` describes them"
        raise ConfigError(f"{what}: {', '.join(words)}", repr(value), hint=hint)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


def one_line(error: BaseException) -> str:
    """Return a message with its hint in brackets, on one line."""
    text, _, hint = str(error).partition("\nhint: ")
    line = " ".join(text.split())
    return f"{line} (hint: {' '.join(hint.split())})" if hint else line


def add_command(
    commands: SubParsers, name: str, run: Callable[..., int], summary: str, description: str,
    *, spellings: Mapping[str, str] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Add a command, which has `--json` as all have; return the function that adds its flags.

    `group` of a flag is the title under which help lists it. `spellings`: see `Parser`.
    """
    parser = commands.add_parser(name, help=summary, description=description, spellings=spellings)
    parser.set_defaults(run=run, default_of=parser.get_default)
    help_text = "print one JSON object instead, progress to stderr"
    parser.add_argument("--json", action="store_true", help=help_text)
    groups: dict[str, Any] = {"": parser}

    def add(*names: str, group: str = "", **options: Any) -> None:
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(*names, **options)

    return add


def first_set(arguments: argparse.Namespace, names: Iterable[str]) -> str | None:
    """Return the first of some flags that differs from its default."""
    flags = vars(arguments)
    return next((name for name in names if flags[name] != arguments.default_of(name)), None)


def print_result(arguments: argparse.Namespace, facts: Any, lines: Iterable[str]) -> None:
    """Print the facts as one JSON object, or the lines and tables for people."""
    if arguments.json:
        print(json.dumps(finite(facts)))
    else:
        show(lines, sys.stdout)


def whole(flag: str, text: str, *, least: int) -> int:
    """Parse a whole number of at least `least`."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise _refused_number(flag, f"a whole number of at least {least}", text)
    return number


positive, natural = partial(whole, least=1), partial(whole, least=0)
"""Types of flags."""


def real(flag: str, text: str, *, above: float = -inf, least: float = -inf) -> float:
    """Parse a finite number above `above`, or of at least `least`."""
    try:
        number = float(text)
    except ValueError:
        number = inf
    if not isfinite(number) or number <= above or number < least:
        bound = f"above {above:g}" if above > -inf else f"of at least {least:g}"
        raise _refused_number(flag, f"a number {bound}", text)
    return number


def share(flag: str, text: str) -> float:
    """Parse a number from 0 to 1."""
    number = real(flag, text, least=0)
    if number > 1:
        raise _refused_number(flag, "a number from 0 to 1", text)
    return number


def weights(flag: str, text: str) -> tuple[float, ...]:
    """Parse "3,1" as weights; integers keep their ratios exactly."""
    numbers = [real(flag, part, least=0) for part in text.split(",")]
    return tuple(int(number) if number == int(number) else number for number in numbers)


def or_auto(parse: FlagType) -> FlagType:
    """Return a type that takes "auto" as well."""
    return lambda flag, text: text if text == "auto" else parse(flag, text)


def one_of(words: Sequence[str], hint: str) -> FlagType:
    """Return the type of a flag whose value is one of some words."""

    def parse(flag: str, text: str) -> str:
        if text not in words:
            raise ConfigError(f"{flag} to be {' or '.join(words)}", repr(text), hint=hint)
        return text

    return parse


def word_or_number(_: str, text: str) -> Any:
    """Return the number that `text` spells, or the text."""
    return int(text) if text.isdecimal() else text


def _refused_number(flag: str, meaning: str, text: str) -> ConfigError:
    return ConfigError(f"{flag} to be {meaning}", repr(text), hint=f"pass {flag} NUMBER")
