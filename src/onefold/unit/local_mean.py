"""The mean of one rank alone, in rows as several ranks have it.

A gradient in the compute dtype is widened anyway: into rows, one copy and one flat group a unit
take the place of some for each parameter. Where a step crosses a link to a device, rows cross it
in few copies. Else the mean is the tensors that autograd has made.
"""

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

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
) -> Sequence[UnitParameter]:
    """Copy, or add, the partial gradients of parameters to their rows, and drop them."""
    partials = [parameter.flat_partial() for parameter in parameters]
    if any(mean.fresh):
        rows, fresh = ([*compress(tensors, mean.fresh)] for tensors in (mean.rows, partials))
        torch._foreach_copy_(rows, fresh)
        if sources > 1:
            torch._foreach_mul_(rows, 1.0 / sources)
    for row, partial, is_fresh in zip(mean.rows, partials, mean.fresh, strict=True):
        if not is_fresh:
            row.add_(scaled(partial, row.dtype, sources))
    for parameter in parameters:
        parameter.unsharded.grad = None
    return parameters
