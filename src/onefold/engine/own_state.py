"""What an optimizer class adds in a `state_dict` of its own: counters, schedules, constants.

Checkpoints hold `optimizer.state` and the param groups as they are. A class that overrides
`state_dict` may say more: other keys (StableSPAM's `total_step`), entries of no parameter in
`state` (DoG's `_first_step`), and other values in a group (GrokAdamW puts None for functions).
These are saved as well, and given back through the class's own `load_state_dict`.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from onefold.engine.probe import MATRICES, Question, stepped
from onefold.errors import ConfigError

_KNOWN = ("state", "param_groups")
_ABSENT = object()
_PLAIN = (
    Tensor | torch.dtype | torch.device | str | bytes | int | float | complex | torch.Size | None
)


def added_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return what the class's own `state_dict` holds and torch's would not; {} of torch's own.

    `groups`: of each param group, the values that are not those of the optimizer's.
    """
    if not _has_own(optimizer):
        return {}
    whole = optimizer.state_dict()
    numbers = range(sum(len(group["params"]) for group in optimizer.param_groups))
    state = {
        key: value
        for key, value in whole.get("state", {}).items()
        if key not in numbers and dict.get(optimizer.state, key) is not value
    }
    groups = [
        {k: v for k, v in said.items() if k != "params" and v is not group.get(k, _ABSENT)}
        for said, group in zip(whole.get("param_groups", ()), optimizer.param_groups, strict=False)
    ]
    others = {key: value for key, value in whole.items() if key not in _KNOWN}
    is_more = any((state, others, *groups))
    return {"others": others, "state": state, "groups": groups} if is_more else {}


def shared_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the param groups without what the class's own `state_dict` hides or replaces."""
    groups = optimizer.param_groups
    said = optimizer.state_dict().get("param_groups") if _has_own(optimizer) else None
    return groups if said is None else [
        {k: v for k, v in group.items() if k == "params" or own.get(k, _ABSENT) is v}
        for group, own in zip(groups, said, strict=True)
    ]  # fmt: skip


def _has_own(optimizer: Optimizer) -> bool:
    return type(optimizer).state_dict is not Optimizer.state_dict


def give_back(optimizer: Optimizer, added: dict[str, Any]) -> None:
    """Hand what `added_state` returned to the class's own `load_state_dict`.

    It gets a whole state dict of this optimizer, whose states and groups have been loaded. They
    stay as they are, because torch's `load_state_dict` rounds states to the dtype of weights.
    """
    if not added and not _sets_attributes(optimizer):
        return
    state, groups, of_groups = optimizer.state, optimizer.param_groups, added.get("groups", ())
    whole = optimizer.state_dict() | added.get("others", {})
    if "state" in whole:
        whole["state"] |= added.get("state", {})
    for said, own in zip(whole.get("param_groups", ()), of_groups, strict=False):
        said.update(own)
    try:
        optimizer.load_state_dict(whole)
        loaded = optimizer.param_groups
    finally:
        optimizer.state, optimizer.param_groups = state, groups
    for group, own, now in zip(groups, of_groups, loaded, strict=False):
        group.update({key: now[key] for key in own if key in now})


def _sets_attributes(optimizer: Optimizer) -> bool:
    """True if the class's own `load_state_dict` sets attributes, as a probe sees it do.

    Else it is not called: what it would change in states has been loaded as it was saved.
    """
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        return False
    try:
        question = Question.about(optimizer, optimizer.param_groups[0], {})
        run = stepped(question, MATRICES)
        fresh, state_dict = question.build(run.parameters), run.optimizer.state_dict()
        Optimizer.load_state_dict(fresh, state_dict)
        before = repr(_attributes(fresh))
        fresh.load_state_dict(state_dict)
        return repr(_attributes(fresh)) != before
    except Exception:  # whatever a class raises on parameters that it is not made for
        return True


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _KNOWN}


def check_savable(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for a class whose own `state_dict` holds what no checkpoint can."""
    name = f"{type(optimizer).__name__}.state_dict()"
    hint = "override state_dict() so that it adds numbers, words, tensors, lists and dicts"
    wanted = f"{name} that onefold.save can save"
    try:
        added = added_state(optimizer)
    except Exception as error:  # whatever a class raises
        got = f"{type(error).__name__}: {error}"
        raise ConfigError(wanted, got, hint=hint) from error
    other = unsavable(added, name)
    if other:
        raise ConfigError(wanted, other, hint=hint)


def unsavable(
    value: object, name: str, *, is_state: bool = False, has_objects: bool = False
) -> str:
    """Return a value that no checkpoint gives back, with its place; empty if there is none.

    `is_state`: of a parameter, where queues come back, and objects that consist of their attributes
    if it `has_objects`.
    """
    inside: Any = ()
    if type(value) in (dict, Counter, OrderedDict):
        inside = cast("dict[Any, Any]", value).items()
        other = next((key for key, _ in inside if not isinstance(key, _PLAIN | tuple)), None)
        if other is not None:
            return f"a {type(other).__name__} as a key of {name}"
    elif type(value) in (list, tuple, set) or (is_state and type(value) is deque):
        inside = enumerate(cast("list[Any]", value))
    elif has_objects and is_of_attributes(type(value)) and len(name) < _LONGEST_NAME:
        inside = vars(value).items()
    elif not isinstance(value, _PLAIN) and not callable(getattr(value, "state_dict", None)):
        return f"a {type(value).__name__} in {name}"
    flags = {"is_state": is_state, "has_objects": has_objects}
    return next(filter(None, (unsavable(v, f"{name}[{key!r}]", **flags) for key, v in inside)), "")


def is_of_attributes(kind: type) -> bool:
    """True for a class whose objects are their attributes, and which a name finds again.

    GaLore's projectors are such: no base of theirs is written in C, has slots, or says itself how
    it is copied.
    """
    is_named = class_named(f"{kind.__module__}.{kind.__qualname__}") is kind
    copies_itself = any(vars(base).keys() & _OWN_COPIES for base in kind.__mro__[:-1])
    has_more = (kind.__basicsize__, kind.__dictoffset__) != _OF_ATTRIBUTES
    return is_named and not copies_itself and not has_more


def class_named(name: str) -> type | None:
    """Return a class of a module that the program has imported."""
    module, _, kind = name.rpartition(".")
    found = vars(sys.modules.get(module, object)).get(kind)
    return found if isinstance(found, type) else None


class _Empty:
    """Has attributes alone."""


_OF_ATTRIBUTES = _Empty.__basicsize__, _Empty.__dictoffset__
_OWN_COPIES = {"__slots__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}
_LONGEST_NAME = 300  # of a place: objects may refer to each other in circles
