"""Parameters that an optimizer knows by identity: tables by id, sets, lists, modules.

Such a class may keep them in any attribute, also of an object that it shares with others
(bitsandbytes 0.50.2 keeps overrides by id in a manager). When other objects take the places of
parameters, these tables are written again, and the class finds what it looks for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

DEEPEST, MOST = 4, 10_000
"""Containers within containers, and containers in all, that are looked at."""


@dataclass(slots=True)
class _Renaming:
    """Puts other objects where an optimizer keeps parameters, or their ids."""

    new: Mapping[int, Tensor]  # by the id of the parameter that is kept
    sees_modules: bool = False
    has_found: bool = False
    has_modules: bool = False
    seen: set[int] = field(default_factory=set)

    def renamed(self, value: Any, depth: int = 0) -> Any:
        """Return what stands for a value; containers that can be edited are."""
        if isinstance(value, Tensor) or type(value) is int:
            other = self.new.get(value if type(value) is int else id(value))
            self.has_found |= other is not None
            return value if other is None else id(other) if type(value) is int else other
        if isinstance(value, str | float | Optimizer | type) or id(value) in self.seen:
            return value
        if depth > DEEPEST or len(self.seen) >= MOST:
            return value
        self.seen.add(id(value))
        if isinstance(value, nn.Module):
            if self.sees_modules and any(id(p) in self.new for p in value.parameters()):
                self.has_found = self.has_modules = True
            return value
        if isinstance(value, dict | list | set | tuple | frozenset):
            items = value.items() if isinstance(value, dict) else [value]
            flat = list(chain.from_iterable(items))
            named = [self.renamed(x, depth + 1) for x in flat]
            is_same = all(a is b for a, b in zip(flat, named, strict=True))
            return value if is_same else _holding(value, named)
        if not callable(value) and isinstance(kept := getattr(value, "__dict__", None), dict):
            self.renamed(kept, depth + 1)
        return value


def _holding(container: Any, items: list[Any]) -> Any:
    """Return a container of other items: the same one, where it can be edited."""
    if isinstance(container, tuple | frozenset):
        make = getattr(container, "_make", type(container))  # a named tuple takes fields apart
        return make(items)
    container.clear()
    if isinstance(container, dict):
        items = list(zip(items[::2], items[1::2], strict=True))
    container.extend(items) if isinstance(container, list) else container.update(items)
    return container


def rename(optimizer: Optimizer, new: Mapping[int, Tensor]) -> None:
    """Let an optimizer keep other objects, by the id of the parameters that it keeps now."""
    if not is_torchs(optimizer):
        _look(optimizer, _Renaming(new))


def finds_by_identity(optimizer: Optimizer) -> tuple[bool, bool]:
    """Return whether it keeps its parameters or their ids outside groups and state, and modules."""
    if is_torchs(optimizer):
        return False, False
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    looking = _look(optimizer, _Renaming({id(t): t for t in held}, sees_modules=True))
    return looking.has_found, looking.has_modules


def is_torchs(optimizer: Optimizer) -> bool:
    """True for torch's own classes, which know parameters by groups alone."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _look(optimizer: Optimizer, renaming: _Renaming) -> _Renaming:
    own = vars(optimizer)
    left = {"state", "param_groups", *(name for name in own if name.startswith("_optimizer_"))}
    own.update({name: renaming.renamed(value) for name, value in own.items() if name not in left})
    for group in optimizer.param_groups:
        group.update({k: renaming.renamed(v) for k, v in group.items() if k != "params"})
    return renaming
