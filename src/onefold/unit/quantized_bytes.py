"""QuantizedBytes: what users see of a frozen weight that is stored quantized. Reading is free.

An edit of the bytes would change the weight to other numbers, in silence. So all tensors that share
these bytes (`.data`, `.detach()`, views, entries of state dicts) refuse every operation whose
schema writes. A copy of the bytes of another weight with the same layout is allowed, as
`load_state_dict` makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from onefold.compat import untraced
from onefold.unit import refusals
from onefold.unit.functions import READS, writes


class QuantizedBytes(Tensor):
    """A view of the bytes of a quantized weight, at rest, which refuses writes."""

    bytes: Tensor  # the plain tensor
    _message: tuple[int, ...]  # the shape of all own bytes
    _onefold_owner: ReferenceType[Any]

    @staticmethod
    def over_view(
        view: Tensor, message: tuple[int, ...], owner: ReferenceType[Any]
    ) -> QuantizedBytes:
        """Show `view`, a part of own bytes of shape `message`; `owner`: its `UnitParameter`."""
        shown: Any = Tensor._make_subclass(QuantizedBytes, view)
        shown.bytes, shown._message, shown._onefold_owner = view, message, owner
        return shown  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        copied = memo[id(self)] = self.bytes.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.bytes.__reduce_ex__(protocol)

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:  # torch has them of plain tensors alone
            args, kwargs = tree_map(plain_bytes, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for written in _written(func, args, kwargs):
            _refuse_mixed_bytes(written, func._schema.name.partition("::")[2], args[1:])
        shown = next(s for s in tree_iter((args, kwargs)) if isinstance(s, QuantizedBytes))
        outputs = func(*tree_map(plain_bytes, args), **tree_map(plain_bytes, kwargs))
        if any(value.alias_info is not None for value in func._schema.returns):
            return tree_map(shown._view, outputs)
        return outputs

    def _view(self, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        return QuantizedBytes.over_view(output, self._message, self._onefold_owner)


def plain_bytes(leaf: Any) -> Any:
    """The plain tensor of quantized bytes; other values as they are."""
    return leaf.bytes if isinstance(leaf, QuantizedBytes) else leaf


def refuse_edit(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `StateError` if `func` writes to a tensor that shows quantized bytes."""
    edited = (args[:1] or tuple(kwargs.values())[:1]) if writes(func) else ()  # nn.init names it
    for leaf in tree_iter((edited, kwargs.get("out"))):
        shown = getattr(leaf, "_local_tensor", leaf)
        if isinstance(shown, QuantizedBytes):
            _refuse_mixed_bytes(shown, func.__name__, args[1:], leaf.shape)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[QuantizedBytes]:
    """The quantized bytes that an operator writes to, by its schema."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_iter(value) if isinstance(leaf, QuantizedBytes))


def _refuse_mixed_bytes(
    shown: QuantizedBytes, name: str, operands: tuple[Any, ...], shape: torch.Size | None = None
) -> None:
    """Raise `StateError`, unless all bytes are copied from bytes of the same layout.

    `shape`: of all ranks' bytes, where `operands` have those.
    """
    owner = shown._onefold_owner()
    if owner is None:  # the weight is gone
        return
    if name != "copy_" or not operands or tuple(shown.shape) != shown._message:
        raise refusals.QUANTIZED_EDIT(owner.fqn, name)
    value = operands[0]
    if value.dtype != torch.uint8 or value.shape != (shown.shape if shape is None else shape):
        raise refusals.QUANTIZED_COPY(owner.fqn, f"{list(value.shape)} and {value.dtype}")
