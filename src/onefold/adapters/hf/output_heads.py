"""Let code outside an output head use its weight, as fused losses do.

TRL passes `model.get_output_embeddings().weight` to an autograd function of its own. A sharded
parameter is a DTensor, of which TRL takes `full_tensor()`. A replicated one has no such mark, and
autograd would leave its gradient where no reduction finds it: so the head shows a view of the
parameter that computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from onefold.unit.dtensors import ReplicatedParameter


def show_heads(module: nn.Module) -> None:
    """Prepare every language model in `module` whose head is replicated, before its forward."""
    for part in module.modules():
        find: Callable[[], Any] | None = getattr(part, "get_output_embeddings", None)
        is_own = callable(getattr(type(part), "get_output_embeddings", None))
        head = find() if is_own and find is not None else None
        if isinstance(head, nn.Module) and _is_replicated(head):
            shown = _ShownHead(ref(head))
            part.register_forward_pre_hook(shown.show)
            part.register_forward_hook(shown.hide, always_call=True)


def _is_replicated(head: nn.Module) -> bool:
    return isinstance(head._parameters.get("weight"), ReplicatedParameter)


class _ShownHead:
    """Shows the weight of one head by an attribute that comes before the module's parameter."""

    def __init__(self, head: ReferenceType[nn.Module]) -> None:
        self._head = head

    def show(self, *_: object) -> None:
        head = self._head()
        if head is not None and torch.is_grad_enabled() and _is_replicated(head):
            weight: Any = head._parameters["weight"]
            if weight.requires_grad:
                head.__dict__["weight"] = weight.view_as(weight)

    def hide(self, *_: object) -> None:
        head = self._head()
        if head is not None:
            head.__dict__.pop("weight", None)
