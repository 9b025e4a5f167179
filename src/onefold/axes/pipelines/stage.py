"""A stage of torch.distributed.pipelining that tells its driver what the schedule does.

Single-stage schedules (GPipe, 1F1B) have no actions to register functions for. They and all others
call methods of their stages, which subclasses override. So a stage object becomes one of a subclass
of its own class. No class of torch is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

from onefold.axes.pipelines.driver import StageDriver


class Steps(Protocol):
    """What a rank does around the steps of all its stages."""

    def begin(self) -> None:
        """A step with backwards starts on a stage."""
        ...

    def end(self, driver: StageDriver, scale: Callable[[], None], *, is_reduced: bool) -> None:
        """A stage's last backward is over; call `scale` once its reductions are over, too."""
        ...


def drive(stage: Any, driver: StageDriver, steps: Steps, *, gathers: bool) -> None:
    """Let `driver` follow a `PipelineStage`, whose class becomes a subclass of its own.

    `gathers`: the start of a step gathers; else a function that is registered does.
    """
    stage.__class__ = _driven(type(stage))
    stage._onefold = driver, steps, gathers


def is_driven(stage: Any) -> bool:
    """True if `drive` was called on the stage."""
    return "_onefold" in vars(stage)


@cache
def _driven(kind: Any) -> Any:
    class DrivenStage(kind):
        """A stage that reports steps, backwards and the reduction to a `StageDriver`."""

        _onefold: tuple[StageDriver, Steps, bool]

        def clear_runtime_states(self) -> None:
            """The schedule's step starts."""
            super().clear_runtime_states()
            driver, steps, gathers = self._onefold
            if self.has_backward:
                steps.begin()
            driver.begin(trains=self.has_backward)
            if gathers:
                driver.gather()

        def backward_maybe_with_nosync(
            self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
        ) -> Any:
            """Run one backward of one micro-batch: "full", "input" or "weight"."""
            driver, _, _ = self._onefold
            with driver.backward() if backward_type == "full" else driver.split():
                return super().backward_maybe_with_nosync(
                    backward_type, bwd_kwargs, last_backward=last_backward
                )

        def perform_reduce_grad(self, grad_scale_factor: int) -> None:
            """All backwards of the stage are over: reduce; scale once that is done."""
            driver, steps, _ = self._onefold
            is_reduced = driver.end(reduces=self.has_backward)
            if self.has_backward:  # torch would scale gradients of an earlier step in `eval`
                scale = partial(super().perform_reduce_grad, grad_scale_factor)
                steps.end(driver, scale, is_reduced=is_reduced)

    return DrivenStage
