"""Read a checkpoint: the one place that looks at its metadata, and believes nothing of it.

`open_source` compares everything with everything: pieces cover each tensor exactly once, their
bytes lie in files of the folder, no two of them overlap. A `Source` is what is left: shapes, dtypes
and places that agree. `Source.fill` then reads this rank's part of each tensor, in file order and
through the manifest's checksums. No rank waits for another.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onefold.checkpoint.agreement import damage
from onefold.checkpoint.checked_files import BlockReader, FileRecord
from onefold.checkpoint.directory import METADATA, Found, Manifest
from onefold.checkpoint.unpickling import Built, as_damage, read_object, read_pickle
from onefold.errors import CheckpointError, OnefoldError

MARK = "onefold"
"""Marks a checkpoint of Onefold, in `StorageMeta.modules`: it must have a manifest."""

MODEL, MASTER, OPTIM, RANK = "model", "master", "optim", "rank"
GRAD, PARTIAL, COMPANION = "grad", "partial", "companion"

Keys = tuple[Any, ...]
"""The nested keys of a name, as in ("optim", "state", FQN, KEY)."""

Extents = tuple[int, ...]

MOST_CUTS = 8
"""Dimensions of one tensor that pieces may cut."""


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a file: an archive that `torch.save` wrote."""

    file: str
    start: int
    length: int

    @property
    def range(self) -> tuple[int, int]:
        return self.start, self.start + self.length


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where it lies."""

    offsets: Extents
    sizes: Extents
    place: Place


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor: pieces cover it exactly."""

    shape: Extents
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint whose parts agree: what `onefold.load`, `inspect` and `export` read.

    `paths`: the nested keys of each name. `aliases`: names of weights whose bytes lie under another
    name, the first one.
    """

    found: Found
    files: Mapping[str, FileRecord]
    tensors: dict[str, SavedTensor]
    objects: dict[str, Place]
    paths: dict[str, Keys]
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.found.path

    @property
    def manifest(self) -> Manifest | None:
        return self.found.manifest

    @property
    def saved_ranks(self) -> int:
        """How many ranks have saved a state of their own; 1 of another library."""
        return max(1, sum(name.startswith(f"{RANK}.") for name in self.objects))

    def reader(self, file: str, ranges: Iterable[tuple[int, int]]) -> BlockReader:
        """Open a file of the checkpoint to read `ranges` of it."""
        return BlockReader(self.path / file, self.files[file], ranges)

    def read_object(self, name: str) -> Any:
        """Read an object as data."""
        place = self.objects[name]
        with self.reader(place.file, [place.range]) as reader:
            return read_object(bytes(reader.read(place.start, place.length)), name)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Read the state of one rank alone; {} in another library's checkpoint."""
        name = f"{RANK}.{rank}"
        if name not in self.objects:
            return {}
        with self.believing(name):
            (state,) = self.read_object(name)
            kinds = {"extra": object, "random": dict, "buffers": dict, "modules": list}
            wrong = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
            if wrong and wrong != ["modules"]:  # earlier versions had none
                raise ValueError(f"no {wrong[0]!r} in it")
        return dict(state)

    @contextmanager
    def believing(self, what: str) -> Iterator[None]:
        """Around the use of values that were saved: raise `CheckpointError` if they are no such."""
        try:
            yield
        except OnefoldError:
            raise
        except Exception as error:
            raise as_damage(error, f"{what} of checkpoint {str(self.path)!r}") from error

    def fill(self, wanted: Mapping[str, Tensor]) -> None:
        """Read tensors in place, by name; of DTensors this rank's pieces. Files come in order."""
        parts = [part for name, value in wanted.items() for part in self._parts(name, value)]
        parts.sort(key=lambda part: (part.piece.place.file, part.piece.place.start))
        for file, of_file in groupby(parts, key=lambda part: part.piece.place.file):
            own = list(of_file)
            with self.reader(file, [part.range for part in own]) as reader:
                for part in own:
                    part.read(reader)

    def _parts(self, name: str, value: Tensor) -> Iterator[_Part]:
        saved, own, offsets = self.tensors[name], value.detach(), (0,) * value.dim()
        if saved.shape != tuple(value.shape):
            got, hint = list(saved.shape), "the checkpoint is of another module"
            raise CheckpointError(f"{name!r} of shape {list(value.shape)}", got, hint=hint)
        if isinstance(own, DTensor):
            chunks = own.__create_chunk_list__()  # type: ignore[attr-defined]
            own = own._local_tensor
            offsets = tuple(chunks[0].offsets) if chunks else offsets
        for piece in saved.pieces:
            bounds = zip(offsets, own.shape, piece.offsets, piece.sizes, strict=True)
            spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in bounds]
            if own.numel() and all(start < stop for start, stop in spans):
                inside = [
                    start - begin for (start, _), begin in zip(spans, piece.offsets, strict=True)
                ]
                index = [slice(a - at, b - at) for (a, b), at in zip(spans, offsets, strict=True)]
                yield _Part(piece, saved.dtype, tuple(inside), own[tuple(index)])


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of one piece that goes into `target`. `first`: where it begins in the piece."""

    piece: Piece
    dtype: torch.dtype
    first: Extents
    target: Tensor

    @property
    def _is_rows(self) -> bool:
        return tuple(self.target.shape[1:]) == self.piece.sizes[1:]

    @property
    def range(self) -> tuple[int, int]:
        """The bytes of the file that hold it, with room for the archive's headers."""
        start, stop = self.piece.place.range
        if not self.first or not self._is_rows:
            return start, stop
        row_nbytes = prod(self.piece.sizes[1:]) * self.dtype.itemsize
        start += self.first[0] * row_nbytes
        return start, min(start + _HEAD_NBYTES + self.target.shape[0] * row_nbytes, stop)

    def read(self, reader: BlockReader) -> None:
        start, strides = elements_of(reader, self.piece, self.dtype)
        target, sizes = self.target, self.piece.sizes
        if strides != strides_of(sizes) or not self._is_rows:
            whole = torch.empty(_extent(sizes, strides), dtype=self.dtype)
            reader.read_into(start, bytes_of(whole))
            box = zip(self.first, target.shape, strict=True)
            index = tuple(slice(first, first + length) for first, length in box)
            target.copy_(whole.as_strided(sizes, strides)[index])
            return
        if sizes:
            start += self.first[0] * prod(sizes[1:]) * self.dtype.itemsize
        is_alike = target.dtype == self.dtype and target.device.type == "cpu"
        part = target if is_alike and target.is_contiguous() else None
        rows = torch.empty(tuple(target.shape), dtype=self.dtype) if part is None else part
        reader.read_into(start, bytes_of(rows))
        if part is None:
            target.copy_(rows)


# the elements of a tensor, inside the archive that `torch.save` wrote

_HEADER_NBYTES, _HEAD_NBYTES = 30, 4096
_PICKLE, _ELEMENTS = b"archive/data.pkl", b"archive/data/0"
"""The records of a tensor: its description, and its elements. Small records lie between."""

_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16,
        "BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Short": torch.int16,
        "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
        "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    }.items()
}  # fmt: skip
_TENSOR_V2, _TENSOR_V3 = (f"torch._utils._rebuild_tensor_v{version}" for version in (2, 3))
_ARCHIVE_NAMES = {
    *_STORAGES, _TENSOR_V2, _TENSOR_V3, "collections.OrderedDict", "torch.storage.UntypedStorage",
}  # fmt: skip


def elements_of(reader: BlockReader, piece: Piece, dtype: torch.dtype) -> tuple[int, Extents]:
    """Return where the elements of a piece start in its file, and their strides.

    A record is a header (PKWARE APPNOTE 4.3.7), its name, padding and its bytes. Raises `Damaged`
    unless the archive holds one tensor of this shape and dtype.
    """
    place = piece.place
    head = bytes(reader.read(place.start, min(_HEAD_NBYTES, place.length)))
    what = f"a tensor at byte {place.start} of file {reader.name!r}"
    hint = "its metadata and its files are of different checkpoints; load an earlier one"
    description, start = (_record(head, name) for name in (_PICKLE, _ELEMENTS))
    if description is None or start is None:
        raise damage(what, "other bytes", hint=hint)
    tensor = read_pickle(head[description:], _ARCHIVE_NAMES, what)
    try:
        storage, first, sizes, strides, *more = tensor.arguments
        _, kind, _, _, numel = storage.arguments
        saved = more[2] if tensor.kind == _TENSOR_V3 else _STORAGES[kind.name]
        sizes, strides = _extents(sizes), _extents(strides)
        is_inside = first + _extent(sizes, strides) <= numel
    except Exception as error:
        raise damage(what, "another object", hint=hint) from error
    if sizes != piece.sizes or saved != dtype or not is_inside or len(strides) != len(sizes):
        got = f"one of shape {list(sizes)} and {saved}"
        raise damage(f"{what} of shape {list(piece.sizes)} and {dtype}", got, hint=hint)
    start += place.start + first * dtype.itemsize
    if not 0 <= first <= numel or start + _extent(sizes, strides) * dtype.itemsize > place.range[1]:
        raise damage(what, f"{place.length} bytes", hint=hint)
    return start, strides


def _record(head: bytes, name: bytes) -> int | None:
    """Return where the bytes of a record start; None if there is none of that name."""
    found = head.find(name)
    header = found - _HEADER_NBYTES
    if header < 0 or head[header : header + 4] != b"PK\3\4":
        return None
    return found + len(name) + int.from_bytes(head[header + 28 : header + 30], "little")


def strides_of(sizes: Extents) -> Extents:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(max(1, size) for size in sizes[dim + 1 :]) for dim in range(len(sizes)))


def _extent(sizes: Extents, strides: Extents) -> int:
    """Return the number of elements from the first to the last one."""
    if not prod(sizes):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


# metadata

_DCP = "torch.distributed.checkpoint"
_TENSOR, _OBJECT = f"{_DCP}.metadata.TensorStorageMetadata", f"{_DCP}.metadata.BytesStorageMetadata"
_METADATA_NAMES = {
    *(f"{_DCP}.metadata.{name}" for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    )),
    _TENSOR, _OBJECT, f"{_DCP}.filesystem._StorageInfo",
    "torch.Size", "torch.device", "torch.serialization._get_layout", "collections.OrderedDict",
    "builtins.set", "builtins.getattr", "pathlib.PosixPath", "pathlib.PurePosixPath",
}  # fmt: skip
"""All that a `.metadata` refers to. Another reference is an attempt to run code."""


def open_source(checkpoint: Found) -> Source:
    """Read names, shapes and places, and compare them with each other and with the files.

    Raises `CheckpointError`: no metadata, damage, or parts that contradict each other.
    """
    path, manifest = checkpoint.path, checkpoint.manifest
    if manifest is None:
        entries = [entry for entry in os.scandir(path) if entry.is_file()]
        files = {entry.name: FileRecord(entry.stat().st_size, "") for entry in entries}
    else:
        files = manifest.files
    what = f"file {METADATA!r} of {str(path)!r} to be {_DCP}'s"
    if METADATA not in files:
        raise CheckpointError(what, "no such file", hint="this is no checkpoint, or a part of one")
    with BlockReader(path / METADATA, files[METADATA]) as reader:
        data = bytes(reader.read(0, reader.nbytes))
    metadata = read_pickle(data, _METADATA_NAMES, what)
    try:
        source = _checked(checkpoint, files, _state(metadata, "metadata.Metadata"))
    except CheckpointError:
        raise
    except Exception as error:
        raise as_damage(error, what) from error
    return source


def _checked(found: Found, files: Mapping[str, FileRecord], state: dict[str, Any]) -> Source:
    marks = _state(state.get("storage_meta"), "metadata.StorageMeta").get("modules", ())
    if found.manifest is None and MARK in marks:
        raise CheckpointError(
            f"file 'manifest.json' in checkpoint {str(found.path)!r}, which onefold has saved",
            "no such file",
            hint="the file was deleted, so nothing can be verified; load an earlier checkpoint",
        )
    places = dict(_places(state["storage_data"], files))
    ranges = sorted({(place.file, *place.range) for place in places.values()})
    for (file, _, stop), (other, start, _) in pairwise(ranges):
        if file == other and start < stop:
            raise ValueError(f"pieces that overlap at byte {start} of {file!r}")
    names, notes = state["state_dict_metadata"], state.get("planner_data") or {}
    tensors, objects = dict[str, SavedTensor](), dict[str, Place]()
    known = dict[int, tuple[Extents, torch.dtype, list[tuple[Extents, Extents]]]]()
    for name, saved in names.items():
        if saved.kind == _OBJECT:
            objects[name] = places[name, None]
            continue
        if id(saved) not in known:  # of tied weights, one entry for all names
            known[id(saved)] = _described(saved)
        shape, dtype, boxes = known[id(saved)]
        pieces = (Piece(*box, places[name, box[0]]) for box in boxes if prod(box[1]))
        tensors[name] = SavedTensor(shape, dtype, tuple(pieces))
        for piece in tensors[name].pieces:
            if prod(piece.sizes) * dtype.itemsize > piece.place.length:
                raise ValueError(f"{piece.place.length} bytes for {piece.sizes} of {name!r}")
    paths = {name: _path(name, notes.get(name, ()), len(names)) for name in names}
    source = Source(found, files, tensors, objects, paths)
    return replace(source, aliases=_spread_ties(source))


def _state(value: Any, kind: str) -> dict[str, Any]:
    """Return the fields of an object of torch's; {} of None."""
    if value is None:
        return {}
    if not isinstance(value, Built) or value.kind != f"{_DCP}.{kind}":
        raise TypeError(f"{str(value)[:80]} in place of a {kind}")
    return dict(value.state or {})


def _extents(value: Any) -> Extents:
    """Return sizes, offsets or strides: up to 64 numbers that are not negative."""
    if isinstance(value, Built) and value.kind == "torch.Size":
        (value,) = value.arguments
    if not isinstance(value, tuple) or len(value) > 64:
        raise TypeError("no shape")
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in value):
        raise ValueError(f"a shape of {str(value[:8])[:80]}")
    return value


def _places(
    storage: dict[Any, Any], files: Mapping[str, FileRecord]
) -> Iterator[tuple[tuple[str, Extents | None], Place]]:
    for key, value in storage.items():
        index, info = (
            _state(key, "metadata.MetadataIndex"),
            _state(value, "filesystem._StorageInfo"),
        )
        if info.get("transform_descriptors"):
            raise ValueError("a file that an extension of torch has packed")
        place = Place(info["relative_path"], info["offset"], info["length"])
        (start, stop), offset = place.range, index.get("offset")
        if {type(start), type(stop)} != {int} or not 0 <= start < stop <= files[place.file].nbytes:
            raise ValueError(f"bytes {start} to {stop} of {place.file!r}")
        yield (index["fqn"], None if offset is None else _extents(offset)), place


def _described(saved: Any) -> tuple[Extents, torch.dtype, list[tuple[Extents, Extents]]]:
    """Return the shape, the dtype, and the boxes of a tensor's pieces."""
    state = _state(saved, "metadata.TensorStorageMetadata")
    dtype, *_ = state["properties"].state
    shape = _extents(state["size"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError("no dtype")
    chunks = [_state(chunk, "metadata.ChunkStorageMetadata") for chunk in state["chunks"]]
    boxes = [(_extents(chunk["offsets"]), _extents(chunk["sizes"])) for chunk in chunks]
    if not tiles(boxes, shape):
        raise ValueError(f"pieces that do not cover a tensor of shape {list(shape)} once")
    return shape, dtype, boxes


def tiles(boxes: list[tuple[Extents, Extents]], shape: Extents) -> bool:
    """True if boxes, of offsets and sizes, cover a tensor of `shape` exactly once.

    Sums the signed corners of the boxes: all but those of the tensor cancel each other.
    """
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        return False
    if not prod(shape):
        return all(not prod(sizes) for _, sizes in boxes)
    cut = [dim for dim in range(len(shape)) if any(box[1][dim] != shape[dim] for box in boxes)]
    whole = ((0,) * len(shape), shape)
    corners = Counter[Extents]()
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in boxes)]:
        if len(cut) > MOST_CUTS or any(offsets[d] for d in range(len(shape)) if d not in cut):
            return False
        bounds = [((1, offsets[dim]), (-1, offsets[dim] + sizes[dim])) for dim in cut]
        for corner in product(*bounds):
            at = tuple(bound for _, bound in corner)
            corners[at] += sign * prod(direction for direction, _ in corner)
    return not any(corners.values())


def _path(name: Any, note: Any, num_names: int) -> Keys:
    """Return the nested keys of a name: the note of torch's planner, or else read from the name.

    ("optim", "state", FQN, KEY ...) and ("optim", "param_groups", INDEX, KEY ...) have four or
    more. The index stays a string where it is no number.
    """
    if not isinstance(name, str) or not isinstance(note, tuple) or len(note) > 64:
        raise TypeError("names that are none")
    if any(
        type(key) is not str and not (type(key) is int and 0 <= key < num_names) for key in note
    ):
        raise TypeError(f"keys of {name[:80]!r} that are none")
    state, groups = f"{OPTIM}.state.", f"{OPTIM}.param_groups."
    if len(note) < 4 and name.startswith(state):
        fqn, _, key = name.removeprefix(state).rpartition(".")
        return (OPTIM, "state", fqn, key)
    if len(note) < 4 and name.startswith(groups):
        index, _, key = name.removeprefix(groups).partition(".")
        is_number = index.isdecimal() and len(index) < 10 and int(index) < num_names
        return (OPTIM, "param_groups", int(index) if is_number else index, key)
    return note or (name,)


# tied weights


def first_names(source: Source) -> dict[str, str]:
    """Return, for each tensor, the first name of the same bytes: its own if it has its own."""
    first = dict[Place, str]()
    return {
        name: first.setdefault(saved.pieces[0].place, name) if saved.pieces else name
        for name, saved in source.tensors.items()
    }


def _spread_ties(source: Source) -> dict[str, str]:
    """Give each name of a weight its master and optimizer state, so that any of them can be loaded.

    Adds to the tensors and objects of a new source. Returns the other names, each with the first.
    """
    prefix = f"{MODEL}."
    others = {
        alias.removeprefix(prefix): name.removeprefix(prefix)
        for alias, name in first_names(source).items()
        if alias != name and alias.startswith(prefix) and name.startswith(prefix)
    }
    belonging = defaultdict[str, list[tuple[str, Keys]]](list)
    for name, path in source.paths.items() if others else ():
        if path[:2] == (OPTIM, "state") or (path[0] == COMPANION and len(path) > 2):
            belonging[path[2]].append((name, path))
    for alias, first in others.items():
        paths = [(name, (*path[:2], alias, *path[3:])) for name, path in belonging[first]]
        for name, path in [(f"{MASTER}.{first}", (MASTER, alias)), *paths]:
            target = ".".join(map(str, path))
            for values in (source.tensors, source.objects):
                if name in values and target not in source.paths:
                    values[target] = values[name]  # type: ignore[index, assignment]
                    source.paths[target] = path
    return others
