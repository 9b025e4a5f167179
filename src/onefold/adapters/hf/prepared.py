"""Make a sharded module one that Accelerate takes as prepared, and leaves as it is.

Accelerate returns a module that carries `_is_accelerate_prepared` without a wrapper, and calls
`no_sync` of any module that has one for micro-batches that are not the last of a step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from weakref import ReferenceType, ref

import torch
from torch import nn

from onefold.adapters.hf.output_heads import show_heads
from onefold.api import accumulate
from onefold.engine.registry import engine_of
from onefold.errors import StateError

PREPARED = "_is_accelerate_prepared"
"""Read by `Accelerator.prepare_model`, which otherwise wraps a module."""

COMPUTE: dict[str, torch.dtype | None] = {
    "no": None,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""The dtype of a forward under autocast, by Accelerate's `mixed_precision`."""


def mark_prepared(module: nn.Module) -> nn.Module:
    """Let Accelerate use a sharded module as it is. Calling it again changes nothing.

    Accelerate's `no_sync`, `accumulate` and `backward` then work, and its `unwrap_model` returns
    this module. Accelerate leaves autocast and torch.compile out, too: whoever marks a module sees
    to them.

    Args:
        module: one that `onefold.shard` has sharded.

    Returns:
        The same module.

    Raises:
        StateError: the module is not sharded.

    Example:
        >>> mark_prepared(onefold.shard(model, stage=3))
    """
    engine_of(module)
    marks = module.__dict__
    if PREPARED not in marks:
        show_heads(module)
    marks[PREPARED] = True
    marks["no_sync"] = partial(_no_sync, ref(module))
    marks["join_hook"] = _refuse_join
    return module


def is_prepared(module: nn.Module) -> bool:
    """True if `mark_prepared` has marked the module, or Accelerate has."""
    return bool(module.__dict__.get(PREPARED))


def _refuse_join(**_: object) -> None:
    """`join_hook` of the module: `torch.distributed.algorithms.Join` and Accelerate call it."""
    raise StateError(
        "as many batches on every rank",
        "join_uneven_inputs with a sharded module, whose ranks need each other's shards",
        hint="leave join_uneven_inputs out. Accelerate makes batches even unless "
        "even_batches=False; a DataLoader has drop_last=True",
    )


def _no_sync(alive: ReferenceType[nn.Module]) -> AbstractContextManager[None]:
    module = alive()
    if module is None:
        raise StateError(
            "the sharded module to be alive in no_sync",
            "a module that was deleted",
            hint="keep the module as long as it is trained",
        )
    return accumulate(module)
