"""A checkpoint's weights as safetensors: piece by piece, on any machine, in little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from onefold.checkpoint.blocks import BlockReader
from onefold.checkpoint.contents import MASTER, MODEL
from onefold.checkpoint.directory import Draft, Found, find
from onefold.checkpoint.pretrained import write_small_files
from onefold.checkpoint.safetensors import (
    MAX_SHARD_NBYTES,
    OffsetWriter,
    Output,
    TensorEntry,
    plan_outputs,
)
from onefold.checkpoint.storage import bytes_of, chunk_of, data_offset, read_metadata
from onefold.checkpoint.together import as_checkpoint_error
from onefold.errors import CheckpointError, expected

PART_NBYTES = 8 << 20
"""So much of a piece is in memory at a time."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export has written."""

    source: Path
    step: int
    outputs: list[Output]
    num_tensors: int


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
) -> Exported:
    """Write the weights of a checkpoint as `AutoModel.from_pretrained` reads them.

    One process, no process group; every byte read passes its checksum. `dtype` casts floating-point
    weights, from masters where they are wider; None keeps the weights' own. Tied weights are
    written once, `config.json` if the checkpoint knows one.

    Raises: CheckpointError: nothing to export, damage, a target that exists, a full disk.
    """
    found = find(Path(os.path.abspath(source)))[0]
    if found.manifest is None:
        raise CheckpointError(
            expected(
                f"a checkpoint of onefold.save at {str(found.path)!r}",
                "one without manifest.json",
                hint="torch.distributed.checkpoint.format_utils.dcp_to_torch_save converts others",
            )
        )
    metadata = read_metadata(found.path, found.manifest)
    weights = dict(_weights(metadata, dtype))
    outputs = plan_outputs([weight.entry for weight in weights.values()], max_shard_nbytes)
    draft = Draft(Path(os.path.abspath(target)))
    draft.check()
    try:
        draft.begin()
        for output in outputs:
            output.create(draft.folder)
        _copy(found, metadata, weights, OffsetWriter(draft.folder, outputs))
        write_small_files(draft.folder, outputs, found.manifest.config)
        draft.publish()
    except (OSError, CheckpointError) as error:
        draft.abandon()
        raise as_checkpoint_error(error) from error
    return Exported(found.path, found.manifest.step, outputs, len(weights))


@dataclass(frozen=True, slots=True)
class _Weight:
    """One output tensor, and the name in the checkpoint that it comes from."""

    entry: TensorEntry
    source: str


def _weights(metadata: Metadata, dtype: torch.dtype | None) -> Iterator[tuple[str, _Weight]]:
    """Every weight and buffer, under the first of its names."""
    names = metadata.state_dict_metadata
    first = _first_names(metadata)
    for name, saved in names.items():
        if not name.startswith(f"{MODEL}.") or not isinstance(saved, TensorStorageMetadata):
            continue
        if first.get(name, name) != name:
            continue
        shown = name.removeprefix(f"{MODEL}.")
        own = saved.properties.dtype
        wanted = dtype if dtype is not None and own.is_floating_point else own
        master = f"{MASTER}.{shown}"
        is_wider = master in names and wanted.itemsize > own.itemsize
        entry = TensorEntry(shown, tuple(saved.size), wanted)
        yield shown, _Weight(entry, master if is_wider else name)


def _first_names(metadata: Metadata) -> dict[str, str]:
    """For each name the first that lies in the same place: tied weights lie there once."""
    by_place: dict[tuple[str, int], str] = {}
    return {
        index.fqn: by_place.setdefault((info.relative_path, info.offset), index.fqn)
        for index, info in metadata.storage_data.items()
    }


def _copy(
    found: Found, metadata: Metadata, weights: dict[str, _Weight], writer: OffsetWriter
) -> None:
    """Read pieces in the order in which they lie, and write each to its place."""
    assert found.manifest is not None, "refused before"
    by_source = {weight.source: weight for weight in weights.values()}
    pieces = [
        (info, index) for index, info in metadata.storage_data.items() if index.fqn in by_source
    ]
    readers: dict[str, BlockReader] = {}
    try:
        for info, index in sorted(pieces, key=lambda p: (p[0].relative_path, p[0].offset)):
            name = info.relative_path
            if name not in readers:
                for reader in readers.values():
                    reader.close()
                own = [
                    (i.offset, i.offset + i.length) for i, _ in pieces if i.relative_path == name
                ]
                record = found.manifest.files[name]
                readers = {name: BlockReader(found.path / name, record, own)}
            saved = metadata.state_dict_metadata[index.fqn]
            assert isinstance(saved, TensorStorageMetadata), "a weight is a tensor"
            chunk = chunk_of(saved, index)
            _copy_piece(readers[name], info, saved, chunk, by_source[index.fqn].entry, writer)
        writer.finish()
    finally:
        writer.close()
        for reader in readers.values():
            reader.close()


def _copy_piece(
    reader: BlockReader, info: Any, saved: TensorStorageMetadata, chunk: ChunkStorageMetadata,
    entry: TensorEntry, writer: OffsetWriter,
) -> None:  # fmt: skip
    numel = prod(chunk.sizes)
    if numel == 0:
        return
    source = saved.properties.dtype
    start = info.offset + data_offset(reader, info)
    step = max(1, PART_NBYTES // source.itemsize)
    for place, first, end in _stretches(tuple(chunk.offsets), tuple(chunk.sizes), saved.size):
        for begin in range(first, end, step):
            part = torch.empty(min(step, end - begin), dtype=source)
            reader.read_at(start + begin * source.itemsize, bytes_of(part))
            cast: Tensor = part.to(entry.dtype)
            target = place + begin - first
            writer.write(entry.name, target * entry.dtype.itemsize, bytes_of(cast))


def _stretches(
    offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """The contiguous parts of a box in a tensor of `shape`: where each starts in the tensor, and
    [start, stop) of its elements in the box.
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
