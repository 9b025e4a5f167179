"""Read the list of what a checkpoint holds, and believe nothing of it.

Everything is compared with everything: pieces cover each tensor exactly once, their bytes lie in
files of the folder, and no two of them overlap.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any

import torch

from onefold.checkpoint.checked_files import FileRecord
from onefold.checkpoint.unpickling import NOT_OF_BYTES, Built, as_damage, read_pickle

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
    """A tensor: pieces cover it exactly. `row`: that of a stack, whose pieces they are then."""

    shape: Extents
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """Names that agree with each other, and with the files. `paths`: the nested keys of each."""

    tensors: dict[str, SavedTensor]
    objects: dict[str, Place]
    paths: dict[str, Keys]
    is_ours: bool


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


def read_listing(data: bytes, files: Mapping[str, FileRecord], what: str) -> Listing:
    """Read a `.metadata`. Raises `CheckpointError` if it is not `what` was expected."""
    metadata = read_pickle(data, _METADATA_NAMES, what)
    try:
        return _checked(_state(metadata, "metadata.Metadata"), files)
    except NOT_OF_BYTES:
        raise
    except Exception as error:
        raise as_damage(error, what) from error


def _checked(state: dict[str, Any], files: Mapping[str, FileRecord]) -> Listing:
    marks = _state(state.get("storage_meta"), "metadata.StorageMeta").get("modules", ())
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
    return Listing(tensors, objects, paths, is_ours=MARK in marks)


def _state(value: Any, kind: str) -> dict[str, Any]:
    """Return the fields of an object of torch's; {} of None."""
    if value is None:
        return {}
    if not isinstance(value, Built) or value.kind != f"{_DCP}.{kind}":
        raise TypeError(f"{str(value)[:80]} in place of a {kind}")
    return dict(value.state or {})


def extents(value: Any) -> Extents:
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
        yield (index["fqn"], None if offset is None else extents(offset)), place


def _described(saved: Any) -> tuple[Extents, torch.dtype, list[tuple[Extents, Extents]]]:
    """Return the shape, the dtype, and the boxes of a tensor's pieces."""
    state = _state(saved, "metadata.TensorStorageMetadata")
    dtype, *_ = state["properties"].state
    shape = extents(state["size"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError("no dtype")
    chunks = [_state(chunk, "metadata.ChunkStorageMetadata") for chunk in state["chunks"]]
    boxes = [(extents(chunk["offsets"]), extents(chunk["sizes"])) for chunk in chunks]
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
