"""The pipeline that a module is a stage of; see from a forward whether an unknown one runs it.

Stages call their modules as any loop does, so only the stack shows them.
"""

import sys
import warnings
from collections.abc import Iterator, MutableMapping, MutableSet
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from onefold.engine.policy import Policy
from onefold.wire.collectives import Group

STAGES = "torch.distributed.pipelining.stage"
SCHEDULES = "torch.distributed.pipelining.schedules"
PIPELINE = "_onefold_pipeline"
"""The attribute of a schedule that `onefold.pipeline` drives."""

TIE = "_onefold_tie"
"""The attribute of a sharded parameter that several stages of a pipeline hold: a `TiedCopy`."""


@dataclass(frozen=True, slots=True)
class TiedCopy:
    """One copy of a weight that stages share. `key`: the same for all copies."""

    key: str
    is_copy: bool  # False: the first one


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """The pipeline axis, and how many stages this rank has in it.

    Attributes:
        engines: those of this rank's stages, also of stages without parameters; each knows this.
        places: the ranks of the axis and their stages, in words.
        steppers: the ranks with parameters, whose optimizers step together.
        scalers: these, and the rank of the last stage, whose loss is scaled.
        rounds: True if some stage quantizes gradients.
        verdicts: True where gradients are finite: for optimizers that step after the first one.
    """

    group: Group
    num_stages: int
    engines: MutableSet[Any] = field(default_factory=WeakSet)
    places: str = ""
    steppers: Group | None = None
    scalers: Group | None = None
    rounds: bool = False
    verdicts: MutableMapping[object, bool] = field(default_factory=WeakKeyDictionary)

    @property
    def has_parts(self) -> bool:
        """True if a stage is not the whole model."""
        return self.group.world_size > 1 or self.num_stages > 1


def calling_stage() -> list[str]:
    """Return the functions of pipeline stages on this thread's stack; none outside of schedules."""
    return [frame.f_code.co_name for frame in _frames()]


def calling_pipelines() -> list[Pipeline]:
    """Return the pipelines whose schedules are on this thread's stack, as they compute a loss."""
    schedules = (frame.f_locals.get("self") for frame in _frames(SCHEDULES))
    found = (getattr(schedule, PIPELINE, None) for schedule in schedules)
    return [pipeline for pipeline in found if isinstance(pipeline, Pipeline)]


def _frames(module: str = STAGES) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1) if module in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            yield frame
        frame = frame.f_back


def warn_undriven(policy: Policy) -> bool:
    """Warn once if a stage of a schedule calls a module that frees its weights after use.

    Returns True if a schedule over several ranks runs.
    """
    if policy.frees_after_forward and calling_stage():
        _warn()
    return any(getattr(f.f_locals.get("self"), "group_size", 1) > 1 for f in _frames())


@cache
def _warn() -> None:
    warnings.warn(
        "a pipeline schedule runs a module that onefold.shard has sharded: its gradients are "
        "right, but every micro-batch gathers the weights twice and reduces the gradients. "
        "hint: call onefold.pipeline(schedule) before the first step",
        stacklevel=2,
    )
