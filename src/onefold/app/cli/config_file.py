"""Flags of a command in a TOML file: `--config FILE`, and the copy that a run saves.

A key is the long name of a flag. A file becomes words of the command line, so that a value in it is
checked as one that was typed, and ranks of our launcher need no file.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onefold
from onefold.errors import ConfigError

FLAG = "--config"
HELP = "a TOML file with flags, such as steps = 100; flags of the command line override it"

COPY = "effective.toml"
"""The file that `save_copy` writes; it replaces no `run.toml` that a user wrote."""

ONLY_TYPED = ("config", "help")
"""Flags that are no keys."""

NOT_SAVED = ("command", "config", "default_of", "json", "run", "words")
"""Attributes of parsed arguments that do not change a run."""


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the files behind `--config` from all other words of a command line."""
    paths: list[str] = []
    others: list[str] = []
    left = iter(words)
    for word in left:
        name, has_value, path = word.partition("=")
        if name == FLAG:
            paths.append(path if has_value else next(left, ""))
        else:
            others.append(word)
    return paths, others


def read_config(path: str) -> dict[str, Any]:
    """Return the keys and values of a file. Raises `ConfigError` if it cannot hold flags."""
    import tomllib  # of no use to a command without a file

    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except (OSError, ValueError) as error:  # ValueError: not TOML, or not UTF-8
        got = error.strerror if isinstance(error, OSError) else error
        hint = "name a file of lines such as steps = 100"
        raise ConfigError(f"{FLAG} {path!r} to be a TOML file", got, hint=hint) from error
    for key, value in values.items():
        if isinstance(value, dict):
            hint = "a key is the name of a flag, and no table"
            raise ConfigError("keys without tables", f"[{key}]", hint=hint, where=path)
        if key in ONLY_TYPED:
            hint = f"--{key} works on the command line alone"
            raise ConfigError("flags of a run", repr(key), hint=hint, where=path)
    return values


def word_of(
    action: argparse.Action, value: Any, parse: Callable[[argparse.Action, str], Any]
) -> str:
    """Return the word of a command line for a flag, an empty one for a switch that is off.

    Raises `ConfigError` if the flag takes no such value; `parse` is what argparse does with text.
    """
    flag = action.option_strings[0]
    is_list = isinstance(value, list)
    text = ",".join(map(str, value)) if is_list else str(value)
    if action.nargs == 0 or (action.nargs == "?" and isinstance(value, bool)):
        if not isinstance(value, bool):
            raise _refused(flag, "true or false", value)
        return flag if value else ""
    if action.type is None and not isinstance(value, str):
        raise _refused(flag, "text in quotes", value)
    if isinstance(value, bool) or not isinstance(value, str | int | float | list):
        raise _refused(flag, "a number or text", value)
    if not isinstance(parse(action, text), tuple) and is_list:
        raise _refused(flag, "one value", value)
    return f"{flag}={text}"


def _refused(flag: str, meaning: str, value: Any) -> ConfigError:
    return ConfigError(f"{flag} to be {meaning}", repr(value), hint=f"`--help` describes {flag}")


def located(error: ConfigError, place: str) -> ConfigError:
    """Return the error with a place before its hint."""
    text, _, hint = str(error).partition("\nhint: ")
    return ConfigError(f"{text} ({place})\nhint: {hint}")


def save_copy(arguments: argparse.Namespace, *folders: str | None) -> None:
    """Write the flags of a run, defaults included, into the folders that the run writes to."""
    text = f"# onefold {onefold.__version__}: onefold {arguments.command} --config {COPY}\n"
    for name, value in vars(arguments).items():  # as help lists them
        if value is not None and name not in NOT_SAVED:
            text += f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
    text = text.replace("\x7f", "\\u007f")  # JSON's values are TOML but for this character
    for folder in filter(None, folders):
        Path(folder, COPY).write_text(text, encoding="utf-8", errors="surrogateescape")
