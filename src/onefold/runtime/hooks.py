"""torch events -> engine verbs, and nothing else.

A module that uses units gets a pre-forward and a forward hook. Backward is met through the autograd
nodes of the module's outputs: a prehook on each runs before any node of that forward. Nodes, not
tensors, because in-place changes of an output move the tensor to another node but keep this one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from onefold.errors import WireError
from onefold.runtime.engine import Call, Engine
from onefold.runtime.precision import cast_floating
from onefold.state.unit import Unit


class ModuleHooks:
    """The two hooks of one module that uses units, or is the root."""

    def __init__(
        self, engine: Engine, module: nn.Module, units: list[Unit], *, is_root: bool
    ) -> None:
        self.engine = engine
        self.units = units
        self.is_root = is_root
        self.compute = engine.setting.compute
        self._calls: list[list[Call]] = []
        self._num_modules = {unit: 1 for unit in units}
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.post_forward, always_call=True)

    def share(self, unit: Unit, num_modules: int) -> None:
        """Tell how many modules use the unit, so that it rests after the last of them."""
        self._num_modules[unit] = num_modules

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        engine = self.engine
        if self.is_root:
            engine.begin_forward()
        self._calls.append([engine.enter(unit) for unit in self.units])
        if self.compute is None or engine.is_summoned:
            return None
        return cast_floating(args, self.compute), cast_floating(kwargs, self.compute)

    def post_forward(self, module: nn.Module, args: object, outputs: object) -> None:
        if sys.exception() is None:
            self._leave(module, outputs)
            return
        with suppress(WireError):  # forward has failed already: a second error would hide the first
            self._leave(module, None)

    def _leave(self, module: nn.Module, outputs: object) -> None:
        engine = self.engine
        calls = self._calls.pop() if self._calls else []
        tensors = list(tensors_in(outputs))
        for tensor in tensors:
            base = tensor._base if tensor._is_view() else tensor
            if isinstance(base, nn.Parameter):
                engine.hold_alias(base)
        if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors):
            for call in calls:
                engine.hold_hidden(call.unit)
        for call in calls:
            engine.leave(call, module, self._num_modules[call.unit])
        if torch.is_grad_enabled() and (calls or self.is_root):
            watch_outputs(ref(engine), calls, tensors)
        if self.is_root:
            engine.end_forward()


def install(engine: Engine, module: nn.Module, users: Mapping[Unit, list[nn.Module]]) -> None:
    """Hook every module that uses a unit, and the root."""
    by_module: dict[nn.Module, list[Unit]] = {module: []}
    for unit, modules in users.items():
        for user in modules:
            by_module.setdefault(user, []).append(unit)
    for user, units in by_module.items():
        hooks = ModuleHooks(engine, user, units, is_root=user is module)
        for unit in units:
            hooks.share(unit, len(users[unit]))


def watch_outputs(engine: ReferenceType[Engine], calls: Call | list[Call], outputs: object) -> None:
    """Have backward enter `calls` before it runs any node that made `outputs`."""
    watched = calls if isinstance(calls, list) else [calls]

    def before_node(_: object) -> None:
        alive = engine()
        if alive is not None:
            alive.begin_backward()
            for call in watched:
                alive.enter_backward(call)

    nodes = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                base = tensor._base if tensor._is_view() else None
                node = (tensor if base is None or base.grad_fn is None else base).grad_fn
                if node is not None:
                    nodes[id(node)] = node
    current = engine()
    if nodes and current is not None:
        for call in watched:
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
