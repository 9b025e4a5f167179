"""One walk over a module and the modules inside it, for all who ask about them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any
from weakref import ref

from torch import nn


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` has wrapped; any other module as it is."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nothing is compiled
    wrapper = getattr(dynamo, "OptimizedModule", ())
    while isinstance(module, wrapper):
        module = module.get_submodule("_orig_mod")
    return module


_PARTS, _PARAMETERS = map(attrgetter, ("_modules", "_parameters"))


class Membership:
    """Says quickly which parameters are in a module and those inside it, if no part has changed.

    Each step asks. It keeps no module alive.
    """

    def __init__(self) -> None:
        self._modules: list[ref[nn.Module]] = []  # as walked last
        self._parts: list[int] = []  # ids of what each of them had inside

    def keys_in(self, root: nn.Module) -> set[int]:
        """Return the ids of all parameters."""
        root = uncompiled(root)
        modules: list[Any] = [known() for known in self._modules]
        is_same = bool(modules) and modules[0] is root and None not in modules
        if not is_same or self._parts != [*_ids_in(map(_PARTS, modules))]:
            modules = _modules_in(root)
            self._modules = [*map(ref, modules)]
            self._parts = [*_ids_in(map(_PARTS, modules))]
        return {*_ids_in(map(_PARAMETERS, modules))} - {id(None)}


def _ids_in(named: Iterable[dict[str, Any]]) -> Iterator[int]:
    return map(id, chain.from_iterable(map(dict.values, named)))


def _modules_in(root: nn.Module) -> list[Any]:
    """Return a module and all modules inside it, each once."""
    found: dict[int, nn.Module] = {}
    rest: list[nn.Module | None] = [root]
    while rest:
        module = rest.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            rest += module._modules.values()
    return [*found.values()]


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTree:
    """A module and all modules inside it, each once, walked once: [(fqn, module)], root first.

    An object that is no module has no parts.
    """

    root: nn.Module
    parts: tuple[tuple[str, nn.Module], ...]

    @staticmethod
    def from_root(root: Any) -> ModuleTree:
        """Walk over a module, or over the one that `torch.compile` has wrapped."""
        root = uncompiled(root)
        return ModuleTree(root, tuple(root.named_modules()) if isinstance(root, nn.Module) else ())

    @property
    def modules(self) -> list[nn.Module]:
        """The root and all modules inside."""
        return [module for _, module in self.parts]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, nn.Module, str]]:
        """Yield fqn, parameter, module and attribute name for every place of every parameter."""
        for prefix, module in self.parts:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield f"{prefix}.{name}".lstrip("."), parameter, module, name
