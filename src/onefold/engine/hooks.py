"""torch events -> engine verbs, and nothing else.

A module that uses units gets a pre-forward and a forward hook; the autograd nodes of its outputs
announce the backward (engine/watch.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from onefold.engine.precision import cast_floating
from onefold.engine.watch import now, tensors_in, watch_outputs
from onefold.errors import WireError


class Verbs(Protocol):
    """Whom hooks drive: an engine, or a planner that writes down what an engine would be told.

    Units and calls are the driven one's own.
    """

    context: Any  # its `compute` is the dtype that floating-point arguments are cast to
    saved: Any
    ledger: Any

    @property
    def is_summoned(self) -> bool: ...

    def begin_forward(self) -> None: ...
    def enter(self, index: int) -> Any: ...
    def leave(self, call: Any, module: nn.Module | None, num_modules: int) -> None: ...
    def end_forward(self) -> None: ...
    def hold_alias(self, tensor: nn.Parameter) -> None: ...
    def hold_hidden(self, index: int) -> None: ...
    def begin_backward(self) -> None: ...
    def enter_backward(self, call: Any) -> None: ...
    def expect_backward(self, call: Any) -> None: ...


class ModuleHooks:
    """The two hooks of one module that uses units, or is the root."""

    def __init__(
        self, engine: Verbs, module: nn.Module, units: list[Any], *, is_root: bool
    ) -> None:
        self.engine = engine
        self.units = units
        self.is_root = is_root
        self.compute = engine.context.compute
        self._calls: list[tuple[list[Any], int]] = []  # and when each began
        self._num_modules = {unit: 1 for unit in units}
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.post_forward, always_call=True)

    def share(self, unit: Any, num_modules: int) -> None:
        """Tell how many modules use the unit, so that it rests after the last of them."""
        self._num_modules[unit] = num_modules

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        engine = self.engine
        if self.is_root:
            if engine.saved is not None:
                engine.saved.begin()
            engine.begin_forward()
        self._calls.append(([engine.enter(unit) for unit in self.units], now()))
        if self.compute is None or engine.is_summoned:
            return None
        return cast_floating(args, self.compute), cast_floating(kwargs, self.compute)

    def post_forward(self, module: nn.Module, args: object, outputs: object) -> None:
        if self.is_root and self.engine.saved is not None:
            self.engine.saved.end()
        error = sys.exception()
        if error is None:
            self._leave(module, outputs)
            return
        if self.is_root and isinstance(error, torch.OutOfMemoryError):
            self.engine.ledger.explain(error)
        with suppress(WireError):  # forward has failed already: a second error would hide the first
            self._leave(module, None)

    def _leave(self, module: nn.Module, outputs: object) -> None:
        engine = self.engine
        calls, since = self._calls.pop() if self._calls else ([], 0)
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
            watch_outputs(ref(engine), calls, tensors, since)
        if self.is_root:
            engine.end_forward()


def install(engine: Verbs, module: nn.Module, users: Mapping[int, list[nn.Module]]) -> None:
    """Hook every module that uses a unit, and the root."""
    by_module: dict[nn.Module, list[Any]] = {module: []}
    for unit, modules in users.items():
        for user in modules:
            by_module.setdefault(user, []).append(unit)
    for user, units in by_module.items():
        hooks = ModuleHooks(engine, user, units, is_root=user is module)
        for unit in units:
            hooks.share(unit, len(users[unit]))
