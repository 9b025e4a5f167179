"""How the engine learns of backward: prehooks on the autograd nodes of a forward's outputs.

Nodes, not tensors: an in-place change of an output moves the tensor to another node. The old node
still runs, before every node of the forward that made it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from onefold.compat import untraced


class BackwardEvents(Protocol):
    """The events of a backward, as the engine receives them. Calls are the receiver's own."""

    def begin_backward(self) -> None: ...
    def enter_backward(self, call: Any) -> None: ...
    def expect_backward(self, call: Any) -> None: ...


class BackwardEnd(Protocol):
    """How a backward ends."""

    def end_backward(self) -> None: ...
    def leave_failed_backward(self) -> None: ...


def in_backward() -> bool:
    """True while autograd runs a graph on this thread, recompute included."""
    return torch._C._current_graph_task_id() != -1


def recomputes() -> bool:
    """True while a node of autograd runs: code that reads a weight there computes a forward again.

    Hooks of gradients, which edit and step weights, run in an `AccumulateGrad`, callbacks in none.
    """
    node = torch._C._current_autograd_node()
    return node is not None and node.name() != "torch::autograd::AccumulateGrad"


def now() -> int:
    """Return the sequence number of this thread's next autograd node."""
    return torch.autograd._get_sequence_nr()


def announce_end(receiver: ReferenceType[BackwardEnd]) -> None:
    """Announce the end of the backward that runs, or that it failed."""
    end = _End(receiver)
    torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]


class _End:
    """A callback that autograd calls at the end of a backward, and drops before a failed one ends.

    So a failed backward is known before the exception reaches its caller.
    """

    def __init__(self, receiver: ReferenceType[BackwardEnd]) -> None:
        self._receiver: ReferenceType[BackwardEnd] | None = receiver

    @untraced  # [Note: torch.compile] in engine/hooks.py
    def __call__(self) -> None:
        alive = None if self._receiver is None else self._receiver()
        self._receiver = None
        if alive is not None:
            alive.end_backward()

    def __del__(self) -> None:
        alive = None if self._receiver is None else self._receiver()
        if alive is not None:
            alive.leave_failed_backward()


def watch_outputs(
    receiver: ReferenceType[BackwardEvents], calls: Sequence[Any], outputs: Sequence[Tensor],
    since: int = 0,
) -> None:  # fmt: skip
    """Announce `calls` before backward runs any node that made `outputs`.

    Nodes older than `since` existed when the calls began. Backward reaches an output that a module
    only passes on (T5's position bias) long after it has left the module, so such nodes are
    ignored.
    """
    nodes = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in outputs:
            if tensor.requires_grad:
                base = tensor._base if tensor._is_view() else None
                node = (tensor if base is None or base.grad_fn is None else base).grad_fn
                if node is not None and node._sequence_nr() >= since:
                    nodes[id(node)] = node
    current = receiver()
    if nodes and current is not None:
        for call in calls:
            current.expect_backward(call)
    for node in nodes.values():
        node.register_prehook(partial(_before_node, receiver, calls))


@untraced  # [Note: torch.compile] in engine/hooks.py
def _before_node(receiver: ReferenceType[BackwardEvents], calls: Sequence[Any], _: object) -> None:
    alive = receiver()
    if alive is not None:
        alive.begin_backward()
        for call in calls:
            alive.enter_backward(call)


MAX_DEPTH = 6
"""Containers are searched so many levels deep."""

_LEAVES = (
    str, bytes, bytearray, memoryview, int, float, complex, type(None), range, slice, Enum, type,
    nn.Module, torch.Size, torch.dtype, torch.device, torch.layout, torch.Generator,
    FunctionType, BuiltinFunctionType, MethodType, ModuleType,
)  # fmt: skip
"""Values of these types hold no tensors, or none that a forward returns."""


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield every tensor in tuples, lists, mappings, dataclasses and plain objects, nested.

    An object that several others refer to is searched once, and so is one that refers to itself.
    """
    return _search(value, MAX_DEPTH, {})


def _search(value: object, depth: int, seen: dict[int, tuple[int, object]]) -> Iterator[Tensor]:
    """`seen`: by id, how deep each container was searched; it keeps them, and so their ids."""
    if issubclass(type(value), Tensor):
        yield value  # type: ignore[misc]
        return
    children_of = _children_of(type(value))
    if children_of is None or depth == 0 or seen.get(id(value), (0, None))[0] >= depth:
        return
    seen[id(value)] = depth, value
    for child in children_of(value):
        if _children_of(type(child)) is not None:
            yield from _search(child, depth - 1, seen)


@lru_cache(maxsize=1024)
def _children_of(type_: type) -> Callable[[Any], Iterable[object]] | None:
    """Return how to list the children of a value of this type; None if it has none to search."""
    if issubclass(type_, _LEAVES):
        return None
    if issubclass(type_, Mapping):
        return lambda value: value.values()
    if issubclass(type_, tuple | list | set | frozenset):
        return iter
    if is_dataclass(type_):
        names = [field.name for field in fields(type_)]
        return lambda value: [getattr(value, name, None) for name in names]
    slots = [name for base in type_.__mro__ for name in _slots_of(base)]
    return lambda value: [
        *[getattr(value, name, None) for name in slots],
        *getattr(value, "__dict__", {}).values(),
    ]


def _slots_of(base: type) -> Iterable[str]:
    slots = base.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots
