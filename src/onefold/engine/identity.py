"""Parameters that an optimizer knows by identity: tables by id, sets, lists, modules.

Such a class may keep them in any attribute, also of an object that it shares with others
(bitsandbytes 0.50.2 keeps overrides by id in a manager). When other objects take the places of
parameters, these tables are written again, and the class finds what it looks for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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

    def of(self, value: Any, depth: int = 0) -> Any:
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
        edit = next((edit for kind, edit in _EDITS.items() if isinstance(value, kind)), None)
        if edit is not None:
            flat = [x for pair in value.items() for x in pair] if edit is _fill else list(value)
            named = [self.of(x, depth + 1) for x in flat]
            is_same = all(a is b for a, b in zip(flat, named, strict=True))
            return value if is_same else edit(value, named)
        if not callable(value) and isinstance(kept := getattr(value, "__dict__", None), dict):
            self.of(kept, depth + 1)
        return value


def _fill(value: dict[Any, Any], flat: list[Any]) -> dict[Any, Any]:
    value.clear()
    value.update(zip(flat[::2], flat[1::2], strict=True))
    return value


def _replace(value: list[Any], named: list[Any]) -> list[Any]:
    value[:] = named
    return value


def _refill(value: set[Any], named: list[Any]) -> set[Any]:
    value.clear()
    value.update(named)
    return value


def _remake(value: Any, named: list[Any]) -> Any:
    make = getattr(value, "_make", type(value))  # a named tuple takes its fields one by one
    return make(named)


_EDITS: dict[type, Callable[[Any, list[Any]], Any]] = {
    dict: _fill,
    list: _replace,
    set: _refill,
    tuple: _remake,
    frozenset: _remake,
}


def rename(optimizer: Optimizer, new: Mapping[int, Tensor]) -> None:
    """Let an optimizer keep other objects, by the id of the parameters that it keeps now."""
    if not _is_torchs(optimizer):
        _look(optimizer, _Renaming(new))


def finds_by_identity(optimizer: Optimizer) -> tuple[bool, bool]:
    """Return whether it keeps its parameters or their ids outside groups and state, and modules."""
    if _is_torchs(optimizer):
        return False, False
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    looking = _look(optimizer, _Renaming({id(t): t for t in held}, sees_modules=True))
    return looking.has_found, looking.has_modules


def _is_torchs(optimizer: Optimizer) -> bool:
    """True for torch's own classes, which know parameters by groups alone."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _look(optimizer: Optimizer, renaming: _Renaming) -> _Renaming:
    own = vars(optimizer)
    left = {"state", "param_groups", *(name for name in own if name.startswith("_optimizer_"))}
    own.update({name: renaming.of(value) for name, value in own.items() if name not in left})
    for group in optimizer.param_groups:
        group.update({k: renaming.of(v) for k, v in group.items() if k != "params"})
    return renaming
