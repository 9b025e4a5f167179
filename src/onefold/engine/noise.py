"""The gradient noise scale: how large a step may be before more rows help little.

A rank's gradient before a reduction is that of a small batch. The mean of all of them, after the
last reduction of a step, is that of n small batches. Their squared norms give two unknowns
(McCandlish et al., arXiv 1812.06162, appendix A.1):

    |G|^2          = (n big - small) / (n - 1)
    tr(Sigma) / B  = (small - big) / (n - 1)      B: rows of the step
    noise / B      = tr(Sigma) / B / |G|^2

A step of `noise` rows makes half of the progress of an endless one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from onefold.text import format_share
from onefold.unit.unit import Unit
from onefold.wire.collectives import Group

DECAY = 0.9
"""Both parts are averaged over steps: one step's quotient is useless."""


class NoiseScale:
    """Estimates the noise scale of a module's steps from norms of gradients.

    Attributes:
        steps: how many steps the estimate averages.
        num_microbatches: micro-batches of the last step, on this rank.
    """

    def __init__(self, units: Sequence[Unit], group: Group, num_shards: int) -> None:
        """`units` may grow. `num_shards`: among so many ranks of the group a unit is cut."""
        self._units = units
        self._group = group
        self._copies = group.world_size // num_shards
        self._gradient = self._variance = 0.0  # |G|^2, and tr(Sigma) / rows of a micro-batch
        self.steps = self.num_microbatches = 0
        self._is_whole = False  # gradients were clear when the step began
        self._forget()

    def _forget(self) -> None:
        self._num_backwards = self._num_reduced = 0
        self._is_reduced = False
        self._small: list[Tensor] = []
        self._big: dict[int, Tensor] = {}

    @property
    def batches(self) -> float | None:
        """The noise scale in batches of the last step; None while the gradient drowns in noise."""
        if not self.steps or self._gradient <= 0 or self._variance < 0:
            return None
        return self._variance / self.num_microbatches / self._gradient

    @property
    def suggested_microbatches(self) -> int | None:
        """So many micro-batches of a rank make a step of `batches`."""
        batches = self.batches
        return None if batches is None else max(1, round(batches * self.num_microbatches))

    def describe(self) -> str:
        """Say what the scale means for the number of micro-batches."""
        batches, number = self.batches, self.num_microbatches
        if batches is None:
            return "gradient noise scale: more steps are needed to estimate it"
        return (
            f"gradient noise scale: {batches:.3g} times the rows of a step, over {self.steps} "
            f"steps; {number} micro-batches make {format_share(1 / (1 + batches))} of the progress "
            f"of an endless batch, {self.suggested_microbatches} make half of it"
        )

    # events of the engine

    def begin(self) -> None:
        """A backward begins."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = [p.sharded.grad for unit in self._units for p in unit.parameters]
        if all(grad is None for grad in shown):
            self._forget()
            self._is_whole = True
        self._num_backwards += 1
        self._is_reduced = False

    def note_more(self, number: int) -> None:
        """The backward had `number` micro-batches more than one."""
        self._num_backwards += number

    def note_partial(self, unit: Unit) -> None:
        """A rank's gradients of a unit are about to be reduced."""
        if not self._is_reduced:
            self._is_reduced = True
            self._num_reduced += 1
        if self._counts(unit):
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                grads = [parameter.partial_grad for parameter in unit.parameters]
                self._small += [_squared(grad) for grad in grads if grad is not None]

    def note_mean(self, unit: Unit) -> None:
        """The gradients of a unit are reduced: this rank has its part of their sum so far."""
        if self._counts(unit):
            total = torch.zeros((), dtype=torch.float64, device=unit.context.store.device)
            for parameter in unit.parameters:
                rows = parameter.own_grad()
                if rows is not None:
                    copies = self._copies
                    if parameter.slot.replicated:
                        copies = self._group.world_size
                    total += _squared(rows) / copies
            self._big[id(unit)] = total

    def _counts(self, unit: Unit) -> bool:
        return unit.context.routes.group is self._group

    def end_step(self) -> None:
        """The optimizer is about to step: exchange the norms. A collective."""
        world, number = self._group.world_size, self._num_reduced
        if number * world > 1 and self._big:
            device = next(iter(self._big.values())).device
            facts = [1.0 - self._is_whole, number, number**2]
            mine = torch.tensor([*facts, 0, 0], dtype=torch.float64, device=device)
            mine[3] = sum(self._small, mine.new_zeros(()))
            mine[4] = sum(self._big.values(), mine.new_zeros(()))
            torn, numbers, squares, small, big = self._group.all_reduced(mine).tolist()
            if not torn and squares * world == numbers**2:
                self._learn(number * world, small * number / world, big)
        self._forget()
        self._is_whole = False

    def _learn(self, n: int, small: float, big: float) -> None:
        """`n` small batches had the mean squared norm `small`, their mean has `big`."""
        if not big < float("inf") or not small < float("inf"):
            return  # NaN, too
        self.num_microbatches = self._num_backwards
        gradient = (n * big - small) / (n - 1)
        variance = (small - big) / (n - 1) * self._num_backwards
        decay = DECAY if self.steps else 0.0
        self._gradient = decay * self._gradient + (1 - decay) * gradient
        self._variance = decay * self._variance + (1 - decay) * variance
        self.steps += 1


def _squared(values: Tensor) -> Tensor:
    real = torch.view_as_real(values) if values.is_complex() else values
    dense = real if real.layout is torch.strided else real.to_dense()
    dtype = torch.promote_types(dense.dtype, torch.float32)
    norm = torch.linalg.vector_norm(dense.detach().reshape(-1), dtype=dtype)
    return norm.double().square()
