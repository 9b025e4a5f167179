"""The post-accumulate hooks that users register on sharded parameters, which autograd never meets.

Hooks of a parameter that modules compute with are autograd's: `engine/gradient_hooks.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.unit import dtensors


def register_first(unsharded: Tensor, hook: Callable[[Tensor], object]) -> None:
    """Have autograd call our hook before those of users: one of them may step the parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        handle = Tensor.register_post_accumulate_grad_hook(unsharded, hook)
        hooks: Any = unsharded._post_accumulate_grad_hooks
    hooks.move_to_end(handle.id, last=False)


def carry_over(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """Keep hooks that were registered before `shard`; their handles stay valid."""
    if original._post_accumulate_grad_hooks:
        sharded._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks


def note(parameter: Any) -> None:
    """Have the engine run the hooks of a `UnitParameter` at their turn, if there are some."""
    hooks, owner = parameter.sharded._post_accumulate_grad_hooks, parameter.unit.owner
    has_some = len(hooks or ()) > parameter.num_hooks
    if has_some and owner is not None and parameter.sharded is not parameter.unsharded:
        owner.note_hooked(parameter)


def call(parameter: Any) -> None:
    """Run the hooks of a `UnitParameter`."""
    for hook in list((parameter.sharded._post_accumulate_grad_hooks or {}).values()):
        is_ours = isinstance(hook, partial) and hook.func is dtensors.on_accumulated
        if not (is_ours or isinstance(hook, dtensors.DirectUse)):
            hook(parameter.sharded)


class HeldBack(dict[Any, Tensor]):
    """Reduced gradients, by `UnitParameter`, that do not show until the turn of its hooks."""

    def hold(self, parameter: Any) -> None:
        """Show no gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            grad, parameter.sharded._grad = parameter.sharded._grad, None
        if grad is not None:
            self[parameter] = grad

    def show(self, parameter: Any) -> None:
        """Show the gradient again, if it is held back."""
        if parameter in self:
            with torch._C.DisableTorchFunctionSubclass():
                parameter.sharded._grad = self.pop(parameter)
