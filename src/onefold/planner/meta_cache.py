"""What operations make of their arguments on `meta`, which is the same each time they are asked.

A model repeats its blocks, so all but the first few of its operations have been seen before, with
the same shapes. torch derives a shape anew each time, in Python, and that is most of a trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Key = tuple[Any, ...]

_TENSORS = (Tensor, nn.Parameter)
_PLAIN = (
    bool, int, float, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class Like(NamedTuple):
    """A tensor that has its storage to itself."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> Tensor:
        """A new one."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class MetaCache(Generic[T]):
    """By operation and arguments: what came out, and a note of the caller's."""

    def __init__(self) -> None:
        self._found: dict[Key, tuple[tuple[Like, ...], bool, T]] = {}

    def recall(self, key: Key) -> tuple[Any, T] | None:
        """The same again: what the operation gives, in new tensors, and the note."""
        found = self._found.get(key)
        if found is None:
            return None
        likes, is_one, note = found
        made = tuple(like.made() for like in likes)
        return made[0] if is_one else made, note

    def note(self, key: Key, given: set[int], out: Any, note: T) -> None:
        """Keep what came out, unless it lies in storages that were `given` or are shared."""
        is_one = isinstance(out, Tensor)
        outs = (out,) if is_one else out
        if type(outs) is not tuple:
            return
        likes = tuple(_like(tensor) for tensor in outs if _is_whole(tensor))
        storages = {tensor.untyped_storage()._cdata for tensor in outs if _is_whole(tensor)}
        if len(likes) == len(outs) == len(storages - given):
            self._found[key] = likes, is_one, note


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    """What the result depends on; None where that is more than shapes and plain values."""
    key = _described(args)
    if key is None or not kwargs:
        return None if key is None else (func, key)
    named = _described(kwargs.values())
    return None if named is None else (func, key, *kwargs, named)


def _described(values: Iterable[Any]) -> Key | None:
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _TENSORS:
            if not _is_plain(value):
                return None
            parts.append((tuple(value.shape), value.stride(), value.storage_offset(), value.dtype))
        elif kind in _PLAIN:
            parts.append((kind, value))  # 1, 1.0 and True are equal, and not the same
        elif kind in (tuple, list):
            inner = _described(value)
            if inner is None:
                return None
            parts.append((kind, inner))
        else:
            return None
    return tuple(parts)


def _is_plain(tensor: Tensor) -> bool:
    """True if shape, strides and dtype say all there is to say."""
    return (
        tensor.is_meta
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _is_whole(value: object) -> bool:
    """True for a plain tensor whose storage has the length that its shape and strides ask for."""
    if type(value) is not Tensor or not _is_plain(value) or value.storage_offset() != 0:
        return False
    return _like(value).made().untyped_storage().nbytes() == value.untyped_storage().nbytes()


def _like(tensor: Tensor) -> Like:
    return Like(tuple(tensor.shape), tensor.stride(), tensor.dtype)
