"""Export and inspect checkpoints without a module or a process group, a few MB at a time."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint import safetensors
from onefold.checkpoint.agreement import as_checkpoint_error, damage
from onefold.checkpoint.archives import bytes_of, elements_of, strides_of
from onefold.checkpoint.checked_files import BlockReader
from onefold.checkpoint.directory import Draft, Found, find
from onefold.checkpoint.metadata import (
    COMPANION,
    GRAD,
    MASTER,
    MODEL,
    OPTIM,
    PARTIAL,
    Keys,
    Piece,
    SavedTensor,
)
from onefold.checkpoint.packed_weights import is_offset, packed_among
from onefold.checkpoint.pretrained import begin, write_small_files
from onefold.checkpoint.source import Source, first_names, open_source
from onefold.errors import CheckpointError
from onefold.layout.cut import spans_of

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
    saved = _open(Path(source))
    if saved.manifest is None:
        wanted = f"a checkpoint of onefold.save at {str(saved.path)!r}"
        hint = "torch.distributed.checkpoint.format_utils.dcp_to_torch_save converts others"
        raise CheckpointError(wanted, "one without manifest.json", hint=hint)
    weights = dict(_weights(saved, dtype))
    outputs = safetensors.plan_outputs(weights.values(), max_shard_nbytes)
    draft = Draft(Path(os.path.abspath(target)))
    draft.check()
    try:
        begin(draft, outputs)
        with safetensors.OffsetWriter(draft.folder, outputs) as writer:
            for name, pieces in groupby(_pieces(saved, weights), lambda entry: entry[1].place.file):
                own = list(pieces)
                with saved.reader(name, [piece.place.range for _, piece in own]) as reader:
                    for fqn, piece in own:
                        _copy_piece(reader, piece, saved.tensors[fqn], weights[fqn], writer)
            writer.finish()
        write_small_files(draft.folder, outputs, saved.manifest.config)
        draft.publish()
    except (OSError, CheckpointError) as error:
        draft.abandon()
        raise as_checkpoint_error(error) from error
    return Exported(saved.path, saved.manifest.step, outputs, len(weights))


def _open(directory: Path) -> Source:
    """Open the checkpoint `directory`, or the newest complete one in it."""
    try:
        return open_source(find(Path(os.path.abspath(directory)))[0])
    except OSError as error:
        raise as_checkpoint_error(error) from error


def _weights(
    source: Source, dtype: torch.dtype | None
) -> Iterator[tuple[str, safetensors.TensorEntry]]:
    """Yield every weight and buffer once, with the name in the checkpoint to read it from."""
    first = first_names(source)
    packed = packed_among(source.paths)
    for name, saved in source.tensors.items():
        if not name.startswith(f"{MODEL}.") or first[name] != name:
            continue
        if name in packed and is_offset(name):  # a note has it
            continue
        shown = name.removeprefix(f"{MODEL}.")
        casts = saved.dtype.is_floating_point and name not in packed
        wanted = dtype if dtype is not None and casts else saved.dtype
        master = f"{MASTER}.{shown}"
        is_wider = master in source.tensors and wanted.itemsize > saved.dtype.itemsize
        entry = safetensors.TensorEntry(shown, saved.shape, wanted)
        yield master if is_wider else name, entry


def _pieces(source: Source, names: Iterable[str]) -> list[tuple[str, Piece]]:
    """Return the pieces of tensors in file order, each with the tensor's name."""
    pieces = [(name, piece) for name in names for piece in source.tensors[name].pieces]
    return sorted(pieces, key=lambda entry: (entry[1].place.file, entry[1].place.start))


def _copy_piece(
    reader: BlockReader, piece: Piece, saved: SavedTensor, entry: safetensors.TensorEntry,
    writer: safetensors.OffsetWriter,
) -> None:  # fmt: skip
    start, strides = elements_of(reader, piece, saved.dtype)
    if strides != strides_of(piece.sizes):
        raise damage(f"elements of {entry.name!r} in order", f"strides {strides}")
    step = max(1, PART_NBYTES // saved.dtype.itemsize)
    for first, stop in spans_of((piece.offsets, piece.sizes), saved.shape):
        for at in range(first, stop, step):
            part = torch.empty(min(step, stop - at), dtype=saved.dtype)
            reader.read_into(start, bytes_of(part))
            start += part.nbytes
            writer.write(entry.name, at * entry.dtype.itemsize, bytes_of(part.to(entry.dtype)))


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
    source = _open(directory)
    manifest = source.manifest
    if verify and manifest is not None:
        for name, record in manifest.files.items():
            with source.reader(name, [(0, record.nbytes)]) as reader:
                reader.verify()
    tensors = [_row(source.paths[name], saved) for name, saved in source.tensors.items()]
    is_verified = verify and manifest is not None
    extra = source.rank_state(0).get("extra") if manifest is not None else None
    files = {p.name: p.stat().st_size for p in sorted(source.path.iterdir()) if p.is_file()}
    return Inspection(source.found, tensors, [*source.objects], extra, files, is_verified)


def _row(keys: Keys, saved: SavedTensor) -> InspectedRow:
    name, kind = _parameter_and_kind(keys)
    dtype = str(saved.dtype).removeprefix("torch.")
    nbytes = prod(saved.shape) * saved.dtype.itemsize
    return InspectedRow(name, kind, saved.shape, dtype, nbytes, len(saved.pieces))


def _parameter_and_kind(keys: Keys) -> tuple[str, str]:
    """Return the parameter that a tensor belongs to, and its kind."""
    if keys[:2] == (OPTIM, "state"):
        return str(keys[2]), ".".join(map(str, keys[3:]))
    if keys[0] == COMPANION and len(keys) > 2:
        return str(keys[2]), str(keys[1])
    kinds = {MODEL: "weight", MASTER: "master", GRAD: GRAD, PARTIAL: PARTIAL, OPTIM: OPTIM}
    name = ".".join(map(str, keys))
    kind, dot, rest = name.partition(".")
    return (rest, kinds[kind]) if dot and kind in kinds else (name, "weight")
