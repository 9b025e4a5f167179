"""The mean of one rank alone, in rows as several ranks have it.

A gradient in the compute dtype is widened anyway: into rows, one copy and one flat group a unit
take the place of some for each parameter. Where a step crosses a link to a device, rows cross it
in few copies. Else the mean is the tensors that autograd has made.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from onefold.unit import user_hooks
from onefold.unit.context import UnitSpec
from onefold.unit.parameter import UnitParameter
from onefold.unit.reduction import MeanRows


def has_rows(spec: UnitSpec) -> bool:
    """True if the mean has rows of its own; else it is the tensors that autograd has made."""
    is_across = spec.steps_in_blocks and spec.context.store.device.type != "cpu"
    return spec.context.exchanges or is_across or spec.compute_dtype != spec.dtype


def scaled(partial: Tensor, dtype: torch.dtype, sources: int) -> Tensor:
    """Return the mean over the ranks of whose losses a partial gradient is the sum."""
    mean = partial.to(dtype)
    return mean.mul_(1.0 / sources) if sources > 1 else mean


def take_rows(
    mean: MeanRows, parameters: Sequence[UnitParameter], sources: int
) -> Sequence[Tensor]:
    """Copy, or add, the partial gradients of parameters to their rows, and drop them.

    Return the rows, each in the shape of its parameter.
    """
    rows = [row.view_as(p.local) for row, p in zip(mean.rows, parameters, strict=True)]
    partials = [p.unsharded.grad if p.model is None else p.partial_grad for p in parameters]
    dense = [g if g.layout is torch.strided else g.to_dense() for g in partials if g is not None]
    if rows and all(mean.fresh):
        torch._foreach_copy_(rows, dense)
        if sources > 1:
            torch._foreach_mul_(rows, 1.0 / sources)
    else:
        for row, grad, is_fresh in zip(rows, dense, mean.fresh, strict=True):
            part = scaled(grad, row.dtype, sources)
            row.copy_(part) if is_fresh else row.add_(part)
    for parameter in parameters:
        parameter.unsharded.grad = None
    return rows


def own_means(parameters: Sequence[UnitParameter], sources: int) -> dict[UnitParameter, Tensor]:
    """Take the gradients that autograd has made, without rows; return those to show.

    Others are added to a gradient that is shown, or were accumulated into the parameter itself.
    """
    means: dict[UnitParameter, Tensor] = {}
    for parameter in parameters:
        grad, sharded = parameter.partial_grad, parameter.sharded
        if grad is not None and grad.is_sparse:
            parameter.set_partial_grad(grad := grad.to_dense())
        if grad is None or parameter.unsharded is sharded:
            continue
        mean = scaled(grad, parameter.local.dtype, sources)
        if sharded._grad is not None:
            parameter.unwrap(sharded._grad).add_(mean)
        else:
            means[parameter] = mean
        parameter.unsharded.grad = None
        user_hooks.note(parameter)
    return means
