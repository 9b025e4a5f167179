"""Warn where a pipeline schedule runs a sharded module without `onefold.pipeline`."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from types import FrameType

from onefold.engine.policy import Policy

STAGES = "torch.distributed.pipelining.stage"


def warn_undriven(policy: Policy) -> None:
    """Warn once if a stage of a schedule calls the module that frees its weights after use."""
    if STAGES in sys.modules and policy.frees_after_forward:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__") == STAGES:
                _warn()
                return
            frame = frame.f_back


@cache
def _warn() -> None:
    warnings.warn(
        "a pipeline schedule runs a module that onefold.shard has sharded: its gradients are "
        "right, but every micro-batch gathers the weights twice and reduces the gradients. "
        "hint: call onefold.pipeline(schedule) before the first step",
        stacklevel=2,
    )
