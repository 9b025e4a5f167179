"""Shard a model that is not trained: a reference, reward or teacher model."""

from __future__ import annotations

from typing import Any

from torch import nn

from onefold.adapters.hf.conflicts import refuse_device_map
from onefold.adapters.hf.prepared import mark_prepared
from onefold.api import shard


def adopt_frozen(model: nn.Module, **shard_arguments: Any) -> nn.Module:
    """Shard a model for evaluation alone, in place. A collective.

    Accelerate and TRL then use the module as it is, instead of a copy on every rank. Pass it where
    a trainer takes `ref_model` or `teacher_model`.

    Args:
        model: a plain module. Its parameters stop requiring gradients, and it is set to `eval()`.
        shard_arguments: those of `onefold.shard`; the stage is 3 by default.

    Returns:
        The same module.

    Raises:
        ConfigError: the model cannot be sharded, as it is spread over devices already.

    Example:
        >>> reference = onefold.hf.adopt_frozen(AutoModelForCausalLM.from_pretrained(name))
        >>> trainer = DPOTrainer(model, ref_model=reference, args=args, train_dataset=pairs)
    """
    refuse_device_map(model)
    model.eval().requires_grad_(False)
    return mark_prepared(shard(model, None, **shard_arguments))
