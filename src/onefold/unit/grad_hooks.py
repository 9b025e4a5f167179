"""The hooks that autograd calls once it has accumulated a gradient, and outputs without backward.

Both hooks refer to their parameter (unit/parameter.py) weakly: a hook does not keep a module alive.
They end graphs of torch.compile: see [Note: torch.compile] in engine/hooks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onefold.unit import refusals


class DirectUse:
    """Refuses a gradient that autograd accumulates into a sharded parameter.

    An operation has used the parameter where `__torch_function__` could not see it.
    """

    def __init__(self, parameter: ReferenceType[Any]) -> None:
        self.parameter = parameter

    @torch._disable_dynamo
    def __call__(self, sharded: Tensor) -> None:
        parameter = self.parameter()
        if isinstance(sharded.grad, DTensor):  # of an operation that DTensor defines: full_tensor()
            return
        if parameter is not None:
            raise refusals.DIRECT_USE(parameter.fqn, where=parameter.spec.context.where)


@torch._disable_dynamo
def on_accumulated(parameter: ReferenceType[Any], _: Tensor) -> None:
    """Tell the unit of an unsharded parameter that its gradient has grown."""
    alive = parameter()
    unit = None if alive is None else alive._unit()
    if alive is not None and unit is not None:
        if alive.model is not None:
            alive.fit_grad()
        unit.on_grad(alive)


def without_backward(output: Tensor, error: Callable[[], Exception], *sources: Tensor) -> Tensor:
    """Pass `output` on, as computed from `sources`; a backward through it raises `error()`."""
    shown: Tensor = _WithoutBackward.apply(error, output, *sources)  # type: ignore[no-untyped-call]
    return shown


class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, error: Callable[[], Exception], output: Tensor, *_: Tensor) -> Tensor:  # type: ignore[override]
        ctx.error = error
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:  # type: ignore[override]
        raise ctx.error()
