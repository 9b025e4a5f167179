"""Values that files hold for a module on `meta`, until `onefold.shard` reads each rank's rows.

`load_pretrained` marks every module inside. A mark moves with its module: into a wrapper of PEFT,
under another name, or into a copy. Names in the files are those of the module that was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from onefold.errors import ConfigError
from onefold.layout.cut import Box
from onefold.layout.module_tree import ModuleTree

PROMISED = "_onefold_promised_values"
"""The attribute of a module that is not sharded yet that holds its `_Mark`."""


class Values(Protocol):
    """Where parameters and buffers of a module on `meta` get their values, by name."""

    @property
    def directory(self) -> Path: ...

    def __contains__(self, name: str) -> bool: ...

    def fill(self, name: str, box: Box | None, out: Tensor) -> None:
        """Copy a box of the tensor, or all of it, into `out`."""
        ...

    def where(self, name: str) -> tuple[Path, int, str]:
        """The file of a tensor, the offset of its first byte there, and its dtype's name."""
        ...


@dataclass(frozen=True, slots=True)
class _Mark:
    """Of one module: `values` have its own tensors under names that start with `prefix`."""

    values: Values
    prefix: str


def promise(module: nn.Module, values: Values) -> None:
    """Mark a module and all modules inside: `values` has their tensors, by today's names."""
    for prefix, part in module.named_modules():
        part.__dict__[PROMISED] = _Mark(values, f"{prefix}." if prefix else "")


def forget(tree: ModuleTree) -> None:
    """Remove all marks: the values were read, or others take their place."""
    for part in tree.modules:
        part.__dict__.pop(PROMISED, None)


def promised_values(tree: ModuleTree) -> Values | None:
    """Return the values that a module was promised, by its names of today; None without a mark.

    Raises: ConfigError: a module on `meta` took the place of one that was promised values, as
        resizing embeddings does. Its rows would be drawn, where a user expects those of the files.
    """
    marks = {part.__dict__[PROMISED] for _, part in tree.parts if PROMISED in part.__dict__}
    if not marks:
        return None
    places = dict(_promised_places(tree))
    promised = {mark.values for mark in marks}
    for name, tensor in _tensors(tree):
        if name in places or not tensor.is_meta:
            continue
        if any(own in values for values in promised for own in _endings(name)):
            wanted = f"the module of {name!r} to be the one that load_pretrained saw"
            hint = "change the model's shapes before onefold.load_pretrained, not after it"
            raise ConfigError(wanted, "another one on the meta device", hint=hint)
    return PromisedValues(places)


def _promised_places(tree: ModuleTree) -> Iterator[tuple[str, tuple[Values, str]]]:
    """Yield each tensor's name of today, its values, and its name there."""
    for prefix, part in tree.parts:
        mark: _Mark | None = part.__dict__.get(PROMISED)
        if mark is not None:
            for name in (*part._parameters, *part._buffers):
                today = f"{prefix}.{name}" if prefix else name
                if f"{mark.prefix}{name}" in mark.values:
                    yield today, (mark.values, f"{mark.prefix}{name}")


def _tensors(tree: ModuleTree) -> Iterator[tuple[str, Tensor]]:
    for prefix, part in tree.parts:
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _endings(name: str) -> Iterator[str]:
    """Yield a name, and it without the names of the wrappers around its module."""
    parts = name.split(".")
    yield name
    for start in range(1, len(parts) - 1):
        yield ".".join(parts[start:])


class PromisedValues:
    """Values of the marked modules of a tree, by the tree's names. See `Values`."""

    def __init__(self, places: dict[str, tuple[Values, str]]) -> None:
        self._places = places

    @property
    def directory(self) -> Path:
        values, _ = next(iter(self._places.values()))
        return values.directory

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def fill(self, name: str, box: Box | None, out: Tensor) -> None:
        """See `Values`."""
        values, own = self._places[name]
        values.fill(own, box, out)

    def where(self, name: str) -> tuple[Path, int, str]:
        """See `Values`."""
        values, own = self._places[name]
        return values.where(own)
