"""Make a sharded module one that Accelerate and TRL take as it is, without a wrapper of their own.

Accelerate returns a module that carries `_is_accelerate_prepared` unchanged, and calls `no_sync` of
any module that has one for micro-batches that are not the last of a step. It then leaves autocast
out, which `run_under_autocast` does in its place.

TRL passes `model.get_output_embeddings().weight` to an autograd function of its own. A sharded
parameter is a DTensor, of which TRL takes `full_tensor()`. A replicated one has no such mark, and
autograd would leave its gradient where no reduction finds it: so the head shows a view of the
parameter that computes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from onefold.adapters.hf.conflicts import refuse_device_map
from onefold.api import accumulate, shard
from onefold.engine.registry import engine_of
from onefold.errors import StateError
from onefold.unit.dtensors import ReplicatedParameter

PREPARED = "_is_accelerate_prepared"
"""Read by `Accelerator.prepare_model`, which otherwise wraps a module."""


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


def mark_prepared(module: nn.Module) -> nn.Module:
    """Let Accelerate use a sharded module as it is. Calling it again changes nothing.

    Accelerate's `no_sync`, `accumulate` and `backward` then work, and its `unwrap_model` returns
    this module. Raises `StateError` for a module that is not sharded.
    """
    engine_of(module)
    marks = module.__dict__
    if PREPARED not in marks:
        _show_heads(module)
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
        wanted = "the sharded module to be alive in no_sync"
        hint = "keep the module as long as it is trained"
        raise StateError(wanted, "a module that was deleted", hint=hint)
    return accumulate(module)


# autocast


class _Autocast:
    """Enters autocast before each forward of one module, and leaves it with fp32 outputs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._make = partial(torch.autocast, *arguments, **options)
        self._open: list[AbstractContextManager[Any]] = []  # of forwards inside one another

    def enter(self, *_: object) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def leave(self, *_: object) -> None:
        if self._open:  # empty where an earlier hook of this forward has raised
            self._open.pop().__exit__(None, None, None)


def run_under_autocast(
    module: nn.Module, device_type: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Compute the module's forward under `torch.autocast(..., **options)`; its outputs are fp32."""
    autocast = _Autocast(device_type, dtype, **options)
    module.register_forward_pre_hook(autocast.enter)
    module.register_forward_hook(autocast.leave, always_call=True)
    cast_outputs(module)


def cast_outputs(module: nn.Module) -> None:
    """Cast the module's outputs to fp32, as Accelerate does where it computes in a narrower one."""
    from accelerate.utils import convert_to_fp32

    module.register_forward_hook(lambda _module, _args, outputs: convert_to_fp32(outputs))


# output heads


def _show_heads(module: nn.Module) -> None:
    """Prepare every language model in `module` whose head is replicated, before its forward."""
    for part in module.modules():
        find: Any = getattr(type(part), "get_output_embeddings", None)
        head = find(part) if callable(find) else None
        if isinstance(head, nn.Module) and _is_replicated(head):
            part.register_forward_pre_hook(partial(_show_weight, ref(head)))
            part.register_forward_hook(partial(_hide_weight, ref(head)), always_call=True)


def _is_replicated(head: nn.Module) -> bool:
    return isinstance(head._parameters.get("weight"), ReplicatedParameter)


def _show_weight(alive: ReferenceType[nn.Module], *_: object) -> None:
    """Show the weight by an attribute of the head that comes before its parameter."""
    head = alive()
    if head is not None and torch.is_grad_enabled() and _is_replicated(head):
        weight: Any = head._parameters["weight"]
        if weight.requires_grad:
            head.__dict__["weight"] = weight.view_as(weight)


def _hide_weight(alive: ReferenceType[nn.Module], *_: object) -> None:
    head = alive()
    if head is not None:
        head.__dict__.pop("weight", None)
