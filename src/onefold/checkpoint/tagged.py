"""Python values as JSON that gives them back in their types, and tensors by name.

    (1, 2.5)   {"!tuple": [1, 2.5]}         {1: "a"}   {"!dict": [[1, "a"]]}
    nan        {"!float": "nan"}            a tensor   {"!tensor": "rank.0.7"}

Other values have no tag: `onefold.save` refuses them, so reading runs no code.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onefold.errors import CheckpointError

_TAG = "!"
_HINT = "pass tensors, numbers, strings, lists, dicts, or objects with state_dict()"

_LISTS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "Size": torch.Size}
_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict, "OrderedDict": OrderedDict, "Counter": lambda pairs: Counter(dict(pairs)),
}  # fmt: skip
_LIST_NAMES = {tuple: "tuple", set: "set", torch.Size: "Size"}
_DICT_NAMES = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}


def tagged(value: Any, where: str, name_of: Callable[[Tensor], str]) -> Any:
    """Return a value for JSON. `name_of` saves a tensor, and returns its name.

    Raises `CheckpointError` for a value of another type, with its place `where`.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [tagged(v, f"{where}[{i}]", name_of) for i, v in enumerate(value)]
    if kind is dict and all(type(key) is str and key[:1] != _TAG for key in value):
        return {key: tagged(v, f"{where}[{key!r}]", name_of) for key, v in value.items()}
    if kind in _LIST_NAMES:
        items = [tagged(v, f"{where}[{i}]", name_of) for i, v in enumerate(value)]
        return {_TAG + _LIST_NAMES[kind]: items}
    if kind in _DICT_NAMES:
        pairs = [
            [tagged(key, f"a key of {where}", name_of), tagged(v, f"{where}[{key!r}]", name_of)]
            for key, v in value.items()
        ]
        return {_TAG + _DICT_NAMES[kind]: pairs}
    return _tagged_leaf(value, where, name_of)


def _tagged_leaf(value: Any, where: str, name_of: Callable[[Tensor], str]) -> Any:
    kind = type(value)
    if kind is float:
        return {"!float": repr(value)}
    if kind is complex:
        return {"!complex": repr(value)}
    if kind in (bytes, bytearray):
        held = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0)
        return {_TAG + kind.__name__: name_of(held)}
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return {_TAG + kind.__name__: str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"!device": str(value)}
    if kind is nn.Parameter:
        return {"!parameter": [name_of(value), value.requires_grad]}
    if isinstance(value, Tensor) and not _is_made_of_others(value):
        return {"!tensor": name_of(value)}
    wanted = f"{where.partition('[')[0]!r} to hold plain values"
    raise CheckpointError(wanted, f"a {kind.__name__} in {where}", hint=_HINT)


def _is_made_of_others(tensor: Tensor) -> bool:
    """True for a tensor whose elements do not lie one after the other in one memory."""
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized
    return is_traceable_wrapper_subclass(tensor) or not is_plain or tensor.is_meta


def untagged(value: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """Return the value that `tagged` was given. `tensor_of` reads a tensor by name.

    Raises an error for any other JSON.
    """
    if isinstance(value, list):
        return [untagged(item, tensor_of) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key[:1] == _TAG), None)
    if tag is None:
        return {key: untagged(item, tensor_of) for key, item in value.items()}
    ((_, inside),) = value.items()
    name = tag[1:]
    if name in _LISTS:
        return _LISTS[name]([untagged(item, tensor_of) for item in inside])
    if name in _DICTS:
        pairs = [(untagged(key, tensor_of), untagged(item, tensor_of)) for key, item in inside]
        return _DICTS[name](pairs)
    return _LEAVES[name](inside, tensor_of)


def _torch_object(name: str, kind: type) -> Any:
    found = getattr(torch, name)
    if type(found) is not kind:
        raise TypeError(f"{name[:80]!r} as a {kind.__name__}")
    return found


def _parameter(inside: Any, tensor_of: Callable[[str], Tensor]) -> nn.Parameter:
    name, requires_grad = inside
    return nn.Parameter(tensor_of(name), requires_grad=requires_grad is True)


_LEAVES: dict[str, Callable[[Any, Callable[[str], Tensor]], Any]] = {
    "float": lambda text, _: float(text),
    "complex": lambda text, _: complex(text),
    "bytes": lambda name, tensor_of: bytes(tensor_of(name).numpy().tobytes()),
    "bytearray": lambda name, tensor_of: bytearray(tensor_of(name).numpy().tobytes()),
    "dtype": lambda name, _: _torch_object(name, torch.dtype),
    "layout": lambda name, _: _torch_object(name, torch.layout),
    "memory_format": lambda name, _: _torch_object(name, torch.memory_format),
    "device": lambda text, _: torch.device(text),
    "parameter": _parameter,
    "tensor": lambda name, tensor_of: tensor_of(name),
}
