"""What `parameter.grad` shows where it is neither a plain tensor for all uses, nor a DTensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from onefold.compat import untraced
from onefold.errors import StateError
from onefold.unit import whole


class RestingGrad(Tensor):
    """A gradient [all rows] that a step in the background may still read.

    Its rows may be on the device that computes while its parameter rests in CPU memory or on disk:
    torch refuses such a gradient, so it is shown as one of the parameter's device.
    """

    awaits_readers = True
    full_tensor, to_local = whole.full_tensor, whole.to_local
    _elsewhere: Tensor | None = None
    """The values, where they are not its own."""

    @staticmethod
    def showing(values: Tensor, sharded: Tensor) -> RestingGrad:
        """Show `values` as a gradient of the parameter `sharded`."""
        with torch._C.DisableTorchFunctionSubclass():
            if values.device == sharded.device:
                return values.as_subclass(RestingGrad)
            empty = torch.empty((), dtype=values.dtype, device=sharded.device)
            shown = empty.expand(values.shape).as_subclass(RestingGrad)
        shown._elsewhere = values
        return shown

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        copied = memo[id(self)] = whole.shown(self.clone().as_subclass(Tensor))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().as_subclass(Tensor).__reduce_ex__(protocol)

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            await_readers(tree_iter((args, kwargs)))
            args, kwargs = tree_map(values_of, (args, kwargs or {}))
            return func(*args, **kwargs)


def values_of(leaf: Any) -> Any:
    """The values of a `RestingGrad` whose parameter rests elsewhere; anything else as it is."""
    values = leaf._elsewhere if isinstance(leaf, RestingGrad) else None
    return leaf if values is None else values


def await_readers(leaves: Iterable[Any]) -> None:
    """Wait for background steps that still read these gradients, or write to these weights.

    And for copies that still read these weights.
    """
    for leaf in leaves:
        if getattr(type(leaf), "awaits_readers", False):
            owner = getattr(leaf, "_onefold_owner", None)
            alive = owner() if owner is not None else None
            if alive is not None:
                are_weights = getattr(type(leaf), "shows_weights", False)
                alive.unit.wait_step() if are_weights else alive.unit.join_step(raises=True)


class NoMean(Tensor):
    """Stands for a gradient that cannot be read. It may be cleared and tested for None.

    Any use of its value raises `StateError`.
    """

    _why: Callable[[], StateError]

    @staticmethod
    def like(sharded: Tensor, why: Callable[[], StateError]) -> NoMean:
        """A stand-in for the gradient of `sharded`; a use raises the message `why`."""
        with torch._C.DisableTorchFunctionSubclass():
            empty = torch.empty((), dtype=sharded.dtype, device=sharded.device)
            shown = empty.expand(sharded.shape).as_subclass(NoMean)
        shown._why = why
        return shown

    def refuse(self, *_: object, **__: object) -> None:
        """Raise `StateError`."""
        raise self._why()

    to_local = full_tensor = redistribute = refuse  # of the DTensor that it replaces

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        raise self._why()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._why()

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_ITS_KIND:
                return func(*args, **(kwargs or {}))
            stand_in = next(x for x in tree_iter((args, kwargs)) if isinstance(x, NoMean))
            if func is Tensor.__repr__:
                return f"NoMean(shape={list(stand_in.shape)})"
            raise stand_in._why()


_OF_ITS_KIND = {
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__, Tensor.grad_fn.__get__, Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.__hash__, torch.is_tensor,
}  # fmt: skip
"""Functions that do not read a tensor's value."""
