"""Files of `torch.save`, as values and places of tensors: no code runs, and no tensor is read.

A file is a zip archive: `data.pkl` has the values, and each storage is a record without packing.
What the pickle would build becomes plain values; classes that are not known stay `Unread`.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from onefold.checkpoint.agreement import believing
from onefold.checkpoint.checked_files import nbytes_of
from onefold.checkpoint.listing import Extents
from onefold.errors import CheckpointError
from onefold.foreign.archives import STORAGES, extent_of
from onefold.foreign.metadata import sizes_of
from onefold.foreign.unpickling import Built, check_calls, read_pickle

HINT = "save it with torch.save of torch 1.6 or newer, or download it again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `start`: the byte of its first element; strides in elements."""

    dtype: torch.dtype
    sizes: Extents
    strides: Extents
    start: int


@dataclass(frozen=True, slots=True)
class StoredShard:
    """This rank's rows of a DTensor, cut along `dim` as torch.chunk cuts; None: all of it."""

    local: StoredTensor
    shape: Extents
    dim: int | None


@dataclass(frozen=True, slots=True)
class Unread:
    """An object of a class that is not read."""

    kind: str


def read_archive(path: Path, classes: Set[str] | None = None) -> Any:
    """Return what a file of `torch.save` holds: values, with a `StoredTensor` for each tensor.

    `classes`: those that it may name besides what is known here. They stay `Built`, and another one
    is an error; None: any, as `Unread`.

    Raises: CheckpointError: another file, a packed or damaged one, tensors outside of their bytes.
    """
    what = f"file {path.name!r} to be one that torch.save wrote"
    with believing(what):
        nbytes = nbytes_of(path)
    if not zipfile.is_zipfile(path):
        raise CheckpointError(what, "other bytes, or those of an older torch", hint=HINT)
    with believing(what), zipfile.ZipFile(path) as archive, path.open("rb") as file:
        records = {record.filename: record for record in archive.infolist()}
        if any(record.compress_type != zipfile.ZIP_STORED for record in records.values()):
            raise ValueError("a compressed record")
        if sum(record.file_size for record in records.values()) > nbytes:
            raise ValueError("records that overlap")
        (pickled,) = [name for name in records if name.endswith("/data.pkl")]
        folder = pickled.removesuffix("data.pkl")
        places: dict[str, tuple[int, int]] = {}
        for name, record in records.items():
            file.seek(record.header_offset + 26)
            lengths = struct.unpack("<HH", file.read(4))
            start = record.header_offset + 30 + sum(lengths)
            if start + record.file_size > nbytes:
                raise ValueError(f"record {name!r} behind the end")
            places[name] = start, record.file_size
        data = archive.read(pickled)
        value = read_pickle(data, None if classes is None else classes | _KNOWN, what)
        check_calls(value, 16 * len(data))
        return _Plain(folder, places, classes or set()).plain(value)


@dataclass(frozen=True, slots=True)
class _Plain:
    """Turns what a pickle describes into values. `places`: first byte and length of records."""

    folder: str
    places: Mapping[str, tuple[int, int]]
    classes: Set[str]

    def plain(self, value: Any) -> Any:
        """Return a value, and all inside of it, without anything that is built."""
        if isinstance(value, dict):
            return {self.plain(key): self.plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple | set):
            return type(value)(map(self.plain, value))
        if not isinstance(value, Built):
            return value
        if value.kind in self.classes:
            return Built(value.kind, self.plain(value.arguments), self.plain(value.state))
        build = _BUILDERS.get(value.kind)
        return Unread(value.kind) if build is None else build(self, value)

    def tensor(self, value: Built) -> StoredTensor:
        storage, first, sizes, strides, *_ = value.arguments
        _, kind, key, _, numel = storage.arguments
        start, nbytes = self.places[f"{self.folder}data/{key}"]
        dtype = STORAGES[kind.name]
        sizes, strides = sizes_of(sizes), sizes_of(strides)
        end = (first + extent_of(sizes, strides)) * dtype.itemsize
        if first < 0 or end > nbytes or numel * dtype.itemsize > nbytes:
            raise ValueError(f"{nbytes} bytes for a tensor of {list(sizes)}")
        return StoredTensor(dtype, sizes, strides, start + first * dtype.itemsize)

    def shard(self, value: Built) -> Any:
        """Return a shard of a DTensor on a mesh of one axis; of Tensor itself, a tensor."""
        function, kind, arguments, state = value.arguments
        if kind.name == "torch.Tensor":  # with attributes, which are left out
            return self.plain(Built(function.name, arguments))
        if kind.name != "torch.distributed.tensor.DTensor":
            return Unread(kind.name)
        inside = state[1]
        cuts = inside["_spec"].state["placements"]
        words = [each.kind.rpartition(".")[2] for each in cuts]
        if words not in (["Shard"], ["Replicate"]):
            raise ValueError(f"a DTensor with placements {words}")
        dim = cuts[0].state["dim"] if words == ["Shard"] else None
        return StoredShard(self.plain(inside["_local_tensor"]), sizes_of(arguments[2]), dim)

    def parameter(self, value: Built) -> Any:
        return self.plain(value.arguments[0])

    def ordered(self, value: Built) -> Any:
        items = self.plain(value.arguments[0]) if value.arguments else {}
        return dict(items)

    def encoded(self, value: Built) -> bytes:
        text, encoding = value.arguments
        return str(text).encode(str(encoding))

    def array(self, value: Built) -> Any:
        """Return a numpy array as a list: generators take one."""
        _, shape, dtype, _, data = value.state
        raw = self.plain(data)
        words = dtype.arguments[0] if isinstance(dtype, Built) else dtype
        if not isinstance(raw, bytes) or str(words)[:1] not in "?biufc":
            return Unread("numpy.ndarray of objects")
        found = numpy.frombuffer(raw, dtype=numpy.dtype(str(words)))
        return found.reshape(sizes_of(tuple(shape))).tolist()

    def size(self, value: Built) -> Any:
        return sizes_of(value.arguments[0])


_BUILDERS: dict[str, Callable[[_Plain, Built], Any]] = {
    "torch._utils._rebuild_tensor_v2": _Plain.tensor,
    "torch._utils._rebuild_parameter": _Plain.parameter,
    "torch._tensor._rebuild_from_type_v2": _Plain.shard,
    "torch.Size": _Plain.size,
    "collections.OrderedDict": _Plain.ordered,
    "_codecs.encode": _Plain.encoded,
    "numpy._core.multiarray._reconstruct": _Plain.array,
    "numpy.core.multiarray._reconstruct": _Plain.array,
}
"""What each class or function in a pickle stands for. Nothing is called."""

_KNOWN = {
    *_BUILDERS, *STORAGES, "torch.storage.UntypedStorage", "torch.Tensor",
    "torch.nn.parameter.Parameter", "numpy.dtype", "numpy.ndarray",
}  # fmt: skip
