"""Inspect a checkpoint without a module or a process group."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from onefold.checkpoint.checked_files import BlockReader
from onefold.checkpoint.contents import (
    COMPANION,
    GRAD,
    MASTER,
    MODEL,
    OPTIM,
    PARTIAL,
    RANK,
    path_of,
)
from onefold.checkpoint.directory import METADATA, Found, find
from onefold.checkpoint.storage import read_metadata, read_object


@dataclass(frozen=True, slots=True)
class InspectedRow:
    """One tensor of a checkpoint."""

    name: str
    kind: str  # "weight", "master", or the key under which an optimizer keeps it
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The contents of a checkpoint."""

    found: Found
    rows: list[InspectedRow]
    other_names: list[str]  # of objects that are no tensors
    extra: Any  # that rank 0 passed to `onefold.save`
    files: dict[str, int]  # bytes
    is_verified: bool


def inspect(directory: Path, *, verify: bool) -> Inspection:
    """Inspect the checkpoint `directory`, or the newest complete one in it.

    With `verify`, read every byte and compare it with its checksum.

    Raises: CheckpointError: nothing there, or damaged, with the file's name.
    """
    found = find(directory)[0]
    metadata = read_metadata(found)
    if verify and found.manifest is not None:
        for name, record in found.manifest.files.items():
            with BlockReader(found.path / name, record, [(0, record.nbytes)]) as reader:
                reader.verify()
    tensors, others = [], []
    notes = metadata.planner_data or {}
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            tensors.append(_row(name, saved, notes.get(name, ())))
        else:
            others.append(name)
    files = {p.name: p.stat().st_size for p in sorted(found.path.iterdir()) if p.is_file()}
    is_verified = verify and found.manifest is not None and METADATA in found.manifest.files
    return Inspection(found, tensors, others, _extra(found, metadata), files, is_verified)


def _extra(found: Found, metadata: Metadata) -> Any:
    """Return the `extra` of rank 0; None of another library's checkpoint."""
    name = f"{RANK}.0"
    if found.manifest is None or name not in metadata.state_dict_metadata:
        return None
    info = metadata.storage_data[MetadataIndex(name)]
    path, span = found.path / info.relative_path, (info.offset, info.offset + info.length)
    with BlockReader(path, found.manifest.files[info.relative_path], [span]) as reader:
        data = reader.read(info.offset, info.length)
    (of_rank,) = read_object(io.BytesIO(data), name)
    return of_rank["extra"]


def _row(name: str, saved: TensorStorageMetadata, note: Sequence[Any]) -> InspectedRow:
    shown, kind = _parameter_and_kind(name, note)
    dtype, shape = saved.properties.dtype, tuple(saved.size)
    nbytes = prod(shape) * dtype.itemsize
    return InspectedRow(
        shown, kind, shape, str(dtype).removeprefix("torch."), nbytes, len(saved.chunks)
    )


def _parameter_and_kind(name: str, note: Sequence[Any]) -> tuple[str, str]:
    """Return the parameter that a tensor belongs to, and its kind."""
    keys = path_of(name, note)
    if keys[:2] == (OPTIM, "state"):
        return str(keys[2]), ".".join(map(str, keys[3:]))
    if keys[0] == COMPANION:
        return str(keys[2]), str(keys[1])
    kinds = {MODEL: "weight", MASTER: "master", GRAD: GRAD, PARTIAL: PARTIAL, OPTIM: OPTIM}
    kind, dot, rest = name.partition(".")
    return (rest, kinds[kind]) if dot and kind in kinds else (name, "weight")
