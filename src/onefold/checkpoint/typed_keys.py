"""Keys of an optimizer's states that are no words, as words: a mark, and the key as JSON.

    0.9 -> :0.9    (0, True) -> :[0, true]    a parameter -> :{"parameter": "head.weight"}

Names in a checkpoint are words, and a dict without entries has none: it holds the mark alone. A
tensor made of others (torchao 0.18.0: codes and scales) becomes a dict of these others, a queue
(AdaShift of pytorch_optimizer 4.1.0) a list, and an object (a projector of GaLore) its attributes.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onefold.engine.own_state import class_named, is_of_attributes
from onefold.errors import CheckpointError

_MARK, _WRAPPER, _QUEUE, _OBJECT, _MEMBER = ":", ":wrapper", ":queue", ":object", ":member"


def as_words(value: Any, name_of: Callable[[Tensor], str | None], where: str) -> Any:
    """Return a nested state whose keys are words. `name_of` a parameter, also a key.

    Raises `CheckpointError` for a key that is none of these, with its place `where`.
    """
    if type(value) in (list, tuple):
        return type(value)(as_words(item, name_of, where) for item in value)
    if type(value) is deque:
        return {_QUEUE: value.maxlen, "items": as_words(list(value), name_of, where)}
    if is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor):
        names, context = value.__tensor_flatten__()
        inner = {name: as_words(getattr(value, name), name_of, where) for name in names}
        made = (context, value.shape, value.stride())
        return {_WRAPPER: _class_name(value)} | {
            "inner": inner, "made": (made,),  # as in format 1
        }  # fmt: skip
    if isinstance(value, Enum):  # inside of an object
        return {_MEMBER: value.name, "of": _class_name(value)}
    if is_of_attributes(type(value)):
        return {_OBJECT: _class_name(value), "attributes": as_words(vars(value), name_of, where)}
    if not isinstance(value, dict):
        return value

    def word(key: object) -> str:
        if isinstance(key, str) and not key.startswith(_MARK):
            return key
        try:
            return _MARK + json.dumps(_described_key(key, name_of))
        except TypeError as error:
            wanted = f"keys of {where} that are words, numbers, tuples of them, or parameters"
            hint = "save the module without this optimizer, or change the class's keys"
            raise CheckpointError(wanted, f"a {type(key).__name__}", hint=hint) from error

    words = {word(key): as_words(item, name_of, f"{where}.{key}") for key, item in value.items()}
    return words or {_MARK: None}


def _described_key(key: object, name_of: Callable[[Tensor], str | None]) -> object:
    if isinstance(key, Tensor):
        fqn = name_of(key)
        if fqn is None:
            raise TypeError("a tensor that is no parameter")
        return {"parameter": fqn}
    if type(key) is tuple:
        return [_described_key(part, name_of) for part in key]
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
    if _QUEUE in value:
        return deque(as_keys(value["items"], key_of), value[_QUEUE])
    if _WRAPPER in value:
        ((context, *extents),) = value["made"]
        kind: Any = _class(value[_WRAPPER], lambda kind: issubclass(kind, Tensor))
        return kind.__tensor_unflatten__(as_keys(value["inner"], key_of), context, *extents)
    if _OBJECT in value:
        made = object.__new__(_class(value[_OBJECT], is_of_attributes))
        vars(made).update(as_keys(value["attributes"], key_of))
        return made
    if _MEMBER in value:
        return _class(value["of"], lambda kind: issubclass(kind, Enum))[value[_MEMBER]]

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


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _class(name: str, fits: Callable[[type], bool]) -> Any:
    """Return a class that the program has imported; none of its code runs."""
    found = class_named(name)
    if found is None or not fits(found):
        hint = f"import {name.rpartition('.')[0] or name}, as the program that saved it did"
        raise CheckpointError("states of classes that are imported", name, hint=hint)
    return found
