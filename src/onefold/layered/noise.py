"""The gradient noise scale: how many rows a step may average before more of them help little.

Each rank's gradient before the reduction is one of a small batch of b rows. The mean after it is
one of N b rows. Their squared norms give two unknowns (McCandlish et al., arXiv 1812.06162,
appendix A.1):

    |G|^2     = (N big - small) / (N - 1)
    tr(Sigma) = (small - big) / (1 / b - 1 / (N b))
    noise     = tr(Sigma) / |G|^2

A batch of `noise` rows makes half of the progress, step by step, of an endless one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onefold.engine.actions import Action, Verb
from onefold.engine.engine import Engine

DECAY = 0.9
"""Both parts are averaged over steps: one step's quotient is useless."""


@dataclass(slots=True)
class Noise:
    """The estimate, averaged over steps. `rows` and `num_microbatches` are those of the last one.

    `rows` counts all ranks.
    """

    gradient: float
    variance: float
    rows: int
    num_microbatches: int
    steps: int = 1

    @property
    def scale(self) -> float | None:
        """The noise scale in rows; None while the gradient drowns in noise."""
        return self.variance / self.gradient if self.gradient > 0 <= self.variance else None

    def describe(self) -> str:
        """Say what the scale means for the number of micro-batches."""
        scale = self.scale
        if scale is None:
            return "gradient noise scale: more steps are needed to estimate it"
        share = self.rows / (self.rows + scale)
        wanted = max(1, round(scale * self.num_microbatches / self.rows))
        return (
            f"gradient noise scale: {scale:,.0f} rows over {self.steps} steps; a step of "
            f"{self.rows:,} rows makes {share:.0%} of the progress of an endless one. "
            f"{wanted} micro-batches make half of it"
        )


class NoiseScale:
    """Measures one step: squared norms of gradients before and after the reduction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._small: list[torch.Tensor] = []
        self._is_first = not any(gradient.shown for gradient in engine.gradients.values())

    def watch(self, actions: Sequence[Action]) -> None:
        """Note the norm of each unit's gradients that are about to be reduced."""
        for verb, index in actions:
            if verb is Verb.REDUCE:
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    grads = [p.unsharded.grad for p in self._engine.units[index].parameters]
                    self._small += [_squared(grad) for grad in grads if grad is not None]

    def estimate(self, before: Noise | None, rows: int, number: int) -> Noise | None:
        """Return the estimate after this step. A collective.

        `before` on one rank, where gradients of earlier backwards were not cleared, and where
        backward steps units, which uses gradients up.
        """
        engine = self._engine
        world = engine.group.world_size
        if world == 1 or engine.policy.steps_in_backward:
            return before
        found = engine.group.all_gather_object(
            (self._is_first, sum(map(float, self._small)), self._own(), rows)
        )
        everyone: list[tuple[bool, float, float, int]] = found  # type: ignore[assignment]
        if not all(is_first for is_first, *_ in everyone):
            return before
        small = sum(each[1] for each in everyone) / world
        big = sum(each[2] for each in everyone)
        total = sum(each[3] for each in everyone)
        gradient = (world * big - small) / (world - 1)
        variance = (small - big) / (world / total - 1 / total)
        if before is None:
            return Noise(gradient, variance, total, number)
        return Noise(
            DECAY * before.gradient + (1 - DECAY) * gradient,
            DECAY * before.variance + (1 - DECAY) * variance,
            total, number, before.steps + 1,
        )  # fmt: skip

    def _own(self) -> float:
        """This rank's part of the squared norm of the mean."""
        context, total = self._engine.context, 0.0
        world = self._engine.group.world_size
        copies = world // context.rest_world
        for unit in self._engine.units:
            for parameter in unit.parameters:
                rows = parameter.own_grad()
                if rows is not None:
                    total += float(_squared(rows)) / (
                        world if parameter.slot.replicated else copies
                    )
        return total


def _squared(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().reshape(-1)
    return torch.linalg.vector_norm(flat, dtype=torch.float32).square()
