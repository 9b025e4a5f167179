"""See from a forward whether a stage of torch.distributed.pipelining runs it, and warn.

Stages call their modules as any loop does, so only the stack shows them.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from types import FrameType

from onefold.engine.policy import Policy

STAGES = "torch.distributed.pipelining.stage"
INFERENCE = "_forward_metadata_inference"
"""The function of a stage that runs its module on memory without values, to learn shapes."""


def calling_stage() -> list[str]:
    """Return the functions of pipeline stages on this thread's stack; none outside of schedules."""
    found = list[str]()
    frame: FrameType | None = sys._getframe(1) if STAGES in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == STAGES:
            found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def warn_undriven(policy: Policy) -> None:
    """Warn once if a stage of a schedule calls a module that frees its weights after use."""
    if policy.frees_after_forward and calling_stage():
        _warn()


@cache
def _warn() -> None:
    warnings.warn(
        "a pipeline schedule runs a module that onefold.shard has sharded: its gradients are "
        "right, but every micro-batch gathers the weights twice and reduces the gradients. "
        "hint: call onefold.pipeline(schedule) before the first step",
        stacklevel=2,
    )
