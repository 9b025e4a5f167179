"""Hooks of a module that evaluates and never trains (`onefold.stream`).

Its weights come and go between forwards, so no graph may refer to them: forwards record none.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from onefold.engine.engine import Engine
from onefold.engine.hooks import ModuleHooks
from onefold.errors import StateError
from onefold.unit.dtensors import without_backward


class InferenceHooks(ModuleHooks):
    """The two hooks of one module; those of parts are gone once all weights have come to stay."""

    def __init__(self, engine: Engine, module: nn.Module, units: dict[int, int], *, is_root: bool):
        super().__init__(engine, module, units, is_root=is_root)
        self._entered: list[tuple[bool, bool]] = []  # there was work to do; grad mode was on
        self._are_parts_called = True

    @torch._disable_dynamo  # [Note: torch.compile] in hooks.py
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

    @torch._disable_dynamo
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
        return tree_map_only(Tensor, _checked, outputs) if records else None

    def _follow_parts(self, *, are_called: bool) -> None:
        """Hook the parts of the module only while a forward has work for them: hooks take time."""
        if are_called != self._are_parts_called:
            self._are_parts_called = are_called
            for part in self.others:
                (part.register if are_called else part.unregister)()


def _checked(output: Tensor) -> Tensor:
    if not (output.is_floating_point() or output.is_complex()):
        return output
    anchor = torch.empty(0, requires_grad=True)  # autograd asks an input whether to run
    return without_backward(output, _no_backward, anchor)


def _no_backward() -> StateError:
    return StateError(
        "a forward alone of a module that onefold.stream streams",
        "a backward through it",
        hint="onefold.shard trains a module: its weights rest in the same tiers",
    )
