"""Export and inspect checkpoints without a module or a process group, a few MB at a time."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from onefold.checkpoint import safetensors
from onefold.checkpoint.agreement import as_checkpoint_error
from onefold.checkpoint.checked_files import BlockReader
from onefold.checkpoint.contents import (
    COMPANION,
    GRAD,
    MASTER,
    MODEL,
    OPTIM,
    PARTIAL,
    RANK,
    first_names,
    is_offset,
    packed_among,
    path_of,
)
from onefold.checkpoint.directory import METADATA, Draft, Found, find
from onefold.checkpoint.pretrained import begin, write_small_files
from onefold.checkpoint.storage import bytes_of, chunk_of, data_offset, read_metadata, read_object
from onefold.errors import CheckpointError

PART_NBYTES = 8 << 20
"""The most bytes of a piece that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The checkpoint that was exported, and the files that were written."""

    source: Path
    step: int
    outputs: list[safetensors.Output]
    num_tensors: int


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = safetensors.MAX_SHARD_NBYTES,
) -> Exported:
    """Write the weights of a checkpoint as `AutoModel.from_pretrained` reads them.

    Needs one process and no process group. Every byte read passes its checksum. `dtype` casts
    floating-point weights, from masters where they are wider; None keeps the weights' dtype. Tied
    weights are written once; `config.json` is written if the checkpoint has one.

    Raises: CheckpointError: nothing to export, damage, a target that exists, a full disk.
    """
    checkpoint = find(Path(os.path.abspath(source)))[0]
    if checkpoint.manifest is None:
        raise CheckpointError(
            f"a checkpoint of onefold.save at {str(checkpoint.path)!r}",
            "one without manifest.json",
            hint="torch.distributed.checkpoint.format_utils.dcp_to_torch_save converts others",
        )
    metadata = read_metadata(checkpoint)
    weights = dict(_weights(metadata, dtype))
    outputs = safetensors.plan_outputs(weights.values(), max_shard_nbytes)
    draft = Draft(Path(os.path.abspath(target)))
    draft.check()
    try:
        begin(draft, outputs)
        with safetensors.OffsetWriter(draft.folder, outputs) as writer:
            for name, pieces in _pieces_by_file(metadata, weights):
                announced = [(info.offset, info.offset + info.length) for info, _ in pieces]
                record = checkpoint.manifest.files[name]
                with BlockReader(checkpoint.path / name, record, announced) as reader:
                    for info, index in pieces:
                        saved = metadata.state_dict_metadata[index.fqn]
                        assert isinstance(saved, TensorStorageMetadata), "a weight is a tensor"
                        _copy_piece(reader, info, saved, index, weights[index.fqn], writer)
            writer.finish()
        write_small_files(draft.folder, outputs, checkpoint.manifest.config)
        draft.publish()
    except (OSError, CheckpointError) as error:
        draft.abandon()
        raise as_checkpoint_error(error) from error
    return Exported(checkpoint.path, checkpoint.manifest.step, outputs, len(weights))


def _weights(
    metadata: Metadata, dtype: torch.dtype | None
) -> Iterator[tuple[str, safetensors.TensorEntry]]:
    """Yield every weight and buffer once, with the name in the checkpoint to read it from."""
    names, first = metadata.state_dict_metadata, first_names(metadata)
    packed = packed_among(names)
    for name, saved in names.items():
        if not name.startswith(f"{MODEL}.") or not isinstance(saved, TensorStorageMetadata):
            continue
        if name in packed and is_offset(name):  # a note has it
            continue
        if first.get(name, name) != name:
            continue
        shown = name.removeprefix(f"{MODEL}.")
        own = saved.properties.dtype
        casts = own.is_floating_point and name not in packed
        wanted = dtype if dtype is not None and casts else own
        master = f"{MASTER}.{shown}"
        is_wider = master in names and wanted.itemsize > own.itemsize
        yield (
            master if is_wider else name,
            safetensors.TensorEntry(shown, tuple(saved.size), wanted),
        )


def _pieces_by_file(
    metadata: Metadata, weights: dict[str, safetensors.TensorEntry]
) -> Iterator[tuple[str, list[tuple[Any, MetadataIndex]]]]:
    """Yield each file's name with its pieces of `weights`, in file order."""
    pieces = [
        (info, index) for index, info in metadata.storage_data.items() if index.fqn in weights
    ]
    pieces.sort(key=lambda piece: (piece[0].relative_path, piece[0].offset))
    for name, of_file in groupby(pieces, key=lambda piece: piece[0].relative_path):
        yield name, list(of_file)


def _copy_piece(
    reader: BlockReader, info: Any, saved: TensorStorageMetadata, index: MetadataIndex,
    entry: safetensors.TensorEntry, writer: safetensors.OffsetWriter,
) -> None:  # fmt: skip
    chunk, source = chunk_of(saved, index), saved.properties.dtype
    if prod(chunk.sizes) == 0:
        return
    start = info.offset + data_offset(reader, info)
    step = max(1, PART_NBYTES // source.itemsize)
    for place, first, end in _spans(tuple(chunk.offsets), tuple(chunk.sizes), saved.size):
        for at in range(first, end, step):
            part = torch.empty(min(step, end - at), dtype=source)
            reader.read_into(start + at * source.itemsize, bytes_of(part))
            target = (place + at - first) * entry.dtype.itemsize
            writer.write(entry.name, target, bytes_of(part.to(entry.dtype)))


def _spans(
    offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous parts of a box: its start in the tensor of `shape`, and [start, stop)
    in the box, in elements.
    """
    partial = [dim for dim in range(len(shape)) if sizes[dim] != shape[dim]]
    last = partial[-1] if partial else 0
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    numel = prod(sizes[last:])
    for number, index in enumerate(product(*map(range, sizes[:last]))):
        first = [start + more for start, more in zip(offsets, index, strict=False)]
        first += offsets[last : last + 1]
        place = sum(at * stride for at, stride in zip(first, strides, strict=False))
        yield place, number * numel, (number + 1) * numel


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
    checkpoint = find(directory)[0]
    metadata = read_metadata(checkpoint)
    if verify and checkpoint.manifest is not None:
        for name, record in checkpoint.manifest.files.items():
            with BlockReader(checkpoint.path / name, record, [(0, record.nbytes)]) as reader:
                reader.verify()
    tensors, others = [], []
    notes = metadata.planner_data or {}
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            tensors.append(_row(name, saved, notes.get(name, ())))
        else:
            others.append(name)
    files = {p.name: p.stat().st_size for p in sorted(checkpoint.path.iterdir()) if p.is_file()}
    manifest = checkpoint.manifest
    is_verified = verify and manifest is not None and METADATA in manifest.files
    return Inspection(checkpoint, tensors, others, _extra(checkpoint, metadata), files, is_verified)


def _extra(checkpoint: Found, metadata: Metadata) -> Any:
    """Return the `extra` of rank 0; None of another library's checkpoint."""
    name = f"{RANK}.0"
    if checkpoint.manifest is None or name not in metadata.state_dict_metadata:
        return None
    info = metadata.storage_data[MetadataIndex(name)]
    path, span = checkpoint.path / info.relative_path, (info.offset, info.offset + info.length)
    with BlockReader(path, checkpoint.manifest.files[info.relative_path], [span]) as reader:
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
