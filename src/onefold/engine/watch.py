"""How backward is announced: prehooks on the autograd nodes of a forward's outputs.

Nodes, not tensors: an in-place change of an output moves the tensor to another node, but this one
still runs, before every node of the forward that made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Protocol, TypeVar
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


def tensors_in(value: object, depth: int = 6) -> Iterator[Tensor]:
    """Every tensor in tuples, lists, mappings, dataclasses and plain objects, nested."""
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0 or value is None or isinstance(value, str | bytes | int | float | nn.Module):
        return
    children: list[object] = []
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, tuple | list | set | frozenset):
        children = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        children = [getattr(value, field.name, None) for field in fields(value)]
    elif not isinstance(value, type):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        children = [getattr(value, name, None) for name in slots]
        children += list(getattr(value, "__dict__", {}).values())
    for child in children:
        yield from tensors_in(child, depth - 1)
