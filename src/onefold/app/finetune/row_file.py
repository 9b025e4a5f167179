"""Read rows to fine-tune on from a file of JSON lines, and refuse bad ones by their line.

A file has rows of one kind, as TRL reads them:

    {"text": "..."}                                       loss on all tokens
    {"prompt": "...", "completion": "..."}                loss on the completion
    {"messages": [{"role": "user", "content": "..."}]}    loss on what the assistant says

Prompt and completion may be lists of messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from onefold.errors import ConfigError

Row = dict[str, Any]

KINDS = {"text": ("text",), "prompt": ("prompt", "completion"), "messages": ("messages",)}
"""The kinds of rows by their first column, with all columns that are read."""

MOST_HELD_OUT = 256
MAX_LINE_NBYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class RowFile:
    """The rows of a file. `places`: the offset of each line's first byte, and the line's number."""

    path: Path
    kind: str  # a key of KINDS
    is_chat: bool  # some column holds messages
    places: tuple[tuple[int, int], ...]

    def read_rows(self, numbers: Sequence[int]) -> Iterator[Row]:
        """Yield rows by number, with the columns of their kind."""
        with self.path.open("rb") as file:
            for number in numbers:
                file.seek(self.places[number][0])
                row = json.loads(file.readline())
                yield {column: row[column] for column in KINDS[self.kind]}

    def split(self, share: float, seed: int) -> tuple[list[int], list[int]]:
        """Return the numbers of rows to train on, and of those that are held out."""
        order = list(range(len(self.places)))
        Random(seed).shuffle(order)
        held_out = min(round(share * len(order)), MOST_HELD_OUT) if share else 0
        held_out = max(held_out, 1) if share and len(order) > 1 else held_out
        return order[held_out:], order[:held_out]

    def longer_than(self, seq: int, count: Callable[[Row], int]) -> tuple[int, int]:
        """Return how many rows have more than `seq` tokens, and the line of the first.

        A token is at least one byte: rows of fewer bytes are not counted in tokens.
        """
        found = [
            self.places[number][1]
            for number, row in enumerate(self.read_rows(range(len(self.places))))
            if len(json.dumps(row, ensure_ascii=False).encode()) > seq and count(row) > seq
        ]
        return len(found), min(found, default=0)


def open_rows(path: Path) -> RowFile:
    """Read every line once, and keep where each begins.

    Raises: ConfigError: no such file, no rows, or a line that is not JSON, has no text, or is of
        another kind than the first; with the file and the line.
    """
    places: list[tuple[int, int]] = []
    kind, is_chat, at = "", False, 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_NBYTES), b""), 1):
                start, at = at, at + len(line)
                if not line.strip():
                    continue
                where = f"line {number:,d} of {str(path)!r}"
                row = _parsed(line, where)
                found = _kind_of(row, where)
                chats = _check_row(row, found, where)
                if kind and (found, chats) != (kind, is_chat):
                    wanted = (
                        f"{where} to be of the kind of the rows before, {_words(kind, is_chat)}"
                    )
                    hint = "fine-tune on one file for each kind, or convert the rows"
                    raise ConfigError(wanted, _words(found, chats), hint=hint)
                kind, is_chat = found, chats
                places.append((start, number))
    except OSError as error:
        hint = "--data FILE.jsonl; nothing is downloaded"
        wanted = f"--data to be a file of JSON lines, {str(path)!r}"
        raise ConfigError(wanted, error.strerror or error, hint=hint) from error
    if len(places) < 2:
        hint = 'one JSON object a line, as in {"text": "..."}'
        raise ConfigError(f"at least 2 rows in {str(path)!r}", len(places), hint=hint)
    return RowFile(path, kind, is_chat, tuple(places))


def _words(kind: str, is_chat: bool) -> str:
    columns = " and ".join(KINDS[kind])
    return f"{columns} as messages" if is_chat and kind == "prompt" else columns


def _parsed(line: bytes, where: str) -> Row:
    hint = "each line is one JSON object"
    if line.lstrip().startswith(b"["):
        hint = "write one row a line, as `jq -c '.[]' FILE > rows.jsonl` does"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        short = line[:40].decode("utf-8", "backslashreplace").rstrip("\n")
        raise ConfigError(f"{where} to be JSON", f"{short!r}: {error}", hint=hint) from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} to be a JSON object", type(row).__name__, hint=hint)
    return row


def _kind_of(row: Row, where: str) -> str:
    for kind, columns in KINDS.items():
        if kind in row:
            missing = [column for column in columns if column not in row]
            if missing:
                hint = 'as in {"prompt": "2 + 2 =", "completion": " 4"}'
                raise ConfigError(f"{where} to have {missing[0]!r} too", kind, hint=hint)
            return kind
    wanted = f"{where} to have 'text', 'prompt' and 'completion', or 'messages'"
    raise ConfigError(wanted, ", ".join(map(repr, row)) or "no column", hint=_columns_for(row))


def _columns_for(row: Row) -> str:
    """Say what rows in a form that other programs read should be."""
    if "output" in row and "instruction" in row:
        return "Alpaca's rows: write instruction and input as 'prompt', output as 'completion'"
    if "conversations" in row:
        return "ShareGPT's rows: write 'messages' with role and content, role user or assistant"
    return 'rename or convert the columns, as to {"text": "..."}'


def _check_row(row: Row, kind: str, where: str) -> bool:
    """Raise `ConfigError` for a row without text; return whether it holds messages."""
    chats: set[bool] = set()
    for column in KINDS[kind]:
        value = row[column]
        is_chat = isinstance(value, list)
        chats.add(is_chat)
        if is_chat and kind != "text":
            _check_messages(value, f"{column!r} in {where}")
        elif not isinstance(value, str) or kind == "messages" or not value.strip():
            wanted = "a list of messages" if kind == "messages" else "text"
            got = "nothing" if value in ("", None) else f"{value!r:.40}"
            raise ConfigError(f"{column!r} in {where} to be {wanted}", got, hint="remove the row")
    if len(chats) > 1:
        hint = "make both texts, or both lists of messages"
        raise ConfigError(f"prompt and completion of {where} alike", "text and messages", hint=hint)
    return chats.pop()


def _check_messages(messages: list[Any], where: str) -> None:
    hint = 'as in {"role": "user", "content": "..."}'
    for message in messages or [None]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{where} to be messages with a role", f"{message!r:.40}", hint=hint)
        if "content" not in message and "tool_calls" not in message:
            raise ConfigError(f"{where} to be messages with content", f"{message!r:.40}", hint=hint)
