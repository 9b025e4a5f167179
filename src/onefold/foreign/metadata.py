"""Read the `.metadata` of torch.distributed.checkpoint (DCP), and believe nothing of it.

Everything is compared with everything: pieces cover each tensor exactly once, their bytes lie in
files of the folder, and no two of them overlap.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import torch

from onefold.checkpoint.agreement import believing
from onefold.checkpoint.checked_files import FileRecord
from onefold.checkpoint.listing import (
    MODEL,
    Extents,
    Keys,
    Listing,
    Piece,
    Place,
    SavedTensor,
    checked_path,
    extents,
    path_of,
    tiles,
)
from onefold.foreign.unpickling import Built, read_pickle

MARK = "onefold"
"""Marks a checkpoint of format 1, in `StorageMeta.modules`: it must have a manifest."""

_DCP = "torch.distributed.checkpoint"
_TENSOR, _OBJECT = f"{_DCP}.metadata.TensorStorageMetadata", f"{_DCP}.metadata.BytesStorageMetadata"
_METADATA_NAMES = {
    *(f"{_DCP}.metadata.{name}" for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    )),
    _TENSOR, _OBJECT, f"{_DCP}.filesystem._StorageInfo",
    "torch.Size", "torch.device", "torch.serialization._get_layout", "collections.OrderedDict",
    "builtins.set", "builtins.getattr",
    # Python 3.13 pickles paths as of pathlib._local, 3.11 as of pathlib
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local")
      for name in ("PosixPath", "PurePosixPath")),
}  # fmt: skip
"""All that a `.metadata` refers to. Another reference is an attempt to run code."""


def read_metadata(data: bytes, files: Mapping[str, FileRecord], what: str) -> tuple[Listing, bool]:
    """Read a `.metadata`, and whether Onefold has written it.

    Raises `CheckpointError` if it is not `what` was expected.
    """
    metadata = read_pickle(data, _METADATA_NAMES, what)
    with believing(what):
        return _checked_metadata(_state(metadata, "metadata.Metadata"), files)


def _checked_metadata(
    state: dict[str, Any], files: Mapping[str, FileRecord]
) -> tuple[Listing, bool]:
    marks = _state(state.get("storage_meta"), "metadata.StorageMeta").get("modules", ())
    places = dict(_storage_places(state["storage_data"], files))
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
            known[id(saved)] = _described_tensor(saved)
        shape, dtype, boxes = known[id(saved)]
        pieces = (Piece(*box, places[name, box[0]]) for box in boxes if prod(box[1]))
        tensors[name] = SavedTensor(shape, dtype, tuple(pieces))
        for piece in tensors[name].pieces:
            if prod(piece.sizes) * dtype.itemsize > piece.place.length:
                raise ValueError(f"{piece.place.length} bytes for {piece.sizes} of {name!r}")
    paths = {name: _path(name, notes.get(name, ()), len(names)) for name in names}
    return Listing(tensors, objects, paths, _aliases(tensors)), MARK in marks


def _aliases(tensors: dict[str, SavedTensor]) -> dict[str, str]:
    """Return other names of weights, each with the first name of the same bytes."""
    first, others, prefix = dict[Place, str](), dict[str, str](), f"{MODEL}."
    for name, saved in tensors.items():
        known = first.setdefault(saved.pieces[0].place, name) if saved.pieces else name
        if known != name and name.startswith(prefix) and known.startswith(prefix):
            others[name.removeprefix(prefix)] = known.removeprefix(prefix)
    return others


def _state(value: Any, kind: str) -> dict[str, Any]:
    """Return the fields of an object of torch's; {} of None."""
    if value is None:
        return {}
    if not isinstance(value, Built) or value.kind != f"{_DCP}.{kind}":
        raise TypeError(f"{str(value)[:80]} in place of a {kind}")
    return dict(value.state or {})


def sizes_of(value: Any) -> Extents:
    """Return the numbers of a `torch.Size`, or of a tuple; see `extents`."""
    if isinstance(value, Built) and value.kind == "torch.Size":
        (value,) = value.arguments
    if not isinstance(value, tuple):
        raise TypeError("no shape")
    return extents(value)


def _storage_places(
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
        yield (index["fqn"], None if offset is None else sizes_of(offset)), place


def _described_tensor(saved: Any) -> tuple[Extents, torch.dtype, list[tuple[Extents, Extents]]]:
    """Return the shape, the dtype, and the boxes of a tensor's pieces."""
    state = _state(saved, "metadata.TensorStorageMetadata")
    dtype, *_ = state["properties"].state
    shape = sizes_of(state["size"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError("no dtype")
    chunks = [_state(chunk, "metadata.ChunkStorageMetadata") for chunk in state["chunks"]]
    boxes = [(sizes_of(chunk["offsets"]), sizes_of(chunk["sizes"])) for chunk in chunks]
    if not tiles(boxes, shape):
        raise ValueError(f"pieces that do not cover a tensor of shape {list(shape)} once")
    return shape, dtype, boxes


def _path(name: Any, note: Any, num_names: int) -> Keys:
    """Return the nested keys of a name: the note of torch's planner, or else read from the name."""
    keys = checked_path(note, name, num_names)
    is_optim = name.startswith(("optim.state.", "optim.param_groups."))
    return keys or (path_of(name, num_names) if is_optim else (name,))
