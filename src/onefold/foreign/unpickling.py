"""Read pickles as data: nothing is called, in time and memory bounded by the number of their bytes.

A pickle is a program. This machine knows the instructions that write values, and none that calls a
class or a function: what these would build becomes a `Built`, which says how.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch

from onefold.checkpoint.agreement import believing
from onefold.errors import CheckpointError

_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 "
    "EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS "
    "EMPTY_SET ADDITEMS GLOBAL STACK_GLOBAL MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET "
    "NEWOBJ REDUCE BUILD BINPERSID"
)
_MOST_KEYS = 64
"""Numbers in a key that is a tuple. The hash of tuples in tuples can take for ever."""


@dataclass(eq=False, slots=True)
class Built:
    """An object that a pickle describes: its class or function, the arguments, and the state."""

    kind: str
    arguments: tuple[Any, ...]
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Ordered(dict[Any, Any]):
    """An OrderedDict. Its attributes, as `_metadata` of a state dict, are left out."""

    def __setstate__(self, state: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _Reference:
    """A class or a function that a pickle names."""

    name: str

    def __call__(self, *arguments: Any) -> Any:
        if self.name == "collections.OrderedDict" and not arguments:
            return _Ordered()
        return Built(self.name, arguments)


_Python: Any = pickle._Unpickler  # in Python: its memory is what it reads
_CODES = [getattr(pickle, name)[0] for name in _OPCODES.split()]


class _Machine(_Python):  # type: ignore[misc]
    def __init__(self, data: bytes, allowed: Container[str] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if self._allowed is not None and f"{module}.{name}" not in self._allowed:
            got = f"a reference to {module}.{name}, which loading does not call"
            hint = "do not trust this checkpoint"
            raise CheckpointError("a checkpoint of names, shapes and places", got, hint=hint)
        return _Reference(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return Built("storage", pid)

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self.append(kind(*arguments))

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _check_keys([key])
        self.stack[-1].update({key: value})

    def load_setitems(self) -> None:
        items = self.pop_mark()
        _check_keys(items[::2])
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def load_additems(self) -> None:
        items = self.pop_mark()
        _check_keys(items)
        self.stack[-1].update(items)

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: _Python.dispatch[code] for code in _CODES},
        pickle.NEWOBJ[0]: load_newobj,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
    }


def _check_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        parts = key[:_MOST_KEYS] if isinstance(key, tuple) else (key,)
        if any(isinstance(part, tuple) for part in parts) or len(parts) == _MOST_KEYS:
            raise ValueError("a key of tuples")


def read_pickle(data: bytes, allowed: Container[str] | None, what: str) -> Any:
    """Read the pickle at the start of `data`, which may name `allowed` classes; None: any.

    Raises `CheckpointError`: another name, or other bytes than those of `what`, a pickle.
    """
    with believing(what):
        return _Machine(data, allowed).load()


def read_object(data: bytes, name: str) -> Any:
    """Read an object that `torch.save` wrote: tensors, numbers, strings and containers."""
    what = f"{name!r} to hold tensors, numbers, strings and containers of them"
    with believing(what):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise ValueError("a compressed record")
            if sum(record.file_size for record in records) > len(data):
                raise ValueError("records that overlap")
            header = archive.getinfo("archive/data.pkl").header_offset
        lengths = struct.unpack_from("<HH", data, header + 26)  # of the record's name and padding
        check_calls(read_pickle(data[header + 30 + sum(lengths) :], None, what), 16 * len(data))
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            got = str(error).splitlines()[0]
            hint = "save plain values, for example an object's state_dict()"
            raise CheckpointError(what, got, hint=hint) from error


_MOST_DEPTH = 100
_FROM_NUMBERS = {"__builtin__.bytearray", "builtins.bytearray", "torch._utils._rebuild_qtensor"}


def check_calls(value: Any, most: int) -> None:
    """Raise `ValueError` for what takes memory or time without bytes of a file.

    These are a call that makes memory of a number, lists in lists without end, and more than `most`
    values, which lists that hold another twice, and that one another, soon are. `torch.load`
    refuses other calls of code itself.
    """
    queue = [(value, 0)]
    while queue:
        part, depth = queue.pop()
        most -= 1
        if most < 0 or depth > _MOST_DEPTH:
            raise ValueError("values in values without end")
        inside: Iterable[Any] = ()
        if isinstance(part, Built):
            is_counted = any(isinstance(argument, int) for argument in part.arguments)
            if is_counted and part.kind in _FROM_NUMBERS:
                raise ValueError(f"a {part.kind} of a length")
            inside = (part.arguments, part.state)
        elif isinstance(part, dict):
            inside = chain(part.keys(), part.values())
        elif isinstance(part, list | tuple | set):
            inside = part
        queue += [(item, depth + 1) for item in inside]
