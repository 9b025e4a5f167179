"""`full_tensor()` and `to_local()` of tensors with all rows: in one process, and at stage 0.

A script that calls them on sharded parameters and gradients of many ranks runs on one rank, too.

A parameter of one process keeps its class, because torch's optimizers and `torch.compile` ask for
it: it gets both as attributes, once. Autograd makes other gradients in each backward. Attributes
would go into their copies and files, and would keep them in a cycle. So their class changes.
See docs/adr/0004.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _foreach_utils

from onefold.wire.collectives import Group


def full_tensor(tensor: Tensor, **_: object) -> Tensor:
    """A copy, as of a shard: later steps do not change it. Gradients flow back to `tensor`.

    It ignores the options of `DTensor.full_tensor`, which say how ranks add up gradients.
    """
    return tensor.clone()


def to_local(tensor: Tensor, **_: object) -> Tensor:
    """All rows, in the memory of `tensor`; see `full_tensor`."""
    is_recorded = torch.is_grad_enabled() and tensor.requires_grad
    return tensor.view_as(tensor) if is_recorded else tensor.detach()


class WholeGrad(Tensor):
    """A gradient with all rows: a plain tensor but for the two methods."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    full_tensor, to_local = full_tensor, to_local

    def _plain_grad(self) -> Tensor:
        return self.as_subclass(Tensor)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return self._plain_grad().__repr__(**options)

    def __format__(self, spec: str) -> str:
        return self._plain_grad().__format__(spec)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        copied: Any = self.detach().clone()
        memo[id(self)], copied.__class__ = copied, type(self)
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain_grad().__reduce_ex__(protocol)


class PartialGrad(WholeGrad):
    """This rank's part of a mean over several ranks."""

    _group: Group

    def full_tensor(self, **_: object) -> Tensor:
        """The mean over the ranks as they are now; a collective."""
        return self._group.all_reduced(self.detach()).div_(self._group.world_size)


PLAIN = Tensor, WholeGrad
"""Classes of gradients with memory of their own; that of a user's subclass is not asked for."""

# torch clips a list of gradients by one operation for each list where it knows their class
getattr(_foreach_utils, "_foreach_supported_types", []).extend([WholeGrad, PartialGrad])


def shown(grad: Tensor) -> Tensor:
    """Give a plain gradient the two methods; it stays the same object."""
    if type(grad) is Tensor:
        grad.__class__ = WholeGrad
    return grad


def shown_partial(grad: Tensor, group: Group) -> Tensor:
    """Give this rank's part of a gradient the two methods; it stays the same object."""
    if group.world_size == 1 or type(grad) is not Tensor:
        return shown(grad)
    grad.__class__ = PartialGrad
    setattr(grad, "_group", group)  # noqa: B010 - torch declares no such attribute
    return grad


def introduce(parameter: nn.Parameter, owner: Callable[[], Any]) -> None:
    """Give a parameter its owner and the two methods; it keeps its class."""
    setattr(parameter, "_onefold_owner", owner)  # noqa: B010 - torch declares no such attribute
    for method in (full_tensor, to_local):
        setattr(parameter, method.__name__, partial(_of, ref(parameter), method))


def _of(parameter: Any, method: Any, **options: Any) -> Tensor:
    """Outside of forwards the weight at rest, as of a shard, and not the copy that computes."""
    tensor = parameter()
    owner = tensor._onefold_owner()
    if owner is None or owner.unit.is_in_forward:
        used: Tensor = method(tensor, **options)
        return used
    owner.unit.wait_step()
    with torch._C.DisableTorchFunctionSubclass():
        resting: Tensor = method(tensor.detach(), **options)
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return resting
    used = method(tensor, **options)  # a gradient finds its way back through it
    return used if used.dtype == resting.dtype else resting + (used - used.detach())
