"""Keys of an optimizer's states that are no words, as words: a mark, and the key as JSON.

    0.9 -> :0.9    (0, True) -> :[0, true]    a parameter -> :{"parameter": "head.weight"}

torch's planner makes words of all keys, and drops dicts without entries: these hold the mark alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch import Tensor

from onefold.errors import CheckpointError

_MARK = ":"


def as_words(value: Any, name_of: Callable[[Tensor], str | None], where: str) -> Any:
    """Return a nested state whose keys are words. `name_of` a parameter, also a key.

    Raises `CheckpointError` for a key that is none of these, with its place `where`.
    """
    if type(value) in (list, tuple):
        return type(value)(as_words(item, name_of, where) for item in value)
    if not isinstance(value, dict):
        return value

    def word(key: object) -> str:
        if isinstance(key, str) and not key.startswith(_MARK):
            return key
        try:
            return _MARK + json.dumps(_described(key, name_of))
        except TypeError as error:
            wanted = f"keys of {where} that are words, numbers, tuples of them, or parameters"
            hint = "save the module without this optimizer, or change the class's keys"
            raise CheckpointError(wanted, f"a {type(key).__name__}", hint=hint) from error

    words = {word(key): as_words(item, name_of, f"{where}.{key}") for key, item in value.items()}
    return words or {_MARK: None}


def _described(key: object, name_of: Callable[[Tensor], str | None]) -> object:
    if isinstance(key, Tensor):
        fqn = name_of(key)
        if fqn is None:
            raise TypeError("a tensor that is no parameter")
        return {"parameter": fqn}
    if type(key) is tuple:
        return [_described(part, name_of) for part in key]
    if type(key) not in (str, int, float, bool, type(None)):
        raise TypeError("another type")
    return key


def as_keys(value: Any, key_of: Callable[[str], Tensor | None]) -> Any:
    """Return a nested state with the keys that `as_words` was given.

    `key_of` a parameter's name; None leaves its entry out: another rank keeps that.
    """
    if type(value) in (list, tuple):
        return type(value)(as_keys(item, key_of) for item in value)
    if not isinstance(value, dict):
        return value

    def typed(described: Any) -> Any:
        if isinstance(described, list):
            return tuple(map(typed, described))
        return key_of(described["parameter"]) if isinstance(described, dict) else described

    keys = {
        word: typed(json.loads(word[1:])) if word.startswith(_MARK) else word
        for word in value
        if word != _MARK
    }
    left_out = {word for word, key in keys.items() if key is None and word != f"{_MARK}null"}
    return {key: as_keys(value[word], key_of) for word, key in keys.items() if word not in left_out}
