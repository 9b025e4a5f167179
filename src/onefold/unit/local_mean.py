"""The mean of one rank alone, in rows as several ranks have it.

Where a step crosses a link to a device, a unit's gradient crosses in a few copies then, and not in
some for each parameter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from onefold.unit.context import UnitSpec
from onefold.unit.parameter import UnitParameter
from onefold.unit.reduction import MeanRows


def has_rows(spec: UnitSpec) -> bool:
    """True if the mean has rows of its own; else it is the tensors that autograd has made."""
    is_across = spec.steps_in_blocks and spec.context.store.device.type != "cpu"
    return spec.context.exchanges or is_across


def scaled(partial: Tensor, dtype: torch.dtype, sources: int) -> Tensor:
    """Return the mean over the ranks of whose losses a partial gradient is the sum."""
    mean = partial.to(dtype)
    return mean.mul_(1.0 / sources) if sources > 1 else mean


def take_rows(
    mean: MeanRows, parameters: Sequence[UnitParameter], sources: int
) -> Sequence[UnitParameter]:
    """Copy, or add, the partial gradients of parameters to their rows, and drop them."""
    for parameter, row, is_fresh in zip(parameters, mean.rows, mean.fresh, strict=True):
        partial = parameter.flat_partial()
        partial = scaled(partial, row.dtype, sources) if sources > 1 else partial
        row.copy_(partial) if is_fresh else row.add_(partial)
        parameter.unsharded.grad = None
    return parameters
