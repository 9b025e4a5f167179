"""What is in a checkpoint, without a module, a process group or a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from onefold.checkpoint.blocks import BlockReader
from onefold.checkpoint.contents import GRAD, MASTER, MODEL, OPTIM, PARTIAL, state_path
from onefold.checkpoint.directory import METADATA, Found, find
from onefold.checkpoint.storage import read_metadata


@dataclass(frozen=True, slots=True)
class InspectedRow:
    """One tensor."""

    name: str
    kind: str  # "weight", "master", or the key under which an optimizer keeps it
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint's facts."""

    found: Found
    metadata: Metadata
    rows: list[InspectedRow]
    other_names: list[str]  # of what is not a tensor
    files: dict[str, int]  # bytes
    is_verified: bool


def inspect(directory: Path, *, verify: bool) -> Inspection:
    """The newest complete checkpoint in `directory`, or itself.

    With `verify` every byte is read and compared with its checksum.

    Raises: CheckpointError: nothing there, or damaged, naming the file.
    """
    found = find(directory)[0]
    metadata = read_metadata(found.path, found.manifest)
    if verify and found.manifest is not None:
        for name, record in found.manifest.files.items():
            with BlockReader(found.path / name, record, [(0, record.nbytes)]) as reader:
                reader.verify()
    tensors = list(_rows(metadata))
    named = {name for name, _ in tensors}
    files = {p.name: p.stat().st_size for p in sorted(found.path.iterdir()) if p.is_file()}
    return Inspection(
        found=found,
        metadata=metadata,
        rows=[row for _, row in tensors],
        other_names=[name for name in metadata.state_dict_metadata if name not in named],
        files=files,
        is_verified=verify and found.manifest is not None and METADATA in found.manifest.files,
    )


def _rows(metadata: Metadata) -> Iterator[tuple[str, InspectedRow]]:
    paths = metadata.planner_data or {}
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            shown, kind = _named(name, tuple(paths.get(name, ())))
            numel, itemsize = prod(saved.size), saved.properties.dtype.itemsize
            dtype = str(saved.properties.dtype).removeprefix("torch.")
            yield (
                name,
                InspectedRow(
                    shown, kind, tuple(saved.size), dtype, numel * itemsize, len(saved.chunks)
                ),
            )


def _named(name: str, path: tuple[Any, ...]) -> tuple[str, str]:
    """The parameter that a tensor is of, and what it is to it."""
    for prefix, kind in ((MODEL, "weight"), (MASTER, "master")):
        if name.startswith(f"{prefix}."):
            return name.removeprefix(f"{prefix}."), kind
    state = state_path(name, path)
    if state is not None:
        return str(state[2]), ".".join(map(str, state[3:]))
    for prefix in (GRAD, PARTIAL, OPTIM):
        if name.startswith(f"{prefix}."):
            return name.removeprefix(f"{prefix}."), prefix
    return name, "weight"
