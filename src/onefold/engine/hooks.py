"""Module hooks: torch's events become events of the engine, and nothing else.

A module that uses units gets a pre-forward and a forward hook; the autograd nodes of its outputs
announce the backward (engine/watch.py).

[Note: torch.compile] Dynamo must not trace what torch calls here and elsewhere in the engine: it
would run collectives while it compiles, and bake the state of units into a graph. So every function
that torch calls back is disabled for it: a graph ends there, or does not see it at all, as around a
compiled unit (`compat.untraced`). `torch.compiler.disable` would import dynamo with onefold.

A module that evaluates and never trains (`onefold.stream`) has `InferenceHooks`: its weights come
and go between forwards, so no graph may refer to them, and forwards record none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_map_only

from onefold.compat import untraced
from onefold.engine.engine import Engine
from onefold.engine.forward_threads import ThreadStack
from onefold.engine.precision import cast_arguments, cast_floating, map_tensors
from onefold.engine.watch import BackwardEvents, now, tensors_in, watch_outputs
from onefold.errors import StateError, WireError
from onefold.layout.statistics import statistics_dtype
from onefold.unit.dtensors import without_backward
from onefold.unit.shortage import explain


class ModuleEvents(BackwardEvents, Protocol):
    """The receiver of hooks: an engine, or a planner that writes the events down.

    Units are indices, calls are the receiver's own.
    """

    context: Any  # its `compute` is the dtype to which floating-point arguments are cast
    saved: Any
    ledger: Any

    @property
    def is_unsharded(self) -> bool: ...

    def begin_forward(self) -> None: ...
    def enter(self, index: int) -> Any: ...
    def leave(self, call: Any, module: nn.Module | None, num_modules: int) -> None: ...
    def end_forward(self) -> None: ...
    def hold_alias(self, tensor: nn.Parameter) -> None: ...
    def hold_hidden(self, index: int) -> None: ...
    def are_shown(self, indices: Iterable[int]) -> bool: ...


class ModuleHooks:
    """The two hooks of one module that uses units, or is the root."""

    def __init__(
        self, engine: ModuleEvents, module: nn.Module, units: dict[int, int],
        others: list[ModuleHooks], *, is_root: bool,
    ) -> None:  # fmt: skip
        """`units`: for each unit that the module uses, how many modules use it.

        `others`: of the root: hooks of the other modules, hooked with it or after it.
        """
        self.engine = engine
        self.units = units
        self.is_root = is_root
        self.compute = engine.context.compute
        self.others = others
        # calls that run, and the next autograd node at their start
        self._running = ThreadStack[tuple[list[Any], int]]()
        self._module = ref(module)
        self.register()

    def register(self) -> None:
        """Have torch call the two hooks."""
        module = self._module_of_hooks()
        self._handles = [
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.post_forward, always_call=True),
        ]

    def _module_of_hooks(self) -> nn.Module:
        module = self._module()
        assert module is not None, "hooks outlived their module"
        return module

    def unregister(self) -> None:
        """Have torch call neither."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @untraced
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        engine = self.engine
        if self.is_root:
            if engine.saved is not None:
                engine.saved.begin()
            engine.begin_forward()
        self._running.entries.append(([engine.enter(unit) for unit in self.units], now()))
        if self.compute is None or engine.is_unsharded:
            return None
        return cast_arguments(args, kwargs, self.compute)

    @untraced
    def post_forward(self, module: nn.Module, args: object, outputs: object) -> Any:
        if self.is_root and self.engine.saved is not None:
            self.engine.saved.end()
        error = sys.exception()
        if error is None:
            self._leave(module, outputs)
            return
        explain(error, self.engine.ledger)
        with suppress(WireError):  # forward has failed already: a second error would hide the first
            self._leave(module, None)

    def _leave(self, module: nn.Module, outputs: object) -> None:
        engine = self.engine
        opened = self._running.entries
        calls, since = opened.pop() if opened else ([], 0)
        tensors = list(tensors_in(outputs))
        # backward inside onefold.unsharded needs no gathers
        is_recorded, is_watched = torch.is_grad_enabled() and not engine.is_unsharded, False
        for tensor in tensors:
            base = tensor._base if tensor._is_view() else tensor
            if isinstance(base, nn.Parameter):
                engine.hold_alias(base)
            is_watched = is_watched or tensor.requires_grad
        if is_recorded and not is_watched:
            for call in calls:
                engine.hold_hidden(call.unit)
        for call in calls:
            engine.leave(call, module, self.units[call.unit])
        if is_recorded and (calls or self.is_root):
            watch_outputs(ref(engine), calls, tensors, since)
        if self.is_root:
            engine.end_forward()


class PartHooks(ModuleHooks):
    """A hook of a part of the root, which brings its units; it brings them where the root does not.

    Then it has a second hook, until the part is done: most calls pay for none.
    """

    def __init__(
        self, engine: ModuleEvents, module: nn.Module, units: dict[int, int],
        others: list[ModuleHooks], *, is_root: bool,
    ) -> None:  # fmt: skip
        super().__init__(engine, module, dict.fromkeys(units, 1), others, is_root=is_root)
        self._alone = ThreadStack[bool]()  # of one that brings units, and of calls inside it
        self._num_alone = 0  # on all threads

    def register(self) -> None:
        self._handles = [
            self._module_of_hooks().register_forward_pre_hook(
                self.pre_forward, prepend=True, with_kwargs=True
            )
        ]

    @untraced
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        opened, is_alone = self._alone.entries, not self.engine.are_shown(self.units)
        if is_alone or opened:
            opened.append(is_alone)
        if not is_alone:
            if self.compute is None or self.engine.is_unsharded:
                return None
            return cast_arguments(args, kwargs, self.compute)
        self._num_alone += 1
        if self._num_alone == 1:
            self._handles.append(module.register_forward_hook(self.post_forward, always_call=True))
        return super().pre_forward(module, args, kwargs)

    @untraced
    def post_forward(self, module: nn.Module, args: object, outputs: object) -> Any:
        opened = self._alone.entries
        if opened and opened.pop():
            self._num_alone -= 1
            if self._num_alone == 0:
                self._handles.pop().remove()
            super().post_forward(module, args, outputs)


def hook(
    engine: ModuleEvents, users: Mapping[int, list[nn.Module]], root: nn.Module | None = None,
    kind: type[ModuleHooks] = ModuleHooks,
) -> None:  # fmt: skip
    """Hook every module that uses a unit; with `root` also the root."""
    by_module: dict[nn.Module, dict[int, int]] = {} if root is None else {root: {}}
    for unit, modules in users.items():
        for user in modules:
            by_module.setdefault(user, {})[unit] = len(modules)
    others: list[ModuleHooks] = []
    for user, units in by_module.items():
        is_root = user is root
        # a part that referred to the list would be in a cycle with it
        hooks = kind(engine, user, units, others if is_root else [], is_root=is_root)
        if not is_root:
            others.append(hooks)


def keep_dtypes(modules: Iterable[nn.Module], compute: torch.dtype) -> None:
    """Let modules with running statistics return the dtype of their input, as batch norm does.

    Their own operations may widen it by an fp32 buffer, and the next weight is narrow. A weight
    that a parametrization computes from wide ones is used in `compute`.
    """
    for module in modules:
        if statistics_dtype(module) is not None:
            is_weight = isinstance(module, ParametrizationList)
            module.register_forward_hook(
                partial(_cast, compute) if is_weight else _in_dtype_of_input
            )


def _cast(compute: torch.dtype, _: nn.Module, __: Any, weight: Any) -> Any:
    return cast_floating(weight, compute)


def _in_dtype_of_input(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    given = args[0] if args else None
    if not (isinstance(given, Tensor) and isinstance(output, Tensor)):
        return output
    is_alike = given.shape == output.shape and given.is_floating_point()
    return output.to(given.dtype) if is_alike and output.is_floating_point() else output


def bring_inputs(module: nn.Module, device: torch.device) -> None:
    """Move the tensors that a module is called with to the device that computes.

    Its parameters rest elsewhere: a script's `x.to(model.device)`, and `generate` of transformers,
    take inputs there.
    """
    module.register_forward_pre_hook(partial(_bring, device), prepend=True, with_kwargs=True)


@untraced
def _bring(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return map_tensors(partial(Tensor.to, device=device), (args, kwargs))


class InferenceHooks(ModuleHooks):
    """The two hooks of one module; those of parts are gone once all weights have come to stay."""

    def __init__(
        self, engine: ModuleEvents, module: nn.Module, units: dict[int, int],
        others: list[ModuleHooks], *, is_root: bool,
    ) -> None:  # fmt: skip
        super().__init__(engine, module, units, others, is_root=is_root)
        self._entered: list[tuple[bool, bool]] = []  # there was work to do; grad mode was on
        self._are_parts_called = True

    @untraced
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        engine, records = cast("Engine", self.engine), torch.is_grad_enabled()
        units = range(len(engine.units)) if self.is_root else self.units
        has_work = not engine.is_settled(units)
        self._entered.append((has_work, records))
        if has_work and self.is_root:
            self._follow_parts(are_called=True)
        if records:
            torch._C._set_grad_enabled(False)
        return super().pre_forward(module, args, kwargs) if has_work else None

    @untraced
    def post_forward(self, module: nn.Module, args: object, outputs: object) -> Any:
        has_work, records = self._entered.pop() if self._entered else (False, False)
        try:
            if has_work:
                super().post_forward(module, args, outputs)
            if self.is_root and sys.exception() is not None:
                cast("Engine", self.engine).rest()  # a disk that failed may serve the next pass
            elif self.is_root and has_work:
                settled = cast("Engine", self.engine)
                self._follow_parts(are_called=not settled.is_settled(range(len(settled.units))))
        finally:
            if records:
                torch._C._set_grad_enabled(True)
        return tree_map_only(Tensor, _checked_inputs, outputs) if records else None

    def _follow_parts(self, *, are_called: bool) -> None:
        """Hook the parts of the module only while a forward has work for them: hooks take time."""
        if are_called != self._are_parts_called:
            self._are_parts_called = are_called
            for part in self.others:
                (part.register if are_called else part.unregister)()


def _checked_inputs(output: Tensor) -> Tensor:
    if not (output.is_floating_point() or output.is_complex()):
        return output
    anchor = torch.empty(0, requires_grad=True)  # autograd asks an input whether to run
    return without_backward(output, _no_backward, anchor)


def _no_backward() -> StateError:
    got = "a backward through it"
    hint = "onefold.shard trains a module: its weights go to the same tiers"
    return StateError("a forward alone of a module that onefold.stream streams", got, hint=hint)
