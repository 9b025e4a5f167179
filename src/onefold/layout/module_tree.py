"""One walk over a module and the modules inside it, for all who ask about them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` has wrapped; any other module as it is."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nothing is compiled
    wrapper = getattr(dynamo, "OptimizedModule", ())
    while isinstance(module, wrapper):
        module = module.get_submodule("_orig_mod")
    return module


def parameter_keys(root: nn.Module) -> set[int]:
    """Return the ids of all parameters in a module and the modules inside it: quick, no names."""
    rest, seen, keys = [uncompiled(root)], set[int](), set[int]()
    while rest:
        module = rest.pop()
        if id(module) not in seen:
            seen.add(id(module))
            keys.update(map(id, module._parameters.values()))
            rest += [part for part in module._modules.values() if part is not None]
    return keys - {id(None)}


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
