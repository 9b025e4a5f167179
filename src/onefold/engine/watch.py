"""How backward is announced: prehooks on the autograd nodes of a forward's outputs.

Nodes, not tensors: an in-place change of an output moves the tensor to another node, but this one
still runs, before every node of the forward that made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum, auto
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, TypeVar
from weakref import ReferenceType

import torch
from torch import Tensor, nn

C = TypeVar("C", contravariant=True)


class Watcher(Protocol[C]):
    """Who wants to know of backward: the engine, with its calls."""

    def begin_backward(self) -> None: ...
    def enter_backward(self, call: C) -> None: ...
    def expect_backward(self, call: C) -> None: ...


def now() -> int:
    """The number that the next autograd node of this thread will have."""
    return torch.autograd._get_sequence_nr()


def watch_outputs(
    watcher: ReferenceType[Watcher[C]], calls: Sequence[C], outputs: object, since: int = 0
) -> None:
    """Have backward enter `calls` before it runs any node that made `outputs`.

    Nodes from before `since` were there when the calls began: an output that a module only passes
    on (T5's position bias) is reached when backward is long through with it.
    """

    def before_node(_: object) -> None:
        alive = watcher()
        if alive is not None:
            alive.begin_backward()
            for call in calls:
                alive.enter_backward(call)

    nodes = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                base = tensor._base if tensor._is_view() else None
                node = (tensor if base is None or base.grad_fn is None else base).grad_fn
                if node is not None and node._sequence_nr() >= since:
                    nodes[id(node)] = node
    current = watcher()
    if nodes and current is not None:
        for call in calls:
            current.expect_backward(call)
    for node in nodes.values():
        node.register_prehook(before_node)


MAX_DEPTH = 6
"""Containers are searched so many levels deep."""

_LEAVES = (
    str, bytes, bytearray, memoryview, int, float, complex, type(None), range, slice, Enum, type,
    nn.Module, torch.Size, torch.dtype, torch.device, torch.layout, torch.Generator,
    FunctionType, BuiltinFunctionType, MethodType, ModuleType,
)  # fmt: skip
"""Values of these types hold no tensors, or none that a forward gives out."""


class _Kind(Enum):
    """How the children of a value are found."""

    LEAF = auto()
    TENSOR = auto()
    MAPPING = auto()
    COLLECTION = auto()
    OBJECT = auto()


@lru_cache(maxsize=1024)
def _kind_of(type_: type) -> tuple[_Kind, tuple[str, ...]]:
    """How to search values of a type, and the attributes that all of them have."""
    if issubclass(type_, Tensor):
        return _Kind.TENSOR, ()
    if issubclass(type_, _LEAVES):
        return _Kind.LEAF, ()
    if issubclass(type_, Mapping):
        return _Kind.MAPPING, ()
    if issubclass(type_, tuple | list | set | frozenset):
        return _Kind.COLLECTION, ()
    if is_dataclass(type_):
        return _Kind.OBJECT, tuple(field.name for field in fields(type_))
    slots = [name for base in type_.__mro__ for name in _slots_of(base)]
    return _Kind.OBJECT, tuple(slots)


def _slots_of(base: type) -> Iterable[str]:
    slots = base.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in tuples, lists, mappings, dataclasses and plain objects, nested.

    An object that several others refer to is searched once, and so is one that refers to itself.
    """
    return _search(value, MAX_DEPTH, {})


def _search(value: object, depth: int, seen: dict[int, tuple[int, object]]) -> Iterator[Tensor]:
    """`seen`: by id, how deep each container was searched; it keeps them, and so their ids."""
    kind, names = _kind_of(type(value))
    if kind is _Kind.TENSOR:
        yield value  # type: ignore[misc]
        return
    if kind is _Kind.LEAF or depth == 0 or seen.get(id(value), (0, None))[0] >= depth:
        return
    seen[id(value)] = depth, value
    for child in _children(value, kind, names):
        if _kind_of(type(child))[0] is not _Kind.LEAF:
            yield from _search(child, depth - 1, seen)


def _children(value: Any, kind: _Kind, names: tuple[str, ...]) -> Iterable[object]:
    if kind is _Kind.MAPPING:
        return value.values()
    if kind is _Kind.COLLECTION:
        return value
    named = [getattr(value, name, None) for name in names]
    return named if is_dataclass(value) else [*named, *getattr(value, "__dict__", {}).values()]
