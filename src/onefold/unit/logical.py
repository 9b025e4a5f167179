"""DTensors that read as the wholes they stand for: gradients, `.data`, what is computed from them.

torch's DTensor gives `norm.item()` of this rank's part; a plain script that logs it would log
something else on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map

from onefold.errors import StateError


class LogicalValues(DTensor):
    """A DTensor that may stand beside plain tensors, as a parameter of a plain module may."""


def needs_plain(func: Callable[..., Any], leaves: list[Any]) -> bool:
    """True where no DTensor operation is defined, as beside a plain tensor.

    In-place functions are left to DTensor, and to its error: on a copy they would do nothing.
    """
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return False
    if torch.is_inference_mode_enabled():  # where DTensor's views are not defined either
        return True
    return any(isinstance(leaf, LogicalValues) for leaf in leaves) and any(
        isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.dim() > 0
        for leaf in leaves
    )


def count_edits(func: Callable[..., Any], edited: list[Tensor]) -> None:
    """Count what `func` did to `edited` where DTensor hides it: functions of lists, in place."""
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_") and name.endswith("_"):
        increment_version(edited)


def dtensor_over(kind: type[DTensor], local: Tensor, spec: object) -> DTensor:
    """A `kind` of DTensor over `local` with the placement and logical shape of `spec`.

    Not through the constructor, whose compiler guard costs more than everything else here; and made
    over a stand-in, since a wrapper that inherits its local tensor's offset into a flat buffer
    looks to `copy.deepcopy` as if it had a storage of its own.
    """
    shown = kind.__new__(kind, local.new_empty(0), spec, requires_grad=False)  # type: ignore[call-arg]
    shown._local_tensor = local
    return shown


_READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__bool__,
    Tensor.__index__, Tensor.__complex__, Tensor.__format__, Tensor.__array__,
}  # fmt: skip


class LogicalTensor(LogicalValues):
    """A gradient, or what was computed from faces and gradients: a DTensor that reads as a whole.

    A read of a number completes the value first: a collective, as all of DTensor's operations.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            leaves = list(tree_iter((args, kwargs)))
            _await_readers(leaves)
            if func in _READS or needs_plain(func, leaves):
                plain_args, plain_kwargs = tree_map(
                    lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf,
                    (args, kwargs),
                )
                return func(*plain_args, **plain_kwargs)
            return as_logical(func(*args, **kwargs))


def as_logical(outputs: Any) -> Any:
    """DTensors among the outputs of one operation, as ones that read as a whole."""
    for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
        if type(output) is DTensor:
            output.__class__ = LogicalTensor
    return outputs


class ShownData(LogicalTensor):
    """`.data` of a sharded parameter: its edits are counted, and looks at it are not."""

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        copied = memo[id(self)] = dtensor_over(DTensor, self._local_tensor.clone(), self._spec)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dtensor_over(DTensor, self._local_tensor, self._spec).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        outputs = super().__torch_function__(func, types, args, kwargs)
        count_edits(func, [leaf for leaf in tree_iter(args[:1]) if isinstance(leaf, ShownData)])
        return outputs


class RestingGrad(Tensor):
    """A gradient that rests whole, and may be read by a step in the background."""

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        copied = memo[id(self)] = self.clone().as_subclass(Tensor)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().as_subclass(Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            _await_readers(tree_iter((args, kwargs)))
            return func(*args, **(kwargs or {}))


def _await_readers(leaves: Iterable[Any]) -> None:
    """Wait for background steps that still read a gradient which somebody wants to use."""
    for leaf in leaves:
        if isinstance(leaf, LogicalTensor | RestingGrad):
            summoner = getattr(leaf, "_summoner", None)
            alive = summoner() if summoner is not None else None
            if alive is not None:
                alive.settle()


class NoMean(Tensor):
    """What stands for a gradient while there is none to read: it may be cleared, and looked for.

    Any use of its value raises `StateError`.
    """

    _why: str

    @staticmethod
    def like(face: Tensor, why: str) -> NoMean:
        """For `face.grad`, of which `why` tells whoever uses it."""
        with torch._C.DisableTorchFunctionSubclass():
            made = torch.empty((), dtype=face.dtype, device=face.device).expand(face.shape)
            shown = made.as_subclass(NoMean)
        shown._why = why
        return shown

    def refuse(self, *_: object, **__: object) -> None:
        """Raise `StateError`."""
        raise StateError(self._why)

    to_local = full_tensor = redistribute = refuse  # of the DTensor that it stands for

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        raise StateError(self._why)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(self._why)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_ITS_KIND:
                return func(*args, **(kwargs or {}))
            found = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, NoMean)]
            if func is Tensor.__repr__:
                return f"NoMean(shape={list(found[0].shape)})"
            raise StateError(found[0]._why)


_OF_ITS_KIND = {
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__, Tensor.grad_fn.__get__, Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.__hash__, torch.is_tensor,
}  # fmt: skip
"""What asks a tensor for something else than its value."""
