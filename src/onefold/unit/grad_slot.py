"""The `grad` of a parameter at rest: read and set without `__torch_function__`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onefold.unit.gradient_phase import GradientPhase
from onefold.unit.logical import as_logical

GRAD: Any = Tensor.grad  # torch's own attribute


class GradSlot:
    """A base class in front of a `Tensor` class. Optimizers read and clear each gradient."""

    _onefold_owner: Callable[[], Any]  # a weak reference to the `UnitParameter`

    @property
    def grad(self) -> Tensor | None:
        """See `torch.Tensor.grad`. Optimizers read and clear each: one call, without dispatch.

        Our own code uses torch's `_grad`, where functions of subclasses are disabled.
        """
        owner = self._onefold_owner()
        unit = None if owner is None else owner.find_unit()
        if owner is not None and (unit is None or unit.gradient.phase is GradientPhase.CONSUMED):
            owner.unit.gradient.check_there(owner)
        with torch._C.DisableTorchFunctionSubclass():
            shown = GRAD.__get__(self)
            return as_logical(shown) if type(shown) is DTensor else shown

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            GRAD.__delete__(self)
